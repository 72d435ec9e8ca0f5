//! The error of the parsers.

use crate::procedure;

/// The fault of a header that the receiver cannot use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It ends in the middle.
    #[error("the header is truncated")]
    Truncated,
    /// rdma_vers is not [`VERSION`](crate::VERSION).
    #[error("RPC-over-RDMA version {0}")]
    Version(u32),
    /// rdma_proc is none of the five.
    #[error("unknown procedure {0}")]
    Procedure(u32),
    /// An optional item is neither there nor absent.
    #[error("an optional item is marked {0:#x}, not 0 or 1")]
    Flag(u32),
    /// More than [`Limits::segments`](crate::Limits::segments).
    #[error("too many segments")]
    Segments,
    /// More than [`Limits::read_bytes`](crate::Limits::read_bytes).
    #[error("Read chunks of {0} bytes and more")]
    ReadBytes(u64),
    /// A Position that is no multiple of four, lies behind the payload or within another item, or
    /// is zero beside an inline payload.
    #[error("impossible Position {0}")]
    Position(u32),
    /// RDMA_NOMSG, and no chunk that the payload could be in.
    #[error("RDMA_NOMSG without the payload's chunk")]
    NoPayload,
    /// The payload belongs to another transaction, or is too short to tell.
    #[error("xid {0:#010x} is not that of the payload")]
    Xid(u32),
    /// The payload is neither CALL nor REPLY.
    #[error("the payload is neither a call nor a reply")]
    Direction,
    /// A procedure that is never sent.
    #[error("{}", if *.0 == procedure::MSGP { "RDMA_MSGP" } else { "RDMA_DONE" })]
    Withdrawn(u32),
    /// rdma_err is neither ERR_VERS nor ERR_CHUNK.
    #[error("unknown error code {0}")]
    ErrorCode(u32),
    /// A reply with a Read list (RFC 8166 §4.3.1).
    #[error("a reply with a Read list")]
    ReplyReads,
}
