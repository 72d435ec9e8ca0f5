//! What one end offers, its times and its limits.

use std::time::Duration;

/// Times of messages are 4.096 µs · 2^code.
const UNIT: Duration = Duration::from_nanos(4096);
/// Codes have 5 bits.
pub(super) const MAX_CODE: u8 = 31;
/// The longest response time that a peer may ask for: 8.6 s. The code's range would allow 2.4
/// hours, for each of 16 attempts.
const MAX_RESPONSE_CODE: u8 = 21;
/// The longest time that a peer's MRA may ask for: 69 s, which is what a kernel asks for.
const MAX_SERVICE_CODE: u8 = 24;

/// The settings of a communication manager. The defaults of the times are those of Linux.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// GUID of the channel adapter.
    pub ca_guid: u64,
    /// The upper 16 bits of the connections' numbers, by which messages find the process among
    /// those that share an address; the lower ones are random. `None`: all 32 bits are random.
    pub number_prefix: Option<u16>,
    /// The largest path MTU (`enum ibv_mtu`): requested, and the maximum that is accepted.
    pub path_mtu: u8,
    /// Code of the time until this adapter acknowledges.
    pub ack_delay: u8,
    /// Code of the time that a packet is on its way.
    pub packet_life_time: u8,
    /// Code of the time in which either communication manager answers.
    pub response_timeout: u8,
    /// Code of the time for which an MRA of this end asks.
    pub service_timeout: u8,
    /// Number of times that a message without an answer is repeated.
    pub max_cm_retries: u8,
    /// The limits.
    pub limits: Limits,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            ca_guid: 0,
            number_prefix: None,
            path_mtu: 3,
            ack_delay: 15,
            packet_life_time: 16,
            response_timeout: 20,
            service_timeout: 24,
            max_cm_retries: 15,
            limits: Limits::default(),
        }
    }
}

/// How many connections there may be. Connections in TimeWait count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// With all peers.
    pub connections: usize,
    /// With one address.
    pub per_peer: usize,
    /// Requests that the programs have not answered.
    pub undecided: usize,
    /// Those of one address: a peer does not keep out the others.
    pub undecided_per_peer: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 16384,
            per_peer: 4096,
            undecided: 1024,
            undecided_per_peer: 128,
        }
    }
}

impl Settings {
    /// The time until a message is repeated whose recipient answers in the time of `response_code`.
    pub(super) fn interval(&self, response_code: u8) -> Duration {
        time(response_code.min(MAX_RESPONSE_CODE)) + self.round_trip()
    }

    /// The time until a message is repeated after an MRA with this code.
    pub(super) fn prolonged(&self, service_code: u8) -> Duration {
        time(service_code.min(MAX_SERVICE_CODE)) + self.round_trip()
    }

    /// How long messages of a connection may still be on their way after its end (§12.9.8.4).
    pub(super) fn time_wait(&self) -> Duration {
        self.round_trip() + time(self.ack_delay)
    }

    /// The Local ACK Timeout of a queue pair whose peer acknowledges in the time of `ack_delay`.
    pub(super) fn ack_timeout(&self, ack_delay: u8) -> u8 {
        ack_timeout(ack_delay, self.packet_life_time)
    }

    fn round_trip(&self) -> Duration {
        2 * time(self.packet_life_time)
    }
}

fn time(code: u8) -> Duration {
    UNIT * (1 << code.min(MAX_CODE))
}

/// The code of twice the packet life time and the delay together. Each step of a code doubles the
/// time, so the larger one counts, and one step more if the smaller one is at least half of it.
fn ack_timeout(ack_delay: u8, packet_life_time: u8) -> u8 {
    let there_and_back = packet_life_time.saturating_add(1);
    let (small, large) = (ack_delay.min(there_and_back), ack_delay.max(there_and_back));
    (large + u8::from(small + 1 >= large)).min(MAX_CODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_follow_from_the_codes() {
        let settings = Settings::default();
        assert_eq!(time(0), Duration::from_nanos(4096));
        assert_eq!(settings.interval(20).as_millis(), 4831);
        assert_eq!(settings.time_wait().as_millis(), 671);
        assert_eq!(settings.prolonged(24).as_secs(), 69);
    }

    #[test]
    fn a_peer_cannot_ask_for_hours() {
        let settings = Settings::default();
        assert!(settings.interval(31) < Duration::from_secs(10));
        assert!(settings.prolonged(31) < Duration::from_secs(70));
        // Nor for sixteen messages at once.
        assert!(settings.interval(0) > Duration::from_millis(500));
    }

    #[test]
    fn the_ack_timeout_covers_the_path_and_the_delay() {
        for (delay, life, code) in [
            (0, 16, 17),
            (15, 16, 17),
            (16, 16, 18),
            (17, 16, 18),
            (19, 16, 19),
            (18, 16, 19),
            (31, 31, 31),
            (0, 255, 31),
        ] {
            assert_eq!(ack_timeout(delay, life), code, "{delay} {life}");
        }
    }
}
