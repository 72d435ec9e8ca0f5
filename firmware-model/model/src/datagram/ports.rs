//! The UDP ports by which the packets of a queue pair come and go.

use crate::stream::datagram::DatagramSocket;
use crate::stream::roce_port::{RocePort, Sources};
use rustix::fd::BorrowedFd;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The UDP ports of a queue pair.
#[derive(Debug)]
pub(crate) enum Ports {
    /// Sockets of one port of its own: one for all addresses, or one for each.
    Own(Vec<Box<dyn DatagramSocket>>),
    /// Port 4791, where adapters have it, too.
    Shared(RocePort),
}

impl Ports {
    /// Has packets kept for the queue pair with this number.
    pub(super) fn bind(&mut self, qid: u32) {
        match self {
            Ports::Own(sockets) => sockets.iter_mut().for_each(|socket| socket.bind(qid)),
            Ports::Shared(port) => port.keep_from(Sources::Any),
        }
    }

    /// Drops what waits, and leaves all groups.
    pub(super) fn reset(&mut self) {
        if let Ports::Shared(port) = self {
            port.keep_from(Sources::Any);
            port.keep_groups(std::iter::empty());
        }
    }

    pub(super) fn forget_peers(&mut self) {
        if let Ports::Own(sockets) = self {
            sockets.iter_mut().for_each(|socket| socket.forget_peers());
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Ports::Shared(_))
    }

    /// The number of sockets that only this queue pair reads.
    pub(super) fn own_sockets(&self) -> usize {
        match self {
            Ports::Own(sockets) => sockets.len(),
            Ports::Shared(_) => 0,
        }
    }

    /// The sockets by which packets leave.
    pub(super) fn senders(&self) -> impl Iterator<Item = &dyn DatagramSocket> {
        let (own, shared) = match self {
            Ports::Own(sockets) => (sockets.as_slice(), None),
            Ports::Shared(port) => (&[][..], Some(port.sender())),
        };
        own.iter().map(|socket| &**socket).chain(shared)
    }

    /// A socket by which packets leave.
    pub(super) fn sender(&mut self, index: usize) -> Option<&mut dyn DatagramSocket> {
        match self {
            Ports::Own(sockets) => Some(sockets.get_mut(index)?.as_mut()),
            Ports::Shared(port) => (index == 0).then(|| port.sender_mut()),
        }
    }

    /// The number of the socket that sends from an address.
    pub(super) fn sender_from(&self, source: IpAddr) -> Option<usize> {
        let Ports::Own(sockets) = self else {
            // The system sends from each address of the socket's family.
            let is_possible = self.senders().any(|socket| {
                let local = socket.local().ip();
                local.is_unspecified() || local.is_ipv4() == source.is_ipv4()
            });
            return is_possible.then_some(0);
        };
        let fits = |local: IpAddr| local.to_canonical() == source || local.is_unspecified();
        sockets.iter().position(|socket| fits(socket.local().ip()))
    }

    /// The descriptors to poll for readiness.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.senders().filter_map(|socket| socket.descriptor())
    }
}

// Multicast groups.

impl Ports {
    /// The place of a socket that joins a group. The packets of a group reach each socket of their
    /// port that is bound to all addresses, if any socket of the host has joined (`IP_MULTICAST_ALL`
    /// of ip(7)). So beside such a shared port, the socket that joins needs no certain port; beside
    /// one at certain addresses, it has the address of the group.
    pub(super) fn place_of(&self, group: SocketAddr) -> SocketAddr {
        let everywhere: IpAddr = match group {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        match self {
            Ports::Own(_) => SocketAddr::new(everywhere, group.port()),
            Ports::Shared(port) if port.is_everywhere() => SocketAddr::new(everywhere, 0),
            Ports::Shared(_) => group,
        }
    }

    /// Whether the sockets that joined groups receive their packets.
    pub(super) fn groups_have_sockets(&self) -> bool {
        match self {
            Ports::Own(_) => true,
            Ports::Shared(port) => !port.is_everywhere(),
        }
    }

    /// Takes the packets of these groups from the shared port.
    pub(super) fn keep_groups(&mut self, groups: impl Iterator<Item = IpAddr>) {
        if let Ports::Shared(port) = self
            && port.is_everywhere()
        {
            port.keep_groups(groups);
        }
    }
}
