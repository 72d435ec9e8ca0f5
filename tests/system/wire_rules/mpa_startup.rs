//! Start-up at a live listener, and of live connects (RFC 5044 §7, RFC 6581; conformance §§1.4, 2,
//! 13.3): which frames are accepted, which are rejected and how, and that a rejected frame affects
//! no other connection.

use std::time::Duration;

use urnic_tests::framing::Framing;
use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer, hex};
use urnic_tests::startup::{CRC, ENHANCED, Frame, MARKERS, REJECT, WORD};
use urnic_tests::target_process::{Link, QpParams, Role, TargetProcess, state, status};
use urnic_tests::ulpdu::{complaint, read_request, read_response, send, write};

use super::{ALL_FLUSHED, Scene, variables};

const REQUEST_KEY: &str = "4d504120 49442052 65712046 72616d65";
const REPLY_KEY: &str = "4d504120 49442052 65702046 72616d65";
/// Private data of a rejecting Reply, but for the reason in its sixth byte.
const NO: &str = "75524e43 01";
const UNKNOWN: u8 = 2;
const ELSEWHERE: u8 = 3;
const GONE: u8 = 4;
const CONNECTED: u8 = 5;
const FOREIGN: u8 = 6;

/// Connects to a queue pair's listener and sends these bytes.
fn connect(target: &TargetProcess, link: &Link, bytes: &[u8]) -> Peer {
    let mut peer = Peer::connect(target.listener(link.qp));
    peer.send(bytes);
    peer
}

/// A rejecting Reply.
fn rejection(revision: u8, word: Option<u32>, reason: u8) -> Frame {
    let mut private_data = word.map_or(Vec::new(), |word| word.to_be_bytes().to_vec());
    private_data.extend(hex(NO));
    private_data.extend([reason, 0, 0]);
    let enhanced = if word.is_some() { ENHANCED } else { 0 };
    Frame {
        request: false,
        flags: CRC | REJECT | enhanced,
        revision,
        private_data,
    }
}

/// Checks that the listener closes the connection after these bytes, without an answer.
#[track_caller]
fn closed_without_a_reply(frames: &[Vec<u8>]) {
    let mut scene = or_skip!(Scene::start(&[]));
    for bytes in frames {
        connect(&scene.target, &scene.bystander, bytes).end();
        scene.continues();
    }
    let mut link = scene.target.link(Role::Responder);
    link.peer.send_ulpdus(&[send(1, b"hello")]);
    assert_eq!(scene.target.received(link.qp), (0, 5));
    scene.ends();
}

#[test]
fn mpa_s_04_a_wrong_key_is_closed_without_a_reply() {
    closed_without_a_reply(&[
        // Vector MPA-REP-R1: two responders. The 2007 proposal's frame. A key with one wrong byte.
        hex(&format!("{REPLY_KEY} 40010000")),
        hex("4d504120 49442052 74522046 72616d65 00010000"),
        hex("4d504120 49442052 65712046 72616d64 40010000"),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n".to_vec(),
        hex("16030100 f5010000 f10303aa aaaaaaaa aaaaaaaa aaaaaaaa"),
        vec![0; 64],
        vec![0xff; 4096],
    ]);
}

#[test]
fn mpa_s_09_an_unknown_revision_is_closed() {
    closed_without_a_reply(
        &["03", "81", "ff"].map(|revision| hex(&format!("{REQUEST_KEY} 40 {revision} 0000"))),
    );
}

#[test]
fn mpa_s_10_private_data_beyond_the_limit_is_closed() {
    let frame = |len: u16| {
        let mut frame = hex(&format!("{REQUEST_KEY} 4001"));
        frame.extend(len.to_be_bytes());
        frame.resize(20 + usize::from(len), 0);
        frame
    };
    closed_without_a_reply(&[frame(513), frame(65535)]);
}

#[test]
fn empa_08_an_enhanced_frame_without_the_word_is_closed() {
    closed_without_a_reply(
        &["0000", "0001 aa", "0003 aaaaaa"].map(|rest| hex(&format!("{REQUEST_KEY} 5002 {rest}"))),
    );
}

#[test]
fn mpa_s_10_private_data_up_to_the_limit_is_taken() {
    // An unknown peer is rejected, with a correct Reply and at once.
    let scene = or_skip!(Scene::start(&[]));
    let mut frame = hex(&format!("{REQUEST_KEY} 4001 0200"));
    frame.resize(20 + 512, 0x5a);
    let mut peer = connect(&scene.target, &scene.bystander, &frame);
    assert_eq!(Frame::read(&mut peer), rejection(1, None, FOREIGN));
    assert_eq!(peer.end(), End::Closed);
    scene.ends();
}

#[test]
fn mpa_s_06_silence_and_half_frames_are_closed_in_time() {
    let mut scene = or_skip!(Scene::start(&[("URNIC_MPA_STARTUP_TIMEOUT_RESPONDER_S", "1")]));
    let (qp, request) = scene.target.awaits_request(&QpParams::default());
    let bytes = request.to_bytes();
    let foreign_peers = [0, 1, 19, 20, 23, bytes.len() - 1].map(|len| {
        let mut foreign_peer = Peer::connect(scene.target.listener(qp));
        foreign_peer.send(&bytes[..len]);
        foreign_peer
    });
    for mut foreign_peer in foreign_peers {
        foreign_peer.end();
    }
    let mut peer = Peer::connect(scene.target.listener(qp));
    peer.send(&bytes);
    assert_eq!(Frame::read(&mut peer).flags & REJECT, 0);
    scene.ends();
}

#[test]
fn mpa_s_13_a_responder_sends_nothing_before_the_first_fpdu() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (qp, request) = target.awaits_request(&QpParams::default());
    let mut peer = Peer::connect(target.listener(qp));
    peer.send(&request.to_bytes());
    assert_eq!(Frame::read(&mut peer).flags & REJECT, 0);
    target.sends(qp, 100, 5);
    target.sends(qp, 101, 0);
    peer.stays_silent(Duration::from_millis(300));
    assert!(target.has_no_completion(qp));
    peer.send_ulpdus(&[write(1, 0, b"")]);
    assert_eq!(peer.ulpdu()[10..14], [0, 0, 0, 1]);
    assert_eq!(peer.ulpdu(), send(2, b""));
    target.completes(qp, &[(100, status::SUCCESS), (101, status::SUCCESS)]);
    target.quits();
}

#[test]
fn mpa_s_13_half_an_fpdu_does_not_open_the_fence() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (qp, request) = target.awaits_request(&QpParams::default());
    let mut peer = Peer::connect(target.listener(qp));
    peer.send(&request.to_bytes());
    Frame::read(&mut peer);
    target.sends(qp, 100, 0);
    let rtr = peer.framed(&[write(1, 0, b"")]);
    peer.send(&rtr[..rtr.len() - 1]);
    peer.stays_silent(Duration::from_millis(100));
    peer.send(&rtr[rtr.len() - 1..]);
    assert_eq!(peer.ulpdu(), send(1, b""));
    target.quits();
}

#[test]
fn mpa_s_14_fpdus_right_after_the_reply_are_taken() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (qp, request) = target.awaits_request(&QpParams::default());
    let mut peer = Peer::connect(target.listener(qp));
    peer.send(&request.to_bytes());
    Frame::read(&mut peer);
    peer.send_ulpdus(&[write(1, 0, b""), send(1, b"hello"), send(2, b"again!")]);
    assert_eq!(target.received(qp), (0, 5));
    assert_eq!(target.received(qp), (1, 6));
    target.quits();
}

#[test]
fn mpa_s_16_fpdus_in_one_piece_with_the_reply_are_taken() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (Link { qp, mut peer }, reply) = target.sends_request(&QpParams::default(), CRC);
    let fpdus = peer.framed(&[send(1, b"hello"), send(2, b"again!")]);
    peer.send(&[reply.to_bytes(), fpdus].concat());
    assert_eq!(peer.ulpdu(), write(1, 0, b""));
    assert_eq!(target.received(qp), (0, 5));
    assert_eq!(target.received(qp), (1, 6));
    target.quits();
}

#[test]
fn mpa_s_15_bytes_after_the_request_end_the_stream() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (qp, request) = scene.target.awaits_request(&QpParams::default());
    for excess in [4, 3000] {
        let mut peer = Peer::connect(scene.target.listener(qp));
        // In one segment, so that the Reply cannot come between.
        peer.send(&[request.to_bytes(), vec![0xff; excess]].concat());
        assert_eq!(peer.read_to_end(), (Vec::new(), End::Reset));
    }
    // The queue pair still waits for an initiator that does not send too early.
    let mut peer = Peer::connect(scene.target.listener(qp));
    peer.send(&request.to_bytes());
    assert_eq!(Frame::read(&mut peer).flags & REJECT, 0);
    scene.continues();
    scene.target.quits();
}

/// Connects and reads the Reply.
#[track_caller]
fn accepted_link(scene: &mut Scene) -> Link {
    let (qp, request) = scene.target.awaits_request(&QpParams::default());
    let mut peer = Peer::connect(scene.target.listener(qp));
    peer.send(&request.to_bytes());
    assert_eq!(Frame::read(&mut peer).flags & REJECT, 0);
    Link { qp, peer }
}

#[test]
fn empa_23_an_error_before_the_fence_opens_makes_no_terminate() {
    let mut scene = or_skip!(Scene::start(&[]));
    // A bad CRC: nothing valid has come.
    let mut link = accepted_link(&mut scene);
    link.peer
        .send(&hex("000ec140 00000001 00000000 00000000 00000000"));
    scene.is_over(&mut link, End::Reset, &ALL_FLUSHED);
    assert_eq!(scene.target.event().1, link.qp.index);
    scene.ends();
}

#[test]
fn empa_23_an_error_in_the_first_valid_fpdu_makes_one() {
    let mut scene = or_skip!(Scene::start(&[]));
    let link = accepted_link(&mut scene);
    scene.breaks(link, 0x1203, &[send(7, b"hello")], &ALL_FLUSHED);
    scene.ends();
}

#[test]
fn mpa_s_21_a_missing_first_fpdu_times_out() {
    let mut scene = or_skip!(Scene::start(&[("URNIC_MPA_RTR_TIMEOUT_S", "1")]));
    let (qp, request) = scene.target.awaits_request(&QpParams::default());
    let mut peer = Peer::connect(scene.target.listener(qp));
    peer.send(&request.to_bytes());
    Frame::read(&mut peer);
    scene.target.sends(qp, 100, 5);
    // EMPA-23: no Terminate.
    peer.end();
    let first = scene.target.completion(qp);
    assert_eq!((first.id, first.status), (100, status::RETRY_EXC_ERR));
    scene.target.completes(qp, &ALL_FLUSHED);
    scene.ends();
}

#[test]
fn empa_18_the_rtr_takes_no_receive_and_makes_no_completion() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in urnic_tests::target_process::ROLES {
        let mut link = target.link(role);
        target.is_healthy();
        assert!(target.has_no_completion(link.qp));
        link.peer.send_ulpdus(&[send(1, b"hello")]);
        assert_eq!(target.received(link.qp), (0, 5));
    }
    target.quits();
}

// Answers of a native queue pair to Requests in all forms.

/// Sends the usual Request with this change, and then a message in full operation with `rtr` first;
/// returns the Reply.
#[track_caller]
fn taken(target: &mut TargetProcess, rtr: &[Vec<u8>], change: impl FnOnce(&mut Frame)) -> (Frame, Link) {
    let (qp, mut request) = target.awaits_request(&QpParams::default());
    change(&mut request);
    let mut peer = Peer::connect(target.listener(qp));
    peer.send(&request.to_bytes());
    let reply = Frame::read(&mut peer);
    assert_eq!(reply.flags & REJECT, 0, "{reply:x?}");
    peer.outbound = Framing::new(true, reply.flags & MARKERS != 0);
    peer.inbound = Framing::new(true, request.flags & MARKERS != 0);
    peer.send_ulpdus(rtr);
    let sends = rtr.iter().filter(|ulpdu| ulpdu[1] == 0x43).count() as u32;
    for id in 0..sends {
        assert_eq!(target.received(qp), (u64::from(id), 0));
    }
    peer.send_ulpdus(&[send(sends + 1, b"hello")]);
    assert_eq!(target.received(qp), (u64::from(sends), 5));
    target.sends(qp, 100, 0);
    let mut link = Link { qp, peer };
    if rtr.iter().any(|ulpdu| ulpdu[1] == 0x41) {
        assert_eq!(link.peer.ulpdu()[..2], [0xc1, 0x42]);
    }
    assert_eq!(link.peer.ulpdu(), send(1, b""));
    (reply, link)
}

/// The zero-length Write.
fn rtr() -> Vec<Vec<u8>> {
    vec![write(1, 0, b"")]
}

fn set_word(request: &mut Frame, word: u32) {
    request.private_data[..4].copy_from_slice(&word.to_be_bytes());
}

#[test]
fn empa_02_a_request_of_revision_1_gets_a_reply_of_revision_1() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    // EMPA-09: S is a reserved bit there.
    for flags in [CRC, CRC | ENHANCED] {
        let (reply, _) = taken(&mut target, &rtr(), |request| {
            request.flags = flags;
            request.revision = 1;
            request.private_data.drain(..4);
        });
        assert_eq!((reply.flags, reply.revision), (CRC, 1));
        assert_eq!(reply.private_data.len(), 32);
    }
    target.quits();
}

#[test]
fn empa_05_a_request_without_a_word_gets_a_reply_without() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (reply, _) = taken(&mut target, &rtr(), |request| {
        request.flags = CRC;
        request.private_data.drain(..4);
    });
    assert_eq!((reply.flags, reply.revision), (CRC, 2));
    assert_eq!(reply.private_data.len(), 32);
    target.quits();
}

#[test]
fn mpa_s_05_reserved_flags_and_reject_are_ignored() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for flags in [0x0f, REJECT, REJECT | 0x0f] {
        let (reply, _) = taken(&mut target, &rtr(), |request| request.flags |= flags);
        assert_eq!(reply.flags, CRC | ENHANCED);
    }
    target.quits();
}

#[test]
fn empa_11_client_server_is_mirrored_without_rtr_bits() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    // A=0: with B, C, D set, and without.
    for word in [0x7fff_ffff, 0x3fff_3fff] {
        let (reply, _) = taken(&mut target, &rtr(), |request| set_word(request, word));
        assert_eq!(reply.word(), Some(0x3fff_3fff));
    }
    target.quits();
}

#[test]
fn empa_14_exactly_one_rtr_is_chosen() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    // A with all three, with C alone, with B alone, with none: the answer is a zero-length Write,
    // the supported type.
    for word in [0xffff_ffff, WORD, 0xffff_3fff, 0xbfff_3fff] {
        let (reply, _) = taken(&mut target, &rtr(), |request| set_word(request, word));
        assert_eq!(reply.word(), Some(WORD), "to {word:08x}");
    }
    target.quits();
}

#[test]
fn empa_21_another_first_message_than_agreed_is_taken() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    // A Send of no bytes was not agreed on as RTR, and so is a message for the program; the same is
    // true of a Read of no bytes.
    taken(&mut target, &[send(1, b"")], |_| {});
    taken(&mut target, &[read_request(1, 1, 0, 0)], |_| {});
    taken(&mut target, &[], |_| {});
    target.quits();
}

#[test]
fn empa_37_0x3fff_leaves_read_depths_unnegotiated() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    // Each direction separately: 0x3FFF is answered by 0x3FFF; a number by at most that number.
    for (ird, ord) in [(0x3fff, 0x3fff), (16, 0x3fff), (0x3fff, 8), (16, 8), (0, 0)] {
        let word = 0x8000_8000 | ird << 16 | ord;
        let (reply, _) = taken(&mut target, &rtr(), |request| set_word(request, word));
        let answer = reply.word().expect("a word");
        assert_eq!(answer & 0xc000_c000, 0x8000_8000);
        let (their_ird, their_ord) = (answer >> 16 & 0x3fff, answer & 0x3fff);
        match ord {
            0x3fff => assert_eq!(their_ird, 0x3fff),
            // EMPA-30: our ORD is at most their IRD.
            ord => assert!(their_ird <= 0x3fff && their_ird >= ord.min(8)),
        }
        match ird {
            0x3fff => assert_eq!(their_ord, 0x3fff),
            // EMPA-31.
            ird => assert!(their_ord <= ird, "{answer:08x}"),
        }
    }
    target.quits();
}

#[test]
fn empa_31_our_reads_keep_to_the_initiator_s_ird() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (reply, mut link) = taken(&mut target, &rtr(), |request| set_word(request, 0x8001_bfff));
    assert_eq!(reply.word().map(|word| word & 0x3fff), Some(1));
    let (stag, at) = (target.stag("in"), target.address("inbox"));
    for id in [200, 201] {
        target.posts(link.qp, 4, id, "in", at, 8, (0x1000, 0x2000));
    }
    target.completes(link.qp, &[(100, status::SUCCESS)]);
    assert_eq!(link.peer.ulpdu()[..2], [0x41, 0x41]);
    link.peer.stays_silent(Duration::from_millis(100));
    link.peer.send_ulpdus(&[read_response(stag, at, &[1; 8])]);
    assert_eq!(link.peer.ulpdu()[..2], [0x41, 0x41]);
    link.peer.send_ulpdus(&[read_response(stag, at, &[2; 8])]);
    target.completes(link.qp, &[(200, status::SUCCESS), (201, status::SUCCESS)]);
    target.quits();
}

#[test]
fn empa_06_a_revision_1_device_resets_on_an_enhanced_request() {
    let mut scene = match TargetProcess::start(&[("URNIC_MPA_REVISION", "1")]) {
        Ok(target) => target,
        Err(reason) => return urnic_tests::skip::report(&reason),
    };
    let (qp, mut request) = scene.awaits_request(&QpParams::default());
    let mut peer = Peer::connect(scene.listener(qp));
    peer.send(&request.to_bytes());
    assert_eq!(peer.end(), End::Reset);
    // The target falls back on the second attempt.
    request.flags = CRC;
    request.revision = 1;
    request.private_data.drain(..4);
    let mut peer = Peer::connect(scene.listener(qp));
    peer.send(&request.to_bytes());
    let reply = Frame::read(&mut peer);
    assert_eq!((reply.flags, reply.revision), (CRC, 1));
    scene.quits();
}

#[test]
fn foreign_mpa_requests_get_a_rejecting_reply() {
    // The vectors of conformance §13.3, none of which is a native connect.
    let scene = or_skip!(Scene::start(&[]));
    for (request, revision, word) in [
        ("40010000", 1, None),
        ("c0010000", 1, None),
        ("00010000", 1, None),
        // S in revision 1: the 2007 proposal, which is off.
        ("50010000", 1, None),
        ("40020000", 2, None),
        ("50020004 8010c008", 2, Some(())),
        ("50020004 00100008", 2, Some(())),
        ("50020004 c001c001", 2, Some(())),
        ("50020004 3fff3fff", 2, Some(())),
        ("50020008 8010c008 554c5021", 2, Some(())),
        ("5002000c 80104001 f6ab0e18 01010303", 2, Some(())),
    ] {
        let bytes = hex(&format!("{REQUEST_KEY} {request}"));
        let mut peer = connect(&scene.target, &scene.bystander, &bytes);
        let reply = Frame::read(&mut peer);
        let word = word.and(reply.word());
        assert_eq!(reply, rejection(revision, word, FOREIGN), "to {request}");
        if word.is_some() {
            // A is mirrored.
            assert_eq!(reply.private_data[0] & 0x80, bytes[20] & 0x80);
        }
        assert_eq!(peer.end(), End::Closed);
    }
    scene.ends();
}

#[test]
fn mpa_s_20_a_revision_0_peer_gets_revision_1_and_is_closed() {
    // Vector MPA-REQ-R0-RDMAC.
    let scene = or_skip!(Scene::start(&[]));
    let bytes = hex(&format!("{REQUEST_KEY} c0000000"));
    let mut peer = connect(&scene.target, &scene.bystander, &bytes);
    assert_eq!(peer.read_bytes(20), hex(&format!("{REPLY_KEY} 60010000")));
    assert_eq!(peer.end(), End::Closed);
    scene.ends();
}

#[test]
fn requests_to_no_queue_pair_or_wrong_numbers_are_rejected() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (qp, good) = scene.target.awaits_request(&QpParams::default());
    let answer = |target: &TargetProcess, change: &dyn Fn(&mut Vec<u8>)| {
        let mut request = good.clone();
        change(&mut request.private_data);
        let mut peer = Peer::connect(target.listener(qp));
        peer.send(&request.to_bytes());
        let reply = Frame::read(&mut peer);
        if reply.flags & REJECT != 0 {
            assert_eq!(peer.end(), End::Closed);
        }
        (reply, peer)
    };
    // After word, magic, version and the like: from, to, sq_psn, rq_psn.
    for (field, reason) in [(0, ELSEWHERE), (1, UNKNOWN), (2, ELSEWHERE), (3, ELSEWHERE)] {
        let at = 12 + 4 * field + 3;
        let (reply, _) = answer(&scene.target, &|data| data[at] ^= 0xff);
        assert_eq!(reply, rejection(2, reply.word(), reason), "field {field}");
    }
    // Another magic, another version, another kind of connect, too short.
    for at in [4, 8, 9] {
        let (reply, _) = answer(&scene.target, &|data| data[at] ^= 0x40);
        assert_eq!(reply, rejection(2, reply.word(), FOREIGN));
    }
    let (reply, _) = answer(&scene.target, &|data| data.truncate(35));
    assert_eq!(reply, rejection(2, reply.word(), FOREIGN));
    // None of these affected the queue pair.
    let (reply, mut peer) = answer(&scene.target, &|_| {});
    assert_eq!(reply.flags & REJECT, 0);
    peer.send_ulpdus(&[write(1, 0, b""), send(1, b"hello")]);
    assert_eq!(scene.target.received(qp), (0, 5));
    // A second connect to a connected queue pair, and one to a failed queue pair.
    let (reply, _) = answer(&scene.target, &|_| {});
    assert_eq!(reply, rejection(2, reply.word(), CONNECTED));
    peer.send_ulpdus(&[send(9, b"")]);
    peer.ulpdu();
    scene.target.completes(qp, &ALL_FLUSHED[1..]);
    scene.target.event();
    let (reply, _) = answer(&scene.target, &|_| {});
    assert_eq!(reply, rejection(2, reply.word(), GONE));
    scene.ends();
}

#[test]
fn a_request_for_an_unready_queue_pair_is_parked() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let params = QpParams::default();
    let qp = target.qp(&params);
    let ours = 0x0000_01f0;
    let request = Frame {
        request: true,
        flags: CRC | ENHANCED,
        revision: 2,
        private_data: target.introduction(qp, ours, &params).with_word(WORD),
    };
    let mut peer = Peer::connect(target.listener(qp));
    peer.send(&request.to_bytes());
    peer.stays_silent(Duration::from_millis(100));
    target.connects(qp, ours, &params);
    assert_eq!(Frame::read(&mut peer).flags & REJECT, 0);
    peer.send_ulpdus(&[write(1, 0, b""), send(1, b"hello")]);
    assert_eq!(target.received(qp), (0, 5));
    target.quits();
}

// Reactions of a native queue pair to Replies in all forms.

/// A connect of the target with this change in the Reply. The caller checks the result.
#[track_caller]
fn answered(target: &mut TargetProcess, change: impl FnOnce(&mut Frame)) -> Link {
    let (mut link, mut reply) = target.sends_request(&QpParams::default(), CRC);
    change(&mut reply);
    link.peer.send(&reply.to_bytes());
    link
}

#[test]
fn empa_15_the_rtr_of_the_reply_is_sent() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    // C alone, C among others: a zero-length Write, since the target offered that.
    for word in [WORD, 0xffff_ffff, 0xbfff_ffff] {
        let mut link = answered(&mut target, |reply| set_word(reply, word));
        assert_eq!(
            link.peer.read_bytes(20),
            hex("000ec140 00000001 00000000 00000000 ebd34c5f")
        );
        target.sends(link.qp, 100, 0);
        assert_eq!(link.peer.ulpdu(), send(1, b""));
    }
    target.quits();
}

#[test]
fn empa_16_no_rtr_in_common_terminates() {
    // Vector F-TERM-207. A with B alone, D alone, none; and A=0 where we requested peer-to-peer.
    let mut scene = or_skip!(Scene::start(&[]));
    for word in [0xffff_3fff, 0xbfff_7fff, 0xbfff_3fff, 0x3fff_3fff] {
        let mut link = answered(&mut scene.target, |reply| set_word(reply, word));
        assert_eq!(
            link.peer.read_bytes(28),
            hex("00164147 00000000 00000002 00000001 00000000 20070000 1bd2babe"),
            "{word:08x}"
        );
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
        assert_eq!(scene.target.event().1, link.qp.index);
    }
    scene.ends();
}

#[test]
fn empa_17_no_message_precedes_the_rtr() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (Link { qp, mut peer }, reply) = target.sends_request(&QpParams::default(), CRC);
    target.sends(qp, 100, 5);
    peer.stays_silent(Duration::from_millis(100));
    peer.send(&reply.to_bytes());
    assert_eq!(peer.ulpdu(), write(1, 0, b""));
    assert_eq!(peer.ulpdu()[..2], [0x41, 0x43]);
    target.quits();
}

#[test]
fn mpa_e_03_a_bad_reply_is_closed_at_once() {
    // MPA error 4: no FPDU, and so no Terminate. Native connections connect again, as long as their
    // retry budget lasts.
    let mut scene = or_skip!(Scene::start(&[]));
    let (link, good) = scene.target.sends_request(&QpParams::default(), CRC);
    drop(link);
    let bytes = good.to_bytes();
    let changed = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        bytes
    };
    for bad in [
        // The key of a Request, revisions 0, 1 and 3, S missing, too much private data, no private
        // data for S.
        changed(9, b'q'),
        changed(17, 0),
        changed(17, 1),
        changed(17, 3),
        changed(16, CRC),
        changed(18, 0xff),
        [&bytes[..18], &[0, 2, 1, 1]].concat(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        vec![0; 100],
    ] {
        let (mut link, _) = scene.target.sends_request(&QpParams::default(), CRC);
        link.peer.send(&bad);
        let (answer, _) = link.peer.read_to_end();
        assert!(answer.is_empty(), "{answer:02x?} to {bad:02x?}");
        assert_eq!(scene.target.state(link.qp), state::RTS);
    }
    scene.ends();
}

#[test]
fn a_reply_with_foreign_numbers_is_not_accepted() {
    let mut scene = or_skip!(Scene::start(&[]));
    // from, to, sq_psn, rq_psn; magic; version.
    for at in [15, 19, 23, 27, 4, 8] {
        let mut link = answered(&mut scene.target, |reply| reply.private_data[at] ^= 0x55);
        let (answer, _) = link.peer.read_to_end();
        assert!(answer.is_empty(), "{answer:02x?}");
        // The target has no peer to retry with: sends fail.
        scene.target.sends(link.qp, 100, 5);
        scene.target.completes(link.qp, &[(100, status::RETRY_EXC_ERR)]);
    }
    scene.ends();
}

#[test]
fn a_rejecting_reply_ends_the_attempt() {
    let mut scene = or_skip!(Scene::start(&[]));
    for reason in [UNKNOWN, ELSEWHERE, GONE, FOREIGN] {
        let mut link = answered(&mut scene.target, |reply| {
            *reply = Frame {
                request: false,
                ..rejection(2, Some(WORD), reason)
            };
        });
        assert_eq!(link.peer.end(), End::Closed, "reason {reason}");
        scene.target.sends(link.qp, 100, 5);
        scene.target.completes(link.qp, &[(100, status::RETRY_EXC_ERR)]);
    }
    scene.ends();
}

#[test]
fn mpa_m_01_and_c_05_flags_of_a_reply_count_as_well() {
    // The flags of the Reply bind the initiator: markers towards the peer, CRCs both ways.
    let mut target = or_skip!(TargetProcess::start(&variables(0)));
    let params = QpParams {
        flags: CRC | MARKERS,
        ..QpParams::default()
    };
    let mut link = target.link_as(Role::Initiator, &params, 0);
    target.sends(link.qp, 100, 2000);
    assert_eq!(link.peer.ulpdu().len(), 2018);
    let mut bad = link.peer.framed(&[send(1, b"hello")]);
    bad[20] ^= 1;
    link.peer.send(&bad);
    assert_eq!(link.peer.ulpdu(), complaint(0x2002, &[]));
    target.quits();
}
