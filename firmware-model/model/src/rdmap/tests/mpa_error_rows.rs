//! Row MPA-E-01: the errors of RFC 5044 §8 that a stream in full operation can have. Each has its
//! own code in the Terminate, if one is sent, in the event, and in the counters.

use super::vector;
use crate::counters::Counter;
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use urnic_device::event::QpFault;
use urnic_wire::crc::crc32c;
use urnic_wire::mpa::fpdu::CrcMode;
use urnic_wire::mpa::marker;

/// The counters of lost streams, wrong CRCs and wrong markers.
fn errors(peer: &Scripted) -> [u64; 3] {
    [
        Counter::StreamsLost,
        Counter::RxCrcErrors,
        Counter::RxMarkerErrors,
    ]
    .map(|counter| peer.node.count(counter))
}

/// The event of a lost stream: layer 2, error type 0, code 1.
const LOST: (QpFault, u32) = (QpFault::StreamLost, 0x2001_0000);

#[test]
fn mpa_e_01_a_reset_is_code_1() {
    let mut peer = Scripted::new();
    peer.rst();
    assert_eq!(peer.node.faults(), [LOST]);
    assert_eq!(errors(&peer), [1, 0, 0]);
}

#[test]
fn mpa_e_01_a_fin_inside_an_fpdu_is_code_1() {
    let mut peer = Scripted::new();
    peer.send(&vector("F-SEND-hello")[..20]);
    peer.fin();
    assert_eq!(peer.node.faults(), [LOST]);
    assert_eq!(errors(&peer), [1, 0, 0]);
    assert!(peer.output().is_empty(), "there is no Terminate with code 1");
}

#[test]
fn mpa_e_01_a_fin_with_work_outstanding_is_code_1() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(16, everything());
    peer.node.post(&Work::read(1, 1, 0).sge(sink.sge(0, 16)));
    peer.fin();
    assert_eq!(peer.node.faults(), [LOST]);
    assert_eq!(errors(&peer), [1, 0, 0]);
}

#[test]
fn mpa_e_01_a_wrong_crc_is_code_2() {
    let mut peer = Scripted::new();
    let mut damaged = vector("F-SEND-hello");
    damaged[20] ^= 1;
    peer.send(&damaged);
    assert_eq!(peer.terminate(), hex("20020000"));
    assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, 0x2002_0000)]);
    assert_eq!(errors(&peer), [0, 1, 0]);
}

#[test]
fn mpa_e_01_a_wrong_marker_is_code_3() {
    let attachment = Attachment {
        markers_rx: true,
        ..agreed(true)
    };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    let mut bytes = vec![0; 2048];
    let len = marker::emit(0, &send_segment(true, 1, 0, &[7; 1000]), CrcMode::On, &mut bytes);
    bytes.truncate(len);
    // A wrong FPDUPTR in the second marker, with a correct CRC.
    bytes[515] ^= 4;
    let end = len - 4;
    let crc = crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    peer.send(&bytes);
    assert_eq!(peer.terminate(), hex("20030000"));
    assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, 0x2003_0000)]);
    assert_eq!(errors(&peer), [0, 0, 1]);
}

#[test]
fn mpa_e_01_an_error_that_cannot_be_sent_has_its_code() {
    // Before the fence opens, the engine may send nothing (row EMPA-23).
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    let mut damaged = vector("F-SEND-hello");
    damaged[20] ^= 1;
    peer.send(&damaged);
    assert!(peer.output().is_empty());
    assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, 0x2002_0000)]);
}

#[test]
fn mpa_e_01_an_orderly_end_has_no_code() {
    let mut peer = Scripted::new();
    peer.fin();
    assert_eq!(peer.node.faults(), []);
    assert_eq!(errors(&peer), [0, 0, 0]);
}
