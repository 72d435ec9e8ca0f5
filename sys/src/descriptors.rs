//! Descriptors that the caller knows only by their number.

use std::os::fd::{BorrowedFd, RawFd};

use rustix::fs::{Stat, fstat};
use rustix::io::{Errno, fcntl_getfd};

/// What is open under a number. Async-signal-safe.
///
/// # Errors
/// `EBADF` if nothing is; those of fstat(2).
pub fn status(number: RawFd) -> Result<Stat, Errno> {
    queried(number, |descriptor| fstat(descriptor))
}

/// Whether something is open under a number. Async-signal-safe.
pub fn is_open(number: RawFd) -> bool {
    queried(number, |descriptor| fcntl_getfd(descriptor)).is_ok()
}

/// Passes a number to a system call that only asks, and fails if nothing is open under it.
fn queried<T>(number: RawFd, query: impl FnOnce(BorrowedFd<'_>) -> Result<T, Errno>) -> Result<T, Errno> {
    if number < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: not -1; the number is borrowed for one query, which any number may be given.
    query(unsafe { BorrowedFd::borrow_raw(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn an_open_number_has_a_status() {
        let (end, _other) = rustix::pipe::pipe().expect("a pipe");
        assert!(is_open(end.as_raw_fd()) && status(end.as_raw_fd()).is_ok());
        for number in [-1, i32::MAX] {
            assert!(!is_open(number));
            assert_eq!(status(number).err(), Some(Errno::BADF));
        }
    }
}
