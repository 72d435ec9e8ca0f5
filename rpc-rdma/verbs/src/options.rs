//! What clients and servers are made with.

use crate::service::Service;
use crate::shares::Shares;
use std::sync::Arc;
use std::time::Duration;
use urnic_rpc_rdma::binding::Binding;
use urnic_rpc_rdma::{Limits, PrivateData, Profile};

/// What can be chosen.
#[derive(Clone)]
pub struct Options {
    /// Calls at a time: what a client asks for, and what a server grants each.
    pub credits: u32,
    /// Bytes of the longest message in each direction that goes without chunks, if the peer agrees: 1 to 256 KiB.
    pub inline: usize,
    /// Whose rules.
    pub profile: Profile,
    /// What one call may make a server hold.
    pub limits: Limits,
    /// Bindings of the programs: which items may move by chunk; none by default. A client sends all other data in
    /// the message. A server answers a call with another chunk with GARBAGE_ARGS.
    pub bindings: &'static [&'static (dyn Binding + Sync)],
    /// What answers the calls of a server to its client, backward ones (RFC 8167). A client without it takes none. They go without chunks, and of programs that have
    /// a binding none but those that it names.
    pub callbacks: Option<Arc<dyn Service>>,
    /// Backward calls at a time: what a client that takes any grants, and what a server asks for.
    pub backward: u32,
    /// How long a client does without a connection, trying to get one, before its calls fail.
    pub patience: Duration,
    /// Threads on which a server calls its service; a call of a service's to its client takes one while it waits.
    pub threads: usize,
    /// Connections that a server has at a time. For one more, one of the client that has most is ended: first those of which no call was answered, then
    /// the one that was silent for longest.
    pub connections: usize,
    /// What a server's clients share of the memory of the pool; without it they have as much as there is.
    pub shares: Option<Shares>,
    /// Bytes that a reply may need, which are counted for a call while it is served. What comes with data by chunk has short replies, and counts for
    /// nothing.
    pub reply_memory: u64,
    /// How long a connection to a server may be without calls; `None` is for ever.
    pub idle: Option<Duration>,
    /// How long a client may take nothing of what its server sends it, answer none of its RDMA Reads, or be connected without a call.
    pub stall: Duration,
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
            bindings: &[],
            callbacks: None,
            backward: 8,
            patience: Duration::from_secs(60),
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
    /// [`Options::bindings`], as the codec's functions take them.
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
