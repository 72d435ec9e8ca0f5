//! Times that follow from InfiniBand's attributes: how long a request waits for an answer of the
//! peer, and how long a Send waits for a posted receive.

use std::time::Duration;

/// The minimum time after which a request without an answer fails: TCP sends lost data again after
/// 200 ms at the earliest, and then after twice the time. Three retransmissions must fit, so that
/// some lost packets are no error.
pub const MIN_RETRY_TIME: Duration = Duration::from_secs(2);

/// The retries on connections of rdma_cm where the program sets none: InfiniBand's maximum.
pub const RETRIES: u8 = 7;

/// The time for which a request is retried: `timeout` is the Local ACK Timeout, 4.096 µs ·
/// 2^timeout, of each of `retry_cnt` + 1 attempts (InfiniBand Architecture Specification vol. 1
/// §9.7.6.1.3). `None`: `timeout` is 0, and there is no limit.
pub fn retry_time(timeout: u8, retry_cnt: u8) -> Option<Duration> {
    let attempt = Duration::from_nanos(4096 << timeout.min(31));
    let time = attempt * (u32::from(retry_cnt) + 1);
    (timeout != 0).then(|| time.max(MIN_RETRY_TIME))
}

/// The minimum time that a Send waits for a receive if the sender retries at all. `min_rnr_timer`
/// is also a minimum.
pub(crate) const MIN_RNR: Duration = Duration::from_millis(100);

/// InfiniBand's table of RNR NAK timer codes, in units of 10 µs.
const RNR_TIMERS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The time that a Send waits for a receive: `rnr_retry` retries with `min_rnr_timer` between them;
/// `None` = no limit: 7. Larger numbers are numbers of retries, as rxe has it.
pub(crate) fn rnr_timeout(rnr_retry: u8, min_rnr_timer: u8) -> Option<Duration> {
    match rnr_retry {
        7 => None,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_retry_time_follows_the_attributes() {
        assert_eq!(retry_time(0, 7), None);
        assert_eq!(
            retry_time(14, 7),
            Some(MIN_RETRY_TIME),
            "536 ms are too short for TCP"
        );
        assert_eq!(retry_time(18, 7), Some(Duration::from_nanos(8 * (4096 << 18))));
        assert_eq!(retry_time(20, 0), Some(Duration::from_nanos(4096 << 20)));
        assert_eq!(retry_time(31, 7).map(|t| t.as_secs()), Some(70_368));
    }
}
