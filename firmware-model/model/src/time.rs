//! Time as the device sees it: passed in from the rim, so that a whole device runs under a virtual
//! clock.

use std::ops::Add;
use std::time::Duration;

/// Nanoseconds of the device's free-running clock; its zero has no meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// `CLOCK_MONOTONIC`, read without entering the kernel.
    #[inline]
    pub fn monotonic() -> Nanos {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
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
