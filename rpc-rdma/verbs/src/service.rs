//! What answers calls, whatever carries them.

use crate::backward::Caller;
use crate::endpoint::Memory;
use crate::memory::Slice;
use std::net::SocketAddr;
use urnic_rpc_rdma::engine::{Item, Reply};

/// A call.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Who calls.
    pub peer: SocketAddr,
    /// The RPC message from its xid on, without the item that came apart from it and that item's padding.
    pub message: &'a [u8],
    /// The argument that came apart from the message: by Read chunk, where the program's
    /// [`Binding`](urnic_rpc_rdma::binding::Binding) lets it. Its count is still in the message, and agrees.
    pub item: Option<Slice>,
    /// The way back to who calls, if there is one: a [`Server`](crate::Server) has it, and a [`Client`](crate::Client) or another transport none.
    pub back: Option<&'a Caller>,
}

/// A reply.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// The RPC message from its xid on, without the item and its padding.
    pub message: Vec<u8>,
    /// The result that may go apart from the message, by Write chunk: bytes of the message before it, a multiple of four; and its bytes, one
    /// piece behind the other.
    pub item: Option<(usize, Vec<Slice>)>,
}

/// A program's server. It is called on several threads at a time, and may take its time.
pub trait Service: Send + Sync {
    /// Answers a call; `None` leaves it without an answer, which is for messages that are no RPC calls.
    fn call(&self, request: Request<'_>) -> Option<Response>;
}

/// As the engine takes it.
pub(crate) fn reply(response: Response) -> Reply<Memory> {
    let item = |(offset, pieces): (usize, Vec<Slice>)| {
        let len = pieces.iter().map(|piece| piece.len() as u32).sum();
        Item {
            offset,
            memory: pieces.into(),
            len,
        }
    };
    Reply {
        message: response.message.into(),
        results: response.item.map(item).into_iter().collect(),
    }
}
