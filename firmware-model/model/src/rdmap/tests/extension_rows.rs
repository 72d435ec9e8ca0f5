//! The rows of RFC 7306: atomics and immediate data.

use super::{Pair, Scripted, vector};
use crate::rdmap::Attachment;
use crate::rdmap::answers::result;
use crate::testing::rig::*;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use urnic_device::cqe::CqeFlags;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::{Access, WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::crc::crc32c;
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::rdmap::AtomicOperation;

const SUCCESS: WcStatus = WcStatus::Success;

pub(super) fn fetch_add(cookie: u64, stag: u32, to: u64, add: u64) -> Work {
    Work::new(Opcode::FetchAdd, cookie).to(stag, to).atomic(add, 0)
}

fn compare_swap(cookie: u64, stag: u32, to: u64, compare: u64, swap: u64) -> Work {
    Work::new(Opcode::CompareSwap, cookie)
        .to(stag, to)
        .atomic(compare, swap)
}

/// The payload of an Atomic Request.
fn atomic_request(msn: u32, operation: u32, stag: u32, to: u64, values: [u64; 4]) -> Vec<u8> {
    let mut payload = Vec::new();
    for word in [operation, 0x55, stag] {
        payload.extend_from_slice(&word.to_be_bytes());
    }
    payload.extend_from_slice(&to.to_be_bytes());
    for value in values {
        payload.extend_from_slice(&value.to_be_bytes());
    }
    untagged(0x41, 0x4a, 0, 1, msn, 0, &payload)
}

#[test]
fn x73_01_without_the_extensions_their_opcodes_are_unexpected() {
    for ulpdu in [
        atomic_request(1, 0, 5, 0, [0; 4]),
        untagged(0x41, 0x48, 0, 0, 1, 0, &[0; 8]),
        untagged(0x41, 0x4b, 0, 3, 1, 0, &[0; 12]),
    ] {
        let shape = Shape {
            extensions: false,
            ..Shape::default()
        };
        let mut peer = Scripted::with(&shape, agreed(true));
        peer.send_ulpdu(&ulpdu);
        assert_eq!(peer.terminate()[..4], hex("0206c000"));
    }
}

#[test]
fn x73_02_an_unassigned_operation_is_refused() {
    let mut peer = Scripted::new();
    let region = peer.node.region(8, everything());
    peer.send_ulpdu(&atomic_request(1, 1, region.stag, region.base, [1; 4]));
    assert_eq!(peer.terminate()[..4], hex("0206c000"));
    assert_eq!(region.bytes(), [0; 8]);
}

#[test]
fn x73_03_requests_on_the_wire_share_msns_with_reads() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(64, everything());
    let (stag, to) = (0x200, 0x7f00_0000_2000);
    peer.node.post(&fetch_add(1, stag, to, 1).sge(sink.sge(0, 8)));
    peer.node
        .post(&compare_swap(2, stag, to, 0x2222, 0x1111).sge(sink.sge(8, 8)));
    peer.node.post(&Work::read(3, stag, to).sge(sink.sge(16, 8)));
    let received = peer.output();
    // The requester chooses the request identifiers.
    for (name, at, id) in [("F-ATOMIC-FADD", 0, 1u32), ("F-ATOMIC-CSWAP", 76, 2)] {
        let mut expected = vector(name);
        let end = expected.len() - 4;
        expected[24..28].copy_from_slice(&id.to_be_bytes());
        if name == "F-ATOMIC-CSWAP" {
            expected[12..16].copy_from_slice(&2u32.to_be_bytes());
        }
        let crc = crc32c(&expected[..end]);
        expected[end..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(received[at..at + expected.len()], expected, "{name}");
    }
    assert_eq!(be32(&received[152 + 12..]), 3);
}

#[test]
fn x73_04_response_goes_to_queue_3() {
    let mut peer = Scripted::new();
    let region = peer.node.filled(&0x2222u64.to_ne_bytes());
    peer.send_ulpdu(&atomic_request(
        1,
        0,
        region.stag,
        region.base,
        [1, 0, 0, u64::MAX],
    ));
    assert_eq!(peer.output(), vector("F-ATOMIC-RESP"));
    assert_eq!(region.bytes(), 0x2223u64.to_ne_bytes());
}

#[test]
fn x73_04_responses_complete_their_requests_in_order() {
    let mut pair = Pair::new();
    let target = pair.b.filled(&7u64.to_ne_bytes());
    let sink = pair.a.region(24, everything());
    pair.a
        .post(&fetch_add(1, target.stag, target.base, 3).sge(sink.sge(0, 8)));
    pair.a
        .post(&Work::read(2, target.stag, target.base).sge(sink.sge(8, 8)));
    pair.a
        .post(&compare_swap(3, target.stag, target.base, 10, 99).sge(sink.sge(16, 8)));
    pair.run_now();
    let opcodes: Vec<_> = std::iter::from_fn(|| pair.a.send_cq.poll())
        .map(|cqe| (cqe.cookie.get(), opcode(&cqe), cqe.byte_len.get()))
        .collect();
    assert_eq!(
        opcodes,
        [
            (1, WcOpcode::FetchAdd, 8),
            (2, WcOpcode::RdmaRead, 8),
            (3, WcOpcode::CompSwap, 8)
        ]
    );
    let words: Vec<u64> = sink
        .bytes()
        .chunks(8)
        .map(|c| u64::from_ne_bytes(c.try_into().unwrap()))
        .collect();
    assert_eq!(words, [7, 10, 10]);
    assert_eq!(target.bytes(), 99u64.to_ne_bytes());
}

#[test]
fn x73_04_a_response_must_fit_its_request() {
    let response = |msn, id: u32, bytes: usize| {
        let mut payload = id.to_be_bytes().to_vec();
        payload.resize(bytes, 0);
        untagged(0x41, 0x4b, 0, 3, msn, 0, &payload)
    };
    for (ulpdu, code) in [
        (response(2, 1, 12), 0x1203),
        (response(1, 9, 12), 0x02ff),
        (response(1, 1, 11), 0x02ff),
        (response(1, 1, 13), 0x1205),
    ] {
        let mut peer = Scripted::new();
        let sink = peer.node.region(8, everything());
        peer.node.post(&fetch_add(1, 5, 0, 1).sge(sink.sge(0, 8)));
        assert_eq!(peer.output_ulpdus().len(), 1);
        peer.send_ulpdu(&ulpdu);
        assert_eq!(peer.terminate()[..2], u16::to_be_bytes(code));
        assert_eq!(peer.node.sent(), [(1, WcStatus::WrFlushErr)]);
    }
    // A response without a request.
    let mut peer = Scripted::new();
    peer.send_ulpdu(&response(1, 1, 12));
    assert_eq!(peer.terminate()[..2], [0x12, 0x02]);
}

#[test]
fn x73_05_fetch_add_has_fields() {
    let add = |old, add, mask| result(&AtomicOperation::FetchAdd { add, mask }, old);
    assert_eq!(add(0x0000_0000_ffff_ffff, 1, 0x8000_0000), 0);
    assert_eq!(add(0x0000_0000_ffff_ffff, 1, 0), 0x1_0000_0000);
    assert_eq!(add(u64::MAX, 1, 0), 0);
    assert_eq!(add(0xff_ff, 0x01_01, 0x8080), 0);
    assert_eq!(add(0x7f_7f, 0x01_01, 0x8080), 0x80_80);
    assert_eq!(add(u64::MAX, u64::MAX, u64::MAX), 0, "every bit its own field");
}

#[test]
fn x73_06_compare_and_swap_truth_table() {
    let cas = |old, compare, compare_mask, swap, swap_mask| {
        result(
            &AtomicOperation::CmpSwap {
                swap,
                swap_mask,
                compare,
                compare_mask,
            },
            old,
        )
    };
    assert_eq!(cas(5, 5, u64::MAX, 9, u64::MAX), 9);
    assert_eq!(cas(5, 6, u64::MAX, 9, u64::MAX), 5);
    assert_eq!(cas(0xab_cd, 0x00_cd, 0xff, 0x12_34, 0xff00), 0x12_cd);
    assert_eq!(cas(7, 0, 0, 9, u64::MAX), 9, "nothing compared: always equal");
    assert_eq!(cas(7, 7, u64::MAX, 9, 0), 7, "nothing swapped");
}

#[test]
fn x73_07_an_unaligned_word_is_not_touched() {
    let mut peer = Scripted::new();
    let region = peer.node.region(16, everything());
    peer.send_ulpdu(&atomic_request(
        1,
        0,
        region.stag,
        region.base + 1,
        [1, 0, 0, u64::MAX],
    ));
    let payload = peer.terminate();
    assert_eq!(payload[..6], hex("0207c000 0046"));
    assert_eq!(payload.len(), 4 + 2 + 18, "no RDMA header (X73-12)");
    assert_eq!(region.bytes(), [0; 16]);
    // The alignment counts before the key, as with adapters.
    let mut peer = Scripted::new();
    peer.send_ulpdu(&atomic_request(1, 0, 0x7777, 1, [1, 0, 0, u64::MAX]));
    assert_eq!(peer.terminate()[..4], hex("0207c000"));
    let mut peer = Scripted::new();
    peer.send_ulpdu(&atomic_request(1, 0, 0x7777, 8, [1, 0, 0, u64::MAX]));
    assert_eq!(peer.terminate()[..4], hex("0100c000"));
}

/// Two streams, each on a thread of its own, add to the same word at the same time: if the load and
/// the store of one addition were separate steps, an addition of the other could be lost.
#[test]
fn x73_08_atomics_of_two_streams_exclude_each_other() {
    const ROUNDS: u32 = 500;
    /// Requests at a time: as many as each stream may have outstanding.
    const BATCH: u32 = 16;
    let clock = Arc::new(AtomicU64::new(0));
    let (memory, pd) = table();
    let owner = Node::new(&Shape::default(), memory.clone(), pd, &clock);
    let word = owner.region(8, everything());
    let (stag, base) = (word.stag, word.base);
    let start = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for qid in [8, 9] {
            let (memory, start) = (memory.clone(), &start);
            scope.spawn(move || {
                let shape = Shape {
                    qid,
                    ..Shape::default()
                };
                let mut peer = Scripted::on(&shape, agreed(true), memory, pd);
                let mut seen = 0;
                for round in 0..ROUNDS {
                    let first = round * BATCH + 1;
                    let batch: Vec<u8> = (first..first + BATCH)
                        .flat_map(|msn| fpdu_of(&atomic_request(msn, 0, stag, base, [1, 0, 0, u64::MAX])))
                        .collect();
                    start.wait();
                    peer.send(&batch);
                    let answers = peer.output_ulpdus();
                    assert_eq!(answers.len(), BATCH as usize);
                    for answer in answers {
                        let before = u64::from_be_bytes(answer[22..30].try_into().unwrap());
                        assert!(round == 0 || before > seen, "each addition is seen once");
                        seen = before;
                    }
                }
            });
        }
    });
    assert_eq!(word.bytes(), u64::from(2 * ROUNDS * BATCH).to_ne_bytes());
}

#[test]
fn x73_09_immediate_data_is_a_message_of_8_bytes() {
    for (name, solicited) in [("F-IMM", false), ("F-IMMSE", true)] {
        let mut peer = Scripted::new();
        peer.node.post_recv(1, &[]);
        peer.send(&vector(name));
        let cqe = peer.node.recv_cq.poll().unwrap();
        assert_eq!(
            (status(&cqe), opcode(&cqe), cqe.extra),
            (SUCCESS, WcOpcode::RecvRdmaWithImm, [1, 2, 3, 4])
        );
        let flags = CqeFlags::from_bits_truncate(cqe.flags);
        assert!(flags.contains(CqeFlags::WITH_IMM));
        assert_eq!(flags.contains(CqeFlags::SOLICITED), solicited);
    }
    for (bytes, code) in [(7, 0x02ff), (9, 0x1205)] {
        let mut peer = Scripted::new();
        peer.node.post_recv(1, &[]);
        peer.send_ulpdu(&untagged(0x41, 0x48, 0, 0, 1, 0, &vec![1; bytes]));
        assert_eq!(peer.terminate()[..2], u16::to_be_bytes(code));
    }
    let mut peer = Scripted::new();
    peer.send(&vector("F-IMM"));
    assert_eq!(peer.terminate()[..2], [0x12, 0x02], "it needs a receive");
}

#[test]
fn x73_10_write_with_immediate_is_a_write_and_an_immediate() {
    let mut pair = Pair::new();
    pair.wire.record(0);
    let (source, target) = (pair.a.filled(b"abcd"), pair.b.region(8, everything()));
    pair.b.post_recv(1, &[]);
    let work = Work::new(Opcode::WriteImm, 2)
        .to(target.stag, target.base)
        .immediate([0xaa, 0xbb, 0xcc, 0xdd])
        .sge(source.sge(0, 4));
    pair.a.post(&work);
    pair.run_now();
    let bytes = pair.recorded(0);
    assert_eq!(bytes[2..4], [0xc1, 0x40]);
    assert_eq!(bytes[24..][2..4], [0x41, 0x48]);
    assert_eq!(bytes[24 + 20..24 + 28], hex("aabbccdd 00000000"));
    assert_eq!(pair.a.sent(), [(2, SUCCESS)]);
    let cqe = pair.b.recv_cq.poll().unwrap();
    assert_eq!((opcode(&cqe), cqe.byte_len.get()), (WcOpcode::RecvRdmaWithImm, 4));
    assert_eq!(
        (cqe.extra, cqe.flags),
        ([0xaa, 0xbb, 0xcc, 0xdd], CqeFlags::WITH_IMM.bits())
    );
    assert_eq!(target.bytes()[..4], *b"abcd");
}

#[test]
fn x73_10_send_with_immediate_is_one_receive() {
    let mut pair = Pair::new();
    let (source, sink) = (
        pair.a.filled(&pattern(100_000)),
        pair.b.region(100_000, everything()),
    );
    for n in 0..3 {
        pair.b.post_recv(n, &[sink.sge(0, 100_000)]);
    }
    let with = Work::new(Opcode::SendImm, 1).immediate([1, 2, 3, 4]);
    pair.a.post(&with.clone().sge(source.sge(0, 100_000)));
    pair.a.post(&Work::send(2).inline(b"plain"));
    pair.a.post(&with.flags(SendFlags::SOLICITED));
    pair.run_now();
    let seen: Vec<_> = std::iter::from_fn(|| pair.b.recv_cq.poll())
        .map(|cqe| (opcode(&cqe), cqe.byte_len.get(), cqe.flags, cqe.extra))
        .collect();
    let (imm, solicited) = (CqeFlags::WITH_IMM.bits(), CqeFlags::SOLICITED.bits());
    assert_eq!(
        seen,
        [
            (WcOpcode::Recv, 100_000, imm, [1, 2, 3, 4]),
            (WcOpcode::Recv, 5, 0, [0; 4]),
            (WcOpcode::Recv, 0, imm | solicited, [1, 2, 3, 4]),
        ]
    );
    assert!(sink.bytes()[5..] == pattern(100_000)[5..]);
}

#[test]
fn x73_11_a_fenced_send_waits_for_an_atomic() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post(&fetch_add(1, 5, 0, 1).sge(sink.sge(0, 8)));
    peer.node
        .post(&Work::send(2).inline(b"x").flags(SendFlags::FENCE));
    assert_eq!(peer.output_ulpdus().len(), 1);
    let mut payload = 1u32.to_be_bytes().to_vec();
    payload.extend_from_slice(&42u64.to_be_bytes());
    peer.send_ulpdu(&untagged(0x41, 0x4b, 0, 3, 1, 0, &payload));
    assert_eq!(peer.output_ulpdus().len(), 1);
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(sink.bytes(), 42u64.to_ne_bytes());
}

/// The Terminate about each kind of message has the segment's length and DDP header, and no RDMA
/// header.
#[test]
fn x73_12_errors_carry_the_ddp_header_and_no_other() {
    let immediate = |opcode, msn, mo, bytes: usize| untagged(0x41, opcode, 0, 0, msn, mo, &vec![1; bytes]);
    let response = |msn, id: u32| {
        let mut payload = id.to_be_bytes().to_vec();
        payload.resize(12, 0);
        untagged(0x41, 0x4b, 0, 3, msn, 0, &payload)
    };
    let mut at_fault = vec![
        atomic_request(2, 0, 5, 0, [0; 4]),
        atomic_request(1, 0, 5, 0, [0; 4]),
        atomic_request(1, 1, 5, 0, [0; 4]),
        response(2, 1),
        response(1, 9),
    ];
    for opcode in [0x48, 0x49] {
        at_fault.extend([
            immediate(opcode, 1, 0, 8),
            immediate(opcode, 2, 0, 8),
            immediate(opcode, 1, 4, 8),
            immediate(opcode, 1, 0, 7),
        ]);
    }
    for ulpdu in at_fault {
        let mut peer = Scripted::new();
        let sink = peer.node.region(8, everything());
        peer.node.post(&fetch_add(1, 5, 0, 1).sge(sink.sge(0, 8)));
        assert_eq!(peer.output_ulpdus().len(), 1);
        peer.send_ulpdu(&ulpdu);
        let payload = peer.terminate();
        let mut expected = hex("c000");
        expected.extend((ulpdu.len() as u16).to_be_bytes());
        expected.extend(&ulpdu[..18]);
        assert_eq!(payload[2..], expected, "{ulpdu:02x?}");
    }
}

#[test]
fn x73_13_messages_have_version_1_and_no_stag_to_invalidate() {
    let mut pair = Pair::new();
    (0..2).for_each(|end| pair.wire.record(end));
    let target = pair.b.region(8, everything());
    let sink = pair.a.region(8, everything());
    (1..=2).for_each(|cookie| pair.b.post_recv(cookie, &[]));
    pair.a
        .post(&fetch_add(1, target.stag, target.base, 1).sge(sink.sge(0, 8)));
    let write = Work::new(Opcode::WriteImm, 2).to(target.stag, target.base);
    pair.a.post(&write.clone().immediate([1; 4]));
    pair.a.post(&write.immediate([2; 4]).flags(SendFlags::SOLICITED));
    pair.run_now();
    let mut messages = Vec::new();
    for end in 0..2 {
        let bytes = pair.recorded(end);
        let mut rest = &bytes[..];
        while let Ok((ulpdu, later)) = fpdu::parse(rest, CrcMode::On) {
            rest = later;
            if ulpdu[1] & 0xf >= 0x8 {
                messages.push((ulpdu[1], be32(&ulpdu[2..])));
            }
        }
    }
    assert_eq!(messages, [(0x4a, 0), (0x48, 0), (0x49, 0), (0x4b, 0)]);
}

#[test]
fn x73_atomics_need_their_right_and_a_slot() {
    let mut peer = Scripted::new();
    let region = peer.node.region(
        8,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
    );
    peer.send_ulpdu(&atomic_request(
        1,
        0,
        region.stag,
        region.base,
        [1, 0, 0, u64::MAX],
    ));
    assert_eq!(peer.terminate()[..4], hex("0102c000"));
    let mut peer = Scripted::with(
        &Shape::default(),
        Attachment {
            ird: 0,
            ..agreed(true)
        },
    );
    let region = peer.node.region(8, everything());
    peer.send_ulpdu(&atomic_request(
        1,
        0,
        region.stag,
        region.base,
        [1, 0, 0, u64::MAX],
    ));
    assert_eq!(peer.terminate()[..4], hex("1202c000"));
    assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, 0x1202_c000)]);
}
