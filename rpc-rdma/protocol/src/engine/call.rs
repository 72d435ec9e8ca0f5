//! Calls and replies of the consumer, and the answers to calls.

use super::id::RegionId;
use super::item::Item;
use crate::header::ErrorBody;
use std::sync::Arc;

/// A call that this end makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call<M> {
    /// The RPC message from its xid on, without the arguments and their padding.
    pub message: Arc<[u8]>,
    /// Arguments that may go by Read chunk, by ascending offset. They may also be sent inline, if
    /// there is room.
    pub arguments: Vec<Item<M>>,
    /// Memory for results that may come by Write chunk, in the order of the results. Each must hold
    /// the longest possible result (RFC 8166 §3.4.6). The `offset` is ignored.
    pub results: Vec<Item<M>>,
    /// Bytes of the longest reply, without the results with memory of their own. The peer gets no
    /// access to more memory.
    pub max_reply: usize,
}

/// A reply that this end sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply<M> {
    /// The RPC message from its xid on, without the results and their padding.
    pub message: Arc<[u8]>,
    /// Results that may go by Write chunk, by ascending offset.
    pub results: Vec<Item<M>>,
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The RPC message, without the results that were placed.
    pub message: Message,
    /// For each item of [`Call::results`], the bytes placed in its memory: 0 if the memory was not
    /// used. `None` if the memory was not offered, so that the result is in the message.
    pub placed: Vec<Option<u32>>,
}

/// The place of an RPC message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The message itself, which arrived inline.
    Short(Vec<u8>),
    /// The message is in the memory that the transport provided for a region.
    Long {
        /// The region of the [`Exposed::Fresh`](super::Exposed::Fresh) memory.
        region: RegionId,
        /// Bytes of the message.
        len: u32,
    },
}

/// The reason why a call has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The consumer called [`Connection::cancel`](super::Connection::cancel).
    #[error("cancelled")]
    Cancelled,
    /// The peer sent RDMA_ERROR. A repetition of the call would fail, too.
    #[error(transparent)]
    Refused(#[from] ErrorBody),
    /// The memory of the call could not be registered.
    #[error("memory could not be registered")]
    Register,
    /// The call does not fit into a Send, and chunks are not allowed in this direction. Or its
    /// chunk lists alone do not fit into a Send.
    #[error("the call does not fit into a message")]
    TooLong,
}

/// The reason why [`Connection::call`](super::Connection::call) refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The message is no RPC call: it must begin with xid and CALL.
    #[error("the message is no RPC call")]
    NotACall,
    /// Another call with this xid has not ended yet.
    #[error("xid {0:#010x} is in use")]
    XidInUse(u32),
    /// The offsets of the arguments are not ascending, are after the message, or are no multiples
    /// of four. Or a result has no memory.
    #[error("the items do not lie within the message")]
    Items,
}
