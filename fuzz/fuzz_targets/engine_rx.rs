//! A whole protocol engine with work outstanding, against any peer.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| urnic_model::testing::fuzzing::engine_rx(data));
