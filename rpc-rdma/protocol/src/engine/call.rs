//! Calls and replies of the consumer, and the answers to calls.

use super::id::RegionId;
use super::item::Item;
use crate::header::ErrorBody;
use std::sync::Arc;

/// A call to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call<M> {
    /// The RPC message from its xid on, without the arguments and their padding.
    pub message: Arc<[u8]>,
    /// Arguments that may go by Read chunk, by ascending offset. They may also be sent inline, if
    /// there is room.
    pub arguments: Vec<Item<M>>,
    /// Memory for results that may come by Write chunk, each long enough for its longest (RFC 8166
    /// §3.4.6), in the order of the results. `offset` counts for nothing here.
    pub results: Vec<Item<M>>,
    /// Bytes of the longest reply, without those results. The peer's memory need not be trusted
    /// with more.
    pub max_reply: usize,
}

/// A reply to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply<M> {
    /// The RPC message from its xid on, without the results and their padding.
    pub message: Arc<[u8]>,
    /// Results that may go by Write chunk, by ascending offset.
    pub results: Vec<Item<M>>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The RPC message, without the results that were placed.
    pub message: Message,
    /// For each item of [`Call::results`] the bytes placed in its memory, 0 if it was not used.
    /// `None` where it was not offered: its result is in the message.
    pub placed: Vec<Option<u32>>,
}

/// Where an RPC message is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Here.
    Short(Vec<u8>),
    /// In the memory made for this region, so many bytes.
    Long {
        /// [`Exposed::Fresh`](super::Exposed::Fresh).
        region: RegionId,
        /// Bytes.
        len: u32,
    },
}

/// Why a call has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// [`Connection::cancel`](super::Connection::cancel).
    #[error("cancelled")]
    Cancelled,
    /// The peer sent RDMA_ERROR; sending the call again will not help.
    #[error(transparent)]
    Refused(#[from] ErrorBody),
    /// Its memory could not be registered.
    #[error("memory could not be registered")]
    Register,
    /// It does not fit into a Send, and chunks are not allowed in this direction; or not even its
    /// chunk lists do.
    #[error("the call does not fit into a message")]
    TooLong,
}

/// Why a call was not taken at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The message is no RPC call: xid, then CALL.
    #[error("the message is no RPC call")]
    NotACall,
    /// Another call with this xid has not ended yet.
    #[error("xid {0:#010x} is in use")]
    XidInUse(u32),
    /// Arguments go backwards, or lie behind the message or at no multiple of four; or there is a
    /// result with no memory.
    #[error("the items do not lie within the message")]
    Items,
}
