//! Actions for the transport.

use super::gather::Span;
use super::id::{CallId, RegionId, WorkId};
use crate::chunk::Segment;
use std::sync::Arc;

/// The access of the peer to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// RDMA Read: arguments and long calls.
    RemoteRead,
    /// RDMA Write: results and long replies.
    RemoteWrite,
}

/// The memory of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exposed<M> {
    /// The consumer's memory: its first `len` bytes.
    Memory(M, u32),
    /// A call that is too long for a Send.
    Bytes(Arc<[u8]>),
    /// New memory of so many bytes, for a long reply. It is the transport's;
    /// [`Message::Long`](super::Message::Long) names it.
    Fresh(u32),
}

/// An action for the transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<M> {
    /// Post so many receives, each of the bytes that the private data promised.
    Receive(usize),
    /// Give the peer access to memory, for this connection alone if that can be; answer with
    /// [`Connection::registered`](super::Connection::registered), or
    /// [`Connection::register_failed`](super::Connection::register_failed). Handles should not be
    /// guessable (RFC 8166 §8.1).
    Register {
        /// The name of the new region.
        region: RegionId,
        /// The memory.
        what: Exposed<M>,
        /// The access of the peer.
        access: Access,
    },
    /// Take the access away; answer with [`Connection::released`](super::Connection::released) when
    /// the peer can no longer touch the memory, or with
    /// [`Connection::release_failed`](super::Connection::release_failed).
    Release {
        /// The region.
        region: RegionId,
        /// The peer has invalidated this handle of it already, with its Send.
        invalidated: Option<u32>,
        /// It is [`Exposed::Fresh`] memory with a reply in it, which
        /// [`Message::Long`](super::Message::Long) will name. Other such memory can be freed once
        /// it is released.
        keep: bool,
    },
    /// Post a Send of these pieces; answer with
    /// [`Connection::completed`](super::Connection::completed).
    Send {
        /// The number of the work request.
        work: WorkId,
        /// The message.
        pieces: Vec<Span<M>>,
        /// Send with Invalidate of this handle of the peer's.
        invalidate: Option<u32>,
    },
    /// Post an RDMA Read; answer with [`Connection::completed`](super::Connection::completed) or
    /// [`Connection::failed`](super::Connection::failed).
    Read {
        /// The number of the work request.
        work: WorkId,
        /// The call whose item this is a part of. All of the item has `length` bytes, for which the
        /// transport provides memory.
        call: CallId,
        /// Item: index among the call's Read chunks.
        item: usize,
        /// Bytes of the whole item.
        length: u64,
        /// Where in the item the bytes go.
        at: u64,
        /// Where they are.
        remote: Segment,
    },
    /// Post an RDMA Write. The Send behind it completes it.
    Write {
        /// The bytes.
        pieces: Vec<Span<M>>,
        /// Where they go.
        remote: Segment,
    },
    /// End the connection; answer with
    /// [`Connection::disconnected`](super::Connection::disconnected).
    Close(Closing),
}

/// Why a connection is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closing {
    /// Access could not be taken away, so the connection must be (RFC 8166 §4.5.4).
    #[error("memory could not be invalidated")]
    Release,
    /// A reply could not be made: the requester is told so by this (RFC 8166 §4.5.4).
    #[error("a call was dropped")]
    Dropped,
    /// The peer calls beyond the credits it was granted, into receives that are for replies (RFC
    /// 8166 §3.3.1).
    #[error("calls beyond the credits granted")]
    Credits,
    /// The peer sends nonsense faster than it takes the answers.
    #[error("too many faulty messages")]
    Faults,
    /// The peer invalidated memory of a call other than the one it answered (RFC 8797 §4.1).
    #[error("the peer invalidated another call's memory")]
    ForeignInvalidation,
}
