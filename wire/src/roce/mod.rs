//! The packets of RoCE v2 (InfiniBand Architecture Specification vol. 1, §9.2 and annex A17), as
//! the payload of UDP: those of reliable and unreliable connections, datagrams, and congestion
//! notifications.
//!
//! ```text
//! BTH(12) extended headers(0-28) payload pad(0-3) ICRC(4)
//! ```
//!
//! The [`Opcode`] decides which extended headers a packet has; a [`Body`] is an opcode together
//! with their contents. The device sends and receives packets by UDP sockets, so it sees no IP
//! header. The fields of that header that the ICRC covers follow from the addresses ([`Ends`]): the
//! sockets send with the bit "don't fragment", and Linux then sends the IPv4 identification 0.
//! Peers that number their packets are for [`parse_numbered`].

mod body;
mod error;
mod extended;
mod grh;
mod icrc;
mod identification;
mod opcode;
mod packet;
mod psn;
mod timers;

pub use body::{Body, Request, Response, Transfer};
pub use error::PacketError;
pub use extended::{Aeth, AtomicEth, Credits, Deth, Immediate, NakCode, Reth, Syndrome};
pub use grh::{GRH_LEN, grh};
pub use icrc::{Ends, ICRC_LEN};
pub use opcode::{Extended, Opcode, Position, Service};
pub use packet::{
    DEFAULT_PKEY, Header, MAX_HEADER_LEN, MAX_TRAILER_LEN, MULTICAST_QPN, UDP_PORT, destination_of, parse,
    parse_numbered, psn_of, seal, seal_numbered, sealed_len,
};
pub use psn::Psn;
pub use timers::{local_ack_timeout_ns, rnr_timer_ns};
