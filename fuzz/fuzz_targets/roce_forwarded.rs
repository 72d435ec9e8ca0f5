//! A message by which another process passes on a packet of RoCE v2.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_model::testing::fuzzing::{roce_forwarded, roce_forwarded_seeds};

fuzz_target!(init: urnic_fuzz::plant(roce_forwarded_seeds()), |data: &[u8]| roce_forwarded(data));
