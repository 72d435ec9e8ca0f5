//! Limits for clients of the TCP transport.

use std::time::Duration;

/// Limits of what clients can make the server hold, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time. For one more, the client with the most connections loses one.
    pub connections: usize,
    /// Time without calls after which the server ends a connection; `None` means never.
    pub idle: Option<Duration>,
    /// Time for a message to arrive or to be taken; a large message has more.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            idle: Some(Duration::from_secs(600)),
            stall: Duration::from_secs(60),
        }
    }
}

impl Limits {
    /// Interval of the checks whether a time is over.
    pub(super) fn interval(&self) -> Duration {
        let shortest = self.idle.unwrap_or(self.stall).min(self.stall);
        (shortest / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }
}
