//! Members in one process: the port is the kernel's, the peers are sockets.

use super::forwarded;
use super::*;
use crate::stream::same_host::{LocalSocket, Protocol};
use crate::stream::tcp::Tcp;
use crate::testing::mock::wait_for;
use rustix::net::{SendFlags, send};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicU8, Ordering};
use urnic_wire::mad::{
    self, CommIds, ConnectRequest, DISCONNECT_PRIVATE_DATA, DisconnectRequest, Mad, ReadyToUse,
};
use urnic_wire::mad::{READY_PRIVATE_DATA, REQUEST_PRIVATE_DATA, ServiceRequest};

/// A queue pair of its own device.
struct Member {
    ports: Arc<RocePorts>,
    port: RocePort,
    qpn: u32,
}

/// An address that no other test has, and no other process of them.
fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    IpAddr::from([127, 64 | high & 63, low, NEXT.fetch_add(1, Ordering::Relaxed)])
}

fn device() -> Arc<RocePorts> {
    let descriptors = Descriptors::new(1024, None);
    let network = Tcp {
        descriptors: descriptors.clone(),
        same_host: None,
    };
    Arc::new(RocePorts::new(
        Arc::new(network),
        descriptors,
        ThreadStart::default(),
    ))
}

impl Member {
    fn of(ports: &Arc<RocePorts>, own: IpAddr, qpn: u32) -> Member {
        Member::named(ports, own, (qpn, None))
    }

    /// A queue pair that gives the number of its member.
    fn named(ports: &Arc<RocePorts>, own: IpAddr, (qpn, number): (u32, Option<u16>)) -> Member {
        let (port, _) = ports.open(&[own], (qpn, number), qpn).unwrap();
        let ports = ports.clone();
        Member { ports, port, qpn }
    }

    /// On a device of its own, which takes packets from `peer`.
    fn new(own: IpAddr, qpn: u32, peer: IpAddr) -> Member {
        Member::on(&device(), own, qpn, peer)
    }

    /// On this device, which takes packets from `peer`.
    fn on(ports: &Arc<RocePorts>, own: IpAddr, qpn: u32, peer: IpAddr) -> Member {
        let mut member = Member::of(ports, own, qpn);
        member
            .port
            .keep_from(Sources::Peer(SocketAddr::new(peer, UDP_PORT), own));
        member
    }

    fn dispatch(&self) -> Dispatched {
        self.ports.dispatch().0
    }

    /// The numbers of the packets that are there.
    fn received(&mut self) -> Vec<u32> {
        let mut buffer = vec![0; MESSAGES * LONG_ROOM];
        let mut numbers = Vec::new();
        loop {
            let mut packets = Vec::new();
            self.port.receive(&mut buffer, &mut packets);
            if packets.is_empty() {
                return numbers;
            }
            for packet in &packets {
                let bytes = packet.bytes(&buffer).unwrap();
                assert_eq!(bytes.len(), 100);
                numbers.push(u32::from_be_bytes(*bytes[8..].first_chunk().unwrap()));
            }
        }
    }

    /// Whether the queue pair has a socket for the flow from this peer.
    fn has_flow_of(&self, peer: &UdpSocket) -> bool {
        let peer = peer.local_addr().unwrap();
        let state = self.ports.state.lock();
        state.inboxes[&self.qpn]
            .flow
            .is_some_and(|flow| flow.peer == peer)
    }

    fn sockets(&self) -> usize {
        self.ports.state.lock().open.as_ref().unwrap().sockets.len()
    }
}

/// A packet to a queue pair, with a number in the place of the PSN.
fn packet(qpn: u32, number: u32) -> [u8; 100] {
    let mut packet = [0; 100];
    packet[4..8].copy_from_slice(&qpn.to_be_bytes());
    packet[8..12].copy_from_slice(&number.to_be_bytes());
    packet
}

fn peer(ip: IpAddr) -> UdpSocket {
    UdpSocket::bind((ip, 0)).unwrap()
}

/// Has all members read until each has received so many packets; returns them, sorted.
fn all_received(members: &mut [Member], each: usize) -> Vec<Vec<u32>> {
    let mut received = vec![Vec::new(); members.len()];
    wait_for("all packets", || {
        for (member, numbers) in members.iter_mut().zip(&mut received) {
            member.dispatch();
            numbers.extend(member.received());
        }
        received.iter().all(|numbers| numbers.len() >= each).then_some(())
    });
    received.iter_mut().for_each(|numbers| numbers.sort_unstable());
    received
}

#[test]
fn packets_reach_the_member_that_they_name() {
    let (own, peers) = (address(), address());
    let mut members = [0x10_0001, 0x20_0002, 0x30_0003].map(|qpn| Member::new(own, qpn, peers));
    let sockets: Vec<_> = (0..12).map(|_| peer(peers)).collect();
    let mut expected: Vec<Vec<u32>> = vec![Vec::new(); members.len()];
    for round in 0..20 {
        for (number, socket) in (round * 12..).zip(&sockets) {
            let at = number as usize % members.len();
            expected[at].push(number);
            let sent = socket.send_to(&packet(members[at].qpn, number), (own, UDP_PORT));
            assert_eq!(sent.unwrap(), 100);
        }
        // Not more than a socket's buffer has room for.
        let received = all_received(&mut members, 4);
        for (expected, received) in expected.iter_mut().zip(received) {
            assert_eq!(mem::take(expected), received);
        }
    }
}

/// A peer at `peers` whose flow the kernel does not give to this member.
fn stray_flow(member: &Member, other: &Member, own: IpAddr, peers: IpAddr) -> UdpSocket {
    wait_for("a flow of the other member", || {
        let socket = peer(peers);
        socket.send_to(&packet(member.qpn, 0), (own, UDP_PORT)).unwrap();
        let passed = |other: &Member| {
            other.dispatch();
            other
                .ports
                .state
                .lock()
                .open
                .as_ref()?
                .members
                .as_ref()?
                .has_others()
                .then_some(())
        };
        // The member reads its own flows only.
        passed(other).map(|()| socket)
    })
}

/// So that it stays when members come and end.
#[test]
fn the_first_packet_of_a_connection_opens_a_socket_for_its_flow() {
    let (own, peers) = (address(), address());
    let mut near = Member::new(own, 0x10_0001, peers);
    let socket = peer(peers);
    let send = |number| {
        socket
            .send_to(&packet(0x10_0001, number), (own, UDP_PORT))
            .unwrap()
    };
    send(0);
    wait_for("a packet", || (near.received() == [0]).then_some(()));
    assert!(near.has_flow_of(&socket));
    // None of these reads.
    let _others = [0x20_0000, 0x30_0000, 0x40_0000, 0x50_0000].map(|qpn| Member::new(own, qpn, peers));
    send(1);
    wait_for("a packet", || (near.received() == [1]).then_some(()));
}

#[test]
fn a_flow_that_another_member_gets_moves_to_a_socket_of_its_own() {
    let (own, peers) = (address(), address());
    let mut near = Member::new(own, 0x10_0001, peers);
    let far = Member::new(own, 0x20_0002, peers);
    let socket = stray_flow(&near, &far, own, peers);
    assert_eq!(near.sockets(), 1);
    wait_for("the passed packet", || {
        near.dispatch();
        near.has_flow_of(&socket).then_some(())
    });
    assert_eq!(near.sockets(), 2);
    near.received();
    // The other member does not run any more, as a process that is stopped.
    for number in 1..50 {
        socket
            .send_to(&packet(near.qpn, number), (own, UDP_PORT))
            .unwrap();
        let received = wait_for("a packet", || {
            Some(near.received()).filter(|numbers| !numbers.is_empty())
        });
        assert_eq!(received, [number]);
    }
    // The socket goes with the connection.
    near.port.keep_from(Sources::None);
    near.dispatch();
    assert_eq!(near.sockets(), 1);
}

/// The queue pair that a flow had ends while its socket has a packet for another member.
#[test]
fn packets_in_the_socket_of_a_flow_that_ends_reach_the_others() {
    let (own, peers) = (address(), address());
    let near = Member::new(own, 0x10_0001, peers);
    let far = Member::new(own, 0x20_0002, peers);
    let second = Member::on(&near.ports, own, 0x10_0002, peers);
    let socket = stray_flow(&near, &far, own, peers);
    wait_for("the passed packet", || {
        far.dispatch();
        near.dispatch();
        near.has_flow_of(&socket).then_some(())
    });
    for qpn in [far.qpn, second.qpn] {
        socket.send_to(&packet(qpn, 3), (own, UDP_PORT)).unwrap();
    }
    drop(near);
    assert_eq!(all_received(&mut [far, second], 1), [[3], [3]]);
}

/// As an adapter sends that has one source port for all of its queue pairs.
#[test]
fn one_flow_may_carry_packets_of_several_members() {
    let (own, peers) = (address(), address());
    let mut members = [0x10_0001, 0x20_0002, 0x30_0003].map(|qpn| Member::new(own, qpn, peers));
    let socket = peer(peers);
    for round in 0..10 {
        for (at, member) in members.iter().enumerate() {
            let number = round * 3 + at as u32;
            socket
                .send_to(&packet(member.qpn, number), (own, UDP_PORT))
                .unwrap();
        }
        let received = all_received(&mut members, 1);
        let expected: Vec<_> = (round * 3..).take(3).map(|number| vec![number]).collect();
        assert_eq!(received, expected);
    }
    // Each member opens one socket for the flow at most.
    assert!(members.iter().all(|member| member.sockets() <= 2));
}

#[test]
fn queue_pairs_of_one_device_share_the_socket_of_a_flow() {
    let (own, peers) = (address(), address());
    let near = Member::new(own, 0x10_0001, peers);
    let far = Member::new(own, 0x20_0002, peers);
    let mut second = Member::on(&near.ports, own, 0x10_0002, peers);
    let socket = stray_flow(&near, &far, own, peers);
    socket.send_to(&packet(second.qpn, 0), (own, UDP_PORT)).unwrap();
    wait_for("both packets", || {
        for member in [&near, &second, &far] {
            member.dispatch();
        }
        (near.has_flow_of(&socket) && second.has_flow_of(&socket)).then_some(())
    });
    assert_eq!(near.sockets(), 2);
    drop(near);
    assert_eq!(second.sockets(), 2);
    second.port.keep_from(Sources::None);
    second.dispatch();
    assert_eq!(second.sockets(), 1);
}

#[test]
fn packets_of_strangers_and_for_unknown_members_are_dropped() {
    let (own, peers) = (address(), address());
    let mut members = [0x10_0001, 0x20_0002].map(|qpn| Member::new(own, qpn, peers));
    let strangers: Vec<_> = (0..8).map(|_| peer(address())).collect();
    for stranger in &strangers {
        for qpn in [0x10_0001, 0x20_0002, 0x10_0009, 0x99_9999, 0, 7] {
            stranger.send_to(&packet(qpn, 0), (own, UDP_PORT)).unwrap();
        }
    }
    let mut dropped = 0;
    wait_for("all packets", || {
        for member in &mut members {
            let done = member.dispatch();
            // Only some members are searched in a call.
            dropped += done.strange + done.dropped;
        }
        (dropped == 8 * 6).then_some(())
    });
    for member in &mut members {
        assert!(member.received().is_empty());
        assert_eq!(member.sockets(), 1);
    }
}

/// A connection as another process of the user may make it.
fn connection_to(member: &Member, own: IpAddr) -> LocalSocket {
    let names = PortNames::new(&member.ports.descriptors, ThreadStart::default()).unwrap();
    let port = (member.qpn >> 8) as u16;
    names.connect(Protocol::Roce, SocketAddr::new(own, port)).unwrap()
}

fn message(source: IpAddr, own: IpAddr, qpn: u32) -> Vec<u8> {
    let incoming = Incoming {
        at: 0,
        len: 100,
        source: SocketAddr::new(source, 50_000),
        destination: own,
        traffic_class: 0,
    };
    [&forwarded::header(&incoming)[..], &packet(qpn, 5)].concat()
}

#[test]
fn what_is_passed_on_is_checked_and_not_passed_on_again() {
    let (own, peers) = (address(), address());
    let mut near = Member::new(own, 0x10_0001, peers);
    let mut far = Member::new(own, 0x20_0002, peers);
    let give = |bytes: &[u8], near: &Member| {
        let socket = connection_to(near, own);
        send(socket.descriptor().unwrap(), bytes, SendFlags::empty()).unwrap();
        let mut done = Dispatched::default();
        for _ in 0..4 {
            let more = near.dispatch();
            done.strange += more.strange;
        }
        (done.strange, socket.is_hung_up())
    };
    assert_eq!(give(&message(peers, own, near.qpn), &near), (0, false));
    assert_eq!(near.received(), [5]);
    // Not from the peer, not to the own address, for another member, for nobody.
    for (source, to, qpn) in [
        (address(), own, near.qpn),
        (peers, address(), near.qpn),
        (peers, own, far.qpn),
        (peers, own, 0x99_9999),
    ] {
        assert_eq!(give(&message(source, to, qpn), &near), (1, false));
    }
    // No message of a member.
    let mut long = message(peers, own, near.qpn);
    long.resize(forwarded::MESSAGE_ROOM + 1, 0);
    for bytes in [&[0; 200][..], &[], &long] {
        assert_eq!(give(bytes, &near), (0, true));
    }
    far.dispatch();
    assert_eq!((near.received(), far.received()), (vec![], vec![]));
}

#[test]
fn packets_for_a_member_that_does_not_read_are_dropped() {
    let (own, peers) = (address(), address());
    let near = Member::new(own, 0x10_0001, peers);
    let far = Member::new(own, 0x20_0002, peers);
    let socket = stray_flow(&near, &far, own, peers);
    let mut dropped = 0;
    wait_for("a full connection", || {
        for number in 0..64 {
            socket
                .send_to(&packet(near.qpn, number), (own, UDP_PORT))
                .unwrap();
        }
        dropped += far.dispatch().dropped;
        (dropped > 0).then_some(())
    });
}

#[test]
fn connections_beyond_the_limit_are_closed() {
    let (own, peers) = (address(), address());
    let near = Member::new(own, 0x10_0001, peers);
    let mut kept = Vec::new();
    // More than the listener's queue could keep.
    for _ in 0..300 {
        kept.push(connection_to(&near, own));
        near.dispatch();
    }
    let open = kept.iter().filter(|socket| !socket.is_hung_up()).count();
    assert_eq!(open, 256);
}

#[test]
fn a_name_that_is_taken_does_not_prevent_a_queue_pair() {
    let (own, peers) = (address(), address());
    let first = Member::new(own, 0x10_0001, peers);
    let second = Member::new(own, 0x10_0002, peers);
    drop(first);
    drop(second);
    // The names are free again.
    let third = Member::new(own, 0x10_0001, peers);
    connection_to(&third, own);
}

/// A management datagram in a packet.
fn management(message: mad::Message) -> Vec<u8> {
    let mut packet = vec![0; 20 + mad::MAD_LEN + 4];
    packet[4..8].copy_from_slice(&MANAGEMENT_QPN.to_be_bytes());
    let mad = Mad {
        transaction_id: 1,
        message,
    };
    mad.emit(&mut packet[20..]);
    packet
}

/// A SIDR_REQ.
fn service(service_id: u64) -> mad::Message {
    mad::Message::Request(ServiceRequest {
        request_id: 0x7777_0000,
        pkey: 0xffff,
        service_id,
        private_data: [0; REQUEST_PRIVATE_DATA],
    })
}

/// A REQ, with zeroes in what does not matter here.
fn connect(service_id: u64) -> mad::Message {
    const ATTRIBUTE: usize = 16;
    const HEADER: usize = 24;
    let mut datagram = management(service(0))[20..][..mad::MAD_LEN].to_vec();
    datagram[ATTRIBUTE..][..2].copy_from_slice(&0x10_u16.to_be_bytes());
    datagram[HEADER..].fill(0);
    match mad::parse(&datagram).unwrap().message {
        mad::Message::Connect(request) => mad::Message::Connect(ConnectRequest {
            service_id,
            ..request
        }),
        other => panic!("{other:?}"),
    }
}

#[test]
fn management_datagrams_reach_the_member_of_the_service_or_connection() {
    let (own, peers) = (address(), address());
    // The number of the first device is in its queue pair's, that of the second one in none.
    let pair = Member::new(own, 0x10_0001, peers);
    let devices = [pair.ports.clone(), device()];
    let mut members = [(&devices[0], None), (&devices[1], Some(0x2000))].map(|(device, number)| {
        let mut member = Member::named(device, own, (MANAGEMENT_QPN, number));
        member.port.keep_from(Sources::Any);
        member
    });
    let named = |at: usize, number, ip| devices[at].name_service(number, vec![ip], true);
    let _first = named(0, 0x1000, own).unwrap();
    let second = named(1, 0x2000, own).unwrap();
    assert_eq!(named(0, 0x2000, own).err(), Some(Errno::ADDRINUSE));
    // One number at two addresses, of two devices.
    let _elsewhere = named(0, 0x4000, address()).unwrap();
    let _here = named(1, 0x4000, own).unwrap();
    let ids = |port: u32| CommIds {
        local: 0x7777_0000,
        remote: port << 16 | 9,
    };
    let ready = |port| {
        mad::Message::Ready(ReadyToUse {
            ids: ids(port),
            private_data: [0; READY_PRIVATE_DATA],
        })
    };
    let disconnect = |port| {
        mad::Message::Disconnect(DisconnectRequest {
            ids: ids(port),
            remote_qpn: 0,
            private_data: [0; DISCONNECT_PRIVATE_DATA],
        })
    };
    let mut arrived = |message, recipients: &[usize]| {
        let bytes = management(message);
        for _ in 0..8 {
            peer(peers).send_to(&bytes, (own, UDP_PORT)).unwrap();
        }
        let mut counts = [0; 2];
        wait_for("all datagrams", || {
            for (member, count) in members.iter_mut().zip(&mut counts) {
                member.dispatch();
                let mut buffer = vec![0; BATCH * PACKET_ROOM];
                let mut packets = Vec::new();
                member.port.receive(&mut buffer, &mut packets);
                *count += packets.len();
            }
            (counts.iter().sum::<usize>() == 8).then_some(())
        });
        for (at, count) in counts.iter().enumerate() {
            assert!(*count == 0 || recipients.contains(&at), "{counts:?}: {message:?}");
        }
    };
    arrived(service(0x0106_1000), &[0]);
    arrived(service(0x0106_2000), &[1]);
    arrived(ready(0x1000), &[0]);
    arrived(ready(0x2000), &[1]);
    arrived(disconnect(0x2000), &[1]);
    arrived(connect(0x0106_1000), &[0]);
    arrived(connect(0x0106_2000), &[1]);
    arrived(service(0x0106_4000), &[1]);
    // The first device has all addresses of IPv6, the second one those of IPv4.
    let _ipv6 = named(0, 0x5000, ANYWHERE.ip()).unwrap();
    let _ipv4 = named(1, 0x5000, std::net::Ipv4Addr::UNSPECIFIED.into()).unwrap();
    arrived(service(0x0106_5000), &[1]);
    // The port space has no effect.
    arrived(service(0x0111_1000), &[0]);
    // The member that reads them answers them.
    arrived(service(0x0106_3000), &[0, 1]);
    arrived(ready(0x3000), &[0, 1]);
    drop(second);
    std::thread::sleep(std::time::Duration::from_millis(10));
    arrived(service(0x0106_2000), &[0, 1]);
    drop(pair);
}

/// Else any sender could make the members close their connections.
#[test]
fn what_no_connection_sends_is_not_passed_on() {
    let (own, peers) = (address(), address());
    let mut near = Member::new(own, 0x10_0001, peers);
    let far = Member::new(own, 0x20_0002, peers);
    let socket = stray_flow(&near, &far, own, peers);
    near.dispatch();
    near.received();
    let mut strange = 0;
    let mut buffer = vec![0; MESSAGES * LONG_ROOM];
    for len in 8..16 {
        let short = &packet(near.qpn, 1)[..len];
        socket.send_to(short, (own, UDP_PORT)).unwrap();
        wait_for("the short packet", || {
            let read = near.port.receive(&mut buffer, &mut Vec::new());
            strange += read.strange + near.dispatch().strange + far.dispatch().strange;
            (strange as usize == len - 7).then_some(())
        });
    }
    socket.send_to(&packet(near.qpn, 2), (own, UDP_PORT)).unwrap();
    wait_for("a packet", || {
        far.dispatch();
        near.dispatch();
        (near.received() == [2]).then_some(())
    });
}

/// More than one call names are ready, and have nothing; the packets behind them are found.
#[test]
fn packets_behind_many_connections_that_ended_are_found() {
    let (own, peers) = (address(), address());
    let mut near = Member::new(own, 0x10_0001, peers);
    let connections: Vec<_> = (0..40).map(|_| connection_to(&near, own)).collect();
    near.dispatch();
    drop(connections);
    peer(peers)
        .send_to(&packet(near.qpn, 1), (own, UDP_PORT))
        .unwrap();
    let inbox = |near: &Member| near.ports.state.lock().inboxes[&near.qpn].packets.len();
    near.dispatch();
    assert_eq!(inbox(&near), 1);
    assert_eq!(near.received(), [1]);
}
