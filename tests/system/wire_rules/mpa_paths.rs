//! MPA over a path between two network namespaces: small FPDUs whose acknowledgements are lost, and
//! path MTUs that are reported by ICMP (RFC 5044 §5.1, A.1, A.5.1).

use std::net::{Ipv4Addr, SocketAddrV4};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto};
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::peer::Peer;
use urnic_tests::program::Program;
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::startup::Frame;
use urnic_tests::target_process::{ARENA_SEED, Link, PAGE, QpParams, TargetProcess, filled, status};
use urnic_tests::ulpdu::{send, write};
use urnic_tests::wait::{TIME_LIMIT, until};

const VICTIM: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);

/// A target in the first namespace, and its connection with a peer in the second.
struct Path {
    netns: [Netns; 2],
    target: TargetProcess,
    link: Link,
}

impl Path {
    fn new() -> Result<Self, String> {
        let netns = Netns::pair()?;
        let mut target = TargetProcess::start_by(&[], |program| netns[0].program(program))?;
        target.expects_peers_at(PEER);
        let (qp, request) = target.awaits_request(&QpParams::default());
        let at = SocketAddrV4::new(VICTIM, target.listener(qp).port());
        let mut peer = netns[1].within(|| Peer::connect(at.into()));
        peer.send(&request.to_bytes());
        assert!(!Frame::read(&mut peer).request);
        peer.send_ulpdus(&[write(1, 0, b"")]);
        let link = Link { qp, peer };
        Ok(Self { netns, target, link })
    }

    /// Makes the target send this many bytes; returns the lengths of the FPDUs' ULPDUs.
    fn sends(&mut self, msn: u32, len: usize) -> Vec<usize> {
        let Self { target, link, .. } = self;
        target.sends(link.qp, u64::from(msn), len as u64);
        target.completes(link.qp, &[(u64::from(msn), status::SUCCESS)]);
        let (mut came, mut lengths) = (Vec::<u8>::new(), Vec::new());
        while came.len() < len {
            let ulpdu = link.peer.ulpdu();
            lengths.push(ulpdu.len());
            came.extend(&ulpdu[18..]);
        }
        assert!(came == filled(ARENA_SEED, PAGE + len)[PAGE..], "other bytes came");
        lengths
    }

    /// A value of the kernel for the target's connection, for instance `mss`.
    fn socket_value(&self, name: &str) -> u32 {
        let port = self.target.listener(self.link.qp).port();
        // The target has a connection with itself, too.
        let filter = format!("-tinH state established sport = :{port} and dst {PEER}");
        let output = self.netns[0]
            .program(Program::plain("ss").line(&filter))
            .run()
            .success();
        let found = output
            .split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix(':'));
        found
            .and_then(|number| number.parse().ok())
            .unwrap_or_else(|| panic!("no {name}: {output}"))
    }
}

#[test]
fn mpa_f_11_small_fpdus_wait_for_no_acknowledgement() {
    let mut path = or_skip!(Path::new());
    // No segment of the peer reaches the target any more. Nagle's algorithm would hold each small
    // segment but the first for ever, as long as no probe for a loss (RFC 8985 §7) takes them
    // along.
    let no_probes = "echo 0 >/proc/sys/net/ipv4/tcp_early_retrans";
    path.netns[0]
        .program(Program::plain("bash").args(["-c", no_probes]))
        .run()
        .success();
    path.netns[1].ip(&format!("route add blackhole {VICTIM}/32"));
    for id in 101..=104 {
        path.target.sends(path.link.qp, id, 5);
    }
    let bytes = path.target.dump("arena", PAGE, 5);
    for msn in 1..=4 {
        assert_eq!(path.link.peer.ulpdu(), send(msn, &bytes));
    }
    path.netns[1].ip(&format!("route del blackhole {VICTIM}/32"));
    path.target.completes(
        path.link.qp,
        &[101, 102, 103, 104].map(|id| (id, status::SUCCESS)),
    );
    path.link.peer.send_ulpdus(&[send(1, b"hello")]);
    assert_eq!(path.target.received(path.link.qp), (0, 5));
    path.target.quits();
}

/// Internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

/// "Fragmentation needed", with this MTU, about the segment that the target would send next (RFC
/// 792, RFC 1191): a TCP that checks sequence numbers accepts it. `packet`: its last one.
fn frag_needed(packet: &[u8], mtu: u16) -> Vec<u8> {
    let header = usize::from(packet[0] & 0xf) * 4;
    let tcp = &packet[header..];
    let payload = packet.len() - header - usize::from(tcp[12] >> 4) * 4;
    let seq = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]).wrapping_add(payload as u32);
    let mut message = vec![3, 4, 0, 0, 0, 0];
    message.extend(mtu.to_be_bytes());
    message.extend(&packet[..header]);
    message.extend(&tcp[..4]);
    message.extend(seq.to_be_bytes());
    let sum = checksum(&message).to_be_bytes();
    message[2..4].copy_from_slice(&sum);
    message
}

#[test]
fn mpa_f_17_a_reported_mtu_of_68_is_clamped() {
    const MTU: u16 = 68;
    const LEN: usize = 4000;
    or_skip!(installed("ss"));
    or_skip!(in_process(
        "a served device's streams are in its server's network"
    ));
    let mut path = or_skip!(Path::new());
    let sockets = path.netns[1].within(|| {
        let raw = |protocol| rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(protocol));
        raw(ipproto::TCP).and_then(|tcp| Ok((tcp, raw(ipproto::ICMP)?)))
    });
    let (sniffer, icmp) = or_skip!(sockets.map_err(|errno| format!("raw sockets: {errno}")));
    let before = path.sends(1, LEN);
    assert!(before[0] > 1000, "a path of 1500: {before:?}");
    assert_eq!(path.socket_value("pmtu"), 1500);

    let port = path.target.listener(path.link.qp).port();
    let mut last = None;
    let mut packet = [0; 1 << 16];
    while let Ok((_, len)) = rustix::net::recv(&sniffer, &mut packet[..], RecvFlags::DONTWAIT) {
        let header = usize::from(packet[0] & 0xf) * 4;
        if packet[header..header + 2] == port.to_be_bytes() {
            last = Some(packet[..len].to_vec());
        }
    }
    let message = frag_needed(&last.expect("a segment of the target's"), MTU);
    let there = SocketAddrV4::new(VICTIM, 0);
    rustix::net::sendto(&icmp, &message, SendFlags::empty(), &there).expect("the namespace is ours");
    let pmtu = until(TIME_LIMIT, || {
        Some(path.socket_value("pmtu")).filter(|pmtu| *pmtu < 1500)
    });
    let pmtu = pmtu.expect("the report is taken, so that this test shows something");
    assert!(pmtu > 5 * u32::from(MTU), "taken for {pmtu}");

    // The connection continues, and FPDUs shrink to the new segments, but no further than to the
    // least MULPDU.
    let mut msn = 1;
    let shrunk = until(TIME_LIMIT, || {
        msn += 1;
        let lengths = path.sends(msn, LEN);
        let (last, full) = lengths.split_last().expect("FPDUs");
        assert!(*last > 18 && full.iter().all(|len| *len >= 128), "{lengths:?}");
        full.iter().all(|len| *len < pmtu as usize).then_some(())
    });
    assert!(shrunk.is_some(), "FPDUs stay longer than segments");
    path.link.peer.send_ulpdus(&[send(1, b"hello")]);
    assert_eq!(path.target.received(path.link.qp), (0, 5));
    path.target.is_healthy();
    path.target.quits();
}
