//! RPC-over-RDMA version one (RFC 8166): ONC RPC (RFC 5531) over an RDMA connection, with calls in
//! both directions (RFC 8167) and the private data of RFC 8797. [`Profile`] selects receivers of
//! draft-ietf-nfsv4-rfc5666bis-04.
//!
//! Each RPC message travels as one *Send*, which begins with a header (the Transport stream) and
//! goes on, mostly, with the RPC message itself (the Payload stream). Large items are left out of
//! the payload and named in the header by STag, length and offset, as *chunks* of the requester's
//! memory: the responder fetches arguments by RDMA Read and places results by RDMA Write.
//!
//! ```text
//! Send      header [payload]
//! header    xid vers credits proc …                                       [Header]
//!           RDMA_MSG, RDMA_NOMSG: Read list, Write list, Reply chunk       [ChunkLists]
//!           RDMA_ERROR: ERR_VERS low high, or ERR_CHUNK                    [ErrorBody]
//! payload   xid CALL|REPLY …, chunks' contents inserted at their Position [payload]
//! ```
//!
//! This crate does no I/O. Messages of a peer are parsed into values or refused with the reason
//! ([`Malformed`]). [`call`] and [`reply`] decide what a responder and a requester do with a
//! message: accept it, answer with an error, or discard it. No message causes a panic, or an
//! allocation beyond [`Limits`]. [`engine`] is one end of a connection: actions for a transport
//! come out, and completions go in.

#![forbid(unsafe_code)]

pub mod binding;
mod chunk;
pub mod engine;
mod header;
mod limits;
mod malformed;
pub mod payload;
mod private_data;
pub mod procedure;
pub mod rpc;
mod triage;
mod xdr;

pub use chunk::{ChunkLists, ReadChunk, ReadSegment, Segment, WriteChunk};
pub use header::{Body, ErrorBody, FIXED_LEN, Header, MIN_LEN, VERSION};
pub use limits::Limits;
pub use malformed::Malformed;
pub use private_data::{DEFAULT_INLINE, PrivateData};
pub use triage::{Call, Direction, Profile, Refusal, Reply, call, direction, refused, reply};
