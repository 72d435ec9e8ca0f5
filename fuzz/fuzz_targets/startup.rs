//! Start-up frames: a frame that is accepted is emitted again unchanged, except for reserved bits.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_wire::mpa::startup::{MAX_FRAME_LEN, StartupFrame};

/// Keys that the first byte of the input may select, because a fuzzer does not find sixteen bytes
/// by chance.
const KEYS: [&[u8]; 5] = [
    b"",
    b"MPA ID Req Frame",
    b"MPA ID Rep Frame",
    b"MPA ID RtR Frame",
    b"MPA ID Rtr Frame",
];
const FLAGS_AT: usize = 16;
const RESERVED: u8 = 0x0f;

fuzz_target!(|input: &[u8]| {
    let Some((&choice, tail)) = input.split_first() else {
        return;
    };
    let mut bytes = [KEYS[usize::from(choice) % KEYS.len()], tail].concat();
    let rest_len = match StartupFrame::parse(&bytes) {
        Ok((_, rest)) => rest.len(),
        Err(error) => return drop(error.to_string()),
    };
    bytes[FLAGS_AT] &= !RESERVED;
    let (frame, _) = StartupFrame::parse(&bytes).expect("reserved bits mean nothing");
    let _ = frame.to_string();
    let mut again = [0; MAX_FRAME_LEN];
    let len = frame.emit(&mut again).expect("what was accepted can be sent");
    assert_eq!(again[..len], bytes[..bytes.len() - rest_len]);
});
