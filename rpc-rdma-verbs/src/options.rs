//! What clients and servers are made with, and what can go wrong.

use crate::service::Service;
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use urnic_rpc_rdma::binding::{Binding, Mount3, Nfs3};
use urnic_rpc_rdma::engine::{CallError, Invalid};
use urnic_rpc_rdma::{Limits, PrivateData, Profile};

/// What can be chosen.
#[derive(Clone)]
pub struct Options {
    /// Calls at a time: what a client asks for, and what a server grants each.
    pub credits: u32,
    /// Octets of the longest message in each direction that goes without chunks, if the peer agrees: 1 to 256 KiB.
    pub inline: usize,
    /// Whose rules.
    pub profile: Profile,
    /// What one call may make a server hold.
    pub limits: Limits,
    /// What may go by chunk. A client sends all else with the message; a server answers calls that let anything else go so with GARBAGE_ARGS.
    pub bindings: &'static [&'static (dyn Binding + Sync)],
    /// What answers the calls of a server to its client, backward ones (RFC 8167). A client without it takes none. They go without chunks, and of programs that have
    /// a binding none but those that it names.
    pub callbacks: Option<Arc<dyn Service>>,
    /// Backward calls at a time: what a client that takes any grants, and what a server asks for.
    pub backward: u32,
    /// How long a client does without a connection, trying to get one, before its calls fail.
    pub patience: Duration,
    /// Threads on which a server calls its service.
    pub threads: usize,
    /// Connections that a server has at a time. For one more, the one that was idle for longest is ended.
    pub connections: usize,
    /// Whether a client opens its memory by windows on devices that have them; else it registers what each call exposes, as on those that have none.
    pub windows: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            credits: 64,
            inline: 4096,
            profile: Profile::default(),
            limits: Limits::default(),
            bindings: &[&Nfs3, &Mount3],
            callbacks: None,
            backward: 8,
            patience: Duration::from_secs(60),
            threads: 4,
            connections: 256,
            windows: true,
        }
    }
}

impl Options {
    pub(crate) fn private_data(&self) -> PrivateData {
        let inline = (self.inline / 1024).clamp(1, 256) * 1024;
        PrivateData {
            remote_invalidation: false,
            send_size: inline,
            receive_size: inline,
        }
    }
}

/// Why something did not work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call of libibverbs or librdmacm failed; or there are no such libraries, or no device.
    #[error(transparent)]
    Verbs(#[from] io::Error),
    /// Nobody could be reached for as long as [`Options::patience`] says.
    #[error("the server cannot be reached: {0}")]
    Unreachable(String),
    /// The client that a server calls has gone, or its connection has: it may come back over another.
    #[error("the client's connection is gone")]
    Gone,
    /// The device that a server listened at is gone.
    #[error("the device is gone")]
    Removed,
    /// The call makes no sense.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The call has no answer.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl Error {
    /// Whether there is no RDMA here at all: no library, or no device.
    pub fn no_device(&self) -> bool {
        const NONE: [Errno; 4] = [Errno::NODEV, Errno::NOENT, Errno::NOSYS, Errno::OPNOTSUPP];
        matches!(self, Self::Verbs(error) if Errno::from_io_error(error).is_some_and(|errno| NONE.contains(&errno)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_taken_is_not_the_lack_of_a_device() {
        let failed = |errno: Errno| Error::Verbs(errno.into());
        assert!(failed(Errno::NODEV).no_device() && failed(Errno::NOENT).no_device());
        assert!(!failed(Errno::ADDRINUSE).no_device() && !failed(Errno::ACCESS).no_device());
    }
}
