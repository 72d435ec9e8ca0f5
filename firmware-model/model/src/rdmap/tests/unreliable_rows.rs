//! Queue pairs of kind UC: the messages that are dropped, and the state that outlives the stream.

use super::{Pair, Scripted};
use crate::counters::Counter;
use crate::queues::SharedReceiveQueue;
use crate::rdmap::{Attachment, WithoutReceive};
use crate::testing::rig::*;
use crate::testing::sim::{self, Conditions};
use crate::transport::QpChange;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use urnic_device::cqe::CqeFlags;
use urnic_device::event::{EventKind, QpFault};
use urnic_device::vocabulary::{Access, QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, Sge};

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

fn shape() -> Shape {
    Shape {
        access: Access::REMOTE_WRITE,
        unreliable: true,
        ..Shape::default()
    }
}

/// The parameters of native connections of this kind.
fn attachment(initiator: bool) -> Attachment {
    Attachment {
        without_receive: WithoutReceive::Refused,
        peer_may_close: false,
        ord: 0,
        ird: 0,
        ..native(initiator)
    }
}

fn pair_with(conditions: Conditions, crc: bool) -> Pair {
    let with = |initiator| Attachment {
        crc,
        ..attachment(initiator)
    };
    let mut pair = Pair::with(&shape(), conditions, with(true), with(false));
    pair.run_now();
    pair
}

fn pair() -> Pair {
    pair_with(Conditions::default(), true)
}

/// A long message takes many segments.
fn small_segments() -> Conditions {
    Conditions {
        mss: 1460,
        ..Conditions::default()
    }
}

/// Another stream takes the place of the one that ended.
fn connect_again(pair: &mut Pair) {
    let (left, right, wire) = sim::pair(Conditions::default(), &pair.clock);
    pair.a.attach(&attachment(true), left);
    pair.b.attach(&attachment(false), right);
    pair.wire = wire;
    pair.run_now();
}

/// A scripted peer that has opened the fence.
fn scripted() -> Scripted {
    let mut peer = Scripted::with(&shape(), attachment(false));
    peer.send_ulpdu(&write_segment(1, 0, &[]));
    peer
}

#[test]
fn uc_01_a_message_without_a_receive_is_dropped() {
    for crc in [true, false] {
        let mut pair = pair_with(Conditions::default(), crc);
        let sink = pair.b.region(200_000, everything());
        let long = pair.a.filled(&pattern(100_000));
        pair.a.post(&Work::send(1).inline(b"lost"));
        pair.a.post(&Work::send(2).sge(long.sge(0, 100_000)));
        pair.a.post(
            &Work::new(Opcode::SendImm, 3)
                .immediate([1; 4])
                .inline(b"lost too"),
        );
        pair.a.post(
            &Work::new(Opcode::WriteImm, 4)
                .to(sink.stag, sink.base)
                .immediate([2; 4])
                .inline(b"placed"),
        );
        pair.run_now();
        assert_eq!(
            pair.a.sent(),
            [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS), (4, SUCCESS)]
        );
        assert!(pair.b.received().is_empty());
        assert_eq!(pair.b.count(Counter::RxMessageDrops), 4);
        // The immediate finds no receive; the data of its Write is placed.
        assert_eq!(&sink.bytes()[..6], b"placed");
        pair.b.post_recv(9, &[sink.sge(1000, 150_000)]);
        pair.a.post(&Work::send(5).sge(long.sge(0, 100_000)));
        pair.run_now();
        assert_eq!(pair.b.received(), [(9, SUCCESS, 100_000)]);
        assert_eq!(sink.bytes()[1000..101_000], pattern(100_000)[..]);
        assert!(pair.b.faults().is_empty() && pair.a.faults().is_empty());
        assert_eq!(pair.b.engine.state(), QpState::Rts);
    }
}

#[test]
fn uc_02_a_receive_that_is_too_short_takes_the_next_message() {
    for crc in [true, false] {
        let mut pair = pair_with(Conditions::default(), crc);
        let sink = pair.b.region(40_000, everything());
        let long = pair.a.filled(&pattern(100_000));
        pair.b
            .post_recv(1, &[sink.sge(0, 20_000), sink.sge(20_000, 20_000)]);
        pair.b.post_recv(2, &[sink.sge(0, 4)]);
        for (cookie, len) in [(1, 40_001), (2, 100_000), (3, 40_000), (4, 5), (5, 4)] {
            pair.a.post(&Work::send(cookie).sge(long.sge(0, len)));
        }
        pair.run_now();
        assert_eq!(pair.b.received(), [(1, SUCCESS, 40_000), (2, SUCCESS, 4)]);
        assert_eq!(pair.b.count(Counter::RxMessageDrops), 3);
        assert_eq!(pair.a.sent().len(), 5);
        assert!(pair.b.faults().is_empty());
        // A reserved receive is flushed like the others.
        pair.b.post_recv(3, &[sink.sge(0, 4)]);
        pair.a.post(&Work::send(6).sge(long.sge(0, 5)));
        pair.run_now();
        pair.b.set_state(QpState::Err);
        assert_eq!(pair.b.received(), [(3, FLUSHED, 0)]);
    }
}

#[test]
fn uc_03_a_refused_write_is_dropped_with_its_immediate() {
    for crc in [true, false] {
        let mut pair = pair_with(Conditions::default(), crc);
        let (open, read_only) = (
            pair.b.region(100_000, everything()),
            pair.b.region(100_000, Access::REMOTE_READ),
        );
        let data = pair.a.filled(&pattern(100_000));
        pair.b.post_recv(1, &[]);
        let write = |cookie, opcode, stag, to| {
            Work::new(opcode, cookie)
                .to(stag, to)
                .immediate([cookie as u8; 4])
                .sge(data.sge(0, 60_000))
        };
        let refused = [
            (read_only.stag, read_only.base),
            (open.stag, open.base + 50_000),
            (open.stag ^ 0x100, open.base),
        ];
        for (stag, to) in refused {
            pair.a.post(&write(1, Opcode::WriteImm, stag, to));
            pair.a.post(&write(2, Opcode::Write, stag, to));
        }
        pair.a
            .post(&write(7, Opcode::WriteImm, open.stag, open.base + 40_000));
        pair.run_now();
        assert_eq!(pair.b.count(Counter::RxMessageDrops), 6);
        let cqe = pair.b.recv_cq.poll().expect("the last one is delivered");
        assert_eq!(opcode(&cqe), WcOpcode::RecvRdmaWithImm);
        assert_eq!((cqe.byte_len.get(), cqe.extra), (60_000, [7; 4]));
        assert_eq!(open.bytes()[40_000..], pattern(100_000)[..60_000]);
        assert_eq!(read_only.bytes(), vec![0; 100_000]);
        assert!(pair.b.faults().is_empty() && pair.a.faults().is_empty());
        assert_eq!(pair.a.sent().len(), 7);
    }
}

#[test]
fn uc_03_memory_that_goes_within_a_write_drops_it() {
    let mut peer = scripted();
    let sink = peer.node.region(100, everything());
    peer.node.post_recv(1, &[]);
    peer.send_ulpdu(&tagged(0x81, 0x40, sink.stag, sink.base, b"first"));
    peer.node.memory.deregister(sink.stag).unwrap();
    peer.send_ulpdu(&write_segment(sink.stag, sink.base + 5, b"second"));
    let immediate = |msn| untagged(0x41, 0x48, 0, 0, msn, 0, &[1, 2, 3, 4, 0, 0, 0, 0]);
    peer.send_ulpdu(&immediate(1));
    assert_eq!(peer.node.count(Counter::RxMessageDrops), 1);
    assert!(peer.node.received().is_empty());
    // A Send in between: the Immediate after it belongs to another Write.
    peer.send_ulpdu(&write_segment(sink.stag, sink.base, b"x"));
    peer.send_ulpdu(&send_segment(true, 2, 0, b""));
    peer.send_ulpdu(&immediate(3));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 0)]);
    assert_eq!(peer.node.count(Counter::RxMessageDrops), 3, "no receive for it");
    assert!(peer.output().is_empty() && !peer.finished);
}

#[test]
fn uc_04_messages_arrive_as_with_kind_rc() {
    let mut pair = pair();
    let sink = pair.b.region(1000, everything());
    for n in 0..3 {
        pair.b.post_recv(n, &[sink.sge(100 * n as usize, 100)]);
    }
    pair.a.post(&Work::send(1).inline(b"send"));
    pair.a
        .post(&Work::new(Opcode::SendImm, 2).immediate(*b"imm1").inline(b"with"));
    pair.a
        .post(&Work::write(3, sink.stag, sink.base + 500).inline(b"write"));
    pair.a.post(
        &Work::new(Opcode::WriteImm, 4)
            .to(sink.stag, sink.base + 600)
            .immediate(*b"imm2")
            .inline(b"both"),
    );
    pair.run_now();
    let received: Vec<_> = std::iter::from_fn(|| pair.b.recv_cq.poll())
        .map(|cqe| (opcode(&cqe), cqe.byte_len.get(), cqe.flags, cqe.extra))
        .collect();
    let imm = CqeFlags::WITH_IMM.bits();
    assert_eq!(
        received,
        [
            (WcOpcode::Recv, 4, 0, [0; 4]),
            (WcOpcode::Recv, 4, imm, *b"imm1"),
            (WcOpcode::RecvRdmaWithImm, 4, imm, *b"imm2")
        ]
    );
    assert_eq!(&sink.bytes()[500..505], b"write");
    assert_eq!(&sink.bytes()[600..604], b"both");
    assert_eq!(pair.a.sent().len(), 4);
    assert_eq!(pair.b.count(Counter::RxMessageDrops), 0);
}

#[test]
fn uc_04_reads_and_atomics_are_refused_at_both_ends() {
    for opcode in [Opcode::Read, Opcode::FetchAdd, Opcode::CompareSwap] {
        let mut pair = pair();
        let sink = pair.a.region(8, everything());
        let work = match opcode {
            Opcode::Read => Work::read(1, 5, 0),
            _ => Work::new(opcode, 1).to(5, 0).atomic(1, 1),
        };
        pair.a.post(&work.sge(sink.sge(0, 8)));
        pair.run_now();
        assert_eq!(pair.a.sent(), [(1, WcStatus::LocQpOpErr)]);
        assert_eq!(pair.a.engine.state(), QpState::Sqe);
    }
    let mut peer = scripted();
    peer.send_ulpdu(&read_request(1, (1, 0), 8, (1, 0)));
    assert_eq!(peer.node.count(Counter::TxTerminates), 1);
    assert_eq!(peer.node.engine.state(), QpState::Rts);
    // Confirmations are not accepted either: they differ from answers only by their offset.
    let mut peer = scripted();
    peer.send_ulpdu(&tagged(0xc1, 0x42, 1, 100, b""));
    assert_eq!(peer.node.count(Counter::TxTerminates), 1);
}

#[test]
fn uc_05_a_request_completes_when_it_is_sent() {
    // Nothing is confirmed: the peer does not even read.
    let mut peer = scripted();
    peer.output();
    peer.node.post(&Work::send(1).inline(b"hello"));
    while peer.node.pump() {}
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    assert_eq!(
        peer.output_ulpdus(),
        [send_segment(true, 1, 0, b"hello")],
        "and no Read"
    );
}

#[test]
fn uc_05_without_a_stream_messages_are_dropped() {
    let mut pair = pair();
    let data = pair.a.filled(&pattern(100_000));
    pair.wire.reset();
    pair.run_now();
    for n in 0..3 {
        pair.a.post(&Work::send(n).sge(data.sge(0, 100_000)));
    }
    pair.run_now();
    assert_eq!(pair.a.sent(), [(0, SUCCESS), (1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(pair.a.count(Counter::TxMessageDrops), 3);
    assert_eq!(pair.a.sq_outstanding(), 0);
    // More than one run drops, and then a stream.
    let sink = pair.b.region(100_000, everything());
    pair.b.post_recv(1, &[sink.sge(0, 100_000)]);
    connect_again(&mut pair);
    pair.a.post(&Work::send(4).sge(data.sge(0, 100_000)));
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, SUCCESS, 100_000)]);
    assert_eq!(sink.bytes(), pattern(100_000));
}

#[test]
fn uc_06_a_lost_stream_leaves_the_queue_pair_as_it_is() {
    let mut pair = pair_with(small_segments(), true);
    let sink = pair.b.region(100_000, everything());
    let data = pair.a.filled(&pattern(100_000));
    pair.b.post_recv(1, &[sink.sge(0, 100_000)]);
    pair.b.post_recv(2, &[sink.sge(0, 100)]);
    // The stream ends within a message, with parts of it in flight and in the queue.
    pair.wire.set_capacity(0, 20_000);
    pair.a.post(&Work::send(1).sge(data.sge(0, 100_000)));
    pair.a.post(&Work::send(2).sge(data.sge(0, 100)));
    while pair.b.count(Counter::RxFpdus) < 3 {
        assert!(pair.step());
    }
    assert!(pair.a.sent().is_empty());
    pair.wire.reset();
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(pair.a.count(Counter::TxMessageDrops), 2);
    assert_eq!(pair.b.count(Counter::RxMessageDrops), 1);
    for node in [&pair.a, &pair.b] {
        assert!(node.faults().is_empty());
        assert!(node.has_event(EventKind::Closed));
        assert_eq!(node.engine.state(), QpState::Rts);
        assert!(!node.engine.is_attached());
    }
    connect_again(&mut pair);
    pair.a.post(&Work::send(3).sge(data.sge(0, 100_000)));
    pair.a.post(&Work::send(4).sge(data.sge(0, 10)));
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, SUCCESS, 100_000), (2, SUCCESS, 10)]);
}

#[test]
fn uc_06_what_an_earlier_stream_took_waits_for_nothing() {
    let mut pair = pair();
    pair.a.modify(QpChange {
        ack_timeout: Some(Duration::from_secs(2)),
        ..QpChange::default()
    });
    pair.a.post(&Work::send(1).inline(b"message"));
    pair.run_now();
    pair.wire.reset();
    pair.run_now();
    connect_again(&mut pair);
    assert_eq!(pair.a.deadline(), None, "the peer is not watched");
    pair.a.post(&Work::send(2).inline(b"message"));
    pair.run_now();
    assert!(pair.a.deadline().is_some());
}

#[test]
fn uc_06_a_peers_fin_and_terminate_leave_the_queue_pair_as_it_is() {
    let mut peer = scripted();
    let sink = peer.node.region(100, everything());
    peer.node.post_recv(1, &[sink.sge(0, 100)]);
    peer.fin();
    assert!(peer.finished, "our FIN");
    let mut other = scripted();
    other.node.post_recv(1, &[]);
    other.send_ulpdu(&untagged(0x41, 0x47, 0, 2, 1, 0, &[0x01, 0x01, 0, 0]));
    other.fin();
    assert_eq!(other.node.count(Counter::RxTerminates), 1);
    for mut peer in [peer, other] {
        assert_eq!(peer.node.engine.state(), QpState::Rts);
        assert!(peer.node.received().is_empty() && peer.node.faults().is_empty());
        assert!(peer.node.has_event(EventKind::Closed));
        peer.node.post(&Work::send(1).inline(b"to nobody"));
        peer.run();
        assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
        // Only the program ends the queue pair.
        peer.node.set_state(QpState::Err);
        assert_eq!(peer.node.received(), [(1, FLUSHED, 0)]);
    }
}

#[test]
fn uc_07_a_request_that_fails_stops_the_send_queue() {
    let mut pair = pair();
    let sink = pair.b.region(100, everything());
    let data = pair.a.filled(&pattern(100_000));
    for n in 0..4 {
        pair.b.post_recv(n, &[sink.sge(0, 100)]);
    }
    pair.a.post_recv(5, &[data.sge(0, 100)]);
    pair.a.post(&Work::send(1).inline(b"before"));
    pair.a
        .post(&Work::send(2).sge(sge(data.base, 8, data.stag ^ 0x100)));
    pair.a.post(&Work::send(3).inline(b"latter").unsignaled());
    pair.run_now();
    assert_eq!(
        pair.a.sent(),
        [(1, SUCCESS), (2, WcStatus::LocProtErr), (3, FLUSHED)]
    );
    assert_eq!(pair.a.engine.state(), QpState::Sqe);
    pair.a.post(&Work::send(4).inline(b"flushed"));
    pair.b.post(&Work::send(1).inline(b"received"));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(4, FLUSHED)]);
    assert_eq!(pair.a.received(), [(5, SUCCESS, 8)]);
    pair.a.set_state(QpState::Rts);
    pair.a.post(&Work::send(6).inline(b"again"));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(6, SUCCESS)]);
    assert_eq!(pair.b.received(), [(0, SUCCESS, 6), (1, SUCCESS, 5)]);
    assert!(pair.a.faults().is_empty() && pair.b.faults().is_empty());
    // The same happens without a stream.
    pair.wire.reset();
    pair.run_now();
    pair.a
        .post(&Work::send(7).sge(sge(data.base, 8, data.stag ^ 0x100)));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(7, WcStatus::LocProtErr)]);
    assert_eq!(pair.a.engine.state(), QpState::Sqe);
}

#[test]
fn uc_07_a_message_sent_in_part_does_not_run_into_the_next() {
    let mut pair = pair_with(small_segments(), true);
    let sink = pair.b.region(100_000, everything());
    let data = pair.a.filled(&pattern(50_000));
    pair.b.post_recv(1, &[sink.sge(0, 100_000)]);
    let bad = sge(data.base, 50_000, data.stag ^ 0x100);
    pair.a.post(&Work::send(1).sge(data.sge(0, 50_000)).sge(bad));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, WcStatus::LocProtErr)]);
    assert_eq!(pair.a.engine.state(), QpState::Sqe);
    assert!(!pair.a.engine.is_attached() && !pair.b.engine.is_attached());
    assert!(pair.b.received().is_empty());
    pair.a.set_state(QpState::Rts);
    connect_again(&mut pair);
    pair.a.post(&Work::send(2).sge(data.sge(0, 50_000)));
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, SUCCESS, 50_000)]);
    assert_eq!(sink.bytes()[..50_000], pattern(50_000)[..]);
}

#[test]
fn uc_08_faults_of_the_wire_end_the_stream_only() {
    let damaged = {
        let mut fpdu = fpdu_of(&send_segment(true, 1, 0, b"x"));
        fpdu[3] ^= 1;
        fpdu
    };
    let faults = [
        damaged,
        fpdu_of(&send_segment(true, 7, 0, b"wrong MSN")),
        fpdu_of(&send_segment(true, 1, 5, b"wrong MO")),
        fpdu_of(&untagged(0x41, 0x4f, 0, 0, 1, 0, b"no such opcode")),
    ];
    // SCTP drops a damaged packet.
    for fault in &faults[usize::from(!Scripted::HAS_FPDUS)..] {
        let mut peer = scripted();
        peer.node.post_recv(1, &[]);
        peer.send(fault);
        assert_eq!(peer.node.count(Counter::TxTerminates), 1);
        assert!(peer.finished);
        peer.fin();
        assert_eq!(peer.node.engine.state(), QpState::Rts);
        assert!(!peer.node.engine.is_attached());
        assert!(peer.node.faults().is_empty() && peer.node.received().is_empty());
        assert!(peer.node.has_event(EventKind::Closed));
    }
}

#[test]
fn uc_08_a_receive_in_wrong_memory_is_a_fault_of_its_program() {
    let mut peer = scripted();
    peer.node.post_recv(1, &[sge(4096, 100, 0x7777_7700)]);
    peer.send_ulpdu(&send_segment(true, 1, 0, b"x"));
    peer.fin();
    assert_eq!(peer.node.received(), [(1, WcStatus::LocProtErr, 0)]);
    assert_eq!(peer.node.engine.state(), QpState::Err);
    assert_eq!(peer.node.faults()[0].0, QpFault::TerminateSent);
}

/// An event at a pair of queue pairs, in the property below.
#[derive(Debug, Clone)]
enum Step {
    Receive(usize),
    Send { len: usize, immediate: bool },
    Write { allowed: bool, immediate: bool },
    Lose,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![Just(0usize), 1..100usize, 1000..5000usize];
    prop_oneof![
        4 => len.clone().prop_map(Step::Receive),
        4 => (len, any::<bool>()).prop_map(|(len, immediate)| Step::Send { len, immediate }),
        3 => any::<(bool, bool)>().prop_map(|(allowed, immediate)| Step::Write { allowed, immediate }),
        1 => Just(Step::Lose),
    ]
}

proptest! {
    /// A message is delivered whole into the receive that it finds, or dropped whole and counted.
    #[test]
    fn uc_09_messages_are_delivered_or_dropped_whole(
        steps in prop::collection::vec(step(), 1..40),
        crc in any::<bool>(),
    ) {
        let mut pair = pair_with(Conditions::default(), crc);
        let sink = pair.b.region(5000, everything());
        let memory = pair.b.region(100, everything());
        let data = pair.a.filled(&pattern(5000));
        let mut receives: VecDeque<(u64, usize)> = VecDeque::new();
        let (mut expected, mut dropped, mut sent) = (Vec::new(), 0, 0);
        for (at, step) in (0u64..).zip(&steps) {
            let message = |opcode, len| Work::new(opcode, at).immediate([at as u8; 4]).sge(data.sge(0, len));
            match *step {
                Step::Receive(len) => {
                    pair.b.post_recv(at, &[sink.sge(0, len)]);
                    receives.push_back((at, len));
                    continue;
                }
                Step::Lose => {
                    pair.wire.reset();
                    pair.run_now();
                    connect_again(&mut pair);
                    continue;
                }
                Step::Send { len, immediate } => {
                    let opcode = if immediate { Opcode::SendImm } else { Opcode::Send };
                    pair.a.post(&message(opcode, len));
                    if receives.front().is_some_and(|(_, room)| len <= *room) {
                        let (cookie, _) = receives.pop_front().unwrap();
                        expected.push((cookie, SUCCESS, len as u32));
                    } else {
                        dropped += 1;
                    }
                }
                Step::Write { allowed, immediate } => {
                    let opcode = if immediate { Opcode::WriteImm } else { Opcode::Write };
                    let stag = if allowed { memory.stag } else { memory.stag ^ 0x100 };
                    pair.a.post(&message(opcode, 50).to(stag, memory.base));
                    match (allowed, immediate, receives.front()) {
                        (true, true, Some((cookie, _))) => {
                            expected.push((*cookie, SUCCESS, 50));
                            receives.pop_front();
                        }
                        (false, ..) | (true, true, None) => dropped += 1,
                        (true, false, _) => {}
                    }
                }
            }
            sent += 1;
            pair.run_now();
        }
        prop_assert_eq!(pair.b.received(), expected);
        prop_assert_eq!(pair.b.count(Counter::RxMessageDrops), dropped);
        prop_assert_eq!(pair.a.sent().len(), sent);
        prop_assert_eq!(pair.a.engine.state(), QpState::Rts);
        prop_assert!(pair.a.faults().is_empty() && pair.b.faults().is_empty());
    }

    /// For all bytes of a peer: the queue pair stays in its state, work completes once, and memory
    /// that was not offered does not change.
    #[test]
    fn uc_10_a_hostile_peer_ends_no_queue_pair(
        ulpdus in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..10),
        noise in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let mut peer = scripted();
        let (open, private) = (peer.node.region(100, everything()), peer.node.region(100, everything()));
        for n in 0..4 {
            peer.node.post_recv(n, &[open.sge(0, 100)]);
        }
        peer.node.post(&Work::send(1).inline(b"hello"));
        for ulpdu in &ulpdus {
            if !peer.finished && !peer.wire.is_reset() {
                peer.send_ulpdu(ulpdu);
            }
        }
        if !peer.finished && !peer.wire.is_reset() {
            peer.send_noise(&noise);
        }
        peer.advance(Duration::from_secs(10));
        prop_assert_eq!(peer.node.engine.state(), QpState::Rts);
        prop_assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
        peer.node.set_state(QpState::Err);
        peer.run();
        let received: Vec<u64> = peer.node.received().iter().map(|r| r.0).collect();
        prop_assert_eq!(received, [0, 1, 2, 3]);
        prop_assert_eq!(private.bytes(), vec![0; 100]);
    }
}

#[test]
fn uc_14_a_shared_queue_supplies_messages() {
    let (mut receives, queue) = Receives::new(6);
    let (memory, pd) = table();
    let shared = Arc::new(SharedReceiveQueue::new(3, pd, 0, queue));
    let end = |qid| {
        let shape = Shape {
            qid,
            shared: Some(shared.clone()),
            ..shape()
        };
        let mut peer = Scripted::on(&shape, attachment(false), memory.clone(), pd);
        peer.send_ulpdu(&write_segment(1, 0, &[]));
        peer
    };
    let (mut one, mut two) = (end(8), end(9));
    let region = one.node.region(64, everything());
    one.send_ulpdu(&send_segment(true, 1, 0, b"no receive"));
    for n in 0..2 {
        receives.post(n, &[region.sge(0, 8)]);
    }
    one.send_ulpdu(&send_segment(true, 2, 0, b"too long for it"));
    two.send_ulpdu(&send_segment(true, 1, 0, b"fits"));
    two.send_ulpdu(&send_segment(true, 2, 0, b"no other"));
    one.send_ulpdu(&send_segment(true, 3, 0, b"fits too"));
    assert_eq!(one.node.received(), [(0, SUCCESS, 8)]);
    assert_eq!(two.node.received(), [(1, SUCCESS, 4)]);
    let dropped = [&one, &two].map(|peer| peer.node.count(Counter::RxMessageDrops));
    assert_eq!(dropped, [2, 1]);
    // A receive that a queue pair has taken is flushed with the queue pair.
    receives.post(2, &[region.sge(0, 8)]);
    one.send_ulpdu(&send_segment(true, 4, 0, b"too long for it"));
    one.node.set_state(QpState::Err);
    assert_eq!(one.node.received(), [(2, FLUSHED, 0)]);
}

/// A list with one element more than is possible.
fn malformed() -> Vec<Sge> {
    vec![Sge::default(); urnic_device::wqe::MAX_SGE + 1]
}

#[test]
fn uc_08_a_malformed_receive_is_a_fault_of_its_program() {
    let mut peer = scripted();
    peer.node.post_recv(1, &malformed());
    peer.send_ulpdu(&send_segment(true, 1, 0, b"x"));
    peer.fin();
    assert_eq!(peer.node.received(), [(1, WcStatus::LocQpOpErr, 0)]);
    assert_eq!(peer.node.engine.state(), QpState::Err);
}
