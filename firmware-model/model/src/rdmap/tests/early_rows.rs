//! Segments that arrive before their turn, over a stream of messages: their payload is placed at
//! once, and all else happens at their turn.

use super::Scripted;
use crate::counters::Counter;
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use proptest::prelude::*;
use std::time::Duration;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_wire::rdmap::Opcode;

const SUCCESS: WcStatus = WcStatus::Success;
/// How late a message comes: until then those after it come before their turn.
const LATE: Duration = Duration::from_secs(1);
/// The direction to the engine.
const FROM_PEER: usize = 1;

/// A connection whose peer has sent its first message, an empty Write.
fn opened(shape: &Shape, attachment: Attachment) -> Scripted {
    let mut peer = Scripted::with(shape, attachment);
    peer.send_ulpdu(&write_segment(0, 0, b""));
    peer.output();
    peer
}

fn open() -> Scripted {
    opened(&Shape::default(), agreed(true))
}

/// The peer sends a ULPDU that is late.
fn send_late(peer: &mut Scripted, ulpdu: &[u8]) {
    peer.wire.delay_next(FROM_PEER, LATE);
    peer.send_ulpdu(ulpdu);
}

/// An empty Write, which comes late.
fn send_gap(peer: &mut Scripted) {
    send_late(peer, &write_segment(0, 0, b""));
}

/// Messages that were delivered.
fn delivered(peer: &Scripted) -> u64 {
    peer.node.count(Counter::RxMessages)
}

#[test]
fn ddp_s_05_a_write_is_placed_before_its_turn() {
    let mut peer = open();
    let target = peer.node.region(100, everything());
    let bytes = pattern(100);
    for cookie in [1, 2] {
        let receive = peer.node.region(8, everything());
        peer.node.post_recv(cookie, &[receive.sge(0, 8)]);
    }
    send_late(&mut peer, &send_segment(true, 1, 0, b"first"));
    let (stag, to) = (target.stag, target.base);
    peer.send_ulpdu(&tagged(0x81, 0x40, stag, to, &bytes[..60]));
    peer.send_ulpdu(&write_segment(stag, to + 60, &bytes[60..]));
    peer.send_ulpdu(&send_segment(true, 2, 0, b"later"));
    assert_eq!(target.bytes(), bytes, "placed before the gap is filled");
    assert_eq!(delivered(&peer), 1, "and not delivered");
    assert_eq!(peer.node.received(), []);
    // The program may use the place until then: nothing is placed twice.
    target.write(0, &[7; 100]);
    peer.advance(LATE);
    assert_eq!(peer.node.received(), [(1, SUCCESS, 5), (2, SUCCESS, 5)]);
    assert_eq!(delivered(&peer), 4);
    assert_eq!(peer.node.count(Counter::RxFpdus), 5);
    assert_eq!(target.bytes(), [7; 100]);
}

#[test]
fn ddp_s_05_the_length_of_an_early_write_comes_with_its_immediate() {
    let mut peer = open();
    let target = peer.node.region(100, everything());
    peer.node.post_recv(1, &[]);
    send_gap(&mut peer);
    peer.send_ulpdu(&write_segment(target.stag, target.base, &pattern(100)));
    let immediate = 0x40 | Opcode::Immediate as u8;
    peer.send_ulpdu(&untagged(0x41, immediate, 0, 0, 1, 0, b"immediat"));
    assert_eq!(target.bytes(), pattern(100));
    assert_eq!(peer.node.received(), []);
    peer.advance(LATE);
    assert_eq!(peer.node.received(), [(1, SUCCESS, 100)]);
}

#[test]
fn ddp_s_05_a_response_is_placed_before_its_turn() {
    let mut peer = open();
    let (one, two) = (
        peer.node.region(60, everything()),
        peer.node.region(60, everything()),
    );
    let work = Work::read(1, 0x7700, 0x2000)
        .sge(one.sge(10, 50))
        .sge(two.sge(5, 50));
    peer.node.post(&work);
    let other = peer.node.region(8, everything());
    peer.node
        .post(&Work::read(2, 0x7700, 0x3000).sge(other.sge(0, 8)));
    assert_eq!(peer.output_ulpdus().len(), 2);
    let (stag, to) = (one.stag, one.base + 10);
    let bytes = pattern(100);
    send_late(&mut peer, &tagged(0x81, 0x42, stag, to, &bytes[..20]));
    peer.send_ulpdu(&tagged(0x81, 0x42, stag, to + 20, &bytes[20..70]));
    peer.send_ulpdu(&tagged(0xc1, 0x42, stag, to + 70, &bytes[70..]));
    peer.send_ulpdu(&tagged(0xc1, 0x42, other.stag, other.base, b"response"));
    assert_eq!(one.bytes()[10..30], [0; 20]);
    assert_eq!(one.bytes()[30..], bytes[20..50]);
    assert_eq!(two.bytes()[5..55], bytes[50..]);
    assert_eq!(other.bytes(), b"response");
    assert_eq!(peer.node.sent(), [], "neither Read is complete");
    peer.advance(LATE);
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(one.bytes()[10..], bytes[..50]);
}

/// A Response that fits no Read, or several, is not placed early.
#[test]
fn ddp_s_05_a_response_that_does_not_fit_waits() {
    let sink = |peer: &Scripted| peer.node.region(16, everything());
    for (stag_bits, to, payload, last) in [
        (1, 0, &b"abcdefgh"[..], true),
        (0, 1, b"abcdefgh", true),
        (0, u64::MAX, b"abcdefgh", true),
        (0, 0, b"abcdefg", true),
        (0, 0, b"abcdefgh", false),
    ] {
        let mut peer = open();
        let sink = sink(&peer);
        peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
        peer.output_ulpdus();
        send_gap(&mut peer);
        let control = if last { 0xc1 } else { 0x81 };
        let to = sink.base.wrapping_add(to);
        peer.send_ulpdu(&tagged(control, 0x42, sink.stag ^ stag_bits, to, payload));
        assert_eq!(sink.bytes(), [0; 16]);
    }
    let mut peer = open();
    let sink = sink(&peer);
    for cookie in 1..=2 {
        peer.node.post(&Work::read(cookie, 5, 0).sge(sink.sge(0, 8)));
    }
    peer.output_ulpdus();
    send_gap(&mut peer);
    for bytes in [b"response", b"RESPONSE"] {
        peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, bytes));
    }
    assert_eq!(sink.bytes(), [0; 16], "two Reads have this sink");
    peer.advance(LATE);
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(sink.bytes()[..8], *b"RESPONSE");
}

/// What no check permits now is not placed, and not an error before its turn.
#[test]
fn ddp_s_05_and_v_02_a_refused_segment_waits_for_its_turn() {
    type Refused = fn(&Region) -> Vec<u8>;
    let refused: [(Refused, &str); 4] = [
        (|r| write_segment(r.stag ^ 1, r.base, &[1; 8]), "1100c000"),
        (|r| write_segment(r.stag, r.base + 9, &[1; 8]), "1101c000"),
        (|r| write_segment(r.stag, r.base, &[1; 17]), "1101c000"),
        (|r| tagged(0xc1, 0x4f, r.stag, r.base, &[1; 8]), "0206"),
    ];
    for (segment, code) in refused {
        let mut peer = open();
        let target = peer.node.region(16, everything());
        send_gap(&mut peer);
        peer.send_ulpdu(&segment(&target));
        assert_eq!(peer.node.engine.state(), QpState::Rts);
        assert!(peer.output().is_empty());
        peer.advance(LATE);
        let terminate = peer.terminate();
        assert_eq!(terminate[..code.len() / 2], hex(code));
        assert_eq!(target.bytes(), [0; 16]);
    }
    let mut peer = open();
    let target = peer.node.region(16, Access::LOCAL_WRITE | Access::REMOTE_READ);
    send_gap(&mut peer);
    peer.send_ulpdu(&write_segment(target.stag, target.base, &[1; 8]));
    peer.advance(LATE);
    assert_eq!(peer.node.engine.state(), QpState::Err);
    assert_eq!(target.bytes(), [0; 16], "a region without the right");
}

/// The STag is revoked after the placement: nothing more is written, and the segment is refused at
/// its turn, with its own header and length.
#[test]
fn ddp_s_05_a_revoked_segment_is_refused_at_its_turn() {
    let mut peer = open();
    let target = peer.node.region(16, everything());
    send_gap(&mut peer);
    let segment = write_segment(target.stag, target.base, b"revoked!");
    peer.send_ulpdu(&segment);
    assert_eq!(target.bytes()[..8], *b"revoked!");
    peer.node.memory.deregister(target.stag).unwrap();
    target.write(0, &[9; 16]);
    peer.advance(LATE);
    let terminate = peer.terminate();
    assert_eq!(terminate[..4], hex("1100c000"));
    assert_eq!(terminate[4..6], (segment.len() as u16).to_be_bytes());
    assert_eq!(terminate[6..20], segment[..14]);
    assert_eq!(target.bytes(), [9; 16]);
}

#[test]
fn ddp_s_05_a_revoked_sink_fails_its_read_at_the_turn() {
    let mut peer = open();
    let sink = peer.node.region(16, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 16)));
    peer.output_ulpdus();
    send_late(&mut peer, &tagged(0x81, 0x42, sink.stag, sink.base, &[1; 8]));
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base + 8, &[2; 8]));
    assert_eq!(sink.bytes()[8..], [2; 8]);
    // Only the part that is placed already may not be used any more.
    peer.node.memory.revoke_over(sink.base + 12, 1);
    sink.write(0, &[9; 16]);
    peer.advance(LATE);
    assert_eq!(peer.node.sent(), [(1, WcStatus::LocProtErr)]);
    assert_eq!(sink.bytes()[8..], [9; 8]);
}

/// The last of several Writes to one place counts, in whatever order they come.
#[test]
fn ddp_s_05_an_earlier_write_does_not_replace_a_later_one() {
    let mut peer = open();
    let target = peer.node.region(16, everything());
    let write = |at: u64, bytes: &[u8]| write_segment(target.stag, target.base + at, bytes);
    send_late(&mut peer, &write(0, &[1; 16]));
    peer.send_ulpdu(&write(4, &[2; 4]));
    peer.send_ulpdu(&write(6, &[3; 4]));
    assert_eq!(target.bytes(), hex("00000000 02020202 00000000 00000000"));
    peer.advance(LATE);
    assert_eq!(target.bytes(), hex("01010101 02020303 03030101 01010101"));
    peer.send_ulpdu(&write(0, &[4; 16]));
    assert_eq!(target.bytes(), [4; 16], "after its turn nothing is kept from it");
}

#[test]
fn ddp_s_05_an_early_write_waits_with_parked_messages() {
    let mut peer = opened(&Shape::default(), native(true));
    let target = peer.node.region(8, everything());
    send_late(&mut peer, &send_segment(true, 1, 0, b"parked"));
    peer.send_ulpdu(&write_segment(target.stag, target.base, b"an early"));
    assert_eq!(target.bytes(), b"an early");
    peer.advance(LATE);
    assert_eq!(
        delivered(&peer),
        1,
        "the Send waits for a receive, the Write for the Send"
    );
    // Without a receive nothing more is placed.
    send_gap(&mut peer);
    peer.send_ulpdu(&write_segment(target.stag, target.base, b"a later "));
    assert_eq!(target.bytes(), b"an early");
    target.write(0, &[9; 8]);
    let receive = peer.node.region(8, everything());
    peer.node.post_recv(1, &[receive.sge(0, 8)]);
    peer.run();
    assert_eq!(peer.node.received(), [(1, SUCCESS, 6)]);
    assert_eq!(delivered(&peer), 3);
    assert_eq!(target.bytes(), b"a later ", "the stream is read again");
    peer.advance(LATE);
    assert_eq!(delivered(&peer), 5);
}

/// Queue pairs that show the order of placement, or drop messages, and connections that have not
/// begun place in order.
#[test]
fn ddp_s_05_some_queue_pairs_place_in_order() {
    let unreliable = Shape {
        unreliable: true,
        ..Shape::default()
    };
    for kind in ["in order", "kind UC", "before the first message", "usual"] {
        let mut peer = match kind {
            "kind UC" => opened(&unreliable, agreed(true)),
            "before the first message" => Scripted::with(&Shape::default(), agreed(true)),
            _ => open(),
        };
        let before = delivered(&peer);
        peer.node.identity.last_first = kind == "in order";
        let target = peer.node.region(8, everything());
        send_gap(&mut peer);
        peer.send_ulpdu(&write_segment(target.stag, target.base, b"an early"));
        assert_eq!(target.bytes() == b"an early", kind == "usual", "{kind}");
        peer.advance(LATE);
        assert_eq!(target.bytes(), b"an early", "{kind}");
        assert_eq!(delivered(&peer), before + 2, "{kind}");
    }
}

/// An end that has an error takes nothing more.
#[test]
fn ddp_s_05_nothing_is_placed_after_the_end() {
    let mut peer = open();
    let target = peer.node.region(8, everything());
    send_gap(&mut peer);
    peer.node.set_state(QpState::Err);
    peer.send_ulpdu(&write_segment(target.stag, target.base, b"an early"));
    peer.advance(LATE);
    assert_eq!(target.bytes(), [0; 8]);
}

/// A segment of a Write, and how late it comes.
#[derive(Debug, Clone)]
struct Part {
    at: usize,
    len: usize,
    delay: u64,
}

const ROOM: usize = 64;

fn part() -> impl Strategy<Value = Part> {
    let delay = prop_oneof![2 => Just(0u64), 1 => 1..6u64];
    (0..ROOM, 0..ROOM / 2, delay).prop_map(|(at, len, delay)| Part {
        at,
        len: len.min(ROOM - at),
        delay,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Each Write is followed by a Send. Whatever the order of arrival is, memory has all bytes of
    /// a Write when its Send completes, and in the end those of the last Write. Those of a Write
    /// that overlaps no other are there as soon as it has come.
    #[test]
    fn ddp_s_05_and_06_any_order_of_arrival_ends_as_the_order_of_sending(
        parts in prop::collection::vec(part(), 1..12),
    ) {
        let mut peer = open();
        let target = peer.node.region(ROOM, everything());
        let receives = peer.node.region(8 * parts.len(), everything());
        let overlap = |a: &Part, b: &Part| a.at < b.at + b.len && b.at < a.at + a.len;
        for (n, part) in parts.iter().enumerate() {
            peer.node.post_recv(n as u64, &[receives.sge(8 * n, 8)]);
            let bytes = vec![n as u8 + 1; part.len];
            peer.wire.delay_next(FROM_PEER, Duration::from_millis(part.delay));
            peer.send_ulpdu(&write_segment(target.stag, target.base + part.at as u64, &bytes));
            peer.send_ulpdu(&send_segment(true, n as u32 + 1, 0, &[n as u8]));
        }
        let mut completed = 0;
        for now in 0..8 {
            let memory = target.bytes();
            let completions: Vec<u64> = peer.node.received().iter().map(|c| c.0).collect();
            let expected = completed as u64..(completed + completions.len()) as u64;
            prop_assert_eq!(&completions, &expected.collect::<Vec<_>>());
            completed += completions.len();
            let late = parts.iter().position(|part| part.delay > now).unwrap_or(parts.len());
            prop_assert_eq!(completed, late, "at {}", now);
            for (n, part) in parts.iter().enumerate() {
                let others = parts.iter().enumerate().filter(|(other, _)| *other != n);
                let is_alone = !others.map(|(_, other)| other).any(|other| overlap(part, other));
                let place = &memory[part.at..part.at + part.len];
                if is_alone {
                    let expected = if part.delay <= now { n as u8 + 1 } else { 0 };
                    prop_assert!(place.iter().all(|byte| *byte == expected), "Write {} at {}", n, now);
                }
                let at_least = |byte: &u8| usize::from(*byte) > n;
                prop_assert!(n >= completed || place.iter().all(at_least), "Write {} at {}", n, now);
            }
            peer.advance(Duration::from_millis(1));
        }
        let mut expected = [0; ROOM];
        for (n, part) in parts.iter().enumerate() {
            expected[part.at..part.at + part.len].fill(n as u8 + 1);
        }
        prop_assert_eq!(completed, parts.len());
        prop_assert_eq!(target.bytes(), expected);
    }
}
