//! Properties of any bytes and any values.

use proptest::prelude::*;
use urnic_wire::crc::crc32c;
use urnic_wire::ddp::{self, TaggedHeader, UntaggedHeader};
use urnic_wire::mpa::fpdu::{self, CrcMode, FpduError};
use urnic_wire::mpa::marker::{self, Piece};
use urnic_wire::mpa::startup::{
    EnhancedWord, FrameKind, HEADER_LEN, MAX_FRAME_LEN, RtrKey, StartupFlags, StartupFrame, StartupHeader,
};
use urnic_wire::rdmap::{
    AtomicOperation, AtomicRequest, AtomicResponse, Body, Control, ImmediateData, Opcode, ReadRequest,
    Segment, Terminate, TerminateError,
};

/// The CRC computed bit by bit, most significant first, as RFC 3720 §12.1 describes.
fn reference_crc(bytes: &[u8]) -> u32 {
    let mut remainder = u32::MAX;
    for bit in bytes
        .iter()
        .flat_map(|byte| (0..8).map(move |bit| u32::from(byte >> bit & 1)))
    {
        let carry = remainder >> 31 ^ bit;
        remainder = remainder << 1 ^ if carry == 1 { 0x1edc_6f41 } else { 0 };
    }
    !remainder.reverse_bits()
}

fn bytes(len: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..=len)
}

fn crc_mode() -> impl Strategy<Value = CrcMode> {
    prop_oneof![Just(CrcMode::On), Just(CrcMode::Off)]
}

fn kind() -> impl Strategy<Value = FrameKind> {
    prop_oneof![
        Just(FrameKind::Request),
        Just(FrameKind::Reply),
        Just(FrameKind::Rtr(RtrKey::Hex)),
        Just(FrameKind::Rtr(RtrKey::Text)),
    ]
}

fn flags() -> impl Strategy<Value = StartupFlags> {
    any::<[bool; 4]>().prop_map(|[markers, crc, reject, enhanced]| StartupFlags {
        markers,
        crc,
        reject,
        enhanced,
    })
}

fn word() -> impl Strategy<Value = EnhancedWord> {
    any::<u32>().prop_map(|word| EnhancedWord::parse(word.to_be_bytes()))
}

fn read_request() -> impl Strategy<Value = ReadRequest> {
    any::<[u8; ReadRequest::LEN]>().prop_map(|bytes| ReadRequest::parse(&bytes).unwrap())
}

fn atomic_request() -> impl Strategy<Value = AtomicRequest> {
    let operation = prop_oneof![
        any::<[u64; 2]>().prop_map(|[add, mask]| AtomicOperation::FetchAdd { add, mask }),
        any::<[u64; 4]>().prop_map(
            |[swap, swap_mask, compare, compare_mask]| AtomicOperation::CmpSwap {
                swap,
                swap_mask,
                compare,
                compare_mask
            }
        ),
    ];
    (operation, any::<[u32; 2]>(), any::<u64>()).prop_map(|(operation, [request_id, stag], to)| {
        AtomicRequest {
            operation,
            request_id,
            stag,
            to,
        }
    })
}

fn terminated_header() -> impl Strategy<Value = Vec<u8>> {
    any::<[u8; 18]>().prop_map(|bytes| bytes[..ddp::header_len(bytes[0])].to_vec())
}

/// The bytes of a message of any kind, with a header that fits it.
fn ulpdu() -> impl Strategy<Value = Vec<u8>> {
    let opcode = proptest::sample::select(&Opcode::ALL[..]);
    let header = (any::<bool>(), any::<[u32; 3]>(), any::<u64>());
    let parts = (
        bytes(100),
        read_request(),
        atomic_request(),
        any::<[u8; 12]>(),
        terminated_header(),
    );
    let error = (any::<u16>(), any::<Option<u16>>(), any::<[bool; 2]>());
    (opcode, header, parts, error).prop_map(|(opcode, (last, [word, msn, mo], to), parts, error)| {
        let (data, read_request, atomic_request, fixed, terminated) = parts;
        let (codes, segment_length, [d, r]) = error;
        let rsvd_ulp = Control { opcode }.byte();
        let header = match opcode.queue() {
            None => ddp::Header::Tagged(TaggedHeader {
                last,
                rsvd_ulp,
                stag: word,
                to,
            }),
            Some(qn) => ddp::Header::Untagged(UntaggedHeader {
                last,
                rsvd_ulp,
                rsvd_ulp_word: word,
                qn,
                msn,
                mo,
            }),
        };
        let [first, code] = codes.to_be_bytes();
        let body = match opcode {
            Opcode::ReadRequest => Body::ReadRequest(read_request),
            Opcode::AtomicRequest => Body::AtomicRequest(atomic_request),
            Opcode::AtomicResponse => Body::AtomicResponse(AtomicResponse::parse(&fixed).unwrap()),
            Opcode::Immediate | Opcode::ImmediateSolicited => {
                Body::Immediate(ImmediateData::parse(&fixed[..8]).unwrap())
            }
            Opcode::Terminate => Body::Terminate(Terminate {
                layer: first >> 4,
                etype: first & 0xf,
                code,
                segment_length,
                ddp_header: d.then_some(&terminated[..]),
                read_request: r.then_some(read_request),
            }),
            _ => Body::Data(&data),
        };
        let segment = Segment { opcode, header, body };
        let mut ulpdu = vec![0; segment.buffer_len()];
        assert_eq!(segment.emit(&mut ulpdu), ulpdu.len());
        ulpdu
    })
}

proptest! {
    #[test]
    fn crc32c_agrees_with_the_rfc(bytes in bytes(600)) {
        prop_assert_eq!(crc32c(&bytes), reference_crc(&bytes));
    }

    #[test]
    fn startup_frames_return(
        kind in kind(), flags in flags(), revision: u8, word in word(), ulp in bytes(508), rest in bytes(8),
    ) {
        let header = StartupHeader { kind, flags, revision, private_data_len: 4 };
        let word = header.has_word().then_some(word);
        let frame = StartupFrame { kind, flags, revision, word, private_data: &ulp };
        let mut buffer = vec![0xee; MAX_FRAME_LEN];
        let len = frame.emit(&mut buffer).unwrap();
        prop_assert_eq!(len, frame.buffer_len());
        buffer.truncate(len);
        buffer.extend(&rest);
        prop_assert_eq!(StartupFrame::parse(&buffer), Ok((frame, &rest[..])));
    }

    #[test]
    fn startup_parser_takes_anything(flags: u8, revision: u8, key in 0..5usize, pd_length: u16, rest in bytes(600)) {
        let keys = [b"MPA ID Req Frame", b"MPA ID Rep Frame", b"MPA ID RtR Frame", b"MPA ID Rtr Frame", b"MPA ID XXX Frame"];
        let mut bytes = keys[key].to_vec();
        bytes.extend([flags, revision]);
        bytes.extend((pd_length % 600).to_be_bytes());
        bytes.extend(&rest);
        if let Ok((frame, _)) = StartupFrame::parse(&bytes) {
            let _ = frame.to_string();
            let mut again = [0; MAX_FRAME_LEN];
            let len = frame.emit(&mut again).unwrap();
            prop_assert_eq!(StartupFrame::parse(&again[..len]).unwrap().0, frame);
            // Only reserved bits are lost.
            bytes[16] &= 0xf0;
            prop_assert_eq!(&again[..len], &bytes[..len]);
        }
        let _ = StartupFrame::parse(&rest);
        let _ = rest.first_chunk::<HEADER_LEN>().map(StartupHeader::parse);
    }

    #[test]
    fn fpdus_return(ulpdu in bytes(3000), crc in crc_mode(), rest in bytes(8)) {
        let mut wire = vec![0xee; fpdu::fpdu_len(ulpdu.len())];
        prop_assert_eq!(fpdu::emit(&ulpdu, crc, &mut wire), wire.len());
        prop_assert_eq!(wire.len() % 4, 0);
        wire.extend(&rest);
        prop_assert_eq!(fpdu::parse(&wire, crc), Ok((&ulpdu[..], &rest[..])));
    }

    #[test]
    fn fpdu_parsers_take_anything(mut bytes in bytes(300), length in 0..310u16, start: u64, crc in crc_mode()) {
        let lead = if marker::distance(start) == 0 { 4 } else { 0 };
        if let Some(field) = bytes.get_mut(lead..lead + 2) {
            field.copy_from_slice(&length.to_be_bytes());
        }
        match fpdu::parse(&bytes, crc) {
            Ok((ulpdu, rest)) => prop_assert_eq!(fpdu::fpdu_len(ulpdu.len()) + rest.len(), bytes.len()),
            Err(FpduError::Incomplete { needed, have }) => prop_assert!(needed > have && have == bytes.len()),
            Err(FpduError::Crc { computed, found }) => prop_assert!(computed != found && crc == CrcMode::On),
            Err(FpduError::Marker { .. }) => prop_assert!(false, "no markers here"),
        }
        let before = bytes.clone();
        let expected = marker::wire_len(start, &bytes);
        match marker::parse(start, &mut bytes, crc) {
            Ok((range, taken)) => {
                prop_assert_eq!((range.len(), Some(taken)), (length.into(), expected));
                prop_assert_eq!(&bytes[taken..], &before[taken..]);
            }
            Err(FpduError::Incomplete { needed, have }) => {
                prop_assert!(needed > have && have == bytes.len());
                prop_assert_eq!(&bytes, &before);
            }
            Err(_) => prop_assert_eq!(&bytes, &before),
        }
    }

    #[test]
    fn marked_streams_return(
        ulpdus in prop::collection::vec(bytes(1500), 1..6), start in any::<u64>().prop_map(|n| n & !3), crc in crc_mode(),
    ) {
        let (mut stream, mut offset) = (Vec::new(), start);
        for ulpdu in &ulpdus {
            let at = stream.len();
            stream.resize(at + marker::marked_len(offset, fpdu::fpdu_len(ulpdu.len())), 0xee);
            let written = marker::emit(offset, ulpdu, crc, &mut stream[at..]);
            prop_assert_eq!(at + written, stream.len());
            offset = offset.wrapping_add(written as u64);
        }
        // There is a marker at each position where one is due.
        let due = marker::distance(start);
        for at in (due..stream.len()).step_by(marker::INTERVAL) {
            prop_assert_eq!(&stream[at..at + 2], &[0, 0]);
        }
        let (mut at, mut offset) = (0, start);
        for ulpdu in &ulpdus {
            let (range, taken) = marker::parse(offset, &mut stream[at..], crc).unwrap();
            prop_assert_eq!(&stream[at..][range], &ulpdu[..]);
            at += taken;
            offset = offset.wrapping_add(taken as u64);
        }
        prop_assert_eq!(at, stream.len());
    }

    /// The pieces are the FPDU, complete and in order, with as many markers as counted, at any
    /// start.
    #[test]
    fn pieces_make_up_the_fpdu(start: u64, len in 0..70_000usize) {
        let (mut done, mut markers) = (0, 0);
        for piece in marker::pieces(start, len) {
            match piece {
                Piece::Marker(_) => {
                    let position = done + markers * marker::LEN;
                    prop_assert_eq!(marker::distance(start.wrapping_add(position as u64)), 0);
                    markers += 1;
                }
                Piece::Fpdu(range) => {
                    prop_assert_eq!(range.start, done);
                    prop_assert!(!range.is_empty() && range.len() <= marker::INTERVAL);
                    done = range.end;
                }
            }
        }
        prop_assert_eq!((done, markers), (len, marker::count(start, len)));
        prop_assert_eq!(marker::marked_len(start, len), len + markers * marker::LEN);
    }

    #[test]
    fn segments_return(ulpdu in ulpdu()) {
        let segment = Segment::parse(&ulpdu).unwrap();
        let _ = segment.to_string();
        let mut again = vec![0xee; segment.buffer_len()];
        prop_assert_eq!(segment.emit(&mut again), again.len());
        // A Terminate whose numbers have a meaning only when swapped is corrected; all other bytes
        // are kept.
        if let Body::Terminate(_) = segment.body {
            prop_assert_eq!(Segment::parse(&again), Ok(segment));
        } else {
            prop_assert_eq!(again, ulpdu);
        }
    }

    #[test]
    fn segment_parser_takes_anything(bytes in bytes(100), control in 0..16u8, tagged: bool, queue in 0..5u8) {
        let mut guided = bytes.clone();
        if guided.len() >= 10 {
            guided[0] = if tagged { 0x81 } else { 0x01 } | guided[0] & 0x40;
            guided[1] = 0x40 | control;
            if !tagged {
                guided[6..10].copy_from_slice(&[0, 0, 0, queue]);
            }
        }
        for bytes in [bytes, guided] {
            match Segment::parse(&bytes) {
                Ok(segment) => {
                    let _ = segment.to_string();
                    let mut again = vec![0; segment.buffer_len()];
                    segment.emit(&mut again);
                    prop_assert_eq!(Segment::parse(&again).unwrap().to_string(), segment.to_string());
                }
                Err(error) => {
                    let _ = (error.to_string(), TerminateError::from(error));
                }
            }
        }
    }

    #[test]
    fn terminate_parser_takes_anything(bytes in bytes(70)) {
        if let Ok(terminate) = Terminate::parse(&bytes) {
            let _ = terminate.to_string();
            let mut again = [0; Terminate::MAX_LEN];
            let len = terminate.emit(&mut again);
            prop_assert_eq!(len, terminate.buffer_len());
            prop_assert_eq!(Terminate::parse(&again[..len]), Ok(terminate));
            prop_assert!(Terminate::parse_at_startup(&bytes).is_ok());
        }
    }
}
