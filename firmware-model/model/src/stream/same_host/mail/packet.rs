//! What is common to both ends of a ring of datagrams.

use crate::stream::descriptor::Descriptor;
use crate::stream::{StreamError, socket};
use std::net::{IpAddr, Ipv6Addr};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What precedes a packet in the ring.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Header {
    pub(super) len: u32,
    /// Datagrams that the sender sent by UDP before, since it offered the ring.
    pub(super) by_udp: u32,
    pub(super) source: [u8; 16],
    pub(super) destination: [u8; 16],
}

pub(super) const HEADER: usize = size_of::<Header>();

pub(super) fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

pub(super) fn ip_of(octets: [u8; 16]) -> IpAddr {
    IpAddr::from(Ipv6Addr::from(octets)).to_canonical()
}

/// The other end of a ring is gone, or what it wrote cannot be.
#[derive(Debug)]
pub(super) struct Gone;

/// Whether the other end of a unix socket without data is closed.
pub(super) fn is_over(socket: &Descriptor) -> bool {
    !matches!(socket::peek(socket), Err(StreamError::WouldBlock))
}
