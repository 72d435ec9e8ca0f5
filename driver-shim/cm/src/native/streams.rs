//! The device's streams, as native connections use them.

use std::net::SocketAddr;

use rustix::io::Errno;

use super::address::{Endpoints, HostAddress};
use crate::carrier::{Attachment, Carrier};
use crate::mpa_startup::Time;
use urnic_config::Llp;

/// The device's stream commands ([`StreamOwner::received`](crate::carrier::StreamOwner::received)
/// is called after a receive), and the other queries of the engine.
pub trait Streams: Carrier {
    /// Listens over a lower layer at an address (port 0: any port); returns listener and port. An
    /// unspecified address means all addresses, IPv4 and IPv6.
    fn listen(&mut self, llp: Llp, local: SocketAddr) -> Result<(u32, u16), Errno>;
    /// Stops listening.
    fn unlisten(&mut self, lid: u32);
    /// Begins a connection over a lower layer, from this address, or from an address that the host
    /// chooses; [`StreamOwner::connected`](crate::carrier::StreamOwner::connected) reports the
    /// result.
    fn connect(&mut self, llp: Llp, remote: SocketAddr, local: Option<SocketAddr>) -> Result<u32, Errno>;
    /// The addresses of both ends of a connected stream.
    fn ends(&mut self, sid: u32) -> Result<Endpoints, Errno>;
    /// Whether an address belongs to this host.
    fn is_own(&mut self, address: HostAddress) -> bool;
    /// Attaches a stream to a queue pair; without a stream the queue pair is its own peer.
    fn attach(&mut self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno>;
    /// Since when posted sends of the queue pair wait for its connection; `None`: no send waits.
    fn waiting_since(&mut self, qid: u32) -> Option<Time>;
    /// Whether the program seems to be doing something else since it brought the queue pair to RTR.
    fn has_moved_on(&mut self, qid: u32) -> bool;
}

/// The time and the device during a call of the engine.
pub struct World<'a> {
    /// The current time.
    pub now: Time,
    /// The device's streams.
    pub streams: &'a mut dyn Streams,
}
