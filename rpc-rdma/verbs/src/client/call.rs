//! Calls and answers of a client.

use crate::memory::{Buffer, Slice};

/// A call of a client.
#[derive(Debug)]
pub struct Call {
    /// The RPC message from the xid, without the argument and its padding.
    /// [`Client::xid`](super::Client::xid) returns an unused xid.
    pub message: Vec<u8>,
    /// The argument that may move by Read chunk: its offset in the message, and its bytes, which
    /// must be memory of [`Client::pool`](super::Client::pool). If the program's
    /// [`Binding`](urnic_rpc_rdma::binding::Binding) does not name the argument or the result, it
    /// is part of the message.
    pub argument: Option<(usize, Slice)>,
    /// Memory of [`Client::pool`](super::Client::pool) for the result that may move by Write chunk,
    /// of the maximum length of the result.
    pub result: Option<Buffer>,
    /// Bytes of the longest reply, without the result that may move by Write chunk.
    pub max_reply: usize,
}

/// The answer to a call.
#[derive(Debug)]
pub struct Answer {
    /// The RPC message, without the result if that was placed by Write chunk.
    pub message: Vec<u8>,
    /// The memory of [`Call::result`], with the length of the placed result, and whether a result
    /// was placed. If none was placed, the result is in the message. `None` if the call had no such
    /// memory, or if the binding of the program has no such result.
    pub result: Option<(Buffer, bool)>,
}
