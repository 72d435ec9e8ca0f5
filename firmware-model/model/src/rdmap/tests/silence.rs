//! A peer whose host does not answer: the requests that wait for the peer fail when the driver's
//! limit is over, and not earlier.

use super::Pair;
use crate::counters::Counter;
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use crate::transport::QpChange;
use std::sync::atomic::Ordering;
use std::time::Duration;
use urnic_device::event::{EventKind, QpFault};
use urnic_device::vocabulary::{QpState, WcStatus};

const SUCCESS: WcStatus = WcStatus::Success;
const LIMIT: Duration = Duration::from_secs(2);
const LOST: (QpFault, u32) = (QpFault::StreamLost, 0x2001_0000);

fn limited(limit: Duration, a: Attachment, b: Attachment) -> Pair {
    let mut pair = Pair::with(&Shape::default(), Conditions::default(), a, b);
    for node in [&mut pair.a, &mut pair.b] {
        node.modify(QpChange {
            ack_timeout: Some(limit),
            ..QpChange::default()
        });
    }
    pair.run_now();
    pair
}

/// Runs only the first end until it has failed, or for `most`: the peer's program is stopped.
/// Returns the time that has passed.
fn run_first_end(pair: &mut Pair, most: Duration) -> Duration {
    let start = pair.clock.load(Ordering::Relaxed);
    let passed = |pair: &Pair| Duration::from_nanos(pair.clock.load(Ordering::Relaxed) - start);
    loop {
        while pair.a.pump() {}
        if !pair.a.faults().is_empty() || passed(pair) >= most {
            return passed(pair);
        }
        match pair.a.deadline() {
            Some(at) => drop(pair.clock.fetch_max(at.0, Ordering::Relaxed)),
            None => pair.advance(most - passed(pair)),
        }
    }
}

/// A Read of the second end's memory.
fn read(pair: &mut Pair, cookie: u64) -> Work {
    let source = pair.b.filled(b"12345678");
    let sink = pair.a.region(8, everything());
    Work::read(cookie, source.stag, source.base).sge(sink.sge(0, 8))
}

#[test]
fn a_request_to_a_silent_peer_fails_after_the_limit() {
    let mut pair = limited(LIMIT, native(true), native(false));
    pair.wire.silence();
    let read = read(&mut pair, 1);
    pair.a.post(&read);
    pair.a.post(&Work::send(2));
    let time = run_first_end(&mut pair, 10 * LIMIT);
    assert!(time >= LIMIT && time <= LIMIT + LIMIT / 4, "{time:?}");
    assert_eq!(pair.a.faults(), [LOST]);
    assert!(pair.wire.is_reset());
    // The Send completed when the stream took it.
    let sent = pair.a.sent();
    assert_eq!(sent[0], (1, WcStatus::RetryExcErr), "{sent:?}");
}

#[test]
fn on_any_kind_of_connection_the_status_is_retry_exc_err() {
    let mut pair = limited(LIMIT, agreed(true), agreed(false));
    pair.open_fence();
    pair.wire.silence();
    let read = read(&mut pair, 1);
    pair.a.post(&read);
    run_first_end(&mut pair, 10 * LIMIT);
    assert_eq!(pair.a.sent(), [(1, WcStatus::RetryExcErr)]);
}

#[test]
fn a_silent_peer_is_asked_three_times_however_short_the_limit() {
    let mut pair = limited(Duration::from_millis(50), native(true), native(false));
    pair.wire.silence();
    pair.a.post(&Work::send(1));
    let time = run_first_end(&mut pair, 10 * LIMIT);
    // TCP retransmits after 200 ms, 600 ms and 1.4 s.
    assert!(time >= Duration::from_millis(1400), "{time:?}");
    assert_eq!(pair.a.faults(), [LOST]);
}

#[test]
fn a_waiting_read_asks_a_peer_that_owes_no_acknowledgement() {
    let mut pair = limited(LIMIT, native(true), native(false));
    let read = read(&mut pair, 1);
    pair.a.post(&read);
    // The request arrives. Its answer would take a minute.
    let minute = Duration::from_secs(60);
    assert!(run_first_end(&mut pair, minute) >= minute);
    assert_eq!(pair.a.faults(), []);
    pair.wire.silence();
    let time = run_first_end(&mut pair, minute);
    assert!(time >= LIMIT && time < 3 * LIMIT, "{time:?}");
    assert_eq!(pair.a.sent(), [(1, WcStatus::RetryExcErr)]);
}

#[test]
fn a_stopped_program_is_no_silent_peer() {
    let mut pair = limited(LIMIT, native(true), native(false));
    let source = pair.a.filled(&pattern(4096));
    // More than the wire takes: the last bytes wait for the peer's program.
    pair.wire.set_capacity(0, 10_000);
    for n in 0..5 {
        pair.a.post(&Work::send(n).sge(source.sge(0, 4096)));
    }
    let hour = Duration::from_secs(3600);
    assert!(run_first_end(&mut pair, hour) >= hour);
    assert_eq!(pair.a.faults(), []);
    assert_eq!(pair.a.engine.state(), QpState::Rts);
}

#[test]
fn an_idle_connection_does_not_notice_a_silent_peer() {
    let mut pair = limited(LIMIT, native(true), native(false));
    pair.a.post_recv(1, &[]);
    pair.b.post_recv(1, &[]);
    pair.a.post(&Work::send(1));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS)]);
    // A queue pair with no waiting request is not watched.
    run_first_end(&mut pair, LIMIT);
    assert_eq!(pair.a.deadline(), None);
    pair.wire.silence();
    run_first_end(&mut pair, 1000 * LIMIT);
    assert_eq!((pair.a.faults(), pair.a.received()), (vec![], vec![]));
    // The next request does.
    pair.a.post(&Work::send(2));
    let time = run_first_end(&mut pair, 10 * LIMIT);
    assert!(time >= LIMIT && time <= LIMIT + LIMIT / 4, "{time:?}");
}

#[test]
fn a_message_that_completed_early_still_finds_a_silent_peer() {
    let mut pair = limited(LIMIT, native(true), native(false));
    pair.wire.silence();
    pair.a.post_recv(7, &[]);
    pair.a.post(&Work::send(1));
    run_first_end(&mut pair, LIMIT / 2);
    assert_eq!(pair.a.sent(), [(1, SUCCESS)], "the stream took it");
    run_first_end(&mut pair, 10 * LIMIT);
    assert_eq!(pair.a.faults(), [LOST]);
    assert_eq!(pair.a.received(), [(7, WcStatus::WrFlushErr, 0)]);
}

#[test]
fn answers_to_a_silent_peer_are_left_to_tcp() {
    let mut pair = limited(LIMIT, native(true), native(false));
    let read = read(&mut pair, 1);
    pair.a.post(&read);
    while pair.a.pump() {}
    pair.advance(Duration::from_millis(1));
    while pair.b.pump() {}
    assert_eq!(pair.b.count(Counter::TxFpdus), 1, "the answer is under way");
    pair.wire.silence();
    // The responder's end of the connection has no request that waits.
    pair.advance(100 * LIMIT);
    while pair.b.pump() {}
    assert_eq!(pair.b.deadline(), None);
    assert_eq!(pair.b.faults(), []);
}

#[test]
fn without_a_limit_tcp_decides() {
    let mut pair = limited(Duration::ZERO, native(true), native(false));
    pair.wire.silence();
    pair.a.post(&Work::send(1));
    let hour = Duration::from_secs(3600);
    assert!(run_first_end(&mut pair, hour) >= hour);
    assert_eq!(pair.a.faults(), []);
}

#[test]
fn kind_uc_parts_from_a_silent_peer() {
    let shape = Shape {
        unreliable: true,
        ..Shape::default()
    };
    let mut pair = Pair::with(&shape, Conditions::default(), agreed(true), agreed(false));
    pair.a.modify(QpChange {
        ack_timeout: Some(LIMIT),
        ..QpChange::default()
    });
    pair.run_now();
    pair.wire.silence();
    pair.a.post(&Work::send(1));
    let start = pair.clock.load(Ordering::Relaxed);
    loop {
        while pair.a.pump() {}
        if pair.a.has_event(EventKind::Closed) {
            break;
        }
        let at = pair.a.deadline().expect("the peer is watched");
        pair.clock.fetch_max(at.0, Ordering::Relaxed);
    }
    let time = Duration::from_nanos(pair.clock.load(Ordering::Relaxed) - start);
    assert!(time <= LIMIT + LIMIT / 4, "{time:?}");
    assert_eq!(pair.a.faults(), []);
    assert_eq!(pair.a.engine.state(), QpState::Rts);
    assert_eq!(pair.a.count(Counter::StreamsLost), 1);
    // Sends are dropped until there is another stream.
    pair.a.post(&Work::send(2));
    while pair.a.pump() {}
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
}
