//! For how long to look for completions before a thread sleeps.
//!
//! To be woken costs more than most calls take, at either end. But who looks in vain keeps a processor from others, so that less and less time is spent on it where
//! nothing comes of it.

use std::sync::LazyLock;
use std::thread::available_parallelism;
use std::time::Duration;

/// What a megabyte takes, as a rule, or an answer when its end has to wait for a processor.
const LONGEST: Duration = Duration::from_millis(1);
/// What takes longer, without bytes on their way by RDMA, is not worth looking for. (They are worth it: where there is no hardware, those who look move them.)
const WORTH: Duration = Duration::from_micros(100);
/// Looks in a row, after which it is time for what else there is to be done, and for others.
pub(crate) const AMONG: u32 = 16;
/// Times in a row without success, each of half the time of the one before, after which there are no more.
const FAILURES: u32 = 4;
/// But one in so many.
const TRY_EVERY: u32 = 16;

/// What looking came to, of late: how often in a row it was not worth it.
#[derive(Debug, Default)]
pub(crate) struct Patience(u32);

impl Patience {
    /// For how long to look now. Where there is one processor, whoever is to send needs it.
    pub(crate) fn time(&self) -> Duration {
        static ALONE: LazyLock<bool> =
            LazyLock::new(|| available_parallelism().is_ok_and(|count| count.get() == 1));
        if *ALONE { Duration::ZERO } else { self.next() }
    }

    fn next(&self) -> Duration {
        match self.0.checked_sub(FAILURES) {
            None => LONGEST / (1 << self.0),
            Some(more) if more % TRY_EVERY == TRY_EVERY - 1 => LONGEST,
            Some(_) => Duration::ZERO,
        }
    }

    /// What was looked for came after this time, while bytes were on their way or not.
    pub(crate) fn came(&mut self, after: Duration, moving: bool) {
        if moving || after <= WORTH {
            self.0 = 0;
        } else {
            self.failed();
        }
    }

    /// It did not come.
    pub(crate) fn failed(&mut self) {
        self.0 = self.0.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_in_vain_soon_looks_no_more_but_now_and_then() {
        let looks = |patience: &mut Patience, note: fn(&mut Patience)| {
            let looks = (0..FAILURES + 2 * TRY_EVERY).map(|nth| {
                let time = patience.next();
                note(patience);
                (nth, time)
            });
            looks.filter(|(_, time)| !time.is_zero()).collect::<Vec<_>>()
        };
        let halves = (0..FAILURES).map(|nth| (nth, LONGEST / (1 << nth)));
        let tries = (1..=2).map(|nth| (FAILURES + nth * TRY_EVERY - 1, LONGEST));
        let few: Vec<_> = halves.chain(tries).collect();
        let mut patience = Patience::default();
        assert_eq!(looks(&mut patience, Patience::failed), few);
        patience.came(WORTH, false);
        assert_eq!(
            looks(&mut patience, |patience| patience.came(LONGEST, false)),
            few
        );
        patience.came(LONGEST, true);
        assert_eq!(patience.next(), LONGEST);
    }
}
