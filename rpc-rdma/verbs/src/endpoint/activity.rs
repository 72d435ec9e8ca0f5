//! The progress of a connection, for the time limits.

use std::time::{Duration, Instant};

/// Times without progress, as successive checks measured them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ages {
    /// Time for which the oldest posted request has not completed.
    pub(crate) stuck: Duration,
    /// Time without a message or a completion while no work is in progress.
    pub(crate) idle: Duration,
    /// Whether no call has arrived.
    pub(crate) unused: bool,
}

/// The values that successive checks compare.
pub(super) struct Activity {
    /// Time of the last message or completion.
    pub(super) last_activity: Instant,
    /// Whether a call has arrived.
    pub(super) received_call: bool,
    /// The oldest posted request at the last check, and the time for which it has not changed.
    oldest: (u64, Duration),
    /// The value of `last_activity` at the last check, and the time for which it has not changed.
    last: (Instant, Duration),
}

impl Activity {
    pub(super) fn new() -> Self {
        Self {
            last_activity: Instant::now(),
            received_call: false,
            oldest: (0, Duration::ZERO),
            last: (Instant::now(), Duration::ZERO),
        }
    }

    /// Checks the connection, `elapsed` after the last check. `oldest` is the number of the oldest
    /// posted request, or 0. `busy` means that work is in progress.
    pub(super) fn check(&mut self, oldest: u64, busy: bool, elapsed: Duration) -> Ages {
        self.oldest = match self.oldest {
            (last, time) if last == oldest && oldest != 0 => (oldest, time + elapsed),
            _ => (oldest, Duration::ZERO),
        };
        self.last = match self.last {
            (last, time) if last == self.last_activity && !busy => (last, time + elapsed),
            _ => (self.last_activity, Duration::ZERO),
        };
        Ages {
            stuck: self.oldest.1,
            idle: self.last.1,
            unused: !self.received_call,
        }
    }
}
