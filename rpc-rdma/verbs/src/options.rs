//! Options of clients and servers.

use crate::service::Service;
use crate::shares::Shares;
use std::sync::Arc;
use std::time::Duration;
use urnic_rpc_rdma::binding::Binding;
use urnic_rpc_rdma::{Limits, PrivateData, Profile};

/// Options of a client or server.
#[derive(Clone)]
pub struct Options {
    /// Credits: the calls at a time that a client requests, and that a server grants each client.
    pub credits: u32,
    /// Bytes of the longest message in each direction that goes without chunks, if the peer agrees:
    /// 1 to 256 KiB.
    pub inline: usize,
    /// The specification that receivers follow.
    pub profile: Profile,
    /// Limits of what one call can make a server hold.
    pub limits: Limits,
    /// Bindings of the programs, which determine the items that may move by chunk. There are none
    /// by default. A client sends all other data in the message. A server answers a call with
    /// another chunk with GARBAGE_ARGS.
    pub bindings: &'static [&'static (dyn Binding + Sync)],
    /// The service that answers backward calls, which a server makes to its client (RFC 8167). A
    /// client without a service accepts none. Backward calls have no chunks. If their program has a
    /// binding, the client accepts only the calls that the binding names.
    pub callbacks: Option<Arc<dyn Service>>,
    /// Credits of backward calls: the number that a client grants and a server requests.
    pub backward: u32,
    /// Time for which a client tries to connect before its calls fail.
    pub connect_timeout: Duration,
    /// Threads on which a server calls its service. A service that calls its client occupies one
    /// thread while it waits.
    pub threads: usize,
    /// Maximum connections of a server. For one more, the client with the most connections loses
    /// one: first connections without an answered call, then the connection without a message for
    /// the longest time.
    pub connections: usize,
    /// The shares of a server's clients in the memory of the pool. Without shares, each client may
    /// take all memory.
    pub shares: Option<Shares>,
    /// Bytes that are counted for the reply of a call while it is served. Calls with data in chunks
    /// have short replies, for which nothing is counted.
    pub reply_memory: u64,
    /// Time without calls after which a server ends a connection. `None`: the server never does so.
    pub idle: Option<Duration>,
    /// Time for which a client may take no message, answer no RDMA Read, or be connected without a
    /// call.
    pub stall: Duration,
    /// Whether a client opens its memory by windows on devices that have them. Otherwise it
    /// registers the memory of each call.
    pub windows: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            credits: 64,
            inline: 4096,
            profile: Profile::default(),
            limits: Limits::default(),
            bindings: &[],
            callbacks: None,
            backward: 8,
            connect_timeout: Duration::from_secs(60),
            threads: 4,
            connections: 256,
            shares: None,
            reply_memory: (1 << 20) + (64 << 10),
            idle: None,
            stall: Duration::from_secs(60),
            windows: true,
        }
    }
}

impl Options {
    /// [`Options::bindings`] in the form that the functions of the protocol crate take.
    pub(crate) fn all_bindings(&self) -> Vec<&'static dyn Binding> {
        self.bindings.iter().map(|binding| *binding as _).collect()
    }

    pub(crate) fn private_data(&self) -> PrivateData {
        let inline = (self.inline / 1024).clamp(1, 256) * 1024;
        PrivateData {
            remote_invalidation: false,
            send_size: inline,
            receive_size: inline,
        }
    }
}
