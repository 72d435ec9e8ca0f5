//! The libc functions that this plug-in defines in the program's stead.
//!
//! They exist only here, so that none of our own programs interposes itself. Each one first asks, in a few nanoseconds and with no
//! lock, allocation or system call, whether the path or fd could be ours; nearly always it is not, and the next definition is
//! called with the arguments as they came.

// The test binary must not interpose itself.
#![cfg_attr(test, allow(dead_code))]

mod fds;
mod paths;

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use urnic_driver_shim::presence::Presence;
use urnic_driver_shim::presence::redirect::{PathBuffer, Target, is_ours};

use crate::first_look::first_look;
use crate::guard::{guarded, set_errno};

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
    // SAFETY: as promised by the caller.
    let path = unsafe { CStr::from_ptr(path) };
    if !is_ours(path) || !ACTIVE.load(Ordering::Relaxed) {
        return None;
    }
    let found = guarded(|| {
        first_look();
        Ok(Presence::current()?.redirect(path, buffer))
    });
    let found = found.ok().flatten()?;
    if found.1 == Target::DeviceScan {
        let _ = guarded(crate::register::with_every_libibverbs);
    }
    Some(found)
}
