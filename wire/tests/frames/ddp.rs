use crate::vectors::vector;
use hex_literal::hex;
use urnic_wire::ddp::*;
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::rdmap::TerminateError;

const TAGGED: [u8; 18] = hex!("c140 00001234 00000000 00000010 61626364");
const UNTAGGED: [u8; 23] = hex!("4143 00000000 00000000 00000001 00000000 68656c6c 6f");

#[test]
fn ddp_h_01_reserved_bits_are_ignored_and_sent_as_zero() {
    for bytes in [&TAGGED[..], &UNTAGGED] {
        let mut reserved = bytes.to_vec();
        reserved[0] |= 0x3c;
        let (header, _) = Header::parse(&reserved).unwrap();
        assert_eq!(Header::parse(bytes).unwrap().0, header);
        let mut buffer = [0xff; UNTAGGED_LEN];
        let len = header.emit(&mut buffer);
        assert_eq!(buffer[..len], bytes[..len]);
    }
}

#[test]
fn ddp_v_05_v_11_the_t_bit_selects_the_version() {
    for version in [0, 2, 3] {
        for (bytes, tagged, code) in [
            (&TAGGED[..], true, TerminateError::DdpTaggedVersion),
            (&UNTAGGED[..], false, TerminateError::DdpUntaggedVersion),
        ] {
            let mut bytes = bytes.to_vec();
            bytes[0] = bytes[0] & !3 | version;
            let error = Header::parse(&bytes).unwrap_err();
            assert_eq!(error, Error::Version { tagged, version });
            assert_eq!(TerminateError::from(error), code);
        }
    }
}

#[test]
fn ddp_h_02_tagged_header_has_14_bytes() {
    let (header, payload) = Header::parse(&TAGGED).unwrap();
    let expected = TaggedHeader {
        last: true,
        rsvd_ulp: 0x40,
        stag: 0x1234,
        to: 0x10,
    };
    assert_eq!((header, payload), (Header::Tagged(expected), &b"abcd"[..]));
    assert_eq!(
        (header.buffer_len(), header.last(), header.rsvd_ulp()),
        (TAGGED_LEN, true, 0x40)
    );
}

#[test]
fn ddp_h_03_untagged_header_has_18_bytes() {
    let bytes = hex!("0146 11223344 55667788 99aabbcc ddeeff00");
    let (header, payload) = Header::parse(&bytes).unwrap();
    let expected = UntaggedHeader {
        last: false,
        rsvd_ulp: 0x46,
        rsvd_ulp_word: 0x1122_3344,
        qn: 0x5566_7788,
        msn: 0x99aa_bbcc,
        mo: 0xddee_ff00,
    };
    assert_eq!((header, payload), (Header::Untagged(expected), &[][..]));
    assert_eq!(
        (header.buffer_len(), header.last(), header.rsvd_ulp()),
        (UNTAGGED_LEN, false, 0x46)
    );
    let mut buffer = [0; UNTAGGED_LEN];
    expected.emit(&mut buffer);
    assert_eq!(buffer, bytes);
}

#[test]
fn mpa_f_16_a_ulpdu_shorter_than_its_header_is_1_0_00() {
    for (bytes, needed) in [(&TAGGED[..], TAGGED_LEN), (&UNTAGGED[..], UNTAGGED_LEN)] {
        for have in 0..needed {
            let error = Header::parse(&bytes[..have]).unwrap_err();
            let needed = if have == 0 { 1 } else { needed };
            assert_eq!(error, Error::Truncated { needed, have });
            assert_eq!(TerminateError::from(error), TerminateError::DdpLocalCatastrophic);
        }
    }
}

/// An offset whose range would wrap is a valid header; the owner of the buffer checks the range.
#[test]
fn ddp_v_04_to_at_the_end_of_64_bits_is_parsed() {
    let bytes = hex!("0010c140 00001234 ffffffff ffffffff 61620000 3690dd95");
    let (ulpdu, _) = fpdu::parse(&bytes, CrcMode::On).unwrap();
    let (header, payload) = Header::parse(ulpdu).unwrap();
    assert_eq!(
        (header, payload),
        (
            Header::Tagged(TaggedHeader {
                last: true,
                rsvd_ulp: 0x40,
                stag: 0x1234,
                to: u64::MAX
            }),
            &b"ab"[..]
        )
    );
}

#[test]
fn header_len_follows_the_t_bit() {
    assert_eq!((header_len(0xc1), header_len(0x41)), (TAGGED_LEN, UNTAGGED_LEN));
    assert_eq!(vector("F-WRITE0-RTR").len(), 2 + TAGGED_LEN + 4);
    assert_eq!(vector("F-SEND0-RTR").len(), 2 + UNTAGGED_LEN + 4);
}
