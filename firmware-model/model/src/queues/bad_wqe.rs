//! Work queue entries that cannot be executed.

/// A work queue entry that makes no sense: its queue goes to the error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed work queue entry")]
pub struct BadWqe {
    /// The entry's cookie as far as it could be read; 0 if not.
    pub cookie: u64,
}
