//! Both ends over a network: any mix of messages arrives bit by bit, and completes in order.

use super::network::{Network, Random, Received, Weather, at};
use crate::message::{Kind, Message, Mtu};
use crate::requester::Status;

/// Bytes of the memory of one end that a message may write.
const STRIDE: usize = 5 * 4096 + 8;

/// What the peer of a sender has in the end.
#[derive(Default)]
struct Expected {
    received: Vec<Received>,
    /// Offset and bytes of Writes.
    written: Vec<(usize, Vec<u8>)>,
    /// Bytes of Reads, by message.
    read: Vec<(u64, Vec<u8>)>,
    originals: Vec<(u64, u64)>,
}

/// Posts messages at an end. The memory of its peer begins with a counter, then come bytes to read,
/// then a place for each Write.
fn post(network: &mut Network, end: usize, count: u64, mtu: Mtu) -> Expected {
    let mut random = Random(network.random.next());
    let readable = random.bytes(STRIDE);
    let peer = 1 - end;
    network.ends[peer].memory = vec![0; 16 + STRIDE * (count as usize + 1)];
    network.ends[peer].memory[16..16 + STRIDE].copy_from_slice(&readable);
    let mut expected = Expected::default();
    let mut counter = 0u64;
    for id in 0..count {
        let length = match random.below(4) {
            // The edges of packets.
            0 => random.below(6) * u64::from(mtu.bytes()) + random.below(3).saturating_sub(1),
            _ => random.below(u64::from(5 * mtu.bytes()) + 2),
        };
        let length = length.min(5 * u64::from(mtu.bytes()) + 1) as usize;
        let bytes = random.bytes(length);
        let place = 16 + STRIDE * (id as usize + 1);
        let (immediate, rkey) = ([id as u8, 1, 2, 3], id as u32);
        let mut receive = |immediate, invalidated, bytes: &[u8]| {
            expected.received.push(Received {
                bytes: bytes.to_vec(),
                immediate,
                invalidated,
            });
        };
        let (kind, local) = match random.below(8) {
            0 => {
                receive(None, None, &bytes);
                (Kind::Send, bytes)
            }
            1 => {
                receive(Some(immediate), None, &bytes);
                (Kind::SendImmediate(immediate), bytes)
            }
            2 => {
                receive(None, Some(rkey), &bytes);
                (Kind::SendInvalidate(rkey), bytes)
            }
            3 => {
                expected.written.push((place, bytes.clone()));
                (Kind::Write(at(place)), bytes)
            }
            4 => {
                receive(Some(immediate), None, b"");
                expected.written.push((place, bytes.clone()));
                (Kind::WriteImmediate(at(place), immediate), bytes)
            }
            5 => {
                expected.read.push((id, readable[..length].to_vec()));
                (Kind::Read(at(16)), vec![0; length])
            }
            6 => {
                expected.originals.push((id, counter));
                let add = random.next();
                counter = counter.wrapping_add(add);
                (Kind::FetchAdd { remote: at(0), add }, Vec::new())
            }
            _ => {
                expected.originals.push((id, counter));
                let (compare, swap) = (counter ^ random.below(2), random.next());
                counter = if compare == counter { swap } else { counter };
                let kind = Kind::CompareSwap {
                    remote: at(0),
                    compare,
                    swap,
                };
                (kind, Vec::new())
            }
        };
        let message = Message {
            id,
            kind,
            length: if kind.is_atomic() { 8 } else { length as u32 },
            solicited: random.percent(20),
            fence: random.percent(20),
        };
        network.post(end, message, local);
    }
    let late = network.weather.late_receives;
    let receives = (0..expected.received.len() as u64).map(|n| n * late);
    network.ends[peer].receives.extend(receives);
    expected
}

/// Compares both ends with what is expected of the messages of `end`.
fn check(network: &Network, end: usize, count: u64, expected: &Expected) {
    let (sender, peer) = (&network.ends[end], &network.ends[1 - end]);
    let ids: Vec<_> = sender.completions.iter().map(|it| it.id).collect();
    assert_eq!(ids, (0..count).collect::<Vec<_>>(), "completions in order");
    for completion in &sender.completions {
        assert_eq!(completion.status, Status::Success, "message {}", completion.id);
    }
    assert_eq!(peer.received, expected.received);
    for (place, bytes) in &expected.written {
        assert_eq!(
            peer.memory[*place..place + bytes.len()],
            *bytes,
            "a Write at {place}"
        );
    }
    for (id, bytes) in &expected.read {
        assert_eq!(sender.local[id], *bytes, "Read {id}");
    }
    assert_eq!(sender.originals, expected.originals);
    assert_eq!(peer.responder.msn() % (1 << 24), peer.responder.msn());
    assert!(peer.responder.fault().is_none() && !sender.requester.is_ended());
}

pub(super) fn both_ways(mtu: Mtu, seed: u64, weather: Weather, count: u64) -> Network {
    let mut network = Network::new(mtu, seed, weather);
    let expected = [0, 1].map(|end| post(&mut network, end, count, mtu));
    network.run();
    for (end, expected) in expected.iter().enumerate() {
        check(&network, end, count, expected);
    }
    network
}

const FAIR: Weather = Weather {
    loss: 0,
    duplication: 0,
    delay: 1,
    late_receives: 0,
    congestion: 0,
};

#[test]
fn messages_arrive_over_a_network_that_loses_nothing() {
    for (seed, mtu) in (0..).zip(Mtu::ALL) {
        let network = both_ways(mtu, seed, FAIR, 100);
        for end in &network.ends {
            assert!(end.responses > 0);
        }
    }
}

/// A network that only delays: every packet comes once, so none is sent again.
#[test]
fn no_packet_is_repeated_without_a_loss() {
    let mut network = Network::new(Mtu::Bytes1024, 5, FAIR);
    network.ends[1].receives.extend([0; 50]);
    for id in 0..50 {
        let message = Message {
            id,
            kind: Kind::Send,
            length: 4 * 1024,
            solicited: false,
            fence: false,
        };
        network.post(0, message, vec![id as u8; 4 * 1024]);
    }
    network.run();
    assert_eq!(network.ends[0].requests, 200);
    assert_eq!(network.ends[0].completions.len(), 50);
    assert!(network.ends[1].responses <= 100, "acknowledgements come together");
}

#[test]
fn messages_arrive_over_a_bad_network() {
    for seed in 0..60 {
        let mtu = Mtu::ALL[seed as usize % Mtu::ALL.len()];
        let weather = Weather {
            loss: 1 + seed % 6,
            duplication: seed % 5,
            delay: if seed % 2 == 0 { 1 } else { 40_000 },
            late_receives: if seed % 3 == 0 { 500_000 } else { 0 },
            congestion: seed % 4,
        };
        println!("seed {seed}: {weather:?}");
        both_ways(mtu, seed, weather, 60);
    }
}

#[test]
fn a_long_read_is_requested_in_parts_of_the_window() {
    let mut network = Network::new(Mtu::Bytes256, 9, Weather { loss: 1, ..FAIR });
    let bytes = network.random.bytes(1 << 20);
    network.ends[1].memory = bytes.clone();
    let message = Message {
        id: 1,
        kind: Kind::Read(at(0)),
        length: 1 << 20,
        solicited: false,
        fence: false,
    };
    network.post(0, message, vec![0; 1 << 20]);
    network.run();
    assert_eq!(network.ends[0].local[&1], bytes);
    // 4096 packets, at most 64 for each request.
    assert!(network.ends[0].requests >= 64);
    assert_eq!(network.ends[0].completions.len(), 1);
}

#[test]
fn a_dead_peer_ends_the_connection_in_the_time_of_the_attributes() {
    let mut network = Network::new(Mtu::Bytes1024, 1, Weather { loss: 100, ..FAIR });
    for id in 0..3 {
        let message = Message {
            id,
            kind: Kind::Send,
            length: 10_000,
            solicited: false,
            fence: false,
        };
        network.post(0, message, vec![0; 10_000]);
    }
    network.run();
    let statuses: Vec<_> = network.ends[0].completions.iter().map(|it| it.status).collect();
    assert_eq!(
        statuses,
        [Status::RetryExceeded, Status::Flushed, Status::Flushed]
    );
    // The first transmission and seven more, each for a Local ACK Timeout of code 8.
    assert_eq!(network.now, 8 * (4096 << 8));
}

#[test]
fn a_receive_that_never_comes_ends_the_connection_unless_the_limit_is_off() {
    let mut network = Network::new(Mtu::Bytes1024, 1, FAIR);
    let mut attributes =
        super::network::requester_attributes(Mtu::Bytes1024, network.ends[1].responder.expected());
    attributes.rnr_retry = 2;
    network.ends[0].requester = crate::requester::Requester::new(attributes);
    let message = Message {
        id: 0,
        kind: Kind::Send,
        length: 10,
        solicited: false,
        fence: false,
    };
    network.post(0, message, vec![0; 10]);
    network.run();
    assert_eq!(network.ends[0].completions[0].status, Status::RnrRetryExceeded);
    assert_eq!(network.ends[0].requests, 3);
    // Without a limit the message waits for as long as it takes: 100 ms, 30 us each time.
    let mut network = Network::new(Mtu::Bytes1024, 1, FAIR);
    network.ends[1].receives.push_back(100_000_000);
    network.post(0, message, vec![0; 10]);
    network.run();
    assert_eq!(network.ends[0].completions[0].status, Status::Success);
    assert!(network.now >= 100_000_000 && network.ends[0].requests > 2000);
}

#[test]
fn rights_that_are_missing_end_the_connection() {
    for (kind, ends_with) in [
        (Kind::Write(at(1 << 30)), Status::RemoteAccess),
        (Kind::Read(at(1 << 30)), Status::RemoteAccess),
        (
            Kind::FetchAdd {
                remote: at(1 << 30),
                add: 1,
            },
            Status::RemoteAccess,
        ),
        (
            Kind::FetchAdd {
                remote: at(4),
                add: 1,
            },
            Status::RemoteInvalidRequest,
        ),
    ] {
        let mut network = Network::new(Mtu::Bytes256, 1, FAIR);
        network.ends[1].memory = vec![0; 100];
        let message = |id, kind, length| Message {
            id,
            kind,
            length,
            solicited: false,
            fence: false,
        };
        network.post(0, message(1, Kind::Write(at(0)), 50), vec![7; 50]);
        let length = if kind.is_atomic() { 8 } else { 700 };
        network.post(0, message(2, kind, length), vec![8; 700]);
        network.post(0, message(3, Kind::Write(at(0)), 50), vec![9; 50]);
        network.run();
        let statuses: Vec<_> = network.ends[0].completions.iter().map(|it| it.status).collect();
        assert_eq!(
            statuses,
            [Status::Success, ends_with, Status::Flushed],
            "{kind:?}"
        );
        assert_eq!(network.ends[1].memory[..50], [7; 50]);
    }
}
