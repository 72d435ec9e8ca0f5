//! RDMAP's rows: messages, Sends, the Terminate, order.

use super::{Pair, Scripted, vector};
use crate::counters::Counter;
use crate::memory::{Accessor, MemoryAccess, Need};
use crate::testing::rig::*;
use urnic_device::cqe::CqeFlags;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::{Access, QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::crc::crc32c;
use urnic_wire::rdmap::TerminateError;

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

fn with_receive(len: usize) -> (Scripted, Region) {
    let mut peer = Scripted::new();
    let region = peer.node.region(len, everything());
    peer.node.post_recv(1, &[region.sge(0, len)]);
    (peer, region)
}

/// An engine that received these bytes, and its Terminate.
fn answer_to(mut peer: Scripted, ulpdu: &[u8]) -> Vec<u8> {
    peer.send_ulpdu(ulpdu);
    peer.terminate()
}

#[test]
fn rdm_c_01_control_bytes_of_every_message() {
    let mut peer = Scripted::new();
    let region = peer.node.region(64, everything());
    let sink = region.sge(0, 8);
    let works = [
        (Work::send(0), 0x4143),
        (Work::send(0).flags(SendFlags::SOLICITED), 0x4145),
        (Work::new(Opcode::SendInv, 0).to(0x1122_3344, 0), 0x4144),
        (
            Work::new(Opcode::SendInv, 0)
                .to(0x1122_3344, 0)
                .flags(SendFlags::SOLICITED),
            0x4146,
        ),
        (Work::write(0, 1, 0), 0xc140),
        (Work::read(0, 1, 0).sge(sink), 0x4141),
        (
            Work::new(Opcode::FetchAdd, 0).to(1, 0).atomic(1, 0).sge(sink),
            0x414a,
        ),
    ];
    for (work, expected) in works {
        peer.node.post(&work);
        let ulpdus = peer.output_ulpdus();
        let control = u16::from_be_bytes([ulpdus[0][0], ulpdus[0][1]]);
        assert_eq!(control, expected, "{work:?}");
        let invalidates = matches!(expected, 0x4144 | 0x4146);
        if ulpdus[0][0] & 0x80 == 0 {
            // RDM-C-02: the word is zero where nothing is invalidated.
            assert_eq!(be32(&ulpdus[0][2..]), if invalidates { 0x1122_3344 } else { 0 });
        }
    }
}

#[test]
fn rdm_c_01_reserved_bits_are_ignored() {
    let (mut peer, _) = with_receive(64);
    peer.send_ulpdu(&untagged(0x41, 0x43 | 0x30, 0, 0, 1, 0, b"hi"));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 2)]);
}

#[test]
fn rdm_c_02_invalidate_word_of_a_plain_send_is_ignored() {
    let (mut peer, region) = with_receive(64);
    peer.send_ulpdu(&untagged(0x41, 0x43, region.stag, 0, 1, 0, b"hi"));
    let cqe = peer.node.recv_cq.poll().unwrap();
    assert_eq!(cqe.flags, 0);
    let (memory, pd) = (&peer.node.memory, peer.node.pd);
    assert!(
        memory
            .check(
                Accessor { pd, qid: 7 },
                MemoryAccess {
                    stag: region.stag,
                    offset: region.base,
                    len: 8,
                    need: Need::RemoteWrite
                }
            )
            .is_ok()
    );
}

#[test]
fn rdm_s_vectors_of_the_send_family() {
    for (opcode, flags, name) in [
        (Opcode::Send, SendFlags::empty(), "F-SEND-hello"),
        (Opcode::Send, SendFlags::SOLICITED, "F-SENDSE-hello"),
        (Opcode::SendInv, SendFlags::empty(), "F-SENDINV-hello"),
        (Opcode::SendInv, SendFlags::SOLICITED, "F-SENDSEINV-hello"),
    ] {
        let mut peer = Scripted::new();
        let source = peer.node.filled(b"hello");
        peer.node.post(
            &Work::new(opcode, 1)
                .to(0x1122_3344, 0)
                .flags(flags)
                .sge(source.sge(0, 5)),
        );
        assert_eq!(peer.output(), vector(name));
    }
}

#[test]
fn rdm_w_01_a_write_is_not_delivered_and_gathers() {
    let mut pair = Pair::new();
    let (left, right) = (pair.a.filled(b"abcdefgh"), pair.b.region(16, everything()));
    let work = Work::write(1, right.stag, right.base + 2)
        .sge(left.sge(6, 2))
        .sge(left.sge(0, 0))
        .sge(left.sge(0, 3));
    pair.b.post_recv(1, &[right.sge(0, 16)]);
    pair.a.post(&work);
    pair.run_now();
    assert_eq!(right.bytes()[..8], *b"\0\0ghabc\0");
    assert_eq!(pair.a.sent(), [(1, SUCCESS)]);
    assert!(pair.b.received().is_empty() && pair.b.sent().is_empty());
}

#[test]
fn rdm_w_02_a_send_means_that_earlier_writes_are_placed() {
    let mut pair = Pair::new();
    let len = 300_000;
    let (left, right) = (pair.a.filled(&pattern(len)), pair.b.region(len, everything()));
    pair.b.post_recv(1, &[]);
    pair.a
        .post(&Work::write(1, right.stag, right.base).sge(left.sge(0, len)));
    pair.a.post(&Work::send(2));
    while pair.b.recv_cq.poll().is_none() {
        assert!(pair.step());
    }
    assert!(right.bytes() == pattern(len));
}

#[test]
fn rdm_s_01_a_send_takes_exactly_one_receive_even_of_nothing() {
    let mut pair = Pair::new();
    pair.b.post_recv(1, &[]);
    pair.b.post_recv(2, &[]);
    pair.a.post(&Work::send(1));
    pair.a.post(&Work::send(2));
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, SUCCESS, 0), (2, SUCCESS, 0)]);
}

#[test]
fn rdm_s_03_send_with_invalidate() {
    let mut pair = Pair::new();
    let region = pair.b.region(64, everything());
    let buffer = pair.b.region(64, everything());
    pair.b.post_recv(1, &[buffer.sge(0, 64)]);
    pair.a
        .post(&Work::new(Opcode::SendInv, 1).to(region.stag, 0).inline(b"hello"));
    pair.run_now();
    let cqe = pair.b.recv_cq.poll().unwrap();
    assert_eq!((status(&cqe), cqe.flags), (SUCCESS, CqeFlags::WITH_INV.bits()));
    assert_eq!((opcode(&cqe), cqe.byte_len.get()), (WcOpcode::Recv, 5));
    assert_eq!(u32::from_ne_bytes(cqe.extra), region.stag);
    pair.a
        .post(&Work::write(2, region.stag, region.base).inline(b"x"));
    pair.run_now();
    assert_eq!(pair.b.faults(), [(QpFault::TerminateSent, 0x1100_c000)]);
    assert_eq!(region.bytes(), [0; 64]);
}

#[test]
fn rdm_s_04_a_stag_that_cannot_be_invalidated() {
    // Unknown: the operation fails.
    let (mut peer, _) = with_receive(64);
    peer.send(&vector("F-SENDINV-hello"));
    let payload = peer.terminate();
    assert_eq!(payload[..4], hex("0209c000"));
    assert_eq!(peer.node.received(), [(1, WcStatus::RemInvReqErr, 0)]);
    // Of another domain: a protection error, as in the vector but for the STag.
    let (mut peer, _) = with_receive(64);
    let other = peer.node.memory.domains().allocate().unwrap();
    let region = peer.node.region_in(other, 8, everything());
    peer.send_ulpdu(&untagged(0x41, 0x44, region.stag, 0, 1, 0, b"hello"));
    let mut expected = vector("F-TERM-INV-019");
    expected[28..32].copy_from_slice(&region.stag.to_be_bytes());
    let crc = crc32c(&expected[..44]);
    expected[44..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(peer.output(), expected);
}

#[test]
fn rdm_s_05_solicited_events_are_marked() {
    let mut pair = Pair::new();
    pair.b.post_recv(1, &[]);
    pair.b.post_recv(2, &[]);
    pair.a.post(&Work::send(1));
    pair.a.post(&Work::send(2).flags(SendFlags::SOLICITED));
    pair.run_now();
    assert_eq!(pair.b.recv_cq.poll().unwrap().flags, 0);
    assert_eq!(pair.b.recv_cq.poll().unwrap().flags, CqeFlags::SOLICITED.bits());
}

#[test]
fn rdm_t_02_and_03_headers_of_a_refused_read_request() {
    let mut peer = Scripted::new();
    let source = peer.node.region(64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let request = read_request(1, (0x100, 0x7f00_0000_1000), 64, (source.stag, source.base));
    peer.send_ulpdu(&request);
    let mut expected = vector("F-TERM-RREQ-012");
    expected[26..72].copy_from_slice(&request);
    let crc = crc32c(&expected[..72]);
    expected[72..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(peer.output(), expected);
}

#[test]
fn rdm_t_04_nothing_follows_the_terminate() {
    let mut peer = Scripted::new();
    peer.send_ulpdu(&send_segment(true, 1, 0, b"x"));
    peer.node.post(&Work::send(1).inline(b"late"));
    peer.node.post(&Work::send(2).inline(b"later"));
    peer.terminate();
    assert!(peer.output().is_empty());
    assert_eq!(peer.node.sent(), [(1, FLUSHED), (2, FLUSHED)]);
    assert_eq!(peer.node.count(Counter::TxTerminates), 1);
}

#[test]
fn rdm_t_04_a_terminate_needs_no_receive() {
    let mut peer = Scripted::new();
    peer.send(&vector("F-TERM-RREQ-012"));
    assert_eq!(peer.node.faults(), [(QpFault::TerminateReceived, 0x0102_e000)]);
    assert!(peer.output().is_empty(), "no Terminate answers a Terminate");
    assert!(peer.finished);
    assert_eq!(peer.node.engine.status().terminate_received.get(), 0x0102_e000);
}

/// Receives this Terminate while three Reads are outstanding.
fn outcomes_of(terminate: &[u8]) -> Vec<(u64, WcStatus, u32)> {
    let mut peer = Scripted::new();
    let sink = peer.node.region(64, everything());
    for n in 1..=3u64 {
        peer.node.post(&Work::read(n, 0x200, 0).sge(sink.sge(0, 8)));
    }
    assert_eq!(peer.output_ulpdus().len(), 3);
    peer.send_ulpdu(terminate);
    std::iter::from_fn(|| peer.node.send_cq.poll())
        .map(|cqe| (cqe.cookie.get(), status(&cqe), cqe.vendor_error.get()))
        .collect()
}

fn terminate_of(control: &str, headers: &[u8]) -> Vec<u8> {
    let mut payload = hex(control);
    if !headers.is_empty() {
        payload.extend_from_slice(&(headers.len() as u16).to_be_bytes());
        payload.extend_from_slice(headers);
    }
    untagged(0x41, 0x47, 0, 2, 1, 0, &payload)
}

#[test]
fn rdm_t_06_the_faulty_request_is_found_and_others_flushed() {
    let second = read_request(2, (1, 0), 8, (0x200, 0));
    let outcomes = outcomes_of(&terminate_of("0100e000", &second));
    assert_eq!(
        outcomes,
        [
            (1, FLUSHED, 0),
            (2, WcStatus::RemAccessErr, 0x0100_e000),
            (3, FLUSHED, 0)
        ]
    );
}

#[test]
fn rdm_t_06_without_a_request_all_are_flushed() {
    let outcomes = outcomes_of(&terminate_of("20020000", &[]));
    assert_eq!(
        outcomes,
        [(1, FLUSHED, 0x2002_0000), (2, FLUSHED, 0), (3, FLUSHED, 0)]
    );
}

#[test]
fn rdm_t_06_error_codes_become_statuses() {
    let first = read_request(1, (1, 0), 8, (0x200, 0));
    for (control, expected) in [
        ("0100e000", WcStatus::RemAccessErr),
        ("0101e000", WcStatus::RemAccessErr),
        ("0102e000", WcStatus::RemAccessErr),
        ("0206c000", WcStatus::RemInvReqErr),
        ("0207c000", WcStatus::RemOpErr),
        ("0209c000", WcStatus::RemAccessErr),
        ("1000c000", WcStatus::RemOpErr),
        ("1202c000", WcStatus::RemOpErr),
        ("1203c000", WcStatus::RemInvReqErr),
        ("1205c000", WcStatus::RemInvReqErr),
    ] {
        assert_eq!(
            outcomes_of(&terminate_of(control, &first))[0].1,
            expected,
            "{control}"
        );
    }
    let mut atomic = first;
    atomic[1] = 0x4a;
    let of_an_atomic = outcomes_of(&terminate_of("0207c000", &atomic))[0].1;
    assert_eq!(of_an_atomic, WcStatus::RemInvReqErr);
}

#[test]
fn rdm_t_07_four_kinds_of_errors() {
    // (1) in creating a message: no headers.
    let mut peer = Scripted::new();
    peer.node.post(&Work::send(1).sge(sge(0, 8, 0x9999)));
    peer.run();
    assert_eq!(peer.terminate(), hex("00000000"));
    assert_eq!(peer.node.sent(), [(1, WcStatus::LocProtErr)]);
    assert_eq!(peer.node.faults(), [(QpFault::LocalWork, 0)]);
    // (2) in a Write, Send or Response: the DDP header. (3) in a Read Request: also its own.
    assert_eq!(
        answer_to(Scripted::new(), &write_segment(5, 0, b"x")).len(),
        4 + 2 + 14
    );
    assert_eq!(
        answer_to(Scripted::new(), &send_segment(true, 1, 0, b"x")).len(),
        4 + 2 + 18
    );
    let request = read_request(1, (1, 0), 8, (0x200, 0));
    assert_eq!(answer_to(Scripted::new(), &request).len(), 4 + 2 + 18 + 28);
    // (4) several errors: the first is reported.
    let mut both = fpdu_of(&write_segment(5, 0, b"x"));
    both.extend(fpdu_of(&send_segment(true, 9, 0, b"x")));
    let mut peer = Scripted::new();
    peer.send(&both);
    assert_eq!(peer.terminate()[..2], [0x11, 0x00]);
}

#[test]
fn rdm_t_08_a_senseless_terminate_is_not_answered() {
    for ulpdu in [
        untagged(0x41, 0x47, 0, 1, 1, 0, &[0; 4]),
        untagged(0x41, 0x47, 0, 2, 2, 0, &[0; 4]),
        untagged(0x41, 0x47, 0, 2, 1, 4, &[0; 4]),
        untagged(0x01, 0x47, 0, 2, 1, 0, &[0; 4]),
        untagged(0x41, 0x47, 0, 2, 1, 0, &[0; 3]),
        tagged(0xc1, 0x47, 0, 0, &[0; 4]),
    ] {
        let mut peer = Scripted::new();
        peer.send_ulpdu(&ulpdu);
        assert!(peer.output().is_empty());
        assert_eq!(peer.node.engine.state(), QpState::Err);
        assert!(!peer.node.engine.is_attached());
    }
}

#[test]
fn rdm_t_09_odd_terminates_are_understood() {
    for (control, received) in [("23070000", 0x2007_0000), ("10020700 0000", 0x0102_8000)] {
        let mut peer = Scripted::new();
        peer.node.post(&Work::send(1).inline(b"x"));
        peer.run();
        peer.send_ulpdu(&untagged(0x41, 0x47, 0, 2, 1, 0, &hex(control)));
        assert_eq!(peer.node.faults(), [(QpFault::TerminateReceived, received)]);
    }
    // As the answer to a Reply, siw's swapped nibbles mean start-up.
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    peer.send_ulpdu(&untagged(0x41, 0x47, 0, 2, 1, 0, &hex("02060000")));
    assert_eq!(peer.node.faults(), [(QpFault::TerminateReceived, 0x2006_0000)]);
}

#[test]
fn rdm_o_02_a_read_sees_the_write_before_it() {
    let mut pair = Pair::new();
    let target = pair.b.region(8, everything());
    let sink = pair.a.region(8, everything());
    for n in 0..100u64 {
        pair.a.post(
            &Work::write(n, target.stag, target.base)
                .inline(&n.to_ne_bytes())
                .unsignaled(),
        );
        pair.a
            .post(&Work::read(n, target.stag, target.base).sge(sink.sge(0, 8)));
        pair.run_now();
        assert_eq!(pair.a.sent(), [(n, SUCCESS)]);
        assert_eq!(sink.bytes(), n.to_ne_bytes());
    }
}

#[test]
fn rdm_o_03_and_o_04_a_read_holds_back_later_completions() {
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 5, 0).sge(sink.sge(0, 8)));
    peer.node.post(&Work::send(2).inline(b"x"));
    assert_eq!(peer.output_ulpdus().len(), 2, "the Send is on the wire");
    assert!(peer.node.sent().is_empty());
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn rdm_o_05_answers_and_requests_take_turns() {
    let mut peer = Scripted::new();
    let source = peer.node.filled(&pattern(300_000));
    peer.wire.set_capacity(0, 0);
    for msn in 1..=3 {
        peer.send_unread(&fpdu_of(&read_request(
            msn,
            (1, 0),
            300_000,
            (source.stag, source.base),
        )));
    }
    for n in 0..3 {
        peer.node.post(&Work::send(n).sge(source.sge(0, 4000)));
    }
    peer.wire.set_capacity(0, 1 << 20);
    let mut opcodes: Vec<u8> = peer.output_ulpdus().iter().map(|u| u[1] & 0xf).collect();
    opcodes.dedup();
    assert_eq!(opcodes, [2, 3, 2, 3, 2, 3], "message by message");
}

#[test]
fn rdm_m_03_read_request_checks() {
    let check = |request: &dyn Fn(&Scripted) -> Vec<u8>, code: &str| {
        let peer = Scripted::new();
        let request = request(&peer);
        let payload = answer_to(peer, &request);
        assert_eq!(payload[..6], hex(&format!("{code}e000 002e")));
        assert_eq!(payload[6..], request[..], "DDP and RDMA header");
    };
    let all = |peer: &Scripted| peer.node.region(64, everything());
    check(&|_| read_request(1, (1, 0), 8, (0x200, 0)), "0100");
    check(
        &|p| {
            let r = all(p);
            read_request(1, (1, 0), 65, (r.stag, r.base))
        },
        "0101",
    );
    check(
        &|p| {
            let r = all(p);
            read_request(1, (1, 0), 8, (r.stag, r.base - 1))
        },
        "0101",
    );
    check(
        &|p| {
            let r = all(p);
            read_request(1, (1, 0), 8, (r.stag, u64::MAX - 3))
        },
        "0104",
    );
    check(
        &|p| {
            let other = p.node.memory.domains().allocate().unwrap();
            let r = p.node.region_in(other, 64, everything());
            read_request(1, (1, 0), 8, (r.stag, r.base))
        },
        "0103",
    );
    check(
        &|p| {
            let r = p.node.region(64, Access::LOCAL_WRITE);
            read_request(1, (1, 0), 8, (r.stag, r.base))
        },
        "0102",
    );
}

#[test]
fn rdm_m_03_read_requests_out_of_place() {
    let at = |msn, mo, last: bool| {
        let mut request = read_request(msn, (1, 0), 0, (1, 0));
        request[14..18].copy_from_slice(&u32::to_be_bytes(mo));
        request[0] = if last { 0x41 } else { 0x01 };
        request
    };
    assert_eq!(answer_to(Scripted::new(), &at(2, 0, true))[..2], [0x12, 0x03]);
    assert_eq!(answer_to(Scripted::new(), &at(1, 4, true))[..2], [0x12, 0x04]);
    assert_eq!(answer_to(Scripted::new(), &at(1, 0, false))[..2], [0x12, 0x05]);
    let short = &at(1, 0, true)[..40];
    assert_eq!(
        answer_to(Scripted::new(), short)[..2],
        u16::to_be_bytes(TerminateError::RdmapOperation as u16)
    );
}

#[test]
fn rdm_m_04_read_with_local_invalidate() {
    let mut pair = Pair::new();
    let source = pair.b.filled(b"12345678");
    let sink = pair.a.region(8, everything());
    pair.wire.record(0);
    pair.a.post(
        &Work::new(Opcode::ReadInv, 1)
            .to(source.stag, source.base)
            .sge(sink.sge(0, 8)),
    );
    pair.run_now();
    assert_eq!(pair.a.sent(), [(1, SUCCESS)]);
    assert_eq!(pair.recorded(0)[2..4], [0x41, 0x41], "a plain Read on the wire");
    assert_eq!(sink.bytes(), *b"12345678");
    pair.a.post(&Work::send(2).sge(sink.sge(0, 8)));
    pair.run_now();
    assert_eq!(pair.a.sent(), [(2, WcStatus::LocProtErr)]);
}

#[test]
fn rdm_m_04_a_read_that_invalidates_has_one_element() {
    for count in [0, 2] {
        let mut pair = Pair::new();
        let source = pair.b.filled(b"12345678");
        let sink = pair.a.region(8, everything());
        let mut read = Work::new(Opcode::ReadInv, 1).to(source.stag, source.base);
        for n in 0..count {
            read = read.sge(sink.sge(4 * n, 4));
        }
        pair.a.post(&read);
        pair.run_now();
        assert_eq!(pair.a.sent(), [(1, WcStatus::LocQpOpErr)], "{count} elements");
    }
}

#[test]
fn rdm_m_05_versions_and_opcodes() {
    let (mut peer, _) = with_receive(64);
    peer.send_ulpdu(&untagged(0x41, 0x4c, 0, 0, 1, 0, b"hello"));
    assert_eq!(peer.output(), vector("F-TERM-OPC-026"));
    let rv = untagged(0x41, 0x83, 0, 0, 1, 0, b"hello");
    assert_eq!(answer_to(Scripted::new(), &rv)[..4], hex("0205c000"));
    for opcode in 0x8..=0xf {
        let shape = Shape {
            extensions: false,
            ..Shape::default()
        };
        let peer = Scripted::with(&shape, agreed(true));
        let ulpdu = untagged(0x41, 0x40 | opcode, 0, 0, 1, 0, &[0; 8]);
        assert_eq!(answer_to(peer, &ulpdu)[..4], hex("0206c000"));
    }
}
