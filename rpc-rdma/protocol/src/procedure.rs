//! Values of the procedure field of a header (RFC 8166 §4.2.4).

/// RDMA_MSG: chunk lists and payload follow.
pub const MSG: u32 = 0;
/// RDMA_NOMSG: chunk lists follow. The payload is in a chunk.
pub const NOMSG: u32 = 1;
/// RDMA_MSGP: withdrawn (§4.6.1), never sent.
pub const MSGP: u32 = 2;
/// RDMA_DONE: withdrawn (§4.6.2), never sent.
pub const DONE: u32 = 3;
/// RDMA_ERROR: the answer to a header that the receiver cannot use.
pub const ERROR: u32 = 4;
