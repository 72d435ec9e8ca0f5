//! Delays of the bytes that pass.

use std::time::Duration;

use crate::random::fraction;

/// Longest delay, whatever the rate.
const LONGEST: Duration = Duration::from_secs(60);

/// A time, and how much it varies; and a rate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Delay {
    /// The time.
    pub time: Duration,
    /// It varies by at most this, in both directions.
    pub jitter: Duration,
    /// Bits in a second; 0 = no limit.
    pub rate: u64,
}

/// The delay between sending and arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lateness {
    /// Time on the slow part of the path. Later bytes wait for this time, too.
    pub transfer: Duration,
    /// Time on the remaining path.
    pub time: Duration,
}

impl Delay {
    /// The delay at one occasion: a time within the jitter, by a random number.
    pub(crate) fn drawn(self, random: u64) -> Delay {
        let jitter = self.jitter.as_nanos() as f64 * (2.0 * fraction(random) - 1.0);
        Delay {
            time: limited(self.time.as_nanos() as f64 + jitter),
            jitter: Duration::ZERO,
            ..self
        }
    }

    /// The delay of `len` bytes.
    pub fn lateness(self, len: usize) -> Lateness {
        let transfer = match self.rate {
            0 => Duration::ZERO,
            rate => limited(len as f64 * 8.0 * 1e9 / rate as f64),
        };
        Lateness {
            transfer,
            time: self.time,
        }
    }
}

/// This number of nanoseconds, at most [`LONGEST`]: a longer delay would look like the end of the
/// connection.
fn limited(nanos: f64) -> Duration {
    Duration::from_nanos(nanos.max(0.0) as u64).min(LONGEST)
}
