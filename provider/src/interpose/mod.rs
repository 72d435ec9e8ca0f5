//! The functions of libc, and two of libibverbs, that this plug-in defines in place of the
//! originals.
//!
//! They exist only here, so that none of urnic's own programs interposes itself. Each function
//! first checks, in a few nanoseconds and with no lock, allocation or system call, whether the path
//! or fd could belong to the plug-in. Nearly always it does not, and the next definition is called
//! with unchanged arguments.

// The test binary must not interpose itself.
#![cfg_attr(test, allow(dead_code))]

mod exec;
mod exported;
mod fds;
mod fork;
mod paths;
pub(crate) mod signals;

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use urnic_presence::Presence;
use urnic_presence::redirect::{PathBuffer, Target, is_ours};

use exported::exported;

use crate::first_search::first_search;
use crate::guard::{guarded, set_errno, uncancelled};
use crate::log::complaining;
use crate::real;

/// The number of descriptors that libibverbs has open at the same time while it reads the files of
/// a device: the list's, the device's folder, and a file. If one cannot be opened, libibverbs
/// reports that there is no such device.
const DESCRIPTORS_OF_A_LIST: usize = 3;

/// The error line if the check fails.
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

/// Cleared in a second copy of the plug-in, which leaves all calls to the first copy.
static ACTIVE: AtomicBool = AtomicBool::new(true);

/// Makes every function here pass its calls on.
pub(crate) fn deactivate() {
    ACTIVE.store(false, Ordering::Relaxed);
}

/// The result for the C caller of a function that this libc does not have.
fn missing<T>(answer: T) -> T {
    set_errno(Errno::NOSYS);
    answer
}

/// Closes an fd that a call of this module opened and will not return. No cancellation point: a
/// thread that is cancelled here would leave what the call holds.
///
/// # Safety
/// No other code has the fd.
unsafe fn discard(fd: c_int) {
    if let Some(close) = real::close() {
        // SAFETY: the caller promises that the fd is this call's own.
        uncancelled(|| unsafe { close(fd) });
    }
}

/// The real path in place of a path that may belong to the presence, in `buffer`.
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
        first_search();
        let presence = complaining("there is no RDMA device for this program", Presence::current)?;
        Ok(presence.redirect(path, buffer))
    });
    let found = found.ok().flatten()?;
    if found.1 == Target::DeviceScan {
        let _ = guarded(|| complaining(NO_LIST, list_can_be_read));
        let _ = guarded(crate::register::with_every_libibverbs);
    }
    Some(found)
}
