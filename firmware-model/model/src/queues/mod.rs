//! The queues that the device shares with its host: work queues, completion queues, event queues.

#![forbid(unsafe_code)]

mod bad_wqe;
mod completion;
mod receive;
mod send;

pub use bad_wqe::BadWqe;
pub use completion::{CompletionQueue, Overflow};
pub(crate) use receive::ReceivePlace;
pub use receive::{ReceiveQueue, ReceiveSource, RecvWqe, SharedReceiveQueue};
pub use send::{SendQueue, SendWqe};
