//! The settings of an endpoint.

use std::time::Duration;

use urnic_wire::sctp::chunk::MIN_MULPDU;
use urnic_wire::sctp::packet::HEADER_LEN;

/// Bytes of a DATA chunk before its user data.
const DATA_LEN: usize = 16;
/// Bytes of a SACK chunk without gaps and duplicates, which the library may put before messages.
pub(crate) const SACK_LEN: usize = 16;
/// The shortest maximum of packets: one with the shortest maximum of messages.
const LEAST_PACKET: usize = HEADER_LEN + SACK_LEN + DATA_LEN + MIN_MULPDU as usize;

/// Bytes of the DATA chunk of a message, with its padding.
pub(crate) fn chunk_len(message_len: usize) -> usize {
    (DATA_LEN + message_len).next_multiple_of(4)
}

/// The settings of an endpoint.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Its SCTP port.
    pub port: u16,
    /// The longest SCTP packet, so that its UDP datagram is not fragmented; 560 if it is less. See
    /// also [`Endpoint::measure_paths`](crate::endpoint::Endpoint::measure_paths).
    pub packet_len: usize,
    /// Streams of an association, in each direction (RFC 5043 §8).
    pub streams: u16,
    /// Bytes that a peer may have in the receive buffer of an association.
    pub window: usize,
    /// Messages that a peer may have there: short ones take more memory than their bytes.
    pub unread: usize,
    /// Bytes of an association that may wait to be sent, with the headers of their chunks.
    pub unsent: usize,
    /// Messages of a stream that may wait there.
    pub unsent_of_stream: usize,
    /// Messages of a stream that may be unacknowledged; 32767 if it is more (RFC 5043 §10).
    pub in_flight: usize,
    /// Most associations. One that has ended counts until its last message is
    /// [taken](crate::endpoint::Endpoint::take) or [forgotten](crate::endpoint::Endpoint::forget).
    pub associations: usize,
    /// Whether peers may begin associations.
    pub listens: bool,
    /// Its times.
    pub times: Times,
}

impl Settings {
    /// An endpoint that listens at this SCTP port: packets for a network of 1500 bytes, a mebibyte
    /// of each kind for an association.
    pub fn of_port(port: u16) -> Settings {
        Settings {
            port,
            // IPv6 and UDP take 48 bytes.
            packet_len: 1452,
            streams: 1024,
            window: 1 << 20,
            unread: 4096,
            unsent: 1 << 20,
            unsent_of_stream: usize::MAX,
            in_flight: MAX_IN_FLIGHT,
            associations: 1024,
            listens: true,
            times: Times::default(),
        }
    }

    /// The longest packet, whose length is a multiple of four.
    pub(crate) fn longest_packet(&self) -> usize {
        self.packet_len.max(LEAST_PACKET) / 4 * 4
    }

    /// The most bytes of DATA chunks in a packet. RFC 5043 §9 recommends room for control chunks.
    pub(crate) fn longest_bundle(&self) -> usize {
        self.longest_packet() - HEADER_LEN - SACK_LEN
    }

    /// The longest message.
    pub fn longest_message(&self) -> usize {
        self.longest_bundle() - DATA_LEN
    }

    pub(crate) fn most_in_flight(&self) -> usize {
        self.in_flight.clamp(1, MAX_IN_FLIGHT)
    }
}

/// Messages of a stream that may be unacknowledged: half of the DDP-SSNs, less one.
const MAX_IN_FLIGHT: usize = 32767;

/// The times of an endpoint's associations.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// The retransmission timeout while no round trip has been measured (`RTO.Initial` of RFC 9260
    /// §16); also the time after which the first packet of an association is repeated, which
    /// doubles after the second.
    pub rto_initial: Duration,
    /// The least retransmission timeout. A peer may delay an acknowledgement by 0.2 s.
    pub rto_min: Duration,
    /// The most, without the doubling at each retransmission.
    pub rto_max: Duration,
    /// How often each of the first two packets of an association is repeated
    /// (`Max.Init.Retransmits`).
    pub requests: u32,
    /// After this time without a packet the peer is asked for an answer (`HB.interval`).
    pub heartbeat: Duration,
    /// An association ends after so many times of `heartbeat` in which its peer sent nothing. (A
    /// count of retransmissions would also end one whose peer answers, with its window closed.)
    pub unanswered: u32,
}

impl Default for Times {
    /// A peer that was killed is noticed after 10 s. The connection to nothing fails after 16 s.
    fn default() -> Times {
        Times {
            rto_initial: Duration::from_millis(500),
            rto_min: Duration::from_millis(400),
            rto_max: Duration::from_secs(4),
            requests: 5,
            heartbeat: Duration::from_secs(2),
            unanswered: 5,
        }
    }
}

impl Times {
    /// The longest time between two retransmissions of a message. It is longer than that of
    /// heartbeats, because a retransmission puts the heartbeat off: a peer with a closed window
    /// answers only the heartbeat.
    pub(crate) fn longest_backoff(&self) -> Duration {
        self.rto_max.max(self.heartbeat * 2)
    }
}
