//! Every vector of `vectors.json`, byte for byte in both directions.

use crate::terminate;
use hex_literal::hex;
use std::collections::{BTreeMap, BTreeSet};
use urnic_wire::ddp::{self, TaggedHeader, UntaggedHeader};
use urnic_wire::mpa::fpdu::{self, CrcMode, LENGTH_LEN};
use urnic_wire::mpa::marker;
use urnic_wire::mpa::startup::{
    EnhancedWord, FrameKind, HEADER_LEN, MAX_FRAME_LEN, NO_NEGOTIATION, RtrKey, StartupFlags, StartupFrame,
    StartupHeader,
};
use urnic_wire::rdmap::{
    AtomicOperation, AtomicRequest, AtomicResponse, Body, Control, ImmediateData, Opcode, ReadRequest,
    Segment,
};

fn vectors() -> BTreeMap<String, Vec<u8>> {
    let text = include_str!("../vectors.json");
    let hex: BTreeMap<String, String> = serde_json::from_str(text).unwrap();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    hex.into_iter()
        .map(|(name, digits)| (name, digits.as_bytes().chunks(2).map(byte).collect()))
        .collect()
}

pub(crate) fn vector(name: &str) -> Vec<u8> {
    vectors()
        .remove(name)
        .unwrap_or_else(|| panic!("no vector {name}"))
}

const C: StartupFlags = StartupFlags {
    markers: false,
    crc: true,
    reject: false,
    enhanced: false,
};
const CS: StartupFlags = StartupFlags { enhanced: true, ..C };

const fn frame(kind: FrameKind, flags: StartupFlags, revision: u8, private_data: &[u8]) -> StartupFrame<'_> {
    StartupFrame {
        kind,
        flags,
        revision,
        word: None,
        private_data,
    }
}

const fn enhanced(kind: FrameKind, flags: StartupFlags, word: EnhancedWord, ulp: &[u8]) -> StartupFrame<'_> {
    StartupFrame {
        kind,
        flags,
        revision: 2,
        word: Some(word),
        private_data: ulp,
    }
}

pub(crate) const P2P: EnhancedWord = EnhancedWord {
    peer_to_peer: true,
    rtr_send: false,
    rtr_write: true,
    rtr_read: true,
    ird: 16,
    ord: 8,
};
const CLIENT_SERVER: EnhancedWord = EnhancedWord {
    peer_to_peer: false,
    rtr_send: false,
    rtr_write: false,
    rtr_read: false,
    ird: 16,
    ord: 8,
};

/// RFC 8797: RPC-over-RDMA version 1, remote invalidation, 4096 bytes inline each way.
const RPCRDMA_CMPRIV: &[u8] = &hex!("f6ab0e18 01010303");

pub(crate) const STARTUP: &[(&str, StartupFrame<'_>)] = &[
    ("MPA-REQ-R1", frame(FrameKind::Request, C, 1, b"")),
    ("MPA-REP-R1", frame(FrameKind::Reply, C, 1, b"")),
    (
        "MPA-REP-R1-REJ",
        frame(FrameKind::Reply, StartupFlags { reject: true, ..C }, 1, b"no"),
    ),
    (
        "MPA-REQ-R1-MC",
        frame(FrameKind::Request, StartupFlags { markers: true, ..C }, 1, b""),
    ),
    (
        "MPA-REQ-R1-NOCRC",
        frame(FrameKind::Request, StartupFlags { crc: false, ..C }, 1, b""),
    ),
    (
        "MPA-REQ-R0-RDMAC",
        frame(FrameKind::Request, StartupFlags { markers: true, ..C }, 0, b""),
    ),
    ("MPA-REQ-R2-P2P", enhanced(FrameKind::Request, CS, P2P, b"")),
    (
        "MPA-REP-R2-P2P",
        enhanced(
            FrameKind::Reply,
            CS,
            EnhancedWord {
                rtr_write: false,
                ird: 8,
                ord: 16,
                ..P2P
            },
            b"",
        ),
    ),
    (
        "MPA-REQ-R2-CS",
        enhanced(FrameKind::Request, CS, CLIENT_SERVER, b""),
    ),
    (
        "MPA-REQ-R2-ALLRTR",
        enhanced(
            FrameKind::Request,
            CS,
            EnhancedWord {
                rtr_send: true,
                ird: 1,
                ord: 1,
                ..P2P
            },
            b"",
        ),
    ),
    (
        "MPA-REQ-R2-NONEG",
        enhanced(
            FrameKind::Request,
            CS,
            EnhancedWord {
                ird: NO_NEGOTIATION,
                ord: NO_NEGOTIATION,
                ..CLIENT_SERVER
            },
            b"",
        ),
    ),
    ("MPA-REQ-R2-PD", enhanced(FrameKind::Request, CS, P2P, b"ULP!")),
    (
        "MPA-REQ-R2-RPCRDMA",
        enhanced(
            FrameKind::Request,
            CS,
            EnhancedWord {
                rtr_write: false,
                ord: 1,
                ..P2P
            },
            RPCRDMA_CMPRIV,
        ),
    ),
    ("S001-REQ", frame(FrameKind::Request, CS, 1, b"")),
    ("S001-REP", frame(FrameKind::Reply, CS, 1, b"")),
    (
        "S001-RTR-hex",
        frame(
            FrameKind::Rtr(RtrKey::Hex),
            StartupFlags { crc: false, ..C },
            1,
            b"",
        ),
    ),
    (
        "S001-RTR-ascii",
        frame(
            FrameKind::Rtr(RtrKey::Text),
            StartupFlags { crc: false, ..C },
            1,
            b"",
        ),
    ),
];

/// A one-segment tagged message.
const fn tagged<'a>(opcode: Opcode, stag: u32, to: u64, data: &'a [u8]) -> Segment<'a> {
    let rsvd_ulp = Control { opcode }.byte();
    let header = ddp::Header::Tagged(TaggedHeader {
        last: true,
        rsvd_ulp,
        stag,
        to,
    });
    Segment {
        opcode,
        header,
        body: Body::Data(data),
    }
}

/// A one-segment untagged message.
const fn untagged<'a>(opcode: Opcode, qn: u32, msn: u32, body: Body<'a>) -> Segment<'a> {
    invalidating(opcode, 0, qn, msn, body)
}

const fn invalidating<'a>(opcode: Opcode, stag: u32, qn: u32, msn: u32, body: Body<'a>) -> Segment<'a> {
    let rsvd_ulp = Control { opcode }.byte();
    let header = UntaggedHeader {
        last: true,
        rsvd_ulp,
        rsvd_ulp_word: stag,
        qn,
        msn,
        mo: 0,
    };
    Segment {
        opcode,
        header: ddp::Header::Untagged(header),
        body,
    }
}

const RTR_READ: ReadRequest = ReadRequest {
    sink_stag: 1,
    sink_to: 0,
    size: 0,
    source_stag: 1,
    source_to: 0,
};
pub(crate) const READ_4096: ReadRequest = ReadRequest {
    sink_stag: 0x100,
    sink_to: 0x7f00_0000_1000,
    size: 4096,
    source_stag: 0x200,
    source_to: 0x7f00_0000_2000,
};

pub(crate) const SEGMENTS: &[(&str, Segment<'_>)] = &[
    ("F-WRITE0-RTR", tagged(Opcode::Write, 1, 0, b"")),
    (
        "F-RREQ0-RTR",
        untagged(Opcode::ReadRequest, 1, 1, Body::ReadRequest(RTR_READ)),
    ),
    (
        "F-RREQ0-RTR-siw",
        untagged(
            Opcode::ReadRequest,
            1,
            1,
            Body::ReadRequest(ReadRequest {
                sink_stag: 0,
                ..RTR_READ
            }),
        ),
    ),
    ("F-RRESP0", tagged(Opcode::ReadResponse, 1, 0, b"")),
    ("F-SEND0-RTR", untagged(Opcode::Send, 0, 1, Body::Data(b""))),
    ("F-SEND-hello", untagged(Opcode::Send, 0, 1, Body::Data(b"hello"))),
    (
        "F-SENDSE-hello",
        untagged(Opcode::SendSolicited, 0, 1, Body::Data(b"hello")),
    ),
    (
        "F-SENDINV-hello",
        invalidating(Opcode::SendInvalidate, 0x1122_3344, 0, 1, Body::Data(b"hello")),
    ),
    (
        "F-SENDSEINV-hello",
        invalidating(
            Opcode::SendSolicitedInvalidate,
            0x1122_3344,
            0,
            1,
            Body::Data(b"hello"),
        ),
    ),
    ("F-WRITE-abcd", tagged(Opcode::Write, 0x1234, 0x10, b"abcd")),
    (
        "F-RREQ-4096",
        untagged(Opcode::ReadRequest, 1, 1, Body::ReadRequest(READ_4096)),
    ),
    (
        "F-RRESP-abcd",
        tagged(Opcode::ReadResponse, 0x100, 0x7f00_0000_1000, b"abcd"),
    ),
    (
        "F-ATOMIC-FADD",
        untagged(
            Opcode::AtomicRequest,
            1,
            1,
            Body::AtomicRequest(AtomicRequest {
                operation: AtomicOperation::FetchAdd { add: 1, mask: 0 },
                request_id: 0x55,
                stag: 0x200,
                to: 0x7f00_0000_2000,
            }),
        ),
    ),
    (
        "F-ATOMIC-CSWAP",
        untagged(
            Opcode::AtomicRequest,
            1,
            2,
            Body::AtomicRequest(AtomicRequest {
                operation: AtomicOperation::CmpSwap {
                    swap: 0x1111,
                    swap_mask: u64::MAX,
                    compare: 0x2222,
                    compare_mask: u64::MAX,
                },
                request_id: 0x56,
                stag: 0x200,
                to: 0x7f00_0000_2000,
            }),
        ),
    ),
    (
        "F-ATOMIC-RESP",
        untagged(
            Opcode::AtomicResponse,
            3,
            1,
            Body::AtomicResponse(AtomicResponse {
                request_id: 0x55,
                original: 0x2222,
            }),
        ),
    ),
    (
        "F-IMM",
        untagged(
            Opcode::Immediate,
            0,
            1,
            Body::Immediate(ImmediateData([1, 2, 3, 4, 5, 6, 7, 8])),
        ),
    ),
    (
        "F-IMMSE",
        untagged(
            Opcode::ImmediateSolicited,
            0,
            1,
            Body::Immediate(ImmediateData([1, 2, 3, 4, 5, 6, 7, 8])),
        ),
    ),
    ("F-TERM-202", terminate::message(terminate::CRC)),
    ("F-TERM-205", terminate::message(terminate::LOCAL)),
    ("F-TERM-206", terminate::message(terminate::IRD)),
    ("F-TERM-207", terminate::message(terminate::RTR)),
    (
        "F-TERM-RREQ-012",
        terminate::message(terminate::READ_REQUEST_RIGHTS),
    ),
    ("F-TERM-WRITE-111", terminate::message(terminate::WRITE_BOUNDS)),
    ("F-TERM-QN-121", terminate::message(terminate::QUEUE)),
    ("F-TERM-OPC-026", terminate::message(terminate::OPCODE)),
    ("F-TERM-INV-019", terminate::message(terminate::INVALIDATE)),
];

/// A Send of `payload` as message `msn`.
pub(crate) fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
    emit(&untagged(Opcode::Send, 0, msn, Body::Data(payload)))
}

pub(crate) fn emit(segment: &Segment<'_>) -> Vec<u8> {
    let mut ulpdu = vec![0xee; segment.buffer_len()];
    assert_eq!(segment.emit(&mut ulpdu), ulpdu.len());
    ulpdu
}

pub(crate) fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xee; fpdu::fpdu_len(ulpdu.len())];
    assert_eq!(fpdu::emit(ulpdu, CrcMode::On, &mut bytes), bytes.len());
    bytes
}

/// The FPDUs of `ulpdus` in sequence from the first marker on, and the start of each.
pub(crate) fn marked(ulpdus: &[Vec<u8>]) -> (Vec<u8>, Vec<usize>) {
    let (mut stream, mut starts) = (Vec::new(), Vec::new());
    for ulpdu in ulpdus {
        let start = stream.len();
        starts.push(start);
        stream.resize(
            start + marker::marked_len(start as u64, fpdu::fpdu_len(ulpdu.len())),
            0xee,
        );
        let written = marker::emit(start as u64, ulpdu, CrcMode::On, &mut stream[start..]);
        assert_eq!(start + written, stream.len());
    }
    (stream, starts)
}

/// Parses a stream of marked FPDUs.
pub(crate) fn unmarked(stream: &mut [u8]) -> Vec<Vec<u8>> {
    let (mut ulpdus, mut at) = (Vec::new(), 0);
    while at < stream.len() {
        let (ulpdu, taken) = marker::parse(at as u64, &mut stream[at..], CrcMode::On).unwrap();
        ulpdus.push(stream[at..][ulpdu].to_vec());
        at += taken;
    }
    ulpdus
}

/// The RFC 5041 §5.2 example: 2048 bytes at a MULPDU of 1500.
fn segmented() -> [Vec<u8>; 2] {
    const FIRST: usize = 1500 - ddp::UNTAGGED_LEN;
    let zeros = [0; 2048];
    let segment = |last, mo: usize, data| {
        let header = UntaggedHeader {
            last,
            rsvd_ulp: 0x43,
            rsvd_ulp_word: 0,
            qn: 0,
            msn: 1,
            mo: mo as u32,
        };
        let header = ddp::Header::Untagged(header);
        emit(&Segment {
            opcode: Opcode::Send,
            header,
            body: Body::Data(data),
        })
    };
    [
        segment(false, 0, &zeros[..FIRST]),
        segment(true, FIRST, &zeros[FIRST..]),
    ]
}

type Part = fn() -> Vec<u8>;

/// Vectors that are a part of a longer one, each with the function that extracts it.
const PARTS: &[(&str, Part)] = &[
    ("RPCRDMA-CMPRIV", || {
        StartupFrame::parse(&vector("MPA-REQ-R2-RPCRDMA"))
            .unwrap()
            .0
            .private_data
            .to_vec()
    }),
    ("F-SEG1-hdr", || {
        fpdu(&segmented()[0])[..LENGTH_LEN + ddp::UNTAGGED_LEN].to_vec()
    }),
    ("F-SEG1-crc", || fpdu(&segmented()[0])[1504..].to_vec()),
    ("F-SEG2-hdr", || {
        fpdu(&segmented()[1])[..LENGTH_LEN + ddp::UNTAGGED_LEN].to_vec()
    }),
    ("F-SEG2-crc", || fpdu(&segmented()[1])[588..].to_vec()),
    ("RFC5044-FIG5", || marked(&[send(1, &[0; 24])]).0),
    ("RFC5044-FIG6", || marked(&fig6()).0[492..].to_vec()),
    ("M-BETWEEN-2nd", || marked(&between()).0[512..].to_vec()),
    ("M-PADCRC-tail", || marked(&padcrc()).0[508..520].to_vec()),
    ("M-PADCRC-2nd", || marked(&padcrc()).0[520..].to_vec()),
    ("M-MULTI-m1", || marked(&multi()).0[512..516].to_vec()),
    ("M-MULTI-m2", || marked(&multi()).0[1024..1028].to_vec()),
    ("M-MULTI-crc", || marked(&multi()).0[1232..].to_vec()),
];

/// A first FPDU that ends at 492 (marker 4, length 2, header 18, CRC 4), then that of the figure.
pub(crate) fn fig6() -> [Vec<u8>; 2] {
    [send(1, &[0; 492 - 28]), send(2, &[0; 24])]
}

/// A first FPDU that ends exactly where the second marker is due.
pub(crate) fn between() -> [Vec<u8>; 2] {
    [send(1, &[0; 484]), send(2, b"hello")]
}

/// A first FPDU whose CRC is due exactly where the second marker is.
pub(crate) fn padcrc() -> [Vec<u8>; 2] {
    [send(1, &[0; 488]), send(2, b"hello")]
}

/// An FPDU with three markers.
pub(crate) fn multi() -> [Vec<u8>; 1] {
    [send(1, &[0; 1200])]
}

#[test]
fn every_vector_is_handled_but_rpc_over_rdma() {
    let handled: BTreeSet<&str> = (STARTUP.iter().map(|(name, _)| *name))
        .chain(SEGMENTS.iter().map(|(name, _)| *name))
        .chain(PARTS.iter().map(|(name, _)| *name))
        .collect();
    let vectors = vectors();
    let all: BTreeSet<&str> = vectors.keys().map(String::as_str).collect();
    let left: Vec<_> = all
        .difference(&handled)
        .filter(|name| !name.starts_with("RR-"))
        .collect();
    assert_eq!(left, [&""; 0], "vectors without a test");
    let missing: Vec<_> = handled.difference(&all).collect();
    assert_eq!(missing, [&""; 0], "tests without a vector");
    assert_eq!(
        handled.len(),
        STARTUP.len() + SEGMENTS.len() + PARTS.len(),
        "a vector is handled once"
    );
}

#[test]
fn mpa_s_01_startup_vectors_are_read_and_written() {
    for (name, frame) in STARTUP {
        let bytes = vector(name);
        assert_eq!(StartupFrame::parse(&bytes), Ok((*frame, &[][..])), "{name}");

        let (header, private_data) = bytes.split_first_chunk::<HEADER_LEN>().unwrap();
        let header = StartupHeader::parse(header).unwrap();
        assert_eq!(header.private_data_len, private_data.len(), "{name}");
        assert_eq!(
            StartupFrame::from_parts(header, private_data),
            Ok(*frame),
            "{name}"
        );

        let mut buffer = [0xee; MAX_FRAME_LEN];
        let len = frame.emit(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], frame.buffer_len()), (&bytes[..], len), "{name}");
        assert!(
            buffer[len..].iter().all(|byte| *byte == 0xee),
            "{name} writes past its end"
        );
    }
}

#[test]
fn mpa_f_02_fpdu_vectors_are_read_and_written() {
    for (name, segment) in SEGMENTS {
        let bytes = vector(name);
        let (ulpdu, rest) = fpdu::parse(&bytes, CrcMode::On).unwrap();
        assert_eq!((Segment::parse(ulpdu), rest), (Ok(*segment), &[][..]), "{name}");
        assert_eq!(fpdu(&emit(segment)), bytes, "{name}");
    }
}

#[test]
fn parts_are_written() {
    for (name, part) in PARTS {
        assert_eq!(part(), vector(name), "{name}");
    }
}

#[test]
fn ddp_h_07_segments_of_the_rfc_example_are_read() {
    let zeros = [0; 2048];
    for (hdr, crc, last, mo, payload) in [
        ("F-SEG1-hdr", "F-SEG1-crc", false, 0, 1482),
        ("F-SEG2-hdr", "F-SEG2-crc", true, 1482, 566),
    ] {
        let pad = fpdu::padding(ddp::UNTAGGED_LEN + payload);
        let stream = [vector(hdr), zeros[..payload + pad].to_vec(), vector(crc)].concat();
        let (ulpdu, rest) = fpdu::parse(&stream, CrcMode::On).unwrap();
        let (header, data) = ddp::Header::parse(ulpdu).unwrap();
        let expected = UntaggedHeader {
            last,
            rsvd_ulp: 0x43,
            rsvd_ulp_word: 0,
            qn: 0,
            msn: 1,
            mo,
        };
        assert_eq!(header, ddp::Header::Untagged(expected));
        assert_eq!((data, rest), (&zeros[..payload], &[][..]));
    }
}

#[test]
fn mpa_m_03_marked_streams_are_read() {
    for ulpdus in [
        &fig6()[..],
        &between()[..],
        &padcrc()[..],
        &multi()[..],
        &[send(1, &[0; 24])][..],
    ] {
        assert_eq!(unmarked(&mut marked(ulpdus).0), ulpdus);
    }
}
