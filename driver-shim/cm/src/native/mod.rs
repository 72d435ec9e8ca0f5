//! Native connections: queue pairs whose programs exchanged GIDs and numbers by themselves and then
//! called `modify_qp`.
//!
//! Going to RTR names the peer, and [`Engine::meet`] registers the pair. The side with the lower
//! (GID, QPN) calls at the port in the peer's number; the other one waits, and calls as well if
//! nothing came for a while. A call for a queue pair that has not reached RTR is parked. Both sides
//! introduce themselves in MPA private data ([`identity`]), and the responder checks the
//! initiator's address and PSNs ([`admission`]). The states of a pair:
//!
//! ```text
//!             meet (RTR)            our request accepted: attach, RTR goes out, gate opens
//!   Idle ───────────────▶ Seeking ──────────────────────────────────────────────▶ Connected
//!     requests are parked    │  │   a request of the peer: Reply, attach;
//!                            │  │   the gate opens at the first FPDU
//!                            │  └───────────────────────────────────────────────▶ Connected
//!                            └ rejected for good, or retries exhausted ──────────▶ Closed
//! ```
//!
//! In `Closed`, sends complete with `RETRY_EXC_ERR`.
//!
//! The engine does no I/O: events of streams and the time go in; it acts through [`Streams`], and
//! its findings about queue pairs come out as [`Notice`]s.

mod address;
mod admission;
mod called;
mod calling;
mod engine;
mod guesses;
mod identity;
mod numbers;
mod rnr;
mod state;
mod stream_events;
mod streams;
#[cfg(test)]
mod tests;

pub use address::{Ends, Home, Peer, Place};
pub use identity::PSN_MASK;
pub use state::{Engine, Notice, PeerParams, RtsParams};
pub use streams::{Attachment, Streams, World};
