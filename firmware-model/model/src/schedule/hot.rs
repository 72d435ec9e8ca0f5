//! When a thread that polls looks at what: the results of the polls so far decide.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Polls in a row without a result after which a poller yields its processor, and the number of
/// such polls between two further yields. The sender may be waiting for that processor; a yield
/// costs next to nothing for a poller with a processor of its own.
const IDLE_POLLS: u32 = 256;
const YIELD_EVERY: u32 = 16;
/// The same for a poller that shares its processor with the peer that it waits for: nothing comes
/// while it polls.
const SHARED_IDLE_POLLS: u32 = 4;
/// Polls in a row without a result after which a poller makes short pauses, of this number of spin
/// hints: its processor may share a core with the one that works for it.
const RELAXED_POLLS: u32 = 32;
const RELAX: u32 = 8;
/// Polls of the stream that last delivered between two polls of all streams: in a row that find
/// nothing, and altogether.
const ALL_STREAMS_AFTER: u32 = 16;
const ALL_STREAMS_EVERY: u32 = 64;
/// Polls in a row that find nothing, after each of which a poller looks at the bells as well, if
/// that was how the last arrival was found.
const BELLS_EVERY: u32 = 2;

/// The results of the polls of a shard's threads.
#[repr(align(64))]
#[derive(Debug, Default)]
pub(crate) struct Hot {
    /// The queue pair for which a thread of this shard last found something; 0 = none. It is
    /// polled for completion queues that have had no completion yet.
    pub(crate) qid: AtomicU32,
    polls: AtomicU32,
    /// Polls since something came.
    idle: AtomicU32,
    /// It came for another queue pair than the one that is polled, and a bell said so.
    by_bell: AtomicBool,
}

impl Hot {
    /// Counts a poll.
    #[inline]
    pub(crate) fn count_poll(&self) {
        // Approximate: threads of one shard may lose counts to one another.
        let polls = self.polls().wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
    }

    /// The number of polls.
    pub(super) fn polls(&self) -> u32 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Whether the poll is to be one of all streams. While the last stream delivers, that is
    /// seldom: a look at the others takes words away from their senders' processors.
    #[inline]
    pub(crate) fn is_to_poll_all(&self) -> bool {
        let polls = self.polls();
        let idle = self.idle.load(Ordering::Relaxed);
        polls.is_multiple_of(ALL_STREAMS_EVERY) || (idle + 1).is_multiple_of(ALL_STREAMS_AFTER)
    }

    /// Whether the poll, of the last stream, is to look at the bells as well. Peers that take turns
    /// are found by a bell each time; the words of one that sends alone are best left to it.
    #[inline]
    pub(crate) fn is_to_hear_bells(&self) -> bool {
        let idle = self.idle.load(Ordering::Relaxed);
        self.by_bell.load(Ordering::Relaxed) && idle.is_multiple_of(BELLS_EVERY)
    }

    /// What came was for this queue pair; `by_bell`: a bell said so.
    pub(crate) fn note_found(&self, qid: u32, by_bell: bool) {
        self.qid.store(qid, Ordering::Relaxed);
        self.by_bell.store(by_bell, Ordering::Relaxed);
    }

    /// Notes whether a poll brought something; `is_shared` tells whether the sender may be waiting
    /// for this processor.
    pub(crate) fn note(&self, arrived: bool, is_shared: impl FnOnce() -> bool) {
        if arrived {
            self.idle.store(0, Ordering::Relaxed);
            return;
        }
        let idle = self.idle.load(Ordering::Relaxed).wrapping_add(1);
        self.idle.store(idle, Ordering::Relaxed);
        if idle >= RELAXED_POLLS {
            (0..RELAX).for_each(|_| std::hint::spin_loop());
        }
        let is_long = idle >= IDLE_POLLS && idle.is_multiple_of(YIELD_EVERY);
        if is_long || idle.is_multiple_of(SHARED_IDLE_POLLS) && is_shared() {
            rustix::thread::sched_yield();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `polls` polls of the stream that last delivered, those that become polls of all streams.
    fn of_all(polls: usize, arrived: bool) -> usize {
        let hot = Hot::default();
        let is_of_all = || {
            hot.count_poll();
            let is_of_all = hot.is_to_poll_all();
            hot.note(arrived, || false);
            is_of_all
        };
        std::iter::repeat_with(is_of_all)
            .take(polls)
            .filter(|all| *all)
            .count()
    }

    /// Peers that take turns are found by a bell each time; one that sends alone rings in vain.
    #[test]
    fn bells_are_heard_often_only_after_one_has_brought_something() {
        let hot = Hot::default();
        let heard = || {
            let polls = (0..64).map(|_| {
                let heard = hot.is_to_hear_bells();
                hot.note(false, || false);
                heard
            });
            polls.filter(|heard| *heard).count()
        };
        assert_eq!(heard(), 0);
        hot.note_found(7, true);
        assert_eq!(heard(), 32);
        hot.note_found(7, false);
        assert_eq!(heard(), 0);
    }

    #[test]
    fn a_stream_that_delivers_does_not_starve_the_others() {
        assert_eq!(of_all(640, true), 10);
        assert_eq!(of_all(640, false), 40);
    }
}
