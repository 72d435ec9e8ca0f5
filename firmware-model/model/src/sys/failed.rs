//! System calls without which there is no device.

use rustix::io::Errno;
use std::{fmt, io};

/// A system call that failed while a device was started. The [`io::Error`] of the start has it as
/// its cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailedCall {
    /// The call's name.
    pub call: &'static str,
    /// Why it failed.
    pub errno: Errno,
}

impl FailedCall {
    /// The failed call of an error that wraps one.
    pub fn of(error: &io::Error) -> Option<FailedCall> {
        error.get_ref()?.downcast_ref().copied()
    }

    /// The outcome of a call, with the call's name in the error.
    pub(crate) fn named<T>(call: &'static str, outcome: Result<T, Errno>) -> io::Result<T> {
        outcome.map_err(|errno| io::Error::new(errno.kind(), FailedCall { call, errno }))
    }
}

impl fmt::Display for FailedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.errno)
    }
}

impl std::error::Error for FailedCall {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_its_call() {
        let error = FailedCall::named::<()>("epoll_create1", Err(Errno::MFILE)).unwrap_err();
        let failed = FailedCall::of(&error).unwrap();
        assert_eq!((failed.call, failed.errno), ("epoll_create1", Errno::MFILE));
        assert!(error.to_string().starts_with("epoll_create1: "), "{error}");
        assert_eq!(FailedCall::of(&io::Error::from(Errno::MFILE)), None);
    }
}
