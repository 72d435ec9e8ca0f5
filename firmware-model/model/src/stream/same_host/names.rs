//! Where processes find each other: abstract unix sockets with the names of ports.

use crate::stream::address::ANYWHERE;
use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen as begin_to_listen,
    socket_with,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// Connections of a listener's unix socket that may wait.
const BACKLOG: i32 = 1024;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The name of the unix socket of a listener, or of a UDP port.
fn name(of: Protocol, ip: Option<IpAddr>, port: u16) -> Result<SocketAddrUnix, Errno> {
    let of = match of {
        Protocol::Tcp => "urnic",
        Protocol::Udp => "urnic/udp",
    };
    let name = match ip {
        Some(ip) => format!("{of}/{}/{port}", ip.to_canonical()),
        None => format!("{of}/*/{port}"),
    };
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

/// What a port belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Protocol {
    Tcp,
    Udp,
}

/// Opens the place for offers to a port.
pub(super) fn listen(
    of: Protocol,
    local: SocketAddr,
    descriptors: &Arc<Descriptors>,
) -> Result<Descriptor, Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    let socket = descriptors.adopt(socket)?;
    let ip = Some(local.ip()).filter(|ip| *ip != ANYWHERE.ip());
    bind(&socket, &name(of, ip, local.port())?)?;
    begin_to_listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to the place for offers to the port at `remote`.
pub(super) fn call(of: Protocol, remote: SocketAddr, descriptors: &Arc<Descriptors>) -> Option<Descriptor> {
    let any: IpAddr = match remote.ip().to_canonical() {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None).ok()?;
    let socket = descriptors.adopt(socket).ok()?;
    for ip in [Some(remote.ip()), Some(any), None] {
        match connect(&socket, &name(of, ip, remote.port()).ok()?) {
            Ok(()) => return Some(socket),
            Err(Errno::CONNREFUSED) => {}
            Err(_) => return None,
        }
    }
    None
}
