use crate::vectors::{READ_4096, emit, fpdu, vector};
use hex_literal::hex;
use urnic_wire::ddp::{Header, UntaggedHeader};
use urnic_wire::mpa::fpdu::{CrcMode, parse};
use urnic_wire::rdmap::{
    Body, Control, HeaderError, Opcode, ReadRequest, Segment, Terminate, TerminateError,
};

pub(crate) const CRC: Terminate<'_> = Terminate::new(TerminateError::MpaCrc);
pub(crate) const LOCAL: Terminate<'_> = Terminate::new(TerminateError::MpaLocalCatastrophic);
pub(crate) const IRD: Terminate<'_> = Terminate::new(TerminateError::MpaInsufficientIrd);
pub(crate) const RTR: Terminate<'_> = Terminate::new(TerminateError::MpaNoMatchingRtr);
pub(crate) const READ_REQUEST_RIGHTS: Terminate<'_> = Terminate {
    segment_length: Some(0x2e),
    ddp_header: Some(&hex!("4141 00000000 00000001 00000001 00000000")),
    read_request: Some(READ_4096),
    ..Terminate::new(TerminateError::RdmapAccessRights)
};
pub(crate) const WRITE_BOUNDS: Terminate<'_> = Terminate {
    segment_length: Some(0x12),
    ddp_header: Some(&hex!("c140 00001234 00000000 00000010")),
    ..Terminate::new(TerminateError::DdpBaseOrBounds)
};
pub(crate) const QUEUE: Terminate<'_> = Terminate {
    segment_length: Some(0x17),
    ddp_header: Some(&hex!("4143 00000000 00000009 00000001 00000000")),
    ..Terminate::new(TerminateError::DdpInvalidQueue)
};
pub(crate) const OPCODE: Terminate<'_> = Terminate {
    segment_length: Some(0x17),
    ddp_header: Some(&hex!("414c 00000000 00000000 00000001 00000000")),
    ..Terminate::new(TerminateError::RdmapUnexpectedOpcode)
};
pub(crate) const INVALIDATE: Terminate<'_> = Terminate {
    segment_length: Some(0x17),
    ddp_header: Some(&hex!("4144 11223344 00000000 00000001 00000000")),
    ..Terminate::new(TerminateError::RdmapProtectedFromInvalidate)
};

/// A Terminate as it is sent: queue 2, MSN 1, MO 0, one segment (RFC 5040 §5.4).
pub(crate) const fn message(terminate: Terminate<'_>) -> Segment<'_> {
    let opcode = Opcode::Terminate;
    let rsvd_ulp = Control { opcode }.byte();
    let header = UntaggedHeader {
        last: true,
        rsvd_ulp,
        rsvd_ulp_word: 0,
        qn: 2,
        msn: 1,
        mo: 0,
    };
    Segment {
        opcode,
        header: Header::Untagged(header),
        body: Body::Terminate(terminate),
    }
}

/// The payload of a Terminate in an FPDU.
fn payload(bytes: &[u8]) -> &[u8] {
    &parse(bytes, CrcMode::On).unwrap().0[18..]
}

fn codes(terminate: Result<Terminate<'_>, HeaderError>) -> (u8, u8, u8) {
    let Terminate {
        layer, etype, code, ..
    } = terminate.unwrap();
    (layer, etype, code)
}

/// The tables of RFC 5040 figure 9, RFC 5041 §7.2, RFC 5044 §8 and RFC 6581, as numbers.
#[test]
fn every_error_of_the_rfcs_and_no_other() {
    let rdmap = [
        (1, &[0x00, 0x01, 0x02, 0x03, 0x04, 0x09, 0xff][..]),
        (2, &[0x05, 0x06, 0x07, 0x08, 0x09, 0xff]),
    ];
    let ddp = [(0, &[0x00][..]), (1, &[0, 1, 2, 3, 4]), (2, &[1, 2, 3, 4, 5, 6])];
    let mpa = [(0, &[1, 2, 3, 4, 5, 6, 7][..])];
    let listed = |layer: u8, etype: u8, code: u8| {
        let table = match layer {
            0 if etype == 0 => return true,
            0 => &rdmap[..],
            1 => &ddp[..],
            2 => &mpa[..],
            _ => return false,
        };
        table
            .iter()
            .any(|(e, codes)| *e == etype && codes.contains(&code))
    };
    for layer in 0..16 {
        for etype in 0..16 {
            for code in 0..=255 {
                let error = TerminateError::from_codes(layer, etype, code);
                assert_eq!(
                    error.is_some(),
                    listed(layer, etype, code),
                    "{layer}/{etype}/{code:02x}"
                );
                if let Some(error) = error {
                    let code = if (layer, etype) == (0, 0) { 0 } else { code };
                    assert_eq!((error.layer(), error.etype(), error.code()), (layer, etype, code));
                }
            }
        }
    }
    assert!(
        TerminateError::ALL
            .windows(2)
            .all(|pair| (pair[0] as u16) < pair[1] as u16)
    );
}

#[test]
fn rdm_t_02_headers_by_kind_of_error() {
    let read = parse_vector("F-RREQ-4096");
    let write = parse_vector("F-WRITE-abcd");
    let hdrct = |error, ulpdu, request| {
        let mut buffer = [0; Terminate::MAX_LEN];
        let terminate = Terminate::for_segment(error, ulpdu, request);
        let len = terminate.emit(&mut buffer);
        assert_eq!(len, terminate.buffer_len());
        (buffer[2], len)
    };
    let with = |error| hdrct(error, &read, Some(READ_4096));
    assert_eq!(with(TerminateError::RdmapLocalCatastrophic), (0x00, 4));
    assert_eq!(with(TerminateError::RdmapAccessRights), (0xe0, 52));
    assert_eq!(with(TerminateError::RdmapUnexpectedOpcode), (0xc0, 24));
    assert_eq!(with(TerminateError::DdpNoBuffer), (0xc0, 24));
    assert_eq!(with(TerminateError::DdpLocalCatastrophic), (0xc0, 24));
    assert_eq!(with(TerminateError::MpaCrc), (0x00, 4));
    assert_eq!(hdrct(TerminateError::DdpBaseOrBounds, &write, None), (0xc0, 20));
    // MPA-F-16: for a segment without a complete header only the length is sent.
    assert_eq!(
        hdrct(TerminateError::DdpLocalCatastrophic, &write[..13], None),
        (0x80, 6)
    );
    assert_eq!(hdrct(TerminateError::DdpLocalCatastrophic, &[], None), (0x80, 6));
}

fn parse_vector(name: &str) -> Vec<u8> {
    parse(&vector(name), CrcMode::On).unwrap().0.to_vec()
}

/// Terminates built from the segment at fault are equal to the vectors.
#[test]
fn rdm_t_03_terminates_for_segments_are_the_vectors() {
    let read = parse_vector("F-RREQ-4096");
    let mut other_queue = parse_vector("F-SEND-hello");
    other_queue[9] = 9;
    let mut other_opcode = parse_vector("F-SEND-hello");
    other_opcode[1] = 0x4c;
    let cases = [
        (
            "F-TERM-RREQ-012",
            TerminateError::RdmapAccessRights,
            read,
            Some(READ_4096),
        ),
        (
            "F-TERM-WRITE-111",
            TerminateError::DdpBaseOrBounds,
            parse_vector("F-WRITE-abcd"),
            None,
        ),
        (
            "F-TERM-QN-121",
            TerminateError::DdpInvalidQueue,
            other_queue,
            None,
        ),
        (
            "F-TERM-OPC-026",
            TerminateError::RdmapUnexpectedOpcode,
            other_opcode,
            None,
        ),
        (
            "F-TERM-INV-019",
            TerminateError::RdmapProtectedFromInvalidate,
            parse_vector("F-SENDINV-hello"),
            None,
        ),
    ];
    for (name, error, ulpdu, request) in cases {
        let terminate = Terminate::for_segment(error, &ulpdu, request);
        assert_eq!(fpdu(&emit(&message(terminate))), vector(name), "{name}");
    }
}

#[test]
fn rdm_t_01_reserved_bits_are_ignored() {
    let mut bytes = payload(&vector("F-TERM-WRITE-111")).to_vec();
    bytes[2] |= 0x1f;
    bytes[3] = 0xff;
    assert_eq!(Terminate::parse(&bytes), Ok(WRITE_BOUNDS));
}

#[test]
fn rdm_t_03_the_length_is_present_with_d_but_invalid_without_m() {
    let mut bytes = payload(&vector("F-TERM-WRITE-111")).to_vec();
    bytes[2] = 0x40;
    bytes[4..6].copy_from_slice(&[0x77, 0x77]);
    let terminate = Terminate::parse(&bytes).unwrap();
    assert_eq!(
        terminate,
        Terminate {
            segment_length: None,
            ..WRITE_BOUNDS
        }
    );
    let mut buffer = [0xee; Terminate::MAX_LEN];
    let len = terminate.emit(&mut buffer);
    assert_eq!(
        (&buffer[..4], &buffer[4..6], &buffer[6..len]),
        (&bytes[..4], &[0, 0][..], &bytes[6..])
    );
}

#[test]
fn rdm_t_08_a_terminate_that_stops_short() {
    let bytes = vector("F-TERM-RREQ-012");
    let bytes = payload(&bytes);
    for have in 0..bytes.len() {
        let found = Terminate::parse(&bytes[..have]);
        if have < 4 {
            let error = HeaderError::Length {
                opcode: Opcode::Terminate,
                expected: 4,
                found: have,
            };
            assert_eq!(found, Err(error));
            continue;
        }
        let terminate = found.unwrap();
        assert_eq!(terminate.error(), Some(TerminateError::RdmapAccessRights));
        assert_eq!(terminate.segment_length, (have >= 6).then_some(0x2e));
        assert_eq!(terminate.ddp_header.is_some(), have >= 24);
        assert_eq!(terminate.read_request, None);
    }
}

#[test]
fn rdm_t_09_llp_errors_with_type_3_are_llp_errors() {
    let bytes = hex!("00164147 00000000 00000002 00000001 00000000 23070000 225b98dc");
    assert_eq!(codes(Terminate::parse(payload(&bytes))), (2, 0, 7));
    assert_eq!(codes(Terminate::parse_at_startup(payload(&bytes))), (2, 0, 7));
    // A code that no LLP has is kept unchanged.
    assert_eq!(codes(Terminate::parse(&hex!("23990000"))), (2, 3, 0x99));
}

/// 2/0/06 in swapped nibbles is also RDMAP's "unexpected opcode"; only the time of its arrival
/// distinguishes them.
#[test]
fn rdm_t_09_swapped_llp_error_is_detected_by_context() {
    let bytes = hex!("00164147 00000000 00000002 00000001 00000000 02060000 6f77b973");
    assert_eq!(codes(Terminate::parse(payload(&bytes))), (0, 2, 6));
    assert_eq!(codes(Terminate::parse_at_startup(payload(&bytes))), (2, 0, 6));
    // Other codes of 0/2 have no meaning in 2/0 of start-up.
    assert_eq!(codes(Terminate::parse_at_startup(&hex!("02080000"))), (0, 2, 8));
}

#[test]
fn rdm_t_09_swapped_nibbles_with_low_header_bits() {
    let header = hex!("4141 00000000 00000001 00000001 00000000");
    let bytes = [&hex!("10020700 002e")[..], &header].concat();
    // R is set, but the Read Request is missing, as soft-iWARP sends it.
    let terminate = Terminate::parse(&bytes).unwrap();
    assert_eq!(
        terminate,
        Terminate {
            read_request: None,
            ..READ_REQUEST_RIGHTS
        }
    );

    // Each error with headers is parsed correctly in swapped form.
    for error in TerminateError::ALL {
        let first = error.etype() << 4 | error.layer();
        let bytes = [&[first, error.code(), 0x03, 0, 0, 0x2e][..], &header].concat();
        let terminate = Terminate::parse(&bytes).unwrap();
        assert_eq!(terminate.error(), Some(error));
        assert_eq!(
            (terminate.segment_length, terminate.ddp_header),
            (Some(0x2e), Some(&header[..]))
        );
    }
}

#[test]
fn rdm_t_09_numbers_with_a_meaning_only_when_swapped() {
    assert_eq!(codes(Terminate::parse(&hex!("21050000"))), (1, 2, 5));
    assert_eq!(codes(Terminate::parse(&hex!("10010000"))), (0, 1, 1));
    assert_eq!(codes(Terminate::parse(&hex!("5a050000"))), (5, 0xa, 5));
    // Neither form has a meaning: the numbers are not swapped, and do not become an LLP error.
    assert_eq!(codes(Terminate::parse(&hex!("3201018c"))), (3, 2, 1));
}

/// Tolerance never changes the meaning of a Terminate that follows the RFCs.
#[test]
fn rdm_t_09_conforming_terminates_are_read_as_they_are() {
    for error in TerminateError::ALL {
        for terminate in [
            Terminate::new(error),
            Terminate {
                segment_length: Some(4),
                ..Terminate::new(error)
            },
            Terminate {
                read_request: Some(READ_4096),
                ..write_bounds_as(error)
            },
        ] {
            let mut buffer = [0; Terminate::MAX_LEN];
            let len = terminate.emit(&mut buffer);
            assert_eq!(Terminate::parse(&buffer[..len]), Ok(terminate));
        }
    }
}

fn write_bounds_as(error: TerminateError) -> Terminate<'static> {
    Terminate {
        layer: error.layer(),
        etype: error.etype(),
        code: error.code(),
        ..WRITE_BOUNDS
    }
}

#[test]
fn rdm_r_09_an_advanced_read_request_is_sent_back() {
    let advanced = ReadRequest {
        sink_to: READ_4096.sink_to + 2048,
        size: 2048,
        source_to: READ_4096.source_to + 2048,
        ..READ_4096
    };
    let read = parse_vector("F-RREQ-4096");
    let terminate = Terminate::for_segment(TerminateError::RdmapInvalidStag, &read, Some(advanced));
    let mut buffer = [0; Terminate::MAX_LEN];
    let len = terminate.emit(&mut buffer);
    assert_eq!(
        ReadRequest::parse(&buffer[len - ReadRequest::LEN..len]),
        Ok(advanced)
    );
    assert_eq!(buffer[6..24], read[..18], "the DDP header is the one that came");
}

/// Every combination of M, D and R: the length is present with M or D, and valid with M alone; each
/// part follows the end of the parts before it.
#[test]
fn rdm_t_01_each_part_is_present_by_its_own_bit() {
    let header = hex!("4141 00000000 00000001 00000001 00000000");
    let mut request = [0; ReadRequest::LEN];
    READ_4096.emit(&mut request);
    for present in 0..8_u8 {
        let [m, d, r] = [4, 2, 1].map(|bit| present & bit != 0);
        let parts: [&[u8]; 4] = [
            &[0x01, 0x02, present << 5, 0],
            if m || d { &[0x00, 0x2e] } else { &[] },
            if d { &header } else { &[] },
            if r { &request } else { &[] },
        ];
        let payload = parts.concat();
        let expected = Terminate {
            segment_length: m.then_some(0x2e),
            ddp_header: d.then_some(&header[..]),
            read_request: r.then_some(READ_4096),
            ..Terminate::new(TerminateError::RdmapAccessRights)
        };
        let parsed = Terminate::parse(&payload).unwrap();
        assert_eq!(parsed, expected, "M, D, R: {m}, {d}, {r}");
        // Bytes after the parts in HdrCt are ignored.
        let longer = [&payload[..], &request].concat();
        assert_eq!(
            Terminate::parse(&longer).unwrap(),
            expected,
            "M, D, R: {m}, {d}, {r}"
        );
        // Without M the length is sent as zero.
        if m || !d {
            let mut bytes = [0; Terminate::MAX_LEN];
            let len = expected.emit(&mut bytes);
            assert_eq!(bytes[..len], payload[..], "M, D, R: {m}, {d}, {r}");
        }
    }
    assert_eq!(Terminate::MAX_LEN, 4 + 2 + 18 + 28, "the longest, figure 9");
}
