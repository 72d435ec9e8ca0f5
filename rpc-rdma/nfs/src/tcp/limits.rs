//! Limits for clients of the TCP transport.

use std::time::Duration;

/// Limits of the resources, and of the time, that clients can use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections. For one more, the client with the most connections loses one.
    pub connections: usize,
    /// Time without calls after which the server ends a connection. `None`: the server never does
    /// so.
    pub idle: Option<Duration>,
    /// Time in which a message must arrive or be received by the peer. A long message has more
    /// time.
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
