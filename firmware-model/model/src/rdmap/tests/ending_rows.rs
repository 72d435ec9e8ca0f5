//! The end of a connection: requests that the peer has confirmed succeed, the others fail; and the
//! confirmations that an end sends before it ends.

use super::{Pair, Scripted};
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use crate::transport::RxOutcome;
use proptest::prelude::*;
use std::time::Duration;
use urnic_device::event::{EventKind, QpFault};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;
const LOST: WcStatus = WcStatus::RetryExcErr;
/// The time for which requests wait after the peer's FIN on a native connection.
const LOSS_GRACE: Duration = Duration::from_millis(500);

/// Requests complete when the peer has confirmed them.
fn delivered(attachment: Attachment) -> Attachment {
    Attachment {
        delivered: true,
        spare_read: true,
        ord: 1,
        ord_limit: 2,
        ird: 1,
        ..attachment
    }
}

/// An end of an rdma_cm connection.
fn scripted() -> Scripted {
    Scripted::with(&Shape::default(), delivered(agreed(true)))
}

/// Two ends of a native connection, with the responder's fence open.
fn pair() -> Pair {
    let with = |initiator| delivered(native(initiator));
    let mut pair = Pair::with(&Shape::default(), Conditions::default(), with(true), with(false));
    pair.run_now();
    pair
}

/// The answer to a Read of length zero.
fn answer() -> Vec<u8> {
    tagged(0xc1, 0x42, 1, 0, b"")
}

/// A Read that announces that the peer takes confirmations.
fn announcement() -> Vec<u8> {
    read_request(1, (1, 0), 0, (1, u64::from_be_bytes(*b"urnic\0\0\x02")))
}

/// A confirmation of all up to `position`.
fn confirmation(position: u64) -> Vec<u8> {
    tagged(0xc1, 0x40, 0xc5, position, b"")
}

/// Bytes on the wire of all that the peer got since the last call.
fn wire_len(peer: &mut Scripted) -> u64 {
    peer.output().len() as u64
}

/// Posts three Sends one by one, the second unsignalled, and has the peer confirm the first
/// `confirmed`, by the answer to a Read each.
fn send_three(peer: &mut Scripted, confirmed: usize) {
    for cookie in 1..=3 {
        let send = Work::send(cookie).inline(b"message");
        peer.node
            .post(&if cookie == 2 { send.unsignaled() } else { send });
        peer.run();
        if cookie as usize <= confirmed && cookie != 2 {
            peer.send_ulpdu(&answer());
        }
    }
    let succeeded: &[_] = [
        &[][..],
        &[(1, SUCCESS)],
        &[(1, SUCCESS)],
        &[(1, SUCCESS), (3, SUCCESS)],
    ][confirmed];
    assert_eq!(peer.node.sent(), succeeded);
}

/// How the end of a connection is brought about.
type End = fn(&mut Scripted);

fn peer_resets(peer: &mut Scripted) {
    peer.rst();
}

fn peer_finishes(peer: &mut Scripted) {
    peer.fin();
}

fn we_give_up(peer: &mut Scripted) {
    peer.node.set_state(QpState::Err);
}

/// The completions of the requests that are not confirmed: the oldest has the status `first`.
fn failed(confirmed: usize, first: WcStatus) -> Vec<(u64, WcStatus)> {
    (confirmed as u64 + 1..=3)
        .zip([first].into_iter().chain([FLUSHED; 2]))
        .collect()
}

#[test]
fn vrb_c_13_what_is_not_confirmed_fails_at_the_end() {
    let ends: [(&str, End, WcStatus); 3] = [
        ("reset", peer_resets, LOST),
        ("FIN", peer_finishes, LOST),
        ("our error state", we_give_up, FLUSHED),
    ];
    for (how, end, status) in ends {
        for confirmed in [0, 1, 3] {
            let mut peer = scripted();
            send_three(&mut peer, confirmed);
            peer.node.post_recv(9, &[]);
            end(&mut peer);
            peer.run();
            assert_eq!(
                peer.node.sent(),
                failed(confirmed, status),
                "{how}, {confirmed} confirmed"
            );
            assert_eq!(peer.node.received(), [(9, FLUSHED, 0)], "{how}");
            assert_eq!(peer.node.engine.state(), QpState::Err);
            let lost = status == LOST && (confirmed < 3 || how == "reset");
            let faults = peer.node.faults();
            assert_eq!(
                !faults.is_empty(),
                lost,
                "{how}, {confirmed} confirmed: {faults:?}"
            );
        }
    }
}

#[test]
fn vrb_c_13_taken_requests_succeed_where_that_is_what_was_promised() {
    for end in [peer_resets as End, peer_finishes, we_give_up] {
        let mut peer = Scripted::new();
        for cookie in 1..=2 {
            peer.node.post(&Work::send(cookie).inline(b"message"));
        }
        peer.run();
        end(&mut peer);
        assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    }
}

#[test]
fn vrb_c_18_what_the_peer_confirmed_before_its_end_succeeds() {
    for end in [Scripted::fin as End, Scripted::rst] {
        let mut peer = scripted();
        let wire = [1, 2, 3].map(|cookie| {
            peer.node.post(&Work::send(cookie).inline(b"message"));
            wire_len(&mut peer)
        });
        // The peer has processed the first two messages and the Read before the third. That Read
        // confirms no request any more.
        let position = wire[0] + wire[1];
        peer.send_unread(&fpdu_of(&confirmation(position)));
        end(&mut peer);
        assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS), (3, LOST)]);
    }
}

#[test]
fn vrb_c_18_an_error_of_sending_comes_after_what_has_arrived() {
    let mut peer = scripted();
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::send(1).inline(b"message"));
    peer.run();
    peer.node.post(&Work::read(2, 0x200, 0).sge(sink.sge(0, 8)));
    peer.run();
    // The answers and the reset arrive before the engine reads the stream: it sends next.
    let answers = [answer(), tagged(0xc1, 0x42, sink.stag, sink.base, &[7; 8])];
    peer.leave(&answers.map(|ulpdu| fpdu_of(&ulpdu)).concat());
    peer.node.post(&Work::send(3).inline(b"message"));
    peer.node.with(|engine, env, stream| engine.transmit(env, stream));
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS), (3, LOST)]);
    assert_eq!(sink.bytes(), [7; 8]);
}

#[test]
fn vrb_c_18_a_confirmation_is_believed_up_to_what_was_sent() {
    let mut peer = scripted();
    peer.node.post(&Work::send(1).inline(b"message"));
    peer.run();
    peer.send_ulpdu(&confirmation(u64::MAX));
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    peer.node.post(&Work::send(2).inline(b"message"));
    peer.run();
    peer.rst();
    assert_eq!(peer.node.engine.state(), QpState::Err);
    // An end that does not wait for confirmations ignores them.
    let mut peer = Scripted::new();
    peer.send_ulpdu(&confirmation(100));
    assert_eq!(peer.node.engine.state(), QpState::Rts);
}

#[test]
fn vrb_c_19_reads_never_succeed_without_their_data() {
    let ends = [
        (peer_resets as End, LOST),
        (peer_finishes, LOST),
        (we_give_up, FLUSHED),
    ];
    for (end, status) in ends {
        let mut peer = scripted();
        let sink = peer.node.region(64, everything());
        peer.node.post(&Work::send(0).inline(b"message"));
        peer.run();
        peer.send_ulpdu(&answer());
        assert_eq!(peer.node.sent(), [(0, SUCCESS)]);
        peer.node.post(&Work::send(1).inline(b"message"));
        peer.node.post(&Work::read(2, 0x200, 0).sge(sink.sge(0, 64)));
        peer.node.post(
            &Work::new(Opcode::FetchAdd, 3)
                .to(0x200, 0)
                .atomic(1, 0)
                .sge(sink.sge(0, 8)),
        );
        peer.run();
        // A part of the answer, and a confirmation of all sent messages.
        peer.send_unread(&fpdu_of(&tagged(0x81, 0x42, sink.stag, sink.base, &[7; 32])));
        peer.send_unread(&fpdu_of(&confirmation(u64::MAX)));
        end(&mut peer);
        assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, status), (3, FLUSHED)]);
    }
}

#[test]
fn vrb_c_20_an_end_takes_in_what_has_arrived_and_confirms_it() {
    let destroy = |node: &mut Node| {
        node.with(|engine, env, stream| {
            engine.conclude(env, stream);
            engine.abandon();
            stream.finish();
        });
    };
    let fail = |node: &mut Node| node.set_state(QpState::Err);
    for end in [&destroy as &dyn Fn(&mut Node), &fail] {
        let mut pair = pair();
        let sink = pair.b.region(64, everything());
        (1..=2).for_each(|cookie| pair.b.post_recv(cookie, &[sink.sge(0, 7)]));
        for cookie in 1..=3 {
            pair.a.post(&Work::send(cookie).inline(b"message"));
            while pair.a.pump() {}
        }
        pair.advance(Duration::from_millis(1));
        // The program of `b` never polls: nothing has been received by now.
        end(&mut pair.b);
        assert_eq!(pair.b.received()[..2], [(1, SUCCESS, 7), (2, SUCCESS, 7)]);
        assert_eq!(sink.bytes()[..7], *b"message");
        pair.run_now();
        assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
        pair.advance(LOSS_GRACE);
        pair.run_now();
        assert_eq!(pair.a.sent(), [(3, LOST)], "it found no receive");
    }
}

#[test]
fn vrb_c_20_other_implementations_get_answers_and_no_confirmation() {
    let attachment = delivered(agreed(false));
    let silent = read_request(1, (1, 0), 0, (1, 0));
    for (read, understands) in [(silent, false), (announcement(), true)] {
        let mut peer = Scripted::with(&Shape::default(), attachment.clone());
        peer.node.post_recv(1, &[]);
        let arrived = [send_segment(true, 1, 0, b""), read];
        let bytes = arrived.map(|ulpdu| fpdu_of(&ulpdu)).concat();
        peer.leave_open(&bytes);
        peer.node.set_state(QpState::Err);
        assert_eq!(peer.node.received(), [(1, SUCCESS, 0)]);
        let expected = match understands {
            false => vec![answer()],
            true => vec![confirmation(peer.advance_of(&bytes)), answer()],
        };
        assert_eq!(peer.output_ulpdus(), expected);
        assert!(peer.finished);
    }
}

#[test]
fn vrb_c_20_unsignaled_sends_are_confirmed_at_an_orderly_end() {
    let with = |initiator| delivered(agreed(initiator));
    let mut pair = Pair::with(&Shape::default(), Conditions::default(), with(true), with(false));
    for cookie in 1..=4 {
        pair.b.post_recv(cookie, &[]);
        pair.a.post_recv(cookie, &[]);
        pair.a.post(&Work::send(cookie).unsignaled());
        pair.run_now();
        pair.b.post(&Work::send(cookie).unsignaled());
        pair.run_now();
        assert_eq!(pair.a.received(), [(cookie, SUCCESS, 0)]);
    }
    pair.b.set_state(QpState::Err);
    pair.run();
    assert_eq!((pair.a.sent(), pair.a.faults()), (vec![], vec![]));
    assert!(pair.a.has_event(EventKind::PeerClosed));
}

#[test]
fn vrb_c_20_a_terminate_comes_after_a_confirmation() {
    // The confirmation covers the messages before the one at fault.
    let mut peer = Scripted::with(&Shape::default(), delivered(agreed(false)));
    peer.node.post_recv(1, &[]);
    let announcement = fpdu_of(&announcement());
    peer.send(&announcement);
    peer.output();
    let [send, write] =
        [send_segment(true, 1, 0, b""), write_segment(0x7777, 0, b"x")].map(|ulpdu| fpdu_of(&ulpdu));
    peer.send(&[&send[..], &write].concat());
    let ulpdus = peer.output_ulpdus();
    assert_eq!(
        ulpdus[0],
        confirmation(peer.advance_of(&[announcement, send].concat()))
    );
    assert_eq!((ulpdus.len(), ulpdus[1][1]), (2, 0x47), "a Terminate");
    // A request of the end itself fails: the confirmation covers all messages that have arrived.
    let mut pair = pair();
    for cookie in 1..=2 {
        pair.b.post_recv(cookie, &[]);
        pair.a.post(&Work::send(cookie));
    }
    while pair.a.pump() {}
    pair.advance(Duration::from_millis(1));
    pair.b.post(&Work::send(3).sge(sge(0, 8, 0x7777)));
    pair.b.with(|engine, env, stream| engine.transmit(env, stream));
    assert_eq!(pair.b.received(), [(1, SUCCESS, 0), (2, SUCCESS, 0)]);
    assert_eq!(pair.b.sent(), [(3, WcStatus::LocProtErr)]);
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(pair.a.engine.state(), QpState::Err);
}

#[test]
fn vrb_c_22_what_came_before_a_message_that_waits_is_confirmed() {
    let mut pair = pair();
    (1..=2).for_each(|cookie| pair.b.post_recv(cookie, &[]));
    (1..=4).for_each(|cookie| pair.a.post(&Work::send(cookie)));
    pair.run_now();
    assert_eq!(pair.b.rx, RxOutcome::Stalled);
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    pair.b.post_recv(3, &[]);
    pair.run_now();
    assert_eq!(pair.a.sent(), [(3, SUCCESS)]);
    // The process is killed.
    pair.wire.reset();
    pair.run_now();
    assert_eq!(pair.a.sent(), [(4, LOST)]);
}

/// A message whose payload was read directly to its place before it was refused is not confirmed
/// either.
#[test]
fn vrb_c_20_a_refused_message_is_not_confirmed() {
    for crc in [true, false] {
        let conditions = Conditions {
            chunk: 1000,
            ..Conditions::default()
        };
        let with = |initiator| Attachment {
            crc,
            ..delivered(native(initiator))
        };
        let mut pair = Pair::with(&Shape::default(), conditions, with(true), with(false));
        let source = pair.a.filled(&pattern(10_000));
        let sink = pair.b.region(10_000, everything());
        (1..=2).for_each(|cookie| pair.b.post_recv(cookie, &[sink.sge(0, 10_000)]));
        let whole = source.sge(0, 10_000);
        pair.a.post(&Work::send(1).sge(whole));
        pair.a
            .post(&Work::new(Opcode::SendInv, 2).to(0x7777, 0).sge(whole));
        pair.run_now();
        assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, WcStatus::RemAccessErr)]);
    }
}

#[test]
fn vrb_c_20_an_end_is_bounded_though_the_peer_goes_on_sending() {
    let mut pair = pair();
    let target = pair.b.region(1 << 20, everything());
    let source = pair.a.filled(&pattern(1 << 20));
    for cookie in 0..40 {
        let write = Work::write(cookie, target.stag, target.base);
        pair.a.post(&write.sge(source.sge(0, 1 << 20)));
    }
    while pair.a.pump() {}
    pair.advance(Duration::from_millis(1));
    pair.b.set_state(QpState::Err);
    assert_eq!(pair.b.engine.state(), QpState::Err);
}

#[test]
fn vrb_c_21_requests_before_a_local_failure_complete_first() {
    let mut peer = scripted();
    let bad = sge(0, 8, 0x7777);
    peer.node.post(&Work::send(1).inline(b"message").unsignaled());
    peer.node.post(&Work::send(2).inline(b"message"));
    peer.node.post(&Work::send(3).sge(bad));
    peer.node.post(&Work::send(4).inline(b"message"));
    assert_eq!(peer.output_ulpdus().len(), 3, "two Sends and a Read");
    assert!(peer.node.sent().is_empty());
    assert!(!peer.finished);
    peer.send_ulpdu(&answer());
    assert_eq!(
        peer.node.sent(),
        [(2, SUCCESS), (3, WcStatus::LocProtErr), (4, FLUSHED)]
    );
    assert_eq!(peer.node.faults()[0].0, QpFault::LocalWork);
    // Without the confirmation they fail.
    let mut peer = scripted();
    peer.node.post(&Work::send(1).inline(b"message"));
    peer.node.post(&Work::send(2).sge(bad));
    peer.run();
    peer.rst();
    assert_eq!(peer.node.sent(), [(1, LOST), (2, WcStatus::LocProtErr)]);
}

/// No other message is sent between the segments of a Send.
#[test]
fn vrb_c_21_a_send_that_fails_within_its_message_ends_at_once() {
    let mut peer = scripted();
    let source = peer.node.filled(&pattern(2000));
    let torn = Work::send(2).sge(source.sge(0, 2000)).sge(sge(0, 8, 0x7777));
    peer.node.post(&Work::send(1).inline(b"message"));
    peer.node.post(&torn);
    let ulpdus = peer.output_ulpdus();
    let kinds: Vec<_> = ulpdus.iter().map(|ulpdu| (ulpdu[0], ulpdu[1])).collect();
    let (segment, last) = (0x01, 0x41);
    assert_eq!(kinds, [(last, 0x43), (segment, 0x43), (last, 0x47)]);
    assert!(peer.finished);
    assert_eq!(peer.node.sent(), [(1, FLUSHED), (2, WcStatus::LocProtErr)]);
}

#[test]
fn a_native_peer_that_finishes_leaves_time() {
    let mut pair = pair();
    pair.b.post_recv(9, &[]);
    pair.a.post_recv(8, &[]);
    pair.b.post(&Work::send(1).inline(b"message"));
    while pair.b.pump() {}
    // The peer's program has read nothing, and its process is killed.
    pair.a.stream.finish();
    pair.advance(Duration::from_millis(1));
    while pair.b.pump() {}
    assert_eq!(pair.b.rx, RxOutcome::Finished);
    assert!(pair.b.sent().is_empty());
    assert_eq!(pair.b.engine.state(), QpState::Rts);
    pair.advance(LOSS_GRACE);
    while pair.b.pump() {}
    assert_eq!(pair.b.sent(), [(1, LOST)]);
    assert_eq!(pair.b.received(), [(9, FLUSHED, 0)]);
    assert_eq!(pair.b.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert!(!pair.b.has_event(EventKind::PeerClosed));
}

/// A peer that reads nothing, so that the stream takes 64 KiB, and an engine that has posted a
/// Write of 300,000 bytes.
fn blocked(attachment: Attachment) -> (Scripted, Region) {
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.wire.set_capacity(0, 64 << 10);
    let source = peer.node.filled(&pattern(300_000));
    peer.node
        .post(&Work::write(1, 0x1234, 0).sge(source.sge(0, 300_000)));
    while peer.node.pump() {}
    (peer, source)
}

/// The payload of Writes and answers to Reads, and the number of Sends.
fn arrived(ulpdus: &[Vec<u8>]) -> (Vec<u8>, usize) {
    let tagged = ulpdus.iter().filter(|ulpdu| ulpdu[0] & 0x80 != 0);
    let payload: Vec<_> = tagged.map(|ulpdu| ulpdu[14..].to_vec()).collect();
    (payload.concat(), ulpdus.len() - payload.len())
}

#[test]
fn ddp_t_04_posted_messages_are_sent_after_the_peers_fin() {
    let (mut peer, _) = blocked(agreed(true));
    peer.node.post_recv(9, &[]);
    peer.node.post(&Work::send(2).inline(b"last"));
    peer.fin_unread();
    assert!(peer.node.has_event(EventKind::PeerClosed));
    assert_eq!(peer.node.engine.state(), QpState::Rts);
    assert_eq!((peer.node.sent(), peer.node.received()), (vec![], vec![]));
    // It is too late for this one: the program could post for ever.
    peer.node.post(&Work::send(3).inline(b"late"));
    let (payload, sends) = arrived(&peer.output_ulpdus());
    assert!(payload == pattern(300_000));
    assert_eq!((sends, peer.finished), (1, true));
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS), (3, FLUSHED)]);
    assert_eq!(peer.node.received(), [(9, FLUSHED, 0)]);
    assert_eq!(
        (peer.node.faults(), peer.node.engine.is_attached()),
        (vec![], false)
    );
}

#[test]
fn ddp_t_04_a_read_among_them_is_not_answered() {
    let (mut peer, region) = blocked(agreed(true));
    peer.node.post(&Work::read(2, 0x200, 0).sge(region.sge(0, 8)));
    peer.node.post(&Work::send(3).inline(b"last"));
    let fenced = Work::send(4).inline(b"fenced");
    peer.node.post(&fenced.flags(SendFlags::FENCE));
    peer.fin_unread();
    let (payload, others) = arrived(&peer.output_ulpdus());
    assert!(payload == pattern(300_000));
    assert_eq!(others, 2, "the Read Request and the Send before the fence");
    assert_eq!(
        peer.node.sent(),
        [(1, SUCCESS), (2, FLUSHED), (3, FLUSHED), (4, FLUSHED)]
    );
    assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert!(peer.finished);
}

#[test]
fn ddp_t_04_what_needs_a_confirmation_is_sent_and_fails() {
    let (mut peer, _) = blocked(delivered(agreed(true)));
    peer.node.post(&Work::send(2).inline(b"last"));
    peer.fin_unread();
    let (payload, others) = arrived(&peer.output_ulpdus());
    assert!(payload == pattern(300_000) && others >= 1);
    assert_eq!(peer.node.sent(), [(1, LOST), (2, FLUSHED)]);
    assert!(peer.finished);
}

/// A peer that reads more than the stream takes at once, and closes its half.
fn reads_and_finishes() -> Scripted {
    let mut peer = Scripted::new();
    peer.wire.set_capacity(0, 64 << 10);
    let source = peer.node.filled(&pattern(300_000));
    let request = read_request(1, (0x55, 0), 300_000, (source.stag, source.base));
    peer.send_unread(&fpdu_of(&request));
    peer.fin_unread();
    peer
}

#[test]
fn ddp_t_04_reads_of_the_peer_are_answered_after_its_fin() {
    let mut peer = reads_and_finishes();
    let (payload, _) = arrived(&peer.output_ulpdus());
    assert!(payload == pattern(300_000));
    assert_eq!((peer.node.faults(), peer.finished), (vec![], true));
    assert!(!peer.node.engine.is_attached());
}

#[test]
fn ddp_t_04_answers_that_the_stream_does_not_take_are_a_loss() {
    let mut peer = reads_and_finishes();
    peer.wait_unread(Duration::from_secs(5));
    peer.wait_unread(Duration::from_secs(5));
    assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert!(!peer.node.engine.is_attached());
}

#[test]
fn ddp_t_04_a_half_closed_stream_that_takes_nothing_ends() {
    let (mut peer, _) = blocked(agreed(true));
    peer.node.post(&Work::send(2).inline(b"last"));
    peer.fin_unread();
    for _ in 0..3 {
        peer.wait_unread(Duration::from_millis(4900));
        peer.read(1000);
    }
    assert!(peer.node.engine.is_attached(), "it takes bytes now and then");
    peer.wait_unread(Duration::from_secs(5));
    peer.wait_unread(Duration::from_secs(5));
    assert_eq!(peer.node.sent(), [(1, FLUSHED), (2, FLUSHED)]);
    assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert_eq!(peer.node.deadline(), None);
}

#[test]
fn ddp_t_04_a_peer_that_closed_both_halves_is_lost_at_once() {
    let (mut peer, _) = blocked(agreed(true));
    peer.fin_unread();
    peer.rst();
    assert_eq!(peer.node.sent(), [(1, FLUSHED)]);
    assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert!(!peer.node.engine.is_attached());
}

#[test]
fn ddp_t_04_a_half_closed_queue_pair_can_be_given_up() {
    let (mut peer, _) = blocked(agreed(true));
    peer.fin_unread();
    peer.node.set_state(QpState::Err);
    assert_eq!(peer.node.sent(), [(1, FLUSHED)]);
    peer.run();
    assert!(peer.finished && !peer.node.engine.is_attached());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The peer closes its half at some time, and reads in pieces of any size.
    #[test]
    fn ddp_t_04_whatever_was_posted_before_the_fin_arrives(
        lens in proptest::collection::vec(0..60_000usize, 1..12),
        before in 0..12usize,
        room in 2_000..100_000usize,
        piece in 100..40_000usize,
    ) {
        let mut peer = Scripted::new();
        peer.wire.set_capacity(0, room);
        let source = peer.node.filled(&pattern(60_000));
        let before = before.min(lens.len());
        for (cookie, &len) in lens.iter().enumerate() {
            if cookie == before {
                while peer.node.pump() {}
            }
            let send = Work::send(cookie as u64);
            peer.node.post(&if len > 0 { send.sge(source.sge(0, len)) } else { send });
        }
        peer.fin_unread();
        for _ in 0..100_000 {
            if peer.finished {
                break;
            }
            peer.read(piece);
        }
        prop_assert!(peer.finished);
        let mut payload = 0;
        let mut messages = 0;
        for ulpdu in peer.output_ulpdus() {
            payload += ulpdu.len() - 18;
            messages += usize::from(ulpdu[0] & 0x40 != 0);
        }
        prop_assert_eq!((messages, payload), (lens.len(), lens.iter().sum()));
        let all: Vec<_> = (0..lens.len() as u64).map(|cookie| (cookie, SUCCESS)).collect();
        prop_assert_eq!(peer.node.sent(), all);
        prop_assert!(!peer.node.engine.is_attached());
    }
}
