//! The associations of one UDP port.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use dcsctp::api::{
    DcSctpSocket, Message as Sent, Options, PpId, SendOptions, Socket, SocketEvent, SocketState, SocketTime,
    StreamId,
};
use urnic_wire::sctp::adaptation::Adaptation;
use urnic_wire::sctp::chunk::{Contents, MIN_MULPDU};
use urnic_wire::sctp::packet::{Data, Packet, STATE_COOKIE, chunk_type, parameters};

use crate::completion::{self, Key};

/// Bytes of an SCTP packet with one DATA chunk, without the user data.
const DATA_OVERHEAD: usize = 12 + 16;
/// The shortest maximum of packets: one with the shortest maximum of messages.
const LEAST_PACKET: usize = DATA_OVERHEAD + MIN_MULPDU as usize;

/// The settings of an endpoint.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Its SCTP port.
    pub port: u16,
    /// The longest SCTP packet, so that its UDP datagram is not fragmented; 544 if it is less.
    pub packet_len: usize,
    /// Streams of an association, in each direction (RFC 5043 §8).
    pub streams: u16,
    /// Bytes that a peer may have in the receive buffer of an association.
    pub window: usize,
    /// Messages that a peer may have there: short ones take more memory than their bytes.
    pub unread: usize,
    /// Bytes of an association that may wait to be sent.
    pub unsent: usize,
    /// Most associations.
    pub associations: usize,
    /// Whether peers may begin associations.
    pub listens: bool,
}

impl Settings {
    /// An endpoint that listens at this SCTP port: packets for a network of 1500 bytes, a mebibyte
    /// of each kind for an association.
    pub fn of_port(port: u16) -> Settings {
        Settings {
            port,
            // IPv6 and UDP take 48 bytes.
            packet_len: 1452,
            streams: 1024,
            window: 1 << 20,
            unread: 4096,
            unsent: 1 << 20,
            associations: 1024,
            listens: true,
        }
    }
}

/// An association of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssociationId(u64);

/// The other end of an association.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The UDP address.
    pub address: SocketAddr,
    /// The SCTP port.
    pub port: u16,
}

/// What happened to an association.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A peer began it.
    Accepted(AssociationId, Peer),
    /// One that was begun here is established.
    Connected(AssociationId),
    /// Messages can be [taken](Endpoint::take).
    Readable(AssociationId),
    /// Room for messages to be sent was made.
    Writable(AssociationId),
    /// It has ended, for this reason.
    Ended(AssociationId, Reason),
}

/// Why an association ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The peer ended it in order.
    #[error("the peer closed the SCTP association")]
    Closed,
    /// The peer aborted it, or does not answer.
    #[error("the SCTP association was aborted, or the peer does not answer")]
    Aborted,
    /// The peer did not say that it supports DDP (RFC 5043 §11.1).
    #[error("the peer has no DDP over SCTP")]
    NoDdp,
    /// The peer did what an association for DDP does not permit.
    #[error("the peer sent what a DDP association does not carry")]
    Violation,
}

/// Why a message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// There is no such association.
    #[error("the SCTP association has ended")]
    Ended,
    /// Too much waits to be sent; [`Event::Writable`] follows.
    #[error("no room in the SCTP association")]
    Full,
    /// The message is longer than [`Endpoint::longest`], or the stream does not exist.
    #[error("the message does not fit the SCTP association")]
    Invalid,
}

/// A message that a peer sent, with its DDP-SSN in front.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// The number of the stream.
    pub stream: u16,
    /// A segment, or a message that begins or ends a session.
    pub contents: Contents,
    /// Its bytes.
    pub data: Vec<u8>,
}

struct Association {
    peer: Peer,
    socket: Socket,
    /// When it began: the library counts from there.
    begun: Duration,
    /// A peer began it.
    accepted: bool,
    established: bool,
    /// Streams in each direction; fewer than those of the settings if the peer has fewer.
    streams: u16,
    /// The last message did not fit.
    full: bool,
}

/// The associations of one UDP port.
pub struct Endpoint {
    settings: Settings,
    key: Key,
    /// Seeds of the library's generator that were taken from the key.
    drawn: u64,
    associations: HashMap<AssociationId, Association>,
    by_peer: HashMap<Peer, AssociationId>,
    next: u64,
    packets: VecDeque<(SocketAddr, Vec<u8>)>,
    events: VecDeque<Event>,
}

impl Association {
    /// Lets the library do what is due at `now`.
    fn at(&mut self, now: Duration) {
        let since = now.saturating_sub(self.begun);
        self.socket.advance_time(SocketTime::zero() + since);
    }

    /// When something is due next.
    fn timeout(&self) -> Option<Duration> {
        let at = self.socket.poll_timeout();
        (at != SocketTime::infinite_future()).then(|| at - SocketTime::zero() + self.begun)
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("settings", &self.settings)
            .field("associations", &self.associations.len())
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// An endpoint without associations. The random bytes authenticate its cookies, and the tags of
    /// its associations come from them: nobody else may know them.
    pub fn new(settings: Settings, random: [u8; 16]) -> Endpoint {
        Endpoint {
            settings,
            key: Key::new(random),
            drawn: 0,
            associations: HashMap::new(),
            by_peer: HashMap::new(),
            next: 0,
            packets: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// The longest message, with its DDP-SSN: the most that fits one packet (RFC 5043 §9).
    pub fn longest(&self) -> usize {
        self.packet_len() - DATA_OVERHEAD
    }

    /// The longest packet, whose length is a multiple of four.
    fn packet_len(&self) -> usize {
        self.settings.packet_len.max(LEAST_PACKET) / 4 * 4
    }

    /// Begins an association, or returns the one that there is with this peer. `None`: there are
    /// too many.
    pub fn connect(&mut self, peer: Peer, now: Duration) -> Option<AssociationId> {
        if let Some(known) = self.by_peer.get(&peer) {
            return Some(*known);
        }
        let mut socket = self.socket(peer);
        socket.connect();
        let id = self.insert(peer, socket, now)?;
        self.drain(id, now);
        Some(id)
    }

    /// Takes a packet that came from `from`.
    pub fn receive(&mut self, from: SocketAddr, bytes: &[u8], now: Duration) {
        let packet = match Packet::parse(bytes) {
            Ok(packet) if packet.destination == self.settings.port => packet,
            Ok(_) => return,
            Err(error) => return tracing::debug!("from {from}: {error}"),
        };
        let peer = Peer {
            address: from,
            port: packet.source,
        };
        if !is_well_formed(&packet) {
            return;
        }
        let known = self.by_peer.get(&peer).copied();
        match (packet.chunk_type, known) {
            (chunk_type::INIT, _) => self.requested(peer, known, bytes, &packet, now),
            (chunk_type::COOKIE_ECHO, _) => {
                if let Some(opened) = completion::opened(bytes, &self.key, from, now) {
                    self.echoed(peer, known, &opened, now);
                }
            }
            (_, Some(id)) => self.arrived(id, bytes, &packet, now),
            // A packet of a peer without an association is not answered: it may be forged.
            (_, None) => {}
        }
    }

    /// A packet from the address of a peer with an association.
    fn arrived(&mut self, id: AssociationId, bytes: &[u8], packet: &Packet<'_>, now: Duration) {
        let Some(association) = self.associations.get(&id) else {
            return;
        };
        let has_tag = packet.tag == association.socket.verification_tag();
        // Before an association is established, the library takes a packet with a SHUTDOWN ACK
        // whatever its tag is. Later it checks each, also those that repeat the peer's tag.
        if !association.established && !has_tag {
            return;
        }
        if packet.chunk_type == chunk_type::INIT_ACK && !self.is_acceptable(packet) {
            let (tag, _) = packet.init().unwrap_or_default();
            let abort = completion::abort(packet, tag);
            self.packets.push_back((association.peer.address, abort));
            if !association.established {
                self.end(id, Reason::NoDdp);
            }
            return;
        }
        let streams = association.streams;
        let mut data = packet.chunks().flatten().filter_map(|chunk| chunk.data());
        let is_permitted =
            |data: Data| data.unordered && data.stream < streams && Contents::of(data.ppid).is_some();
        if has_tag && !data.all(is_permitted) {
            self.abort(id, now);
            self.events.push_back(Event::Ended(id, Reason::Violation));
            return;
        }
        self.feed(id, bytes, now);
    }

    /// Whether an INIT ACK is for DDP, and its cookie can be sent back.
    fn is_acceptable(&self, packet: &Packet<'_>) -> bool {
        packet.init().is_some_and(|(_, all)| {
            let mut cookies = parameters(all).filter(|(kind, _)| *kind == STATE_COOKIE);
            let fits = |(_, cookie): (u16, &[u8])| cookie.len() <= self.longest();
            cookies.next().is_some_and(fits) && Adaptation::of_parameters(all) == Adaptation::Ddp
        })
    }

    /// An INIT, which must say that it is for DDP.
    fn requested(
        &mut self,
        peer: Peer,
        known: Option<AssociationId>,
        bytes: &[u8],
        packet: &Packet<'_>,
        now: Duration,
    ) {
        let Some((tag, parameters)) = packet.init() else {
            return;
        };
        if known.is_none() && !self.settings.listens {
            return;
        }
        if Adaptation::of_parameters(parameters) != Adaptation::Ddp {
            let abort = completion::abort(packet, tag);
            return self.packets.push_back((peer.address, abort));
        }
        if let Some(id) = known {
            self.seed();
            return self.feed(id, bytes, now);
        }
        // The answer has all that is known of the peer: nothing is kept.
        let mut socket = self.socket(peer);
        socket.handle_input(bytes);
        self.send_packets(&mut socket, peer, now);
    }

    /// A peer has sent a cookie back, so it receives at its address.
    fn echoed(&mut self, peer: Peer, known: Option<AssociationId>, opened: &[u8], now: Duration) {
        if let Some(id) = known {
            return self.feed(id, opened, now);
        }
        let mut socket = self.socket(peer);
        socket.handle_input(opened);
        if socket.state() != SocketState::Connected {
            return;
        }
        if self.associations.len() >= self.settings.associations {
            // An ABORT in place of the COOKIE ACK.
            while socket.poll_event().is_some() {}
            socket.close();
            return self.send_packets(&mut socket, peer, now);
        }
        if let Some(id) = self.insert(peer, socket, now) {
            self.drain(id, now);
        }
    }

    /// The library takes tags and the first TSN from a generator whose numbers can be predicted: it
    /// begins anew with a number that only the key determines.
    fn seed(&mut self) {
        self.drawn += 1;
        fastrand::seed(self.key.number(self.drawn));
    }

    /// An association that has not begun.
    fn socket(&mut self, peer: Peer) -> Socket {
        self.seed();
        Socket::new(
            "",
            &Options {
                local_port: self.settings.port,
                remote_port: peer.port,
                announced_maximum_incoming_streams: self.settings.streams,
                announced_maximum_outgoing_streams: self.settings.streams,
                mtu: self.packet_len(),
                max_message_size: self.longest(),
                max_receiver_window_buffer_size: self.settings.window,
                max_send_buffer_size: self.settings.unsent,
                per_stream_send_queue_limit: self.settings.unsent,
                total_buffered_amount_low_threshold: self.settings.unsent / 2,
                // A message that is given up would be a hole for ever.
                enable_partial_reliability: false,
                ..Options::default()
            },
        )
    }

    fn insert(&mut self, peer: Peer, socket: Socket, now: Duration) -> Option<AssociationId> {
        let accepted = socket.state() == SocketState::Connected;
        if self.associations.len() >= self.settings.associations {
            return None;
        }
        let id = AssociationId(self.next);
        self.next += 1;
        self.by_peer.insert(peer, id);
        self.associations.insert(
            id,
            Association {
                peer,
                socket,
                begun: now,
                accepted,
                streams: self.settings.streams,
                established: false,
                full: false,
            },
        );
        Some(id)
    }

    fn feed(&mut self, id: AssociationId, bytes: &[u8], now: Duration) {
        if let Some(association) = self.associations.get_mut(&id) {
            association.at(now);
            association.socket.handle_input(bytes);
            self.drain(id, now);
        }
    }

    /// Takes the library's events of an association.
    fn drain(&mut self, id: AssociationId, now: Duration) {
        let Some(association) = self.associations.get_mut(&id) else {
            return;
        };
        let mut ended = None;
        while let Some(event) = association.socket.poll_event() {
            match event {
                SocketEvent::SendPacket(packet) => {
                    let to = association.peer.address;
                    let packet = completion::complete(packet, &self.key, to, now);
                    self.packets.push_back((to, packet));
                }
                SocketEvent::OnClosed() => _ = ended.get_or_insert(Reason::Closed),
                SocketEvent::OnAborted(..) => _ = ended.get_or_insert(Reason::Aborted),
                // What was on its way is lost, and DDP cannot go on after a hole.
                SocketEvent::OnConnectionRestarted() => {
                    association.socket.close();
                    ended = Some(Reason::Aborted);
                }
                SocketEvent::OnTotalBufferedAmountLow() if association.full => {
                    association.full = false;
                    self.events.push_back(Event::Writable(id));
                }
                _ => {}
            }
        }
        if !association.established && association.socket.state() == SocketState::Connected {
            association.established = true;
            let agreed = association.socket.get_metrics().map(|metrics| {
                let outgoing = metrics.negotiated_maximum_outgoing_streams;
                outgoing.min(metrics.negotiated_maximum_incoming_streams)
            });
            association.streams = association.streams.min(agreed.unwrap_or(0));
            self.events.push_back(match association.accepted {
                true => Event::Accepted(id, association.peer),
                false => Event::Connected(id),
            });
        }
        let unread = association.socket.messages_ready_count();
        if unread > self.settings.unread {
            self.abort(id, now);
            self.events.push_back(Event::Ended(id, Reason::Violation));
            return;
        } else if unread > 0 && self.events.back() != Some(&Event::Readable(id)) {
            self.events.push_back(Event::Readable(id));
        }
        if let Some(reason) = ended {
            self.end(id, reason);
        }
    }

    /// Passes on the packets of an association that is not kept.
    fn send_packets(&mut self, socket: &mut Socket, peer: Peer, now: Duration) {
        while let Some(event) = socket.poll_event() {
            if let SocketEvent::SendPacket(packet) = event {
                let packet = completion::complete(packet, &self.key, peer.address, now);
                self.packets.push_back((peer.address, packet));
            }
        }
    }

    fn end(&mut self, id: AssociationId, reason: Reason) {
        if let Some(association) = self.associations.remove(&id) {
            self.by_peer.remove(&association.peer);
            self.events.push_back(Event::Ended(id, reason));
        }
    }

    /// Aborts an association. No event of it follows those that were reported.
    pub fn abort(&mut self, id: AssociationId, now: Duration) {
        if let Some(mut association) = self.associations.remove(&id) {
            self.by_peer.remove(&association.peer);
            association.socket.close();
            let peer = association.peer;
            self.send_packets(&mut association.socket, peer, now);
        }
    }

    /// Sends a message, which has its DDP-SSN in front, unordered.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send(
        &mut self,
        id: AssociationId,
        (stream, contents): (u16, Contents),
        message: Vec<u8>,
        now: Duration,
    ) -> Result<(), SendError> {
        let longest = self.longest();
        let association = self.associations.get_mut(&id).ok_or(SendError::Ended)?;
        if message.len() > longest || message.is_empty() || stream >= association.streams {
            return Err(SendError::Invalid);
        }
        association.at(now);
        let sent = Sent::new(StreamId(stream), PpId(contents.ppid()), message);
        let unordered = SendOptions {
            unordered: true,
            ..SendOptions::default()
        };
        let taken = association.socket.send(sent, &unordered);
        association.full |= taken == Err(dcsctp::api::SendError::ResourceExhaustion);
        self.drain(id, now);
        taken.map_err(|error| match error {
            dcsctp::api::SendError::ResourceExhaustion => SendError::Full,
            dcsctp::api::SendError::ShuttingDown => SendError::Ended,
            _ => SendError::Invalid,
        })
    }

    /// The next message of an association, in the order in which SCTP has it. Messages that are not
    /// taken before the association ends are lost, as those that have not come.
    pub fn take(&mut self, id: AssociationId, now: Duration) -> Option<Received> {
        let association = self.associations.get_mut(&id)?;
        let message = association.socket.get_next_message()?;
        let contents = Contents::of(message.ppid.0);
        let Some(contents) = contents.filter(|_| message.payload.len() <= self.settings.window) else {
            self.abort(id, now);
            self.events.push_back(Event::Ended(id, Reason::Violation));
            return None;
        };
        let stream = message.stream_id.0;
        // The window opens.
        self.drain(id, now);
        Some(Received {
            stream,
            contents,
            data: message.payload,
        })
    }

    /// When [`Endpoint::advance`] is due.
    pub fn timeout(&self) -> Option<Duration> {
        self.associations.values().filter_map(Association::timeout).min()
    }

    /// Does what is due at `now`: retransmissions, acknowledgements, and the end of associations
    /// whose peer does not answer.
    pub fn advance(&mut self, now: Duration) {
        let all: Vec<AssociationId> = self.associations.keys().copied().collect();
        for id in all {
            if let Some(association) = self.associations.get_mut(&id) {
                association.at(now);
                self.drain(id, now);
            }
        }
    }

    /// The next packet to send, and where to.
    pub fn next_packet(&mut self) -> Option<(SocketAddr, Vec<u8>)> {
        self.packets.pop_front()
    }

    /// What happened next.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The number of associations.
    pub fn associations(&self) -> usize {
        self.associations.len()
    }
}

/// Whether all chunks fit, and those are alone, or first, that must be (RFC 9260 §6.10, §5.1).
fn is_well_formed(packet: &Packet<'_>) -> bool {
    let mut count = 0;
    let mut must_be_alone = false;
    for chunk in packet.chunks() {
        let Ok(chunk) = chunk else { return false };
        must_be_alone |= matches!(
            chunk.kind,
            chunk_type::INIT | chunk_type::INIT_ACK | chunk_type::SHUTDOWN_COMPLETE
        );
        if chunk.kind == chunk_type::COOKIE_ECHO && count > 0 {
            return false;
        }
        count += 1;
    }
    count == 1 || !must_be_alone
}
