//! The time that an empty receive queue may last, as InfiniBand's attributes give it.

use std::time::Duration;

/// Least time that an empty receive queue is borne when the sender tries again at all:
/// `min_rnr_timer` is a least time too.
pub(super) const LEAST_RNR: Duration = Duration::from_millis(100);

/// InfiniBand's table of RNR NAK timer codes, in units of 10 µs.
const RNR_TIMERS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How long a sender that tries again `rnr_retry` times bears a receiver that asks it to wait
/// `min_rnr_timer` each time; `None` = for ever.
pub(super) fn rnr_timeout(rnr_retry: u8, min_rnr_timer: u8) -> Option<Duration> {
    match rnr_retry {
        7.. => None,
        0 => Some(Duration::ZERO),
        tries => {
            let timer = RNR_TIMERS
                .get(usize::from(min_rnr_timer))
                .copied()
                .unwrap_or(65536);
            Some((Duration::from_micros(10 * u64::from(timer)) * u32::from(tries)).max(LEAST_RNR))
        }
    }
}
