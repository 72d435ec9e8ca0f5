//! Results of libibverbs and librdmacm as [`io::Result`]s.

use std::io;
use std::ptr::NonNull;

/// The error of a function that returns -1 and sets errno.
pub(super) fn done(result: i32) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The error of a function that returns an errno.
pub(super) fn returned(result: i32) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(result))
    }
}

/// The object that a function returned. The function returns null and sets errno if it fails.
pub(super) fn made<T>(object: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(object).ok_or_else(io::Error::last_os_error)
}
