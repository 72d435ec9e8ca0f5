//! The limit of a wait.

use std::time::{Duration, Instant};

/// A limit to a wait that would never end. Only time in which the waiter could check counts: time
/// in which the machine was stopped, or ran other programs, does not.
#[derive(Debug)]
pub struct Wait {
    left: Duration,
    checked: Instant,
}

impl Wait {
    /// A longer time between two checks does not count: the waiter was not running, and what it
    /// waits for perhaps neither.
    const STEP: Duration = Duration::from_millis(10);

    /// Begins a wait of at least `limit`.
    pub fn new(limit: Duration) -> Self {
        Self {
            left: limit,
            checked: Instant::now(),
        }
    }

    /// Whether the wait has taken too long. The waiter calls this after each check.
    pub fn is_over(&mut self) -> bool {
        let now = Instant::now();
        self.left = self.left.saturating_sub((now - self.checked).min(Self::STEP));
        self.checked = now;
        self.left.is_zero()
    }
}
