//! The driver over the model in this process: queue pairs connect natively over TCP, with work
//! queue entries written by hand.

#![allow(clippy::unwrap_used, reason = "what goes wrong in a test ends it")]

mod connecting;
mod lost;
mod objects;
mod program;
