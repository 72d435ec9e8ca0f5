//! For how long to look for completions before a thread sleeps.
//!
//! To be woken costs more than most calls take, at either end. But who looks in vain keeps a processor from others, so that less and less time is spent on it where
//! nothing comes of it.

use std::sync::LazyLock;
use std::thread::available_parallelism;
use std::time::Duration;

/// What a call takes, as a rule, whose service only touches memory.
const LONGEST: Duration = Duration::from_micros(100);
/// The same, while octets are on their way by RDMA: what a megabyte takes. A device without hardware is moved by those who look.
const LONGEST_MOVING: Duration = Duration::from_millis(1);
/// Times in a row without success, each of half the time of the one before, after which there are no more.
const FAILURES: u32 = 4;
/// But one in so many.
const TRY_EVERY: u32 = 16;

/// What looking came to, of late.
#[derive(Debug, Default)]
pub(crate) struct Patience(u32);

impl Patience {
    /// For how long to look now. Where there is one processor, whoever is to send needs it.
    pub(crate) fn time(&self, moving: bool) -> Duration {
        static ALONE: LazyLock<bool> =
            LazyLock::new(|| available_parallelism().is_ok_and(|count| count.get() == 1));
        if *ALONE { Duration::ZERO } else { self.of(moving) }
    }

    fn of(&self, moving: bool) -> Duration {
        let longest = if moving { LONGEST_MOVING } else { LONGEST };
        match self.0.checked_sub(FAILURES) {
            None => longest / (1 << self.0),
            Some(more) if more % TRY_EVERY == TRY_EVERY - 1 => longest,
            Some(_) => Duration::ZERO,
        }
    }

    /// What was looked for came within that time, or not.
    pub(crate) fn note(&mut self, came: bool) {
        self.0 = if came { 0 } else { self.0.wrapping_add(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_in_vain_soon_looks_no_more_but_now_and_then() {
        let mut patience = Patience::default();
        let mut looks = Vec::new();
        for nth in 0..FAILURES + 2 * TRY_EVERY {
            looks.push((nth, patience.of(false)));
            patience.note(false);
        }
        looks.retain(|(_, time)| !time.is_zero());
        let halves = (0..FAILURES).map(|nth| (nth, LONGEST / (1 << nth)));
        let tries = (1..=2).map(|nth| (FAILURES + nth * TRY_EVERY - 1, LONGEST));
        assert_eq!(looks, halves.chain(tries).collect::<Vec<_>>());
        patience.note(true);
        assert_eq!(
            [false, true].map(|moving| patience.of(moving)),
            [LONGEST, LONGEST_MOVING]
        );
    }
}
