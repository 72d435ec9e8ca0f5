//! The error of the parsers.

use crate::procedure;

/// The fault of a header that the receiver cannot use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The message ends within the header.
    #[error("the header is truncated")]
    Truncated,
    /// rdma_vers is not [`VERSION`](crate::VERSION).
    #[error("RPC-over-RDMA version {0}")]
    Version(u32),
    /// rdma_proc is none of the five procedures.
    #[error("unknown procedure {0}")]
    Procedure(u32),
    /// The mark of an optional item is neither 0 (absent) nor 1 (present).
    #[error("an optional item is marked {0:#x}, not 0 or 1")]
    Flag(u32),
    /// The header has more than [`Limits::segments`](crate::Limits::segments).
    #[error("too many segments")]
    Segments,
    /// The Read chunks have more than [`Limits::read_bytes`](crate::Limits::read_bytes).
    #[error("Read chunks of {0} bytes and more")]
    ReadBytes(u64),
    /// The Position is no multiple of four, lies beyond the payload or within another item, or is
    /// zero although there is an inline payload.
    #[error("impossible Position {0}")]
    Position(u32),
    /// RDMA_NOMSG without a chunk that can contain the payload.
    #[error("RDMA_NOMSG without the payload's chunk")]
    NoPayload,
    /// The payload has another xid than the header, or is too short for an xid.
    #[error("xid {0:#010x} is not that of the payload")]
    Xid(u32),
    /// The msg_type of the payload is neither CALL nor REPLY.
    #[error("the payload is neither a call nor a reply")]
    Direction,
    /// The procedure is withdrawn: RFC 8166 forbids senders to use it.
    #[error("{}", if *.0 == procedure::MSGP { "RDMA_MSGP" } else { "RDMA_DONE" })]
    Withdrawn(u32),
    /// rdma_err is neither ERR_VERS nor ERR_CHUNK.
    #[error("unknown error code {0}")]
    ErrorCode(u32),
    /// A reply with a Read list (RFC 8166 §4.3.1).
    #[error("a reply with a Read list")]
    ReplyReads,
}
