//! The two directions of a connection in memory.

/// A direction of a connection: from the end that connected, or from the end that listened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    FromInitiator,
    FromResponder,
}

impl Direction {
    pub(super) fn other(self) -> Direction {
        match self {
            Direction::FromInitiator => Direction::FromResponder,
            Direction::FromResponder => Direction::FromInitiator,
        }
    }
}
