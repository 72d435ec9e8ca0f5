//! The start-up of a connection over either lower layer: [`mpa_startup`] over TCP, and
//! [`ddp_session`] over SCTP.
//!
//! The engines use an [`Initiator`] and a [`Responder`], and do not know which one they have. Both
//! lower layers have the negotiation and its results in common. They differ in this:
//!
//! * Over TCP a receive gives some bytes, over SCTP one whole message.
//! * Over SCTP there is no fence, and therefore no RTR message (RFC 6581 §7): the responder may
//!   send as soon as it has accepted.
//! * Over SCTP only a program rejects. A DDP session that cannot begin for another reason ends in a
//!   Terminate, which the device sends when the stream is closed.

mod failure;
mod initiator;
mod responder;

pub use failure::{Failure, Fault};
pub use initiator::Initiator;
pub use responder::{Request, Responder};
