//! Native connections: programs exchange GIDs and queue pair numbers themselves, and then call
//! `modify_qp`.
//!
//! The transition to RTR names the peer ([`Engine::reached_rtr`]). The side with the lower (GID,
//! QPN) connects to the port in the peer's number; the other side waits, and also connects if no
//! Request arrived for a while. A Request for a queue pair that has not reached RTR is parked. Both
//! sides identify themselves in MPA private data (`identity.rs`), and the responder checks the
//! initiator's address and PSNs (`admission.rs`). The states of a queue pair:
//!
//! ```text
//!             RTR                   own Request accepted: attach, RTR goes out, gate opens
//!   Idle ───────────────▶ Connecting ───────────────────────────────────────────▶ Connected
//!     requests are parked    │  │   a Request of the peer: Reply, attach;
//!                            │  │   the gate opens at the first FPDU
//!                            │  └───────────────────────────────────────────────▶ Connected
//!                            └ rejected permanently, or retries exhausted ───────▶ Closed
//! ```
//!
//! In `Closed`, sends complete with `RETRY_EXC_ERR`. A queue pair of kind UC never comes there: it
//! stays in `Connecting`, to which it also returns when its stream ends (`unreliable.rs`).
//!
//! The engine does no I/O: events of streams and the time go in; it acts through [`Streams`], and
//! returns [`Notice`]s about queue pairs.

mod address;
mod admission;
mod engine;
mod identity;
mod initiator;
mod numbers;
mod psn_mismatches;
mod responder;
mod rnr;
mod state;
mod stream_events;
mod streams;
#[cfg(test)]
mod tests;
mod unreliable;

pub use address::{Endpoints, HostAddress, LocalHost, Peer};
pub use identity::PSN_MASK;
pub use state::{Engine, Notice, PeerParams, RtsParams};
pub use streams::{Attachment, Streams, World};
