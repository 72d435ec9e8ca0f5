use crate::vectors::{SEGMENTS, emit, vector};
use hex_literal::hex;
use urnic_wire::ddp::{Header, TaggedHeader, UntaggedHeader};
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::rdmap::*;

fn untagged(opcode: Opcode, qn: u32) -> Header {
    let rsvd_ulp = Control { opcode }.byte();
    Header::Untagged(UntaggedHeader {
        last: true,
        rsvd_ulp,
        rsvd_ulp_word: 0,
        qn,
        msn: 1,
        mo: 0,
    })
}

fn tagged(opcode: Opcode) -> Header {
    Header::Tagged(TaggedHeader {
        last: true,
        rsvd_ulp: Control { opcode }.byte(),
        stag: 1,
        to: 0,
    })
}

#[test]
fn rdm_c_01_the_table_of_messages() {
    let table = [
        (0x0, Opcode::Write, None),
        (0x1, Opcode::ReadRequest, Some(1)),
        (0x2, Opcode::ReadResponse, None),
        (0x3, Opcode::Send, Some(0)),
        (0x4, Opcode::SendInvalidate, Some(0)),
        (0x5, Opcode::SendSolicited, Some(0)),
        (0x6, Opcode::SendSolicitedInvalidate, Some(0)),
        (0x7, Opcode::Terminate, Some(2)),
        (0x8, Opcode::Immediate, Some(0)),
        (0x9, Opcode::ImmediateSolicited, Some(0)),
        (0xa, Opcode::AtomicRequest, Some(1)),
        (0xb, Opcode::AtomicResponse, Some(3)),
    ];
    for (code, opcode, queue) in table {
        assert_eq!(Control::parse(0x40 | code), Ok(opcode.into()));
        assert_eq!(
            Control::parse(0x70 | code),
            Ok(opcode.into()),
            "reserved bits are ignored"
        );
        assert_eq!(Control { opcode }.byte(), 0x40 | code);
        assert_eq!(opcode.queue(), queue);
        assert_eq!(opcode.is_extension(), code >= 8);
    }
    assert_eq!(
        Opcode::ALL.map(|opcode| opcode as u8),
        core::array::from_fn(|i| i as u8)
    );
    let having = |property: fn(Opcode) -> bool| Opcode::ALL.map(property).map(u8::from);
    assert_eq!(having(Opcode::solicited), [0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0]);
    assert_eq!(having(Opcode::invalidates), [0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]);
}

#[test]
fn rdm_m_05_version_before_opcode() {
    for version in [0, 2, 3] {
        for code in 0..16 {
            let error = Control::parse(version << 6 | code).unwrap_err();
            assert_eq!(error, ControlError::Version(version));
            assert_eq!(TerminateError::from(error), TerminateError::RdmapVersion);
        }
    }
    for code in 0xc..=0xf {
        let error = Control::parse(0x40 | code).unwrap_err();
        assert_eq!(error, ControlError::Opcode(code));
        assert_eq!(TerminateError::from(error), TerminateError::RdmapUnexpectedOpcode);
    }
}

#[test]
fn ddp_v_15_an_unassigned_opcode_comes_before_a_bad_queue() {
    let ulpdu = hex!("414c 00000000 00000009 00000001 00000000");
    let error = Segment::parse(&ulpdu).unwrap_err();
    assert_eq!(TerminateError::from(error), TerminateError::RdmapUnexpectedOpcode);
}

#[test]
fn ddp_v_16_t_bit_and_opcode_must_agree() {
    for opcode in Opcode::ALL {
        let wrong = if opcode.queue().is_some() {
            tagged(opcode)
        } else {
            untagged(opcode, 0)
        };
        let error = check_placement(opcode, &wrong).unwrap_err();
        assert_eq!(error, PlacementError::Tagging(opcode));
        assert_eq!(TerminateError::from(error), TerminateError::RdmapUnexpectedOpcode);
    }
    let bytes = hex!("0012c143 00001234 00000000 00000000 61626364 dd9505b7");
    let (ulpdu, _) = fpdu::parse(&bytes, CrcMode::On).unwrap();
    let error = Segment::parse(ulpdu).unwrap_err();
    assert_eq!(
        error,
        SegmentError::Placement(PlacementError::Tagging(Opcode::Send))
    );
    assert_eq!(error.to_string(), "Send in a tagged segment");
}

#[test]
fn ddp_v_06_each_message_has_its_queue() {
    for opcode in Opcode::ALL {
        let Some(queue) = opcode.queue() else {
            assert_eq!(check_placement(opcode, &tagged(opcode)), Ok(()));
            continue;
        };
        for qn in 0..=QN_ATOMIC_RESPONSE {
            let expected = if qn == queue {
                Ok(())
            } else {
                Err(PlacementError::WrongQueue { opcode, qn })
            };
            assert_eq!(check_placement(opcode, &untagged(opcode, qn)), expected);
        }
        for qn in [4, 9, u32::MAX] {
            let error = check_placement(opcode, &untagged(opcode, qn)).unwrap_err();
            assert_eq!(error, PlacementError::NoQueue { opcode, qn });
            assert_eq!(TerminateError::from(error), TerminateError::DdpInvalidQueue);
        }
    }
    let wrong = PlacementError::WrongQueue {
        opcode: Opcode::Send,
        qn: 1,
    };
    assert_eq!(TerminateError::from(wrong), TerminateError::RdmapUnexpectedOpcode);
}

#[test]
fn rdm_c_02_other_messages_carry_the_invalidate_word_unread() {
    let mut bytes = vector("F-SEND-hello");
    bytes[4..8].copy_from_slice(&hex!("deadbeef"));
    let (ulpdu, _) = fpdu::parse(&bytes, CrcMode::Off).unwrap();
    let segment = Segment::parse(ulpdu).unwrap();
    assert!(!segment.opcode.invalidates());
    assert!(!segment.to_string().contains("invalidate"));
}

/// Every message with a fixed header, one byte too short and too long.
#[test]
fn x73_09_a_header_of_another_length_is_refused() {
    for (name, segment) in SEGMENTS {
        let expected = match segment.body {
            Body::ReadRequest(_) => 28,
            Body::Immediate(_) => 8,
            Body::AtomicRequest(_) => 52,
            Body::AtomicResponse(_) => 12,
            Body::Data(_) | Body::Terminate(_) => continue,
        };
        let ulpdu = emit(segment);
        let longer = [&ulpdu[..], &[0]].concat();
        for (bytes, found, code) in [
            (
                &ulpdu[..ulpdu.len() - 1],
                expected - 1,
                TerminateError::RdmapOperation,
            ),
            (&longer[..], expected + 1, TerminateError::DdpTooLong),
        ] {
            let error = Segment::parse(bytes).unwrap_err();
            let SegmentError::Header(HeaderError::Length {
                expected: e,
                found: f,
                ..
            }) = error
            else {
                panic!("{name}: {error}");
            };
            assert_eq!((e, f), (expected, found), "{name}");
            assert_eq!(TerminateError::from(error), code, "{name}");
        }
    }
}

#[test]
fn rdm_r_01_read_request_fields_lie_in_order() {
    let bytes = hex!("01020304 11121314 15161718 21222324 31323334 41424344 45464748");
    let request = ReadRequest {
        sink_stag: 0x0102_0304,
        sink_to: 0x1112_1314_1516_1718,
        size: 0x2122_2324,
        source_stag: 0x3132_3334,
        source_to: 0x4142_4344_4546_4748,
    };
    assert_eq!(ReadRequest::parse(&bytes), Ok(request));
    let mut buffer = [0; ReadRequest::LEN];
    assert_eq!((request.emit(&mut buffer), buffer), (28, bytes));
}

#[test]
fn x73_02_other_atomic_operations_are_refused() {
    let mut bytes = [0; AtomicRequest::LEN];
    for code in (1..16).filter(|code| *code != 2) {
        bytes[3] = code;
        let error = AtomicRequest::parse(&bytes).unwrap_err();
        assert_eq!(error, HeaderError::AtomicOperation(code));
        assert_eq!(TerminateError::from(error), TerminateError::RdmapUnexpectedOpcode);
    }
}

#[test]
fn x73_03_reserved_and_compare_fields_of_fetch_add_are_ignored() {
    let (name, segment) = SEGMENTS
        .iter()
        .find(|(name, _)| *name == "F-ATOMIC-FADD")
        .unwrap();
    let mut bytes = vector(name);
    // The four bytes before the last AOpCode nibble, and compare data and mask.
    bytes[20..23].fill(0xff);
    bytes[23] |= 0xf0;
    bytes[56..72].fill(0xa5);
    let (ulpdu, _) = fpdu::parse(&bytes, CrcMode::Off).unwrap();
    assert_eq!(Segment::parse(ulpdu), Ok(*segment));
}

#[test]
fn x73_10_verbs_immediate_data_leads() {
    let immediate = ImmediateData::from_verbs(0xaabb_ccdd_u32.to_be_bytes());
    assert_eq!(immediate.0, hex!("aabbccdd 00000000"));
    assert_eq!(u32::from_be_bytes(immediate.verbs()), 0xaabb_ccdd);
    assert_eq!(
        ImmediateData::parse(&hex!("01020304 05060708")).unwrap().verbs(),
        [1, 2, 3, 4]
    );
}
