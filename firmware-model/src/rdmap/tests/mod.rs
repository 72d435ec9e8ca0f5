//! Engines against hand-made bytes, and against each other, under a virtual clock. Tests that carry a conformance row's
//! id show what that row asks for.

mod ddp_rows;
mod extension_rows;
mod mpa_rows;
mod native;
mod properties;
mod rdmap_rows;
mod rig;
mod speed;
mod verbs_rows;
