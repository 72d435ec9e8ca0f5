//! Engines with hand-made bytes, and with each other, under a virtual clock. A test whose name has
//! a conformance row's id shows the rule of that row.

mod ddp_rows;
mod delivery_rows;
mod ending_rows;
mod extension_rows;
mod filled_rows;
mod fpdu_rows;
mod message_rows;
mod mpa_error_rows;
mod mpa_rows;
mod native;
mod over_messages;
mod properties;
mod rdmap_rows;
mod read_rows;
mod revocation_rows;
mod sequence_rows;
mod silence;
mod speed;
mod state_rows;
mod unreliable_rows;
mod verbs_rows;

use crate::testing::rig::{self, Pair, Scripted};

/// A vector of the conformance tables.
pub(super) fn vector(name: &str) -> Vec<u8> {
    static VECTORS: &str = include_str!("../../../../../wire/tests/vectors.json");
    let all: serde_json::Value = serde_json::from_str(VECTORS).unwrap();
    rig::hex(all[name].as_str().unwrap_or_else(|| panic!("no vector {name}")))
}
