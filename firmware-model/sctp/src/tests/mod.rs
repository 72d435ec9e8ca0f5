//! Two endpoints over a network that loses, repeats and exchanges packets, and peers that do what
//! they should not.

use std::net::SocketAddr;
use std::time::Duration;

use proptest::prelude::*;
use urnic_wire::sctp::adaptation::Adaptation;
use urnic_wire::sctp::chunk::Contents;
use urnic_wire::sctp::packet::{self, Packet, chunk_type, parameters};

use crate::completion::{COOKIE_LIFE, Key, complete, opened};
use crate::endpoint::{AssociationId, Endpoint, Event, Peer, Reason, SendError, Settings};
use crate::order::{Incoming, Message, OutOfOrder, Outgoing};
use crate::settings::SACK_LEN;

mod ends;
mod whole;

const PORTS: [u16; 2] = [4000, 5000];
const STEP: Duration = Duration::from_millis(5);

fn settings(port: u16) -> Settings {
    Settings {
        streams: 8,
        window: 64 << 10,
        unsent: 64 << 10,
        associations: 4,
        ..Settings::of_port(port)
    }
}

fn address(end: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, end as u8 + 1], 9899))
}

fn peer(end: usize) -> Peer {
    Peer {
        address: address(end),
        port: PORTS[end],
    }
}

/// Two endpoints, and the packets between them.
struct Net {
    ends: [Endpoint; 2],
    now: Duration,
    events: [Vec<Event>; 2],
    /// For each packet: 0 loses it, 1 repeats it, 2 delays it by a step, 3 by twenty; otherwise it
    /// arrives after `latency`.
    fates: Vec<u8>,
    latency: Duration,
    /// At the beginning of each three seconds all packets are lost, for this time.
    outage: Duration,
    sent: usize,
    /// Packets on their way: when they arrive, and where.
    travelling: Vec<(Duration, usize, Vec<u8>)>,
    /// The packets that were sent, with the sending end.
    log: Vec<(usize, Vec<u8>)>,
    /// The most bytes of a packet of each end.
    packet_len: [usize; 2],
}

impl Net {
    fn new(fates: &[u8]) -> Net {
        Net::of(settings, fates, Duration::ZERO)
    }

    fn of(settings: impl Fn(u16) -> Settings, fates: &[u8], latency: Duration) -> Net {
        Net {
            ends: [0, 1].map(|end| Endpoint::new(settings(PORTS[end]), [end as u8; 16])),
            now: Duration::from_secs(1),
            events: [Vec::new(), Vec::new()],
            fates: fates.to_vec(),
            latency,
            outage: Duration::ZERO,
            sent: 0,
            travelling: Vec::new(),
            log: Vec::new(),
            packet_len: [0, 1].map(|end| settings(PORTS[end]).packet_len.max(560)),
        }
    }

    fn step(&mut self) {
        self.now += STEP;
        let now = self.now;
        let arriving: Vec<_> = self.travelling.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, to, packet) in arriving {
            self.ends[to].receive(address(1 - to), &packet, self.now);
        }
        for from in 0..2 {
            self.ends[from].advance(self.now);
            while let Some((to, packet)) = self.ends[from].next_packet() {
                assert_eq!(to, address(1 - from));
                assert_is_whole(&packet, self.packet_len[from]);
                self.log.push((from, packet.clone()));
                let fate = self.fates.get(self.sent).copied().unwrap_or(9);
                self.sent += 1;
                let is_outage = self.now.as_millis() % 3000 < self.outage.as_millis();
                let (count, later) = match fate {
                    _ if is_outage => (0, 0),
                    0 => (0, 0),
                    1 => (2, 0),
                    2 => (1, 1),
                    3 => (1, 20),
                    _ => (1, 0),
                };
                for _ in 0..count {
                    let after = self.latency + STEP * later;
                    match after.is_zero() {
                        true => self.ends[1 - from].receive(address(from), &packet, self.now),
                        false => self.travelling.push((self.now + after, 1 - from, packet.clone())),
                    }
                }
            }
            while let Some(event) = self.ends[from].next_event() {
                self.events[from].push(event);
            }
        }
    }

    /// Runs until both ends have an association, at most for a simulated minute.
    fn connected(&mut self) -> [AssociationId; 2] {
        let ours = self.ends[0].connect(peer(1), self.now).expect("there is room");
        for _ in 0..12_000 {
            self.step();
            let accepted = self.events[1].iter().find_map(|event| match event {
                Event::Accepted(id, from) => Some((*id, *from)),
                _ => None,
            });
            if let Some((theirs, from)) =
                accepted.filter(|_| self.events[0].contains(&Event::Connected(ours)))
            {
                assert_eq!(from, peer(0));
                return [ours, theirs];
            }
        }
        panic!("not connected: {:?}", self.events);
    }
}

#[test]
fn sctp_01_both_ends_say_that_they_speak_ddp() {
    let mut net = Net::new(&[]);
    net.connected();
    let indications: Vec<(u8, Adaptation)> = net
        .log
        .iter()
        .filter_map(|(_, bytes)| {
            let packet = Packet::parse(bytes).expect("a packet");
            Some((packet.chunk_type, Adaptation::of_parameters(packet.init()?.1)))
        })
        .collect();
    let expected = [
        (chunk_type::INIT, Adaptation::Ddp),
        (chunk_type::INIT_ACK, Adaptation::Ddp),
    ];
    assert_eq!(indications, expected);
    assert_eq!(net.ends[0].connect(peer(1), net.now), Some(net.connected_id()));
}

/// A packet is not fragmented, and has no part of a message.
fn assert_is_whole(packet: &[u8], packet_len: usize) {
    assert!(packet.len() <= packet_len, "no packet is fragmented");
    let packet = Packet::parse(packet).expect("a packet");
    let mut data = packet.chunks().filter_map(|chunk| chunk.expect("a chunk").data());
    assert!(
        data.all(|data| data.whole && data.unordered),
        "no message is fragmented"
    );
}

impl Net {
    fn connected_id(&self) -> AssociationId {
        let id = self.events[0].iter().find_map(|event| match event {
            Event::Connected(id) => Some(*id),
            _ => None,
        });
        id.expect("connected")
    }
}

/// INITs of other kinds of peers: without the indication, and with another one.
fn inits_without_ddp() -> [Vec<u8>; 2] {
    let mut endpoint = Endpoint::new(settings(PORTS[0]), [9; 16]);
    endpoint.connect(peer(1), Duration::ZERO);
    let (_, init) = endpoint.next_packet().expect("an INIT");
    let mut plain = init[..init.len() - 8].to_vec();
    let len = (plain.len() - 12) as u16;
    plain[14..16].copy_from_slice(&len.to_be_bytes());
    let mut other = init;
    *other.last_mut().unwrap() = 2;
    [plain, other].map(|mut init| {
        packet::seal(&mut init);
        assert_eq!(Packet::parse(&init).map(|p| p.init().is_some()), Ok(true));
        init
    })
}

#[test]
fn sctp_01_and_25_a_peer_without_ddp_is_refused() {
    let mut endpoint = Endpoint::new(settings(PORTS[1]), [1; 16]);
    for init in inits_without_ddp() {
        endpoint.receive(address(0), &init, Duration::ZERO);
        let (to, answer) = endpoint.next_packet().expect("an answer");
        let answer = Packet::parse(&answer).expect("a packet");
        let (tag, _) = Packet::parse(&init).unwrap().init().unwrap();
        assert_eq!(
            (to, answer.chunk_type, answer.tag),
            (address(0), chunk_type::ABORT, tag)
        );
        assert_eq!(endpoint.associations(), 0);
    }
}

#[test]
fn requests_cost_no_memory_until_a_cookie_comes_back() {
    let mut endpoint = Endpoint::new(settings(PORTS[1]), [1; 16]);
    let mut client = Endpoint::new(settings(PORTS[0]), [2; 16]);
    client.connect(peer(1), Duration::ZERO);
    let (_, init) = client.next_packet().expect("an INIT");
    for host in 0..=255 {
        endpoint.receive(SocketAddr::from(([10, 1, 0, host], 1)), &init, Duration::ZERO);
        let (_, answer) = endpoint.next_packet().expect("an answer");
        assert_eq!(Packet::parse(&answer).unwrap().chunk_type, chunk_type::INIT_ACK);
        assert!(answer.len() < init.len() + 128, "one short packet for one");
    }
    assert_eq!((endpoint.associations(), endpoint.next_packet()), (0, None));
    // An endpoint that does not listen answers nothing.
    let mut silent = Endpoint::new(
        Settings {
            listens: false,
            ..settings(PORTS[1])
        },
        [1; 16],
    );
    silent.receive(address(0), &init, Duration::ZERO);
    assert_eq!(silent.next_packet(), None);
}

#[test]
fn cookies_of_others_and_old_ones_begin_nothing() {
    let mut net = Net::new(&[]);
    net.connected();
    let echo = net
        .log
        .iter()
        .find(|(_, bytes)| Packet::parse(bytes).unwrap().chunk_type == chunk_type::COOKIE_ECHO);
    let (_, echo) = echo.expect("a COOKIE ECHO").clone();
    let key = Key::new([1; 16]);
    let now = net.now;
    assert!(opened(&echo, &key, address(0), now).is_some());
    assert_eq!(opened(&echo, &key, address(1), now), None, "another host");
    assert_eq!(
        opened(&echo, &Key::new([3; 16]), address(0), now),
        None,
        "another endpoint"
    );
    assert_eq!(
        opened(&echo, &key, address(0), now + COOKIE_LIFE + STEP),
        None,
        "too old"
    );
    assert_eq!(
        opened(&echo, &key, address(0), Duration::ZERO),
        None,
        "from the future"
    );
    for at in 16..Packet::parse(&echo).unwrap().value.len() + 16 {
        let mut forged = echo.clone();
        forged[at] ^= 1;
        packet::seal(&mut forged);
        assert_eq!(opened(&forged, &key, address(0), now), None, "byte {at}");
    }
    // The real one again, at an endpoint that has restarted: a new association, once.
    let mut restarted = Endpoint::new(settings(PORTS[1]), [1; 16]);
    for _ in 0..3 {
        restarted.receive(address(0), &echo, now);
    }
    assert_eq!(restarted.associations(), 1);
}

#[test]
fn associations_are_limited() {
    let mut server = Endpoint::new(settings(PORTS[1]), [1; 16]);
    for host in 1..=6 {
        let from = SocketAddr::from(([10, 0, 1, host], 9899));
        let mut client = Endpoint::new(settings(PORTS[0]), [host; 16]);
        client.connect(peer(1), Duration::ZERO);
        for _ in 0..3 {
            while let Some((_, packet)) = client.next_packet() {
                server.receive(from, &packet, Duration::ZERO);
            }
            while let Some((_, packet)) = server.next_packet() {
                client.receive(address(1), &packet, Duration::ZERO);
            }
        }
        assert_eq!(server.associations(), usize::from(host).min(4));
    }
    for port in 0..6 {
        let peer = Peer { port, ..peer(0) };
        assert_eq!(server.connect(peer, Duration::ZERO), None);
    }
}

#[test]
fn sctp_02_and_08_what_is_no_ddp_ends_the_association() {
    let mut net = Net::new(&[]);
    let [ours, theirs] = net.connected();
    let long = vec![0; settings(PORTS[0]).longest_message() + 1];
    let now = net.now;
    let mut send = |stream, message| net.ends[0].send(ours, (stream, Contents::Segment), message, now);
    assert_eq!(send(0, long), Err(SendError::Invalid));
    assert_eq!(
        send(8, vec![1]),
        Err(SendError::Invalid),
        "there are eight streams"
    );
    assert_eq!(send(7, Vec::new()), Err(SendError::Invalid));
    assert_eq!(send(7, vec![0, 0, 1]), Ok(()));
    net.step();
    net.step();
    let taken = net.ends[1].take(theirs, net.now).expect("a message");
    assert_eq!(
        (taken.stream, taken.contents, &*taken.data),
        (7, Contents::Segment, &[0, 0, 1][..])
    );
    // The same DATA chunk with WebRTC's identifier, from a peer that knows the tag.
    let (_, data) = net
        .log
        .iter()
        .rev()
        .find(|(from, _)| *from == 0)
        .expect("a packet")
        .clone();
    assert_eq!(data[12], 0, "a DATA chunk");
    let mut other = data.clone();
    other[12 + 13] = 51;
    other[12 + 12..12 + 16].copy_from_slice(&51u32.to_be_bytes());
    let tsn = u32::from_be_bytes(other[16..20].try_into().unwrap()).wrapping_add(1);
    other[16..20].copy_from_slice(&tsn.to_be_bytes());
    packet::seal(&mut other);
    net.ends[1].receive(address(0), &other, net.now);
    assert_eq!(net.ends[1].take(theirs, net.now), None);
    assert_eq!(net.ends[1].associations(), 0);
    net.step();
    net.step();
    assert!(net.events[1].contains(&Event::Ended(theirs, Reason::Violation)));
    assert!(
        net.events[0].contains(&Event::Ended(ours, Reason::Aborted)),
        "the peer gets an ABORT"
    );
}

/// Two ends, and the last packet of the first one: a segment of three bytes.
fn with_a_message() -> (Net, [AssociationId; 2], Vec<u8>) {
    let mut net = Net::new(&[]);
    let ids = net.connected();
    let sent = net.ends[0].send(ids[0], (0, Contents::Segment), vec![0, 0, 1], net.now);
    assert_eq!(sent, Ok(()));
    net.step();
    assert!(net.ends[1].take(ids[1], net.now).is_some());
    let (_, data) = net.log.iter().rev().find(|(from, _)| *from == 0).unwrap().clone();
    assert_eq!(data[12], 0, "a DATA chunk");
    (net, ids, data)
}

#[test]
fn sctp_03_an_ordered_message_ends_the_association() {
    const UNORDERED: u8 = 4;
    let (mut net, [_, theirs], mut data) = with_a_message();
    assert_eq!(data[13] & UNORDERED, UNORDERED, "ours");
    data[13] &= !UNORDERED;
    let tsn = u32::from_be_bytes(data[16..20].try_into().unwrap()).wrapping_add(1);
    data[16..20].copy_from_slice(&tsn.to_be_bytes());
    packet::seal(&mut data);
    net.ends[1].receive(address(0), &data, net.now);
    net.step();
    assert!(net.events[1].contains(&Event::Ended(theirs, Reason::Violation)));
    assert_eq!(net.ends[1].associations(), 0);
}

#[test]
fn sctp_31_a_short_message_is_not_delayed() {
    let (mut net, [ours, _], _) = with_a_message();
    // Another one is in flight, which has not been acknowledged.
    for number in 1..=5 {
        let sent = net.ends[0].send(ours, (0, Contents::Segment), vec![0, number, 1], net.now);
        assert_eq!(sent, Ok(()));
        let (_, packet) = net.ends[0].next_packet().expect("it goes at once");
        assert!(
            Packet::parse(&packet)
                .unwrap()
                .chunks()
                .any(|chunk| chunk.unwrap().data().is_some())
        );
    }
}

#[test]
fn sctp_28_a_packet_has_room_for_an_acknowledgement() {
    let mut net = Net::new(&[]);
    let [ours, _] = net.connected();
    let longest = vec![0; settings(PORTS[0]).longest_message()];
    let sent = net.ends[0].send(ours, (0, Contents::Segment), longest, net.now);
    assert_eq!(sent, Ok(()));
    let (_, packet) = net.ends[0].next_packet().expect("a packet");
    assert_eq!(packet.len() + SACK_LEN, settings(1).packet_len);
}

#[test]
fn sctp_08_a_message_may_always_have_516_bytes() {
    for (packet_len, longest) in [(0, 516), (560, 516), (564, 520), (1452, 1408), (1455, 1408)] {
        let settings = Settings {
            packet_len,
            ..settings(1)
        };
        assert_eq!(settings.longest_message(), longest, "{packet_len}");
    }
}

/// Each end measures the path in its direction; neither knows what the other found.
#[test]
fn sctp_08_each_end_has_the_packets_of_its_path() {
    let mut net = Net::new(&[]);
    net.packet_len = [8972, 600];
    net.ends[0].measure_paths(|to| if to == address(1) { 8972 } else { 0 });
    net.ends[1].measure_paths(|to| if to == address(0) { 600 } else { 0 });
    let ids = net.connected();
    assert_eq!(net.ends[0].longest(ids[0]), 8928);
    assert_eq!(net.ends[1].longest(ids[1]), 556);
    for from in 0..2 {
        let longest = net.ends[from].longest(ids[from]);
        let mut send = |len| net.ends[from].send(ids[from], (0, Contents::Segment), vec![7; len], net.now);
        assert_eq!(send(longest + 1), Err(SendError::Invalid));
        for _ in 0..3 {
            assert_eq!(send(longest), Ok(()));
        }
        for _ in 0..100 {
            net.step();
        }
        let (to, now) = (1 - from, net.now);
        for _ in 0..3 {
            let message = net.ends[to].take(ids[to], now).expect("a message");
            assert_eq!(message.data.len(), longest);
        }
    }
    let longest_of = |end| {
        let of_end = net.log.iter().filter(|(from, _)| *from == end);
        of_end.map(|(_, packet)| packet.len()).max()
    };
    assert_eq!([longest_of(0), longest_of(1)], [Some(8956), Some(584)]);
}

/// RFC 9260 §3.3.2.1: IPv4 Address, IPv6 Address, Host Name Address.
const ADDRESSES: [u16; 3] = [5, 6, 11];

#[test]
fn sctp_26_an_association_has_one_address_at_each_end() {
    let mut net = Net::new(&[]);
    net.connected();
    let requests = net.log.iter().filter_map(|(_, bytes)| {
        let packet = Packet::parse(bytes).expect("a packet");
        packet.init().map(|(_, all)| parameters(all).collect::<Vec<_>>())
    });
    let requests: Vec<_> = requests.collect();
    assert_eq!(requests.len(), 2, "INIT and INIT ACK");
    for (kind, _) in requests.into_iter().flatten() {
        assert!(!ADDRESSES.contains(&kind), "another address");
    }
}

#[test]
fn sctp_09_both_directions_have_as_many_streams() {
    let mut net = Net::new(&[]);
    net.connected();
    let mut count = 0;
    for (_, bytes) in &net.log {
        let packet = Packet::parse(bytes).expect("a packet");
        if packet.init().is_some() {
            // After the tag and the window (RFC 9260 §3.3.2).
            assert_eq!(packet.value[8..12], [0, 8, 0, 8]);
            count += 1;
        }
    }
    assert_eq!(count, 2, "INIT and INIT ACK");
}

#[test]
fn a_connecting_end_takes_no_packet_without_its_tag() {
    let mut net = Net::new(&[]);
    let ours = net.ends[0].connect(peer(1), net.now).expect("there is room");
    let (_, init) = net.ends[0].next_packet().expect("an INIT");
    let mut server = Endpoint::new(settings(PORTS[1]), [8; 16]);
    server.receive(address(0), &init, net.now);
    let (_, init_ack) = server.next_packet().expect("an INIT ACK");
    // What the library takes in this state, if only one of its chunks is a SHUTDOWN ACK.
    let mut forged = init_ack.clone();
    forged[4] ^= 1;
    packet::seal(&mut forged);
    let shutdown_ack = [8, 0, 0, 4];
    let mut both = [&forged[..], &shutdown_ack].concat();
    packet::seal(&mut both);
    let mut first = [&forged[..12], &shutdown_ack].concat();
    packet::seal(&mut first);
    for packet in [&forged, &both, &first] {
        net.ends[0].receive(address(1), packet, net.now);
        if packet == &first {
            // It may be of an association that has ended here (RFC 9260 §8.5.1).
            let (_, answer) = net.ends[0].next_packet().expect("an answer");
            assert_eq!(answer[4..8], first[4..8], "the tag is reflected");
            assert_eq!(answer[12..], [chunk_type::SHUTDOWN_COMPLETE, 1, 0, 4]);
        }
        assert_eq!(net.ends[0].next_packet(), None);
        assert_eq!((net.ends[0].next_event(), net.ends[0].associations()), (None, 1));
    }
    // The right one without the indication.
    let mut plain = init_ack[..init_ack.len() - 8].to_vec();
    let len = (plain.len() - 12) as u16;
    plain[14..16].copy_from_slice(&len.to_be_bytes());
    packet::seal(&mut plain);
    net.ends[0].receive(address(1), &plain, net.now);
    assert_eq!(net.ends[0].next_event(), Some(Event::Ended(ours, Reason::NoDdp)));
    let (_, abort) = net.ends[0].next_packet().expect("an ABORT");
    assert_eq!(Packet::parse(&abort).unwrap().chunk_type, chunk_type::ABORT);
}

#[test]
fn an_init_is_alone_in_its_packet() {
    let mut client = Endpoint::new(settings(PORTS[0]), [2; 16]);
    client.connect(peer(1), Duration::ZERO);
    let (_, init) = client.next_packet().expect("an INIT");
    let mut server = Endpoint::new(settings(PORTS[1]), [1; 16]);
    let mut many = [&init[..], &init[12..], &init[12..], &[8, 0, 0, 4]].concat();
    packet::seal(&mut many);
    server.receive(address(0), &many, Duration::ZERO);
    assert_eq!(server.next_packet(), None);
}

#[test]
fn a_cookie_is_for_one_port() {
    let mut net = Net::new(&[]);
    net.connected();
    let is_echo = |bytes: &[u8]| Packet::parse(bytes).unwrap().chunk_type == chunk_type::COOKIE_ECHO;
    let (_, mut echo) = net
        .log
        .iter()
        .find(|(_, bytes)| is_echo(bytes))
        .expect("an echo")
        .clone();
    echo[1] ^= 1;
    packet::seal(&mut echo);
    assert_eq!(opened(&echo, &Key::new([1; 16]), address(0), net.now), None);
    net.ends[1].receive(address(0), &echo, net.now);
    assert_eq!(net.ends[1].associations(), 1);
}

#[test]
fn a_peer_that_restarts_ends_the_association_at_both_ends() {
    let mut net = Net::new(&[]);
    let [_, theirs] = net.connected();
    net.ends[0] = Endpoint::new(settings(PORTS[0]), [7; 16]);
    net.events[0].clear();
    net.ends[0].connect(peer(1), net.now);
    for _ in 0..100 {
        net.step();
    }
    assert!(net.events[1].contains(&Event::Ended(theirs, Reason::Aborted)));
    assert_eq!((net.ends[0].associations(), net.ends[1].associations()), (0, 0));
}

#[test]
fn a_silent_peer_ends_after_a_bounded_time() {
    let mut net = Net::new(&[0; 4096]);
    let id = net.ends[0].connect(peer(1), net.now).expect("there is room");
    let begun = net.now;
    while net.ends[0].associations() > 0 {
        assert!(net.now < begun + Duration::from_secs(600), "it waits for ever");
        net.now = net.ends[0].timeout().expect("something is due").max(net.now);
        net.step();
    }
    assert!(net.events[0].contains(&Event::Ended(id, Reason::Silent)));
}

#[test]
fn packets_of_strangers_change_nothing() {
    let mut net = Net::new(&[]);
    let [_, theirs] = net.connected();
    let log = net.log.clone();
    for (_, packet) in log {
        let is_init = Packet::parse(&packet).unwrap().init().is_some();
        net.ends[1].receive(SocketAddr::from(([10, 9, 9, 9], 9899)), &packet, net.now);
        assert!(is_init || net.ends[1].next_packet().is_none());
        while net.ends[1].next_packet().is_some() {}
    }
    assert_eq!(net.ends[1].associations(), 1);
    assert_eq!(net.ends[1].take(theirs, net.now), None);
}

#[test]
fn sctp_30_numbers_used_before_or_far_ahead_are_refused() {
    let mut incoming = Incoming::new(3, 3);
    let mut insert = |ssn: u16| incoming.insert(Contents::Segment, &[&ssn.to_be_bytes()[..], b"x"].concat());
    let wrong = |found, next| Err(OutOfOrder::Number { found, next });
    assert_eq!((insert(2), insert(0)), (Ok(true), Ok(false)));
    assert_eq!(insert(2), wrong(2, 0));
    assert_eq!(insert(3), wrong(3, 0), "three may wait");
    assert_eq!(insert(0xffff), wrong(0xffff, 0));
    assert!(incoming.take().is_some() && incoming.take().is_none());
    assert_eq!(incoming.waiting(), 1);
    assert_eq!(incoming.insert(Contents::Segment, &[0]), Err(OutOfOrder::Missing));
    assert_eq!(
        incoming.insert(Contents::Segment, &[0, 1, 7, 7, 7]),
        Err(OutOfOrder::Room),
        "one of three bytes is used"
    );
    assert_eq!(incoming.insert(Contents::Segment, &[0, 0]), wrong(0, 1));
}

/// Sends `count` messages on two streams of each direction, whatever the network does; returns what
/// came on each, in order.
fn exchanged(fates: &[u8], count: usize) -> Vec<Vec<Message>> {
    let mut net = Net::new(fates);
    let ids = net.connected();
    let mut outgoing: Vec<Outgoing> = (0..4).map(|_| Outgoing::default()).collect();
    let mut incoming: Vec<Incoming> = (0..4).map(|_| Incoming::new(1 << 14, 1 << 20)).collect();
    let mut came = vec![Vec::new(); 4];
    let mut sent = [0; 4];
    for _ in 0..40_000 {
        for at in 0..4 {
            let (from, stream) = (at / 2, at as u16 % 2);
            while sent[at] < count {
                let message = [
                    &(sent[at] as u32).to_be_bytes()[..],
                    &vec![at as u8; sent[at] * 37 % 1300],
                ]
                .concat();
                let numbered = outgoing[at].number(&message);
                match net.ends[from].send(ids[from], (stream, Contents::Segment), numbered, net.now) {
                    Ok(()) => {
                        sent[at] += 1;
                        outgoing[at].advance();
                    }
                    Err(SendError::Full) => break,
                    Err(error) => panic!("{error}"),
                }
            }
        }
        net.step();
        for (to, id) in ids.into_iter().enumerate() {
            while let Some(received) = net.ends[to].take(id, net.now) {
                let at = (1 - to) * 2 + usize::from(received.stream);
                incoming[at]
                    .insert(received.contents, &received.data)
                    .expect("a number that is due");
                came[at].extend(std::iter::from_fn(|| incoming[at].take()));
            }
        }
        if came.iter().all(|came| came.len() == count) {
            return came;
        }
    }
    panic!(
        "lost: {:?}, {:?}",
        came.iter().map(Vec::len).collect::<Vec<_>>(),
        net.events
    );
}

fn check(came: &[Vec<Message>]) {
    for (at, came) in came.iter().enumerate() {
        for (number, message) in came.iter().enumerate() {
            let expected = [
                &(number as u32).to_be_bytes()[..],
                &vec![at as u8; number * 37 % 1300],
            ]
            .concat();
            assert_eq!(message.data, expected, "message {number} of stream {at}");
        }
    }
}

#[test]
fn more_messages_than_the_window_come_whole_and_in_order() {
    check(&exchanged(&[], 400));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn sctp_13_messages_come_in_order_over_a_bad_network(fates in proptest::collection::vec(0..12u8, 0..400)) {
        check(&exchanged(&fates, 40));
    }

    #[test]
    fn any_bytes_are_taken(bytes in proptest::collection::vec(any::<u8>(), 16..120), kind in 0..16u8, knows: bool) {
        let mut net = Net::new(&[]);
        net.connected();
        let mut packet = [&4000u16.to_be_bytes()[..], &5000u16.to_be_bytes(), &bytes].concat();
        // The peer's last packet has the tag of this end.
        let (_, last) = net.log.iter().rev().find(|(from, _)| *from == 0).expect("a packet");
        if knows {
            packet[4..8].copy_from_slice(&last[4..8]);
        }
        packet[12] = kind;
        let len = (packet.len() - 12) as u16;
        packet[14..16].copy_from_slice(&len.to_be_bytes());
        packet::seal(&mut packet);
        let key = Key::new([1; 16]);
        let _ = complete(packet.clone(), &key, address(0), net.now);
        let _ = opened(&packet, &key, address(0), net.now);
        net.ends[1].receive(address(0), &packet, net.now);
        net.step();
        prop_assert!(net.ends[1].associations() <= 1);
    }
}
