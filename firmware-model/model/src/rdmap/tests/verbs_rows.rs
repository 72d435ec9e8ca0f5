//! Verbs rows: states, completions, fences, queues and memory.

use super::extension_rows::fetch_add;
use super::{Pair, Scripted};
use crate::counters::Counter;
use crate::events::Effects;
use crate::host::Piece;
use crate::queues::SharedReceiveQueue;
use crate::rdmap::Attachment;
use crate::stream::wrapper::Wrapper;
use crate::stream::{Stream, StreamError};
use crate::testing::rig::*;
use crate::testing::sim::{Conditions, pair};
use crate::transport::{QpChange, TxOutcome};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{BindOperands, Opcode, SendFlags};
use zerocopy::FromZeros;

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

#[test]
fn vrb_q_02_requests_posted_in_error_are_flushed() {
    let mut peer = Scripted::new();
    peer.node.set_state(QpState::Err);
    peer.run();
    assert!(peer.finished, "FIN, and no Terminate");
    assert!(peer.output().is_empty());
    for n in 0..3 {
        peer.node.post(&Work::send(n).unsignaled());
        peer.node.post_recv(n, &[]);
    }
    peer.run();
    assert_eq!(peer.node.sent(), [(0, FLUSHED), (1, FLUSHED), (2, FLUSHED)]);
    assert_eq!(
        peer.node.received(),
        [(0, FLUSHED, 0), (1, FLUSHED, 0), (2, FLUSHED, 0)]
    );
    assert_eq!(peer.node.sq_outstanding(), 0);
    assert!(peer.node.faults().is_empty(), "requested");
}

#[test]
fn vrb_q_03_disconnecting_when_idle_and_when_busy() {
    // Idle: FIN at once; the peer's FIN ends the connection.
    let mut peer = Scripted::new();
    peer.node.set_state(QpState::Sqd);
    peer.run();
    assert!(peer.finished);
    peer.fin();
    assert!(peer.node.has_event(EventKind::Closed));
    assert!(peer.node.faults().is_empty());
    // Busy: FIN when the Read is answered.
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.run();
    peer.node.set_state(QpState::Sqd);
    peer.run();
    assert!(!peer.finished);
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    peer.run();
    assert!(peer.finished);
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
}

#[test]
fn vrb_q_04_everything_is_flushed_in_order() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(64, everything());
    for n in 0..20 {
        peer.node.post_recv(n, &[sink.sge(0, 1)]);
    }
    for n in 0..20 {
        let work = if n % 3 == 0 {
            Work::read(n, 5, 0).sge(sink.sge(0, 8))
        } else {
            Work::send(n)
        };
        peer.node.post(&work.unsignaled());
    }
    peer.run();
    peer.send_ulpdu(&send_segment(true, 7, 0, b"x"));
    peer.run();
    let sent = peer.node.sent();
    let cookies: Vec<u64> = sent.iter().map(|(cookie, _)| *cookie).collect();
    assert_eq!(cookies, (0..20).collect::<Vec<_>>());
    assert!(sent.iter().all(|(_, status)| *status == FLUSHED));
    let received = peer.node.received();
    assert_eq!(received, (0..20).map(|n| (n, FLUSHED, 0)).collect::<Vec<_>>());
    assert_eq!(peer.node.engine.state(), QpState::Err);
}

#[test]
fn vrb_q_04_an_untaken_terminate_times_out() {
    let mut peer = Scripted::new();
    peer.wire.set_capacity(0, 0);
    peer.node.post(&Work::send(1).inline(b"stuck"));
    peer.send_unread(&fpdu_of(&send_segment(true, 1, 0, b"x")));
    assert_eq!(peer.node.engine.state(), QpState::Sqe);
    assert_eq!(peer.node.tx, TxOutcome::Blocked);
    assert!(peer.node.sent().is_empty());
    peer.advance(Duration::from_secs(3));
    assert_eq!(peer.node.engine.state(), QpState::Err);
    assert_eq!(peer.node.sent(), [(1, FLUSHED)]);
    assert!(peer.wire.is_reset());
}

#[test]
fn vrb_q_07_fin_with_a_read_outstanding_is_a_lost_stream() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.run();
    peer.fin();
    assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert_eq!(peer.node.sent(), [(1, FLUSHED)]);
}

#[test]
fn vrb_q_07_fin_at_an_idle_queue_pair_is_no_error() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post_recv(9, &[sink.sge(0, 8)]);
    // A Read that is answered leaves nothing outstanding.
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.run();
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    peer.run();
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    peer.output();
    peer.fin();
    assert!(peer.node.faults().is_empty(), "no asynchronous error");
    assert!(peer.finished, "our FIN");
    assert!(peer.output().is_empty(), "and no Terminate before it");
    assert!(peer.node.has_event(EventKind::Closed));
    assert_eq!(peer.node.received(), [(9, FLUSHED, 0)]);
}

#[test]
fn vrb_q_a_peer_that_never_answers_our_fin_times_out() {
    let mut peer = Scripted::new();
    peer.node.set_state(QpState::Err);
    peer.run();
    assert!(peer.node.engine.is_attached());
    peer.advance(Duration::from_secs(6));
    assert!(!peer.node.engine.is_attached());
    assert!(peer.wire.is_reset());
    assert!(peer.node.has_event(EventKind::Closed));
}

#[test]
fn vrb_q_invalid_transitions_are_refused() {
    let mut peer = Scripted::new();
    for state in [QpState::Init, QpState::Rtr, QpState::Sqe] {
        let change = QpChange {
            state: Some(state),
            ..QpChange::default()
        };
        let result = peer
            .node
            .with(|engine, env, stream| engine.modify(&change, env, stream));
        assert!(result.is_err(), "{state:?}");
    }
    let again = agreed(true);
    assert!(
        peer.node
            .with(|engine, env, stream| engine.attach(&again, None, env, stream))
            .is_err()
    );
}

#[test]
fn vrb_c_01_unsignaled_success_only_frees_its_blocks() {
    let mut pair = Pair::new();
    for n in 0..50 {
        let work = Work::write(n, 1, 0);
        pair.a.post(&if n % 10 == 9 { work } else { work.unsignaled() });
    }
    pair.run_now();
    assert_eq!(
        pair.a.sent().iter().map(|s| s.0).collect::<Vec<_>>(),
        [9, 19, 29, 39, 49]
    );
    assert_eq!(pair.a.sq_outstanding(), 0);
}

#[test]
fn vrb_c_01_completions_come_in_the_order_of_posting() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(64, everything());
    let read = |n: u64| Work::read(n, 5, 0).sge(sink.sge(8 * n as usize, 8));
    // The requests after a Read are sent before the Read is answered.
    for work in [
        read(0),
        Work::send(1),
        read(2).unsignaled(),
        Work::write(3, 1, 0),
        Work::send(4).unsignaled(),
        Work::send(5),
    ] {
        peer.node.post(&work);
    }
    peer.run();
    assert!(peer.node.sent().is_empty(), "all wait for the first Read");
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    peer.run();
    assert_eq!(peer.node.sent(), [(0, SUCCESS), (1, SUCCESS)]);
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base + 16, &[1; 8]));
    peer.run();
    assert_eq!(peer.node.sent(), [(3, SUCCESS), (5, SUCCESS)]);
    assert_eq!(peer.node.sq_outstanding(), 0);
}

#[test]
fn vrb_c_01_an_error_completes_even_unsignaled() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(b"abcd");
    peer.node.post(&Work::send(0).sge(source.sge(0, 4)).unsignaled());
    peer.node.post(&Work::send(1).sge(sge(0, 4, 0xdead)).unsignaled());
    peer.node.post(&Work::send(2).sge(source.sge(0, 4)).unsignaled());
    peer.run();
    assert_eq!(peer.node.sent(), [(1, WcStatus::LocProtErr), (2, FLUSHED)]);
}

#[test]
fn vrb_c_02_a_send_completes_when_the_stream_has_taken_it() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(1000));
    // A stream of bytes takes a part of an FPDU.
    let room = if Scripted::HAS_FPDUS { 500 } else { 0 };
    peer.wire.set_capacity(0, room);
    peer.node.post(&Work::send(1).sge(source.sge(0, 1000)));
    while peer.node.pump() {}
    assert!(peer.node.sent().is_empty());
    assert_eq!(peer.node.tx, TxOutcome::Blocked);
    assert_eq!(peer.node.sq_outstanding(), 1);
    peer.wire.set_capacity(0, 5000);
    while peer.node.pump() {}
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    assert!(peer.node.count(Counter::TxStalls) > 0);
}

#[test]
fn vrb_c_06_and_sec_05_cq_overflow_ends_the_queue_pair() {
    let shape = Shape {
        cq_log: 2,
        ..Shape::default()
    };
    let mut peer = Scripted::with(&shape, agreed(true));
    for n in 0..5 {
        peer.node.post(&Work::send(n));
    }
    peer.node.post_recv(1, &[]);
    peer.run();
    let ulpdus = peer.output_ulpdus();
    assert_eq!(ulpdus.last().unwrap()[1], 0x47);
    assert_eq!(peer.node.faults(), [(QpFault::CqOverflow, 0)]);
    assert_eq!(peer.node.engine.state(), QpState::Err);
    // The other queue still works.
    assert_eq!(peer.node.received(), [(1, FLUSHED, 0)]);
    assert_eq!(peer.node.sent().len(), 4);
}

#[test]
fn vrb_f_01_a_read_fence_waits_for_earlier_reads() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.node
        .post(&Work::send(2).inline(b"x").flags(SendFlags::FENCE));
    assert_eq!(peer.output_ulpdus().len(), 1, "only the Read Request");
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    let ulpdus = peer.output_ulpdus();
    assert_eq!(ulpdus.len(), 1);
    assert_eq!(ulpdus[0][1], 0x43);
}

#[test]
fn vrb_f_02_local_invalidate_runs_where_it_stands() {
    let mut pair = Pair::new();
    let (source, target) = (pair.a.filled(b"abcd"), pair.b.region(8, everything()));
    pair.a
        .post(&Work::write(1, target.stag, target.base).sge(source.sge(0, 4)));
    pair.a.post(&Work::new(Opcode::LocalInv, 2).to(source.stag, 0));
    pair.a
        .post(&Work::write(3, target.stag, target.base).sge(source.sge(0, 4)));
    pair.run_now();
    assert_eq!(
        pair.a.sent(),
        [(1, SUCCESS), (2, SUCCESS), (3, WcStatus::LocProtErr)]
    );
    assert_eq!(target.bytes()[..4], *b"abcd");
}

#[test]
fn vrb_f_02_a_fenced_invalidate_waits_for_the_read() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.node.post(
        &Work::new(Opcode::LocalInv, 2)
            .to(sink.stag, 0)
            .flags(SendFlags::FENCE),
    );
    peer.run();
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn vrb_m_02_a_read_into_an_unmapped_sink_fails_locally() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.node.post(&Work::new(Opcode::LocalInv, 2).to(sink.stag, 0));
    assert_eq!(peer.output_ulpdus().len(), 1);
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    assert_eq!(peer.terminate()[..2], [0x11, 0x00]);
    assert_eq!(peer.node.sent(), [(1, WcStatus::LocProtErr), (2, FLUSHED)]);
    assert_eq!(sink.bytes(), [0; 8]);
}

/// The peer carries out a Read or an atomic whose sink is refused, and the requests after it.
#[test]
fn vrb_m_02_a_refused_sink_fails_by_the_answer() {
    for (infiniband, opcode) in [
        (true, Opcode::Read),
        (true, Opcode::FetchAdd),
        (false, Opcode::Read),
        (false, Opcode::FetchAdd),
    ] {
        let shape = Shape {
            infiniband,
            ..Shape::default()
        };
        let mut pair = Pair::with(&shape, Conditions::default(), native(true), native(false));
        let (target, good) = (pair.b.filled(&[5; 8]), pair.a.region(8, everything()));
        let read_only = pair.a.region(8, Access::empty());
        pair.run_now();
        pair.b.post_recv(9, &[]);
        pair.a.post(&Work::send(1));
        pair.a.post(&match opcode {
            Opcode::Read => Work::read(2, target.stag, target.base)
                .sge(good.sge(0, 4))
                .sge(read_only.sge(0, 4)),
            _ => fetch_add(2, target.stag, target.base, 1).sge(read_only.sge(0, 8)),
        });
        pair.a
            .post(&Work::write(3, target.stag, target.base + 7).inline(&[9]));
        pair.run_now();
        assert_eq!(
            pair.a.sent(),
            [(1, SUCCESS), (2, WcStatus::LocProtErr), (3, FLUSHED)],
            "{opcode:?}"
        );
        assert_eq!(read_only.bytes(), [0; 8]);
        let first = if opcode == Opcode::Read { 5 } else { 6 };
        assert_eq!(target.bytes(), [first, 5, 5, 5, 5, 5, 5, 9]);
        assert_eq!(pair.b.received(), [(9, SUCCESS, 0)]);
        // The error of a tagged segment has its header (row DDP-V-14), the local one has none.
        let control = if opcode == Opcode::Read { 0x0102_c000 } else { 0 };
        assert_eq!(pair.b.engine.status().terminate_received.get(), control);
        assert_eq!(pair.a.faults(), [(QpFault::LocalWork, control)]);
        // The peer ends as after any local failure of this end.
        let expected = if infiniband { QpState::Rts } else { QpState::Err };
        assert_eq!(pair.b.engine.state(), expected, "{opcode:?}");
    }
}

#[test]
fn vrb_m_02_the_peers_refusal_counts_before_that_of_the_sink() {
    for opcode in [Opcode::Read, Opcode::FetchAdd] {
        let mut pair = Pair::new();
        let target = pair.b.filled(&[5; 8]);
        let bad = sge(0, 8, 0x7777);
        let work = match opcode {
            Opcode::Read => Work::read(1, target.stag ^ 1, target.base),
            _ => fetch_add(1, target.stag ^ 1, target.base, 1),
        };
        pair.a.post(&work.sge(bad));
        pair.run_now();
        assert_eq!(pair.a.sent(), [(1, WcStatus::RemAccessErr)]);
        assert_eq!(target.bytes(), [5; 8]);
    }
}

#[test]
fn vrb_m_02_a_read_sink_needs_only_local_write() {
    let mut pair = Pair::new();
    let source = pair.b.filled(b"abcdefgh");
    let sink = pair.a.region(8, Access::LOCAL_WRITE);
    pair.a
        .post(&Work::read(1, source.stag, source.base).sge(sink.sge(0, 8)));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS)]);
    assert_eq!(sink.bytes(), *b"abcdefgh");
    pair.b.post(&Work::write(2, sink.stag, sink.base).inline(b"x"));
    pair.run_now();
    assert_eq!(pair.a.faults(), [(QpFault::TerminateSent, 0x0102_c000)]);
}

#[test]
fn vrb_m_03_windows_are_bound_by_work_requests() {
    let mut pair = Pair::new();
    let region = pair.a.region(64, everything());
    let window = pair.a.memory.create_window(pair.a.pd, true).unwrap();
    let mut operands = BindOperands::new_zeroed();
    operands.offset = (region.base + 8).into();
    operands.len = 8.into();
    operands.mr_stag = region.stag.into();
    operands.access = Access::REMOTE_WRITE.bits().into();
    operands.new_stag = window.into();
    pair.a.post(&Work::new(Opcode::BindMw, 1).bind(operands));
    pair.a.post(&Work::send(2));
    pair.b.post_recv(1, &[]);
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    pair.b
        .post(&Work::write(3, window, region.base + 8).inline(b"window"));
    pair.run_now();
    assert_eq!(region.bytes()[8..14], *b"window");
    operands.len = 1000.into();
    operands.new_stag = (window ^ 1).into();
    pair.a.post(&Work::new(Opcode::BindMw, 4).bind(operands));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(4, WcStatus::MwBindErr)]);
}

#[test]
fn vrb_m_06_inline_data_needs_no_stag_and_may_wrap_the_ring() {
    let shape = Shape {
        sq_log: 4,
        ..Shape::default()
    };
    let mut pair = Pair::with(&shape, Conditions::default(), agreed(true), agreed(false));
    let sink = pair.b.region(1000, everything());
    for n in 0..40 {
        let data = &pattern(700)[..700 - n as usize];
        pair.b.post_recv(n, &[sink.sge(0, 1000)]);
        pair.a.post(&Work::send(n).inline(data));
        pair.run_now();
        assert_eq!(pair.b.received(), [(n, SUCCESS, 700 - n as u32)]);
        assert_eq!(sink.bytes()[..data.len()], *data);
    }
}

#[test]
fn vrb_m_07_zero_length_elements_are_not_checked() {
    let mut pair = Pair::new();
    let (source, sink) = (pair.a.filled(b"abcd"), pair.b.region(8, everything()));
    pair.b.post_recv(
        1,
        &[
            sge(0, 0, 0xdead),
            sink.sge(0, 2),
            sge(1, 0, 0xbeef),
            sink.sge(4, 2),
        ],
    );
    pair.a.post(
        &Work::send(1)
            .sge(sge(77, 0, 0x1234))
            .sge(source.sge(0, 4))
            .sge(sge(0, 0, 0)),
    );
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, SUCCESS, 4)]);
    assert_eq!(sink.bytes(), *b"ab\0\0cd\0\0");
}

#[test]
fn vrb_r_01_a_read_without_ord_is_an_error() {
    let mut peer = Scripted::with(
        &Shape::default(),
        Attachment {
            ord: 0,
            ..agreed(true)
        },
    );
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.run();
    assert_eq!(peer.node.sent(), [(1, WcStatus::LocQpOpErr)]);
    assert_eq!(peer.node.faults(), [(QpFault::LocalWork, 0)]);
}

/// Two queue pairs, 8 and 9, with one shared receive queue.
fn sharing() -> (Receives, [Scripted; 2]) {
    let (receives, queue) = Receives::new(6);
    let (memory, pd) = table();
    let shared = Arc::new(SharedReceiveQueue::new(3, pd, 0, queue));
    let ends = [8, 9].map(|qid| {
        let shape = Shape {
            qid,
            shared: Some(shared.clone()),
            ..Shape::default()
        };
        Scripted::on(&shape, agreed(true), memory.clone(), pd)
    });
    (receives, ends)
}

#[test]
fn vrb_s_01_a_shared_queue_serves_in_arrival_order() {
    let (mut receives, [mut one, mut two]) = sharing();
    let region = one.node.region(64, everything());
    for n in 0..3 {
        receives.post(n, &[region.sge(n as usize * 8, 8)]);
    }
    one.send_ulpdu(&send_segment(false, 1, 0, b"on"));
    two.send_ulpdu(&send_segment(true, 1, 0, b"two"));
    one.send_ulpdu(&send_segment(true, 1, 2, b"e"));
    assert_eq!(one.node.received(), [(0, SUCCESS, 3)]);
    assert_eq!(two.node.received(), [(1, SUCCESS, 3)]);
    // An error of one queue pair does not flush the shared queue.
    one.rst();
    assert!(one.node.received().is_empty());
    assert!(one.node.has_event(EventKind::LastWqe));
    two.send_ulpdu(&send_segment(true, 2, 0, b"still"));
    assert_eq!(two.node.received(), [(2, SUCCESS, 5)]);
    two.send_ulpdu(&send_segment(true, 3, 0, b"empty"));
    assert_eq!(two.terminate()[..2], [0x12, 0x02]);
}

/// The program can detect a peer that takes more than its share: each completion names its queue
/// pair, which also counts its messages. Messages that a peer begins and does not end hold one
/// receive.
#[test]
fn sec_13_what_each_peer_takes_of_shared_receives_can_be_told() {
    let (mut receives, [mut greedy, mut modest]) = sharing();
    let region = greedy.node.region(64, everything());
    (0..8).for_each(|n| receives.post(n, &[region.sge(0, 64)]));
    for msn in 1..=5 {
        greedy.send_ulpdu(&send_segment(true, msn, 0, b"x"));
    }
    // A message without an end, and others in between are an error of the peer.
    for mo in 0..10 {
        greedy.send_ulpdu(&send_segment(false, 6, mo, b"y"));
    }
    for msn in 1..=2 {
        modest.send_ulpdu(&send_segment(true, msn, 0, b"z"));
    }
    for (peer, qid, messages) in [(&mut greedy, 8, 5), (&mut modest, 9, 2)] {
        let seen: Vec<_> = std::iter::from_fn(|| peer.node.recv_cq.poll())
            .map(|cqe| (status(&cqe), cqe.qid.get()))
            .collect();
        assert_eq!(seen, vec![(SUCCESS, qid); messages]);
        assert_eq!(peer.node.count(Counter::RxMessages), messages as u64);
    }
    greedy.node.set_state(QpState::Err);
    assert_eq!(greedy.node.received(), [(5, WcStatus::WrFlushErr, 0)]);
    assert_eq!(modest.node.engine.state(), QpState::Rts);
}

#[test]
fn vrb_s_01_a_queue_pair_that_never_had_a_stream_takes_its_last_entry() {
    let (_receives, queue) = Receives::new(6);
    let (memory, pd) = table();
    let shape = Shape {
        shared: Some(Arc::new(SharedReceiveQueue::new(3, pd, 0, queue))),
        ..Shape::default()
    };
    let mut node = Node::new(&shape, memory, pd, &Arc::default());
    node.set_state(QpState::Err);
    node.set_state(QpState::Err);
    let last = |event: &&Event| event.kind == EventKind::LastWqe as u8;
    assert_eq!(node.events.iter().filter(last).count(), 1);
}

#[test]
fn vrb_s_01_the_limit_is_reported_once_for_each_arming() {
    let (mut receives, queue) = Receives::new(6);
    let (memory, pd) = table();
    let shared = Arc::new(SharedReceiveQueue::new(3, pd, 0, queue));
    let shape = Shape {
        shared: Some(shared.clone()),
        ..Shape::default()
    };
    let mut peer = Scripted::on(&shape, agreed(true), memory, pd);
    let region = peer.node.region(64, everything());
    (0..8).for_each(|n| receives.post(n, &[region.sge(0, 8)]));
    let mut take = |msn, expected: usize| {
        peer.send_ulpdu(&send_segment(true, msn, 0, b"x"));
        let is_limit = |event: &&Event| event.kind == EventKind::SrqLimit as u8;
        assert_eq!(
            peer.node.events.iter().filter(is_limit).count(),
            expected,
            "message {msn}"
        );
    };
    let mut at_once = Effects::default();
    // Of eight receives, fewer than seven are left after the second message; then no limit is
    // armed.
    shared.arm_limit(7, &mut at_once);
    for (msn, expected) in [(1, 0), (2, 1), (3, 1), (4, 1)] {
        take(msn, expected);
    }
    shared.arm_limit(3, &mut at_once);
    for (msn, expected) in [(5, 1), (6, 2), (7, 2)] {
        take(msn, expected);
    }
    assert!(at_once.is_empty());
    // The queue is below the limit already.
    shared.arm_limit(3, &mut at_once);
    assert_eq!(at_once.into_list().len(), 1);
    take(8, 2);
}

/// A stream that reports unmapped memory after this number of bytes.
#[derive(Debug)]
struct Faulty(Box<dyn Stream>, usize);

impl Wrapper for Faulty {
    fn inner(&self) -> &dyn Stream {
        &*self.0
    }

    fn inner_mut(&mut self) -> &mut Box<dyn Stream> {
        &mut self.0
    }

    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        if self.1 == 0 {
            return Err(StreamError::Fault);
        }
        let taken = self.0.send(&[pieces[0].first(self.1)])?;
        self.1 -= taken;
        Ok(taken)
    }
}

#[test]
fn memory_unmapped_before_it_is_sent_is_a_local_error() {
    let clock = Arc::new(AtomicU64::new(0));
    let (ours, _peer, wire) = pair(Conditions::default(), &clock);
    let (memory, pd) = table();
    let mut node = Node::new(&Shape::default(), memory, pd, &clock);
    node.attach(&agreed(true), Faulty(Box::new(ours), 0));
    let source = node.filled(&pattern(5000));
    node.post(&Work::send(1).sge(source.sge(0, 5000)));
    node.post(&Work::send(2));
    while node.pump() {}
    assert_eq!(node.sent(), [(1, WcStatus::LocProtErr), (2, FLUSHED)]);
    assert_eq!(node.faults(), [(QpFault::LocalWork, 0)]);
    assert!(wire.is_reset(), "nothing can follow half an FPDU");
}

/// The request also fails if its message is not completely framed.
#[test]
fn the_request_with_unmapped_memory_fails_not_the_oldest() {
    for len in [5000, 2 << 20] {
        let clock = Arc::new(AtomicU64::new(0));
        let (ours, _peer, wire) = pair(Conditions::default(), &clock);
        let (memory, pd) = table();
        let mut node = Node::new(&Shape::default(), memory, pd, &clock);
        // The Read's request, and a little of the Send.
        node.attach(&agreed(true), Faulty(Box::new(ours), 60));
        let source = node.filled(&pattern(len));
        node.post(&Work::read(1, 0x7777, 0).sge(source.sge(0, 8)));
        node.post(&Work::send(2).sge(source.sge(0, len)));
        node.post(&Work::send(3));
        while node.pump() {}
        assert_eq!(
            node.sent(),
            [(1, FLUSHED), (2, WcStatus::LocProtErr), (3, FLUSHED)]
        );
        assert!(wire.is_reset(), "nothing can follow half an FPDU");
    }
}

#[test]
fn unmapped_memory_is_reported_after_what_has_arrived() {
    for peer_may_close in [true, false] {
        let clock = Arc::new(AtomicU64::new(0));
        let (ours, mut peer, _wire) = pair(Conditions::default(), &clock);
        let (memory, pd) = table();
        let mut node = Node::new(&Shape::default(), memory, pd, &clock);
        let attachment = Attachment {
            delivered: true,
            peer_may_close,
            ..agreed(true)
        };
        let before = [
            send_segment(true, 1, 0, b"message"),
            read_request(1, (1, 0), 0, (1, 0)),
        ];
        let taken = before.map(|ulpdu| fpdu_of(&ulpdu).len()).iter().sum();
        node.attach(&attachment, Faulty(Box::new(ours), taken));
        node.post(&Work::send(1).inline(b"message"));
        while node.pump() {}
        // The answer to the Read that confirms the request, and FIN.
        let answer = fpdu_of(&tagged(0xc1, 0x42, 1, 0, b""));
        assert_eq!(peer.send(&[Piece::of(&answer)]), Ok(answer.len()));
        peer.finish();
        clock.fetch_add(1_000_000, Ordering::Relaxed);
        let source = node.filled(&pattern(5000));
        node.post(&Work::send(2).sge(source.sge(0, 5000)));
        node.with(|engine, env, stream| engine.transmit(env, stream));
        assert_eq!(node.sent(), [(1, SUCCESS), (2, WcStatus::LocProtErr)]);
        assert_eq!(node.faults(), [(QpFault::LocalWork, 0)]);
    }
}

#[test]
fn malformed_entries_end_the_queue_pair() {
    let mut peer = Scripted::new();
    peer.node.post(&Work::send(1).inline(b"well"));
    let mut block = [0xff; 64];
    block[8..16].copy_from_slice(&2u64.to_le_bytes());
    peer.node.post_raw(&block);
    peer.node.post(&Work::send(3));
    peer.run();
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, WcStatus::LocQpOpErr)]);
    assert_eq!(peer.node.faults(), [(QpFault::LocalWork, 0)]);
    assert_eq!(peer.node.sq_outstanding(), 0);

    let mut peer = Scripted::new();
    peer.node.receives.post_malformed(5);
    peer.send_ulpdu(&send_segment(true, 1, 0, b"x"));
    assert_eq!(peer.terminate()[..2], [0x10, 0x00]);
    assert_eq!(peer.node.received(), [(5, WcStatus::LocQpOpErr, 0)]);
}

#[test]
fn a_failed_message_ends_after_its_last_good_segment() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(2000));
    let work = Work::send(1).sge(source.sge(0, 2000)).sge(sge(5, 100, 0x7777));
    peer.node.post(&work);
    peer.node.post(&Work::send(2));
    let ulpdus = peer.output_ulpdus();
    assert_eq!(ulpdus.len(), 2);
    assert_eq!(ulpdus[0][..2], [0x01, 0x43]);
    assert_eq!(ulpdus[1][..2], [0x41, 0x47]);
    assert_eq!(peer.node.sent(), [(1, WcStatus::LocProtErr), (2, FLUSHED)]);
}
