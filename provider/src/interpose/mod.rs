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

use std::ffi::{CStr, c_int};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
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

/// An fd that a call of this module has opened just now, and that the program does not have yet.
struct NewFd(c_int);

impl NewFd {
    /// The fd that a function returned; `None` for a negative number, which is an error.
    ///
    /// # Safety
    /// The function has opened it, and no other code has it.
    unsafe fn of(answer: c_int) -> Option<NewFd> {
        (answer >= 0).then_some(NewFd(answer))
    }

    /// Closes the fd, which the call will not return. No cancellation point: a thread that is
    /// cancelled here would leave what the call holds.
    fn discard(self) {
        if let Some(close) = real::close.get() {
            uncancelled(|| close(self.0));
        }
    }

    /// Gives the fd to the program.
    fn give(self) -> c_int {
        self.0
    }
}

impl From<OwnedFd> for NewFd {
    fn from(fd: OwnedFd) -> NewFd {
        NewFd(fd.into_raw_fd())
    }
}

impl AsFd for NewFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the promise of this type.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

/// The real path in place of a path that may belong to the presence, in `buffer`.
fn redirect<'a>(path: &CStr, buffer: &'a mut PathBuffer) -> Option<(&'a CStr, Target)> {
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
