//! MPA start-up (RFC 5044 §7, RFC 6581) as two state machines: bytes and time in; bytes, outcomes
//! and deadlines out.
//!
//! They know no socket and no queue pair. Whoever owns the stream hands an [`Initiator`] or a
//! [`Responder`] what arrives, at most [`wants`](Initiator::wants) bytes at a time if not one byte
//! of an FPDU shall be taken, sends what they give, closes as a [`Failure`] says, and looks in at
//! the [`deadline`](Initiator::deadline). What comes out is [`Negotiated`]: all that the device
//! must be told when the stream is attached to a queue pair.
//!
//! ```text
//! initiator                                        responder
//!   Request ───────────────────────────────────────▶ Request is shown to the ULP
//!   Accepted, or Rejected, or Failure ◀────────────── accept, or reject
//!   [2007 RTR frame] ──────────────────────────────▶ [fence open]
//!   attach; first FPDU: the RTR message ───────────▶ attach; fence opens at the first FPDU
//! ```

mod failure;
mod frame;
mod initiator;
mod negotiate;
mod negotiated;
mod responder;
mod settings;
pub mod terminate;
#[cfg(test)]
mod tests;
mod time;

pub use failure::{Close, Failure, Fault};
pub use frame::PrivateDataTooLong;
pub use initiator::{Accepted, Answer, Initiator, Rejected};
pub use negotiate::{Depths, Offer, Rtr};
pub use negotiated::Negotiated;
pub use responder::{Reply, Request, Responder, ResponderEvent};
pub use settings::Settings;
pub use time::Time;
