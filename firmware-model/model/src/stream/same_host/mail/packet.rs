//! What is common to both ends of a ring of datagrams.

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

/// The other end of a ring is gone, or what it wrote cannot be.
#[derive(Debug)]
pub(super) struct Gone;
