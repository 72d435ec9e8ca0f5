//! DDP stream sessions (RFC 5043 §6, RFC 6581 §7), the start-up over SCTP, as two state machines:
//! messages and time in; messages, outcomes and deadlines out. [`crate::mpa_startup`] is the same
//! over TCP, and both have the negotiation and its result in common.
//!
//! SCTP delivers whole messages, so a state machine gets one at a time, without its DDP-SSN and in
//! its order. There is no fence: a segment cannot be mistaken for a message of start-up, so either
//! end may send first (RFC 6581 §7). Only a program decides to reject; everything else that keeps a
//! session from beginning is answered by a Terminate (RFC 5043 §6.3, §6.4).
//!
//! ```text
//! active                                           passive
//!   Initiate ──────────────────────────────────────▶ Request is shown to the ULP
//!   Accepted ◀────────────────────────────────────── accept
//!   Rejected ◀────────────────────────────────────── reject
//!   Failure  ◀────────────────────────────────────── Terminate
//! ```

mod active;
mod message;
mod passive;
#[cfg(test)]
mod tests;

pub use active::Active;
pub use message::{Failure, Fault};
pub use passive::{Passive, Request};
