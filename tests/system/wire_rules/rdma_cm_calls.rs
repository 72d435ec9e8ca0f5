//! rdma_cm ids as MPA's initiator (RFC 5044 §7, RFC 6581; conformance §§1.4, 2, 3, 13.3): Requests,
//! RTR messages and Terminates byte by byte, and the events that the program gets.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use urnic_tests::framing::Framing;
use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer, hex};
use urnic_tests::startup::{CRC, ENHANCED, Frame, MARKERS, REJECT};
use urnic_tests::target_process::cm::{CmTargetProcess, Event, cm_event};
use urnic_tests::target_process::{state, status};
use urnic_tests::ulpdu::{complaint, read_response, send};

use super::rdma_cm::{ALL_FLUSHED, ECONNRESET, ETIMEDOUT, REPLY_KEY, REQUEST_KEY, rtr_write};

/// IRD and ORD of vector MPA-REQ-R2-P2P.
const DEPTHS: (u8, u8) = (16, 8);
const ECONNREFUSED: i64 = 111;
const EPROTO: i64 = 71;
/// Vector F-WRITE0-RTR.
const WRITE_RTR: &str = "000ec140 00000001 00000000 00000000 ebd34c5f";

/// An accepting Reply with this word.
pub(super) fn reply(word: u32) -> Vec<u8> {
    hex(&format!("{REPLY_KEY} 50020004 {word:08x}"))
}

/// A connect of the target that has reached the test, with its Request read.
#[track_caller]
pub(super) fn connecting(target: &mut CmTargetProcess) -> (u64, Peer, TcpListener) {
    let (id, mut peer, listener) = target.connects_to_peer(DEPTHS, &[]);
    assert_eq!(
        peer.read_bytes(24),
        hex(&format!("{REQUEST_KEY} 50020004 8010c008"))
    );
    (id, peer, listener)
}

/// Traffic goes both ways after the RTR; then the peer ends it. `ours`: number of our first Send.
#[track_caller]
pub(super) fn works(target: &mut CmTargetProcess, id: u64, peer: &mut Peer, ours: u32) {
    peer.send_ulpdus(&[send(1, b"hello")]);
    target.completes(id, &[(0, status::SUCCESS)]);
    target.sends(id, 100, 0);
    assert_eq!(peer.ulpdu(), send(ours, b""));
    target.completes(id, &[(100, status::SUCCESS)]);
    peer.finish();
    target.expects_event(id, cm_event::DISCONNECTED, 0);
    assert_eq!(peer.end(), End::Closed);
    target.completes(id, &ALL_FLUSHED[1..]);
    assert_eq!(target.state(id), state::ERR);
    target.destroys(id);
}

/// Checks that the program can still connect.
#[track_caller]
fn continues(target: &mut CmTargetProcess) {
    assert!(target.is_quiet(), "an event too many");
    let (id, mut peer, _listener) = connecting(target);
    peer.send(&reply(0x8008_8010));
    assert_eq!(peer.read_bytes(20), hex(WRITE_RTR));
    target.expects_event(id, cm_event::ESTABLISHED, 0);
    works(target, id, &mut peer, 1);
    assert!(target.is_quiet(), "an event too many");
}

/// A peer that has sent its FIN, and reads only then, gets all messages that were posted before.
#[test]
fn ddp_t_04_a_half_closed_peer_gets_what_was_posted() {
    const LEN: u64 = 20_000;
    const AFTER: u64 = 4;
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let (id, mut peer, _listener) = connecting(&mut target);
    peer.send(&reply(0x8008_8010));
    assert_eq!(peer.read_bytes(20), hex(WRITE_RTR));
    target.expects_event(id, cm_event::ESTABLISHED, 0);
    let waits = |target: &mut CmTargetProcess| {
        (0..10).all(|_| {
            std::thread::sleep(Duration::from_millis(20));
            target.has_no_completion(id)
        })
    };
    let blocked = (0x100..0x1000).find(|&wr_id| {
        target.sends(id, wr_id, LEN);
        target.has_no_completion(id) && waits(&mut target)
    });
    let blocked = blocked.expect("a stream that nobody reads is full at some time");
    let last = blocked + AFTER;
    (blocked + 1..=last).for_each(|wr_id| target.sends(id, wr_id, LEN));
    peer.finish();
    assert!(waits(&mut target) && target.is_quiet(), "the end waits for them");
    let mut arrived = 0;
    while let Some(ulpdu) = peer.next_ulpdu() {
        arrived += ulpdu.len() as u64 - 18;
    }
    assert_eq!(arrived, (last - 0x100 + 1) * LEN);
    let sent: Vec<_> = (blocked..=last).map(|wr_id| (wr_id, status::SUCCESS)).collect();
    target.completes(id, &sent);
    target.expects_event(id, cm_event::DISCONNECTED, 0);
    target.completes(id, &ALL_FLUSHED);
    assert_eq!(target.state(id), state::ERR);
    target.quits();
}

#[test]
fn every_request_vector_is_sent() {
    for (variables, depths, data, request) in [
        // MPA-REQ-R2-P2P, -PD, -CS, -ALLRTR; EMPA-39: the largest number in a byte.
        (&[][..], (16, 8), &b""[..], "50020004 8010c008"),
        (&[], (16, 8), b"ULP!", "50020008 8010c008 554c5021"),
        (&[("PEER_TO_PEER", "false")], (16, 8), b"", "50020004 00100008"),
        (
            &[("RTR_TYPES", "send,write,read")],
            (1, 1),
            b"",
            "50020004 c001c001",
        ),
        (&[("RTR_TYPES", "send")], (16, 8), b"", "50020004 c0100008"),
        (&[("RTR_TYPES", "read")], (16, 8), b"", "50020004 80104008"),
        (&[], (0, 0), b"", "50020004 8000c000"),
        // MPA-REQ-R1, -MC, -NOCRC.
        (&[("REVISION", "1")], (16, 8), b"", "40010000"),
        (&[("REVISION", "1")], (16, 8), b"no", "40010002 6e6f"),
        (
            &[("REVISION", "1"), ("MARKERS", "true")],
            (16, 8),
            b"",
            "c0010000",
        ),
        (&[("REVISION", "1"), ("CRC", "false")], (16, 8), b"", "00010000"),
        // S001-REQ: S001-01, S001-08.
        (&[("RTR_FRAME", "hex")], (16, 8), b"", "50010000"),
    ] {
        let names: Vec<(String, &str)> = variables
            .iter()
            .map(|(name, value): &(&str, &str)| (format!("URNIC_MPA_{name}"), *value))
            .collect();
        let variables: Vec<(&str, &str)> = names
            .iter()
            .map(|(name, value)| (name.as_str(), *value))
            .collect();
        let mut target = or_skip!(CmTargetProcess::start(&variables));
        let (id, mut peer, _listener) = target.connects_to_peer(depths, data);
        let bytes = hex(&format!("{REQUEST_KEY} {request}"));
        assert_eq!(peer.read_bytes(bytes.len()), bytes, "with {variables:?}");
        // MPA-S-15: and nothing after it.
        peer.stays_silent(Duration::from_millis(20));
        target.destroys(id);
        assert_eq!(peer.end(), End::Reset);
        target.quits();
    }
}

#[test]
fn empa_04_private_data_is_exact_in_both_directions() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let data: Vec<u8> = (0..508).map(|at| at as u8 ^ 0x33).collect();
    for len in [256, 508, 255] {
        let (id, mut peer, _listener) = target.connects_to_peer(DEPTHS, &data[..255]);
        let request = Frame::read(&mut peer);
        assert_eq!(request.private_data[..4], hex("8010c008"));
        assert_eq!(request.private_data[4..], data[..255]);
        peer.send(&hex(&format!("{REPLY_KEY} 5002 {:04x} 80088010", 4 + len)));
        peer.send(&data[..len]);
        if len > 255 {
            // A program cannot get them.
            target.expects_event(id, cm_event::CONNECT_ERROR, -EPROTO);
            target.destroys(id);
            continue;
        }
        let event = target.expects_event(id, cm_event::ESTABLISHED, 0);
        assert_eq!(event.private_data, data[..len]);
        assert_eq!(peer.read_bytes(20), hex(WRITE_RTR));
        works(&mut target, id, &mut peer, 1);
    }
    target.quits();
}

#[test]
fn empa_15_17_20_the_rtr_of_the_reply_is_sent_first() {
    const A: u32 = 0x8008_0010;
    const B: u32 = 0x4000_0000;
    const C: u32 = 0x8000;
    const D: u32 = 0x4000;
    for (types, answers) in [
        (
            "write,read",
            &[(C, C), (D, D), (C | D, C), (B | C, C), (B | C | D, C)][..],
        ),
        ("send,write,read", &[(B, B), (B | D, D)]),
        ("send", &[(B, B), (B | C | D, B)]),
        ("read", &[(D, D)]),
    ] {
        let mut target = or_skip!(CmTargetProcess::start(&[("URNIC_MPA_RTR_TYPES", types)]));
        for (offered, sent) in answers {
            let (id, mut peer, _listener) = target.connects_to_peer(DEPTHS, &[]);
            assert_eq!(Frame::read(&mut peer).private_data.len(), 4);
            peer.send(&reply(A | offered));
            let first = peer.ulpdu();
            let ours = match *sent {
                B => {
                    assert_eq!(first, send(1, b""));
                    2
                }
                C => {
                    assert_eq!(first, rtr_write());
                    1
                }
                _ => {
                    // Length 0, of a source STag that is not allocated but not 0.
                    assert_eq!((first[..2].to_vec(), first.len()), (vec![0x41, 0x41], 46));
                    assert_eq!(first[2..18], hex("00000000 00000001 00000001 00000000"));
                    assert_eq!(first[30..34], [0; 4]);
                    assert_ne!(first[34..38], [0; 4]);
                    let stag = u32::from_be_bytes([first[18], first[19], first[20], first[21]]);
                    peer.send_ulpdus(&[read_response(stag, 0, b"")]);
                    1
                }
            };
            target.expects_event(id, cm_event::ESTABLISHED, 0);
            assert!(target.has_no_completion(id));
            if *sent == D {
                // EMPA-19: the next Read is number 2.
                assert_eq!(target.posts(id, 4, 50, 4, (0x1000, 0x2000)), 0);
                let read = peer.ulpdu();
                assert_eq!(read[2..18], hex("00000000 00000001 00000002 00000000"));
                let stag = u32::from_be_bytes([read[18], read[19], read[20], read[21]]);
                let to = u64::from_be_bytes(read[22..30].try_into().expect("eight bytes"));
                peer.send_ulpdus(&[read_response(stag, to, &[9; 4])]);
                target.completes(id, &[(50, status::SUCCESS)]);
            }
            works(&mut target, id, &mut peer, ours);
        }
        target.quits();
    }
}

#[test]
fn empa_16_no_rtr_in_common_terminates() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    // Vector F-TERM-207. B alone, none; and A=0 where we requested peer-to-peer.
    for word in [0xc008_0010, 0x8008_0010, 0x0008_0010] {
        let (id, mut peer, _listener) = connecting(&mut target);
        peer.send(&reply(word));
        assert_eq!(
            peer.read_bytes(28),
            hex("00164147 00000000 00000002 00000001 00000000 20070000 1bd2babe"),
            "{word:08x}"
        );
        assert_eq!(peer.end(), End::Closed);
        target.expects_event(id, cm_event::CONNECT_ERROR, -EPROTO);
        target.completes(id, &ALL_FLUSHED);
        target.destroys(id);
    }
    continues(&mut target);
    target.quits();
}

#[test]
fn empa_35_more_reads_than_we_can_hold_terminate() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    // Vector F-TERM-206.
    let (id, mut peer, _listener) = connecting(&mut target);
    peer.send(&reply(0x8008_a000));
    assert_eq!(peer.ulpdu(), complaint(0x2006, &[]));
    assert_eq!(peer.end(), End::Closed);
    target.expects_event(id, cm_event::CONNECT_ERROR, -EPROTO);
    target.completes(id, &ALL_FLUSHED);
    continues(&mut target);
    target.quits();
}

#[test]
fn empa_38_a_queue_pair_that_failed_before_terminates() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    target.manages_own_queue_pairs();
    // Vector F-TERM-205.
    let (id, mut peer, _listener) = connecting(&mut target);
    peer.send(&reply(0x8008_8010));
    target.expects_event(id, cm_event::CONNECT_RESPONSE, 0);
    target.fails(id);
    assert_ne!(target.establishes(id), 0);
    assert_eq!(peer.ulpdu(), complaint(0x2005, &[]));
    assert_eq!(peer.end(), End::Closed);
    target.completes(id, &ALL_FLUSHED);
    target.destroys(id);
    target.quits();
}

#[test]
fn empa_34_reads_keep_to_the_responder_s_ird() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    // EMPA-37: "not negotiated" leaves our ORD of 8; 2 lowers it.
    for (ird, most) in [(2, 2), (0x3fff, 8)] {
        let (id, mut peer, _listener) = connecting(&mut target);
        peer.send(&reply(0x8000_8010 | ird << 16));
        assert_eq!(peer.read_bytes(20), hex(WRITE_RTR));
        let event = target.expects_event(id, cm_event::ESTABLISHED, 0);
        // EMPA-36.
        assert_eq!(event.ird, 16);
        if ird == 2 {
            assert_eq!(event.ord, 2);
        }
        for wr_id in 0..12 {
            assert_eq!(target.posts(id, 4, 50 + wr_id, 4, (0x1000, 0x2000)), 0);
        }
        let reads: Vec<Vec<u8>> = (0..most).map(|_| peer.ulpdu()).collect();
        peer.stays_silent(Duration::from_millis(100));
        let read = &reads[0];
        let stag = u32::from_be_bytes([read[18], read[19], read[20], read[21]]);
        let to = u64::from_be_bytes(read[22..30].try_into().expect("eight bytes"));
        peer.send_ulpdus(&[read_response(stag, to, &[9; 4])]);
        assert_eq!(peer.ulpdu()[..2], [0x41, 0x41]);
        target.completes(id, &[(50, status::SUCCESS)]);
        peer.reset();
        target.expects_event(id, cm_event::DISCONNECTED, 0);
    }
    target.quits();
}

#[test]
fn mpa_s_16_a_reply_byte_by_byte_and_in_one_piece_with_fpdus() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let bytes = hex(&format!("{REPLY_KEY} 50020006 80088010 6f6b"));
    for at_once in [true, false] {
        let (id, mut peer, _listener) = connecting(&mut target);
        let fpdus = peer.framed(&[send(1, b"hello"), send(2, b"again")]);
        let all = [&bytes[..], &fpdus].concat();
        peer.send_in_pieces(&all, if at_once { all.len() } else { 1 });
        assert_eq!(peer.read_bytes(20), hex(WRITE_RTR));
        assert_eq!(
            target.expects_event(id, cm_event::ESTABLISHED, 0).private_data,
            b"ok"
        );
        target.completes(id, &[(0, status::SUCCESS), (1, status::SUCCESS)]);
        peer.reset();
        target.expects_event(id, cm_event::DISCONNECTED, 0);
        target.destroys(id);
    }
    target.quits();
}

#[test]
fn mpa_s_12_empa_36_a_rejection_is_reported_completely() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    for (frame, depths, data) in [
        ("70020004 80014008", Some((8, 1)), &b""[..]),
        ("70020006 80014008 6e6f", Some((8, 1)), b"no"),
        // EMPA-33: the required ORD in the word. Without A. Not enhanced.
        ("70020004 00000020", Some((32, 0)), b""),
        ("60020002 6e6f", None, b"no"),
        ("60010002 6e6f", None, b"no"),
        ("60010000", None, b""),
    ] {
        let (id, mut peer, _listener) = connecting(&mut target);
        peer.send(&hex(&format!("{REPLY_KEY} {frame}")));
        let event = target.expects_event(id, cm_event::REJECTED, -ECONNREFUSED);
        assert_eq!(event.private_data, data, "{frame}");
        if let Some(depths) = depths {
            assert_eq!((event.ird, event.ord), depths, "{frame}");
        }
        assert_eq!(peer.end(), End::Closed, "{frame}");
        target.destroys(id);
    }
    continues(&mut target);
    target.quits();
}

/// The second attempt of a connect: revision 1 on a new connection.
#[track_caller]
fn falls_back(target: &mut CmTargetProcess, id: u64, listener: &TcpListener, data: &[u8]) {
    let mut peer = Peer::accept(listener);
    let request = Frame::read(&mut peer);
    let expected = Frame {
        request: true,
        flags: CRC,
        revision: 1,
        private_data: data.to_vec(),
    };
    assert_eq!(request, expected);
    peer.send(&hex(&format!("{REPLY_KEY} 40010002 6f6b")));
    // No RTR: the initiator sends at any time.
    assert_eq!(
        target.expects_event(id, cm_event::ESTABLISHED, 0).private_data,
        b"ok"
    );
    peer.stays_silent(Duration::from_millis(20));
    works(target, id, &mut peer, 1);
}

#[test]
fn empa_07_a_peer_of_revision_1_is_retried() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    for graceful in [false, true] {
        let (id, mut peer, listener) = target.connects_to_peer(DEPTHS, b"data");
        Frame::read(&mut peer);
        if graceful {
            peer.finish();
        } else {
            peer.reset();
        }
        falls_back(&mut target, id, &listener, b"data");
    }
    target.quits();
}

#[test]
fn empa_10_a_plain_reply_is_an_error_and_is_retried() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    for flags in ["4001", "4002"] {
        let (id, mut peer, listener) = target.connects_to_peer(DEPTHS, b"data");
        Frame::read(&mut peer);
        peer.send(&hex(&format!("{REPLY_KEY} {flags} 0000")));
        assert!(peer.read_to_end().0.is_empty());
        falls_back(&mut target, id, &listener, b"data");
    }
    target.quits();
}

#[test]
fn empa_07_a_peer_that_resets_every_attempt_rejects() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let (id, peer, listener) = connecting(&mut target);
    peer.reset();
    let mut peer = Peer::accept(&listener);
    assert_eq!(Frame::read(&mut peer).revision, 1);
    peer.reset();
    target.expects_event(id, cm_event::REJECTED, -ECONNRESET);
    continues(&mut target);
    target.quits();
}

#[test]
fn mpa_s_05_e_03_a_bad_reply_is_closed_at_once_and_reported() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    for bad in [
        // Two initiators.
        hex(&format!("{REQUEST_KEY} 50020004 8010c008")),
        // Revisions 0 and 3; too much private data; no room for the word.
        hex(&format!("{REPLY_KEY} 40000000")),
        hex(&format!("{REPLY_KEY} 50030004 80088010")),
        hex(&format!("{REPLY_KEY} 50020201 80088010")),
        hex(&format!("{REPLY_KEY} 50020002 8008")),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        vec![0; 100],
        vec![0xff; 3000],
    ] {
        let (id, mut peer, _listener) = connecting(&mut target);
        peer.send(&bad);
        let (answer, _) = peer.read_to_end();
        assert!(answer.is_empty(), "{answer:02x?} to {bad:02x?}");
        target.expects_event(id, cm_event::CONNECT_ERROR, -EPROTO);
        target.destroys(id);
    }
    continues(&mut target);
    target.quits();
}

#[test]
fn mpa_s_06_a_silent_peer_times_out() {
    let mut target = or_skip!(CmTargetProcess::start(&[(
        "URNIC_MPA_STARTUP_TIMEOUT_INITIATOR_S",
        "1"
    )]));
    let bytes = reply(0x8008_8010);
    for len in [0, 1, 19, 20, 23] {
        let (id, mut peer, _listener) = connecting(&mut target);
        peer.send(&bytes[..len]);
        let event = target.expects_event(id, cm_event::UNREACHABLE, -ETIMEDOUT);
        assert_eq!(event.private_data, b"");
        peer.end();
        target.destroys(id);
    }
    continues(&mut target);
    target.quits();
}

#[test]
fn a_port_without_a_listener_is_a_rejection() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let there = listener.local_addr().expect("a bound socket");
    drop(listener);
    let id = target.connects(there, DEPTHS, &[]);
    target.expects_event(id, cm_event::REJECTED, -ECONNREFUSED);
    continues(&mut target);
    target.quits();
}

#[test]
fn mpa_m_01_c_05_flags_of_a_reply_count_as_well() {
    let mut target = or_skip!(CmTargetProcess::start(&[("URNIC_MPA_CRC", "false")]));
    let (id, mut peer, _listener) = target.connects_to_peer(DEPTHS, &[]);
    assert_eq!(Frame::read(&mut peer).flags, ENHANCED);
    let answer = Frame {
        request: false,
        flags: CRC | MARKERS | ENHANCED,
        revision: 2,
        private_data: hex("80088010"),
    };
    peer.send(&answer.to_bytes());
    peer.inbound = Framing::new(true, true);
    peer.outbound = Framing::new(true, false);
    assert_eq!(peer.ulpdu(), rtr_write());
    target.expects_event(id, cm_event::ESTABLISHED, 0);
    target.sends(id, 100, 2000);
    assert_eq!(peer.ulpdu().len(), 2018);
    let mut bad = peer.framed(&[send(1, b"hello")]);
    bad[20] ^= 1;
    peer.send(&bad);
    assert_eq!(peer.ulpdu(), complaint(0x2002, &[]));
    target.expects_event(id, cm_event::DISCONNECTED, 0);
    target.quits();
}

#[test]
fn a_program_with_its_own_queue_pair_decides_when_to_begin() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    target.manages_own_queue_pairs();
    let (id, mut peer, _listener) = connecting(&mut target);
    peer.send(&hex(&format!("{REPLY_KEY} 50020006 80088010 6f6b")));
    let Event {
        ird,
        ord,
        private_data,
        ..
    } = target.expects_event(id, cm_event::CONNECT_RESPONSE, 0);
    assert_eq!((ird, ord, private_data), (16, 8, b"ok".to_vec()));
    // EMPA-17: the RTR is sent when the queue pair is ready for the next messages.
    peer.stays_silent(Duration::from_millis(50));
    assert_eq!(target.establishes(id), 0);
    assert_eq!(peer.read_bytes(20), hex(WRITE_RTR));
    works(&mut target, id, &mut peer, 1);
    target.quits();
}

#[test]
fn s001_01_02_the_rtr_frame_is_sent_if_requested() {
    for (option, key) in [("hex", "74522046"), ("text", "74722046")] {
        let mut target = or_skip!(CmTargetProcess::start(&[("URNIC_MPA_RTR_FRAME", option)]));
        let (id, mut peer, _listener) = target.connects_to_peer(DEPTHS, &[]);
        assert_eq!(peer.read_bytes(20), hex(&format!("{REQUEST_KEY} 50010000")));
        peer.send(&hex(&format!("{REPLY_KEY} 50010000")));
        assert_eq!(
            peer.read_bytes(20),
            hex(&format!("4d504120 49442052 {key} 72616d65 40010000"))
        );
        target.expects_event(id, cm_event::ESTABLISHED, 0);
        works(&mut target, id, &mut peer, 1);
        // S001-02.
        let (id, mut peer, _listener) = target.connects_to_peer(DEPTHS, &[]);
        assert_eq!(peer.read_bytes(20), hex(&format!("{REQUEST_KEY} 50010000")));
        peer.send(&hex(&format!("{REPLY_KEY} 40010000")));
        target.expects_event(id, cm_event::ESTABLISHED, 0);
        peer.stays_silent(Duration::from_millis(20));
        works(&mut target, id, &mut peer, 1);
        // And no RTR to a peer that rejects.
        let (id, mut peer, _listener) = target.connects_to_peer(DEPTHS, &[]);
        peer.read_bytes(20);
        let no = Frame {
            request: false,
            flags: CRC | REJECT | ENHANCED,
            revision: 1,
            private_data: Vec::new(),
        };
        peer.send(&no.to_bytes());
        target.expects_event(id, cm_event::REJECTED, -ECONNREFUSED);
        assert_eq!(peer.end(), End::Closed);
        target.quits();
    }
}
