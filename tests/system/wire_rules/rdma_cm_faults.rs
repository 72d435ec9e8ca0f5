//! Faults around rdma_cm connections: peers that stop, close or send invalid data in each phase,
//! and programs that abandon a connection. The program gets one event within the configured time,
//! and its listeners serve others.

use std::time::Duration;

use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer, hex};
use urnic_tests::startup::Frame;
use urnic_tests::target_process::cm::{CmTargetProcess, cm_event};
use urnic_tests::target_process::status;
use urnic_tests::ulpdu::send;
use urnic_tests::wait::{TIME_LIMIT, until};

use super::rdma_cm::{
    ALL_FLUSHED, DEPTHS, ECONNRESET, ETIMEDOUT, REPLY_KEY, REQUEST_KEY, Scene, rtr_read, rtr_write,
};

const QUICK: [(&str, &str); 3] = [
    ("URNIC_MPA_STARTUP_TIMEOUT_INITIATOR_S", "1"),
    ("URNIC_MPA_STARTUP_TIMEOUT_RESPONDER_S", "1"),
    ("URNIC_MPA_RTR_TIMEOUT_S", "1"),
];

fn request() -> Vec<u8> {
    hex(&format!("{REQUEST_KEY} 50020004 8010c008"))
}

/// Resumes the stopped target. Its accepts of abandoned Requests fail with ECONNRESET, the
/// connection of this connect is established, and the listener serves others.
#[track_caller]
fn recover(scene: &mut Scene, initiator: &mut CmTargetProcess) {
    scene.target.process().resume();
    let connect = initiator.connects(scene.at, DEPTHS, b"again");
    loop {
        let request = scene.request_event();
        let outcome = scene.target.accepts(request.about, DEPTHS, b"");
        if request.private_data == b"again" {
            assert_eq!(outcome, 0);
            initiator.expects_event(connect, cm_event::ESTABLISHED, 0);
            scene
                .target
                .expects_event(request.about, cm_event::ESTABLISHED, 0);
            break;
        }
        assert_eq!(outcome, ECONNRESET as u64);
        scene.target.destroys(request.about);
    }
    scene.continues();
}

#[test]
fn vrb_c_13_sends_fail_whose_peer_is_lost_before_it_confirms() {
    let roce = [("URNIC_IDENTITY", "roce"), ("URNIC_CM_PORTS", "tcp")];
    for variables in [&roce[..], &[("URNIC_COMPLETION", "delivered")]] {
        let mut scene = or_skip!(Scene::start(variables));
        for reset in [true, false] {
            let (event, mut peer, _) = scene.accepted(&request(), DEPTHS, &[]);
            let id = event.about;
            peer.send_ulpdus(&[rtr_read()]);
            scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
            peer.ulpdu();
            scene.target.sends(id, 100, 5);
            scene.target.sends(id, 101, 0);
            assert_eq!(peer.ulpdu()[1], 0x43);
            match reset {
                true => peer.reset(),
                false => peer.finish(),
            }
            let lost = [(100, status::RETRY_EXC_ERR), (101, status::FLUSHED)];
            scene.target.completes(id, &[&lost[..], &ALL_FLUSHED].concat());
            scene.target.expects_event(id, cm_event::DISCONNECTED, 0);
            assert!(scene.target.has_no_completion(id));
            scene.target.destroys(id);
        }
        scene.target.quits();
    }
}

#[test]
fn a_stopped_listener_is_unreachable_until_it_resumes() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut initiator = or_skip!(CmTargetProcess::start(&QUICK));
    scene.target.process().stop();
    // The target's host still accepts the TCP connection.
    for _ in 0..2 {
        let id = initiator.connects(scene.at, DEPTHS, b"first");
        initiator.expects_event(id, cm_event::UNREACHABLE, -ETIMEDOUT);
        initiator.destroys(id);
    }
    recover(&mut scene, &mut initiator);
    initiator.quits();
    scene.target.quits();
}

#[test]
fn a_request_not_answered_in_time_cannot_be_accepted() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut initiator = or_skip!(CmTargetProcess::start(&QUICK));
    let id = initiator.connects(scene.at, DEPTHS, b"first");
    let request = scene.request_event();
    scene.target.process().stop();
    initiator.expects_event(id, cm_event::UNREACHABLE, -ETIMEDOUT);
    scene.target.process().resume();
    assert_eq!(
        scene.target.accepts(request.about, DEPTHS, b""),
        ECONNRESET as u64
    );
    scene.target.destroys(request.about);
    recover(&mut scene, &mut initiator);
    initiator.quits();
    scene.target.quits();
}

#[test]
fn an_initiator_stopped_before_its_first_fpdu_is_unreachable() {
    let mut scene = or_skip!(Scene::start(&QUICK));
    let mut initiator = or_skip!(CmTargetProcess::start(&[]));
    let id = initiator.connects(scene.at, DEPTHS, b"");
    let request = scene.request_event();
    initiator.process().stop();
    assert_eq!(scene.target.accepts(request.about, DEPTHS, b""), 0);
    scene
        .target
        .expects_event(request.about, cm_event::UNREACHABLE, -ETIMEDOUT);
    scene.target.completes(request.about, &ALL_FLUSHED);
    scene.target.destroys(request.about);
    scene.continues();
    // The target finds a Reply and a reset: whichever it reads first, the connect is over, and the
    // program gets one event.
    initiator.process().resume();
    let mut event = initiator.event();
    if event.kind == cm_event::ESTABLISHED {
        event = initiator.event();
        assert_eq!(event.kind, cm_event::DISCONNECTED);
    } else {
        assert_eq!(event.kind_and_status(), (cm_event::REJECTED, -ECONNRESET));
    }
    initiator.destroys(id);
    assert!(initiator.is_quiet());
    initiator.quits();
    scene.ends();
}

#[test]
fn a_connection_to_a_stopped_peer_can_be_ended() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut initiator = or_skip!(CmTargetProcess::start(&[]));
    let id = initiator.connects(scene.at, DEPTHS, b"");
    let request = scene.request_event();
    assert_eq!(scene.target.accepts(request.about, DEPTHS, b""), 0);
    scene
        .target
        .expects_event(request.about, cm_event::ESTABLISHED, 0);
    initiator.expects_event(id, cm_event::ESTABLISHED, 0);
    initiator.process().stop();
    scene.target.sends(request.about, 100, 5);
    assert_eq!(scene.target.disconnects(request.about), 0);
    // Neither this connect nor the end of the process blocks.
    scene.target.destroys(request.about);
    scene.continues();
    scene.target.quits();
    initiator.process().resume();
    initiator.expects_event(id, cm_event::DISCONNECTED, 0);
    initiator.quits();
}

#[test]
fn an_initiator_that_closes_in_any_phase_harms_no_other() {
    let mut scene = or_skip!(Scene::start(&[]));
    let bytes = request();
    for reset in [true, false] {
        let hang_up = |mut peer: Peer| match reset {
            true => peer.reset(),
            false => peer.finish(),
        };
        // Before and in the Request.
        for len in [0, 1, 20, 23] {
            hang_up(scene.connect(&bytes[..len]));
        }
        // After the Request: the program gets the error when it accepts or rejects.
        for accept in [true, false] {
            let peer = scene.connect(&bytes);
            let id = scene.request_event().about;
            hang_up(peer);
            if accept {
                // The event may take a moment to arrive.
                match scene.target.accepts(id, DEPTHS, b"") {
                    0 => drop(
                        scene
                            .target
                            .expects_event(id, cm_event::CONNECT_ERROR, -ECONNRESET),
                    ),
                    errno => assert_eq!(errno, ECONNRESET as u64),
                }
            } else {
                assert_eq!(scene.target.rejects(id, b"no"), 0);
            }
            scene.target.destroys(id);
        }
        // After the Reply.
        let (event, peer, _) = scene.accepted(&bytes, DEPTHS, &[]);
        hang_up(peer);
        let id = event.about;
        scene
            .target
            .expects_event(id, cm_event::CONNECT_ERROR, -ECONNRESET);
        scene.target.destroys(id);
        // After the RTR, and after a message.
        for message in [None, Some(send(1, b"hello"))] {
            let (event, mut peer, _) = scene.accepted(&bytes, DEPTHS, &[]);
            let id = event.about;
            peer.send_ulpdus(&[rtr_write()]);
            scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
            if let Some(message) = message {
                peer.send_ulpdus(&[message]);
                scene.target.completes(id, &[(0, status::SUCCESS)]);
            }
            hang_up(peer);
            scene.target.expects_event(id, cm_event::DISCONNECTED, 0);
            scene.target.destroys(id);
        }
    }
    scene.ends();
}

#[test]
fn the_end_of_a_connection_is_reported_once() {
    let mut scene = or_skip!(Scene::start(&[]));
    for peer_first in [true, false] {
        let (event, mut peer, _) = scene.accepted(&request(), DEPTHS, &[]);
        let id = event.about;
        peer.send_ulpdus(&[rtr_read()]);
        peer.ulpdu();
        scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
        if peer_first {
            peer.finish();
        } else {
            // A disconnection flushes requests that are not completed yet.
            scene.target.sends(id, 100, 0);
            scene.target.completes(id, &[(100, status::SUCCESS)]);
            assert_eq!(scene.target.disconnects(id), 0);
            assert_eq!(peer.ulpdu(), send(1, b""));
        }
        assert_eq!(peer.end(), End::Closed);
        peer.finish();
        scene.target.expects_event(id, cm_event::DISCONNECTED, 0);
        assert_eq!(scene.target.disconnects(id), 0);
        // An RNIC has no TIMEWAIT_EXIT.
        assert!(scene.target.is_quiet());
        scene.target.destroys(id);
    }
    scene.ends();
}

#[test]
fn garbage_at_each_step_harms_no_other_connection() {
    let mut scene = or_skip!(Scene::start(&[]));
    let noise: Vec<u8> = (0..3000_u32)
        .map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8)
        .collect();
    let bytes = request();
    // For the Request, in it, after it.
    for len in [0, 7, 19] {
        scene.connect(&[&bytes[..len], &noise].concat()).end();
    }
    let mut peer = scene.connect(&[&bytes[..], &noise].concat());
    let id = scene.request_event().about;
    assert_eq!(scene.target.accepts(id, DEPTHS, b""), ECONNRESET as u64);
    peer.end();
    scene.target.destroys(id);
    // Noise in place of the RTR, and noise after the RTR. After the RTR the target has a peer to
    // answer.
    for rtr in [None, Some(rtr_write())] {
        let (event, mut peer, _) = scene.accepted(&bytes, DEPTHS, &[]);
        let id = event.about;
        let opens = rtr.is_some();
        if let Some(rtr) = rtr {
            peer.send_ulpdus(&[rtr]);
            scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
        }
        peer.send(&noise);
        peer.finish();
        let received = peer.read_to_end().0;
        assert_eq!(received.is_empty(), !opens, "{received:02x?}");
        let end = scene.target.event();
        let expected = if opens {
            cm_event::DISCONNECTED
        } else {
            cm_event::CONNECT_ERROR
        };
        assert_eq!((end.id, end.kind), (id, expected), "{end:?}");
        scene.target.completes(id, &ALL_FLUSHED);
        scene.target.destroys(id);
    }
    scene.ends();
}

#[test]
fn many_silent_connections_do_not_keep_others_out() {
    let mut scene = or_skip!(Scene::start(&[]));
    let silent: Vec<Peer> = (0..300).map(|_| scene.connect(b"MPA ID")).collect();
    scene.continues();
    drop(silent);
    scene.ends();
}

#[test]
fn requests_beyond_the_backlog_are_rejected() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let (listener, at) = target.listens(1);
    let mut scene = Scene { target, listener, at };
    for _ in 0..3 {
        let mut first = scene.connect(&request());
        let pending = until(TIME_LIMIT, || (!scene.target.is_quiet()).then_some(()));
        assert!(pending.is_some(), "the program has a request");
        for _ in 0..5 {
            let mut beyond = scene.connect(&request());
            let (received, _) = beyond.read_to_end();
            assert_eq!(received, hex(&format!("{REPLY_KEY} 70020004 80014000")));
        }
        let event = scene.request_event();
        assert_eq!(scene.target.accepts(event.about, DEPTHS, b""), 0);
        assert_eq!(Frame::read(&mut first).word(), Some(0x8008_4010));
        scene.opens(event.about, &mut first, &rtr_read(), false);
    }
    scene.ends();
}

#[test]
fn a_destroyed_listener_ends_its_pending_connections() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let (listener, at) = target.listens(2);
    let scene = Scene { target, listener, at };
    let mut initiators: Vec<Peer> = (0..5).map(|_| scene.connect(&request())).collect();
    initiators.push(scene.connect(&request()[..10]));
    let Scene {
        mut target, listener, ..
    } = scene;
    // One Request is the program's, another waits for it, more wait after the backlog.
    let requests = target.expects_event(listener, cm_event::CONNECT_REQUEST, 0);
    target.destroys(listener);
    target.destroys(requests.about);
    for mut initiator in initiators {
        // For some a whole Request was read, and so there is a rejecting Reply.
        let (received, _) = initiator.read_to_end();
        let no = hex(&format!("{REPLY_KEY} 70020004 80014000"));
        assert!(received.is_empty() || received == no, "{received:02x?}");
    }
    assert!(target.is_quiet());
    // The port is free again.
    assert!(std::net::TcpStream::connect_timeout(&at, Duration::from_secs(5)).is_err());
    target.quits();
}
