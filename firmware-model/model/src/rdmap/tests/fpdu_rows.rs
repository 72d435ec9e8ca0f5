//! Rows about FPDUs, and about a segment size that changes: over a stream of bytes only.

use super::delivery_rows::{confirmation, delivered};
use super::vector;
use crate::counters::Counter;
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use crate::transport::QpChange;
use crate::tuning::LONG_FPDU;
use std::time::Duration;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::Opcode;
use urnic_wire::crc::crc32c;
use urnic_wire::mpa::fpdu::CrcMode;
use urnic_wire::mpa::marker;

const SUCCESS: WcStatus = WcStatus::Success;

#[test]
fn sec_10_a_gap_costs_one_buffer_at_most() {
    let mut peer = Scripted::new();
    let fpdu = fpdu_of(&write_segment(1, 0, &vec![0; 60_000]));
    for part in fpdu[..fpdu.len() - 1].chunks(1000) {
        peer.send(part);
    }
    assert!(peer.node.engine.buffered() < 64 << 10);
    assert_eq!(peer.node.count(Counter::RxFpdus), 0);
    let change = QpChange {
        state: Some(QpState::Err),
        ..QpChange::default()
    };
    peer.node.modify(change);
    assert_eq!(peer.node.engine.buffered(), 0);
}

#[test]
fn mpa_f_08_fpdus_are_longer_than_a_segment_after_a_confirmation() {
    let mut peer = Scripted::with(&Shape::default(), delivered());
    let source = peer.node.filled(&pattern(50_000));
    let send = |cookie| Work::new(Opcode::Send, cookie).sge(source.sge(0, 50_000));
    let longest = |peer: &mut Scripted| peer.output_ulpdus().iter().map(Vec::len).max();
    peer.wire.set_mss(1460);
    peer.node.post(&send(1));
    assert_eq!(longest(&mut peer), Some(1454));
    peer.send_ulpdu(&confirmation(1));
    peer.node.post(&send(2));
    assert_eq!(longest(&mut peer), Some(LONG_FPDU as usize - 6));
}

/// The segment size changes in the middle of a message: later segments have the length that the new
/// size allows.
#[test]
fn ddp_s_01_segments_follow_the_mulpdu_within_a_message() {
    let mut peer = Scripted::new();
    peer.wire.set_capacity(0, 10_000);
    let source = peer.node.filled(&pattern(1 << 20));
    peer.node.post(&Work::send(1).sge(source.sge(0, 1 << 20)));
    while peer.node.pump() {}
    peer.wire.set_mss(600);
    peer.advance(Duration::from_secs(2));
    let ulpdus = peer.output_ulpdus();
    let after = ulpdus.iter().position(|ulpdu| ulpdu.len() < 1454).unwrap();
    let mulpdu = ulpdus[after].len();
    assert!(mulpdu <= 600 && after > 0 && after < ulpdus.len() / 2);
    assert!(ulpdus[..after].iter().all(|ulpdu| ulpdu.len() == 1454));
    assert!(
        ulpdus[after..ulpdus.len() - 1]
            .iter()
            .all(|ulpdu| ulpdu.len() == mulpdu)
    );
    let bytes: Vec<u8> = ulpdus.iter().flat_map(|ulpdu| ulpdu[18..].to_vec()).collect();
    assert!(bytes == pattern(1 << 20));
}

#[test]
fn mpa_c_03_every_byte_of_a_marked_fpdu_is_covered() {
    let attachment = Attachment {
        markers_rx: true,
        ..agreed(true)
    };
    // A marker before the length field, one inside, and, by the length, one between pad and CRC.
    let ulpdu = send_segment(true, 1, 0, &pattern(996));
    let mut bytes = vec![0; 2048];
    let len = marker::emit(0, &ulpdu, CrcMode::On, &mut bytes);
    bytes.truncate(len);
    assert_eq!(bytes[..4], [0; 4]);
    assert_eq!(len, 1024 + 4 + 4, "only the CRC follows the third marker");
    for at in (0..len)
        .step_by(7)
        .chain([0, 1, 2, 3, 1024, 1025, 1026, 1027, len - 1])
    {
        // Changes of ULPDU_Length are left out: they move the end of the FPDU and the markers, so
        // another check may fail first.
        if (4..6).contains(&at) {
            continue;
        }
        let mut peer = Scripted::with(&Shape::default(), attachment.clone());
        let region = peer.node.region(1000, everything());
        peer.node.post_recv(1, &[region.sge(0, 1000)]);
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x40;
        peer.send(&damaged);
        assert_eq!(peer.terminate(), hex("20020000"), "byte {at}");
        assert_eq!(region.bytes(), [0; 1000]);
    }
    let mut peer = Scripted::with(&Shape::default(), attachment);
    let region = peer.node.region(1000, everything());
    peer.node.post_recv(1, &[region.sge(0, 1000)]);
    peer.send(&bytes);
    assert_eq!(peer.node.received(), [(1, SUCCESS, 996)]);
}

#[test]
fn mpa_c_03_every_byte_of_an_fpdu_is_covered() {
    let good = vector("F-SEND-hello");
    for bit in 16..good.len() * 8 {
        let mut peer = Scripted::new();
        let region = peer.node.region(64, everything());
        peer.node.post_recv(1, &[region.sge(0, 64)]);
        let mut damaged = good.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        peer.send(&damaged);
        assert_eq!(peer.terminate(), hex("20020000"), "bit {bit}");
        assert_eq!(region.bytes(), [0; 64]);
    }
    // The CRC covers the length: a shorter FPDU whose CRC covers all bytes except the length.
    let mut peer = Scripted::new();
    let region = peer.node.region(64, everything());
    peer.node.post_recv(1, &[region.sge(0, 64)]);
    let mut shorter = good.clone();
    let end = shorter.len() - 4;
    let crc = crc32c(&shorter[2..end]);
    shorter[end..].copy_from_slice(&crc.to_le_bytes());
    peer.send(&shorter);
    assert_eq!(peer.terminate(), hex("20020000"), "a CRC over all but the length");
}
