//! The driver over the model in this process: queue pairs connect natively over TCP, with work
//! queue entries written by hand.

#![allow(clippy::unwrap_used, reason = "a failure panics and ends the test")]

mod connecting;
mod lost;
mod objects;
mod program;
