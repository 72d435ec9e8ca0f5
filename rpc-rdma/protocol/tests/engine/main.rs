//! Tests of the engines: with scripted peers for the conformance rows (a test's name begins with
//! the id of its row), and with each other over a simulated device that checks every access, while
//! connections are cut and calls are cancelled at any point.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

mod backward;
mod credits;
mod exposure;
mod properties;

mod replies;
mod scripted;
mod simulation;
mod thresholds;
