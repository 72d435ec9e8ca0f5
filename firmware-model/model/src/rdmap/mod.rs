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
//! | `requester` | work requests become messages; `flights` completes them in order; `reads` awaits the answers |
//! | `inbound` | what an inbound segment is, and which half handles it |
//! | `held` | messages that wait for a receive |
//! | `responder` | Sends and Writes are checked and placed; `answers` sends Read and Atomic Responses; `drops`: what kind UC drops |
//! | `turns` | requests and answers alternate |
//! | `peer_progress` | how far a peer on the same device has processed our messages |
//! | `delivery` | how far a peer on another device has confirmed our messages |
//! | `watch` | how long the peer's system has been silent |
//! | `confirmation` | how a peer on another device confirms them that waits for a receive, or ends |
//! | `terminate` | how an error is reported on the wire, and what a received Terminate means |
//!
//! [`Env`]: crate::rdmap::env::Env

#![cfg_attr(not(test), forbid(unsafe_code))]

mod answers;
pub(crate) mod completions;
mod confirmation;
mod delivery;
mod drops;
mod engine;
pub mod env;
mod explain;
mod flights;
mod held;
mod inbound;
pub(crate) mod params;
mod peer_progress;
pub(crate) mod placement;
mod reads;
mod requester;
mod responder;
mod terminate;
#[cfg(test)]
mod tests;
mod turns;
mod watch;

pub use crate::llp::loopback::NoStream;
pub use engine::Engine;
pub use params::{Attachment, InvalidAttachment, QpChange, QpParams, Rtr, RxOutcome, TxOutcome, WrongState};
pub use peer_progress::{PeerProgress, Rendezvous};
