//! Addresses in the form that verbs use.

use std::net::IpAddr;

use crate::port_gids::gid_of;

/// An entry of the GID table: an address of this function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// The address.
    pub ip: IpAddr,
    /// IPv6 scope of a link-local address; else 0.
    pub scope: u32,
    /// Length of the network's prefix, in bits.
    pub prefix_len: u8,
}

impl Gid {
    /// The GID: IPv4 addresses in their IPv6-mapped form.
    pub fn raw(&self) -> [u8; 16] {
        gid_of(self.ip)
    }
}

/// An address vector (`struct ibv_ah_attr`), limited to the fields that name a peer and those that
/// queries return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AddressVector {
    /// Whether `dgid` names the peer; otherwise `dlid` does.
    pub is_global: bool,
    /// The peer's GID, network order.
    pub dgid: [u8; 16],
    /// Index of our own GID.
    pub sgid_index: u8,
    /// Flow label; kept for queries.
    pub flow_label: u32,
    /// Hop limit; kept for queries.
    pub hop_limit: u8,
    /// Traffic class; kept for queries.
    pub traffic_class: u8,
    /// The peer's LID.
    pub dlid: u16,
    /// Service level; kept for queries.
    pub sl: u8,
    /// Path bits; kept for queries.
    pub src_path_bits: u8,
    /// Static rate; kept for queries.
    pub static_rate: u8,
    /// Port of the device: 1.
    pub port: u8,
}
