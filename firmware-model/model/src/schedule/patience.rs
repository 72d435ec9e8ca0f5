//! When a thread that polls without result yields its processor.
//!
//! The sender may wait for the processor of the poller: the program runs on one processor, or the
//! scheduler has placed both ends on one. No end can know that of a peer on another host, or in
//! another namespace, so each poller measures it. A yield returns at once if no other thread waits
//! for the processor; if one ran meanwhile, the yield takes longer. If bytes are there right after
//! a short turn of another thread, the sender shares the processor, and the next waits yield early.
//!
//! | a yield | the next waits |
//! |---|---|
//! | gave the processor to the sender: it took [`YIELD_GAVE`] to [`YIELD_LOST`], and bytes are there | yield after [`YIELD_EARLY_AFTER_POLLS`] polls |
//! | returned at once, or brought nothing | yield after twice as many polls, up to [`YIELD_AFTER_POLLS`] |
//! | lost the processor to another program for longer than [`YIELD_LOST`] | yield after [`YIELD_AFTER_POLLS`] |

use crate::tuning::{YIELD_AFTER_POLLS, YIELD_EARLY_AFTER_POLLS, YIELD_EVERY_POLLS, YIELD_GAVE, YIELD_LOST};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The polls without result of the threads of one shard. Approximate: the threads may lose counts
/// to one another.
#[derive(Debug)]
pub(super) struct Patience {
    /// Polls since something came.
    idle: AtomicU32,
    /// The value of `idle` at which the poller yields next.
    yields_at: AtomicU32,
    /// Polls of a wait before its first yield.
    polls: AtomicU32,
    /// The value of `idle` at the last yield of this wait that gave the processor to another
    /// thread for a short turn; 0 = none did.
    gave_at: AtomicU32,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            idle: AtomicU32::new(0),
            yields_at: AtomicU32::new(YIELD_AFTER_POLLS),
            polls: AtomicU32::new(YIELD_AFTER_POLLS),
            gave_at: AtomicU32::new(0),
        }
    }
}

impl Patience {
    /// The number of polls in a row that found nothing.
    #[inline]
    pub(super) fn idle(&self) -> u32 {
        self.idle.load(Ordering::Relaxed)
    }

    /// Notes a poll that found something.
    #[inline]
    pub(super) fn note_found(&self) {
        let idle = self.idle();
        self.idle.store(0, Ordering::Relaxed);
        // They are equal until the first yield of the wait.
        if self.yields_at.load(Ordering::Relaxed) != self.polls.load(Ordering::Relaxed) {
            self.end_wait(idle);
        }
    }

    /// Notes a poll that found nothing. Returns the number of such polls in a row, and whether the
    /// poller yields now.
    #[inline]
    pub(super) fn note_nothing(&self) -> (u32, bool) {
        let idle = self.idle().wrapping_add(1);
        self.idle.store(idle, Ordering::Relaxed);
        (idle, idle >= self.yields_at.load(Ordering::Relaxed))
    }

    /// Notes that a yield, after `idle` polls that found nothing, took this time.
    pub(super) fn note_yield(&self, idle: u32, took: Duration) {
        if self.gave_at.swap(0, Ordering::Relaxed) != 0 {
            // The turn before brought nothing.
            self.relax();
        }
        if took >= YIELD_LOST {
            self.set(YIELD_AFTER_POLLS);
        } else if took >= YIELD_GAVE {
            self.gave_at.store(idle, Ordering::Relaxed);
        } else {
            self.relax();
        }
        let polls = self.polls.load(Ordering::Relaxed).min(YIELD_EVERY_POLLS);
        self.yields_at
            .store(idle.saturating_add(polls), Ordering::Relaxed);
    }

    /// The end of a wait, of `idle` polls, in which the poller yielded.
    #[cold]
    fn end_wait(&self, idle: u32) {
        if self.gave_at.swap(0, Ordering::Relaxed) == idle {
            self.set(YIELD_EARLY_AFTER_POLLS);
        }
        self.yields_at
            .store(self.polls.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn relax(&self) {
        self.set(self.polls.load(Ordering::Relaxed).saturating_mul(2));
    }

    fn set(&self, polls: u32) {
        self.polls.store(polls.min(YIELD_AFTER_POLLS), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::from_nanos(300);
    const TURN: Duration = Duration::from_micros(6);
    const NONE: [u32; 0] = [];
    const SLICE: Duration = Duration::from_millis(3);

    /// A wait of `polls` polls that find nothing, then one that finds something; each yield takes
    /// `took`. Returns the numbers of polls after which it yielded.
    fn wait(patience: &Patience, polls: u32, took: Duration) -> Vec<u32> {
        let mut yields = Vec::new();
        for _ in 0..polls {
            if let (idle, true) = patience.note_nothing() {
                yields.push(idle);
                patience.note_yield(idle, took);
            }
        }
        patience.note_found();
        yields
    }

    #[test]
    fn a_poller_alone_yields_late() {
        let patience = Patience::default();
        assert_eq!(wait(&patience, 255, AT_ONCE), NONE);
        assert_eq!(wait(&patience, 290, AT_ONCE), [256, 272, 288]);
        assert_eq!(wait(&patience, 256, AT_ONCE), [256]);
    }

    #[test]
    fn a_poller_that_shares_its_processor_with_the_sender_yields_early() {
        let patience = Patience::default();
        assert_eq!(wait(&patience, 256, TURN), [256]);
        for _ in 0..3 {
            assert_eq!(wait(&patience, YIELD_EARLY_AFTER_POLLS, TURN), [4]);
        }
        // The two have been placed on processors of their own.
        assert_eq!(wait(&patience, 30, AT_ONCE), [4, 12, 28]);
        assert_eq!(wait(&patience, 30, AT_ONCE), NONE);
    }

    /// The sender is not the only thread that waits for the processor.
    #[test]
    fn turns_that_bring_nothing_make_yields_rarer() {
        let patience = Patience::default();
        wait(&patience, 256, TURN);
        assert_eq!(wait(&patience, 41, TURN), [4, 8, 16, 32]);
        assert_eq!(wait(&patience, 41, TURN), [32]);
    }

    /// A program that computes takes a whole slice at each yield.
    #[test]
    fn a_slice_lost_is_not_the_senders_turn() {
        let patience = Patience::default();
        wait(&patience, 256, TURN);
        assert_eq!(wait(&patience, 4, SLICE), [4]);
        assert_eq!(wait(&patience, 255, SLICE), NONE);
    }
}
