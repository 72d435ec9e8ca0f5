use crate::vectors::{fpdu, send, vector};
use hex_literal::hex;
use urnic_wire::crc::crc32c;
use urnic_wire::mpa::fpdu::*;
use urnic_wire::mpa::{MAX_MULPDU, MIN_MULPDU, mulpdu};
use urnic_wire::rdmap::TerminateError;

#[test]
fn mpa_f_02_length_counts_the_ulpdu_only() {
    let bytes = vector("F-SEND-hello");
    assert_eq!((bytes.len(), ulpdu_len(&bytes)), (32, Some(0x17)));
    assert_eq!(ulpdu_len(&bytes[..1]), None);
}

#[test]
fn mpa_f_03_pad_makes_fpdu_multiple_of_four() {
    let pads = [0, 3, 2, 1, 0, 3, 2, 1];
    for (payload, pad) in pads.into_iter().enumerate() {
        let bytes = fpdu(&send(1, &[0xff; 7][..payload]));
        assert_eq!(padding(18 + payload), pad);
        assert_eq!(bytes.len(), 2 + 18 + payload + pad + 4);
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(
            bytes[20 + payload..][..pad],
            [0; 3][..pad],
            "pad goes out as zero"
        );
    }
}

#[test]
fn mpa_f_03_pad_of_any_value_is_accepted_under_its_crc() {
    let mut bytes = vector("F-SEND-hello");
    bytes[25..28].copy_from_slice(&[1, 2, 3]);
    assert!(matches!(parse(&bytes, CrcMode::On), Err(FpduError::Crc { .. })));
    let crc = crc32c(&bytes[..28]);
    bytes[28..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(parse(&bytes, CrcMode::On).unwrap().0, send(1, b"hello"));
}

#[test]
fn mpa_f_04_the_crc_field_is_present_with_crcs_off() {
    let mut bytes = vector("F-SEND-hello");
    bytes[28..].copy_from_slice(b"junk");
    assert_eq!(parse(&bytes, CrcMode::Off).unwrap().0, send(1, b"hello"));

    let mut buffer = [0xee; 33];
    assert_eq!(emit(&send(1, b"hello"), CrcMode::Off, &mut buffer), 32);
    assert_eq!(buffer[28..], hex!("00000000 ee"));
}

#[test]
fn mpa_f_07_ulpdu_of_65535_is_accepted() {
    for len in [usize::from(MAX_MULPDU), 65474, 65535] {
        let ulpdu = vec![0x5a; len];
        assert_eq!(parse(&fpdu(&ulpdu), CrcMode::On).unwrap().0, ulpdu);
    }
}

#[test]
#[should_panic = "does not fit ULPDU_Length"]
fn a_ulpdu_of_65536_cannot_be_sent() {
    emit(&vec![0; 65536], CrcMode::On, &mut vec![0; 65600]);
}

/// The table of RFC 5044 §4.5, with computed values, minimum and maximum included.
#[test]
fn mpa_f_08_f_09_mulpdu() {
    let table = [
        (128, 128, 128),
        (134, 128, 128),
        (536, 530, 522),
        (1220, 1214, 1202),
        (1440, 1434, 1422),
        (1448, 1442, 1430),
        (1460, 1454, 1442),
        (1461, 1454, 1442),
        (1462, 1454, 1442),
        (1463, 1454, 1442),
        (8948, 8942, 8870),
        (8960, 8954, 8882),
        (65483, 64766, 64766),
    ];
    for (emss, plain, marked) in table {
        assert_eq!(
            (mulpdu(emss, false), mulpdu(emss, true)),
            (plain, marked),
            "EMSS {emss}"
        );
    }
}

#[test]
fn mpa_f_05_f_10_mulpdu_stays_within_128_and_64768() {
    assert_eq!((MIN_MULPDU, MAX_MULPDU), (128, 64768));
    for markers in [false, true] {
        for emss in (0..70_000).chain([u32::MAX - 3, u32::MAX]) {
            let mulpdu = mulpdu(emss, markers);
            assert!((MIN_MULPDU..=MAX_MULPDU).contains(&mulpdu), "EMSS {emss}");
            let unpadded = usize::from(mulpdu) + LENGTH_LEN + CRC_LEN;
            assert!(
                mulpdu == MIN_MULPDU || fpdu_len(mulpdu.into()) == unpadded,
                "EMSS {emss}"
            );
        }
    }
}

/// An FPDU of MULPDU bytes, its markers included, fits one segment at every start; an FPDU of 4
/// bytes more does not always fit.
#[test]
fn mpa_f_09_a_full_fpdu_fits_a_segment() {
    use urnic_wire::mpa::marker::marked_len;
    for emss in (600..9100).step_by(7) {
        let ulpdu = usize::from(mulpdu(emss, true));
        for start in (0..512).step_by(4) {
            assert!(
                marked_len(start, fpdu_len(ulpdu)) <= emss as usize,
                "EMSS {emss} start {start}"
            );
        }
        assert!(fpdu_len(usize::from(mulpdu(emss, false))) <= emss as usize);
        assert!(fpdu_len(usize::from(mulpdu(emss, false)) + 4) > emss as usize);
    }
}

#[test]
fn mpa_c_04_a_flipped_bit_is_named_and_terminates_with_2_0_02() {
    let bad = hex!("00174143 00000000 00000000 00000001 00000000 69656c6c 6f000000 b990b10c");
    let Err(error @ FpduError::Crc { computed, found }) = parse(&bad, CrcMode::On) else {
        panic!("accepted");
    };
    assert_eq!((computed, found), (crc32c(&bad[..28]), 0x0cb1_90b9));
    assert_eq!(TerminateError::from_fpdu(error), Some(TerminateError::MpaCrc));

    let good = vector("F-SEND-hello");
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        // A longer ULPDU_Length requires bytes that are not present.
        assert!(parse(&bytes, CrcMode::On).is_err(), "bit {bit}");
    }
}

#[test]
fn mpa_f_12_a_partial_fpdu_reports_its_length() {
    let bytes = vector("F-SEND-hello");
    for have in 0..bytes.len() {
        let needed = if have < 2 { 2 } else { 32 };
        let error = parse(&bytes[..have], CrcMode::On).unwrap_err();
        assert_eq!(error, FpduError::Incomplete { needed, have });
        assert_eq!(TerminateError::from_fpdu(error), None);
    }
}

#[test]
fn mpa_f_01_several_fpdus_in_one_buffer() {
    let stream = [
        vector("F-SEND-hello"),
        vector("F-WRITE0-RTR"),
        vector("F-RREQ-4096"),
    ]
    .concat();
    let (first, rest) = parse(&stream, CrcMode::On).unwrap();
    let (second, rest) = parse(rest, CrcMode::On).unwrap();
    let (third, rest) = parse(rest, CrcMode::On).unwrap();
    assert_eq!(
        (first.len(), second.len(), third.len(), rest.len()),
        (23, 14, 46, 0)
    );
}

#[test]
fn mpa_f_16_an_empty_ulpdu_is_an_fpdu_for_ddp_to_refuse() {
    let bytes = fpdu(&[]);
    assert_eq!(bytes.len(), 8);
    assert_eq!(parse(&bytes, CrcMode::On), Ok((&[][..], &[][..])));
}
