//! The interface of services. It is independent of the transport.

use crate::backward::Backchannel;
use crate::endpoint::Memory;
use crate::memory::Slice;
use std::net::SocketAddr;
use urnic_rpc_rdma::engine::{Item, Reply};

/// A call that a service answers.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Address of the client.
    pub peer: SocketAddr,
    /// The RPC message from the xid, without the item that arrived apart and its padding.
    pub message: &'a [u8],
    /// The argument that arrived apart from the message: by Read chunk, if the program's
    /// [`Binding`](urnic_rpc_rdma::binding::Binding) permits it. The count is in the message and
    /// agrees with the length.
    pub item: Option<Slice>,
    /// The means to call the client back. A [`Server`](crate::Server) provides it. A
    /// [`Client`](crate::Client) and other transports do not.
    pub back: Option<&'a Backchannel>,
}

/// A reply of a service.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// The RPC message from its xid on, without the item and its padding.
    pub message: Vec<u8>,
    /// The result that may move apart from the message, by Write chunk: its offset in the message,
    /// a multiple of four, and its pieces in order.
    pub item: Option<(usize, Vec<Slice>)>,
}

/// A service of an RPC program. Several threads call it at a time, and it may block.
pub trait Service: Send + Sync {
    /// Answers a call. `None` sends no answer, for messages that are no RPC calls.
    fn call(&self, request: Request<'_>) -> Option<Response>;
}

/// Converts the reply into the form of the engine.
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
