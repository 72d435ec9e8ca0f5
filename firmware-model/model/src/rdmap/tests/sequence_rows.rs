//! Rows about all kinds of messages: the common fields of their headers, the order in which they
//! are sent and complete, and the messages that wait for the fence of start-up.

use super::{Scripted, vector};
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::Opcode;

const SUCCESS: WcStatus = WcStatus::Success;
const STAG: u32 = 0x7700;

fn opcode_of(ulpdu: &[u8]) -> u8 {
    ulpdu[1] & 0xf
}

fn is_last(ulpdu: &[u8]) -> bool {
    ulpdu[0] & 0x40 != 0
}

/// One message of each kind, in this order: Send, Write of several segments, Read, Write with
/// immediate, FetchAdd, Send with invalidate.
fn post_all_kinds(peer: &mut Scripted) -> Region {
    let region = peer.node.filled(&pattern(4000));
    let works = [
        Work::send(1).sge(region.sge(0, 4000)),
        Work::write(2, STAG, 0x1000).sge(region.sge(0, 4000)),
        Work::read(3, STAG, 0x2000).sge(region.sge(0, 8)),
        Work::new(Opcode::WriteImm, 4)
            .to(STAG, 0x3000)
            .immediate([1, 2, 3, 4])
            .sge(region.sge(0, 4000)),
        Work::new(Opcode::FetchAdd, 5)
            .to(STAG, 0x4000)
            .atomic(1, 0)
            .sge(region.sge(8, 8)),
        Work::new(Opcode::SendInv, 6).to(STAG, 0).sge(region.sge(0, 4000)),
    ];
    works.iter().for_each(|work| peer.node.post(work));
    region
}

#[test]
fn ddp_h_04_of_every_kind_only_the_last_segment_has_l() {
    let mut peer = Scripted::new();
    let region = post_all_kinds(&mut peer);
    let mut ulpdus = peer.output_ulpdus();
    peer.send_ulpdu(&read_request(1, (5, 0), 4000, (region.stag, region.base)));
    ulpdus.extend(peer.output_ulpdus());
    // Send, Write, Read Request, Write, Immediate Data, Atomic Request, Send with Invalidate, Read
    // Response.
    let segments: Vec<(u8, bool)> = ulpdus
        .iter()
        .map(|ulpdu| (opcode_of(ulpdu), is_last(ulpdu)))
        .collect();
    let three = |opcode| [(opcode, false), (opcode, false), (opcode, true)];
    let expected = [
        &three(3)[..],
        &three(0),
        &[(1, true)],
        &three(0),
        &[(8, true), (10, true)],
        &three(4),
        &three(2),
    ];
    assert_eq!(segments, expected.concat());
}

#[test]
fn mpa_f_14_versions_of_every_message_are_1() {
    let mut peer = Scripted::new();
    let region = post_all_kinds(&mut peer);
    let mut ulpdus = peer.output_ulpdus();
    // Messages that answer have this version too: a Read Response, an Atomic Response, a Terminate.
    peer.send_ulpdu(&read_request(1, (5, 0), 8, (region.stag, region.base)));
    let mut atomic = Vec::new();
    [0, 9, region.stag]
        .iter()
        .for_each(|word: &u32| atomic.extend(word.to_be_bytes()));
    [region.base, 1, 0, 0, u64::MAX]
        .iter()
        .for_each(|long: &u64| atomic.extend(long.to_be_bytes()));
    peer.send_ulpdu(&untagged(0x41, 0x4a, 0, 1, 2, 0, &atomic));
    peer.send_ulpdu(&send_segment(true, 7, 0, b"x"));
    ulpdus.extend(peer.output_ulpdus());
    let mut kinds: Vec<u8> = ulpdus.iter().map(|ulpdu| opcode_of(ulpdu)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds, [0, 1, 2, 3, 4, 7, 8, 10, 11]);
    for ulpdu in ulpdus {
        assert_eq!((ulpdu[0] & 3, ulpdu[1] >> 6), (1, 1), "{:02x?}", &ulpdu[..2]);
    }
}

#[test]
fn mpa_f_14_versions_of_another_revision_are_refused() {
    // DDP and RDMAP version 0 are those of MPA revision 0 (RFC 5044 appendix C).
    for (ulpdu, code) in [
        (untagged(0x40, 0x43, 0, 0, 1, 0, b"x"), 0x1206),
        (tagged(0xc0, 0x40, 1, 0, b""), 0x1104),
        (untagged(0x41, 0x03, 0, 0, 1, 0, b"x"), 0x0205),
        (tagged(0xc1, 0x00, 1, 0, b""), 0x0205),
    ] {
        let mut peer = Scripted::new();
        peer.send_ulpdu(&ulpdu);
        assert_eq!(peer.terminate()[..2], u16::to_be_bytes(code), "{ulpdu:02x?}");
    }
}

/// Answers the Read and the atomic of [`post_all_kinds`].
fn answer_all(peer: &mut Scripted, region: &Region) {
    peer.send_ulpdu(&tagged(0xc1, 0x42, region.stag, region.base, &[9; 8]));
    assert_eq!(peer.node.sent(), [(3, SUCCESS), (4, SUCCESS)]);
    let answer = [&2_u32.to_be_bytes()[..], &7_u64.to_be_bytes()].concat();
    peer.send_ulpdu(&untagged(0x41, 0x4b, 0, 3, 1, 0, &answer));
}

#[test]
fn ddp_s_02_and_rdm_c_04_messages_of_all_kinds_leave_as_posted() {
    let mut peer = Scripted::new();
    let _region = post_all_kinds(&mut peer);
    let ulpdus = peer.output_ulpdus();
    let messages: Vec<u8> = ulpdus
        .iter()
        .filter(|ulpdu| is_last(ulpdu))
        .map(|ulpdu| opcode_of(ulpdu))
        .collect();
    assert_eq!(messages, [3, 0, 1, 0, 8, 10, 4]);
    // Queues 0 and 1 number their messages each for itself, without a gap.
    let msns = |queue: u32| -> Vec<u32> {
        let of_queue = ulpdus
            .iter()
            .filter(|u| u[0] & 0x80 == 0 && is_last(u) && be32(&u[6..]) == queue);
        of_queue.map(|u| be32(&u[10..])).collect()
    };
    assert_eq!((msns(0), msns(1)), (vec![1, 2, 3], vec![1, 2]));
}

#[test]
fn ddp_s_02_and_rdm_c_04_a_read_that_waits_lets_nothing_pass() {
    let mut peer = Scripted::with(
        &Shape::default(),
        Attachment {
            ord: 1,
            ..agreed(true)
        },
    );
    let sink = peer.node.region(16, everything());
    peer.node.post(&Work::read(1, STAG, 0).sge(sink.sge(0, 8)));
    peer.node.post(&Work::read(2, STAG, 0).sge(sink.sge(8, 8)));
    peer.node.post(&Work::send(3).inline(b"latter"));
    peer.node.post(&Work::write(4, STAG, 0).inline(b"latter"));
    let kinds =
        |peer: &mut Scripted| -> Vec<u8> { peer.output_ulpdus().iter().map(|u| opcode_of(u)).collect() };
    assert_eq!(kinds(&mut peer), [1]);
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    assert_eq!(kinds(&mut peer), [1, 3, 0]);
}

#[test]
fn ddp_s_03_segments_of_a_write_and_a_response_rise() {
    const LEN: usize = 20_000;
    let mut peer = Scripted::new();
    let region = peer.node.filled(&pattern(LEN));
    peer.node
        .post(&Work::write(1, STAG, 0x5000).sge(region.sge(0, LEN)));
    peer.run();
    peer.send_ulpdu(&read_request(
        1,
        (5, 0x9000),
        LEN as u32,
        (region.stag, region.base),
    ));
    let ulpdus = peer.output_ulpdus();
    for (kind, base) in [(0, 0x5000), (2, 0x9000)] {
        let mut came = Vec::new();
        for ulpdu in ulpdus.iter().filter(|ulpdu| opcode_of(ulpdu) == kind) {
            let to = u64::from_be_bytes(ulpdu[6..14].try_into().unwrap());
            assert_eq!(to, base + came.len() as u64);
            came.extend_from_slice(&ulpdu[14..]);
        }
        assert!(came == pattern(LEN), "{kind}");
    }
}

#[test]
fn rdm_o_03_requests_of_all_kinds_complete_as_posted() {
    let mut peer = Scripted::new();
    let region = post_all_kinds(&mut peer);
    assert!(
        peer.output_ulpdus().iter().any(|ulpdu| opcode_of(ulpdu) == 4),
        "all are on the wire"
    );
    // After an unanswered Read nothing completes, nor after an unanswered atomic.
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    answer_all(&mut peer, &region);
    assert_eq!(peer.node.sent(), [(5, SUCCESS), (6, SUCCESS)]);
}

#[test]
fn x73_11_atomics_complete_as_reads_and_immediates_go_as_sends() {
    let mut peer = Scripted::new();
    let region = post_all_kinds(&mut peer);
    let ulpdus = peer.output_ulpdus();
    let immediate = ulpdus.iter().position(|ulpdu| opcode_of(ulpdu) == 8).unwrap();
    // The Immediate comes after the Write that it belongs to, on queue 0, with the number between
    // those of the Sends around it.
    assert_eq!(
        (opcode_of(&ulpdus[immediate - 1]), is_last(&ulpdus[immediate - 1])),
        (0, true)
    );
    assert_eq!(
        (be32(&ulpdus[immediate][6..]), be32(&ulpdus[immediate][10..])),
        (0, 2)
    );
    // An atomic on queue 1 takes the number after the Read's.
    let atomic = ulpdus.iter().find(|ulpdu| opcode_of(ulpdu) == 10).unwrap();
    assert_eq!((be32(&atomic[6..]), be32(&atomic[10..])), (1, 2));
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    // The answer to an atomic does not pass the answer to the Read before it.
    let answer = [&2_u32.to_be_bytes()[..], &7_u64.to_be_bytes()].concat();
    peer.send_ulpdu(&untagged(0x41, 0x4b, 0, 3, 1, 0, &answer));
    assert_eq!(peer.terminate()[..2], [0x12, 0x02]);
    assert_eq!(region.bytes()[8..16], pattern(16)[8..]);
}

#[test]
fn empa_22_requests_before_the_fence_opens_are_sent_in_order() {
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    let _region = post_all_kinds(&mut peer);
    peer.run();
    assert!(peer.output().is_empty());
    assert_eq!(peer.node.sent(), []);
    peer.send(&vector("F-WRITE0-RTR"));
    let ulpdus = peer.output_ulpdus();
    let messages: Vec<u8> = ulpdus
        .iter()
        .filter(|ulpdu| is_last(ulpdu))
        .map(|ulpdu| opcode_of(ulpdu))
        .collect();
    assert_eq!(messages, [3, 0, 1, 0, 8, 10, 4]);
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn empa_23_our_error_before_the_fence_opens_is_not_sent() {
    // A request that cannot be sent fails only when the fence opens.
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    peer.node.post(&Work::send(1).sge(sge(0, 8, 0x9999)));
    peer.run();
    assert!(peer.output().is_empty());
    // The program's end and the overflow of its completion queue are not sent either.
    peer.node.set_state(QpState::Err);
    peer.run();
    assert!(peer.output().is_empty());
    assert_eq!(peer.node.sent(), [(1, WcStatus::WrFlushErr)]);
}

#[test]
fn vrb_c_02_a_completed_request_has_left_its_buffer() {
    const LEN: usize = 100_000;
    for crc in [true, false] {
        let mut peer = Scripted::with(&Shape::default(), Attachment { crc, ..agreed(true) });
        // The stream takes one half of the bytes; the other half waits.
        peer.wire.set_capacity(0, LEN / 2);
        let source = peer.node.filled(&pattern(LEN));
        peer.node.post(&Work::send(1).sge(source.sge(0, LEN)));
        while peer.node.pump() {}
        assert_eq!(peer.node.sent(), [], "part of it is not taken yet");
        peer.wire.set_capacity(0, 2 * LEN);
        while peer.node.pump() {}
        assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
        source.write(0, &vec![0xee; LEN]);
        let mut came: Vec<u8> = Vec::new();
        let received = {
            peer.run();
            peer.output()
        };
        let mut rest = &received[..];
        while !rest.is_empty() {
            let len = usize::from(u16::from_be_bytes([rest[0], rest[1]]));
            came.extend(&rest[2 + 18..2 + len]);
            rest = &rest[urnic_wire::mpa::fpdu::fpdu_len(len)..];
        }
        assert!(came == pattern(LEN), "CRC {crc}");
    }
}
