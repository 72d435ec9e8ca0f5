//! The engines: against scripted peers for the conformance rows whose id a test's name begins with,
//! and against each other over a simulated device that checks every access, with connections cut
//! and calls cancelled at any point.

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
