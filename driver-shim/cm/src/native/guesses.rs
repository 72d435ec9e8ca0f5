//! The count of connection requests with wrong PSNs.

use std::time::Duration;

use crate::mpa_startup::Time;

/// Wrong calls that a queue pair examines at RTR before it refuses others unseen.
const MAX_GUESSES: u32 = 16;
/// After so long one more is examined.
const GUESS_PAUSE: Duration = Duration::from_secs(1);

/// Calls for one queue pair that came with wrong PSNs.
#[derive(Debug, Default)]
pub(super) struct Guesses {
    /// Wrong ones that still count.
    recent: u32,
    /// Since when the oldest of them counts.
    since: Time,
    /// Ever, with those that were refused unseen.
    total: u64,
}

impl Guesses {
    /// Whether no more calls are to be examined.
    pub(super) fn are_spent(&mut self, now: Time) -> bool {
        let forgotten = now.saturating_sub(self.since).as_nanos() / GUESS_PAUSE.as_nanos();
        let forgotten = u32::try_from(forgotten).unwrap_or(u32::MAX);
        if forgotten > 0 {
            self.recent = self.recent.saturating_sub(forgotten);
            self.since += GUESS_PAUSE * forgotten;
        }
        self.recent >= MAX_GUESSES
    }

    /// Counts one; returns how many there were, if that is worth a line in the log.
    pub(super) fn count(&mut self, now: Time, examined: bool) -> Option<u64> {
        if examined {
            if self.recent == 0 {
                self.since = now;
            }
            self.recent = self.recent.saturating_add(1);
        }
        self.total += 1;
        (self.total.is_power_of_two()).then_some(self.total)
    }
}
