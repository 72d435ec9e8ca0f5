//! Work queue entries that cannot be executed.

/// A malformed work queue entry: its queue goes to the error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed work queue entry")]
pub struct BadWqe {
    /// The entry's cookie; 0 if it could not be read.
    pub cookie: u64,
}
