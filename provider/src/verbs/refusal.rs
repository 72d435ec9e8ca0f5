//! The refusal of a list of work requests.

use std::ffi::c_int;

use rustix::io::Errno;

/// Posts none of a list of requests, and returns the error number.
///
/// # Safety
/// `bad` is null, or the program's variable.
#[cold]
pub(super) unsafe fn refuse<T>(first: *mut T, bad: *mut *mut T, errno: Errno) -> c_int {
    if !bad.is_null() {
        // SAFETY: the caller promises a variable of the program if it is not null, as here.
        unsafe { bad.write_unaligned(first) };
    }
    errno.raw_os_error()
}
