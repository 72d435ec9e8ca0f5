//! Completions that mean delivery: the requester learns from the answer to a Read (RFC 5040 §5.5),
//! or from a confirmation, that the messages before it are placed or delivered.

use super::{Pair, Scripted};
use crate::counters::Counter;
use crate::rdmap::{Attachment, WithoutReceive};
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use crate::tuning::CONFIRMED_MESSAGES;
use proptest::prelude::*;
use std::sync::atomic::Ordering;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::rdmap::{Terminate, TerminateError};

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

/// An initiator with one Read for the program and one for confirmations.
pub(super) fn delivered() -> Attachment {
    Attachment {
        delivered: true,
        spare_read: true,
        ord: 1,
        ord_limit: 2,
        ird: 1,
        ..agreed(true)
    }
}

fn scripted(attachment: Attachment) -> Scripted {
    Scripted::with(&Shape::default(), attachment)
}

/// A peer that answers Reads and does not confirm, and knows that this end takes confirmations.
fn informed() -> Scripted {
    let mut peer = scripted(delivered());
    peer.node.post(&write(0).unsignaled());
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    peer.send_ulpdu(&answer());
    peer
}

/// The source offset of Reads of length zero by which an end announces that it understands
/// confirmations.
const MARK: u64 = u64::from_be_bytes(*b"urnic\0\0\x02");

/// The Read of length zero with this MSN.
fn probe(msn: u32) -> Vec<u8> {
    read_request(msn, (1, 0), 0, (1, MARK))
}

/// The answer to a Read of length zero.
fn answer() -> Vec<u8> {
    tagged(0xc1, 0x42, 1, 0, b"")
}

fn write(cookie: u64) -> Work {
    Work::write(cookie, 0x100, cookie * 64).inline(&[cookie as u8; 8])
}

/// The peer's report on a Write that it refuses.
fn refusal(stag: u32, to: u64) -> Vec<u8> {
    let header = &write_segment(stag, to, b"")[..14];
    let terminate = Terminate {
        segment_length: Some(22),
        ddp_header: Some(header),
        ..Terminate::new(TerminateError::DdpBaseOrBounds)
    };
    let mut payload = [0; Terminate::MAX_LEN];
    let len = terminate.emit(&mut payload);
    untagged(0x41, 0x47, 0, 2, 1, 0, &payload[..len])
}

#[test]
fn vrb_c_07_requests_complete_with_the_answer_to_a_read() {
    let mut peer = scripted(delivered());
    let receives = peer.node.region(8, everything());
    for request in [write(1), Work::send(2), Work::new(Opcode::SendImm, 3)] {
        peer.node.post(&request);
    }
    let ulpdus = peer.output_ulpdus();
    assert_eq!(ulpdus.last(), Some(&probe(1)), "one Read after all of them");
    assert!(
        peer.node.sent().is_empty(),
        "the stream has taken them; that is not enough"
    );
    // Other messages of the peer confirm nothing.
    peer.node.post_recv(9, &[receives.sge(0, 8)]);
    peer.send_ulpdu(&send_segment(true, 1, 0, b"x"));
    assert!(peer.node.sent().is_empty());
    peer.send_ulpdu(&answer());
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS)]);
    assert!(peer.output().is_empty(), "nothing is unconfirmed");
}

#[test]
fn vrb_c_08_one_read_is_in_flight_and_the_next_confirms_all_others() {
    let mut peer = scripted(delivered());
    peer.node.post(&write(1));
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    for cookie in 2..5 {
        peer.node.post(&write(cookie));
        assert_eq!(peer.output_ulpdus().len(), 1, "only the Write");
    }
    peer.send_ulpdu(&answer());
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    assert_eq!(peer.output_ulpdus(), [probe(2)]);
    peer.send_ulpdu(&answer());
    assert_eq!(peer.node.sent(), [(2, SUCCESS), (3, SUCCESS), (4, SUCCESS)]);
    assert!(peer.output().is_empty());
}

#[test]
fn vrb_c_09_a_read_of_the_program_confirms_what_was_sent_before_it() {
    let mut peer = scripted(delivered());
    let sink = peer.node.region(8, everything());
    peer.node.post(&write(1));
    peer.node.post(&Work::read(2, 0x200, 0).sge(sink.sge(0, 8)));
    let ulpdus = peer.output_ulpdus();
    assert_eq!(ulpdus.len(), 2, "no other Read is needed: {ulpdus:02x?}");
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[7; 8]));
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn vrb_c_10_a_refusal_fails_the_request_that_it_names() {
    let mut peer = scripted(delivered());
    (1..5).for_each(|cookie| peer.node.post(&write(cookie)));
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    peer.send_ulpdu(&refusal(0x100, 3 * 64));
    let completions = [
        (1, SUCCESS),
        (2, SUCCESS),
        (3, WcStatus::RemAccessErr),
        (4, FLUSHED),
    ];
    assert_eq!(peer.node.sent(), completions);
}

#[test]
fn vrb_c_11_the_programs_reads_have_all_their_slots() {
    let mut peer = scripted(delivered());
    let sink = peer.node.region(16, everything());
    let read = |cookie: u64| Work::read(cookie, 0x200, 0).sge(sink.sge(0, 8));
    peer.node.post(&write(1));
    peer.node.post(&read(2).flags(SendFlags::FENCE));
    peer.node.post(&read(3));
    peer.run();
    let sizes: Vec<usize> = peer.output_ulpdus().iter().map(Vec::len).collect();
    // The Write and the Read: the second Read waits for the first, as without confirmations.
    assert_eq!(sizes.len(), 2, "{sizes:?}");
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[7; 8]));
    assert_eq!(peer.output_ulpdus().len(), 1);

    // The requester's own Read is in flight; the program's has its own slot, and no fence waits.
    let mut peer = scripted(delivered());
    let sink = peer.node.region(16, everything());
    peer.node.post(&write(1));
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    peer.node.post(
        &Work::read(2, 0x200, 0)
            .sge(sink.sge(0, 8))
            .flags(SendFlags::FENCE),
    );
    assert_eq!(peer.output_ulpdus().len(), 1);

    // A peer that accepts one Read gets one at a time.
    let mut peer = scripted(Attachment {
        ord_limit: 1,
        ..delivered()
    });
    let sink = peer.node.region(16, everything());
    peer.node.post(&write(1));
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    peer.node.post(&Work::read(2, 0x200, 0).sge(sink.sge(0, 8)));
    assert!(peer.output().is_empty());
    peer.send_ulpdu(&answer());
    assert_eq!(peer.output_ulpdus().len(), 1);
}

#[test]
fn vrb_c_12_without_any_read_requests_complete_when_taken() {
    let mut peer = scripted(Attachment {
        ord: 0,
        ord_limit: 0,
        ..delivered()
    });
    peer.node.post(&write(1));
    peer.run();
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    peer.node.post(&write(2));
    peer.run();
    assert_eq!(peer.node.sent(), [(2, SUCCESS)]);
    assert_eq!(peer.node.count(Counter::UnconfirmedConnections), 1);
}

#[test]
fn vrb_c_14_closing_waits_for_unsignaled_messages() {
    let mut peer = informed();
    peer.node.post(&write(1).unsignaled());
    assert_eq!(peer.output_ulpdus().len(), 1, "the program expects no completion");
    peer.node.set_state(QpState::Sqd);
    assert_eq!(peer.output_ulpdus(), [probe(2)]);
    assert!(!peer.finished, "the Write is unconfirmed");
    peer.send_ulpdu(&answer());
    assert!(peer.finished);
}

#[test]
fn vrb_c_15_unsignaled_messages_free_the_send_queue() {
    let mut peer = informed();
    let mut probes = 1;
    for cookie in 0..300 {
        peer.node.post(&write(cookie).unsignaled());
        let ulpdus = peer.output_ulpdus();
        if ulpdus.contains(&probe(probes + 1)) {
            probes += 1;
            assert!(peer.node.sq_room() > 0);
            peer.send_ulpdu(&answer());
        }
    }
    assert_eq!(probes, 3, "a Read for each half of a queue of 256 blocks");
}

#[test]
fn vrb_c_15_a_peer_learns_early_that_confirmations_are_taken() {
    let mut peer = scripted(delivered());
    peer.node.post(&write(1).unsignaled());
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    peer.send_ulpdu(&answer());
    peer.node.post(&write(2).unsignaled());
    assert_eq!(peer.output_ulpdus().len(), 1, "only the Write");
    // A Read of the program does not inform the peer.
    let mut peer = scripted(delivered());
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 0x200, 0).sge(sink.sge(0, 8)));
    assert_eq!(peer.output_ulpdus().len(), 1, "only the Read");
    peer.node.post(&write(2).unsignaled());
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(2)));
}

#[test]
fn vrb_c_16_a_responder_accepts_one_read_beyond_ird() {
    let two = |spare_read| {
        let attachment = Attachment {
            ird: 1,
            spare_read,
            ..agreed(false)
        };
        let mut peer = scripted(attachment);
        let frames = [1, 2].map(|msn| fpdu_of(&read_request(msn, (1, 0), 0, (1, 0))));
        peer.leave_open(&frames.concat());
        (peer.output_ulpdus(), peer.finished)
    };
    let (answers, finished) = two(true);
    assert_eq!((answers, finished), (vec![answer(), answer()], false));
    let (answers, finished) = two(false);
    assert!(
        finished,
        "a second Read at a time is one too many: {answers:02x?}"
    );
}

#[test]
fn vrb_c_17_bytes_in_the_answer_are_discarded() {
    for bytes in [1, 100, 30_000] {
        let mut peer = scripted(delivered());
        let region = peer.node.region(64, everything());
        peer.node.post(&write(1));
        peer.run();
        peer.send_ulpdu(&tagged(0xc1, 0x42, region.stag, region.base, &pattern(bytes)));
        assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
        assert_eq!(peer.node.engine.state(), QpState::Rts);
        assert_eq!(region.bytes(), [0; 64]);
    }
}

#[test]
fn large_amounts_are_confirmed_while_more_is_sent() {
    let mut peer = scripted(delivered());
    let source = peer.node.filled(&pattern(200 << 10));
    for cookie in 1..7 {
        let whole = source.sge(0, 200 << 10);
        peer.node.post(&Work::write(cookie, 0x100, 0).sge(whole));
    }
    let ulpdus = peer.output_ulpdus();
    let at = ulpdus.iter().position(|ulpdu| *ulpdu == probe(1));
    assert!(
        at.is_some_and(|at| at + 1 < ulpdus.len()),
        "a Read between the Writes"
    );
    peer.send_ulpdu(&answer());
    assert_eq!(peer.node.sent().len(), 2);
    assert_eq!(peer.output_ulpdus(), [probe(2)]);
    peer.send_ulpdu(&answer());
    assert_eq!(peer.node.sent().len(), 4);
}

/// A confirmation of all up to `position`.
pub(super) fn confirmation(position: u64) -> Vec<u8> {
    tagged(0xc1, 0x40, 0xc5, position, b"")
}

/// A responder whose peer has announced that it takes confirmations, and the position in the stream
/// after the announcement.
fn responder() -> (Scripted, u64) {
    let mut peer = scripted(Attachment {
        initiator: false,
        ..delivered()
    });
    let announcement = fpdu_of(&probe(1));
    peer.send(&announcement);
    let position = peer.advance_of(&announcement);
    assert_eq!(peer.output_ulpdus(), [confirmation(position), answer()]);
    (peer, position)
}

#[test]
fn vrb_c_23_a_confirmation_goes_in_front_of_the_next_message() {
    let (mut peer, before) = responder();
    peer.node.post_recv(1, &[]);
    let send = fpdu_of(&send_segment(true, 1, 0, b""));
    peer.leave_open(&send);
    peer.node.with(|engine, env, stream| engine.receive(env, stream));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 0)]);
    assert!(peer.node.engine.owes_confirmation());
    peer.node.post(&Work::send(2));
    peer.node.with(|engine, env, stream| engine.transmit(env, stream));
    let position = before + peer.advance_of(&send);
    assert_eq!(
        peer.output_ulpdus()[..2],
        [confirmation(position), send_segment(true, 1, 0, b"")]
    );
    assert_eq!(peer.node.count(Counter::TxConfirmations), 2);
}

#[test]
fn vrb_c_23_a_confirmation_goes_alone_when_nothing_more_arrives() {
    let (mut peer, before) = responder();
    let target = peer.node.region(8, everything());
    let write = fpdu_of(&write_segment(target.stag, target.base, &[7; 8]));
    peer.send(&write);
    let position = before + peer.advance_of(&write);
    assert_eq!(peer.output_ulpdus(), [confirmation(position)]);
    // A confirmation is not confirmed.
    peer.node.post(&Work::send(1));
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    peer.send_ulpdu(&answer());
    peer.send_ulpdu(&confirmation(1));
    assert!(peer.output().is_empty());
}

#[test]
fn vrb_c_23_a_confirmation_goes_alone_when_much_has_arrived() {
    let (mut peer, before) = responder();
    let write = fpdu_of(&write_segment(1, 0, b""));
    for count in 1..=CONFIRMED_MESSAGES {
        peer.leave_open(&write);
        peer.node.with(|engine, env, stream| engine.receive(env, stream));
        let is_time = peer.node.engine.confirm_alone(false, false);
        assert_eq!(is_time, count == CONFIRMED_MESSAGES, "{count}");
    }
    peer.node.with(|engine, env, stream| engine.transmit(env, stream));
    let position = before + u64::from(CONFIRMED_MESSAGES) * peer.advance_of(&write);
    assert_eq!(peer.output_ulpdus(), [confirmation(position)]);
}

#[test]
fn vrb_c_23_no_confirmation_comes_between_the_messages_of_a_request() {
    let (mut peer, _) = responder();
    peer.wire.set_capacity(0, 4000);
    let source = peer.node.filled(&pattern(100_000));
    peer.node
        .post(&Work::new(Opcode::SendImm, 1).sge(source.sge(0, 100_000)));
    while peer.node.pump() {}
    peer.leave_open(&fpdu_of(&write_segment(1, 0, b"")));
    let ulpdus = peer.output_ulpdus();
    let kinds: Vec<_> = ulpdus.iter().map(|ulpdu| ulpdu[1] & 0xf).collect();
    let (confirmations, others): (Vec<u8>, Vec<u8>) = kinds.iter().partition(|kind| **kind == 0);
    assert_eq!(confirmations.len(), 1, "{kinds:?}");
    let of_request = |kind: &u8| [3, 8].contains(kind);
    let last = kinds.iter().rposition(of_request);
    let confirmed = kinds.iter().position(|kind| *kind == 0);
    assert!(confirmed > last, "{kinds:?}");
    assert!(others.len() > 3, "{kinds:?}");
}

#[test]
fn vrb_c_24_after_a_confirmation_the_requester_sends_no_reads() {
    let mut peer = scripted(delivered());
    peer.node.post(&write(1));
    let output = peer.output();
    let mut position = peer.advance_of(&output);
    peer.send(&[confirmation(1), answer()].map(|ulpdu| fpdu_of(&ulpdu)).concat());
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    for cookie in 2..200 {
        peer.node.post(&write(cookie));
        let ulpdus = peer.output_ulpdus();
        assert_eq!(ulpdus.len(), 1, "only the Write: {ulpdus:02x?}");
        position += peer.advance_of(&fpdu_of(&ulpdus[0]));
        peer.send_ulpdu(&confirmation(position - 1));
        assert!(peer.node.sent().is_empty(), "a byte of the Write is missing");
        peer.send_ulpdu(&confirmation(position));
        assert_eq!(peer.node.sent(), [(cookie, SUCCESS)]);
    }
    assert_eq!(peer.node.count(Counter::RxConfirmations), 1 + 2 * 198);
}

#[test]
fn vrb_c_24_a_confirmation_passes_messages_that_wait_for_a_receive() {
    let waiting = Attachment {
        without_receive: WithoutReceive::Waits,
        ..delivered()
    };
    let mut peer = scripted(waiting);
    peer.node.post(&write(1));
    peer.run();
    peer.send_ulpdu(&send_segment(true, 1, 0, b"waits"));
    assert!(peer.node.engine.has_parked());
    peer.send_ulpdu(&confirmation(u64::MAX));
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
}

/// A Write of length zero of another implementation may have that STag.
#[test]
fn vrb_c_25_a_peer_that_was_not_asked_confirms_nothing() {
    let mut peer = scripted(delivered());
    peer.send_ulpdu(&confirmation(u64::MAX));
    assert_eq!(peer.node.count(Counter::RxConfirmations), 0);
    peer.node.post(&write(1));
    assert_eq!(peer.output_ulpdus().last(), Some(&probe(1)));
    assert!(peer.node.sent().is_empty());
}

#[test]
fn vrb_c_25_without_delivery_a_confirmation_is_an_ordinary_write() {
    let mut peer = Scripted::new();
    let before = peer.node.count(Counter::RxMessages);
    peer.send_ulpdu(&confirmation(100));
    assert_eq!(peer.node.count(Counter::RxMessages), before + 1);
    assert_eq!(peer.node.count(Counter::RxConfirmations), 0);
    assert_eq!(peer.node.engine.state(), QpState::Rts);
}

/// Two ends that answer each other: each message takes its confirmation along.
#[test]
fn vrb_c_23_a_ping_pong_has_no_segments_of_its_own_for_confirmations() {
    let end = |initiator| Attachment {
        delivered: true,
        spare_read: true,
        ord_limit: 17,
        ..native(initiator)
    };
    let mut pair = Pair::with(&Shape::default(), Conditions::default(), end(true), end(false));
    let mut fpdus = [0; 2];
    for cookie in 0..20 {
        pair.b.post_recv(cookie, &[]);
        pair.a.post_recv(cookie, &[]);
        for reply in [false, true] {
            let (from, to) = match reply {
                false => (&mut pair.a, &mut pair.b),
                true => (&mut pair.b, &mut pair.a),
            };
            from.post(&Work::send(cookie));
            from.pump();
            while to.received().is_empty() {
                let arrival = pair.wire.next_arrival().expect("a message is on its way");
                pair.clock.store(arrival.0, Ordering::Relaxed);
                to.pump();
            }
        }
        let now = [&pair.a, &pair.b].map(|node| node.count(Counter::TxFpdus));
        if cookie > 2 {
            assert_eq!([now[0] - fpdus[0], now[1] - fpdus[1]], [2, 2], "message {cookie}");
        }
        fpdus = now;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn completed_writes_are_in_the_peers_memory(
        lens in prop::collection::vec((0usize..9000, any::<bool>()), 1..40),
        chunk in prop_oneof![Just(0usize), 1..3000usize],
        ord in 0u32..3,
        seed in any::<u64>(),
    ) {
        let conditions = Conditions { chunk, seed, ..Conditions::default() };
        let attachment = |initiator| Attachment {
            delivered: true,
            spare_read: true,
            ord,
            ord_limit: ord + 1,
            ird: ord,
            ..native(initiator)
        };
        let mut pair = Pair::with(&Shape::default(), conditions, attachment(true), attachment(false));
        let source = pair.a.filled(&pattern(9000));
        let target = pair.b.region(9000 * lens.len(), everything());
        let mut posted = lens.iter().enumerate();
        let mut next = 0;
        loop {
            if let Some((slot, (len, signaled))) = posted.next() {
                let write = Work::write(slot as u64, target.stag, target.base + (slot * 9000) as u64);
                let write = write.sge(source.sge(0, *len));
                pair.a.post(&if *signaled { write } else { write.unsignaled() });
            }
            let moved = pair.step();
            for (cookie, status) in pair.a.sent() {
                prop_assert_eq!(status, SUCCESS);
                let memory = target.bytes();
                for (slot, (len, _)) in lens.iter().enumerate().take(cookie as usize + 1).skip(next) {
                    prop_assert!(memory[slot * 9000..][..*len] == pattern(9000)[..*len], "Write {slot}");
                }
                next = cookie as usize + 1;
            }
            if !moved && posted.len() == 0 {
                break;
            }
        }
        let last = lens.iter().rposition(|(_, signaled)| *signaled).map_or(0, |slot| slot + 1);
        prop_assert_eq!(next, last, "all signalled Writes complete");
    }
}
