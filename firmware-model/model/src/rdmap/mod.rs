//! RDMAP and DDP for one queue pair (RFC 5040, RFC 5041, RFC 7306).
//!
//! An [`Engine`] has no thread, socket or clock. Its owner serialises the calls and passes the
//! surroundings ([`Env`]) and the stream:
//!
//! | when | call |
//! |---|---|
//! | sends were posted, or the stream takes bytes again | [`transmit`](Engine::transmit) |
//! | bytes may have arrived; receives were posted | [`receive`](Engine::receive), then `transmit` |
//! | [`deadline`](Engine::deadline) has passed | [`tick`](Engine::tick) |
//! | the driver requests it | [`attach`](Engine::attach), [`modify`](Engine::modify), [`fail`](Engine::fail) |
//!
//! | part | role |
//! |---|---|
//! | `engine` | the sequence: states, start, errors, end |
//! | `requester` | work requests become messages, complete in order, and await their answers; `local_peer` accesses the memory of a local peer |
//! | `inbound` | the kind of an inbound segment, the part that handles it (requester or responder), and the parked messages |
//! | `early` | segments that are placed before their turn |
//! | `responder` | Sends and Writes are checked and placed, or dropped (kind UC); `answers` sends Read and Atomic Responses |
//! | `startup` | which end may send first, and the RTR |
//! | `framing` | requests and answers alternate |
//! | `confirmation` | how far the peer has processed our messages, and so which requests are complete |
//! | `watch` | how long the peer's system has been silent |
//! | `terminate` | how an error is reported on the wire, and what a received Terminate means |
//!
//! [`Env`]: crate::transport::Env

#![cfg_attr(not(test), forbid(unsafe_code))]

mod answers;
mod attachment;
mod confirmation;
mod confirming;
mod early;
mod engine;
mod explain;
mod framing;
mod inbound;
mod requester;
mod responder;
mod startup;
mod terminate;
#[cfg(test)]
mod tests;
mod watch;

pub use crate::stream::no_stream::NoStream;
pub use attachment::{Attachment, InvalidAttachment, Rtr, WithoutReceive};
pub use confirmation::{PeerProgress, Rendezvous};
pub use engine::Engine;
