//! The time in which a fault can strike.

use std::fmt;
use std::time::Duration;

use crate::time::Written;

/// A part of the time since a fault was added to its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Window {
    /// The begin of the window.
    pub(crate) at: Option<Duration>,
    /// The first moment after it; `None`: it has no end.
    pub(crate) until: Option<Duration>,
}

impl Window {
    /// Whether this time since the fault was added is in the window.
    pub(crate) fn contains(self, age: Duration) -> bool {
        self.at.is_none_or(|at| at <= age) && self.until.is_none_or(|until| age < until)
    }
}

impl fmt::Display for Window {
    /// Writes the window in the form of a specification, with a space first; nothing if it has no
    /// limits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = self.at {
            write!(f, " at={}", Written(at))?;
        }
        if let Some(until) = self.until {
            write!(f, " until={}", Written(until))?;
        }
        Ok(())
    }
}
