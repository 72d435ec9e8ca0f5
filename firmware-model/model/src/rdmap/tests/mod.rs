//! Engines against hand-made bytes, and against each other, under a virtual clock. Tests that carry
//! a conformance row's id show what that row asks for.

mod ddp_rows;
mod delivery_rows;
mod extension_rows;
mod message_rows;
mod mpa_error_rows;
mod mpa_rows;
mod native;
mod properties;
mod rdmap_rows;
mod revocation_rows;
mod sequence_rows;
mod speed;
mod state_rows;
mod verbs_rows;

use super::rig;

/// A vector of the conformance tables.
pub(super) fn vector(name: &str) -> Vec<u8> {
    static VECTORS: &str = include_str!("../../../../../wire/tests/vectors.json");
    let all: serde_json::Value = serde_json::from_str(VECTORS).unwrap();
    rig::hex(all[name].as_str().unwrap_or_else(|| panic!("no vector {name}")))
}
