//! Kernel UDP.
//!
//! The sockets are not connected, except those for one peer. Those of queue pairs do not fragment,
//! so that the kernel sends IPv4 identification 0, which the ICRC covers. The source address of
//! each packet is given with it.

use super::datagram::{
    BATCH, DatagramOptions, DatagramSocket, Incoming, LONG_ROOM, Outgoing, PACKET_ROOM, Refused,
};
use super::descriptor::{Descriptor, Descriptors};
use super::same_host::{DatagramPort, DatagramRings};
use super::{ANYWHERE, family, plain};
use crate::sys::datagrams;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use std::mem;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

/// Bytes of received packets that a socket keeps, if the system permits so many.
const RECEIVE_ROOM: usize = 4 << 20;

#[derive(Debug)]
struct UdpSocket {
    socket: Descriptor,
    ipv6: bool,
    local: SocketAddr,
    /// The system returns packets that did not arrive (`IP_RECVERR`).
    reports_refused: bool,
    /// Bytes for a message that arrives.
    room: usize,
    /// Packets that found no room, as counted by the system at the last query.
    drops: u32,
    /// Rings from and to other ports on this host.
    rings: Option<DatagramPort>,
    /// The last packets came from rings: the socket was not read.
    unread: bool,
    /// Packets that went into rings, since they were counted.
    direct: u64,
}

/// Calls to send a packet: each may fail with the error of an earlier packet instead.
const SEND_ATTEMPTS: usize = 4;

/// Binds a UDP port.
///
/// # Errors
/// Those of socket(2) and bind(2).
pub(super) fn bind(
    descriptors: &Arc<Descriptors>,
    local: SocketAddr,
    options: DatagramOptions,
    datagram_rings: Option<&Arc<DatagramRings>>,
) -> Result<Box<dyn DatagramSocket>, Errno> {
    let socket = if local.ip() == ANYWHERE.ip() && !options.ipv6_only {
        match open(local, true, options) {
            // A host without IPv6.
            Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => {
                open(SocketAddr::new([0, 0, 0, 0].into(), local.port()), false, options)?
            }
            bound => bound?,
        }
    } else {
        open(local, false, options)?
    };
    let ipv6 = sockopt::socket_domain(&socket)? == AddressFamily::INET6;
    let local = plain(net::getsockname(&socket).ok());
    let mut socket = UdpSocket {
        socket: descriptors.adopt(socket)?,
        ipv6,
        local,
        reports_refused: options.reports_refused,
        room: if options.long_packets || options.merged {
            LONG_ROOM
        } else {
            PACKET_ROOM
        },
        drops: 0,
        rings: None,
        unread: false,
        direct: 0,
    };
    // Other sockets that share a port must get the packets, too; and refused packets must be
    // reported.
    if let Some(datagram_rings) =
        datagram_rings.filter(|_| !(options.shared || options.reports_refused || options.by_udp))
    {
        socket.rings = DatagramPort::open(datagram_rings, socket.local());
    }
    Ok(Box::new(socket))
}

fn open(local: SocketAddr, both_families: bool, options: DatagramOptions) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family(&local), SocketType::DGRAM, flags, None)?;
    let ipv6 = local.is_ipv6();
    if ipv6 {
        sockopt::set_ipv6_v6only(&socket, !both_families)?;
    }
    if options.shared {
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    // A socket that is bound to a group gets nothing of what is for one receiver.
    if options.shared_by_user || options.shared && local.ip().is_multicast() {
        sockopt::set_socket_reuseport(&socket, true)?;
    }
    // The system may allow less.
    let _ = sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_ROOM);
    datagrams::prepare(socket.as_fd(), ipv6)?;
    if options.all_groups {
        datagrams::hear_all_groups(socket.as_fd(), ipv6)?;
    }
    if options.long_packets {
        datagrams::allow_fragments(socket.as_fd(), ipv6)?;
    }
    if options.reports_refused {
        datagrams::return_refused(socket.as_fd(), ipv6)?;
    }
    if options.only_sends {
        datagrams::keep_nothing(socket.as_fd())?;
    }
    // An older system gives them one by one.
    if options.merged
        && let Err(errno) = datagrams::merge(socket.as_fd())
    {
        tracing::debug!(%errno, "packets are not merged by the system");
    }
    net::bind(&socket, &local)?;
    if let Some(peer) = options.peer {
        net::connect(&socket, &peer)?;
    }
    Ok(socket)
}

impl DatagramSocket for UdpSocket {
    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno> {
        let mut packets = packets;
        if let Some(rings) = &mut self.rings {
            let by_ring = |packet: &&Outgoing| {
                let bytes = buffer.get(packet.at..packet.at + packet.len);
                bytes.is_some_and(|bytes| rings.send(packet, bytes))
            };
            let sent = packets.iter().take_while(by_ring).count();
            self.direct += sent as u64;
            if sent > 0 {
                return Ok(sent);
            }
            // The first goes by UDP, together with the ones that follow it by UDP.
            let others = packets.iter().skip(1);
            let count = 1 + others
                .take_while(|packet| !rings.knows(packet.destination))
                .count();
            packets = packets.get(..count).unwrap_or(packets);
        }
        let mut sent = datagrams::send(self.socket.as_fd(), self.ipv6, buffer, packets);
        for _ in 1..SEND_ATTEMPTS {
            match sent {
                Err(errno) if self.reports_refused && errno != Errno::AGAIN => {
                    sent = datagrams::send(self.socket.as_fd(), self.ipv6, buffer, packets);
                }
                _ => break,
            }
        }
        sent
    }

    fn divides(&self) -> bool {
        true
    }

    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool {
        let before = packets.len();
        let from_rings = self.rings.as_mut().map(|rings| rings.receive(buffer, packets));
        self.unread = from_rings == Some(true);
        if self.unread {
            return packets.len() - before == BATCH.min(buffer.len() / PACKET_ROOM);
        }
        let one_by_one = self.rings.as_mut().is_some_and(DatagramPort::look);
        let room = match one_by_one {
            true => buffer.get_mut(..self.room).unwrap_or_default(),
            false => buffer,
        };
        let read = datagrams::receive(self.socket.as_fd(), (room, self.room), packets);
        if let Err(errno) = read
            && errno != Errno::AGAIN
        {
            tracing::debug!(%errno, "a UDP port reports an error");
        }
        if let Some(rings) = &mut self.rings {
            match packets.get(before..) {
                Some([]) | None => rings.note_socket_empty(),
                Some(arrived) => rings.arrived(arrived),
            }
        }
        read.unwrap_or(false)
    }

    fn room(&self) -> usize {
        self.room
    }

    fn has_more(&mut self) -> bool {
        self.unread || self.rings.as_mut().is_some_and(DatagramPort::has_data)
    }

    fn direct(&mut self) -> u64 {
        mem::take(&mut self.direct)
    }

    fn bind(&mut self, qid: u32) {
        if let Some(rings) = &mut self.rings {
            rings.bind(qid);
        }
    }

    fn forget_peers(&mut self) {
        if let Some(rings) = &mut self.rings {
            rings.forget_peers();
        }
    }

    fn refused(&mut self, buffer: &mut [u8]) -> Option<Refused> {
        if !self.reports_refused {
            return None;
        }
        datagrams::refused(self.socket.as_fd(), buffer).ok()
    }

    fn reports_refused(&self) -> bool {
        self.reports_refused
    }

    fn dropped(&mut self) -> u32 {
        let Some(drops) = datagrams::drops(self.socket.as_fd()) else {
            return 0;
        };
        drops.wrapping_sub(mem::replace(&mut self.drops, drops))
    }

    fn join(&mut self, group: IpAddr, interface: IpAddr, scope: u32) -> Result<(), Errno> {
        match (group, interface) {
            (IpAddr::V4(group), IpAddr::V4(interface)) => {
                sockopt::set_ip_add_membership(&self.socket, &group, &interface)
            }
            (IpAddr::V6(group), IpAddr::V6(_)) => {
                sockopt::set_ipv6_add_membership(&self.socket, &group, scope)
            }
            _ => Err(Errno::INVAL),
        }
    }

    fn local(&self) -> SocketAddr {
        match self.local {
            SocketAddr::V4(v4) if self.ipv6 && *v4.ip() == Ipv4Addr::UNSPECIFIED => {
                SocketAddr::new(ANYWHERE.ip(), v4.port())
            }
            local => local,
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}
