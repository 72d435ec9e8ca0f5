//! The host's interfaces and addresses, queried from the kernel by rtnetlink(7).
//!
//! `getifaddrs` is not used: libc would call urnic again through the functions that the plug-in
//! interposes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::netlink_attributes::{Attributes, u16_at, u32_at};

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The interface's index.
    pub index: u32,
    /// The interface's name.
    pub name: String,
    /// Whether the interface is up (`IFF_UP`).
    pub up: bool,
    /// Largest IP packet in bytes.
    pub mtu: u32,
}

/// An address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address.
    pub ip: IpAddr,
    /// Length of the network's prefix in bits.
    pub prefix_len: u8,
    /// Index of the interface that has the address.
    pub link: u32,
}

/// Message types, flags and attributes of `<linux/rtnetlink.h>`, `<linux/if_link.h>`,
/// `<linux/if_addr.h>`.
mod uapi {
    pub(super) const NLMSG_ERROR: u16 = 2;
    pub(super) const NLMSG_DONE: u16 = 3;
    pub(super) const NLM_F_REQUEST: u16 = 1;
    pub(super) const NLM_F_DUMP: u16 = 0x300;

    pub(super) const RTM_NEWLINK: u16 = 16;
    pub(super) const RTM_GETLINK: u16 = 18;
    pub(super) const RTM_NEWADDR: u16 = 20;
    pub(super) const RTM_GETADDR: u16 = 22;
    pub(super) const RTM_NEWROUTE: u16 = 24;
    pub(super) const RTM_GETROUTE: u16 = 26;
    pub(super) const RTM_NEWNEIGH: u16 = 28;
    pub(super) const RTM_GETNEIGH: u16 = 30;

    pub(super) const IFLA_IFNAME: u16 = 3;
    pub(super) const IFLA_MTU: u16 = 4;
    pub(super) const IFF_UP: u32 = 1;
    pub(super) const IFF_LOOPBACK: u32 = 0x8;
    pub(super) const IFF_NOARP: u32 = 0x80;

    pub(super) const IFA_ADDRESS: u16 = 1;
    pub(super) const IFA_LOCAL: u16 = 2;
    pub(super) const IFA_FLAGS: u16 = 8;
    pub(super) const IFA_F_DADFAILED: u32 = 0x08;
    pub(super) const IFA_F_TENTATIVE: u32 = 0x40;

    pub(super) const RTA_DST: u16 = 1;
    pub(super) const RTA_SRC: u16 = 2;
    pub(super) const RTA_OIF: u16 = 4;
    pub(super) const RTA_GATEWAY: u16 = 5;
    pub(super) const RTA_PREFSRC: u16 = 7;
    pub(super) const RTA_VIA: u16 = 18;
    pub(super) const RTN_UNICAST: u8 = 1;

    pub(super) const NDA_DST: u16 = 1;
    /// The states of a neighbour whose link-layer address is known.
    pub(super) const NUD_VALID: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80;

    pub(super) const AF_INET: u8 = 2;
    pub(super) const AF_INET6: u8 = 10;

    /// `RDMA_NLDEV_CMD_SYS_GET` of the client `RDMA_NL_NLDEV`, and an attribute of its answer, of
    /// `<rdma/rdma_netlink.h>`.
    pub(super) const RDMA_SYS_GET: u16 = 5 << 10 | 6;
    pub(super) const RDMA_SYS_ATTR_COPY_ON_FORK: u16 = 93;

    pub(super) const NLMSGHDR: usize = 16;
    pub(super) const IFINFOMSG: usize = 16;
    pub(super) const IFADDRMSG: usize = 8;
    pub(super) const RTMSG: usize = 12;
    pub(super) const NDMSG: usize = 12;
}
use uapi::*;

/// Every interface, in the kernel's order.
pub(super) fn links() -> Result<Vec<Link>, Errno> {
    let mut links = Vec::new();
    ask(RTM_GETLINK, NLM_F_DUMP, &[0; IFINFOMSG], |kind, body| {
        if kind == RTM_NEWLINK {
            links.extend(link(body));
        }
    })?;
    Ok(links)
}

/// Every address that is in use, in the kernel's order.
pub(super) fn addresses() -> Result<Vec<InterfaceAddress>, Errno> {
    let mut addresses = Vec::new();
    ask(RTM_GETADDR, NLM_F_DUMP, &[0; IFADDRMSG], |kind, body| {
        if kind == RTM_NEWADDR {
            addresses.extend(address(body));
        }
    })?;
    Ok(addresses)
}

/// The source address that the kernel would use towards `destination`; None if there is no route.
pub(super) fn source_towards(destination: Ipv4Addr) -> Option<IpAddr> {
    let mut request = vec![AF_INET, 32];
    request.resize(RTMSG, 0);
    request.extend(8u16.to_ne_bytes());
    request.extend(RTA_DST.to_ne_bytes());
    request.extend(destination.octets());
    let mut source = None;
    ask(RTM_GETROUTE, 0, &request, |kind, body| {
        if kind == RTM_NEWROUTE {
            source = body
                .get(RTMSG..)
                .and_then(|attributes| Attributes(attributes).find(RTA_PREFSRC))
                .and_then(|value| ip(AF_INET, value));
        }
    })
    .ok()?;
    source
}

/// The route of packets to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Route {
    /// It leads to another host.
    pub(super) is_unicast: bool,
    /// The next hop, if that is not the destination.
    pub(super) gateway: Option<IpAddr>,
    /// Index of the interface that sends.
    pub(super) interface: u32,
}

/// The route from `source` to `destination`, in the network `scope` of a link-local address; `None`
/// if the kernel's answer has no interface.
///
/// # Errors
/// Those of the route, and of the socket.
pub(super) fn route(source: Option<IpAddr>, destination: IpAddr, scope: u32) -> Result<Option<Route>, Errno> {
    let (family, bytes) = family_of(destination);
    let source = source.map(family_of).filter(|(own, _)| *own == family);
    let bits = (bytes.len() * 8) as u8;
    let mut request = vec![family, bits, if source.is_some() { bits } else { 0 }];
    request.resize(RTMSG, 0);
    append(&mut request, RTA_DST, &bytes);
    if let Some((_, bytes)) = source {
        append(&mut request, RTA_SRC, &bytes);
    }
    if scope != 0 {
        append(&mut request, RTA_OIF, &scope.to_ne_bytes());
    }
    let mut found = None;
    ask(RTM_GETROUTE, 0, &request, |kind, body| {
        if kind == RTM_NEWROUTE {
            found = parse_route(body);
        }
    })?;
    Ok(found)
}

fn parse_route(body: &[u8]) -> Option<Route> {
    let (family, kind) = (*body.first()?, *body.get(7)?);
    let attributes = body.get(RTMSG..)?;
    let gateway = Attributes(attributes)
        .find(RTA_GATEWAY)
        .and_then(|value| ip(family, value));
    // The gateway is of another family: `struct rtvia`.
    let via = || {
        let (family, value) = Attributes(attributes).find(RTA_VIA)?.split_at_checked(2)?;
        ip(u16_at(family, 0)? as u8, value)
    };
    Some(Route {
        is_unicast: kind == RTN_UNICAST,
        gateway: gateway.or_else(via),
        interface: u32_at(Attributes(attributes).find(RTA_OIF)?, 0)?,
    })
}

/// Whether the kernel asks the neighbours on an interface for their link-layer addresses.
///
/// # Errors
/// `ENODEV` for an interface that does not exist; those of the socket.
pub(super) fn resolves_neighbours(interface: u32) -> Result<bool, Errno> {
    let mut request = vec![0; 4];
    request.extend(interface.to_ne_bytes());
    request.resize(IFINFOMSG, 0);
    let mut resolves = false;
    ask(RTM_GETLINK, 0, &request, |kind, body| {
        if kind == RTM_NEWLINK {
            resolves = u32_at(body, 8).is_some_and(|flags| flags & (IFF_LOOPBACK | IFF_NOARP) == 0);
        }
    })?;
    Ok(resolves)
}

/// A host on the network of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Neighbour {
    /// Its address.
    pub(super) ip: IpAddr,
    /// Index of the interface.
    pub(super) interface: u32,
}

/// Whether the kernel knows the link-layer address of a neighbour.
///
/// # Errors
/// `EOPNOTSUPP` before Linux 5.0; those of the socket.
pub(super) fn is_neighbour_known(neighbour: &Neighbour) -> Result<bool, Errno> {
    let (family, bytes) = family_of(neighbour.ip);
    let mut request = vec![family, 0, 0, 0];
    request.extend(neighbour.interface.to_ne_bytes());
    request.resize(NDMSG, 0);
    append(&mut request, NDA_DST, &bytes);
    let mut is_known = false;
    let asked = ask(RTM_GETNEIGH, 0, &request, |kind, body| {
        if kind == RTM_NEWNEIGH {
            is_known = u16_at(body, 8).is_some_and(|state| state & NUD_VALID != 0);
        }
    });
    match asked {
        Err(Errno::NOENT) => Ok(false),
        asked => asked.map(|()| is_known),
    }
}

/// Whether the kernel copies the pages of an adapter at a fork, as since Linux 5.12, so that a
/// child does not get them. True without support for adapters in the kernel, because no page is
/// pinned.
///
/// # Errors
/// Those of the socket.
pub fn copies_pinned_pages_on_fork() -> Result<bool, Errno> {
    let socket = match open(Some(netlink::RDMA)) {
        Err(Errno::PROTONOSUPPORT | Errno::AFNOSUPPORT) => return Ok(true),
        opened => opened?,
    };
    let mut copies = false;
    // An older kernel does not have the request, or leaves out the attribute.
    let asked = ask_through(&socket, RDMA_SYS_GET, 0, &[], |kind, attributes| {
        let value = Attributes(attributes).find(RDMA_SYS_ATTR_COPY_ON_FORK);
        copies |= kind == RDMA_SYS_GET && value.is_some_and(|value| value.first() == Some(&1));
    });
    match asked {
        Ok(()) | Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(copies),
        Err(errno) => Err(errno),
    }
}

fn open(protocol: Option<Protocol>) -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        protocol,
    )
}

/// Sends one request to rtnetlink, as [`ask_through`] does.
fn ask(kind: u16, flags: u16, body: &[u8], each: impl FnMut(u16, &[u8])) -> Result<(), Errno> {
    ask_through(&open(None)?, kind, flags, body, each)
}

/// Sends one request and passes each message of the answer to `each`: the message type and the
/// bytes after the message header.
fn ask_through(
    socket: &OwnedFd,
    kind: u16,
    flags: u16,
    body: &[u8],
    mut each: impl FnMut(u16, &[u8]),
) -> Result<(), Errno> {
    let mut request = Vec::with_capacity(NLMSGHDR + body.len());
    request.extend(((NLMSGHDR + body.len()) as u32).to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    request.extend([0; 8]); // sequence, port: one request per socket
    request.extend(body);
    sendto(
        socket,
        &request,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;

    let mut buffer = vec![0; 64 * 1024];
    loop {
        let received = match recv(socket, buffer.as_mut_slice(), RecvFlags::empty()) {
            Ok((_, n)) => n,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        };
        let datagram = buffer.get(..received).ok_or(Errno::MSGSIZE)?;
        if deliver(datagram, flags & NLM_F_DUMP != 0, &mut each)? {
            return Ok(());
        }
    }
}

/// Passes the messages of one datagram to `each`; true when the answer is complete.
fn deliver(mut datagram: &[u8], dump: bool, each: &mut impl FnMut(u16, &[u8])) -> Result<bool, Errno> {
    while let Some(header) = datagram.get(..NLMSGHDR) {
        let length = u32_at(header, 0).unwrap_or(0) as usize;
        let kind = u16_at(header, 4).unwrap_or(0);
        let body = datagram.get(NLMSGHDR..length).ok_or(Errno::BADMSG)?;
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let error = u32_at(body, 0).map_or(0, |raw| (raw as i32).wrapping_neg());
                return if error == 0 {
                    Ok(true)
                } else {
                    Err(Errno::from_raw_os_error(error))
                };
            }
            _ => each(kind, body),
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Ok(!dump)
}

fn link(body: &[u8]) -> Option<Link> {
    let attributes = body.get(IFINFOMSG..)?;
    let name = Attributes(attributes)
        .find(IFLA_IFNAME)?
        .split(|&b| b == 0)
        .next()?;
    Some(Link {
        index: u32_at(body, 4)?,
        name: String::from_utf8(name.to_vec()).ok()?,
        up: u32_at(body, 8)? & IFF_UP != 0,
        mtu: Attributes(attributes)
            .find(IFLA_MTU)
            .and_then(|value| u32_at(value, 0))
            .unwrap_or(0),
    })
}

/// Parses an address message; None for an address that is not usable (yet).
fn address(body: &[u8]) -> Option<InterfaceAddress> {
    let (family, prefix_len, link) = (*body.first()?, *body.get(1)?, u32_at(body, 4)?);
    let attributes = body.get(IFADDRMSG..)?;
    let flags = Attributes(attributes)
        .find(IFA_FLAGS)
        .and_then(|value| u32_at(value, 0))
        .or_else(|| body.get(2).map(|&flags| flags.into()))?;
    if flags & (IFA_F_TENTATIVE | IFA_F_DADFAILED) != 0 {
        return None;
    }
    // On a point-to-point link IFA_ADDRESS is the peer's.
    let value = Attributes(attributes)
        .find(IFA_LOCAL)
        .or_else(|| Attributes(attributes).find(IFA_ADDRESS))?;
    Some(InterfaceAddress {
        ip: ip(family, value)?,
        prefix_len,
        link,
    })
}

fn family_of(ip: IpAddr) -> (u8, Vec<u8>) {
    match ip {
        IpAddr::V4(ip) => (AF_INET, ip.octets().to_vec()),
        IpAddr::V6(ip) => (AF_INET6, ip.octets().to_vec()),
    }
}

/// Appends an attribute whose length is a multiple of four.
fn append(request: &mut Vec<u8>, kind: u16, value: &[u8]) {
    request.extend((value.len() as u16 + 4).to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(value);
}

fn ip(family: u8, value: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?).into()),
        AF_INET6 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = ((value.len() + 4) as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn address_message(flags: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![AF_INET, 24, 0, 0];
        body.extend(3u32.to_ne_bytes());
        body.extend(attribute(IFA_FLAGS, &flags.to_ne_bytes()));
        for (kind, value) in attributes {
            body.extend(attribute(*kind, value));
        }
        body
    }

    #[test]
    fn a_point_to_point_link_has_the_local_address() {
        let body = address_message(0, &[(IFA_ADDRESS, &[10, 0, 0, 2]), (IFA_LOCAL, &[10, 0, 0, 1])]);
        let ours = InterfaceAddress {
            ip: IpAddr::from([10, 0, 0, 1]),
            prefix_len: 24,
            link: 3,
        };
        assert_eq!(address(&body), Some(ours));
    }

    #[test]
    fn tentative_and_duplicate_addresses_are_left_out() {
        for flags in [IFA_F_TENTATIVE, IFA_F_DADFAILED] {
            assert_eq!(
                address(&address_message(flags, &[(IFA_ADDRESS, &[10, 0, 0, 2])])),
                None
            );
        }
    }

    #[test]
    fn the_kernel_answers() {
        let links = links().unwrap();
        let lo = links.iter().find(|link| link.name == "lo").unwrap();
        assert!(lo.mtu >= 1280);
        for address in addresses().unwrap() {
            assert!(links.iter().any(|link| link.index == address.link), "{address:?}");
        }
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256), dump: bool) {
            let _ = deliver(&bytes, dump, &mut |_, body| {
                let _ = (link(body), address(body), parse_route(body), Attributes(body).find(RTA_PREFSRC));
            });
        }
    }
}
