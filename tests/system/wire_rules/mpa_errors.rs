//! The end of a stream, good and bad (RFC 5044 §8, RFC 5041 §6.2; conformance §1.5, DDP-T).

use std::path::Path;

use urnic_tests::build::{scratch, urnic};
use urnic_tests::framing::crc32c;
use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer};
use urnic_tests::program::Program;
use urnic_tests::startup::{CRC, MARKERS};
use urnic_tests::target_process::{ARENA_SEED, LARGE_SEED, Link, PAGE, QpParams, ROLES, Role, TargetProcess};
use urnic_tests::target_process::{filled, opcode, state, status};
use urnic_tests::ulpdu::{send, untagged, write};
use urnic_tests::wait::{TIME_LIMIT, until};

use super::{ALL_FLUSHED, Scene};

/// Posts a Read that will not be answered, and a Send after it; both are on the wire afterwards.
#[track_caller]
fn posts_read_and_send(scene: &mut Scene, link: &mut Link) {
    let inbox = scene.target.address("inbox");
    scene
        .target
        .posts(link.qp, opcode::READ, 100, "in", inbox, 64, (0x1000, 0x2000));
    scene.target.sends(link.qp, 101, 5);
    link.peer.ulpdu();
    link.peer.ulpdu();
}

/// Completions of requests whose peer has ended: the first one has the reason (as on InfiniBand).
const SENDS_LOST: [(u64, u64); 2] = [(100, status::RETRY_EXC_ERR), (101, status::FLUSHED)];

#[test]
fn mpa_e_01_a_reset_is_an_error() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        link.peer.send_ulpdus(&[send(1, b"hello")]);
        assert_eq!(scene.target.received(link.qp), (0, 5));
        posts_read_and_send(&mut scene, &mut link);
        let Link { qp, peer } = link;
        peer.reset();
        scene
            .target
            .completes(qp, &[&SENDS_LOST[..], &ALL_FLUSHED[1..]].concat());
        assert_eq!(scene.target.state(qp), state::ERR);
    }
    scene.is_pristine();
    scene.ends();
}

#[test]
fn mpa_e_01_a_reset_within_an_fpdu_is_an_error() {
    let mut scene = or_skip!(Scene::start(&[]));
    let late = write(scene.target.stag("all"), scene.target.buffer(), &[7; 2000]);
    for role in ROLES {
        let mut link = scene.target.link(role);
        let fpdu = link.peer.framed(&[&late]);
        link.peer.send(&fpdu[..1000]);
        scene.target.is_healthy();
        let Link { qp, peer } = link;
        peer.reset();
        scene.target.completes(qp, &ALL_FLUSHED);
        assert_eq!(scene.target.state(qp), state::ERR);
    }
    scene.is_pristine();
    scene.ends();
}

#[test]
fn mpa_e_01_an_end_within_an_fpdu_is_an_error() {
    let mut scene = or_skip!(Scene::start(&[]));
    let late = write(scene.target.stag("all"), scene.target.buffer(), &[7; 2000]);
    for role in ROLES {
        // Within the length, after it, within the header, in the payload, before the last byte.
        for part in [1, 2, 10, 1000, 2019] {
            let mut link = scene.target.link(role);
            posts_read_and_send(&mut scene, &mut link);
            let fpdu = link.peer.framed(&[&late]);
            link.peer.send(&fpdu[..part]);
            link.peer.finish();
            scene.is_over(&mut link, End::Closed, &[&SENDS_LOST[..], &ALL_FLUSHED].concat());
        }
    }
    scene.is_pristine();
    scene.ends();
}

#[test]
fn mpa_e_01_an_end_within_a_message_is_an_error() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        link.peer.send_ulpdus(&[untagged(0x01, 0x43, 0, 1, 0, b"and")]);
        link.peer.finish();
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
    }
    scene.ends();
}

#[test]
fn mpa_e_01_an_end_with_a_read_outstanding_is_an_error() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        posts_read_and_send(&mut scene, &mut link);
        link.peer.finish();
        scene.is_over(&mut link, End::Closed, &[&SENDS_LOST[..], &ALL_FLUSHED].concat());
    }
    scene.ends();
}

/// Bytes on the wire of the zero-length Write with which the initiator reports that it is ready,
/// with the marker before it.
const RTR_LEN: usize = 4 + 20;

/// Counters of the process that distinguish the errors of RFC 5044 §8: codes 1, 2 and 3.
fn counted(place: &Path) -> [u64; 3] {
    let json = Program::plain(urnic())
        .line("stat --json")
        .env("URNIC_PRESENT_DIR", place)
        .run()
        .success();
    ["streams_lost", "rx_crc_errors", "rx_marker_errors"].map(|name| {
        let (_, value) = json.split_once(&format!("\"{name}\":")).expect("a counter");
        let digits = value.split(|c: char| !c.is_ascii_digit()).next();
        digits.and_then(|digits| digits.parse().ok()).expect("a number")
    })
}

#[test]
fn mpa_e_01_each_error_is_reported_by_its_own_code() {
    let folder = urnic_testkit::Folder::inside(&scratch(), "mpa-e-01");
    let place = folder.path();
    let variables = [
        ("URNIC_PRESENT_DIR", place.to_str().expect("our path")),
        ("URNIC_LOG", "urnic_cm=debug,urnic_driver=debug"),
        ("URNIC_MPA_MARKERS", "true"),
    ];
    let mut scene =
        or_skip!(TargetProcess::start(&variables).and_then(|target| Scene::around(target, CRC | MARKERS)));
    let mut consumed = 0;
    let mut logs = |scene: &Scene, line: &str| {
        let seen = until(TIME_LIMIT, || {
            let output = scene.target.process().output();
            let at = output.get(consumed..)?.find(line)?;
            consumed += at + line.len();
            Some(())
        });
        assert!(seen.is_some(), "{line:?} is not in the log");
    };

    // 1: the connection is lost. No peer can receive a Terminate.
    let params = QpParams::default();
    let Link { qp, peer } = scene.target.link_as(Role::Responder, &params, CRC | MARKERS);
    peer.reset();
    scene.target.completes(qp, &ALL_FLUSHED);
    logs(&scene, "StreamLost, 0x20010000: MPA connection lost");
    assert_eq!(counted(place), [1, 0, 0]);

    // 2: a CRC is wrong.
    let mut link = scene.target.link_as(Role::Responder, &params, CRC | MARKERS);
    let mut bytes = link.peer.framed(&[send(1, b"hello")]);
    bytes[30] ^= 1;
    scene.breaks_by(&mut link, 0x2002, &bytes, &[], &ALL_FLUSHED);
    logs(&scene, "TerminateSent, 0x20020000: MPA CRC error");
    assert_eq!(counted(place), [1, 1, 0]);

    // 3: a marker points elsewhere, under a good CRC.
    let mut link = scene.target.link_as(Role::Responder, &params, CRC | MARKERS);
    let mut bytes = link.peer.framed(&[send(1, &[7; 1000])]);
    let marker = 512 - RTR_LEN;
    bytes[marker + 3] ^= 4;
    let end = bytes.len() - 4;
    let crc = crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc);
    scene.breaks_by(&mut link, 0x2003, &bytes, &[], &ALL_FLUSHED);
    logs(
        &scene,
        "TerminateSent, 0x20030000: MPA marker and length disagree",
    );
    assert_eq!(counted(place), [1, 1, 1]);

    // 4: a Request, and a Reply, that is none.
    let (qp, _) = scene.target.awaits_request(&params);
    let mut foreign_peer = Peer::connect(scene.target.listener(qp));
    foreign_peer.send(&[0; 20]);
    assert!(
        foreign_peer.read_to_end().0.is_empty(),
        "no Terminate during start-up"
    );
    logs(&scene, "MPA error 4: ");
    let (mut link, reply) = scene.target.sends_request(&params, CRC | MARKERS);
    let mut bytes = reply.to_bytes();
    bytes[0] ^= 1;
    link.peer.send(&bytes);
    assert!(
        link.peer.read_to_end().0.is_empty(),
        "no Terminate during start-up"
    );
    logs(&scene, "MPA error 4: ");
    assert_eq!(counted(place), [1, 1, 1], "no queue pair was lost");
    scene.ends();
}

#[test]
fn mpa_e_05_an_orderly_end_flushes_receives_after_the_grace() {
    // Native connections work as on InfiniBand: a silent peer is not yet an error.
    let mut scene = or_skip!(Scene::start(&[("URNIC_NATIVE_FIN_GRACE_MS", "700")]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        link.peer.send_ulpdus(&[send(1, b"hello")]);
        link.peer.finish();
        assert_eq!(scene.target.received(link.qp), (0, 5));
        assert!(
            scene.target.has_no_completion(link.qp),
            "nothing is flushed at once"
        );
        assert_eq!(scene.target.state(link.qp), state::RTS);
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED[1..]);
        scene.target.sends(link.qp, 100, 5);
        scene.target.completes(link.qp, &[(100, status::RETRY_EXC_ERR)]);
    }
    scene.ends();
}

#[test]
fn mpa_e_05_a_send_after_the_peer_s_end_fails() {
    let mut scene = or_skip!(Scene::start(&[("URNIC_NATIVE_FIN_GRACE_MS", "600000")]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        link.peer.finish();
        // The FIN may take a while to arrive.
        let failed = (0x100..0x1000).find_map(|id| {
            scene.target.sends(link.qp, id, 5);
            let wc = scene.target.completion(link.qp);
            assert_eq!(wc.id, id);
            Some(wc.status).filter(|status| *status != status::SUCCESS)
        });
        assert_eq!(failed, Some(status::RETRY_EXC_ERR));
        scene.target.completes(link.qp, &ALL_FLUSHED);
        assert_eq!(scene.target.state(link.qp), state::ERR);
    }
    scene.ends();
}

#[test]
fn ddp_t_05_sent_messages_arrive_without_their_queue_pair() {
    const LEN: usize = 60_000;
    let mut scene = or_skip!(Scene::start(&[]));
    let content = filled(LARGE_SEED, LEN);
    for role in ROLES {
        let Link { qp, mut peer } = scene.target.link(role);
        let from = scene.target.address("large");
        scene
            .target
            .posts(qp, opcode::SEND, 100, "big", from, LEN as u64, (0, 0));
        scene.target.completes(qp, &[(100, status::SUCCESS)]);
        // Unread input makes TCP discard undelivered data, unless the device prevents it.
        peer.send_ulpdus(&[write(1, 0, b""), send(1, b"unread")]);
        scene.target.destroys(qp);
        let mut came = peer.ulpdu().split_off(18);
        while came.len() < LEN {
            came.extend(&peer.ulpdu()[18..]);
        }
        assert!(came == content);
        assert_eq!(peer.end(), End::Closed);
    }
    scene.ends();
}

#[test]
fn mpa_e_02_a_write_after_an_error_is_not_placed() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
        let mut link = scene.target.link(role);
        let good = link.peer.framed(&[write(stag, at, b"good")]);
        let mut bad = link.peer.framed(&[write(stag, at + 100, b"bad")]);
        bad[17] ^= 1;
        // `breaks_by` adds a good Write.
        scene.breaks_by(&mut link, 0x2002, &[good, bad].concat(), &[], &ALL_FLUSHED);
        let mut expected = filled(ARENA_SEED, 3 * PAGE);
        expected[PAGE..PAGE + 4].copy_from_slice(b"good");
        assert!(scene.target.arena() == expected);
        scene.target.command(&format!("fill arena {ARENA_SEED:x}"));
    }
    scene.ends();
}

#[test]
fn mpa_e_04_a_terminate_is_sent_while_the_peer_still_sends() {
    // Much unread input must not turn the close into a reset, which would discard the Terminate.
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        let mut ulpdus = vec![vec![0x41; 3]];
        ulpdus.extend((1..400).map(|_| write(1, 0, &[1; 4000])));
        let bytes = link.peer.framed(&ulpdus);
        scene.breaks_by(&mut link, 0x1000, &bytes, &ulpdus[0], &ALL_FLUSHED);
    }
    scene.ends();
}
