//! Markers (RFC 5044 §§4.2, 4.3; conformance §1.2).

use urnic_tests::framing::{Framing, crc32c};
use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer, hex};
use urnic_tests::startup::{CRC, Frame, MARKERS};
use urnic_tests::target_process::{
    ARENA_SEED, Link, PAGE, QpParams, ROLES, Role, TargetProcess, filled, status,
};
use urnic_tests::ulpdu::{complaint, send, write};

use super::{ALL_FLUSHED, Scene, variables};

/// Lengths of messages that put markers everywhere: before, in and after headers, payloads, pads.
const LENGTHS: [usize; 12] = [0, 1, 484, 488, 491, 24, 464, 1200, 506, 4000, 5, 492];

/// Messages of all those lengths both ways, between these two.
#[track_caller]
fn exchange(target: &mut TargetProcess, link: &mut Link) {
    let buffer = filled(ARENA_SEED, 2 * PAGE).split_off(PAGE);
    for (id, len) in (0..).zip(LENGTHS) {
        let content = filled(id, len);
        target.receives_at(link.qp, id, 0, PAGE as u64);
        link.peer.send_ulpdus(&[send(id as u32 + 1, &content)]);
        assert_eq!(target.received(link.qp), (id, len as u64));
        assert!(target.dump("inbox", 0, len) == content, "{len} bytes");
        target.sends(link.qp, 0x100 + id, len as u64);
        target.completes(link.qp, &[(0x100 + id, status::SUCCESS)]);
        assert_eq!(link.peer.ulpdu(), send(id as u32 + 1, &buffer[..len]));
    }
}

/// M of either side's frame, in both roles: the reader of the raw peer checks that each required
/// marker is present, and no other.
#[track_caller]
fn markers_as_requested(targets: u8, peers: u8) {
    let mut target = or_skip!(TargetProcess::start(&variables(targets | CRC)));
    let params = QpParams {
        flags: peers | CRC,
        receives: 0,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = target.link_as(role, &params, targets | CRC);
        exchange(&mut target, &mut link);
    }
    target.quits();
}

#[test]
fn mpa_m_01_a_peer_that_requests_markers_gets_them() {
    markers_as_requested(0, MARKERS);
}

#[test]
fn mpa_m_01_requested_markers_are_removed() {
    markers_as_requested(MARKERS, 0);
}

#[test]
fn mpa_m_01_markers_both_ways() {
    markers_as_requested(MARKERS, MARKERS);
}

#[test]
fn mpa_m_02_without_a_request_no_markers_are_sent() {
    markers_as_requested(0, 0);
}

#[test]
fn mpa_m_01_markers_without_crc() {
    let mut target = or_skip!(TargetProcess::start(&variables(MARKERS)));
    let params = QpParams {
        flags: MARKERS,
        receives: 0,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = target.link_as(role, &params, MARKERS);
        exchange(&mut target, &mut link);
    }
    target.quits();
}

/// A target that requires markers.
fn requests_markers() -> Result<TargetProcess, String> {
    TargetProcess::start(&variables(CRC | MARKERS))
}

/// Connects to the target and reads its Reply.
#[track_caller]
fn accepted_link(target: &mut TargetProcess) -> Link {
    let (qp, request) = target.awaits_request(&QpParams::default());
    let mut peer = Peer::connect(target.listener(qp));
    peer.send(&request.to_bytes());
    assert_eq!(Frame::read(&mut peer).flags, 0xd0, "S, C, M");
    Link { qp, peer }
}

/// A Send of this many zeros.
fn zeros(msn: u32, len: usize) -> Vec<u8> {
    send(msn, &vec![0; len])
}

#[test]
fn mpa_m_03_the_first_marker_opens_the_stream() {
    // Vector RFC5044-FIG5.
    let mut target = or_skip!(requests_markers());
    let mut link = accepted_link(&mut target);
    link.peer.send(&hex(
        "00000000 002a4143 00000000 00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 00000000 52239983",
    ));
    assert_eq!(target.received(link.qp), (0, 24));
    target.quits();
}

#[test]
fn mpa_m_05_a_marker_points_back_to_its_fpdu() {
    // Vector RFC5044-FIG6: after 492 bytes, a marker 20 bytes into the FPDU.
    let mut target = or_skip!(requests_markers());
    let mut link = accepted_link(&mut target);
    let first = Framing::new(true, true).frame(&zeros(1, 464));
    assert_eq!(first.len(), 492);
    link.peer.send(&first);
    link.peer.send(&hex(
        "002a4143 00000000 00000000 00000002 00000000 00000014 00000000 00000000 00000000 00000000 00000000 00000000 84925898",
    ));
    assert_eq!(target.received(link.qp), (0, 464));
    assert_eq!(target.received(link.qp), (1, 24));
    target.quits();
}

#[test]
fn mpa_m_06_a_marker_between_fpdus_belongs_to_the_second() {
    // Vector M-BETWEEN.
    let mut target = or_skip!(requests_markers());
    let mut link = accepted_link(&mut target);
    let first = Framing::new(true, true).frame(&zeros(1, 484));
    assert_eq!(first.len(), 512);
    link.peer.send(&first);
    link.peer.send(&hex(
        "00000000 00174143 00000000 00000000 00000002 00000000 68656c6c 6f000000 d5299f20",
    ));
    assert_eq!(target.received(link.qp), (0, 484));
    assert_eq!(target.received(link.qp), (1, 5));
    target.quits();
}

#[test]
fn mpa_m_07_a_marker_between_pad_and_crc_belongs_to_the_first() {
    // Vector M-PADCRC.
    let mut target = or_skip!(requests_markers());
    let mut link = accepted_link(&mut target);
    let first = Framing::new(true, true).frame(&zeros(1, 488));
    assert_eq!(first[508..], hex("00000000 000001fc 38cf64e8"));
    link.peer.send(&first);
    link.peer.send(&hex(
        "00174143 00000000 00000000 00000002 00000000 68656c6c 6f000000 16d8c75d",
    ));
    assert_eq!(target.received(link.qp), (0, 488));
    assert_eq!(target.received(link.qp), (1, 5));
    target.quits();
}

#[test]
fn mpa_m_08_all_markers_in_an_fpdu_point_to_its_start() {
    // Vector M-MULTI.
    let mut target = or_skip!(requests_markers());
    let mut link = accepted_link(&mut target);
    let mut fpdu = hex("00000000 04c24143 00000000 00000000 00000001 00000000");
    fpdu.resize(512, 0);
    fpdu.extend(hex("000001fc"));
    fpdu.resize(1024, 0);
    fpdu.extend(hex("000003fc"));
    fpdu.resize(1232, 0);
    fpdu.extend(hex("082f573a"));
    link.peer.send(&fpdu);
    assert_eq!(target.received(link.qp), (0, 1200));
    target.quits();
}

/// FPDUs of two Sends, the first of `len` zeros so that the second begins 492 bytes into the
/// stream; the marker in the second, 20 bytes on, is changed, and its CRC is recomputed.
fn remarked(framing: &mut Framing, len: usize, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut bytes = framing.frame(&zeros(1, len));
    let second = bytes.len();
    bytes.extend(framing.frame(&zeros(2, 24)));
    change(&mut bytes[second + 20..second + 24]);
    let end = bytes.len() - 4;
    let crc = crc32c(&bytes[second..end]);
    bytes[end..].copy_from_slice(&crc);
    bytes
}

#[test]
fn mpa_m_04_reserved_bits_of_a_marker_are_ignored() {
    let mut target = or_skip!(requests_markers());
    // The reserved half, and (MPA-M-05) the two low bits of FPDUPTR.
    let changes: [fn(&mut [u8]); 2] = [
        |marker| marker[..2].copy_from_slice(b"!?"),
        |marker| marker[3] |= 3,
    ];
    for change in changes {
        let mut link = accepted_link(&mut target);
        link.peer
            .send(&remarked(&mut Framing::new(true, true), 464, change));
        assert_eq!(target.received(link.qp), (0, 464));
        assert_eq!(target.received(link.qp), (1, 24));
    }
    target.quits();
}

/// In both roles: the target refuses a marker with this change, with M and perhaps C agreed.
#[track_caller]
fn refused(flags: u8, change: impl Fn(&mut [u8])) {
    let mut scene = or_skip!(Scene::with(flags));
    let params = QpParams {
        flags: 0,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = scene.target.link_as(role, &params, flags);
        if role == Role::Initiator {
            // The RTR when the target connects: both streams are 24 bytes long now.
            link.peer.send_ulpdus(&[write(1, 0, b"")]);
        }
        let bytes = remarked(&mut link.peer.outbound, 444, &change);
        let completions = [&[(0, status::SUCCESS)], &ALL_FLUSHED[1..]].concat();
        scene.breaks_by(&mut link, 0x2003, &bytes, &[], &completions);
    }
    scene.ends();
}

#[test]
fn mpa_m_11_a_marker_with_a_wrong_fpduptr_terminates() {
    for pointer in [0_u32, 0x10, 0x18, 0xfffc] {
        refused(CRC | MARKERS, |marker| {
            marker.copy_from_slice(&pointer.to_be_bytes());
        });
    }
}

#[test]
fn mpa_m_11_a_wrong_marker_terminates_without_crc_too() {
    refused(MARKERS, |marker| marker[3] = 0x40);
}

#[test]
fn mpa_m_11_a_marker_where_the_stream_has_none_terminates() {
    // The peer counts from another byte: its markers come four bytes late, and are read as payload.
    let mut scene = or_skip!(Scene::with(CRC | MARKERS));
    for role in ROLES {
        let mut link = scene.target.link_as(role, &QpParams::default(), CRC | MARKERS);
        let mut unmarked = Framing::new(true, false);
        let bytes = unmarked.frame(&zeros(1, 1000));
        link.peer.send(&bytes);
        // The device reads the CRC where markers would have moved it, and does not find it.
        link.peer.send(&[0; 64]);
        assert_eq!(link.peer.ulpdu(), complaint(0x2002, &[]));
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
        assert_eq!(scene.target.event(), (1, link.qp.index));
    }
    scene.ends();
}
