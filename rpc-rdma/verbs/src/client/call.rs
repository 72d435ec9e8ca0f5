//! Calls and answers of a client.

use crate::memory::{Buffer, Slice};

/// A call to be made.
#[derive(Debug)]
pub struct Call {
    /// The RPC message from its xid on, without the argument and its padding. [`Client::xid`] has transactions that were not used yet.
    pub message: Vec<u8>,
    /// The argument that may go by Read chunk: bytes of the message before it, and its own, which must be of [`Client::pool`]. Where the
    /// program's [`Binding`](urnic_rpc_rdma::binding::Binding) does not name it, it goes with the message; so does the result.
    pub argument: Option<(usize, Slice)>,
    /// Memory of [`Client::pool`] for the result that may come by Write chunk, as long as that can get.
    pub result: Option<Buffer>,
    /// Bytes of the longest reply, without that result.
    pub max_reply: usize,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The RPC message, without the result if that was placed.
    pub message: Vec<u8>,
    /// [`Call::result`] again, of the length of the result that was placed there; and whether it was offered at all: else the result is in the
    /// message. `None` if there was no such memory, or the program's binding knows of no such result.
    pub result: Option<(Buffer, bool)>,
}
