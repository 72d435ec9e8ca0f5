//! How long a thread that waits for an event of the connection manager lends itself to the device.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// An answer over a local network takes no longer, as a rule, even on a crowded machine.
const LONGEST: Duration = Duration::from_micros(500);
/// Times in a row without an event, each with half of the time before, after which waiting threads leave it to the device's own.
const FAILURES: u32 = 4;
/// How often one tries all the same.
const TRY_EVERY: u32 = 16;

/// What waiting was like of late.
#[derive(Debug, Default)]
pub(super) struct Patience(AtomicU32);

impl Patience {
    /// Has `wait` wait that way for as long as seems worth it, which says whether an event came. `false` if that is no time at all.
    pub(super) fn wait(&self, wait: impl FnOnce(Duration) -> bool) -> bool {
        let patience = self.now();
        let came = !patience.is_zero() && wait(patience);
        // Approximate: threads may lose counts to one another.
        let failures = if came {
            0
        } else {
            self.0.load(Ordering::Relaxed).wrapping_add(1)
        };
        self.0.store(failures, Ordering::Relaxed);
        came
    }

    fn now(&self) -> Duration {
        let failures = self.0.load(Ordering::Relaxed);
        match failures.checked_sub(FAILURES) {
            None => LONGEST / (1 << failures),
            Some(more) if more % TRY_EVERY == TRY_EVERY - 1 => LONGEST,
            Some(_) => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_in_vain_soon_lends_itself_no_more_and_tries_again_now_and_then() {
        let patience = Patience::default();
        let mut waits = Vec::new();
        for nth in 0..FAILURES + 2 * TRY_EVERY {
            let came = patience.wait(|time| {
                waits.push((nth, time));
                false
            });
            assert!(!came);
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
        let lively = Patience::default();
        lively.wait(|_| false);
        assert!(lively.wait(|_| true));
        assert!(lively.wait(|time| time == LONGEST));
    }
}
