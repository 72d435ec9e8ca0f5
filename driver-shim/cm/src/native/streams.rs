//! The device's streams, as native connections use them.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;

use super::address::{Ends, Place};
use crate::carrier::Carrier;
use crate::mpa_startup::{Negotiated, Time};

/// The device's stream commands ([`StreamOwner::received`](crate::carrier::StreamOwner::received)
/// follows a receive), and what else the engine needs of the world.
pub trait Streams: Carrier {
    /// Listens at an address, port 0 for any; returns listener and port. An unspecified address
    /// means all, IPv4 and IPv6.
    fn listen(&mut self, local: SocketAddr) -> Result<(u32, u16), Errno>;
    /// Begins a connection from this address, or from one that the host chooses;
    /// [`StreamOwner::connected`](crate::carrier::StreamOwner::connected) follows.
    fn connect(&mut self, remote: SocketAddr, local: Option<SocketAddr>) -> Result<u32, Errno>;
    /// Both ends of a connected stream.
    fn ends(&mut self, sid: u32) -> Result<Ends, Errno>;
    /// Whether an address is one of this host.
    fn is_own(&mut self, place: Place) -> bool;
    /// Hands a stream to a queue pair; without one the queue pair is its own peer.
    fn attach(&mut self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno>;
    /// Whether sends were posted to the queue pair that wait for its connection.
    fn is_waiting(&mut self, qid: u32) -> bool;
}

/// How a queue pair is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    /// Device number of the queue pair.
    pub qid: u32,
    /// What start-up came to; none for a loop.
    pub negotiated: Option<Negotiated>,
    /// Inbound Reads.
    pub ird: u8,
    /// Outbound Reads.
    pub ord: u8,
    /// How long a Send of the peer may find no receive posted; `None` = for ever.
    pub rnr_timeout: Option<Duration>,
}

/// The time and the device during a call of the engine.
pub struct World<'a> {
    /// The time.
    pub now: Time,
    /// The device's streams.
    pub streams: &'a mut dyn Streams,
}
