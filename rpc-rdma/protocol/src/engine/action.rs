//! Actions for the transport.

use super::gather::Span;
use super::id::{CallId, RegionId, WorkId};
use crate::chunk::Segment;
use std::sync::Arc;

/// The access of the peer to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// RDMA Read, for arguments and long calls.
    RemoteRead,
    /// RDMA Write, for results and long replies.
    RemoteWrite,
}

/// The memory of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exposed<M> {
    /// The first `len` bytes of the consumer's memory.
    Memory(M, u32),
    /// A call that is too long for a Send.
    Bytes(Arc<[u8]>),
    /// New memory of this number of bytes for a long reply. The transport provides it.
    /// [`Message::Long`](super::Message::Long) names it.
    Fresh(u32),
}

/// An action for the transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<M> {
    /// Post this number of receives. Each receive holds the number of bytes that the private data
    /// promised.
    Receive(usize),
    /// Give the peer access to memory, only for this connection if possible. The transport answers
    /// with [`Connection::registered`](super::Connection::registered) or
    /// [`Connection::register_failed`](super::Connection::register_failed). Handles should not be
    /// guessable (RFC 8166 §8.1).
    Register {
        /// The id of the new region.
        region: RegionId,
        /// The memory.
        what: Exposed<M>,
        /// The access of the peer.
        access: Access,
    },
    /// Revoke the access. When the peer can no longer access the memory, the transport answers with
    /// [`Connection::released`](super::Connection::released). If it fails, it answers with
    /// [`Connection::release_failed`](super::Connection::release_failed).
    Release {
        /// The region.
        region: RegionId,
        /// The handle of the region that the peer has already invalidated by its Send.
        invalidated: Option<u32>,
        /// Whether to keep [`Exposed::Fresh`] memory with a reply, which
        /// [`Message::Long`](super::Message::Long) will name. Other such memory can be freed after
        /// the release.
        keep: bool,
    },
    /// Post a Send of these pieces. The transport answers with
    /// [`Connection::completed`](super::Connection::completed).
    Send {
        /// The id of the work request.
        work: WorkId,
        /// The message.
        pieces: Vec<Span<M>>,
        /// The peer's handle that a Send with Invalidate invalidates.
        invalidate: Option<u32>,
    },
    /// Post an RDMA Read. The transport answers with
    /// [`Connection::completed`](super::Connection::completed) or
    /// [`Connection::failed`](super::Connection::failed).
    Read {
        /// The id of the work request.
        work: WorkId,
        /// The call whose item this Read fetches, in whole or in part. The transport provides
        /// memory for the whole item, which has `length` bytes.
        call: CallId,
        /// Index of the item among the call's Read chunks.
        item: usize,
        /// Bytes of the whole item.
        length: u64,
        /// Offset in the item at which the bytes are placed.
        at: u64,
        /// The peer's memory that is read.
        remote: Segment,
    },
    /// Post an RDMA Write. The completion of the Send after it covers the Write.
    Write {
        /// The bytes.
        pieces: Vec<Span<M>>,
        /// The peer's memory that is written.
        remote: Segment,
    },
    /// End the connection. The transport answers with
    /// [`Connection::disconnected`](super::Connection::disconnected).
    Close(Closing),
}

/// The reason why this end ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closing {
    /// The peer's access could not be revoked, so the connection must end (RFC 8166 §4.5.4).
    #[error("memory could not be invalidated")]
    Release,
    /// The consumer dropped a call. The end of the connection reports this to the requester (RFC
    /// 8166 §4.5.4).
    #[error("a call was dropped")]
    Dropped,
    /// The peer makes more calls than it was granted credits, and uses receives that are for
    /// replies (RFC 8166 §3.3.1).
    #[error("calls beyond the credits granted")]
    Credits,
    /// The peer sends invalid messages faster than it receives the answers.
    #[error("too many faulty messages")]
    Faults,
    /// The peer invalidated memory of a call other than the one it answered (RFC 8797 §4.1).
    #[error("the peer invalidated another call's memory")]
    ForeignInvalidation,
}
