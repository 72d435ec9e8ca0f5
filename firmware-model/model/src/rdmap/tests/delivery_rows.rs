//! Completions that mean delivery: the requester learns from the answer to a Read that the messages
//! before it are placed or delivered (RFC 5040 §5.5).

use crate::counters::Counter;
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use proptest::prelude::*;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::rdmap::{Terminate, TerminateError};

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

/// An initiator with one Read for the program and one for confirmations.
fn delivered() -> Attachment {
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

/// A peer that knows from the start that this end accepts confirmations.
fn informed() -> Scripted {
    scripted(Attachment {
        confirmation: true,
        ..delivered()
    })
}

/// The source offset of Reads of length zero by which an end announces that it understands
/// confirmations.
const MARK: u64 = u64::from_be_bytes(*b"urnic\0\0\x01");

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
    assert_eq!(peer.output_ulpdus(), [probe(1)]);
    assert!(!peer.finished, "the Write is unconfirmed");
    peer.send_ulpdu(&answer());
    assert!(peer.finished);
}

#[test]
fn vrb_c_15_unsignaled_messages_free_the_send_queue() {
    let mut peer = informed();
    let mut probes = 0;
    for cookie in 0..300 {
        peer.node.post(&write(cookie).unsignaled());
        let ulpdus = peer.output_ulpdus();
        if ulpdus.contains(&probe(probes + 1)) {
            probes += 1;
            assert!(peer.node.sq_room() > 0);
            peer.send_ulpdu(&answer());
        }
    }
    assert_eq!(probes, 2, "a Read for each half of a queue of 256 blocks");
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
        let frames = [probe(1), probe(2), probe(3)].map(|ulpdu| fpdu_of(&ulpdu));
        peer.send(&frames[..2].concat());
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
