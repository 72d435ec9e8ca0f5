//! The frames against bytes: the project's vectors, the RFCs' own examples, the conformance rows
//! whose id a test's name begins with, and properties over everything.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

mod crc;
mod ddp;
mod display;
mod fpdu;
mod marker;
mod properties;
mod rdmap;
mod startup;
mod terminate;
mod vectors;
