//! MPA start-up (RFC 5044 §7, RFC 6581) as two state machines: bytes and time in; bytes, outcomes
//! and deadlines out.
//!
//! They use no socket and no queue pair. The owner of the stream passes received bytes to an
//! [`Initiator`] or a [`Responder`], at most [`bytes_needed`](Initiator::bytes_needed) bytes at a
//! time if no byte of an FPDU may be taken. It sends the frames that they return, closes the stream
//! in the way that a [`Failure`] requires, and checks the [`deadline`](Initiator::deadline). The
//! result is [`Negotiated`]: the parameters with which the device attaches the stream to a queue
//! pair.
//!
//! ```text
//! initiator                                        responder
//!   Request ───────────────────────────────────────▶ Request is shown to the ULP
//!   Accepted, or Rejected, or Failure ◀────────────── accept, or reject
//!   [2007 RTR frame] ──────────────────────────────▶ [fence open]
//!   attach; first FPDU: the RTR message ───────────▶ attach; fence opens at the first FPDU
//! ```

mod frame;
mod initiator;
mod negotiate;
mod responder;
#[cfg(test)]
pub(crate) mod tests;

pub use frame::{Close, Excerpt, Failure, Fault, PrivateDataTooLong};
pub use initiator::{Accepted, Answer, Initiator, Rejected};
pub use negotiate::{Depths, Negotiated, Offer, Rtr, Settings, Time, terminate};
pub(crate) use negotiate::{answer, conclude, request};
pub use responder::{Reply, Request, Responder, ResponderEvent};
