//! The other members: devices of this user in the network namespace, in this process or in others,
//! that have sockets of the port, too.
//!
//! Each has an abstract unix socket for each upper half of its queue pairs' numbers, and for each
//! service that it listens for. A member that reads a packet for another one passes it on by a
//! connection to such a socket. Both ends ask the kernel for the other one's user first
//! ([`PortNames`]). Nothing waits: a packet for which there is no room is dropped, as in a network.

use super::forwarded::{self, MESSAGE_ROOM};
use super::ready::{Ready, Source};
use crate::stream::datagram::Incoming;
use crate::stream::descriptor::Descriptor;
use crate::stream::same_host::{LocalListener, LocalSocket, PortNames, Protocol};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use std::collections::HashMap;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections to other members, and from them, at most: one for each process of a large host.
const CONNECTIONS: usize = 256;
/// Connections that are taken at once at most.
const ACCEPTS: usize = 16;
/// Members that are searched for the packets of one call at most.
const SEARCHES: usize = 4;
/// The time for which a member that was not found is not searched again.
const ABSENT: Duration = Duration::from_millis(5);
/// Absent members that are remembered at most.
const MOST_ABSENT: usize = 256;
/// Bytes of passed packets that wait for a member at most, if the system permits so many.
const SEND_ROOM: usize = 1 << 20;

/// A member, as packets name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Recipient {
    /// By the upper 16 bits of a number, which are a native port.
    Member(u16),
    /// By the number of a service, which listeners reserve as a UDP port.
    Service(u16),
}

impl Recipient {
    /// No member has port 0.
    pub(super) fn member(port: u16) -> Option<Recipient> {
        (port != 0).then_some(Recipient::Member(port))
    }

    /// The ID of a service ends with its number.
    pub(super) fn of_service(id: u64) -> Recipient {
        Recipient::Service(id as u16)
    }

    fn name(self) -> (Protocol, u16) {
        match self {
            Recipient::Member(port) => (Protocol::Roce, port),
            Recipient::Service(number) => (Protocol::RoceService, number),
        }
    }
}

/// What came of a packet for another member.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Passed {
    /// The member has it.
    On,
    /// The member has no room: it has not read for a while.
    Full,
    /// There is no such member.
    Nobody,
    /// Whether there is such a member could not be found out now.
    Unknown,
}

/// What a connection had.
#[derive(Debug)]
pub(super) enum Message<'a> {
    Packet(Incoming, &'a [u8]),
    Nothing,
    /// It is closed.
    End,
}

/// A name of this member.
#[derive(Debug)]
struct Own {
    recipient: Recipient,
    addresses: Box<[IpAddr]>,
    /// All addresses are those of IPv6.
    ipv6_only: bool,
    /// Queue pairs, or ports, that need it.
    users: usize,
    listeners: Vec<(u32, LocalListener)>,
}

impl Own {
    fn is(&self, recipient: Recipient, addresses: &[IpAddr]) -> bool {
        self.recipient == recipient && *self.addresses == *addresses
    }

    fn includes(&self, destination: IpAddr) -> bool {
        let covers = |ip: &IpAddr| match ip.is_unspecified() {
            true if ip.is_ipv6() => !self.ipv6_only || destination.is_ipv6(),
            true => destination.is_ipv4(),
            false => *ip == destination,
        };
        self.addresses.iter().any(covers)
    }
}

/// This member's names, and its connections with others.
#[derive(Debug)]
pub(super) struct Members {
    names: Arc<PortNames>,
    /// The addresses that the member has the port on.
    addresses: Box<[IpAddr]>,
    own: Vec<Own>,
    incoming: HashMap<u32, LocalSocket>,
    /// Without an address: those that have the port at all addresses.
    outgoing: HashMap<(Option<IpAddr>, Recipient), LocalSocket>,
    absent: HashMap<(IpAddr, Recipient), Instant>,
    searches: usize,
}

impl Members {
    pub(super) fn new(names: Arc<PortNames>, addresses: &[IpAddr]) -> Members {
        Members {
            names,
            addresses: addresses.into(),
            own: Vec::new(),
            incoming: HashMap::new(),
            outgoing: HashMap::new(),
            absent: HashMap::new(),
            searches: SEARCHES,
        }
    }

    /// Takes a name on all addresses, once more if the member has it.
    ///
    /// # Errors
    /// Those of [`enter_at`](Self::enter_at).
    pub(super) fn enter(&mut self, recipient: Recipient, ready: &mut Ready) -> Result<(), Errno> {
        let addresses = self.addresses.clone();
        self.enter_at(recipient, (&addresses, false), ready)
    }

    /// Takes a name on these addresses, once more if the member has it there. All addresses may be
    /// those of IPv6 only.
    ///
    /// # Errors
    /// `EADDRINUSE`: another device has the name. Those of opening a socket.
    pub(super) fn enter_at(
        &mut self,
        recipient: Recipient,
        (addresses, ipv6_only): (&[IpAddr], bool),
        ready: &mut Ready,
    ) -> Result<(), Errno> {
        if let Some(own) = self.own.iter_mut().find(|own| own.is(recipient, addresses)) {
            own.users += 1;
            return Ok(());
        }
        let (of, port) = recipient.name();
        let mut listeners = Vec::new();
        for ip in addresses {
            let listener = self.names.listen(of, SocketAddr::new(*ip, port))?;
            let fd = listener.descriptor().ok_or(Errno::BADF)?;
            listeners.push((ready.add(fd, Source::Listener)?, listener));
        }
        self.own.push(Own {
            recipient,
            addresses: addresses.into(),
            ipv6_only,
            users: 1,
            listeners,
        });
        Ok(())
    }

    /// Gives a name on all addresses back.
    pub(super) fn leave(&mut self, recipient: Recipient) {
        let addresses = self.addresses.clone();
        self.leave_at(recipient, &addresses);
    }

    /// Gives a name on these addresses back.
    pub(super) fn leave_at(&mut self, recipient: Recipient, addresses: &[IpAddr]) {
        self.own.retain_mut(|own| {
            own.users -= usize::from(own.is(recipient, addresses));
            own.users > 0
        });
    }

    /// Whether a name is this member's own for packets to an address.
    pub(super) fn has(&self, recipient: Recipient, destination: IpAddr) -> bool {
        let mut own = self.own.iter().filter(|own| own.recipient == recipient);
        own.any(|own| own.includes(destination))
    }

    /// Whether another member has been seen.
    #[cfg(test)]
    pub(super) fn has_others(&self) -> bool {
        !(self.incoming.is_empty() && self.outgoing.is_empty())
    }

    /// Takes connections of a listener; returns whether there were some, also of other users.
    pub(super) fn accept(&mut self, id: u32, ready: &mut Ready) -> bool {
        let mut listeners = self.own.iter().flat_map(|own| &own.listeners);
        let Some((_, listener)) = listeners.find(|(own, _)| *own == id) else {
            return false;
        };
        let mut looks = ACCEPTS;
        while let Some(socket) = listener.accept(&mut looks) {
            if self.incoming.len() >= CONNECTIONS {
                continue;
            }
            let fd = socket.descriptor();
            if let Ok(Ok(id)) = fd.map(|fd| ready.add(rustix::fd::AsFd::as_fd(fd), Source::Member)) {
                self.incoming.insert(id, socket);
            }
        }
        // The last look found none.
        looks + 1 < ACCEPTS
    }

    /// Whether there is a connection from another member with this number.
    pub(super) fn is_connected(&self, id: u32) -> bool {
        self.incoming.contains_key(&id)
    }

    /// Takes a message from another member. A connection that has something else is closed.
    pub(super) fn receive<'b>(&mut self, id: u32, buffer: &'b mut [u8]) -> Message<'b> {
        let Some(socket) = self.incoming.get(&id).and_then(|socket| socket.descriptor().ok()) else {
            return Message::End;
        };
        let room = buffer.get_mut(..MESSAGE_ROOM).unwrap_or_default();
        // Descriptors in a message, which no member sends, are dropped by the kernel.
        match recv(socket, &mut *room, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
            Err(Errno::AGAIN | Errno::INTR) => Message::Nothing,
            Ok((_, len)) => match room.get(..len).and_then(forwarded::parse) {
                Some((packet, bytes)) => Message::Packet(packet, bytes),
                None => self.end(id),
            },
            Err(_) => self.end(id),
        }
    }

    fn end(&mut self, id: u32) -> Message<'static> {
        self.incoming.remove(&id);
        Message::End
    }

    /// Permits searches for the packets of one more call.
    pub(super) fn begin(&mut self) {
        self.searches = SEARCHES;
    }

    /// Passes a packet to the member that it is for.
    pub(super) fn pass(&mut self, to: Recipient, packet: &Incoming, bytes: &[u8]) -> Passed {
        let header = forwarded::header(packet);
        let message = [IoSlice::new(&header), IoSlice::new(bytes)];
        // A member that has ended may have a successor.
        for _ in 0..2 {
            let (key, socket) = match self.connection(packet.destination, to) {
                Ok(found) => found,
                Err(none) => return none,
            };
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(socket, &message, &mut SendAncillaryBuffer::default(), flags) {
                Ok(_) => return Passed::On,
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return Passed::Full,
                Err(_) => self.outgoing.remove(&key),
            };
        }
        Passed::Nobody
    }

    /// The connection to the member that has an address, a new one if there is none, and its key.
    fn connection(
        &mut self,
        ip: IpAddr,
        to: Recipient,
    ) -> Result<((Option<IpAddr>, Recipient), &Descriptor), Passed> {
        let known = [Some(ip), None].map(|at| (at, to));
        let key = match known.into_iter().find(|key| self.outgoing.contains_key(key)) {
            Some(key) => key,
            None => {
                let (found, is_everywhere) = self.search(ip, to)?;
                if self.outgoing.len() >= CONNECTIONS
                    && let Some(some) = self.outgoing.keys().next().copied()
                {
                    self.outgoing.remove(&some);
                }
                let key = (Some(ip).filter(|_| !is_everywhere), to);
                self.outgoing.insert(key, found);
                key
            }
        };
        let socket = self
            .outgoing
            .get(&key)
            .and_then(|socket| socket.descriptor().ok());
        Ok((key, socket.ok_or(Passed::Unknown)?))
    }

    fn search(&mut self, ip: IpAddr, to: Recipient) -> Result<(LocalSocket, bool), Passed> {
        let is_absent = |since: &Instant| since.elapsed() < ABSENT;
        if self.absent.get(&(ip, to)).is_some_and(is_absent) {
            return Err(Passed::Nobody);
        }
        self.searches = self.searches.checked_sub(1).ok_or(Passed::Unknown)?;
        let (of, port) = to.name();
        match self.names.find(of, SocketAddr::new(ip, port)) {
            Ok((socket, is_everywhere)) => {
                // The system may allow less.
                if let Ok(socket) = socket.descriptor() {
                    let _ = set_socket_send_buffer_size(socket, SEND_ROOM);
                }
                self.absent.remove(&(ip, to));
                Ok((socket, is_everywhere))
            }
            Err(Errno::CONNREFUSED) => {
                if self.absent.len() >= MOST_ABSENT {
                    self.absent.clear();
                }
                self.absent.insert((ip, to), Instant::now());
                Err(Passed::Nobody)
            }
            Err(errno) => {
                tracing::debug!(%errno, "a member of the port could not be searched");
                Err(Passed::Unknown)
            }
        }
    }
}
