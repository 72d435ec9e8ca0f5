//! A served device whose rings, records and commands are in a file that the fuzzer changes while
//! the device uses it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| urnic_serve::shared_ring(data));
