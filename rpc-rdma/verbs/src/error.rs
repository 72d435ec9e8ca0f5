//! Errors of clients and servers.

use rustix::io::Errno;
use std::io;
use urnic_rpc_rdma::engine::{CallError, Invalid};

/// An error of a client or server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A function of libibverbs or librdmacm failed, or there is no library or no device.
    #[error(transparent)]
    Verbs(#[from] io::Error),
    /// The server was unreachable for
    /// [`Options::connect_timeout`](crate::Options::connect_timeout).
    #[error("the server cannot be reached: {0}")]
    Unreachable(String),
    /// The client of a backward call disconnected. The client may connect again.
    #[error("the client's connection has ended")]
    Disconnected,
    /// The device of the listener was removed.
    #[error("the device was removed")]
    Removed,
    /// The call is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The call has no answer.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl Error {
    /// Whether the machine has no RDMA at all: no library, or no device.
    pub fn no_device(&self) -> bool {
        const NONE: [Errno; 4] = [Errno::NODEV, Errno::NOENT, Errno::NOSYS, Errno::OPNOTSUPP];
        matches!(self, Self::Verbs(error) if Errno::from_io_error(error).is_some_and(|errno| NONE.contains(&errno)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_not_a_missing_device() {
        let failed = |errno: Errno| Error::Verbs(errno.into());
        assert!(failed(Errno::NODEV).no_device() && failed(Errno::NOENT).no_device());
        assert!(!failed(Errno::ADDRINUSE).no_device() && !failed(Errno::ACCESS).no_device());
    }
}
