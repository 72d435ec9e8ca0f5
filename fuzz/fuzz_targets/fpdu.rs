//! A stream of FPDUs without markers.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_wire::mpa::fpdu::{CrcMode, FpduError, emit, fpdu_len, parse};

fuzz_target!(|input: &[u8]| {
    let mut left = input;
    // CRCs are off, so that the stream continues past a CRC that no fuzzer guesses; they are on for
    // each FPDU, to test that a wrong CRC is an error.
    while let Ok((ulpdu, rest)) = parse(left, CrcMode::Off) {
        let len = fpdu_len(ulpdu.len());
        assert_eq!(len + rest.len(), left.len());
        match parse(left, CrcMode::On) {
            Ok(same) => assert_eq!(same, (ulpdu, rest)),
            Err(FpduError::Crc { computed, found }) => {
                assert_ne!(computed, found);
                let mut mended = left[..len].to_vec();
                mended[len - 4..].copy_from_slice(&computed.to_le_bytes());
                assert_eq!(parse(&mended, CrcMode::On), Ok((ulpdu, &[][..])));
            }
            Err(error) => panic!("{error}"),
        }
        let mut again = vec![0; len];
        assert_eq!(emit(ulpdu, CrcMode::On, &mut again), len);
        assert_eq!(parse(&again, CrcMode::On), Ok((ulpdu, &[][..])));
        left = rest;
    }
});
