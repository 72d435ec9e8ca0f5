//! Calls of the peer.

use super::id::CallId;

/// A call of the peer's, all of it fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// To answer it with.
    pub call: CallId,
    /// Transaction.
    pub xid: u32,
    /// The RPC message, without what came by chunks: inline, or as the first fetched item.
    pub message: Option<Vec<u8>>,
    /// What was fetched: Position and bytes of each Read chunk, by ascending Position.
    /// [`Action::Read`](super::Action::Read) numbered them in this order.
    pub items: Vec<(u32, u64)>,
    /// Bytes that the requester has room for in each Write chunk; `None` asks for that result
    /// inline.
    pub results: Vec<Option<u64>>,
    /// Bytes that it has room for in the Reply chunk.
    pub reply: Option<u64>,
}
