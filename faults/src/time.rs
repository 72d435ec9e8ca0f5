//! Times of plans: their clock, and how a specification writes them.

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The units of a specification, in nanoseconds, the smallest first.
pub(crate) const UNITS: [(&str, u64); 4] =
    [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];

/// The time since the first call in this process.
pub(crate) fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// A time as a specification writes it, exactly: `500us`, `1500ms`, `2s`.
pub(crate) struct Written(pub(crate) Duration);

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let divides = |unit: &&(&str, u64)| nanos.is_multiple_of(u128::from(unit.1));
        let (name, unit) = UNITS.iter().rfind(divides).unwrap_or(&UNITS[0]);
        write!(f, "{}{name}", nanos / u128::from(*unit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_exactly() {
        for (nanos, written) in [
            (0, "0s"),
            (1, "1ns"),
            (500_000, "500us"),
            (1_500_000_000, "1500ms"),
            (60_000_000_000, "60s"),
        ] {
            assert_eq!(Written(Duration::from_nanos(nanos)).to_string(), written);
        }
    }
}
