//! The packets on the wire, checked by tshark's independent dissectors.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};

use urnic_tests::capture::{Capture, Dissection, Wire};
use urnic_tests::netns::Netns;
use urnic_tests::peer::{Peer, hex};
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::{Pair, or_skip};

/// Sends these bytes between two hand-made ends (Request and Reply first), and dissects the
/// packets.
fn dissected(netns: &Netns, first: &str, second: &str) -> Result<Dissection, String> {
    const REQUEST: &str = "4d504120 49442052 65712046 72616d65 40010000";
    const REPLY: &str = "4d504120 49442052 65702046 72616d65 40010000";
    let capture = Capture::start(netns, "lo")?;
    netns.within(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let mut initiator = Peer::connect(listener.local_addr().expect("bound"));
        let mut responder = Peer::accept(&listener);
        initiator.send(&hex(REQUEST));
        assert_eq!(responder.read_bytes(20), hex(REQUEST));
        responder.send(&hex(REPLY));
        assert_eq!(initiator.read_bytes(20), hex(REPLY));
        for line in [first, second]
            .iter()
            .flat_map(|text| text.lines())
            .filter(|line| !line.trim().is_empty())
        {
            initiator.send(&hex(line));
            responder.read_bytes(hex(line).len());
        }
        initiator.finish();
        responder.end();
    });
    Ok(capture.stop(netns, "127.0.0.1").dissect())
}

const SEND: &str = "00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000 b990b10c";
const WRITE: &str = "0012c140 00001234 00000000 00000010 61626364 ef900ad8";
const BAD_CRC: &str = "00174143 00000000 00000000 00000001 00000000 69656c6c 6f000000 b990b10c";

#[test]
fn tshark_accepts_the_vectors() {
    let netns = or_skip!(Netns::new());
    let dissection = or_skip!(dissected(&netns, SEND, WRITE));
    dissection.is_clean();
    assert_eq!(dissection.good_crcs, 2);
    assert_eq!(dissection.startups, 2);
    assert_eq!(dissection.opcodes, [(0, 1), (3, 1)].into());
}

#[test]
fn tshark_reports_a_bad_crc() {
    let netns = or_skip!(Netns::new());
    let dissection = or_skip!(dissected(&netns, BAD_CRC, WRITE));
    assert_eq!(
        (dissection.good_crcs, dissection.bad_crcs),
        (1, 1),
        "{dissection:?}"
    );
}

#[test]
fn tshark_reports_a_malformed_frame() {
    let netns = or_skip!(Netns::new());
    // A Read Request (opcode 1) that ends within its header.
    let short = urnic_tests::framing::Framing::default()
        .frame(&hex("4141 00000000 00000001 00000001 00000000 00000100"));
    let short: String = short.iter().map(|byte| format!("{byte:02x}")).collect();
    let dissection = or_skip!(dissected(&netns, SEND, &short));
    assert!(!dissection.malformed.is_empty(), "{dissection:?}");
}

/// Runs pairs of programs on a private loopback interface, and captures their packets.
fn wire_of(lines: &[&str], variables: &[(&str, &str)]) -> Result<Wire, String> {
    installed("ib_write_bw")?;
    let netns = Netns::new()?;
    let capture = Capture::start(&netns, "lo")?;
    for line in lines {
        let (name, options) = line.split_once(' ').expect("a program and its options");
        let program = Program::new(name).line(options);
        // The wire is TCP's.
        let program = netns.program(program.env("URNIC_SAME_HOST", "off"));
        let mut pair = Pair::new(&program);
        for (name, value) in variables {
            pair = pair.env(name, value);
        }
        pair.succeeds();
    }
    Ok(capture.stop(&netns, "127.0.0.1"))
}

/// Programs that use every operation.
const PROGRAMS: [&str; 4] = [
    "ibv_rc_pingpong -n 50 -s 5000 -g 0",
    "ib_write_lat -F -n 50 -s 3001",
    "ib_read_bw -F -n 50 -s 70000",
    "ib_send_bw -F -n 50 -s 200000",
];

#[test]
fn every_frame_is_well_formed_and_every_crc_is_good() {
    let dissection = or_skip!(wire_of(&PROGRAMS, &[])).dissect();
    dissection.is_clean();
    assert_eq!(dissection.markers, 0);
    assert!(dissection.startups >= 8, "{dissection:?}");
    // Write, Read Request, Read Response, Send (RFC 5040 §4.3).
    assert!(
        [0, 1, 2, 3]
            .iter()
            .all(|opcode| dissection.opcodes.contains_key(opcode)),
        "{dissection:?}"
    );
}

#[test]
fn every_frame_with_markers_is_well_formed() {
    // Not every CRC is checked: where a marker falls between two FPDUs, tshark leaves it out of the
    // second's CRC, against RFC 5044 §4.4 item 2 and Figure 5. With Sends of this size no marker
    // falls there.
    let dissection = or_skip!(wire_of(
        &["ibv_rc_pingpong -n 20 -s 100 -g 0"],
        &[("URNIC_MPA_MARKERS", "true")]
    ))
    .dissect_as_captured();
    assert!(dissection.markers > 0, "{dissection:?}");
    assert!(
        dissection.good_crcs > 0 && dissection.malformed.is_empty(),
        "{dissection:?}"
    );
}

#[test]
fn without_crc_every_frame_is_well_formed() {
    let dissection = or_skip!(wire_of(
        &PROGRAMS,
        &[("URNIC_MPA_CRC", "false"), ("URNIC_LOG", "off")]
    ))
    .dissect();
    assert!(
        dissection.startups >= 8 && dissection.malformed.is_empty() && dissection.bad_crcs == 0,
        "{dissection:?}"
    );
    assert!(
        [0, 1, 2, 3]
            .iter()
            .all(|opcode| dissection.opcodes.contains_key(opcode)),
        "{dissection:?}"
    );
}

#[test]
fn connections_have_the_requested_type_of_service() {
    let netns = or_skip!(Netns::new());
    or_skip!(installed("ucmatose"));
    let capture = or_skip!(Capture::start(&netns, "lo"));
    for address in ["127.0.0.1", "::1"] {
        let ucmatose = netns.program(
            Program::new("ucmatose")
                .line("-c 2 -C 3 -S 20 -t 72")
                .env("URNIC_SAME_HOST", "off"),
        );
        let mut server = ucmatose.clone().args(["-b", address]).spawn();
        server.wait_until_listening(7471);
        ucmatose.args(["-s", address]).run().success();
        server.wait().success();
    }
    let wire = capture.stop(&netns, "127.0.0.1");
    // Only the initiator's program requests one.
    for (field, ends) in [
        ("ip.dsfield", "ip.dst == 127.0.0.1"),
        ("ipv6.tclass", "ipv6.dst == ::1"),
    ] {
        let from_initiator = format!("tcp.dstport == 7471 && {ends}");
        let seen = wire.tshark(&["-T", "fields", "-e", field], &from_initiator);
        let classes: Vec<&str> = seen.lines().collect();
        assert!(classes.len() > 10, "{seen}");
        assert!(
            classes.iter().all(|class| class.ends_with("48")),
            "{field}: {seen}"
        );
    }
}

/// A pingpong of 20,000 bytes over a veth, captured at one end. `completion` is the option of both
/// programs.
fn veth(completion: &str) -> Result<Wire, String> {
    installed("ibv_rc_pingpong")?;
    let netns = Netns::pair()?;
    let capture = Capture::start(&netns[0], "veth0")?;
    let program = Program::new("ibv_rc_pingpong")
        .line("-g 0 -s 20000 -n 50")
        .env("URNIC_COMPLETION", completion);
    let mut pair = Pair::new(&program).at("10.77.0.1");
    pair.server = netns[0].program(pair.server);
    pair.client = netns[1].program(pair.client);
    pair.succeeds();
    Ok(capture.stop(&netns[0], "10.77.0.2"))
}

#[test]
fn a_veth_carries_the_same() {
    or_skip!(veth("delivered")).dissect().is_clean();
}

#[test]
fn mpa_f_11_on_an_idle_link_segments_begin_where_fpdus_begin() {
    // The answer that confirms delivery would leave together with the next Send, and the segments
    // of both begin where TCP divides them.
    let wire = or_skip!(veth("taken"));
    let fields = ["-T", "fields", "-e", "tcp.stream", "-e", "tcp.payload"];
    let (mut mpa, mut fpdus) = (BTreeSet::new(), 0);
    for line in wire.tshark(&fields, "tcp.len > 0").lines() {
        let (stream, payload) = line.split_once('\t').expect("two fields");
        let segment = hex(payload);
        if segment.starts_with(b"MPA ID ") {
            mpa.insert(stream.to_owned());
            continue;
        }
        // The other connection is the program's own.
        if !mpa.contains(stream) {
            continue;
        }
        // A ULPDU with the headers of DDP and RDMAP for a Send, a Write or a Read: version bits,
        // and no other opcode (RFC 5041 §4.1, 5040 §4.1).
        let header = segment.get(2..4).unwrap_or_default();
        assert!(
            matches!(header, [0x01 | 0x41 | 0x81 | 0xc1, 0x40..=0x43]),
            "a segment begins with {:02x?}",
            &segment[..segment.len().min(20)]
        );
        fpdus += 1;
    }
    assert!(fpdus >= 100, "only {fpdus} segments");
}

#[test]
fn mpa_f_17_no_packet_may_be_fragmented() {
    let wire = or_skip!(veth("delivered"));
    assert_eq!(
        wire.tshark(&["-T", "fields", "-e", "frame.number"], "tcp && ip.flags.df == 0"),
        ""
    );
    assert_ne!(
        wire.tshark(&["-T", "fields", "-e", "frame.number"], "tcp && ip.flags.df == 1"),
        ""
    );
}
