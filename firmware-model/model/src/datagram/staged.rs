//! Packets that wait for the sockets, and their requests.

use crate::llp::buffers::Buffer;
use crate::queues::SendWqe;
use crate::stream::datagram::Outgoing;

/// The request of a packet.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) wqe: SendWqe,
    /// Bytes of payload.
    pub(super) len: usize,
    /// The socket that sends the packet; `None` if it is dropped.
    pub(super) socket: Option<usize>,
}

/// Packets that wait for the sockets.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// Present while packets wait.
    pub(super) buffer: Option<Buffer>,
    pub(super) packets: Vec<Packet>,
    /// The packets themselves, by the same index.
    pub(super) outgoing: Vec<Outgoing>,
}
