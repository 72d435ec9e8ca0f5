//! A served device whose rings, records and commands lie in a file that the fuzzer changes under it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| urnic_serve::shared_ring(data));
