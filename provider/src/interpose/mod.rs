//! The libc functions that this plug-in defines in the program's stead.
//!
//! They exist only here, so that none of our own programs interposes itself. Each one first asks,
//! in a few nanoseconds and with no lock, allocation or system call, whether the path or fd could
//! be ours; nearly always it is not, and the next definition is called with the arguments as they
//! came.

// The test binary must not interpose itself.
#![cfg_attr(test, allow(dead_code))]

mod fds;
mod paths;
pub(crate) mod signals;

use std::ffi::{CStr, c_char};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use urnic_presence::Presence;
use urnic_presence::redirect::{PathBuffer, Target, is_ours};

use crate::first_look::first_look;
use crate::guard::{guarded, set_errno};
use crate::log::complaining;

/// How many descriptors libibverbs has open at a time while it reads the files of a device: the
/// list's, the device's folder, and a file. If one cannot be opened, it says that there is no such
/// device.
const DESCRIPTORS_OF_A_LIST: usize = 3;

/// The error line if it fails.
const NO_LIST: &str = "libibverbs cannot read the list of devices";

/// Whether the process can open what libibverbs opens to read the list.
fn list_can_be_read() -> Result<(), Errno> {
    let mut opened = [const { None::<OwnedFd> }; DESCRIPTORS_OF_A_LIST];
    for place in &mut opened {
        *place = Some(rustix::fs::open(
            "/",
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )?);
    }
    Ok(())
}

/// Cleared in a second copy of the plug-in, which leaves everything to the first.
static ACTIVE: AtomicBool = AtomicBool::new(true);

/// Makes every function here pass straight on.
pub(crate) fn stand_aside() {
    ACTIVE.store(false, Ordering::Relaxed);
}

/// What the C caller gets when it reaches a function that this libc does not have.
fn missing<T>(answer: T) -> T {
    set_errno(Errno::NOSYS);
    answer
}

/// The real path behind one that may be ours, in `buffer`.
///
/// # Safety
/// `path` is a C string.
unsafe fn redirect(path: *const c_char, buffer: &mut PathBuffer) -> Option<(&CStr, Target)> {
    // SAFETY: the caller promises a C string.
    let path = unsafe { CStr::from_ptr(path) };
    if !is_ours(path) || !ACTIVE.load(Ordering::Relaxed) {
        return None;
    }
    let found = guarded(|| {
        first_look();
        let presence = complaining("there is no urnic0 for this program", Presence::current)?;
        Ok(presence.redirect(path, buffer))
    });
    let found = found.ok().flatten()?;
    if found.1 == Target::DeviceScan {
        let _ = guarded(|| complaining(NO_LIST, list_can_be_read));
        let _ = guarded(crate::register::with_every_libibverbs);
    }
    Some(found)
}
