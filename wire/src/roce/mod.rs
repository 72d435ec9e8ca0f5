//! Unreliable datagrams of RoCE v2 (InfiniBand Architecture Specification vol. 1, §9.2 and annex
//! A17): the packets of UD queue pairs, as the payload of UDP.
//!
//! ```text
//! BTH(12) DETH(8) [ImmDt(4)] payload pad(0-3) ICRC(4)
//! ```
//!
//! The device sends and receives them by UDP sockets, so it sees no IP header. The fields of that
//! header that the ICRC covers follow from the addresses ([`Ends`]): the sockets send with the bit
//! "don't fragment", and Linux then sends the IPv4 identification 0.

mod grh;
mod icrc;
mod packet;

pub use grh::{GRH_LEN, grh};
pub use icrc::{Ends, ICRC_LEN};
pub use packet::{
    DEFAULT_PKEY, Header, MAX_HEADER_LEN, MAX_TRAILER_LEN, MULTICAST_QPN, PacketError, UDP_PORT, parse,
    psn_of, seal,
};
