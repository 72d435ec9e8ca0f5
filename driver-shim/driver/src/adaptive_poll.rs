//! Adaptive polling: how long a thread that waits for an event of the connection manager runs the
//! device itself.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Longest poll. An answer over a local network rarely takes longer, even on a busy machine.
const LONGEST: Duration = Duration::from_micros(500);
/// The number of consecutive polls without an event, each half as long as the previous one, after
/// which threads sleep at once.
const FAILURES: u32 = 4;
/// While threads sleep at once, one of this many waits polls.
const RETRY_EVERY: u32 = 16;

/// Counts the waits since the last one whose poll saw an event.
#[derive(Debug, Default)]
pub(super) struct AdaptivePoll(AtomicU32);

impl AdaptivePoll {
    /// Calls `wait` with the time to poll for; `wait` returns whether an event arrived. Returns
    /// `false` without a call if the time is zero.
    pub(super) fn wait(&self, wait: impl FnOnce(Duration) -> bool) -> bool {
        let time = self.time();
        let has_event = !time.is_zero() && wait(time);
        // Approximate: concurrent threads may lose each other's counts.
        let failures = if has_event {
            0
        } else {
            self.0.load(Ordering::Relaxed).wrapping_add(1)
        };
        self.0.store(failures, Ordering::Relaxed);
        has_event
    }

    fn time(&self) -> Duration {
        let failures = self.0.load(Ordering::Relaxed);
        match failures.checked_sub(FAILURES) {
            None => LONGEST / (1 << failures),
            Some(more) if more % RETRY_EVERY == RETRY_EVERY - 1 => LONGEST,
            Some(_) => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_without_an_event_back_off_and_are_retried() {
        let poll = AdaptivePoll::default();
        let mut waits = Vec::new();
        for nth in 0..FAILURES + 2 * RETRY_EVERY {
            let has_event = poll.wait(|time| {
                waits.push((nth, time));
                false
            });
            assert!(!has_event);
        }
        let [first, second, .., last] = waits[..] else {
            panic!("{waits:?}")
        };
        assert_eq!(
            [first, second, last],
            [(0, LONGEST), (1, LONGEST / 2), (35, LONGEST)]
        );
        assert_eq!(
            waits.iter().map(|wait| wait.0).collect::<Vec<_>>(),
            [0, 1, 2, 3, 19, 35]
        );
        let successful = AdaptivePoll::default();
        successful.wait(|_| false);
        assert!(successful.wait(|_| true));
        assert!(successful.wait(|time| time == LONGEST));
    }
}
