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
    let mut before = 0;
    // SAFETY: a local; the state is the calling thread's own.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut before) };
    let outcome = body();
    // SAFETY: a local, and the state that the thread had before.
    unsafe { pthread_setcancelstate(before, &mut before) };
    outcome
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

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: libc's own place for the calling thread's errno.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
}

/// Runs a verb that returns 0 or an errno.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    guarded(body).map_or_else(Errno::raw_os_error, |()| 0)
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
        let mut state = -1;
        assert_eq!(status(|| Ok(())), 0);
        // SAFETY: a local.
        unsafe { pthread_setcancelstate(0, &mut state) };
        assert_eq!(state, 0, "PTHREAD_CANCEL_ENABLE");
    }
}
