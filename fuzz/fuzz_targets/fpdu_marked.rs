//! A stream of FPDUs with markers, from any start.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_wire::mpa::fpdu::{CrcMode, FpduError, fpdu_len};
use urnic_wire::mpa::marker::{LEN, distance, emit, marked_len, parse, wire_len};

fuzz_target!(|input: &[u8]| {
    let Some((start, stream)) = input.split_first_chunk() else {
        return;
    };
    // Streams start at a multiple of 4, and FPDUs have lengths that are multiples of 4 (MPA-M-09).
    let mut offset = u64::from_le_bytes(*start) & !3;
    let mut stream = stream.to_vec();
    let mut left = &mut stream[..];
    loop {
        let before = left.to_vec();
        let announced = wire_len(offset, left);
        match parse(offset, left, CrcMode::Off) {
            Ok((ulpdu, taken)) => {
                assert_eq!(announced, Some(taken));
                assert_eq!(marked_len(offset, fpdu_len(ulpdu.len())), taken);
                assert_eq!(left[taken..], before[taken..]);
                let ulpdu = &left[ulpdu];
                let mut again = vec![0; taken];
                assert_eq!(emit(offset, ulpdu, CrcMode::On, &mut again), taken);
                let (range, same) =
                    parse(offset, &mut again, CrcMode::On).expect("what was emitted is accepted");
                assert_eq!((&again[range], same), (ulpdu, taken));
                left = &mut left[taken..];
                offset = offset.wrapping_add(taken as u64);
            }
            Err(error) => {
                assert_eq!(left, before, "an error leaves the bytes alone");
                match error {
                    FpduError::Incomplete { needed, have } => return assert!(have < needed),
                    FpduError::Marker { at, expected, found } => {
                        assert_ne!(expected, found);
                        assert_eq!(distance(offset.wrapping_add(at as u64)), 0);
                        // Repair the marker and continue.
                        left[at..at + LEN].copy_from_slice(&u32::from(expected).to_be_bytes());
                    }
                    FpduError::Crc { .. } => panic!("CRCs are off"),
                }
            }
        }
    }
});
