//! Whether the host reaches an address: what the kernel's address resolution of RoCE
//! (`ib_resolve_eth_dmac`) asks before a queue pair may name the address as its peer.
//!
//! There must be a route, and on a network with neighbours the next hop must answer (ARP, neighbour
//! discovery). A next hop that the kernel knows costs no time. For another one, an empty datagram
//! to the discard port makes the kernel ask; the caller waits for the answer as long as a kernel
//! driver does.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, bind, connect, send, socket_with};

use crate::netlink::{self, Route};

/// The time within which a next hop must answer, as in a kernel driver.
const PATIENCE: Duration = Duration::from_secs(1);
/// Intervals at which the kernel is asked whether the next hop has answered: they double.
const INTERVALS: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(20));
/// The port of the discard protocol (RFC 863).
const DISCARD: u16 = 9;

/// Checks that packets from `source`, an address of this host, reach the next hop towards
/// `destination`, in the network `scope` of a link-local address.
///
/// Succeeds if that cannot be found out: if `source` is not an address of this host, as that of a
/// device elsewhere may be, or the kernel does not answer such questions.
///
/// # Errors
/// `ENETUNREACH` and `EHOSTUNREACH` by the routes of the host; `ETIMEDOUT` if the next hop does not
/// answer.
pub fn check(source: Option<IpAddr>, destination: IpAddr, scope: u32) -> Result<(), Errno> {
    let family = match destination {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let Ok(socket) = socket_with(family, SocketType::DGRAM, flags, None) else {
        return Ok(());
    };
    if let Some(source) = source
        && bind(&socket, &in_scope(source, 0, scope)).is_err()
    {
        return Ok(());
    }
    match connect(&socket, &in_scope(destination, DISCARD, scope)) {
        Err(errno @ (Errno::NETUNREACH | Errno::HOSTUNREACH)) => return Err(errno),
        Err(_) => return Ok(()),
        Ok(()) => {}
    }
    let Some(next_hop) = next_hop(source, destination, scope) else {
        return Ok(());
    };
    if is_reserved(destination) && next_hop.ip != destination {
        return Err(Errno::NETUNREACH);
    }
    let end = Instant::now() + PATIENCE;
    let mut interval = INTERVALS.0;
    let mut has_asked = false;
    while !netlink::is_neighbour_known(&next_hop).unwrap_or(true) {
        if Instant::now() >= end {
            return Err(Errno::TIMEDOUT);
        }
        if !has_asked {
            // The kernel asks for the next hop, and keeps the datagram until it answers. A firewall
            // that refuses the datagram prevents the question: nothing can be found out.
            match send(&socket, &[], SendFlags::NOSIGNAL) {
                Err(errno @ (Errno::NETUNREACH | Errno::HOSTUNREACH)) => return Err(errno),
                Err(_) => return Ok(()),
                Ok(_) => has_asked = true,
            }
        }
        sleep(interval);
        interval = INTERVALS.1.min(interval * 2);
    }
    Ok(())
}

/// Whether no router forwards packets to the address: a default route leads nowhere
/// (240.0.0.0/4, RFC 6890 table 15). A kernel driver learns that only by the request's timeout.
fn is_reserved(destination: IpAddr) -> bool {
    matches!(destination, IpAddr::V4(v4) if v4.octets()[0] >= 240)
}

/// The next hop, if it is a neighbour that must answer.
fn next_hop(source: Option<IpAddr>, destination: IpAddr, scope: u32) -> Option<netlink::Neighbour> {
    let Route {
        is_unicast,
        gateway,
        interface,
    } = netlink::route(source, destination, scope).ok()??;
    let resolves = is_unicast && netlink::resolves_neighbours(interface).ok()?;
    resolves.then(|| netlink::Neighbour {
        ip: gateway.unwrap_or(destination),
        interface,
    })
}

fn in_scope(ip: IpAddr, port: u16, scope: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddrV6::new(v6, port, 0, scope).into(),
        ip => SocketAddr::new(ip, port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn addresses_of_this_host_are_reached() {
        let v4 = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert_eq!(check(Some(v4), v4, 0), Ok(()));
        assert_eq!(check(None, v4, 0), Ok(()));
        assert_eq!(check(None, Ipv4Addr::new(127, 1, 2, 3).into(), 0), Ok(()));
        assert_eq!(check(None, Ipv6Addr::LOCALHOST.into(), 0), Ok(()));
    }

    #[test]
    fn nothing_is_known_of_a_source_elsewhere() {
        let elsewhere = Ipv4Addr::new(192, 0, 2, 77).into();
        assert_eq!(
            check(Some(elsewhere), Ipv4Addr::new(198, 51, 100, 1).into(), 0),
            Ok(())
        );
    }
}
