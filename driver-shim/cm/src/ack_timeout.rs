//! The time after which a request fails whose peer does not answer, from InfiniBand's attributes.

use std::time::Duration;

/// The minimum of that time: TCP sends lost data again after 200 ms at the earliest, and then after
/// twice the time. Three retransmissions must fit, so that some lost packets are no error.
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
