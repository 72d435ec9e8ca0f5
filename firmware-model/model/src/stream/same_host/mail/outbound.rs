//! The sender's end of a ring of datagrams.

use super::super::bell::{PeerBell, Slot};
use super::super::direction::Direction;
use super::super::local_socket::LocalSocket;
use super::super::ring::{Receiver, Sender};
use super::packet::{Gone, Header};
use super::share::Share;
use crate::host::{Piece, SharedMemory};
use crate::stream::datagram::Outgoing;
use rustix::process::{Pid, getpid};
use std::sync::Arc;
use urnic_device::stream::octets_of;
use zerocopy::IntoBytes;

/// Datagrams between two looks whether the receiver is still there.
const CHECK: u32 = 64;

/// A ring to another port.
#[derive(Debug)]
pub(super) struct Outbound {
    pub(super) sender: Sender,
    pub(super) memory: Arc<SharedMemory>,
    /// Datagrams that went by UDP since the offer.
    pub(super) by_udp: u32,
    /// Has no data; it shows the end of the receiver.
    pub(super) socket: LocalSocket,
    pub(super) bell: Arc<PeerBell>,
    pub(super) slot: u32,
    /// Datagrams go by UDP, because the ring was full.
    pub(super) overflowed: bool,
    pub(super) count: u32,
    /// The process that has the port. A forked child has a copy, which is not its own.
    pub(super) owner: Pid,
    /// By it the device looks at intervals whether the receiver is still there.
    pub(super) _watch: Slot,
    /// Given back with it.
    pub(super) _share: Share,
}

impl Drop for Outbound {
    fn drop(&mut self) {
        if getpid() == self.owner {
            self.sender.leave();
        }
    }
}

impl Outbound {
    /// Puts a packet into the ring; `false`: it is to go by UDP.
    pub(super) fn send(&mut self, packet: &Outgoing, bytes: &[u8]) -> Result<bool, Gone> {
        self.count = self.count.wrapping_add(1);
        let looks = self.count.is_multiple_of(CHECK) || self.overflowed;
        if self.is_left() || (looks && self.socket.is_hung_up()) {
            return Err(Gone);
        }
        if self.overflowed && !self.sender.is_drained().map_err(|_| Gone)? {
            self.by_udp = self.by_udp.wrapping_add(1);
            return Ok(false);
        }
        let header = Header {
            len: bytes.len() as u32,
            by_udp: self.by_udp,
            source: octets_of(packet.source),
            destination: octets_of(packet.destination.ip()),
        };
        let pieces = [Piece::of(header.as_bytes()), Piece::of(bytes)];
        self.overflowed = !self.sender.send_whole(&pieces).map_err(|_| Gone)?;
        if self.overflowed {
            self.by_udp = self.by_udp.wrapping_add(1);
            return Ok(false);
        }
        self.bell.ring(self.slot);
        Ok(true)
    }

    /// Whether the receiver has closed its port.
    fn is_left(&self) -> bool {
        Receiver::is_marked_left(&self.memory, Direction::FromResponder)
    }
}
