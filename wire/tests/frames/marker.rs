use crate::vectors::{between, fig6, marked, multi, padcrc, send, unmarked, vector};
use hex_literal::hex;
use urnic_wire::crc::crc32c;
use urnic_wire::mpa::fpdu::{self, CrcMode, FpduError};
use urnic_wire::mpa::marker::*;
use urnic_wire::rdmap::TerminateError;

/// The FPDU with markers, built byte by byte as RFC 5044 §4.3 describes.
fn by_the_book(offset: u64, ulpdu: &[u8]) -> Vec<u8> {
    let mut plain = vec![0; fpdu::fpdu_len(ulpdu.len())];
    fpdu::emit(ulpdu, CrcMode::Off, &mut plain);
    let (mut wire, mut ulpdu_length_at) = (Vec::new(), None);
    for byte in plain {
        if (offset + wire.len() as u64).is_multiple_of(512) {
            let fpduptr = ulpdu_length_at.map_or(0, |at| wire.len() - at);
            wire.extend((fpduptr as u32).to_be_bytes());
        }
        ulpdu_length_at.get_or_insert(wire.len());
        wire.push(byte);
    }
    let covered = wire.len() - 4;
    let crc = crc32c(&wire[..covered]);
    wire[covered..].copy_from_slice(&crc.to_le_bytes());
    wire
}

#[test]
fn mpa_m_09_every_length_at_every_start_matches_the_rfc() {
    let bytes: Vec<u8> = (0..2000).map(|i| (i * 7) as u8).collect();
    for len in 0..bytes.len() {
        // Each length at eight starts, so that all lengths together cover every start.
        for start in (0..512).step_by(4).skip(len % 16).step_by(16) {
            let ulpdu = &bytes[..len];
            let expected = by_the_book(start, ulpdu);
            assert_eq!(
                marked_len(start, fpdu::fpdu_len(len)),
                expected.len(),
                "{len} at {start}"
            );
            let mut wire = vec![0xee; expected.len() + 1];
            let written = emit(start, ulpdu, CrcMode::On, &mut wire);
            assert_eq!(
                (&wire[..written], wire[written]),
                (&expected[..], 0xee),
                "{len} at {start}"
            );
            assert_eq!(wire_len(start, &wire), Some(written));
            let (range, taken) = parse(start, &mut wire, CrcMode::On).unwrap();
            assert_eq!((&wire[range], taken), (ulpdu, written), "{len} at {start}");
        }
    }
}

#[test]
fn mpa_m_03_markers_lie_at_every_512th_byte() {
    let (stream, starts) = marked(&[send(1, &[0xff; 3000]), send(2, &[0xff; 5]), send(3, &[0xff; 900])]);
    assert_eq!(starts[0], 0);
    for at in (0..stream.len()).step_by(512) {
        let fpdu = *starts.iter().rev().find(|start| **start <= at).unwrap();
        let lead = if fpdu % 512 == 0 { 4 } else { 0 };
        let expected = (at - fpdu).saturating_sub(lead);
        let marker = Marker::parse(*stream[at..].first_chunk().unwrap());
        assert_eq!(usize::from(marker.fpduptr), expected);
        assert_eq!(stream[at..at + 2], [0, 0]);
    }
}

#[test]
fn mpa_m_03_offsets_may_wrap() {
    let ulpdu = send(1, &[0x11; 1000]);
    for offset in [0u64.wrapping_sub(512), 0u64.wrapping_sub(4), (1 << 32) - 8] {
        let near_zero = offset.wrapping_add(1 << 20);
        let mut wire = vec![0; marked_len(offset, fpdu::fpdu_len(ulpdu.len()))];
        let mut other = wire.clone();
        emit(offset, &ulpdu, CrcMode::On, &mut wire);
        emit(near_zero, &ulpdu, CrcMode::On, &mut other);
        assert_eq!(wire, other);
        assert_eq!(distance(offset), distance(near_zero));
    }
}

#[test]
fn mpa_m_04_m_05_reserved_half_and_low_bits_are_ignored() {
    assert_eq!(Marker::parse(hex!("dead 0203")), Marker { fpduptr: 0x200 });
    assert_eq!(Marker { fpduptr: 0x203 }.to_bytes(), hex!("0000 0200"));

    let (mut stream, _) = marked(&multi());
    stream[512..516].copy_from_slice(&hex!("abcd 01ff"));
    let crc = crc32c(&stream[..1232]);
    stream[1232..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(unmarked(&mut stream), multi());
}

#[test]
fn mpa_m_05_m_08_all_markers_point_to_the_same_start() {
    let (stream, _) = marked(&multi());
    assert_eq!(stream.len(), 1236);
    assert_eq!(
        (&stream[512..516], &stream[1024..1028]),
        (&vector("M-MULTI-m1")[..], &vector("M-MULTI-m2")[..])
    );
    let markers: Vec<_> = pieces(0, 1224)
        .filter_map(|piece| match piece {
            Piece::Marker(marker) => Some(marker.fpduptr),
            Piece::Fpdu(_) => None,
        })
        .collect();
    assert_eq!(markers, [0, 508, 1020]);
}

#[test]
fn mpa_m_06_a_marker_between_fpdus_belongs_to_the_second() {
    let (stream, starts) = marked(&between());
    assert_eq!(starts, [0, 512]);
    assert_eq!(stream[512..], vector("M-BETWEEN-2nd"));
    assert_eq!(count(0, 508), 1);
    // Its CRC covers the marker.
    let plain = crate::vectors::fpdu(&between()[1]);
    assert_ne!(stream[stream.len() - 4..], plain[plain.len() - 4..]);
}

#[test]
fn mpa_m_07_a_marker_between_pad_and_crc_belongs_to_the_first() {
    let (stream, starts) = marked(&padcrc());
    assert_eq!(starts, [0, 520]);
    assert_eq!(stream[508..520], vector("M-PADCRC-tail"));
    assert_eq!(stream[520..], vector("M-PADCRC-2nd"));
}

#[test]
fn mpa_m_10_ulpdus_come_out_without_markers() {
    let (mut stream, starts) = marked(&fig6());
    assert_eq!(starts, [0, 492]);
    assert_eq!(stream[492..], vector("RFC5044-FIG6"));
    assert_eq!(unmarked(&mut stream), fig6());
}

#[test]
fn mpa_m_11_a_wrong_marker_terminates_with_2_0_03() {
    let (mut stream, _) = marked(&multi());
    stream[1027] = 0xf8;
    let before = stream.clone();
    let error = parse(0, &mut stream, CrcMode::Off).unwrap_err();
    assert_eq!(
        error,
        FpduError::Marker {
            at: 1024,
            expected: 1020,
            found: 0x3f8
        }
    );
    assert_eq!(stream, before, "an error leaves the bytes alone");

    // With CRCs on, the parser reports the CRC first, unless it matches.
    assert!(matches!(
        parse(0, &mut stream, CrcMode::On),
        Err(FpduError::Crc { .. })
    ));
    let crc = crc32c(&stream[..1232]);
    stream[1232..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(parse(0, &mut stream, CrcMode::On), Err(error));
    assert_eq!(TerminateError::from_fpdu(error), Some(TerminateError::MpaMarker));

    // The marker at the start of an FPDU must be 0.
    let (mut stream, _) = marked(&between());
    stream[515] = 4;
    let error = parse(512, &mut stream[512..], CrcMode::Off).unwrap_err();
    assert_eq!(
        error,
        FpduError::Marker {
            at: 0,
            expected: 0,
            found: 4
        }
    );
}

#[test]
fn mpa_f_12_a_partial_marked_fpdu_reports_its_length() {
    for (ulpdus, start) in [(&multi()[..], 0), (&fig6()[..], 492)] {
        let (stream, _) = marked(ulpdus);
        let lead = if start == 0 { 4 } else { 0 };
        let bytes = &stream[start..];
        for have in 0..bytes.len() {
            let needed = if have < lead + 2 { lead + 2 } else { bytes.len() };
            let mut bytes = bytes[..have].to_vec();
            let found = parse(start as u64, &mut bytes, CrcMode::On);
            assert_eq!(found, Err(FpduError::Incomplete { needed, have }));
            assert_eq!(
                wire_len(start as u64, &bytes),
                (have >= lead + 2).then_some(needed)
            );
        }
    }
}

#[test]
fn mpa_f_04_a_marked_fpdus_crc_is_zero_when_crcs_are_off() {
    let ulpdu = &padcrc()[0];
    let mut wire = vec![0xee; 520];
    assert_eq!(emit(0, ulpdu, CrcMode::Off, &mut wire), 520);
    assert_eq!(wire[508..], hex!("00000000 000001fc 00000000"));
}

#[test]
fn fpduptr_of_the_longest_ulpdu_fits_16_bits() {
    let longest = fpdu::fpdu_len(urnic_wire::mpa::MAX_MULPDU.into());
    for start in (0..512).step_by(4) {
        let end = marked_len(start, longest);
        assert!(end <= usize::from(u16::MAX), "start {start}");
    }
}
