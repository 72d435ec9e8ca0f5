//! The kernel's SCTP: a socket for each association, and one that listens, or that is bound to the
//! port for the next association. Thus each association has its own buffers in the kernel, whose
//! limits are those of the socket, and one whose messages are not taken does not delay another.

use super::super::descriptor::{Descriptor, Descriptors};
use super::super::{ANYWHERE, LONGEST_MESSAGE, family, plain, socket};
use super::endpoint::Endpoint;
use super::path::own_address_towards;
use crate::sys::sctp::{self, Arrived, Destination, Notification};
use crate::tuning::RETRY_TICK;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};
use std::collections::{HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use urnic_sctp::endpoint::{AssociationId, Event, Peer, Reason, Received, Settings};
use urnic_wire::sctp::adaptation;
use urnic_wire::sctp::chunk::{Contents, MAX_IN_FLIGHT, SSN_LEN};

/// Events, or associations to accept, that are taken at once.
const BATCH: usize = 32;
/// The number of the socket that listens, among those of the associations.
const LISTENER: u64 = u64::MAX;
/// Associations that wait to be accepted.
const BACKLOG: i32 = 128;
/// Bytes of a socket's buffers, which the kernel limits to `net.core.rmem_max` and `wmem_max`.
const BUFFER: usize = 1 << 20;
/// Bytes of a SACK chunk without gaps, for which RFC 5043 §9 recommends room after a message.
const SACK_LEN: usize = 16;
/// Sends between two looks at what is acknowledged, if nobody asks.
const LOOK: usize = 256;
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// What the sockets of a port have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    pub(super) traffic_class: u8,
    /// Packets go to the UDP port that has the number of the peer's SCTP port.
    pub(super) in_udp: bool,
    /// `Some`: it listens, on IPv6 only or not.
    pub(super) listens: Option<bool>,
}

/// The associations of an SCTP port of the kernel.
#[derive(Debug)]
pub(super) struct KernelEndpoint {
    descriptors: Arc<Descriptors>,
    /// Has all sockets.
    epoll: Descriptor,
    options: Options,
    settings: Settings,
    /// The address to which the sockets are bound.
    local: SocketAddr,
    /// The socket that listens, or the one for the next association.
    bound: Option<Descriptor>,
    /// Whether it listens now.
    is_listening: bool,
    /// Associations may wait to be accepted.
    may_accept: bool,
    /// When to ask again after a failure, for lack of descriptors.
    accept_again: Option<Duration>,
    associations: HashMap<AssociationId, Association>,
    next: u64,
    events: VecDeque<Event>,
    /// Room for a message, and for one byte more than it may have.
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct Association {
    socket: Descriptor,
    peer: SocketAddr,
    local: IpAddr,
    /// What both ends agreed on, once it is established.
    agreed: Option<sctp::Agreed>,
    is_closing: bool,
    in_flight: InFlight,
    /// The message for which the socket had no room.
    held: Option<(Destination, Vec<u8>)>,
    /// The epoll reports acknowledgements.
    watches_room: bool,
}

/// The messages that the peer may not have acknowledged, oldest first. The kernel reports the
/// memory of those that it keeps, and keeps them in the order in which they were sent: so the
/// oldest one is acknowledged if all of them would take more memory than that.
#[derive(Debug, Default)]
struct InFlight {
    messages: VecDeque<(u16, usize)>,
    /// The least memory of all of them.
    memory: usize,
    by_stream: HashMap<u16, usize>,
}

impl InFlight {
    /// The least memory of a message in the kernel besides its bytes: that of a `struct sk_buff`.
    const OVERHEAD: usize = 200;

    fn put(&mut self, stream: u16, len: usize) {
        let memory = len + InFlight::OVERHEAD;
        self.messages.push_back((stream, memory));
        self.memory += memory;
        *self.by_stream.entry(stream).or_default() += 1;
    }

    /// The kernel has messages with so much memory, and all that were put.
    fn are_left(&mut self, memory: usize) {
        while self.memory > memory
            && let Some((stream, least)) = self.messages.pop_front()
        {
            self.memory -= least;
            if let Some(count) = self.by_stream.get_mut(&stream) {
                *count -= 1;
                if *count == 0 {
                    self.by_stream.remove(&stream);
                }
            }
        }
    }

    fn of_stream(&self, stream: u16) -> usize {
        self.by_stream.get(&stream).copied().unwrap_or(0)
    }
}

/// Why an association ended whose socket reports this error.
fn reason(errno: Errno) -> Reason {
    match errno {
        Errno::CONNREFUSED | Errno::NOPROTOOPT | Errno::PROTONOSUPPORT => Reason::Refused,
        Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH => Reason::Silent,
        // It had ended in order before.
        Errno::NOTCONN | Errno::PIPE => Reason::Closed,
        _ => Reason::Aborted,
    }
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// A socket with the options of those that carry DDP, bound to an address.
fn new_socket(settings: &Settings, options: Options, local: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = family(&local);
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, Some(net::ipproto::SCTP))?;
    let times = settings.times;
    let times = sctp::Times {
        // With a longer one a silent peer is noticed later: every timeout counts, of a message or
        // of a heartbeat.
        rto: [times.rto_initial, times.rto_min, times.heartbeat].map(milliseconds),
        requests: u16::try_from(times.requests).unwrap_or(u16::MAX),
        heartbeat: milliseconds(times.heartbeat),
        unanswered: u16::try_from(times.unanswered).unwrap_or(u16::MAX),
    };
    sctp::prepare(socket.as_fd(), settings.streams, adaptation::DDP, &times)?;
    sockopt::set_socket_recv_buffer_size(&socket, BUFFER)?;
    sockopt::set_socket_send_buffer_size(&socket, BUFFER)?;
    // The associations of a port are bound to it, too, and go on without its listener.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_v6only(&socket, options.listens.unwrap_or(true))?;
    }
    socket::mark(socket.as_fd(), family, options.traffic_class)?;
    net::bind(&socket, &local)?;
    Ok(socket)
}

impl KernelEndpoint {
    /// Binds a port; with port 0 the kernel chooses.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT`: the kernel has no SCTP; those of bind(2) and listen(2).
    pub(super) fn bind(
        local: SocketAddr,
        options: Options,
        descriptors: &Arc<Descriptors>,
    ) -> Result<KernelEndpoint, Errno> {
        let settings = Settings::of_port(local.port());
        let everywhere_v4 = SocketAddr::new([0, 0, 0, 0].into(), local.port());
        let socket = match new_socket(&settings, options, local) {
            // A host without IPv6.
            Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL)
                if local.ip() == ANYWHERE.ip() && options.listens == Some(false) =>
            {
                new_socket(&settings, options, everywhere_v4)
            }
            made => made,
        };
        let socket = descriptors.adopt(socket?)?;
        let epoll = descriptors.adopt(epoll::create(CreateFlags::CLOEXEC)?)?;
        if options.listens.is_some() {
            net::listen(&socket, BACKLOG)?;
            let watched = EventFlags::IN | EventFlags::ET;
            epoll::add(&epoll, &socket, EventData::new_u64(LISTENER), watched)?;
        }
        Ok(KernelEndpoint {
            descriptors: descriptors.clone(),
            epoll,
            options,
            settings,
            local: plain(net::getsockname(&socket).ok()),
            bound: Some(socket),
            is_listening: options.listens.is_some(),
            may_accept: false,
            accept_again: None,
            associations: HashMap::new(),
            next: 0,
            events: VecDeque::new(),
            buffer: vec![0; SSN_LEN + LONGEST_MESSAGE + 1],
        })
    }

    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Accepts associations, and sees to it that those that could not be accepted are tried again.
    fn ask_listener(&mut self, now: Duration) {
        let failed = self.accept();
        self.accept_again = failed.then(|| now + RETRY_TICK);
    }

    /// Accepts associations; returns whether that failed, and others may wait.
    fn accept(&mut self) -> bool {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        for _ in 0..BATCH {
            let Some(listener) = &self.bound else {
                return false;
            };
            let (accepted, peer) = match net::acceptfrom_with(listener, flags) {
                Ok((accepted, peer)) => (accepted, plain(peer)),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                // Nothing waits, or the listener was closed meanwhile.
                Err(Errno::AGAIN | Errno::INVAL) => {
                    self.may_accept = false;
                    return false;
                }
                Err(errno) => {
                    tracing::debug!(%errno, "an SCTP association is not accepted");
                    return true;
                }
            };
            let added = self.add(accepted, peer, EventFlags::IN);
            let outcome = added.and_then(|id| self.establish(id).map(|()| id).map_err(|_| Errno::PROTO));
            match outcome {
                Ok(id) => {
                    let peer = self.with_scope(id, peer);
                    let port = peer.port();
                    let peer = Peer { address: peer, port };
                    self.events.push_back(Event::Accepted(id, peer));
                    self.events.push_back(Event::Readable(id));
                }
                Err(errno) => tracing::debug!(%errno, "an SCTP association of {peer} is not accepted"),
            }
        }
        false
    }

    /// The address of an accepted peer, with the scope if it is a link-local one.
    fn with_scope(&mut self, id: AssociationId, mut peer: SocketAddr) -> SocketAddr {
        if let Some(association) = self.associations.get_mut(&id)
            && let Some(agreed) = association.agreed
            && let SocketAddr::V6(v6) = &mut peer
            && v6.ip().is_unicast_link_local()
        {
            v6.set_scope_id(agreed.scope);
            association.peer = peer;
            if self.local.ip().is_unspecified()
                && let Ok(local) = own_address_towards(peer)
            {
                association.local = local.ip();
            }
        }
        peer
    }

    fn add(
        &mut self,
        socket: OwnedFd,
        peer: SocketAddr,
        watched: EventFlags,
    ) -> Result<AssociationId, Errno> {
        let is_full = self.associations.len() >= self.settings.associations;
        let adopted = if is_full {
            Err(Errno::NOSR)
        } else {
            self.descriptors.room()
        };
        let room = match adopted {
            Ok(room) => room,
            Err(errno) => {
                // An ABORT, not the end in order.
                let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
                return Err(errno);
            }
        };
        self.watch(room.adopt(socket), peer, watched)
    }

    fn watch(
        &mut self,
        socket: Descriptor,
        peer: SocketAddr,
        watched: EventFlags,
    ) -> Result<AssociationId, Errno> {
        let id = AssociationId(self.next);
        self.next += 1;
        let data = EventData::new_u64(id.0);
        epoll::add(&self.epoll, &socket, data, watched | EventFlags::ET)?;
        let local = match self.local.ip() {
            any if any.is_unspecified() => own_address_towards(peer).map_or(any, |local| local.ip()),
            bound => bound,
        };
        let association = Association {
            socket,
            peer,
            local,
            agreed: None,
            is_closing: false,
            in_flight: InFlight::default(),
            held: None,
            watches_room: false,
        };
        self.associations.insert(id, association);
        Ok(id)
    }

    /// The kernel has established an association: the peer must have said that it supports DDP (RFC
    /// 5043 §11.1), which the kernel reports before all else. If it has not, the association is
    /// aborted.
    fn establish(&mut self, id: AssociationId) -> Result<(), Reason> {
        let Some(association) = self.associations.get_mut(&id) else {
            return Err(Reason::Aborted);
        };
        let socket = association.socket.as_fd();
        let outcome = loop {
            match sctp::receive(socket, &mut self.buffer) {
                Ok(Arrived::Notification(Notification::Adaptation(adaptation::DDP))) => break Ok(()),
                Ok(Arrived::Notification(Notification::Other)) | Err(Errno::INTR) => {}
                Ok(_) | Err(Errno::AGAIN) => break Err(Reason::NoDdp),
                Err(errno) => break Err(reason(errno)),
            }
        };
        let agreed = outcome.and_then(|()| sctp::agreed(socket).map_err(reason));
        match agreed {
            Ok(agreed) => association.agreed = Some(agreed),
            Err(_) => self.reset(id),
        }
        agreed.map(|_| ())
    }

    /// Something has happened to an association's socket.
    fn progress(&mut self, id: AssociationId) {
        let Some(association) = self.associations.get_mut(&id) else {
            return;
        };
        if association.agreed.is_none() {
            let outcome = match net::getpeername(&association.socket) {
                Ok(_) => self.establish(id),
                Err(_) => match sockopt::socket_error(&association.socket) {
                    Ok(Ok(())) => return,
                    Ok(Err(errno)) | Err(errno) => {
                        self.associations.remove(&id);
                        Err(reason(errno))
                    }
                },
            };
            match outcome {
                Ok(()) => self.events.push_back(Event::Connected(id)),
                Err(reason) => return self.events.push_back(Event::Ended(id, reason)),
            }
        }
        if let Some(association) = self.associations.get_mut(&id) {
            association.send_held();
            association.look();
            let waits = association.held.is_some() || !association.in_flight.messages.is_empty();
            association.watch_room(&self.epoll, id, association.watches_room && waits);
        }
        self.events.push_back(Event::Readable(id));
    }

    /// Ends an association by an ABORT.
    fn reset(&mut self, id: AssociationId) {
        if let Some(association) = self.associations.remove(&id) {
            socket::reset(association.socket);
        }
    }

    fn ended(&mut self, id: AssociationId, reason: Reason) {
        match reason {
            Reason::Violation | Reason::NoDdp => self.reset(id),
            _ => drop(self.associations.remove(&id)),
        }
        self.events.push_back(Event::Ended(id, reason));
    }
}

impl Association {
    /// Sends a message. If there is no room, it waits.
    fn send(&mut self, to: Destination, message: Vec<u8>) -> Result<(), Errno> {
        let mut sent = sctp::send(self.socket.as_fd(), to, &message);
        if sent == Err(Errno::MSGSIZE) {
            // The path has become narrower since the message was made: its packets would be
            // fragmented by IP, so SCTP may do it (RFC 5043 §9).
            sctp::permit_fragments(self.socket.as_fd())?;
            sent = sctp::send(self.socket.as_fd(), to, &message);
        }
        match sent {
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                self.held = Some((to, message));
                Ok(())
            }
            Err(Errno::PIPE | Errno::SHUTDOWN | Errno::NOTCONN) => Err(Errno::CONNRESET),
            sent => sent,
        }
    }

    fn send_held(&mut self) {
        if let Some((to, message)) = self.held.take() {
            // An association that has ended reports that when it is read.
            let _ = self.send(to, message);
        }
        if self.is_closing && self.held.is_none() {
            let _ = net::shutdown(&self.socket, Shutdown::Write);
        }
    }

    /// Finds what the peer has acknowledged.
    fn look(&mut self) {
        if self.held.is_some() || self.in_flight.messages.is_empty() {
            return;
        }
        if let Ok(memory) = sctp::unacknowledged_memory(self.socket.as_fd()) {
            self.in_flight.are_left(memory);
        }
    }

    /// Lets the epoll report each acknowledgement, or not.
    fn watch_room(&mut self, epoll: &Descriptor, id: AssociationId, wanted: bool) {
        if self.watches_room == wanted {
            return;
        }
        self.watches_room = wanted;
        let mut watched = EventFlags::IN | EventFlags::ET;
        watched.set(EventFlags::OUT, wanted);
        let watching = epoll::modify(epoll, &self.socket, EventData::new_u64(id.0), watched);
        if let Err(errno) = watching {
            tracing::debug!(%errno, "an SCTP association cannot be watched");
        }
    }
}

impl Endpoint for KernelEndpoint {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    fn timeout(&self) -> Option<Duration> {
        self.accept_again
    }

    fn advance(&mut self, now: Duration) {
        self.ask_listener(now);
    }

    fn receive(&mut self, now: Duration) -> bool {
        let mut ready = [MaybeUninit::<epoll::Event>::uninit(); BATCH];
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut ready, Some(&NOW)) else {
            return false;
        };
        let numbers: Vec<u64> = ready.iter().map(|event| event.data.u64()).collect();
        let is_full = numbers.len() == BATCH;
        for number in numbers {
            match number {
                LISTENER => self.may_accept = true,
                number => self.progress(AssociationId(number)),
            }
        }
        let is_ready = self.may_accept && self.accept_again.is_none();
        if is_ready {
            self.ask_listener(now);
        }
        is_full || self.may_accept && self.accept_again.is_none()
    }

    fn flush(&mut self) {}

    fn close(&mut self) {
        self.bound = None;
    }

    fn set_listening(&mut self, listens: bool) {
        if self.options.listens.is_none() || self.is_listening == listens {
            return;
        }
        self.is_listening = listens;
        // listen(2) of SCTP with a backlog of 0 ends listening (RFC 6458 §4.1.3).
        let backlog = if listens { BACKLOG } else { 0 };
        let listening = self.bound.as_ref().map(|bound| net::listen(bound, backlog));
        if let Some(Err(errno)) = listening {
            tracing::warn!(%errno, "SCTP port {} does not listen", self.local.port());
        }
    }

    fn connect(&mut self, peer: Peer, _: Duration) -> Result<AssociationId, Errno> {
        let mut known = self.associations.iter();
        if let Some((id, _)) = known.find(|(_, association)| association.peer == peer.address) {
            return Ok(*id);
        }
        if self.associations.len() >= self.settings.associations {
            return Err(Errno::NOSR);
        }
        let socket = match self.bound.take() {
            Some(bound) => bound,
            None => {
                let socket = new_socket(&self.settings, self.options, self.local)?;
                self.descriptors.adopt(socket)?
            }
        };
        if self.options.in_udp {
            sctp::encapsulate(socket.as_fd(), peer.port)?;
        }
        match net::connect(&socket, &peer.address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno),
        }
        let id = self.watch(socket, peer.address, EventFlags::IN | EventFlags::OUT)?;
        if let Some(association) = self.associations.get_mut(&id) {
            association.watches_room = true;
        }
        Ok(id)
    }

    fn shutdown(&mut self, id: AssociationId, _: Duration) {
        if let Some(association) = self.associations.get_mut(&id) {
            association.is_closing = true;
            association.send_held();
        }
    }

    fn abort(&mut self, id: AssociationId, _: Duration) {
        self.reset(id);
    }

    fn forget(&mut self, id: AssociationId) {
        self.associations.remove(&id);
    }

    fn is_closing(&self, id: AssociationId) -> bool {
        self.associations.get(&id).is_some_and(|a| a.is_closing)
    }

    fn local_ip(&self, id: AssociationId) -> IpAddr {
        let association = self.associations.get(&id);
        association.map_or(self.local.ip(), |association| association.local)
    }

    fn streams(&self, id: AssociationId) -> Option<u16> {
        let agreed = self.associations.get(&id)?.agreed?;
        Some(agreed.streams.min(self.settings.streams))
    }

    fn longest(&self, id: AssociationId) -> usize {
        let agreed = self.associations.get(&id).and_then(|a| a.agreed);
        let whole = agreed.map_or(0, |agreed| agreed.longest as usize);
        whole.saturating_sub(SACK_LEN).min(SSN_LEN + LONGEST_MESSAGE)
    }

    fn has_room(&self, id: AssociationId, stream: u16) -> bool {
        self.associations.get(&id).is_some_and(|association| {
            let is_open = association.agreed.is_some() && !association.is_closing;
            let in_flight = association.in_flight.of_stream(stream);
            is_open && association.held.is_none() && in_flight < usize::from(MAX_IN_FLIGHT)
        })
    }

    fn send(
        &mut self,
        id: AssociationId,
        (stream, contents): (u16, Contents),
        data: Vec<u8>,
        _: Duration,
    ) -> Result<(), Errno> {
        let association = self.associations.get_mut(&id).ok_or(Errno::CONNRESET)?;
        association.in_flight.put(stream, data.len());
        let to = Destination {
            stream,
            ppid: contents.ppid(),
            // The session waits for the acknowledgement.
            at_once: contents == Contents::SessionControl,
        };
        association.send(to, data)?;
        if association.held.is_some() {
            association.watch_room(&self.epoll, id, true);
        } else if association.in_flight.messages.len().is_multiple_of(LOOK) {
            association.look();
        }
        Ok(())
    }

    fn take(&mut self, id: AssociationId, _: Duration) -> Option<Received> {
        let association = self.associations.get(&id)?;
        let streams = self.streams(id)?;
        let ended = loop {
            match sctp::receive(association.socket.as_fd(), &mut self.buffer) {
                Ok(Arrived::Message {
                    len,
                    stream,
                    ppid,
                    unordered,
                }) => {
                    let is_legal = unordered && stream < streams;
                    let Some(contents) = Contents::of(ppid).filter(|_| is_legal) else {
                        break Reason::Violation;
                    };
                    let data = self.buffer.get(..len).unwrap_or_default().to_vec();
                    return Some(Received {
                        stream,
                        contents,
                        data,
                    });
                }
                Ok(Arrived::Unusable) => break Reason::Violation,
                Ok(Arrived::Notification(Notification::Restarted)) => break Reason::Aborted,
                Ok(Arrived::Notification(Notification::Ended)) => break Reason::Closed,
                Ok(Arrived::Notification(_)) | Err(Errno::INTR) => {}
                Ok(Arrived::End) => break Reason::Closed,
                Err(Errno::AGAIN) => return None,
                Err(errno) => break reason(errno),
            }
        };
        self.ended(id, ended);
        None
    }

    fn is_confirmed(&mut self, id: AssociationId) -> bool {
        let Some(association) = self.associations.get_mut(&id) else {
            return true;
        };
        association.look();
        association.in_flight.messages.is_empty()
    }

    fn unacknowledged_of(&mut self, id: AssociationId, stream: u16) -> usize {
        let Some(association) = self.associations.get_mut(&id) else {
            return 0;
        };
        if association.in_flight.of_stream(stream) > 0 {
            association.look();
        }
        let count = association.in_flight.of_stream(stream);
        if count > 0 {
            association.watch_room(&self.epoll, id, true);
        }
        count
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_message_is_acknowledged_if_all_would_take_more_memory() {
        let mut in_flight = InFlight::default();
        for stream in [1, 2, 1] {
            in_flight.put(stream, 1000);
        }
        // More than the messages take at least: nothing is known.
        in_flight.are_left(5000);
        assert_eq!([1, 2].map(|stream| in_flight.of_stream(stream)), [2, 1]);
        in_flight.are_left(3599);
        assert_eq!([1, 2].map(|stream| in_flight.of_stream(stream)), [1, 1]);
        in_flight.are_left(1200);
        assert_eq!([1, 2].map(|stream| in_flight.of_stream(stream)), [1, 0]);
        in_flight.are_left(0);
        assert_eq!(in_flight.of_stream(1), 0);
        assert!(in_flight.messages.is_empty() && in_flight.memory == 0);
    }

    #[test]
    fn the_error_of_a_socket_is_the_end_of_its_association() {
        for (errno, expected) in [
            (Errno::CONNREFUSED, Reason::Refused),
            (Errno::TIMEDOUT, Reason::Silent),
            (Errno::CONNRESET, Reason::Aborted),
            (Errno::NOTCONN, Reason::Closed),
        ] {
            assert_eq!(reason(errno), expected, "{errno}");
        }
    }
}
