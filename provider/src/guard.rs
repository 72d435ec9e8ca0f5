//! The boundary between C and the plug-in: panics and cancellation do not cross it.
//!
//! A panic becomes a line in the log and an errno. Thread cancellation is disabled: dropping a file
//! descriptor is a cancellation point, and a forced unwinding that reaches a destructor of the
//! plug-in aborts the program.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// Runs `body`, and turns a panic into an error.
///
/// # Errors
/// The errors of `body`; `EIO` for a panic.
pub(crate) fn guarded<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    uncancelled(|| {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
            complain();
            Err(Errno::IO)
        })
    })
}

/// Runs `body`, which does not panic, with thread cancellation disabled: for calls of libc while
/// there is something to drop.
pub(crate) fn uncancelled<T>(body: impl FnOnce() -> T) -> T {
    let before = set_cancellation(PTHREAD_CANCEL_DISABLE);
    let outcome = body();
    set_cancellation(before);
    outcome
}

/// Sets the calling thread's cancellation state, and returns the one before.
fn set_cancellation(state: c_int) -> c_int {
    let mut before = 0;
    // SAFETY: a local; the state is the calling thread's own.
    unsafe { pthread_setcancelstate(state, &mut before) };
    before
}

/// Lets the device work on this thread, on the data path: has no cost unless it panics.
#[inline]
pub(crate) fn contained(body: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        complain();
    }
}

#[cold]
fn complain() {
    let _ = catch_unwind(|| tracing::error!("urnic failed inside: please report this, with the lines above"));
}

/// The calling thread's `errno`; 0 if there was no error.
pub(crate) fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Sets the calling thread's `errno` to a value that [`errno`] has returned.
pub(crate) fn restore_errno(errno: c_int) {
    // SAFETY: libc's own place for the calling thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(errno: Errno) {
    restore_errno(errno.raw_os_error());
}

/// Runs a verb that returns 0 or an errno. An error is in `errno`, too, as after a system call that
/// failed: programs print either.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    match guarded(body) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            errno.raw_os_error()
        }
    }
}

/// Runs a verb that returns an object, which the program owns until it destroys it; or null, with
/// `errno` set.
pub(crate) fn pointer<T>(body: impl FnOnce() -> Result<Box<T>, Errno>) -> *mut T {
    guarded(body).map_or_else(
        |errno| {
            set_errno(errno);
            std::ptr::null_mut()
        },
        Box::into_raw,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_errno() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        assert_eq!(status(|| panic!("on purpose")), libc::EIO);
        assert!(pointer::<u8>(|| panic!("on purpose")).is_null());
        std::panic::set_hook(hook);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn cancellation_comes_back_as_it_was() {
        assert_eq!(status(|| Ok(())), 0);
        assert_eq!(set_cancellation(0), 0, "PTHREAD_CANCEL_ENABLE");
    }
}
