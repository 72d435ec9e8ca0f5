//! A whole device, driven by any commands, doorbells and queue contents.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| urnic_model::testing::fuzzing::commands(data));
