//! Events for the consumer.

use super::call::{Answer, Call, CallError};
use super::id::CallId;
use super::incoming::Incoming;

/// An event for the consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<M> {
    /// A call of ours is over. The peer has no access any more to its memory, which is handed back.
    Answered {
        /// Transaction.
        xid: u32,
        /// The call.
        call: Call<M>,
        /// How it ended.
        outcome: Result<Answer, CallError>,
    },
    /// The peer calls. To be answered with [`Connection::reply`](super::Connection::reply) or
    /// [`Connection::drop_call`](super::Connection::drop_call).
    Called(Incoming),
    /// The memory of a call of the peer's, arguments and results alike, is not in use any more: it
    /// was answered, or the connection is gone.
    Finished(CallId),
}
