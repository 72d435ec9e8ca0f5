//! The time that a Send waits for a posted receive, from InfiniBand's attributes.

use std::time::Duration;

/// The minimum time that a Send waits for a receive if the sender retries at all. `min_rnr_timer`
/// is also a minimum.
pub(super) const MIN_RNR: Duration = Duration::from_millis(100);

/// InfiniBand's table of RNR NAK timer codes, in units of 10 µs.
const RNR_TIMERS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The time that a Send waits for a receive: `rnr_retry` retries with `min_rnr_timer` between them;
/// `None` = no limit.
pub(super) fn rnr_timeout(rnr_retry: u8, min_rnr_timer: u8) -> Option<Duration> {
    match rnr_retry {
        7.. => None,
        0 => Some(Duration::ZERO),
        tries => {
            let timer = RNR_TIMERS
                .get(usize::from(min_rnr_timer))
                .copied()
                .unwrap_or(65536);
            Some((Duration::from_micros(10 * u64::from(timer)) * u32::from(tries)).max(MIN_RNR))
        }
    }
}
