//! By what a peer and its connections are known.

use std::fmt;
use std::net::IpAddr;

use urnic_process::port_gids::gid_of;

/// The addresses between which the messages and the packets of a connection go. IPv4 addresses are
/// never in their mapped form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The address of this end.
    pub local: IpAddr,
    /// The address of the peer.
    pub remote: IpAddr,
}

impl Route {
    /// The route between two addresses.
    pub fn new(local: IpAddr, remote: IpAddr) -> Route {
        Route {
            local: local.to_canonical(),
            remote: remote.to_canonical(),
        }
    }

    /// The GIDs of both ends, the local one first.
    pub(super) fn gids(&self) -> ([u8; 16], [u8; 16]) {
        (gid_of(self.local), gid_of(self.remote))
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.local, self.remote)
    }
}

/// Something that a channel adapter has numbered: a connection or a queue pair. The GUID
/// distinguishes the adapters of one address. The address is part of it because a sender may claim
/// any GUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Numbered {
    pub(super) peer: IpAddr,
    pub(super) ca_guid: u64,
    pub(super) number: u32,
}
