//! Refused verbs: a warning for each place in the program, which names the argument at fault, and
//! the last refusal for `urnic stat` and the report.
//!
//! The verbs return a [`Refusal`], and [`from_c`](crate::from_c) passes it to [`reported`] when the
//! call ends. A queue that is full is no refusal: programs post until it is.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use urnic_driver::{Refusal, Refused};
use urnic_presence::fork::{OwnLock, is_child_without_device};

use crate::call_site::CallSite;

/// Most places that are stored; further ones have no warning.
const MOST: usize = 200;

/// Whether refusals are warnings.
static WARN: AtomicBool = AtomicBool::new(true);

/// The places with a refused call.
pub(crate) static PLACES: OwnLock<Places> = OwnLock::new();

/// Places with a refused call, in the order of their first one.
#[derive(Default)]
pub(crate) struct Places {
    all: Vec<Place>,
    last: Option<Last>,
}

/// The last refused call.
#[derive(Clone, Copy)]
enum Last {
    /// At the place with this index.
    At(usize),
    /// At a place that is not stored.
    NotStored(&'static str, Refusal),
}

struct Place {
    verb: &'static str,
    site: CallSite,
    /// The last refusal.
    refusal: Refusal,
    /// The functions of the program, once they are found.
    backtrace: Vec<String>,
    count: u64,
}

impl Place {
    fn refused(&self) -> Refused {
        Refused {
            backtrace: self.backtrace.clone(),
            count: self.count,
            ..refused(self.verb, &self.refusal)
        }
    }
}

impl Places {
    /// Counts a refused call. Returns the index of its place, if the place is a new one that is
    /// stored.
    fn add(&mut self, verb: &'static str, site: &CallSite, refusal: Refusal) -> Option<usize> {
        let index = self.all.len();
        let mut known = self.all.iter_mut().enumerate();
        let known = known.find(|(_, place)| place.verb == verb && place.site == *site);
        if let Some((index, place)) = known {
            place.count += 1;
            place.refusal = refusal;
            self.last = Some(Last::At(index));
            return None;
        }
        if index >= MOST {
            self.last = Some(Last::NotStored(verb, refusal));
            return None;
        }
        self.all.push(Place {
            verb,
            site: site.clone(),
            refusal,
            backtrace: Vec::new(),
            count: 1,
        });
        self.last = Some(Last::At(index));
        Some(index)
    }

    fn last(&self) -> Option<Refused> {
        match self.last? {
            Last::At(index) => self.all.get(index).map(Place::refused),
            Last::NotStored(verb, refusal) => Some(refused(verb, &refusal)),
        }
    }
}

/// Sets the option `refusals`.
pub(crate) fn start(warn: bool) {
    WARN.store(warn, Ordering::Relaxed);
    urnic_driver::set_last_refused(|| PLACES.lock().last());
}

/// All places with a refused call.
pub(crate) fn all() -> Vec<Refused> {
    PLACES.lock().all.iter().map(Place::refused).collect()
}

/// Reports that a verb, without its `ibv_`, is refused. Returns the error number for the program.
/// To be called without the lock of a queue: it may read debug information from files.
#[cold]
pub(crate) fn reported(verb: &'static str, refusal: Refusal) -> Errno {
    // Such a child may have inherited locks whose holders it has not: it walks no stack, reads no
    // debug information and writes no line.
    if !is_child_without_device() && !is_quiet(verb, &refusal) {
        report(verb, refusal);
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

/// A refused call, for the report and the snapshot.
fn refused(verb: &str, refusal: &Refusal) -> Refused {
    let errno = urnic_sys::errno::name(refusal.errno.raw_os_error());
    Refused {
        verb: format!("ibv_{verb}"),
        text: text(verb, refusal),
        errno: errno.unwrap_or("?").to_owned(),
        backtrace: Vec::new(),
        count: 1,
    }
}

fn report(verb: &'static str, refusal: Refusal) {
    let site = CallSite::here();
    let Some(index) = PLACES.lock().add(verb, &site, refusal) else {
        return;
    };
    // Other threads can report meanwhile.
    let frames = site.frames();
    if let Some(place) = PLACES.lock().all.get_mut(index) {
        place.backtrace = frames.of_program().to_vec();
    }
    let mut line = text(verb, &refusal);
    if !frames.of_program().is_empty() {
        line = format!("{line}; at {frames}");
    }
    match (WARN.load(Ordering::Relaxed), refusal.errno) {
        (false, _) => tracing::debug!("{line}"),
        // Libraries try memory of a GPU, or memory that cannot be written (UCX, Open MPI).
        (true, Errno::FAULT) => tracing::info!("{line}"),
        (true, _) => tracing::warn!("{line}"),
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

#[cfg(test)]
mod tests {
    use super::*;
    use urnic_driver::Reason;

    #[test]
    fn a_place_is_new_once_and_the_last_refusal_is_known_without_a_place() {
        let mut places = Places::default();
        let refusal = Reason::Null("pd").invalid();
        let site = |address| CallSite::of_addresses(vec![address]);
        for address in 0..MOST {
            assert_eq!(places.add("create_qp", &site(address), refusal), Some(address));
            assert_eq!(places.add("create_qp", &site(address), refusal), None);
        }
        assert_eq!(places.last().unwrap().count, 2);
        let refusal = Refusal::from(Errno::NOMEM);
        assert_eq!(places.add("create_cq", &site(MOST), refusal), None);
        let last = places.last().unwrap();
        assert_eq!(
            (&*last.verb, &*last.errno, last.count),
            ("ibv_create_cq", "ENOMEM", 1)
        );
        assert_eq!(places.all.len(), MOST);
    }
}
