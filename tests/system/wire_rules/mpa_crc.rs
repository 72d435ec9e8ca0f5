//! CRC32C (RFC 5044 §4.4; conformance §1.3).

use urnic_tests::framing::crc32c;
use urnic_tests::or_skip;
use urnic_tests::peer::{End, hex};
use urnic_tests::startup::{CRC, MARKERS};
use urnic_tests::target_process::{ARENA_SEED, PAGE, QpParams, ROLES, Role, TargetProcess, filled, status};
use urnic_tests::ulpdu::{complaint, send, tagged, untagged};

use super::{ALL_FLUSHED, Scene};

/// F-SEND-hello with one bit of its payload flipped.
const BAD: &str = "00174143 00000000 00000000 00000001 00000000 69656c6c 6f000000 b990b10c";
/// Vector F-TERM-202.
const TERMINATE: &str = "00164147 00000000 00000002 00000001 00000000 20020000 7fe42585";

#[test]
fn mpa_c_01_crcs_are_on_unless_configured_off() {
    // Every link compares the target's Request or Reply, flags and all.
    let mut target = or_skip!(TargetProcess::start(&[]));
    let without = QpParams {
        flags: 0,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = target.link_as(role, &without, CRC);
        link.peer.send_ulpdus(&[send(1, b"")]);
        assert_eq!(target.received(link.qp), (0, 0));
    }
    target.quits();
}

#[test]
fn mpa_c_02_the_crc_is_sent_low_byte_first() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        // Vector F-SEND0-RTR: a Send of nothing, the first.
        target.sends(link.qp, 9, 0);
        assert_eq!(
            link.peer.read_bytes(24),
            hex("00124143 00000000 00000000 00000001 00000000 587be8c4")
        );
    }
    target.quits();
}

#[test]
fn mpa_c_04_a_bad_crc_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        link.peer.send(&hex(BAD));
        assert_eq!(link.peer.read_bytes(28), hex(TERMINATE));
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
        assert_eq!(scene.target.event().1, link.qp.index);
    }
    scene.ends();
}

#[test]
fn mpa_c_04_any_wrong_byte_prevents_placement() {
    let mut scene = or_skip!(Scene::start(&[]));
    let ulpdu = tagged(
        0xc1,
        0x40,
        scene.target.stag("all"),
        scene.target.buffer(),
        &[0xaa; 101],
    );
    let len = scene.target.link(Role::Responder).peer.framed(&[&ulpdu]).len();
    // Not in ULPDU_Length: with a wrong length the CRC is read elsewhere. Control bytes, STag,
    // offset, payload, pad, CRC.
    for (number, at) in [2, 3, 4, 8, 15, 16, 60, 116, 117, 119, 120, 123]
        .into_iter()
        .enumerate()
    {
        assert!(at < len);
        let mut link = scene.target.link(ROLES[number % 2]);
        let mut bytes = link.peer.framed(&[&ulpdu]);
        bytes[at] ^= 0x10;
        scene.breaks_by(&mut link, 0x2002, &bytes, &[], &ALL_FLUSHED);
        scene.is_pristine();
    }
    scene.ends();
}

#[test]
fn mpa_c_04_a_wrong_length_ends_in_a_wrong_crc() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        for len in [0x0013_u16, 0x0017, 0x0100] {
            let mut link = scene.target.link(role);
            let mut bytes = link.peer.framed(&[send(1, &[1; 30])]);
            bytes[..2].copy_from_slice(&len.to_be_bytes());
            bytes.resize(1024, 0x5a);
            scene.breaks_by(&mut link, 0x2002, &bytes, &[], &ALL_FLUSHED);
            scene.is_pristine();
        }
    }
    scene.ends();
}

#[test]
fn mpa_c_04_a_bad_crc_inside_a_send_takes_its_receive() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        let first = link.peer.framed(&[untagged(0x01, 0x43, 0, 1, 0, b"good")]);
        let mut second = link.peer.framed(&[untagged(0x41, 0x43, 0, 1, 4, b"evil")]);
        second[20] ^= 1;
        scene.breaks_by(&mut link, 0x2002, &[first, second].concat(), &[], &ALL_FLUSHED);
    }
    scene.ends();
}

/// Flag C of either side, in both roles: a bad CRC matters if one of them is set.
#[track_caller]
fn crc_if_one_side_requires_it(targets: u8, peers: u8, markers: u8) {
    let mut scene = or_skip!(Scene::with(targets | markers));
    let params = QpParams {
        flags: peers | markers,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = scene.target.link_as(role, &params, targets | markers);
        let mut fpdu = link.peer.framed(&[send(1, b"hello")]);
        let last = fpdu.len() - 1;
        fpdu[last] ^= 0x80;
        if targets | peers == 0 {
            link.peer.send(&fpdu);
            assert_eq!(scene.target.received(link.qp), (0, 5));
        } else {
            scene.breaks_by(&mut link, 0x2002, &fpdu, &[], &ALL_FLUSHED);
        }
    }
    scene.ends();
}

#[test]
fn mpa_c_05_both_sides_require_crcs() {
    crc_if_one_side_requires_it(CRC, CRC, 0);
    crc_if_one_side_requires_it(CRC, CRC, MARKERS);
}

#[test]
fn mpa_c_05_only_the_peer_requires_crcs() {
    crc_if_one_side_requires_it(0, CRC, 0);
    crc_if_one_side_requires_it(0, CRC, MARKERS);
}

#[test]
fn mpa_c_05_only_the_target_requires_crcs() {
    crc_if_one_side_requires_it(CRC, 0, 0);
    crc_if_one_side_requires_it(CRC, 0, MARKERS);
}

#[test]
fn mpa_c_05_neither_side_requires_crcs() {
    crc_if_one_side_requires_it(0, 0, 0);
    crc_if_one_side_requires_it(0, 0, MARKERS);
}

#[test]
fn mpa_f_13_a_writes_last_fpdu_is_placed_with_a_good_crc_only() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
        let mut link = scene.target.link(role);
        let good = link.peer.framed(&[
            tagged(0x81, 0x40, stag, at, &[1; 1000]),
            tagged(0x81, 0x40, stag, at + 1000, &[2; 1000]),
        ]);
        let mut bad = link
            .peer
            .framed(&[tagged(0xc1, 0x40, stag, at + 2000, &[3; 1000])]);
        let end = bad.len() - 4;
        let crc = crc32c(&bad[..end]).map(|byte| !byte);
        bad[end..].copy_from_slice(&crc);
        scene.breaks_by(&mut link, 0x2002, &[good, bad].concat(), &[], &ALL_FLUSHED);
        let mut expected = filled(ARENA_SEED, 3 * PAGE);
        expected[PAGE..PAGE + 1000].fill(1);
        expected[PAGE + 1000..PAGE + 2000].fill(2);
        assert!(scene.target.arena() == expected);
        scene.target.command(&format!("fill arena {ARENA_SEED:x}"));
    }
    scene.ends();
}

#[test]
fn mpa_c_04_sends_in_flight_are_flushed_in_order() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        // A Read that is never answered keeps what is after it from completing.
        let inbox = scene.target.address("inbox");
        let far = (0x1000, 0x2000);
        scene.target.posts(link.qp, 4, 100, "in", inbox, 64, far);
        scene.target.sends(link.qp, 101, 5);
        scene.target.sends(link.qp, 102, 5);
        for _ in 0..3 {
            link.peer.ulpdu();
        }
        link.peer.send(&hex(BAD));
        assert_eq!(link.peer.ulpdu(), complaint(0x2002, &[]));
        let sends = [100, 101, 102].map(|id| (id, status::FLUSHED));
        scene.is_over(&mut link, End::Closed, &[&sends[..], &ALL_FLUSHED].concat());
        assert_eq!(scene.target.event().1, link.qp.index);
    }
    scene.ends();
}
