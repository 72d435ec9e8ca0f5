//! The source address of a connection.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, socket_with};

use urnic_process::addressing::Gid;

/// The source address that the host's routing tables choose for `remote`, found with a socket that
/// sends nothing.
pub(crate) fn source_of_host(remote: SocketAddr) -> Result<SocketAddr, Errno> {
    let family = if remote.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let probe = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    connect(&probe, &remote)?;
    SocketAddr::try_from(getsockname(&probe)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// The address of a device from which it reaches `remote`: the one with the longest prefix that
/// contains `remote`, else the first of the same family.
pub(crate) fn source_of_device(gids: &[Gid], remote: SocketAddr) -> Option<SocketAddr> {
    let shared = |gid: &Gid| match (gid.ip, remote.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    };
    let of_family = || gids.iter().filter(|gid| gid.ip.is_ipv4() == remote.is_ipv4());
    let best = of_family()
        .filter(|gid| shared(gid) >= gid.prefix_len.into())
        .max_by_key(|gid| gid.prefix_len);
    best.or_else(|| of_family().next()).map(|gid| match gid.ip {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), 0),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, gid.scope).into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_of_a_device_has_the_longest_prefix() {
        let gid = |ip: &str, prefix_len| Gid {
            ip: ip.parse().unwrap(),
            scope: 0,
            prefix_len,
        };
        let gids = [gid("10.0.0.5", 8), gid("10.1.0.5", 16), gid("192.0.2.5", 24)];
        let source = |remote: &str| {
            let source = source_of_device(&gids, SocketAddr::new(remote.parse().unwrap(), 7))?;
            Some(source.ip().to_string())
        };
        assert_eq!(source("10.1.9.9").as_deref(), Some("10.1.0.5"));
        assert_eq!(source("10.2.9.9").as_deref(), Some("10.0.0.5"));
        assert_eq!(source("192.0.2.9").as_deref(), Some("192.0.2.5"));
        assert_eq!(source("198.51.100.1").as_deref(), Some("10.0.0.5"));
        assert_eq!(source("2001:db8::1"), None);
    }
}
