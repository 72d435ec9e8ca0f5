//! Time as the device sees it: passed in from the rim, so that a whole device runs under a virtual
//! clock.

use std::cell::Cell;
use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nanoseconds of the device's free-running clock; its zero has no meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// `CLOCK_MONOTONIC`, read without entering the kernel.
    #[inline]
    pub fn monotonic() -> Nanos {
        Nanos::read(rustix::time::ClockId::Monotonic)
    }

    /// `CLOCK_MONOTONIC` at the last tick of the kernel, 10 ms ago or less. To read that takes a
    /// quarter of the time.
    #[inline]
    fn at_last_tick() -> Nanos {
        Nanos::read(rustix::time::ClockId::MonotonicCoarse)
    }

    #[inline]
    fn read(clock: rustix::time::ClockId) -> Nanos {
        let t = rustix::time::clock_gettime(clock);
        Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
    }

    /// The earliest of several times, of which mostly none is set.
    #[inline]
    pub(crate) fn earliest<const N: usize>(times: [Option<Nanos>; N]) -> Option<Nanos> {
        match times.iter().all(Option::is_none) {
            true => None,
            false => times.into_iter().flatten().min(),
        }
    }

    /// The time from `earlier` to this; zero if `earlier` is later.
    #[inline]
    pub fn since(self, earlier: Nanos) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Nanos {
    type Output = Nanos;

    #[inline]
    fn add(self, duration: Duration) -> Nanos {
        Nanos(
            self.0
                .saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// The source of the time.
#[derive(Debug)]
pub(crate) enum Clock {
    /// The system's monotonic clock.
    Monotonic,
    /// The last [`Device::step`](crate::Device::step).
    Manual(AtomicU64),
}

impl Clock {
    #[inline]
    pub(crate) fn now(&self) -> Nanos {
        match self {
            Clock::Monotonic => Nanos::monotonic(),
            Clock::Manual(now) => Nanos(now.load(Ordering::Relaxed)),
        }
    }

    #[inline]
    fn roughly(&self) -> Nanos {
        match self {
            Clock::Monotonic => Nanos::at_last_tick(),
            Clock::Manual(now) => Nanos(now.load(Ordering::Relaxed)),
        }
    }
}

/// The time of one run of a queue pair: the clock is read once, when the time is first requested. A
/// poll that finds nothing needs no time, and reading the clock would take a part of its time.
#[derive(Debug)]
pub struct Now<'a> {
    clock: &'a Clock,
    read: Cell<Option<Nanos>>,
}

impl<'a> Now<'a> {
    /// By a clock that was not read yet.
    #[inline]
    pub(crate) fn of(clock: &'a Clock) -> Now<'a> {
        Now {
            clock,
            read: Cell::new(None),
        }
    }

    /// This time.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn at(now: Nanos) -> Now<'static> {
        Now {
            clock: &Clock::Monotonic,
            read: Cell::new(Some(now)),
        }
    }

    /// The time.
    #[inline]
    pub fn get(&self) -> Nanos {
        self.read.get().unwrap_or_else(|| {
            let now = self.clock.now();
            self.read.set(Some(now));
            now
        })
    }

    /// The time, or up to 10 ms before: where that is enough, it costs less.
    #[inline]
    pub(crate) fn roughly(&self) -> Nanos {
        self.read.get().unwrap_or_else(|| self.clock.roughly())
    }
}
