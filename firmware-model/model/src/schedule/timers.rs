//! Whose time comes when.

use crate::time::Nanos;
use std::collections::{BTreeSet, HashMap};

/// Whose time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A queue pair's.
    Qp(u32),
    /// The timer of a completion queue's notification.
    Cq(u32),
    /// That of a stream in streaming mode.
    Stream(u32),
}

/// One time for each object, the earliest that was set: an object that is woken early sets its
/// timer again. So a driver that makes one object set timers repeatedly, for example by resets,
/// does not make this list longer.
#[derive(Debug, Default)]
pub(super) struct Timers {
    order: BTreeSet<(Nanos, Timer)>,
    of: HashMap<Timer, Nanos>,
}

impl Timers {
    /// Sets a timer; returns whether it is the first that is due from now on.
    pub(super) fn set(&mut self, due: Nanos, timer: Timer) -> bool {
        if let Some(set) = self.of.get_mut(&timer) {
            if *set <= due {
                return false;
            }
            self.order.remove(&(*set, timer));
            *set = due;
        } else {
            self.of.insert(timer, due);
        }
        let is_first = self.next().is_none_or(|first| due < first);
        self.order.insert((due, timer));
        is_first
    }

    /// When the first is due.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.order.first().map(|(due, _)| *due)
    }

    /// Takes the first if it is due by `now`.
    pub(super) fn take(&mut self, now: Nanos) -> Option<Timer> {
        self.next().filter(|due| *due <= now)?;
        let (_, timer) = self.order.pop_first()?;
        self.of.remove(&timer);
        Some(timer)
    }

    pub(super) fn clear(&mut self) {
        self.order.clear();
        self.of.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_has_one_timer_the_earliest() {
        let mut timers = Timers::default();
        for n in 0..1000 {
            assert!(timers.set(Nanos(5000 - n), Timer::Qp(1)));
            assert!(!timers.set(Nanos(6000 + n), Timer::Cq(1)));
            assert!(!timers.set(Nanos(5500 + n), Timer::Qp(2)));
        }
        assert_eq!((timers.order.len(), timers.of.len()), (3, 3));
        assert_eq!(timers.take(Nanos(4000)), None);
        assert_eq!(timers.next(), Some(Nanos(4001)));
        let taken: Vec<_> = std::iter::from_fn(|| timers.take(Nanos(6000))).collect();
        assert_eq!(taken, [Timer::Qp(1), Timer::Qp(2), Timer::Cq(1)]);
        assert_eq!((timers.next(), timers.of.len()), (None, 0));
        // One that ran out may be set later than it was.
        assert!(timers.set(Nanos(7000), Timer::Qp(1)));
        assert_eq!(timers.take(Nanos(7000)), Some(Timer::Qp(1)));
    }
}
