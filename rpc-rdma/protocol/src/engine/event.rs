//! Events for the consumer.

use super::call::{Answer, Call, CallError};
use super::id::CallId;
use super::incoming::Incoming;

/// An event for the consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<M> {
    /// A call of this end has ended. The peer has no more access to its memory, which is returned.
    Answered {
        /// Transaction id.
        xid: u32,
        /// The call.
        call: Call<M>,
        /// The answer, or the reason why there is none.
        outcome: Result<Answer, CallError>,
    },
    /// The peer makes a call. The consumer answers it with
    /// [`Connection::reply`](super::Connection::reply) or
    /// [`Connection::drop_call`](super::Connection::drop_call).
    CallReceived(Incoming),
    /// The memory of a call of the peer (arguments and results) is no longer in use: the call was
    /// answered, or the connection has ended.
    Finished(CallId),
}
