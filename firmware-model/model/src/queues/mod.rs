//! The queues that the device shares with its host: work queues, completion queues, event queues.

#![forbid(unsafe_code)]

mod completion;
mod event;
mod receive;
mod send;

pub use completion::{CompletionQueue, Overflow};
pub use event::EventQueue;
pub use receive::{ReceiveQueue, ReceiveSource, RecvWqe, SharedReceiveQueue};
pub use send::{SendQueue, SendWqe};

/// A work queue entry that makes no sense: its queue goes to the error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed work queue entry")]
pub struct BadWqe {
    /// The entry's cookie as far as it could be read; 0 if not.
    pub cookie: u64,
}
