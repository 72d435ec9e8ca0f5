//! DDP's rows on whole messages: their numbers, their length, and the fields that all their
//! segments share.

use super::ddp_rows::{terminate_for_ulpdu, with_receive};
use super::{Pair, Scripted};
use crate::memory::{Accessor, Backing, MemoryAccess, Need, Registration};
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use std::sync::Arc;
use urnic_device::vocabulary::{Access, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::mpa::fpdu::{self, CrcMode};

const SUCCESS: WcStatus = WcStatus::Success;

#[test]
fn ddp_h_05_all_segments_invalidate_the_same_stag() {
    for (flags, control) in [(SendFlags::empty(), 0x44), (SendFlags::SOLICITED, 0x46)] {
        let mut peer = Scripted::new();
        let source = peer.node.filled(&pattern(5000));
        let work = Work::new(Opcode::SendInv, 1).to(0x1122_3344, 0).flags(flags);
        peer.node.post(&work.sge(source.sge(0, 5000)));
        let ulpdus = peer.output_ulpdus();
        assert_eq!(ulpdus.len(), 4);
        for (ulpdu, mo) in ulpdus.iter().zip([0, 1436, 2872, 4308]) {
            let ddp = if mo == 4308 { 0x41 } else { 0x01 };
            let header = untagged(ddp, control, 0x1122_3344, 0, 1, mo, b"");
            assert_eq!(ulpdu[..18], header);
        }
    }
}

/// All segments of a peer's message should name the same STag. If they differ, only the STag of the
/// last segment is invalidated.
#[test]
fn ddp_h_05_of_differing_stags_the_last_segments_counts() {
    let (mut peer, _) = with_receive(64);
    let regions = [(); 3].map(|()| peer.node.region(8, everything()));
    let [first, second, last] = regions.each_ref().map(|region| region.stag);
    peer.send_ulpdu(&untagged(0x01, 0x44, first, 0, 1, 0, b"abc"));
    peer.send_ulpdu(&untagged(0x01, 0x44, second, 0, 1, 3, b"def"));
    peer.send_ulpdu(&untagged(0x41, 0x44, last, 0, 1, 6, b"ghi"));
    let cqe = peer.node.recv_cq.poll().unwrap();
    assert_eq!((status(&cqe), cqe.byte_len.get()), (SUCCESS, 9));
    assert_eq!(u32::from_ne_bytes(cqe.extra), last);
    let valid = regions.each_ref().map(|region| {
        let (memory, pd) = (&peer.node.memory, peer.node.pd);
        memory
            .check(
                Accessor { pd, qid: 7 },
                MemoryAccess {
                    stag: region.stag,
                    offset: region.base,
                    len: 8,
                    need: Need::RemoteRead,
                },
            )
            .is_ok()
    });
    assert_eq!(valid, [true, true, false]);
    // An STag that cannot be invalidated is an error in the last segment only.
    let (mut peer, _) = with_receive(64);
    let region = peer.node.region(8, everything());
    peer.send_ulpdu(&untagged(0x01, 0x44, region.stag ^ 1, 0, 1, 0, b"abc"));
    assert!(peer.output_ulpdus().is_empty());
    peer.send_ulpdu(&untagged(0x41, 0x44, region.stag ^ 1, 0, 1, 3, b"def"));
    assert_eq!(peer.terminate()[..4], hex("0209c000"));
}

/// MSNs of each queue in the output of an end, in order.
fn msns_of(pair: &Pair, direction: usize) -> [Vec<u32>; 4] {
    let bytes = pair.recorded(direction);
    let mut rest = &bytes[..];
    let mut msns = <[Vec<u32>; 4]>::default();
    while !rest.is_empty() {
        let (ulpdu, after) = fpdu::parse(rest, CrcMode::On).unwrap();
        rest = after;
        if ulpdu[0] & 0x80 == 0 && be32(&ulpdu[14..]) == 0 {
            msns[be32(&ulpdu[6..]) as usize].push(be32(&ulpdu[10..]));
        }
    }
    msns
}

/// Sends, Reads and atomics in both directions, whose MSNs begin at these numbers. Each queue
/// counts by itself, and wraps.
fn msns_go_on_from(starts: [[u32; 3]; 2]) {
    const TIMES: u32 = 4;
    let mut pair = Pair::new();
    pair.wire.record(0);
    pair.wire.record(1);
    pair.a.engine.send_msns(starts[0]);
    pair.b.engine.expect_msns(starts[0]);
    pair.b.engine.send_msns(starts[1]);
    pair.a.engine.expect_msns(starts[1]);
    pair.open_fence();
    let regions = [pair.a.region(64, everything()), pair.b.region(64, everything())];
    let Pair { a, b, .. } = &mut pair;
    for (node, own, other) in [(a, &regions[0], &regions[1]), (b, &regions[1], &regions[0])] {
        for n in 0..TIMES.into() {
            node.post_recv(n, &[own.sge(0, 8)]);
            node.post(&Work::send(n).inline(b"x"));
            node.post(&Work::read(n, other.stag, other.base).sge(own.sge(8, 8)));
            let atomic = Work::new(Opcode::FetchAdd, n).to(other.stag, other.base + 16);
            node.post(&atomic.atomic(1, 0).sge(own.sge(24, 8)));
        }
    }
    pair.run_now();
    for node in [&mut pair.a, &mut pair.b] {
        assert!(node.sent().iter().all(|(_, status)| *status == SUCCESS));
        assert_eq!(node.received().len(), TIMES as usize);
    }
    for (direction, [sends, requests, responses]) in (0..).zip(starts) {
        let count = |from: u32, n: u32| (0..n).map(|i| from.wrapping_add(i)).collect::<Vec<_>>();
        let expected = [
            count(sends, TIMES),
            count(requests, 2 * TIMES),
            vec![],
            count(responses, TIMES),
        ];
        assert_eq!(msns_of(&pair, direction), expected, "direction {direction}");
    }
}

#[test]
fn ddp_h_06_msns_of_every_queue_begin_at_one() {
    msns_go_on_from([[1; 3]; 2]);
}

#[test]
fn ddp_h_06_msns_of_every_queue_wrap() {
    let last = u32::MAX;
    msns_go_on_from([[last - 1, last - 4, last], [last, last - 2, last - 3]]);
}

/// Queue 2 has one message, the Terminate, regardless of the numbers of the other queues.
#[test]
fn ddp_h_06_a_terminate_is_message_one_of_its_queue() {
    let mut peer = Scripted::new();
    peer.node.engine.send_msns([77; 3]);
    peer.node.engine.expect_msns([77; 3]);
    peer.send_ulpdu(&send_segment(true, 77, 0, b"x"));
    // `terminate` checks the header.
    assert_eq!(peer.terminate()[..2], hex("1202"));
}

/// An MSN that is not the next one is an error on each queue.
#[test]
fn ddp_h_06_another_msn_than_the_next_is_refused() {
    for wrong in [0, 2, u32::MAX] {
        let (peer, untouched) = with_receive(64);
        let payload = terminate_for_ulpdu(peer, &untouched, &send_segment(true, wrong, 0, b"x"));
        assert_eq!(payload[..2], hex("1203"));
        let mut peer = Scripted::new();
        let source = peer.node.filled(b"source");
        peer.send_ulpdu(&read_request(wrong, (5, 0), 1, (source.stag, source.base)));
        assert_eq!(peer.terminate()[..2], hex("1203"));
        let mut peer = Scripted::new();
        let sink = peer.node.region(8, everything());
        let atomic = Work::new(Opcode::FetchAdd, 1).to(5, 0).atomic(1, 0);
        peer.node.post(&atomic.sge(sink.sge(0, 8)));
        peer.output_ulpdus();
        peer.send_ulpdu(&untagged(0x41, 0x4b, 0, 3, wrong, 0, &[0; 12]));
        assert_eq!(peer.terminate()[..2], hex("1203"));
    }
}

/// A region of zeroes of any length, which uses no memory.
fn endless(node: &Node) -> u32 {
    let registration = Registration {
        pd: node.pd,
        base: 0,
        len: 1 << 40,
        access: Access::LOCAL_WRITE,
        backing: Arc::new(Backing::Null),
    };
    node.memory.register(registration).unwrap()
}

#[test]
fn ddp_s_01_a_gigabyte_arrives_as_one_message() {
    const LEN: usize = 1 << 30;
    let off = |initiator| Attachment {
        crc: false,
        ..agreed(initiator)
    };
    let mut pair = Pair::with(&Shape::default(), Conditions::default(), off(true), off(false));
    let (from, into) = (endless(&pair.a), endless(&pair.b));
    pair.b.post_recv(1, &[sge(0, LEN, into)]);
    pair.a.post(&Work::send(1).sge(sge(0, LEN, from)));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS)]);
    assert_eq!(pair.b.received(), [(1, SUCCESS, LEN as u32)]);
}

/// Sends, Writes and Read Responses: each segment but the last is as long as the current
/// MULPDU, and none is longer.
#[test]
fn ddp_s_01_segments_are_as_long_as_the_mulpdu() {
    const LEN: usize = 20_000;
    const MULPDUS: [usize; 5] = [128, 516, 1442, 9000, 64_768];
    for opcode in [Opcode::Send, Opcode::Write, Opcode::Read] {
        let mut peer = Scripted::new();
        let source = peer.node.filled(&pattern(LEN));
        for (msn, mulpdu) in (1..).zip(MULPDUS) {
            peer.node.engine.set_mulpdu(mulpdu);
            match opcode {
                Opcode::Read => {
                    let request = read_request(msn, (5, 0), LEN as u32, (source.stag, source.base));
                    peer.send_ulpdu(&request);
                }
                _ => peer
                    .node
                    .post(&Work::new(opcode, 1).to(5, 0).sge(source.sge(0, LEN))),
            }
            let header_len = if opcode == Opcode::Send { 18 } else { 14 };
            let ulpdus = peer.output_ulpdus();
            let (last, others) = ulpdus.split_last().unwrap();
            assert!(
                others.iter().all(|ulpdu| ulpdu.len() == mulpdu),
                "{opcode:?}, {mulpdu}"
            );
            assert!(last.len() <= mulpdu);
            let bytes: Vec<u8> = ulpdus.iter().flat_map(|u| u[header_len..].to_vec()).collect();
            assert!(bytes == pattern(LEN), "all of it, once, in order");
        }
    }
}

/// An engine whose only receive is longer than a message may be, and which has received all but
/// `left` bytes of the maximum.
fn nearly_full(left: u32, crc: bool) -> Scripted {
    let attachment = Attachment { crc, ..agreed(true) };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    let into = endless(&peer.node);
    let most = u32::MAX as usize;
    peer.node.post_recv(1, &[sge(0, most, into), sge(0, most, into)]);
    peer.send_ulpdu(&send_segment(false, 1, 0, b"first"));
    peer.node.engine.have_received(u64::from(u32::MAX - left));
    peer
}

#[test]
fn ddp_s_01_a_received_message_is_shorter_than_2_to_the_32() {
    for (crc, size) in [(true, 100u32), (false, 100), (false, 50_000)] {
        let all = vec![0; size as usize];
        let mo = u32::MAX - size;
        // The maximum length.
        let mut peer = nearly_full(size, crc);
        peer.send_ulpdu(&send_segment(true, 1, mo, &all));
        assert_eq!(peer.node.received(), [(1, SUCCESS, u32::MAX)]);
        // One byte too long: in this segment or the next, in the last segment or another.
        for last in [false, true] {
            let mut peer = nearly_full(size - 1, crc);
            peer.send_ulpdu(&send_segment(last, 1, mo + 1, &all));
            assert_eq!(peer.terminate()[..2], hex("1205"));
            assert_eq!(peer.node.received(), [(1, WcStatus::LocLenErr, 0)]);
            let mut peer = nearly_full(size, crc);
            peer.send_ulpdu(&send_segment(false, 1, mo, &all));
            assert!(peer.output_ulpdus().is_empty());
            peer.send_ulpdu(&send_segment(last, 1, u32::MAX, b"x"));
            assert_eq!(peer.terminate()[..2], hex("1205"));
            // The message cannot start again at offset 0.
            let mut peer = nearly_full(size, crc);
            peer.send_ulpdu(&send_segment(false, 1, mo, &all));
            peer.send_ulpdu(&send_segment(last, 1, 0, b"x"));
            assert_eq!(peer.terminate()[..2], hex("1204"));
        }
    }
}

#[test]
fn ddp_s_01_a_received_write_is_shorter_than_2_to_the_32() {
    for (len, refused) in [(5, false), (6, true)] {
        let mut peer = Scripted::new();
        let region = peer.node.region(64, everything());
        peer.send_ulpdu(&tagged(0x81, 0x40, region.stag, region.base, b"first"));
        peer.node.engine.have_received(u64::from(u32::MAX) - 5);
        let end = write_segment(region.stag, region.base + 5, &vec![1; len]);
        if refused {
            let payload = terminate_for_ulpdu(peer, &region, &end);
            assert_eq!(payload[..4], hex("1101c000"));
        } else {
            peer.node.post_recv(1, &[]);
            peer.send_ulpdu(&end);
            // The Immediate after it has the length.
            peer.send_ulpdu(&untagged(0x41, 0x48, 0, 0, 1, 0, &[0; 8]));
            assert_eq!(peer.node.received(), [(1, SUCCESS, u32::MAX)]);
        }
    }
}

/// The peer refuses the first segment of a Write of which more is still to be framed. The Write
/// follows a Read that the peer has not answered.
#[test]
fn rdm_t_06_a_request_at_fault_may_be_partly_framed() {
    for opcode in [Opcode::Write, Opcode::Send] {
        let mut peer = Scripted::new();
        peer.wire.set_capacity(0, 10_000);
        let source = peer.node.filled(&pattern(4 << 20));
        peer.node.post(&Work::read(1, 9, 0).sge(source.sge(0, 8)));
        peer.node
            .post(&Work::new(opcode, 2).to(9, 64).sge(source.sge(0, 4 << 20)));
        peer.node.post(&Work::send(3).inline(b"latter"));
        while peer.node.pump() {}
        let (code, header) = match opcode {
            Opcode::Write => (0x1101, tagged(0x81, 0x40, 9, 64, b"")),
            _ => (0x1202, send_segment(false, 1, 0, b"")),
        };
        let mut payload = u16::to_be_bytes(code).to_vec();
        payload.extend_from_slice(&hex("c000 05ae"));
        payload.extend_from_slice(&header);
        peer.send_unread(&fpdu_of(&untagged(0x41, 0x47, 0, 2, 1, 0, &payload)));
        let (flushed, fault) = match opcode {
            Opcode::Write => (WcStatus::WrFlushErr, WcStatus::RemAccessErr),
            _ => (WcStatus::WrFlushErr, WcStatus::RemOpErr),
        };
        assert_eq!(peer.node.sent(), [(1, flushed), (2, fault), (3, flushed)]);
    }
}
