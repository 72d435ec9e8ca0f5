//! Adaptive polling: the time for which a thread polls for completions before it sleeps.
//!
//! A wake-up costs more than most calls. Polling without success takes a processor from other
//! threads, so it becomes shorter, and then rare.

use std::sync::LazyLock;
use std::thread::available_parallelism;
use std::time::Duration;

/// Usual time of a transfer of one megabyte, or of an answer whose sender waits for a processor.
const MAX_TIME: Duration = Duration::from_millis(1);
/// Time from which polling counts as a failure, unless data moves by RDMA. (On an emulated device,
/// the polling thread moves the data.)
const USEFUL_TIME: Duration = Duration::from_micros(100);
/// Number of polls in a row, after which the thread yields and does other work.
pub(crate) const POLLS_PER_YIELD: u32 = 16;
/// Number of failures in a row, each halving the time, after which polling is rare.
const FAILURES: u32 = 4;
/// Polling that is rare happens once in this number of waits.
const TRY_EVERY: u32 = 16;

/// The recent success of polling: the number of failures in a row.
#[derive(Debug, Default)]
pub(crate) struct AdaptivePolling(u32);

impl AdaptivePolling {
    /// The time to poll now. It is zero on a machine with one processor, which the sender needs.
    pub(crate) fn time(&self) -> Duration {
        static ONE_PROCESSOR: LazyLock<bool> =
            LazyLock::new(|| available_parallelism().is_ok_and(|count| count.get() == 1));
        if *ONE_PROCESSOR {
            Duration::ZERO
        } else {
            self.next()
        }
    }

    fn next(&self) -> Duration {
        match self.0.checked_sub(FAILURES) {
            None => MAX_TIME / (1 << self.0),
            Some(more) if more % TRY_EVERY == TRY_EVERY - 1 => MAX_TIME,
            Some(_) => Duration::ZERO,
        }
    }

    /// Notes that polling succeeded after this time. `moving` means that data was moving by RDMA.
    pub(crate) fn succeeded(&mut self, after: Duration, moving: bool) {
        if moving || after <= USEFUL_TIME {
            self.0 = 0;
        } else {
            self.failed();
        }
    }

    /// Notes that polling failed.
    pub(crate) fn failed(&mut self) {
        self.0 = self.0.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_without_success_becomes_rare() {
        let polls = |polling: &mut AdaptivePolling, note: fn(&mut AdaptivePolling)| {
            let polls = (0..FAILURES + 2 * TRY_EVERY).map(|nth| {
                let time = polling.next();
                note(polling);
                (nth, time)
            });
            polls.filter(|(_, time)| !time.is_zero()).collect::<Vec<_>>()
        };
        let halves = (0..FAILURES).map(|nth| (nth, MAX_TIME / (1 << nth)));
        let tries = (1..=2).map(|nth| (FAILURES + nth * TRY_EVERY - 1, MAX_TIME));
        let few: Vec<_> = halves.chain(tries).collect();
        let mut polling = AdaptivePolling::default();
        assert_eq!(polls(&mut polling, AdaptivePolling::failed), few);
        polling.succeeded(USEFUL_TIME, false);
        assert_eq!(
            polls(&mut polling, |polling| polling.succeeded(MAX_TIME, false)),
            few
        );
        polling.succeeded(MAX_TIME, true);
        assert_eq!(polling.next(), MAX_TIME);
    }
}
