//! DDP's rows: headers, order, the checks and their error numbers, and the state after an error.

use super::{Pair, Scripted, vector};
use crate::memory::{Accessor, DomainUse, Invalidable, InvalidateBy, MemoryAccess};
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use std::sync::Arc;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::Opcode;
use urnic_wire::crc::crc32c;

const SUCCESS: WcStatus = WcStatus::Success;

/// An engine with one receive of this length in bytes.
pub(super) fn with_receive(len: usize) -> (Scripted, Region) {
    let mut peer = Scripted::new();
    let region = peer.node.region(len, everything());
    peer.node.post_recv(1, &[region.sge(0, len)]);
    (peer, region)
}

/// The bytes that the engine sends when it receives only this. `untouched` must stay unchanged.
pub(super) fn terminate_for_ulpdu(mut peer: Scripted, untouched: &Region, ulpdu: &[u8]) -> Vec<u8> {
    let before = untouched.bytes();
    peer.send_ulpdu(ulpdu);
    let payload = peer.terminate();
    assert_eq!(untouched.bytes(), before, "nothing is placed");
    assert!(peer.node.sent().is_empty());
    let control = be32(&payload);
    assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, control)]);
    assert_eq!(peer.node.engine.status().terminate_sent.get(), control);
    if control & 0xc000 != 0 {
        let header_len = if ulpdu[0] & 0x80 != 0 { 14 } else { 18 };
        assert_eq!(
            payload[4..6],
            (ulpdu.len() as u16).to_be_bytes(),
            "segment length"
        );
        assert_eq!(
            payload[6..6 + header_len],
            ulpdu[..header_len],
            "terminated DDP header"
        );
    }
    payload
}

#[test]
fn ddp_h_01_reserved_bits_are_ignored() {
    let (mut peer, _) = with_receive(64);
    peer.send_ulpdu(&untagged(0x41 | 0x3c, 0x43, 0, 0, 1, 0, b"hi"));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 2)]);
}

#[test]
fn ddp_h_02_write_header() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(b"abcd");
    peer.node
        .post(&Work::write(1, 0x1234, 0x10).sge(source.sge(0, 4)));
    assert_eq!(peer.output(), vector("F-WRITE-abcd"));
}

#[test]
fn ddp_h_04_only_the_last_segment_has_l() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(5000));
    peer.node.post(&Work::send(1).sge(source.sge(0, 5000)));
    let ulpdus = peer.output_ulpdus();
    let last: Vec<bool> = ulpdus.iter().map(|u| u[0] & 0x40 != 0).collect();
    assert_eq!(last, [false, false, false, true]);
    for ulpdu in &ulpdus {
        // RsvdULP, QN and MSN are those of the message (DDP-H-05).
        assert_eq!(ulpdu[1..14], ulpdus[0][1..14]);
    }
}

#[test]
fn ddp_h_07_segments_of_the_rfcs_example() {
    let mut peer = Scripted::new();
    peer.node.engine.set_mulpdu(1500);
    let source = peer.node.filled(&[0; 2048]);
    peer.node.post(&Work::send(1).sge(source.sge(0, 2048)));
    let received = peer.output();
    assert_eq!(received[..20], vector("F-SEG1-hdr"));
    assert_eq!(received[1504..1508], vector("F-SEG1-crc"));
    assert_eq!(received[1508..1528], vector("F-SEG2-hdr"));
    assert_eq!(received[2096..], vector("F-SEG2-crc"));
    peer.node
        .post(&Work::write(2, 0x1234, 16384).sge(source.sge(0, 2048)));
    let ulpdus = peer.output_ulpdus();
    let place = |u: &[u8]| (u64::from_be_bytes(u[6..14].try_into().unwrap()), u.len() - 14);
    assert_eq!(
        (place(&ulpdus[0]), place(&ulpdus[1])),
        ((16384, 1486), (17870, 562))
    );
    // The answer to a Read.
    peer.send_ulpdu(&read_request(
        1,
        (0x1234, 16384),
        2048,
        (source.stag, source.base),
    ));
    let ulpdus = peer.output_ulpdus();
    assert_eq!(
        (place(&ulpdus[0]), place(&ulpdus[1])),
        ((16384, 1486), (17870, 562))
    );
}

#[test]
fn ddp_s_01_messages_of_2_to_the_31_bytes_and_no_longer() {
    let mut peer = Scripted::new();
    let region = peer.node.region(64, everything());
    let huge = sge(region.base, 1 << 31, region.stag);
    peer.node.post(&Work::send(1).sge(huge).sge(region.sge(0, 1)));
    peer.run();
    assert_eq!(peer.node.sent(), [(1, WcStatus::LocLenErr)]);
    // The sink is refused when data arrive.
    let mut peer = Scripted::new();
    peer.node.post(&Work::read(1, 1, 0).sge(huge));
    let request = read_request(1, (region.stag, region.base), 1 << 31, (1, 0));
    assert_eq!(peer.output_ulpdus(), [request]);
}

#[test]
fn ddp_s_02_and_03_wire_order_is_posting_order() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(4000));
    for msn in 0..5 {
        peer.node.post(&Work::send(msn).sge(source.sge(0, 4000)));
    }
    let received = peer.output_ulpdus();
    let place: Vec<(u32, u32)> = received
        .iter()
        .map(|u| (be32(&u[10..]), be32(&u[14..])))
        .collect();
    assert!(place.is_sorted());
    assert_eq!(place.len(), 15);
}

#[test]
fn ddp_s_04_zero_length_messages_are_one_segment_and_unchecked() {
    let mut pair = Pair::new();
    pair.wire.record(0);
    let sink = pair.b.region(8, everything());
    pair.b.post_recv(5, &[sink.sge(0, 8)]);
    pair.a.post(&Work::write(1, 0xdead_beef, u64::MAX));
    pair.a.post(&Work::send(2));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(pair.b.received(), [(5, SUCCESS, 0)]);
    assert_eq!(pair.recorded(0).len(), 20 + 24);
}

#[test]
fn ddp_s_06_messages_are_delivered_once_in_order_when_complete() {
    let (mut peer, region) = with_receive(4096);
    peer.node.post_recv(2, &[region.sge(0, 10)]);
    peer.send_ulpdu(&send_segment(false, 1, 0, b"abc"));
    assert!(peer.node.received().is_empty());
    peer.send_ulpdu(&send_segment(true, 1, 3, b"def"));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 6)]);
    // A repetition of the message is an error.
    peer.send_ulpdu(&send_segment(true, 1, 3, b"def"));
    assert_eq!(peer.terminate()[..2], [0x12, 0x03]);
    assert_eq!(peer.node.received(), [(2, WcStatus::WrFlushErr, 0)]);
}

#[test]
fn ddp_s_08_a_gap_in_mo_is_refused() {
    let (mut peer, region) = with_receive(4096);
    peer.send_ulpdu(&send_segment(false, 1, 0, b"abc"));
    let payload = terminate_for_ulpdu(peer, &region, &send_segment(true, 1, 4, b"ef"));
    assert_eq!(payload[..2], [0x12, 0x04]);
    // An overlap is an error, too.
    let (mut peer, region) = with_receive(4096);
    peer.send_ulpdu(&send_segment(false, 1, 0, b"abc"));
    let payload = terminate_for_ulpdu(peer, &region, &send_segment(true, 1, 2, b"ef"));
    assert_eq!(payload[..2], [0x12, 0x04]);
}

#[test]
fn ddp_s_11_tagged_segments_between_untagged_ones() {
    let (mut peer, region) = with_receive(64);
    let target = peer.node.region(8, everything());
    peer.send_ulpdu(&send_segment(false, 1, 0, b"abc"));
    peer.send_ulpdu(&write_segment(target.stag, target.base, b"between!"));
    peer.send_ulpdu(&send_segment(true, 1, 3, b"def"));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 6)]);
    assert_eq!(target.bytes(), b"between!");
    assert_eq!(region.bytes()[..6], *b"abcdef");
}

#[test]
fn ddp_s_11_two_sends_are_not_interleaved() {
    let (mut peer, region) = with_receive(64);
    peer.node.post_recv(2, &[region.sge(32, 32)]);
    peer.send_ulpdu(&send_segment(false, 1, 0, b"abc"));
    let payload = terminate_for_ulpdu(peer, &region, &send_segment(true, 2, 0, b"xyz"));
    assert_eq!(payload[..2], [0x12, 0x03]);
}

#[test]
fn ddp_v_01_unknown_stag() {
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let payload = terminate_for_ulpdu(
        peer,
        &region,
        &write_segment(region.stag ^ 0x5555_5500, region.base, b"x"),
    );
    assert_eq!(payload[..4], hex("1100c000"));
}

#[test]
fn ddp_v_01_wrong_key_byte() {
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let payload = terminate_for_ulpdu(peer, &region, &write_segment(region.stag ^ 1, region.base, b"x"));
    assert_eq!(payload[..4], hex("1100c000"));
}

#[test]
fn ddp_v_02_one_byte_past_the_end() {
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let payload = terminate_for_ulpdu(
        peer,
        &region,
        &write_segment(region.stag, region.base + 5, b"abcd"),
    );
    assert_eq!(payload[..4], hex("1101c000"));
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let payload = terminate_for_ulpdu(
        peer,
        &region,
        &write_segment(region.stag, region.base - 1, b"abcd"),
    );
    assert_eq!(payload[..4], hex("1101c000"));
}

#[test]
fn ddp_v_02_terminate_is_byte_exact() {
    // The test uses another STag than the vector: the Terminate must equal it except for STag, TO
    // and CRC.
    let mut peer = Scripted::new();
    let region = peer.node.region(2, everything());
    let ulpdu = write_segment(region.stag, region.base, b"abcd");
    peer.send_ulpdu(&ulpdu);
    let mut expected = vector("F-TERM-WRITE-111");
    expected[28..40].copy_from_slice(&ulpdu[2..14]);
    let crc = crc32c(&expected[..40]);
    expected[40..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(peer.output(), expected);
}

#[test]
fn ddp_v_03_stag_of_another_domain() {
    let peer = Scripted::new();
    let other = peer.node.memory.domains().allocate().unwrap();
    let region = peer.node.region_in(other, 8, everything());
    let payload = terminate_for_ulpdu(peer, &region, &write_segment(region.stag, region.base, b"x"));
    assert_eq!(payload[..4], hex("1102c000"));
}

#[test]
fn ddp_v_04_offset_wraps() {
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let payload = terminate_for_ulpdu(peer, &region, &write_segment(region.stag, u64::MAX, b"ab"));
    assert_eq!(payload[..4], hex("1103c000"));
}

#[test]
fn ddp_v_05_version_of_a_tagged_segment() {
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let ulpdu = tagged(0xc2, 0x40, region.stag, region.base, b"x");
    assert_eq!(terminate_for_ulpdu(peer, &region, &ulpdu)[..4], hex("1104c000"));
}

#[test]
fn ddp_v_06_unknown_queue() {
    let (mut peer, region) = with_receive(64);
    peer.send_ulpdu(&untagged(0x41, 0x43, 0, 9, 1, 0, b"hello"));
    assert_eq!(peer.output(), vector("F-TERM-QN-121"));
    assert!(region.bytes().iter().all(|b| *b == 0));
    // Queue 3 exists only with RFC 7306.
    let shape = Shape {
        extensions: false,
        ..Shape::default()
    };
    let peer = Scripted::with(&shape, agreed(true));
    let region = peer.node.region(8, everything());
    let payload = terminate_for_ulpdu(peer, &region, &untagged(0x41, 0x43, 0, 3, 1, 0, b"hello"));
    assert_eq!(payload[..2], [0x12, 0x01]);
}

#[test]
fn ddp_v_07_no_receive_posted() {
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    assert_eq!(
        terminate_for_ulpdu(peer, &region, &send_segment(true, 1, 0, b"x"))[..4],
        hex("1202c000")
    );
}

#[test]
fn ddp_v_08_msn_out_of_range() {
    for msn in [0, 2, 5, u32::MAX] {
        let request = read_request(msn, (1, 0), 0, (1, 0));
        let mut atomic = vec![0; 52];
        atomic[11] = 1;
        for ulpdu in [
            send_segment(true, msn, 0, b"x"),
            untagged(0x41, 0x48, 0, 0, msn, 0, &[0; 8]),
            request,
            untagged(0x41, 0x4a, 0, 1, msn, 0, &atomic),
        ] {
            let (peer, region) = with_receive(64);
            let payload = terminate_for_ulpdu(peer, &region, &ulpdu);
            assert_eq!(payload[..4], hex("1203c000"), "{ulpdu:02x?}");
        }
        // The answer to an atomic.
        let mut peer = Scripted::new();
        let sink = peer.node.region(8, everything());
        let atomic = Work::new(Opcode::FetchAdd, 1).to(5, 0).atomic(1, 0);
        peer.node.post(&atomic.sge(sink.sge(0, 8)));
        assert_eq!(peer.output_ulpdus().len(), 1);
        peer.send_ulpdu(&untagged(
            0x41,
            0x4b,
            0,
            3,
            msn,
            0,
            &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7],
        ));
        assert_eq!(peer.terminate()[..4], hex("1203c000"));
        assert_eq!(sink.bytes(), [0; 8]);
        // No Terminate answers a Terminate.
        let (mut peer, _) = with_receive(64);
        peer.send_ulpdu(&untagged(0x41, 0x47, 0, 2, msn, 0, &hex("02000000")));
        assert!(peer.output().is_empty());
        assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    }
}

#[test]
fn ddp_v_09_mo_outside_of_the_buffer() {
    let (peer, region) = with_receive(4096);
    let payload = terminate_for_ulpdu(peer, &region, &send_segment(true, 1, 0x10000, b"x"));
    assert_eq!(payload[..4], hex("1204c000"));
}

#[test]
fn ddp_v_10_message_longer_than_the_buffer() {
    let (mut peer, region) = with_receive(4096);
    for at in (0..4096).step_by(1024) {
        peer.send_ulpdu(&send_segment(false, 1, at, &[7; 1024]));
    }
    peer.send_ulpdu(&send_segment(true, 1, 4096, b"x"));
    assert_eq!(peer.terminate()[..4], hex("1205c000"));
    assert_eq!(peer.node.received(), [(1, WcStatus::LocLenErr, 0)]);
    assert_eq!(region.bytes(), [7; 4096]);
}

#[test]
fn ddp_v_11_version_of_an_untagged_segment() {
    let (peer, region) = with_receive(64);
    let ulpdu = untagged(0x40, 0x43, 0, 0, 1, 0, b"x");
    assert_eq!(terminate_for_ulpdu(peer, &region, &ulpdu)[..4], hex("1206c000"));
}

#[test]
fn ddp_v_12_a_receive_in_unmapped_memory_is_a_local_error() {
    let mut peer = Scripted::new();
    let region = peer.node.region(64, everything());
    peer.node.post_recv(1, &[region.sge(0, 64)]);
    peer.node.memory.deregister(region.stag).unwrap();
    peer.send_ulpdu(&send_segment(true, 1, 0, b"hello"));
    assert_eq!(peer.terminate()[..2], [0x10, 0x00]);
    assert_eq!(peer.node.received(), [(1, WcStatus::LocProtErr, 0)]);
}

#[test]
fn ddp_v_14_a_missing_right_is_rdmaps_error() {
    let peer = Scripted::new();
    let region = peer.node.region(8, Access::LOCAL_WRITE | Access::REMOTE_READ);
    let payload = terminate_for_ulpdu(peer, &region, &write_segment(region.stag, region.base, b"x"));
    assert_eq!(payload[..4], hex("0102c000"));
    // The access flags of the queue pair apply, too.
    let shape = Shape {
        access: Access::REMOTE_READ,
        ..Shape::default()
    };
    let peer = Scripted::with(&shape, agreed(true));
    let region = peer.node.region(8, everything());
    let payload = terminate_for_ulpdu(peer, &region, &write_segment(region.stag, region.base, b"x"));
    assert_eq!(payload[..4], hex("0102c000"));
}

#[test]
fn ddp_v_15_the_cheaper_check_wins() {
    let region = |peer: &Scripted| peer.node.region(8, everything());
    // DV before RV and opcode.
    let peer = Scripted::new();
    let r = region(&peer);
    assert_eq!(
        terminate_for_ulpdu(peer, &r, &untagged(0x42, 0x0f, 0, 9, 9, 9, b""))[..2],
        [0x12, 0x06]
    );
    // RV before opcode, opcode before QN.
    let peer = Scripted::new();
    let r = region(&peer);
    assert_eq!(
        terminate_for_ulpdu(peer, &r, &untagged(0x41, 0x8f, 0, 9, 9, 9, b""))[..2],
        [0x02, 0x05]
    );
    let peer = Scripted::new();
    let r = region(&peer);
    assert_eq!(
        terminate_for_ulpdu(peer, &r, &untagged(0x41, 0x4f, 0, 9, 9, 9, b""))[..2],
        [0x02, 0x06]
    );
    // QN before MSN, MSN before buffer, STag before range.
    let peer = Scripted::new();
    let r = region(&peer);
    assert_eq!(
        terminate_for_ulpdu(peer, &r, &untagged(0x41, 0x43, 0, 9, 9, 9, b""))[..2],
        [0x12, 0x01]
    );
    let peer = Scripted::new();
    let r = region(&peer);
    assert_eq!(
        terminate_for_ulpdu(peer, &r, &send_segment(true, 9, 9, b""))[..2],
        [0x12, 0x03]
    );
    let peer = Scripted::new();
    let r = region(&peer);
    assert_eq!(
        terminate_for_ulpdu(peer, &r, &write_segment(r.stag ^ 0xff00, u64::MAX, b"ab"))[..2],
        [0x11, 0x00]
    );
}

#[test]
fn ddp_v_16_t_bit_and_opcode_disagree() {
    let peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let ulpdu = tagged(0xc1, 0x43, region.stag, region.base, b"abcd");
    assert_eq!(terminate_for_ulpdu(peer, &region, &ulpdu)[..4], hex("0206c000"));
    let (peer, region) = with_receive(64);
    let ulpdu = untagged(0x41, 0x40, 0, 0, 1, 0, b"abcd");
    assert_eq!(terminate_for_ulpdu(peer, &region, &ulpdu)[..4], hex("0206c000"));
}

#[test]
fn ddp_v_negative_vectors() {
    for (fpdu, code) in [
        (
            "0010c140 00001234 ffffffff ffffffff 61620000 3690dd95",
            [0x11, 0x00],
        ),
        (
            "0012c143 00001234 00000000 00000000 61626364 dd9505b7",
            [0x02, 0x06],
        ),
    ] {
        let mut peer = Scripted::new();
        peer.send(&hex(fpdu));
        assert_eq!(peer.terminate()[..2], code);
    }
}

#[test]
fn ddp_t_01_later_segments_are_dropped() {
    let mut peer = Scripted::new();
    let region = peer.node.region(8, everything());
    let mut bytes = fpdu_of(&write_segment(region.stag ^ 1, region.base, b"bad"));
    bytes.extend(fpdu_of(&write_segment(region.stag, region.base, b"good")));
    peer.send(&bytes);
    peer.terminate();
    peer.send_ulpdu(&write_segment(region.stag, region.base, b"good"));
    assert_eq!(region.bytes(), [0; 8]);
    // Input is read to its end, so that the close does not reset our bytes.
    peer.fin();
    assert!(!peer.wire.is_reset());
    assert!(!peer.node.engine.is_attached());
}

#[test]
fn ddp_t_02_the_terminate_goes_out_before_the_fin() {
    let mut peer = Scripted::new();
    peer.node.post(&Work::send(1).inline(b"hello"));
    peer.send_ulpdu(&send_segment(true, 1, 0, b"x"));
    let ulpdus = peer.output_ulpdus();
    assert_eq!(ulpdus.last().unwrap()[1], 0x47);
    assert!(peer.finished);
}

#[test]
fn ddp_t_05_graceful_close_sends_what_was_posted() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(3000));
    for n in 0..10 {
        peer.node.post(&Work::send(n).sge(source.sge(0, 3000)));
    }
    peer.node.set_state(QpState::Sqd);
    let received = peer.output_ulpdus();
    assert_eq!(received.iter().filter(|u| u[0] & 0x40 != 0).count(), 10);
    assert!(peer.finished);
    assert_eq!(
        peer.node.sent(),
        (0..10).map(|n| (n, SUCCESS)).collect::<Vec<_>>()
    );
    peer.node.post(&Work::send(10).inline(b"late"));
    peer.run();
    assert_eq!(peer.node.sent(), [(10, WcStatus::WrFlushErr)]);
    assert!(peer.node.faults().is_empty());
}

/// The requests of this end: taken by the stream, signalled or not, not begun, and not even
/// startable; its receives: the one that a message has begun to fill, and those after it.
#[test]
fn ddp_t_06_a_lost_stream_fails_everything() {
    for end in [Scripted::rst as fn(&mut Scripted), Scripted::fin] {
        let one_read = Attachment {
            ord: 1,
            ..agreed(true)
        };
        let mut peer = Scripted::with(&Shape::default(), one_read);
        let region = peer.node.region(64, everything());
        (1..=3).for_each(|cookie| peer.node.post_recv(cookie, &[region.sge(0, 8)]));
        peer.send_ulpdu(&send_segment(false, 1, 0, b"part"));
        let read = |cookie| Work::read(cookie, 0x500, 0).sge(region.sge(8, 8));
        peer.node.post(&read(11));
        peer.node.post(&Work::send(12).inline(b"x"));
        peer.node.post(&Work::send(13).inline(b"x").unsignaled());
        peer.node.post(&read(14));
        peer.node.post(&Work::send(15).inline(b"x").unsignaled());
        assert_eq!(
            peer.output_ulpdus().len(),
            3,
            "the second Read waits for the first"
        );
        assert!(peer.node.sent().is_empty());
        end(&mut peer);
        let flushed = WcStatus::WrFlushErr;
        let all: Vec<_> = (11..=15).map(|cookie| (cookie, flushed)).collect();
        assert_eq!(peer.node.sent(), all);
        let all: Vec<_> = (1..=3).map(|cookie| (cookie, flushed, 0)).collect();
        assert_eq!(peer.node.received(), all);
        assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
        assert_eq!(peer.node.sq_outstanding(), 0);
    }
}

#[test]
fn ddp_t_07_stag_bound_to_another_stream() {
    use urnic_device::wqe::BindOperands;
    use zerocopy::FromZeros;
    let mut peer = Scripted::new();
    let region = peer.node.region(64, everything());
    let window = peer.node.memory.create_window(peer.node.pd, true).unwrap();
    let mut operands = BindOperands::new_zeroed();
    operands.offset = region.base.into();
    operands.len = 64.into();
    operands.mr_stag = region.stag.into();
    operands.access = Access::REMOTE_WRITE.bits().into();
    operands.new_stag = window.into();
    // The window is bound by queue pair 7, which is ours: a Write through it is placed.
    peer.node.memory.bind(&operands, peer.node.pd, 7).unwrap();
    peer.send_ulpdu(&write_segment(window, region.base, b"mine"));
    assert_eq!(region.bytes()[..4], *b"mine");
    let owner = Accessor {
        pd: peer.node.pd,
        qid: 7,
    };
    peer.node
        .memory
        .invalidate(window, owner, InvalidateBy::Local, Invalidable::All)
        .unwrap();
    peer.node.memory.bind(&operands, peer.node.pd, 8).unwrap();
    let payload = terminate_for_ulpdu(peer, &region, &write_segment(window, region.base, b"else"));
    assert_eq!(payload[..4], hex("1102c000"));
}

#[test]
fn ddp_t_08_revocation_ends_placement() {
    let mut peer = Scripted::new();
    let region = peer.node.region(64, everything());
    peer.send_ulpdu(&tagged(0x81, 0x40, region.stag, region.base, b"before"));
    peer.node.memory.deregister(region.stag).unwrap();
    let payload = terminate_for_ulpdu(
        peer,
        &region,
        &write_segment(region.stag, region.base + 6, b"latter"),
    );
    assert_eq!(payload[..4], hex("1100c000"));
    assert_eq!(region.bytes()[..7], *b"before\0");
}

#[test]
fn sec_01_and_03_cross_domain_send_with_invalidate() {
    let (mut peer, _) = with_receive(64);
    let other = peer.node.memory.domains().allocate().unwrap();
    let region = peer.node.region_in(other, 8, everything());
    peer.send_ulpdu(&untagged(0x41, 0x44, region.stag, 0, 1, 0, b"hello"));
    assert_eq!(peer.terminate()[..4], hex("0109c000"));
    // Two streams of the domain share the region, so a peer may not invalidate it.
    let (mut peer, _) = with_receive(64);
    let region = peer.node.region(8, everything());
    assert!(
        peer.node
            .memory
            .domains()
            .enter(peer.node.pd, DomainUse::QueuePair)
    );
    peer.send_ulpdu(&untagged(0x41, 0x44, region.stag, 0, 1, 0, b"hello"));
    assert_eq!(peer.terminate()[..4], hex("0209c000"));
    let memory = Arc::clone(&peer.node.memory);
    assert!(
        memory
            .check(
                Accessor {
                    pd: peer.node.pd,
                    qid: 7
                },
                MemoryAccess {
                    stag: region.stag,
                    offset: region.base,
                    len: 8,
                    need: crate::memory::Need::RemoteRead
                }
            )
            .is_ok()
    );
}
