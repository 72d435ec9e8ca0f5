//! RDMAP's rows: Reads.

use super::{Pair, Scripted, vector};
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_wire::crc::crc32c;

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

#[test]
fn rdm_r_01_read_request() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(4096, everything());
    peer.node
        .post(&Work::read(1, 0x200, 0x7f00_0000_2000).sge(sink.sge(0, 4096)));
    let mut expected = vector("F-RREQ-4096");
    // The requester chooses the sink's STag.
    expected[20..24].copy_from_slice(&sink.stag.to_be_bytes());
    expected[24..32].copy_from_slice(&sink.base.to_be_bytes());
    let crc = crc32c(&expected[..48]);
    expected[48..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(peer.output(), expected);
    peer.send_ulpdu(&tagged(0x81, 0x42, sink.stag, sink.base, &pattern(4096)[..1000]));
    assert!(peer.node.sent().is_empty());
    peer.send_ulpdu(&tagged(
        0xc1,
        0x42,
        sink.stag,
        sink.base + 1000,
        &pattern(4096)[1000..],
    ));
    let cqe = peer.node.send_cq.poll().unwrap();
    assert_eq!(
        (status(&cqe), opcode(&cqe), cqe.byte_len.get()),
        (SUCCESS, WcOpcode::RdmaRead, 4096)
    );
    assert!(sink.bytes() == pattern(4096));
}

#[test]
fn rdm_r_02_response_carries_the_sink_back_uninterpreted() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(b"abcd");
    peer.send_ulpdu(&read_request(
        1,
        (0x100, 0x7f00_0000_1000),
        4,
        (source.stag, source.base),
    ));
    assert_eq!(peer.output(), vector("F-RRESP-abcd"));
    // Also where it wraps, and for zero length.
    peer.send_ulpdu(&read_request(2, (0x77, u64::MAX), 0, (0, 0)));
    assert_eq!(peer.output_ulpdus(), [tagged(0xc1, 0x42, 0x77, u64::MAX, b"")]);
}

#[test]
fn rdm_r_03_a_read_of_nothing_is_not_validated() {
    let mut peer = Scripted::new();
    peer.send(&vector("F-RREQ0-RTR"));
    assert_eq!(peer.output(), vector("F-RRESP0"));
    // siw names sink STag 0, and compares it even at zero length (conformance 12.1).
    let mut siw = Scripted::new();
    siw.send(&vector("F-RREQ0-RTR-siw"));
    assert_eq!(siw.output_ulpdus(), [tagged(0xc1, 0x42, 0, 0, b"")]);
    peer.send_ulpdu(&read_request(2, (1, 0), 0, (0xdead_beef, u64::MAX)));
    assert_eq!(peer.output_ulpdus().len(), 1);
}

#[test]
fn rdm_r_04_and_o_05_responses_in_request_order() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(10_000));
    for msn in 1..=16u32 {
        let size = (msn * 613) % 9_000;
        peer.send_ulpdu(&read_request(msn, (msn, 0), size, (source.stag, source.base)));
    }
    let mut stags: Vec<u32> = peer.output_ulpdus().iter().map(|u| be32(&u[2..])).collect();
    stags.dedup();
    assert_eq!(stags, (1..=16).collect::<Vec<_>>());
    assert!(peer.node.received().is_empty() && peer.node.sent().is_empty());
}

#[test]
fn rdm_r_05_and_vrb_r_01_outstanding_reads_never_exceed_ord() {
    let mut peer = Scripted::with(
        &Shape::default(),
        Attachment {
            ord: 2,
            ..agreed(true)
        },
    );
    let sink = peer.node.region(64, everything());
    for n in 0..5u64 {
        peer.node.post(&Work::read(n, 5, 0).sge(sink.sge(n as usize, 1)));
    }
    assert_eq!(peer.output_ulpdus().len(), 2);
    for n in 0..3 {
        peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base + n, b"x"));
        assert_eq!(
            peer.output_ulpdus().len(),
            1,
            "the next goes out when one is answered"
        );
        assert_eq!(peer.node.sent(), [(n, SUCCESS)]);
    }
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base + 3, b"x"));
    assert!(peer.output().is_empty());
}

#[test]
fn rdm_r_06_one_request_more_than_ird() {
    let mut peer = Scripted::with(
        &Shape::default(),
        Attachment {
            ird: 2,
            ..agreed(true)
        },
    );
    let source = peer.node.filled(&pattern(1 << 20));
    peer.wire.set_capacity(0, 0);
    for msn in 1..=2 {
        peer.send_unread(&fpdu_of(&read_request(
            msn,
            (1, 0),
            1 << 20,
            (source.stag, source.base),
        )));
    }
    let third = read_request(3, (1, 0), 64, (source.stag, source.base));
    peer.send_unread(&fpdu_of(&third));
    peer.wire.set_capacity(0, 1 << 20);
    let ulpdus = peer.output_ulpdus();
    let terminate = ulpdus.last().unwrap();
    assert_eq!(terminate[18..24], hex("1202c000 002e"));
    assert_eq!(terminate[24..42], third[..18]);
}

#[test]
fn rdm_r_07_an_unrequested_response_is_not_placed() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, b"abcd"));
    assert_eq!(peer.terminate()[..4], hex("1100c000"));
    assert_eq!(sink.bytes(), [0; 8]);
}

#[test]
fn rdm_r_07_a_response_must_fit_its_request() {
    for (stag_bits, to, payload, last, code) in [
        (1, 0, &b"abcd"[..], true, 0x1100),
        (0, 1, b"abc", true, 0x1101),
        (0, 0, b"abcde", true, 0x1101),
        (0, 0, b"abc", true, 0x02ff),
        (0, u64::MAX, b"a", false, 0x1101),
    ] {
        let mut peer = Scripted::new();
        let sink = peer.node.region(8, everything());
        peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 4)));
        assert_eq!(peer.output_ulpdus().len(), 1);
        let control = if last { 0xc1 } else { 0x81 };
        let to = sink.base.wrapping_add(to);
        peer.send_ulpdu(&tagged(control, 0x42, sink.stag ^ stag_bits, to, payload));
        assert_eq!(peer.terminate()[..2], u16::to_be_bytes(code));
        assert_eq!(sink.bytes(), [0; 8]);
        assert_eq!(peer.node.sent(), [(1, FLUSHED)]);
    }
}

#[test]
fn rdm_r_08_a_read_may_have_several_sinks() {
    let mut pair = Pair::new();
    let source = pair.b.filled(&pattern(100));
    let (one, two) = (pair.a.region(60, everything()), pair.a.region(60, everything()));
    let work = Work::read(1, source.stag, source.base)
        .sge(one.sge(10, 0))
        .sge(one.sge(10, 50))
        .sge(two.sge(5, 50));
    pair.a.post(&work);
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS)]);
    assert_eq!(one.bytes()[10..], pattern(100)[..50]);
    assert_eq!(two.bytes()[5..55], pattern(100)[50..]);
}

/// A Read of 100 bytes into two regions, as the peer receives it: the sinks, and the whole ULPDU of
/// the Request.
fn asked_for_two_sinks(peer: &mut Scripted) -> (Region, Region, Vec<u8>) {
    let (one, two) = (
        peer.node.region(60, everything()),
        peer.node.region(60, everything()),
    );
    let work = Work::read(1, 0x7700, 0x2000)
        .sge(one.sge(10, 0))
        .sge(one.sge(10, 50))
        .sge(two.sge(5, 50));
    peer.node.post(&work);
    let mut ulpdus = peer.output_ulpdus();
    assert_eq!(ulpdus.len(), 1, "one Request for all elements: {ulpdus:02x?}");
    (one, two, ulpdus.remove(0))
}

#[test]
fn rdm_r_08_a_list_of_sinks_is_one_sink_on_the_wire() {
    let mut peer = Scripted::new();
    let (one, two, request) = asked_for_two_sinks(&mut peer);
    let (stag, to) = (one.stag, one.base + 10);
    assert_eq!(request, read_request(1, (stag, to), 100, (0x7700, 0x2000)));
    // Segments that end within the first element, and within the second.
    let bytes = pattern(100);
    for (from, until) in [(0, 20), (20, 70), (70, 100)] {
        let control = if until == 100 { 0xc1 } else { 0x81 };
        peer.send_ulpdu(&tagged(
            control,
            0x42,
            stag,
            to + from as u64,
            &bytes[from..until],
        ));
    }
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    assert_eq!(one.bytes()[10..], bytes[..50]);
    assert_eq!(two.bytes()[5..55], bytes[50..]);
    assert_eq!(two.bytes()[55..], [0; 5]);
}

#[test]
fn rdm_r_08_a_response_may_not_name_another_element() {
    let mut peer = Scripted::new();
    let (_one, two, _) = asked_for_two_sinks(&mut peer);
    peer.send_ulpdu(&tagged(0xc1, 0x42, two.stag, two.base + 5, &pattern(50)));
    assert_eq!(peer.terminate()[..4], hex("1100c000"));
    assert_eq!(two.bytes(), [0; 60]);
}

#[test]
fn rdm_r_08_responses_name_one_sink_and_read_one_source() {
    const LEN: usize = 10_000;
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(LEN + 8));
    // An offset whose low 32 bits wrap during the Read.
    let (stag, to) = (0x55aa, 0xffff_f000);
    peer.send_ulpdu(&read_request(
        1,
        (stag, to),
        LEN as u32,
        (source.stag, source.base + 4),
    ));
    let ulpdus = peer.output_ulpdus();
    assert!(ulpdus.len() > 1, "a message of several segments");
    let mut came = Vec::<u8>::new();
    for (n, ulpdu) in (1..).zip(&ulpdus) {
        let control = if n == ulpdus.len() { 0xc1 } else { 0x81 };
        let expected = tagged(control, 0x42, stag, to + came.len() as u64, &ulpdu[14..]);
        assert_eq!(*ulpdu, expected);
        came.extend(&ulpdu[14..]);
    }
    assert!(came == pattern(LEN + 8)[4..LEN + 4]);
}

#[test]
fn rdm_r_09_source_revoked_in_the_middle_of_a_response() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(1 << 20));
    // The engine sends its backlog, and no other bytes.
    peer.wire.set_capacity(0, 1 << 18);
    let request = read_request(1, (0x100, 0x1000), 1 << 20, (source.stag, source.base));
    peer.send_unread(&fpdu_of(&request));
    peer.node.memory.deregister(source.stag).unwrap();
    let ulpdus = peer.output_ulpdus();
    let (terminate, responses) = ulpdus.split_last().unwrap();
    let sent: u64 = responses.iter().map(|u| u.len() as u64 - 14).sum();
    assert!(sent > 0 && sent < 1 << 20);
    let payload = &terminate[18..];
    assert_eq!(payload[..6], hex("0100e000 002e"));
    assert_eq!(payload[6..24], request[..18]);
    let rest = read_request(
        1,
        (0x100, 0x1000 + sent),
        (1 << 20) - sent as u32,
        (source.stag, source.base + sent),
    );
    assert_eq!(payload[24..], rest[18..]);
}
