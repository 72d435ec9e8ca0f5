//! Rings of datagrams, with a test for the kernel's socket.

use super::*;
use crate::stream::descriptor::Descriptors;
use crate::sys::thread_start::ThreadStart;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

fn port() -> (DatagramPort, std::net::UdpSocket) {
    let descriptors = Descriptors::new(4096, None);
    let notifications = Arc::new(NotificationPage::new(&descriptors).unwrap());
    let local = Arc::new(PortNames::new(&descriptors, ThreadStart::default()).unwrap());
    let datagram_rings = Arc::new(DatagramRings::new(&local, &notifications, &Arc::default()));
    // Keeps the number for this test.
    let reserved = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut rings = DatagramPort::open(&datagram_rings, reserved.local_addr().unwrap()).unwrap();
    rings.bind(1);
    (rings, reserved)
}

/// A sender, a receiver, and the kernel's socket between them, which the test is.
struct Link {
    near: DatagramPort,
    far: DatagramPort,
    socket: VecDeque<Vec<u8>>,
    by_ring: usize,
    buffer: Vec<u8>,
    _reserved: [std::net::UdpSocket; 2],
}

impl Link {
    fn new() -> Link {
        let ((near, one), (far, other)) = (port(), port());
        Link {
            near,
            far,
            socket: VecDeque::new(),
            by_ring: 0,
            buffer: vec![0; 16 * PACKET_ROOM],
            _reserved: [one, other],
        }
    }

    fn packet(&self, len: usize) -> Outgoing {
        Outgoing {
            at: 0,
            len,
            source: self.near.local.ip(),
            destination: self.far.local,
            traffic_class: 0,
            segment: 0,
        }
    }

    fn send(&mut self, bytes: Vec<u8>) {
        let packet = self.packet(bytes.len());
        match self.near.send(&packet, &bytes) {
            true => self.by_ring += 1,
            false => self.socket.push_back(bytes),
        }
    }

    /// As a UDP port receives.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        if self.far.receive(&mut self.buffer, &mut packets) {
            for packet in &packets {
                assert_eq!(packet.source, self.near.local);
                assert_eq!(packet.destination, self.far.local.ip());
            }
            let bytes = |packet: &Incoming| packet.bytes(&self.buffer).unwrap().to_vec();
            return packets.iter().map(bytes).collect();
        }
        self.far.look();
        match self.socket.pop_front() {
            Some(bytes) => {
                self.far.arrived(&[Incoming {
                    at: 0,
                    len: bytes.len(),
                    source: self.near.local,
                    destination: self.far.local.ip(),
                    traffic_class: 0,
                }]);
                vec![bytes]
            }
            None => {
                self.far.note_socket_empty();
                Vec::new()
            }
        }
    }

    /// Everything that is in flight.
    fn drain(&mut self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while !self.socket.is_empty() || self.far.has_data() {
            all.append(&mut self.receive());
        }
        all
    }

    /// A link whose ring is in use.
    fn in_use() -> Link {
        let mut link = Link::new();
        link.send(vec![1]);
        assert_eq!(link.drain(), [vec![1]]);
        link.send(vec![2]);
        link.send(vec![3]);
        assert_eq!(link.by_ring, 1);
        assert_eq!(link.drain(), [vec![2], vec![3]]);
        link
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the order of sends and receives, and however full the ring is, every packet
    /// arrives, in order, by the ring or by UDP.
    #[test]
    fn shm_14_datagrams_stay_in_order(steps in prop::collection::vec((any::<bool>(), 1..200u16, 4..4150usize), 1..40)) {
        let mut link = Link::new();
        let (mut sent, mut seen) = (0u32, 0u32);
        let check = |packets: Vec<Vec<u8>>, seen: &mut u32| {
            for packet in packets {
                let number = u32::from_le_bytes(packet[..4].try_into().unwrap());
                assert_eq!(number, *seen);
                *seen += 1;
            }
        };
        for (sends, count, len) in steps {
            for _ in 0..count {
                if sends {
                    let mut bytes = vec![0; len];
                    bytes[..4].copy_from_slice(&sent.to_le_bytes());
                    link.send(bytes);
                    sent += 1;
                } else {
                    let packets = link.receive();
                    check(packets, &mut seen);
                }
            }
        }
        let rest = link.drain();
        check(rest, &mut seen);
        prop_assert_eq!(seen, sent);
    }

    /// Whatever a hostile sender writes into the memory, the receiver gets packets or drops the
    /// ring.
    #[test]
    fn shm_16_any_bytes_in_a_ring_of_datagrams_are_harmless(
        words in prop::collection::vec((0..600usize, any::<u64>()), 1..20),
        small in any::<bool>(),
    ) {
        let mut link = Link::in_use();
        let Some(Way::Ring(outbound)) = link.near.ways.get(&link.far.local) else { panic!() };
        let memory = outbound.memory.clone();
        for (at, value) in words {
            let value = if small { value % 5000 } else { value };
            memory.word64(at * 8).store(value, Ordering::Relaxed);
            link.send(vec![7; 64]);
            for _ in 0..4 {
                let _ = link.receive();
            }
        }
        prop_assert!(link.far.inbound.len() <= 2);
    }
}

/// The sender's last datagram by UDP, and its first one by the ring, come after the receiver has
/// read the socket.
#[test]
fn shm_14_a_datagram_in_the_ring_waits_for_one_that_came_by_udp_meanwhile() {
    let mut link = Link::new();
    link.send(vec![1]);
    assert_eq!(link.drain(), [vec![1]]);
    assert!(!link.far.look());
    link.send(vec![2]);
    link.send(vec![3]);
    assert_eq!((link.by_ring, link.socket.len()), (1, 1));
    link.far.note_socket_empty();
    assert_eq!(link.drain(), [vec![2], vec![3]]);
}

#[test]
fn shm_15_a_closed_port_gets_a_new_offer() {
    let mut link = Link::in_use();
    let local = link.far.local;
    let peers = link.far.datagram_rings.local.clone();
    // Another process takes the port.
    link.far = port().0;
    link.far.local = local;
    link.far.listener = peers.listen(Protocol::Udp, local).unwrap();
    for n in 10..13 {
        link.send(vec![n]);
        assert_eq!(link.drain(), [vec![n]]);
    }
    let before = link.by_ring;
    link.send(vec![20]);
    assert_eq!(link.by_ring, before + 1, "in memory again");
    assert_eq!(link.drain(), [vec![20]]);
}

#[test]
fn shm_15_an_ended_senders_datagrams_are_received() {
    let mut link = Link::in_use();
    link.send(vec![4]);
    let (near, _reserved) = port();
    let old = std::mem::replace(&mut link.near, near);
    let local = old.local;
    drop(old);
    link.near.local = local;
    assert_eq!(link.drain(), [vec![4]]);
    // The new ring finds a place, and the place of the old ring is free.
    link.send(vec![5]);
    assert_eq!(link.drain(), [vec![5]]);
    assert_eq!(link.far.inbound.len(), 1);
}

#[test]
fn rings_are_bounded() {
    let link = Link::in_use();
    assert_eq!(link.near.datagram_rings.rings.load(Ordering::Relaxed), 1);
    let taken: Vec<_> = std::iter::from_fn(|| Share::take(&link.near.datagram_rings.rings, RINGS)).collect();
    assert_eq!(taken.len(), RINGS - 1);
    assert!(link.near.offered(&link.packet(1)).is_none());
    drop(taken);
    assert!(link.near.offered(&link.packet(1)).is_some());
    let ports: Vec<_> = std::iter::from_fn(|| Share::take(&link.near.datagram_rings.ports, PORTS)).collect();
    assert_eq!(ports.len(), PORTS - 1);
    assert!(DatagramPort::open(&link.near.datagram_rings, "127.0.0.1:1".parse().unwrap()).is_none());
}

/// A port that answers many short-lived senders keeps no state of those that have ended.
#[test]
fn shm_15_rings_to_closed_ports_are_dropped() {
    let mut link = Link::in_use();
    let before = (
        link.near.ways.len(),
        link.near.datagram_rings.rings.load(Ordering::Relaxed),
    );
    assert_eq!(before, (1, 1));
    link.near.forget_peers();
    assert_eq!(link.near.ways.len(), 1, "it is in use");
    let (far, reserved) = port();
    drop(std::mem::replace(&mut link.far, far));
    link.near.forget_peers();
    assert_eq!(link.near.ways.len(), 0);
    assert_eq!(link.near.datagram_rings.rings.load(Ordering::Relaxed), 0);
    drop(reserved);
}
