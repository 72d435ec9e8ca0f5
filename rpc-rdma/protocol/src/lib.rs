//! RPC-over-RDMA version one (RFC 8166): ONC RPC (RFC 5531) over an RDMA connection, with calls in
//! both directions (RFC 8167) and the private data of RFC 8797. [`Profile`] selects receivers of
//! draft-ietf-nfsv4-rfc5666bis-04.
//!
//! Each RPC message travels as one *Send*. The Send begins with a header (the Transport stream),
//! and the RPC message (the Payload stream) usually follows. The payload leaves out large items,
//! and the header names them by STag, length and offset as *chunks* of the requester's memory. The
//! responder fetches arguments by RDMA Read and places results by RDMA Write.
//!
//! ```text
//! Send      header [payload]
//! header    xid vers credits proc …                                       [Header]
//!           RDMA_MSG, RDMA_NOMSG: Read list, Write list, Reply chunk       [ChunkLists]
//!           RDMA_ERROR: ERR_VERS low high, or ERR_CHUNK                    [ErrorBody]
//! payload   xid CALL|REPLY …, chunks' contents inserted at their Position [payload]
//! ```
//!
//! This crate does no I/O. It parses the messages of a peer into values, or refuses them with a
//! reason ([`Malformed`]). [`call`] and [`reply`] decide whether a responder or a requester accepts
//! a message, answers it with an error, or discards it. No message causes a panic, or an allocation
//! beyond [`Limits`]. [`engine`] is one end of a connection: it takes completions, and returns
//! actions for a transport.

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
