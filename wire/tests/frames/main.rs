//! Compares the frames with bytes: the project's vectors, the RFCs' own examples, the conformance
//! rows at the start of the tests' names, and properties of all frames.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

mod crc;
mod ddp;
mod display;
mod fpdu;
mod mad;
mod mad_connect;
mod marker;
mod properties;
mod rdmap;
mod roce;
mod roce_connections;
mod sctp;
mod startup;
mod terminate;
mod vectors;
