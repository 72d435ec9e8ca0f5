//! Results of libibverbs and librdmacm as [`io::Result`]s.

use std::io;

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
