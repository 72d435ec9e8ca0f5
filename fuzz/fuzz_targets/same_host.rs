//! The memory that two processes of one host share, changed by a hostile peer, and the messages by
//! which they agree on it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_model::testing::fuzzing::same_host;

fuzz_target!(|data: &[u8]| same_host(data));
