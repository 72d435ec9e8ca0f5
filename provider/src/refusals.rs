//! Refused verbs: a warning for each place in the program, which names the argument at fault, and
//! the last refusal for `urnic stat` and the report.
//!
//! The verbs return a [`Refusal`], and [`from_c`](crate::from_c) passes it to [`reported`] when the
//! call ends. A queue that is full is no refusal: programs post until it is.

use std::sync::atomic::{AtomicBool, Ordering};
use urnic_sync::Mutex;

use rustix::io::Errno;
use urnic_driver::{Refusal, Refused};

use crate::call_site::CallSite;

/// Most places that are stored; further ones have no warning.
const MOST: usize = 200;

/// Whether refusals are warnings.
static WARN: AtomicBool = AtomicBool::new(true);

/// The places with a refused call, in the order of their first one.
static PLACES: Mutex<Vec<Place>> = Mutex::new(Vec::new());

struct Place {
    verb: &'static str,
    site: CallSite,
    refused: Refused,
}

/// Sets the option `refusals`.
pub(crate) fn start(warn: bool) {
    WARN.store(warn, Ordering::Relaxed);
}

/// All places with a refused call.
pub(crate) fn all() -> Vec<Refused> {
    let places = PLACES.lock();
    places.iter().map(|place| place.refused.clone()).collect()
}

/// Reports that a verb, without its `ibv_`, is refused. Returns the error number for the program.
#[cold]
pub(crate) fn reported(verb: &'static str, refusal: Refusal) -> Errno {
    if !is_quiet(verb, &refusal) {
        report(verb, &refusal);
    }
    refusal.errno
}

/// The call, the argument at fault and the error number.
fn text(verb: &str, refusal: &Refusal) -> String {
    match (refusal.to, refusal.reason) {
        (Some(to), _) => format!("ibv_{verb} to {} refused: {refusal}", to.verbs_name()),
        (None, Some(_)) => format!("ibv_{verb}: {refusal}"),
        (None, None) => format!("ibv_{verb} refused: {refusal}"),
    }
}

fn report(verb: &'static str, refusal: &Refusal) {
    let site = CallSite::here();
    // In a forked child a thread of the parent may have held the lock.
    let Some(mut places) = PLACES.try_lock() else {
        return;
    };
    let mut known = places.iter_mut();
    if let Some(place) = known.find(|place| place.verb == verb && place.site == site) {
        place.refused.count += 1;
        place.refused.text = text(verb, refusal);
        urnic_driver::note_refused(place.refused.clone());
        return;
    }
    if places.len() >= MOST {
        return;
    }
    let frames = site.frames();
    let text = text(verb, refusal);
    let line = match frames.of_program() {
        [] => text.clone(),
        _ => format!("{text}; at {frames}"),
    };
    let errno = urnic_sys::errno::name(refusal.errno.raw_os_error());
    let refused = Refused {
        verb: format!("ibv_{verb}"),
        text,
        errno: errno.unwrap_or("?").to_owned(),
        backtrace: frames.of_program().to_vec(),
        count: 1,
    };
    urnic_driver::note_refused(refused.clone());
    places.push(Place { verb, site, refused });
    drop(places);
    match WARN.load(Ordering::Relaxed) {
        true => tracing::warn!("{line}"),
        false => tracing::debug!("{line}"),
    }
}

/// Whether programs cause this refusal in their ordinary course, so that nothing is said: they try
/// what a device supports, and at their end destroy objects of a parent process or of a lost
/// device.
fn is_quiet(verb: &str, refusal: &Refusal) -> bool {
    const ENDING: [&str; 5] = ["destroy_", "dealloc_", "dereg_", "free_", "unimport_"];
    match (refusal.reason, refusal.errno) {
        (Some(reason), _) => reason.is_probe(),
        (None, Errno::OPNOTSUPP | Errno::NOSYS) => true,
        (None, Errno::IO) => ENDING.iter().any(|prefix| verb.starts_with(prefix)),
        (None, _) => false,
    }
}
