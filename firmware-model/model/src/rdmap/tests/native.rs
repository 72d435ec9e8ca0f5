//! Native connections: the policy that programs written for InfiniBand rely on, and a queue pair
//! that is its own peer.

use super::Pair;
use crate::counters::Counter;
use crate::rdmap::{Attachment, NoStream};
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use crate::transport::{QpChange, RxOutcome};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use urnic_device::event::{EventKind, QpFault};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;
/// The time for which requests wait after the peer's FIN.
const LOSS_GRACE: Duration = Duration::from_millis(500);

fn native_pair() -> Pair {
    native_pair_of(&Shape::default())
}

fn native_pair_of(shape: &Shape) -> Pair {
    let mut pair = Pair::with(shape, Conditions::default(), native(true), native(false));
    pair.run_now();
    pair
}

fn with_rnr_timeout(node: &mut Node, timeout: Duration) {
    node.modify(QpChange {
        rnr_timeout: Some(timeout),
        ..QpChange::default()
    });
}

#[test]
fn either_side_sends_first_after_the_rtr() {
    let mut pair = native_pair();
    assert!(pair.b.has_event(EventKind::FirstFpdu));
    pair.a.post_recv(1, &[]);
    pair.b.post(&Work::send(2));
    pair.run_now();
    assert_eq!(pair.a.received(), [(1, SUCCESS, 0)]);
    assert_eq!(pair.b.sent(), [(2, SUCCESS)]);
}

#[test]
fn an_empty_receive_queue_stalls_the_stream() {
    let mut pair = native_pair();
    let region = pair.b.region(64, everything());
    pair.a.post(&Work::send(1).inline(b"early"));
    pair.a.post(&Work::send(2).inline(b"later"));
    pair.run_now();
    assert_eq!(pair.b.rx, RxOutcome::Stalled);
    assert_eq!(pair.b.deadline(), None, "no deadline by default");
    assert_eq!(pair.b.count(Counter::RxStalls), 1);
    pair.b.post_recv(7, &[region.sge(0, 64)]);
    pair.run_now();
    assert_eq!(pair.b.received(), [(7, SUCCESS, 5)]);
    assert_eq!(region.bytes()[..5], *b"early");
    assert_eq!(pair.b.rx, RxOutcome::Stalled);
    pair.b.post_recv(8, &[region.sge(0, 64)]);
    pair.run_now();
    assert_eq!(pair.b.received(), [(8, SUCCESS, 5)]);
    assert!(pair.b.faults().is_empty());
}

#[test]
fn sending_delivers_no_parked_messages() {
    // The driver rings for the receive later. The thread that handles it sends the answer to the
    // Read, and checks whether a message waits.
    let mut pair = native_pair();
    let source = pair.b.filled(b"12345678");
    let sink = pair.a.region(8, everything());
    pair.a.post(&Work::send(1));
    pair.a
        .post(&Work::read(2, source.stag, source.base).sge(sink.sge(0, 8)));
    pair.run_now();
    assert_eq!(pair.b.rx, RxOutcome::Stalled);
    pair.b.post_recv(3, &[]);
    pair.b.with(|engine, env, stream| engine.transmit(env, stream));
    assert!(pair.b.engine.has_parked());
    pair.run_now();
    assert_eq!(pair.b.received(), [(3, SUCCESS, 0)]);
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn a_stalled_stream_costs_bounded_memory() {
    let mut pair = native_pair();
    let source = pair.a.filled(&pattern(1 << 20));
    for n in 0..4 {
        pair.a.post(&Work::send(n).sge(source.sge(0, 1 << 20)));
    }
    pair.run_now();
    assert_eq!(pair.b.rx, RxOutcome::Stalled);
    assert!(pair.b.engine.buffered() <= 256 << 10);
    let sink = pair.b.region(1 << 20, everything());
    for n in 0..4 {
        pair.b.post_recv(n, &[sink.sge(0, 1 << 20)]);
        pair.run_now();
        assert_eq!(pair.b.received(), [(n, SUCCESS, 1 << 20)]);
    }
    assert!(sink.bytes() == pattern(1 << 20));
}

#[test]
fn answers_pass_by_a_message_that_waits_for_a_receive() {
    // Each side waits for its Read before it posts the receive that the other's Send needs.
    let mut pair = native_pair();
    let len = 300_000;
    let regions = |node: &Node| (node.filled(&pattern(len)), node.region(len, everything()));
    let (b_source, _) = regions(&pair.b);
    let a_sink = pair.a.region(len, everything());
    pair.a.post(&Work::send(1).inline(b"from a"));
    pair.b.post(&Work::send(1).inline(b"from b"));
    pair.run_now();
    assert_eq!((pair.a.rx, pair.b.rx), (RxOutcome::Stalled, RxOutcome::Stalled));
    // Requests wait for those before them …
    pair.a
        .post(&Work::read(2, b_source.stag, b_source.base).sge(a_sink.sge(0, len)));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS)]);
    // … so both sides post their Read first: both answers arrive.
    let mut pair = native_pair();
    let ((a_source, a_sink), (b_source, b_sink)) = (regions(&pair.a), regions(&pair.b));
    pair.a
        .post(&Work::read(2, b_source.stag, b_source.base).sge(a_sink.sge(0, len)));
    pair.a.post(&Work::send(3).inline(b"from a"));
    pair.b
        .post(&Work::read(2, a_source.stag, a_source.base).sge(b_sink.sge(0, len)));
    pair.b.post(&Work::send(3).inline(b"from b"));
    pair.run_now();
    for (node, sink) in [(&mut pair.a, &a_sink), (&mut pair.b, &b_sink)] {
        assert_eq!(node.rx, RxOutcome::Stalled);
        assert_eq!(node.sent(), [(2, SUCCESS), (3, SUCCESS)]);
        assert!(sink.bytes() == pattern(len));
        node.post_recv(4, &[sink.sge(0, 6)]);
    }
    pair.run_now();
    assert_eq!(pair.a.received(), [(4, SUCCESS, 6)]);
    assert_eq!(pair.b.received(), [(4, SUCCESS, 6)]);
    assert_eq!((pair.a.rx, pair.b.rx), (RxOutcome::Drained, RxOutcome::Drained));
}

#[test]
fn a_fin_after_a_parked_message_is_read_after_its_delivery() {
    let mut pair = native_pair();
    pair.a.post(&Work::send(1).inline(b"last words"));
    pair.run_now();
    pair.a.stream.finish();
    pair.run_now();
    assert!(!pair.b.has_event(EventKind::PeerClosed));
    let region = pair.b.region(64, everything());
    pair.b.post_recv(2, &[region.sge(0, 64)]);
    pair.run_now();
    assert_eq!(pair.b.received(), [(2, SUCCESS, 10)]);
    assert!(pair.b.has_event(EventKind::PeerClosed));
    assert_eq!(
        (pair.b.engine.state(), pair.b.rx),
        (QpState::Rts, RxOutcome::Finished)
    );
}

#[test]
fn a_reset_drops_what_waits() {
    let mut pair = native_pair();
    pair.a.post(&Work::send(1).inline(b"lost"));
    pair.run_now();
    pair.wire.reset();
    pair.run_now();
    assert_eq!(pair.b.engine.state(), QpState::Err);
    pair.b.post_recv(2, &[]);
    pair.run_now();
    assert_eq!(pair.b.received(), [(2, FLUSHED, 0)]);
}

#[test]
fn rnr_timeout_fails_the_sender_with_rnr_retry_exc() {
    let mut pair = native_pair();
    with_rnr_timeout(&mut pair.b, Duration::from_millis(50));
    let source = pair.a.filled(&pattern(100));
    pair.a.post(&Work::send(1).sge(source.sge(0, 100)).unsignaled());
    pair.run_now();
    assert_eq!(pair.b.rx, RxOutcome::Stalled);
    assert!(pair.b.deadline().is_some());
    pair.advance(Duration::from_millis(49));
    pair.run_now();
    assert!(pair.a.faults().is_empty());
    pair.advance(Duration::from_millis(1));
    pair.run_now();
    assert_eq!(pair.b.faults(), [(QpFault::TerminateSent, 0x1202_c000)]);
    assert_eq!(pair.a.faults(), [(QpFault::TerminateReceived, 0x1202_c000)]);
    // The Send completed when the stream took it, so the next Send gets the error.
    pair.a.post(&Work::send(2));
    pair.a.post(&Work::send(3));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(2, WcStatus::RnrRetryExcErr), (3, FLUSHED)]);
}

#[test]
fn rnr_with_a_read_outstanding_after_the_send() {
    let mut pair = native_pair();
    with_rnr_timeout(&mut pair.b, Duration::ZERO);
    let source = pair.b.filled(b"12345678");
    let sink = pair.a.region(8, everything());
    pair.a.post(&Work::send(1));
    pair.a
        .post(&Work::read(2, source.stag, source.base).sge(sink.sge(0, 8)));
    pair.run();
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, WcStatus::RnrRetryExcErr)]);
}

#[test]
fn a_posted_receive_ends_the_countdown() {
    let mut pair = native_pair();
    with_rnr_timeout(&mut pair.b, Duration::from_millis(50));
    pair.a.post(&Work::send(1));
    pair.run_now();
    pair.advance(Duration::from_millis(40));
    pair.b.post_recv(1, &[]);
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, SUCCESS, 0)]);
    assert_eq!(pair.b.deadline(), None);
    pair.a.post(&Work::send(2));
    pair.run_now();
    pair.advance(Duration::from_millis(40));
    pair.run_now();
    assert!(pair.b.faults().is_empty(), "every message has its own time");
}

#[test]
fn an_orderly_fin_flushes_receives_after_the_grace_period() {
    let mut pair = native_pair();
    pair.b.post_recv(1, &[]);
    pair.run_now();
    pair.a.stream.finish();
    pair.run_now();
    assert!(pair.b.has_event(EventKind::PeerClosed));
    assert_eq!(
        (pair.b.engine.state(), pair.b.rx),
        (QpState::Rts, RxOutcome::Finished)
    );
    assert!(pair.b.received().is_empty());
    pair.advance(Duration::from_secs(2));
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, FLUSHED, 0)]);
    assert!(pair.b.faults().is_empty());
    pair.b.post(&Work::send(2));
    pair.b.post(&Work::send(3));
    pair.run_now();
    assert_eq!(pair.b.sent(), [(2, WcStatus::RetryExcErr), (3, FLUSHED)]);
}

#[test]
fn a_local_error_of_the_peer_is_only_its_end_for_infiniband() {
    for infiniband in [true, false] {
        let mut pair = native_pair_of(&Shape {
            infiniband,
            ..Shape::default()
        });
        pair.b.post_recv(1, &[]);
        pair.a.post(&Work::send(2).sge(sge(0, 8, 0x9999)));
        pair.run_now();
        assert_eq!(pair.a.sent(), [(2, WcStatus::LocProtErr)]);
        assert_eq!(pair.a.engine.state(), QpState::Err);
        assert_eq!(pair.b.count(Counter::RxTerminates), 1);
        if !infiniband {
            assert_eq!(pair.b.engine.state(), QpState::Err);
            continue;
        }
        assert_eq!(pair.b.engine.state(), QpState::Rts);
        assert!(pair.b.received().is_empty() && pair.b.faults().is_empty());
        pair.b.post(&Work::send(3));
        pair.run_now();
        pair.advance(LOSS_GRACE);
        pair.run_now();
        assert_eq!(pair.b.sent(), [(3, WcStatus::RetryExcErr)]);
    }
}

#[test]
fn a_send_after_the_peers_fin_is_retry_exc() {
    let mut pair = native_pair();
    pair.b.post_recv(9, &[]);
    pair.a.stream.finish();
    pair.run_now();
    pair.b.post(&Work::send(1).unsignaled());
    pair.b.post(&Work::send(2).unsignaled());
    pair.run_now();
    assert!(
        pair.b.sent().is_empty(),
        "an adapter would still repeat the request"
    );
    pair.advance(LOSS_GRACE);
    pair.run_now();
    assert_eq!(pair.b.sent(), [(1, WcStatus::RetryExcErr), (2, FLUSHED)]);
    assert_eq!(pair.b.received(), [(9, FLUSHED, 0)]);
    assert_eq!(pair.b.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
}

fn unreachable(node: &mut Node) {
    node.modify(QpChange {
        unreachable: true,
        ..QpChange::default()
    });
}

#[test]
fn the_next_send_fails_without_a_route_to_the_peer() {
    let mut node = own_peer();
    unreachable(&mut node);
    node.post(&Work::send(1));
    node.post(&Work::send(2));
    settle(&mut node);
    assert_eq!(node.sent(), [(1, WcStatus::RetryExcErr), (2, FLUSHED)]);
}

#[test]
fn a_requested_error_state_flushes_sends() {
    let mut node = own_peer();
    unreachable(&mut node);
    node.set_state(QpState::Err);
    node.post(&Work::send(1));
    settle(&mut node);
    assert_eq!(node.sent(), [(1, FLUSHED)]);

    let mut pair = native_pair();
    pair.wire.reset();
    pair.run_now();
    pair.a.set_state(QpState::Err);
    pair.a.post(&Work::send(1));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, FLUSHED)]);
}

#[test]
fn reset_with_work_outstanding_is_retry_exc() {
    let mut pair = native_pair();
    let sink = pair.a.region(8, everything());
    pair.wire.silence();
    pair.a.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    pair.a.post(&Work::send(2));
    pair.a.post_recv(3, &[]);
    pair.run_now();
    pair.wire.reset();
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, WcStatus::RetryExcErr), (2, FLUSHED)]);
    assert_eq!(pair.a.received(), [(3, FLUSHED, 0)]);
}

#[test]
fn fin_with_work_outstanding_is_retry_exc() {
    let mut pair = native_pair();
    let sink = pair.a.region(8, everything());
    pair.a.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    pair.a.pump();
    pair.b.stream.finish();
    pair.run_now();
    pair.advance(LOSS_GRACE);
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, WcStatus::RetryExcErr)]);
}

/// A queue pair whose Read the peer does not answer before its FIN, while a message of the peer
/// waits for a receive.
fn ended_after_parked() -> Pair {
    let mut pair = native_pair();
    let sink = pair.b.region(8, everything());
    pair.a.post(&Work::send(1).inline(b"early"));
    pair.run_now();
    pair.b.post(&Work::read(2, 5, 0).sge(sink.sge(0, 8)));
    pair.a.stream.finish();
    run_without_peer(&mut pair, Duration::from_secs(1));
    assert_eq!(pair.b.rx, RxOutcome::Stalled);
    pair.b
        .with(|engine, env, stream| engine.note_end_after_parked(env, stream));
    assert!(pair.b.sent().is_empty());
    pair
}

/// Lets time pass without any action of the peer.
fn run_without_peer(pair: &mut Pair, duration: Duration) {
    pair.advance(duration);
    while pair.b.pump() {}
}

#[test]
fn a_request_fails_if_the_end_follows_a_parked_message() {
    let mut pair = ended_after_parked();
    run_without_peer(&mut pair, Duration::from_secs(2));
    assert_eq!(pair.b.sent(), [(2, WcStatus::RetryExcErr)]);
    assert_eq!(pair.b.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
}

#[test]
fn a_receive_in_time_has_the_message_before_the_end() {
    let mut pair = ended_after_parked();
    let region = pair.b.region(64, everything());
    pair.b.post_recv(3, &[region.sge(0, 64)]);
    pair.b.post_recv(4, &[]);
    run_without_peer(&mut pair, Duration::ZERO);
    assert_eq!(pair.b.received(), [(3, SUCCESS, 5)]);
    run_without_peer(&mut pair, LOSS_GRACE);
    assert_eq!(pair.b.received(), [(4, FLUSHED, 0)]);
    assert_eq!(pair.b.sent(), [(2, WcStatus::RetryExcErr)]);
}

fn own_peer() -> Node {
    let clock = Arc::new(AtomicU64::new(0));
    let (memory, pd) = table();
    let mut node = Node::new(&Shape::default(), memory, pd, &clock);
    node.stream = Box::new(NoStream);
    let attachment = Attachment {
        delivered: true,
        ..native(true)
    };
    node.engine.attach_loopback(&attachment, || None).unwrap();
    node
}

fn settle(node: &mut Node) {
    while node.pump() {}
}

#[test]
fn a_queue_pair_may_be_its_own_peer() {
    let mut node = own_peer();
    let (left, right) = (node.filled(&pattern(200_000)), node.region(200_000, everything()));
    node.post_recv(1, &[right.sge(0, 200_000)]);
    node.post(&Work::send(2).sge(left.sge(0, 200_000)));
    settle(&mut node);
    assert_eq!(node.received(), [(1, SUCCESS, 200_000)]);
    assert_eq!(node.sent(), [(2, SUCCESS)]);
    assert!(right.bytes() == pattern(200_000));
    node.post(&Work::write(3, left.stag, left.base).inline(b"written"));
    node.post(&Work::read(4, left.stag, left.base).sge(right.sge(0, 100_000)));
    node.post(
        &Work::new(Opcode::FetchAdd, 5)
            .to(left.stag, left.base + 8)
            .atomic(1, 0)
            .sge(right.sge(100_000, 8)),
    );
    node.post(&Work::send(6).flags(SendFlags::FENCE));
    node.post_recv(7, &[]);
    settle(&mut node);
    assert_eq!(
        node.sent(),
        [(3, SUCCESS), (4, SUCCESS), (5, SUCCESS), (6, SUCCESS)]
    );
    assert_eq!(node.received(), [(7, SUCCESS, 0)]);
    assert_eq!(right.bytes()[..7], *b"written");
}

#[test]
fn loopback_waits_for_receives_too() {
    let mut node = own_peer();
    with_rnr_timeout(&mut node, Duration::MAX);
    for n in 0..100 {
        node.post(&Work::send(n).inline(b"x"));
    }
    settle(&mut node);
    assert_eq!(node.rx, RxOutcome::Stalled);
    let region = node.region(8, everything());
    for n in 0..100 {
        node.post_recv(n, &[region.sge(0, 8)]);
    }
    settle(&mut node);
    assert_eq!(node.received().len(), 100);
    assert_eq!(node.sent().len(), 100);
}

#[test]
fn loopback_is_bounded_and_goes_on() {
    let mut node = own_peer();
    let (left, right) = (node.filled(&pattern(100_000)), node.region(100_000, everything()));
    for n in 0..20 {
        node.post(&Work::send(n).sge(left.sge(0, 100_000)));
    }
    settle(&mut node);
    assert!(node.sent().len() < 10, "no more than its buffers hold");
    for n in 0..20 {
        node.post_recv(n, &[right.sge(0, 100_000)]);
        settle(&mut node);
        assert_eq!(node.received(), [(n, SUCCESS, 100_000)]);
        assert!(right.bytes() == pattern(100_000));
    }
    assert!(node.engine.is_quiet());
}

#[test]
fn loopback_errors_are_the_requesters() {
    let mut node = own_peer();
    let sink = node.region(8, everything());
    node.post_recv(9, &[]);
    node.post(&Work::read(1, 0x7777, 0).sge(sink.sge(0, 8)));
    node.post(&Work::send(2));
    settle(&mut node);
    assert_eq!(node.sent(), [(1, WcStatus::RemAccessErr), (2, FLUSHED)]);
    assert_eq!(node.received(), [(9, FLUSHED, 0)]);
    assert_eq!(node.engine.state(), QpState::Err);
    assert!(!node.engine.is_attached());
}

#[test]
fn loopback_closes_when_it_has_drained() {
    let mut node = own_peer();
    node.post(&Work::write(1, 1, 0));
    node.set_state(QpState::Sqd);
    settle(&mut node);
    assert_eq!(node.sent(), [(1, SUCCESS)]);
    assert!(!node.engine.is_attached());
    assert!(node.faults().is_empty());
}
