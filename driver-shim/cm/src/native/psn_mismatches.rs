//! The count of connection requests with wrong PSNs.

use std::time::Duration;

use crate::mpa_startup::Time;

/// The number of wrong Requests that a queue pair examines at RTR before it rejects others
/// unexamined.
const MAX_MISMATCHES: u32 = 16;
/// The interval after which the queue pair examines one more Request.
const MISMATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The Requests with wrong PSNs that one queue pair received.
#[derive(Debug, Default)]
pub(super) struct PsnMismatches {
    /// Examined Requests that still count.
    recent: u32,
    /// The time since which the oldest of `recent` counts.
    since: Time,
    /// All Requests with wrong PSNs, including the Requests that were rejected unexamined.
    total: u64,
}

impl PsnMismatches {
    /// Whether the queue pair examines no more Requests at this time.
    pub(super) fn are_exhausted(&mut self, now: Time) -> bool {
        let expired = now.saturating_sub(self.since).as_nanos() / MISMATCH_INTERVAL.as_nanos();
        let expired = u32::try_from(expired).unwrap_or(u32::MAX);
        if expired > 0 {
            self.recent = self.recent.saturating_sub(expired);
            self.since += MISMATCH_INTERVAL * expired;
        }
        self.recent >= MAX_MISMATCHES
    }

    /// Counts a Request; returns the total if a log line about the Request is due.
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
