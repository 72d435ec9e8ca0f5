//! The connection manager behind `/dev/infiniband/rdma_cm`, which corresponds to `rdma_ucm` and
//! `iw_cm` in a kernel.
//!
//! A program has *channels* and on them *ids*; it sends commands ([`command`]) and takes events.
//! The states of an id:
//!
//! ```text
//!  Idle ─ bind ─▶ Bound ─ listen ─▶ Listening ─ a Request ─▶ (new id) Requested ─ reject ─▶ Over
//!   │              │                                                  └ accept ─▶ Opening
//!   │              │                     Opening ── first FPDU, or at once without RTR ──▶ Connected
//!   └─ resolve ────┴─▶ AddressResolved ─ resolve ─▶ RouteResolved ─ connect ─▶ Connecting
//!      Connecting ── Reply ──▶ Connected, or Answered ─ accept ─▶ Connected (external queue pair)
//!      Connecting ── rejected ──▶ Over
//!  Connected ─ disconnect ─▶ Closing ─▶ Over ◀─ the peer's end, or an error
//! ```
//!
//! With the identity of a RoCE NIC, the program brings its queue pair to RTS itself, with
//! attributes that [`Engine::qp_attributes`] gives, as on InfiniBand: Connecting always leads to
//! Answered. If no queue pair was brought there, the connection carries private data only
//! (`Exchanged`), and the program connects its queue pairs natively.
//!
//! Ids for datagrams have no connection. A RoCE NIC's connection manager asks that of the peer for
//! its queue pair, by a message to the UDP port of the listener's number:
//!
//! ```text
//!  Bound ─ listen ─▶ Serving ─ a request ─▶ (new id) Asked ─ accept, reject ─▶ Associated
//!  RouteResolved ─ connect ─▶ LookingUp ─ reply, or no reply ─▶ Associated
//! ```
//!
//! The ports of connections are those of TCP, or have the UDP port of their number, so that TCP's
//! is free for other programs. Then an initiator asks there for the TCP port of the listener:
//!
//! ```text
//!  RouteResolved ─ connect ─▶ LookingUp ─ reply, or no listener ─▶ Connecting
//! ```
//!
//! The engine does no I/O: commands, events of streams and queue pairs, and the time go in; it acts
//! through [`Device`]. A listener is a TCP listener from bind on: no other process can use its
//! port, and connections before listen wait.
//!
//! `state.rs` has the state of the engine and of its ids. The other files have the functions, by
//! topic.

pub mod abi;
mod active;
mod addresses;
mod attempt;
pub mod command;
mod datagram_state;
mod engine;
mod events;
mod ids;
mod location;
mod lookup;
mod multicast;
pub mod opcode;
mod options;
mod passive;
mod payload;
mod places;
mod policy;
mod queue_pair_events;
mod service;
mod state;
mod stream_events;
#[cfg(test)]
mod tests;

pub use datagram_state::Arrival;
pub use state::{Attachment, CmEvent, Device, Engine, Notice, World};
