//! The way to the peer of a queue pair.

use std::net::{IpAddr, SocketAddr};
use urnic_roce::message::Mtu;

/// The way to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path {
    /// The own address.
    pub(crate) source: IpAddr,
    /// The peer's address, with the scope of a link-local one; the port is UDP's for RoCE v2.
    pub(crate) destination: SocketAddr,
    /// The number of the peer's queue pair.
    pub(crate) qpn: u32,
    /// The IP header's traffic class.
    pub(crate) traffic_class: u8,
    /// Bytes of payload in a packet, at most.
    pub(crate) mtu: Mtu,
}
