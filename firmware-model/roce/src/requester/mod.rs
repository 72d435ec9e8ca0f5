//! The requester of a reliable connection (§9.7.3 and §9.7.5 of the InfiniBand Architecture
//! Specification).
//!
//! Packets have 64-bit positions here: the number of the packet since the connection began. The PSN
//! is the first PSN and the low 24 bits of the position. A Read has as many positions as its
//! response has packets.
//!
//! ```text
//!   complete | acknowledged            next              sent            end
//!   ---------+------------+-------------+-----------------+---------------+
//!             in flight     sent before, to send again      never sent
//! ```
//!
//! `next` goes back to `acknowledged` when something was lost, or a receive was missing.

mod interface;
mod queue;
mod responses;

pub use interface::{Attributes, Completion, Effect, Packet, Status};
pub use queue::Requester;
