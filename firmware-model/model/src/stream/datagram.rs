//! UDP ports, which queue pairs of kind UD have instead of streams.

pub use crate::sys::datagrams::{
    BATCH, Incoming, LONG_ROOM, MAX_PAYLOAD, MAX_SEGMENTS, Outgoing, PACKET_ROOM, Refused, SEGMENTS_ROOM,
};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};

/// How a UDP port is bound.
#[derive(Debug, Clone, Copy, Default)]
pub struct DatagramOptions {
    /// Others may have the same port, for multicast groups.
    pub shared: bool,
    /// An unspecified IPv6 address does not mean those of IPv4.
    pub ipv6_only: bool,
    /// [`DatagramSocket::refused`] has the packets that did not arrive.
    pub reports_refused: bool,
    /// Packets to this host go by UDP, too, and not through memory.
    pub by_udp: bool,
    /// The port receives the packets of each multicast group that any socket of the host has
    /// joined, if it has all addresses.
    pub all_groups: bool,
    /// Packets of any length, [`LONG_ROOM`] for each: the system sends one in fragments if it is
    /// longer than the path permits.
    pub long_packets: bool,
    /// Other processes of the user may have the same port (`SO_REUSEPORT`). The system gives each
    /// flow to one of their sockets.
    pub shared_by_user: bool,
    /// The port takes packets from this address only, and before the sockets that take any.
    pub peer: Option<SocketAddr>,
    /// Packets that arrive are dropped.
    pub only_sends: bool,
    /// Packets of one flow arrive together, in messages of up to [`LONG_ROOM`] bytes, where the
    /// system can.
    pub merged: bool,
}

impl DatagramOptions {
    /// An exclusive port.
    pub const EXCLUSIVE: DatagramOptions = DatagramOptions {
        shared: false,
        ipv6_only: false,
        reports_refused: false,
        by_udp: false,
        long_packets: false,
        all_groups: false,
        shared_by_user: false,
        peer: None,
        only_sends: false,
        merged: false,
    };
}

/// A UDP port.
pub trait DatagramSocket: Send + Debug {
    /// Passes packets to the network, in order; returns how many the network took.
    ///
    /// # Errors
    /// The error of the first packet, if the network did not take it: `EAGAIN` when there is no
    /// room now.
    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno>;

    /// Whether packets may have segments: each is sent as it is then, and none gets lost or moves
    /// by itself. A system that cannot divide packets refuses them with an error.
    fn divides(&self) -> bool {
        false
    }

    /// Bytes for each message that arrives: a packet, or several that the system has merged.
    fn room(&self) -> usize {
        PACKET_ROOM
    }

    /// Takes messages that arrived into `buffer`, at most [`BATCH`] and as many as have
    /// [room](Self::room) there; adds their packets to `packets`. Returns whether there were as
    /// many.
    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool;

    /// Whether another call of [`receive`](Self::receive) may find more, though the last one found
    /// less than had room.
    fn has_more(&mut self) -> bool {
        false
    }

    /// Packets since the last call that went through memory to a port on this host.
    fn direct(&mut self) -> u64 {
        0
    }

    /// Assigns the packets that arrive to this queue pair.
    fn bind(&mut self, qid: u32) {
        let _ = qid;
    }

    /// Drops the state of local peers that have ended.
    fn forget_peers(&mut self) {}

    /// Takes a packet that was sent and did not arrive, if the network reported it, and its first
    /// bytes into `buffer`.
    fn refused(&mut self, buffer: &mut [u8]) -> Option<Refused>;

    /// Whether [`refused`](DatagramSocket::refused) has such packets.
    fn reports_refused(&self) -> bool;

    /// Packets that arrived since the last call and for which the port's buffer had no room.
    fn dropped(&mut self) -> u32;

    /// Receives the packets to a group on the network of `interface`, an own address, as well.
    fn join(&mut self, group: IpAddr, interface: IpAddr, scope: u32) -> Result<(), Errno>;

    /// The address to which the port is bound.
    fn local(&self) -> SocketAddr;

    /// The descriptor to poll for readiness, as in
    /// [`Stream::descriptor`](super::Stream::descriptor).
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}
