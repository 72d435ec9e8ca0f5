//! Addresses of sockets.

use rustix::net::{AddressFamily, SocketAddrAny};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

pub(super) const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

/// The address in its own family: IPv4 peers of a dual-stack socket have IPv6 addresses there.
pub(super) fn plain(address: Option<SocketAddrAny>) -> SocketAddr {
    let address = address.and_then(|a| SocketAddr::try_from(a).ok());
    address.map_or(ANYWHERE, |a| match a {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(v4.into(), v6.port()),
            None => a,
        },
        SocketAddr::V4(_) => a,
    })
}

pub(super) fn family(address: &SocketAddr) -> AddressFamily {
    match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    }
}
