//! The way to a peer, as the system knows it: our address, and the length of packets.

use super::super::ANYWHERE;
use crate::sys::datagrams::path_mtu;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, SocketFlags, SocketType};
use std::net::{IpAddr, SocketAddr};

/// Bytes of an SCTP packet if the MTU of the path is unknown: with the headers of UDP and IPv6 it
/// fits the smallest link of IPv6 (RFC 8200 §5), so also the inside of any tunnel.
pub(super) const PACKET_LEN: usize = 1280 - UDP_LEN - IPV6_LEN;
/// The MTU of the largest link that is common. Of longer packets, as the loopback network takes
/// them, the library's first window would not fit a socket's receive buffer.
const LARGEST_MTU: usize = 9000;
const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;

/// A socket that knows the way to a peer, from an own address if there is one. Nothing is sent.
fn towards(remote: SocketAddr, from: Option<IpAddr>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(super::super::family(&remote), SocketType::DGRAM, flags, None)?;
    if let Some(from) = from {
        net::bind(&socket, &SocketAddr::new(from, 0))?;
    }
    net::connect(&socket, &remote)?;
    Ok(socket)
}

/// The longest SCTP packet to a peer, by the MTU that the system knows of the path at present.
pub(super) fn packet_len(remote: SocketAddr, local: IpAddr) -> usize {
    let from = Some(local).filter(|ip| !ip.is_unspecified());
    let is_ipv6 = remote.is_ipv6();
    let mtu = towards(remote, from).and_then(|socket| path_mtu(socket.as_fd(), is_ipv6));
    let headers = UDP_LEN + if is_ipv6 { IPV6_LEN } else { IPV4_LEN };
    match mtu {
        Ok(mtu) => mtu.min(LARGEST_MTU).saturating_sub(headers),
        Err(errno) => {
            tracing::debug!(%errno, "the MTU of the path to {remote} is unknown");
            PACKET_LEN
        }
    }
}

/// The address from which the system sends packets to a peer.
pub(super) fn own_address_towards(remote: SocketAddr) -> Result<SocketAddr, Errno> {
    let socket = towards(remote, None)?;
    let local = super::super::plain(net::getsockname(&socket).ok());
    match local == ANYWHERE {
        true => Err(Errno::NETUNREACH),
        false => Ok(local),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    /// The loopback network has an MTU of 65536 bytes on Linux.
    #[test]
    fn sctp_08_packets_fit_the_path_and_common_links() {
        let v4 = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9);
        for local in [Ipv4Addr::UNSPECIFIED, Ipv4Addr::LOCALHOST] {
            assert_eq!(packet_len(v4, local.into()), 9000 - 28);
        }
        let v6 = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 9);
        let has_ipv6 = own_address_towards(v6).is_ok();
        let expected = if has_ipv6 { 9000 - 48 } else { PACKET_LEN };
        assert_eq!(packet_len(v6, Ipv6Addr::UNSPECIFIED.into()), expected);
        // An address of another family: no way is known.
        assert_eq!(packet_len(v4, Ipv6Addr::LOCALHOST.into()), 1232);
    }
}
