//! The communication manager of InfiniBand (Architecture Specification, volume 1, chapter 12), by
//! which RoCE's reliable connections of rdma_cm begin and end: management datagrams between the
//! queue pairs 1 of both ends, as state machines. Messages, calls and time in; messages and events
//! out. `rdma_cm` uses it with `wire=roce`.
//!
//! ```text
//! active                                            passive
//!   connect ──────────── REQ ──────────────────────▶ Requested is shown to the program
//!   Accepted ◀────────── REP ────────────────────── accept
//!   ready ────────────── RTU, or the first message ▶ Established
//!   Rejected ◀────────── REJ ────────────────────── reject
//!
//! either                                            the other
//!   disconnect ───────── DREQ ─────────────────────▶ Disconnected
//!   Disconnected ◀────── DREP
//! ```
//!
//! REQ, REP and DREQ are repeated until they are answered. A repeated message is answered again; if
//! its program has not decided, by an MRA, which asks the peer for patience. Simultaneous requests
//! of two ends for one connection, and alternate paths, are not supported. `docs/design/roce-cm.md`
//! has the states, times and limits.

mod active;
mod connection;
mod connections;
mod ending;
mod event;
mod passive;
mod peer;
mod refusals;
mod settings;
mod table;
#[cfg(test)]
mod tests;

pub use active::Connect;
pub use connection::State;
pub use connections::{Admission, CallError, Connections, Random};
pub use event::{Accepted, Event, Output, Requested};
pub use passive::Accept;
pub use peer::Route;
pub use settings::{Limits, Settings};
