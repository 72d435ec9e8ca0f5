//! The wire, read by dissectors that others wrote.

use std::net::{Ipv4Addr, TcpListener};

use urnic_tests::capture::{Capture, Verdict};
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::peer::{Peer, hex};

/// Lets two hand-made ends say these bytes to each other (Request and Reply first), and judges their wire.
fn judged(netns: &Netns, first: &str, second: &str) -> Result<Verdict, String> {
    const REQUEST: &str = "4d504120 49442052 65712046 72616d65 40010000";
    const REPLY: &str = "4d504120 49442052 65702046 72616d65 40010000";
    let capture = Capture::start(netns, "lo")?;
    netns.within(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let mut initiator = Peer::call(listener.local_addr().expect("bound"));
        let mut responder = Peer::answer(&listener);
        initiator.send(&hex(REQUEST));
        assert_eq!(responder.take(20), hex(REQUEST));
        responder.send(&hex(REPLY));
        assert_eq!(initiator.take(20), hex(REPLY));
        for line in [first, second].iter().flat_map(|text| text.lines()).filter(|line| !line.trim().is_empty()) {
            initiator.send(&hex(line));
            responder.take(hex(line).len());
        }
        initiator.finish();
        responder.end();
    });
    Ok(capture.stop(netns, "127.0.0.1").judge())
}

const SEND: &str = "00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000 b990b10c";
const WRITE: &str = "0012c140 00001234 00000000 00000010 61626364 ef900ad8";
const BAD_CRC: &str = "00174143 00000000 00000000 00000001 00000000 69656c6c 6f000000 b990b10c";

#[test]
fn the_judge_accepts_the_vectors() {
    let netns = or_skip!(Netns::new());
    let verdict = or_skip!(judged(&netns, SEND, WRITE));
    verdict.is_clean();
    assert_eq!(verdict.good_crcs, 2);
    assert_eq!(verdict.startups, 2);
    assert_eq!(verdict.opcodes, [(0, 1), (3, 1)].into());
}

#[test]
fn the_judge_sees_a_bad_crc() {
    let netns = or_skip!(Netns::new());
    let verdict = or_skip!(judged(&netns, BAD_CRC, WRITE));
    assert_eq!((verdict.good_crcs, verdict.bad_crcs), (1, 1), "{verdict:?}");
}

#[test]
fn the_judge_sees_a_malformed_frame() {
    let netns = or_skip!(Netns::new());
    // A Read Request (opcode 1) that ends within its header.
    let short = urnic_tests::peer::sealed(&hex("4141 00000000 00000001 00000001 00000000 00000100"));
    let short: String = short.iter().map(|byte| format!("{byte:02x}")).collect();
    let verdict = or_skip!(judged(&netns, SEND, &short));
    assert!(!verdict.malformed.is_empty(), "{verdict:?}");
}
