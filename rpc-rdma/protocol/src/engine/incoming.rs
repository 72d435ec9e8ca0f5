//! Calls of the peer.

use super::id::CallId;

/// A call of the peer, with all of its data fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// The id for the reply.
    pub call: CallId,
    /// Transaction id.
    pub xid: u32,
    /// The RPC message without the items that came by chunk, if it is inline. `None`: the message
    /// is the first fetched item.
    pub message: Option<Vec<u8>>,
    /// Position and bytes of each fetched Read chunk, by ascending Position. The index is the item
    /// number of [`Action::Read`](super::Action::Read).
    pub items: Vec<(u32, u64)>,
    /// Bytes of the requester's memory in each Write chunk. `None`: that result goes
    /// inline.
    pub results: Vec<Option<u64>>,
    /// Bytes of the requester's memory in the Reply chunk.
    pub reply: Option<u64>,
}
