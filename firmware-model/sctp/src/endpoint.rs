//! The associations of one UDP port.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use dcsctp::api::{DcSctpSocket, Options, Socket, SocketEvent, SocketState};
use urnic_wire::sctp::adaptation::Adaptation;
use urnic_wire::sctp::chunk::Contents;
use urnic_wire::sctp::packet::{Data, Packet, STATE_COOKIE, chunk_type, parameters};

use crate::association::Association;
use crate::completion::{self, Key};
pub use crate::interface::{AssociationId, Event, Peer, Reason, Received, SendError};
pub use crate::settings::{Settings, Times};
use crate::unsent::Message;

/// The associations of one UDP port.
pub struct Endpoint {
    settings: Settings,
    /// See [`Endpoint::measure_paths`].
    path: Option<Box<dyn Fn(SocketAddr) -> usize>>,
    key: Key,
    /// Seeds of the library's generator that were taken from the key.
    drawn: u64,
    associations: HashMap<AssociationId, Association>,
    by_peer: HashMap<Peer, AssociationId>,
    /// Established ones by the tag of this end.
    by_tag: HashMap<u32, AssociationId>,
    /// Messages of associations that have ended.
    ended: HashMap<AssociationId, VecDeque<Received>>,
    next: u64,
    packets: VecDeque<(SocketAddr, Vec<u8>)>,
    events: VecDeque<Event>,
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
            path: None,
            key: Key::new(random),
            drawn: 0,
            associations: HashMap::new(),
            by_peer: HashMap::new(),
            by_tag: HashMap::new(),
            ended: HashMap::new(),
            next: 0,
            packets: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Has `packet_len` say how long packets to an address may be, when an association begins,
    /// instead of the settings. What an association then has stays.
    pub fn measure_paths(&mut self, packet_len: impl Fn(SocketAddr) -> usize + 'static) {
        self.path = Some(Box::new(packet_len));
    }

    /// The settings of an association with a peer.
    fn settings_for(&self, peer: Peer) -> Settings {
        let measured = self.path.as_ref().map(|path| path(peer.address));
        Settings {
            packet_len: measured.unwrap_or(self.settings.packet_len),
            ..self.settings
        }
    }

    /// The longest message of an association, with its DDP-SSN: the most that fits one packet
    /// beside an acknowledgement (RFC 5043 §9). 0 if it has ended.
    pub fn longest(&self, id: AssociationId) -> usize {
        self.associations
            .get(&id)
            .map_or(0, |association| association.longest)
    }

    /// Begins an association, or returns the one that there is with this peer. `None`: there are
    /// too many.
    pub fn connect(&mut self, peer: Peer, now: Duration) -> Option<AssociationId> {
        if let Some(known) = self.by_peer.get(&peer) {
            return Some(*known);
        }
        let settings = self.settings_for(peer);
        let mut socket = self.socket(peer, &settings);
        socket.connect();
        let id = self.insert(peer, socket, &settings, now)?;
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
            (chunk_type::SHUTDOWN_ACK, _) if !self.is_established(known) => {
                // The last packet of an association that has ended here was lost.
                let complete = completion::shutdown_complete(&packet);
                self.packets.push_back((from, complete));
            }
            (_, Some(id)) => self.arrived(id, bytes, &packet, now),
            (_, None) => {
                if let Some(id) = self.moved(peer, packet.tag) {
                    self.arrived(id, bytes, &packet, now);
                }
                // Others are not answered: they may be forged.
            }
        }
    }

    /// The association of a peer whose packets come from another UDP port than before, as through a
    /// router that translates addresses: the tag shows that it is the same peer (RFC 6951 §5.4).
    fn moved(&mut self, peer: Peer, tag: u32) -> Option<AssociationId> {
        let id = *self.by_tag.get(&tag)?;
        let association = self.associations.get_mut(&id)?;
        let before = association.peer;
        if before.address.ip() != peer.address.ip() || before.port != peer.port {
            return None;
        }
        association.peer = peer;
        self.by_peer.remove(&before);
        self.by_peer.insert(peer, id);
        self.events.push_back(Event::Moved(id, peer));
        Some(id)
    }

    fn is_established(&self, id: Option<AssociationId>) -> bool {
        let association = id.and_then(|id| self.associations.get(&id));
        association.is_some_and(|association| association.established)
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
        if has_tag && association.established {
            self.authenticated(id, bytes, packet, now);
        } else {
            self.feed(id, bytes, now);
        }
    }

    /// A packet of a peer with an established association, with the right tag.
    fn authenticated(&mut self, id: AssociationId, bytes: &[u8], packet: &Packet<'_>, now: Duration) {
        let Some(association) = self.associations.get_mut(&id) else {
            return;
        };
        association.heard(&self.settings, now);
        let has = |wanted: &[u8]| {
            packet
                .chunks()
                .flatten()
                .any(|chunk| wanted.contains(&chunk.kind))
        };
        if has(&[
            chunk_type::ABORT,
            chunk_type::SHUTDOWN_ACK,
            chunk_type::SHUTDOWN_COMPLETE,
        ]) {
            association.keep_ready(&self.settings);
        }
        if association.reopening.is_small(self.settings.window) {
            let data = completion::some_chunks(bytes, packet, |kind| kind == chunk_type::DATA);
            data.into_iter().for_each(|data| association.reopening.keep(data));
        }
        if !has(&[chunk_type::SHUTDOWN]) || association.socket.state() != SocketState::Connected {
            return self.feed(id, bytes, now);
        }
        // The library would not wait until the peer has all messages.
        let is_shutdown = |kind| kind == chunk_type::SHUTDOWN;
        if let Some(shutdown) = completion::some_chunks(bytes, packet, is_shutdown) {
            association.peer_closes(shutdown);
        }
        match completion::some_chunks(bytes, packet, |kind| !is_shutdown(kind)) {
            Some(others) => self.feed(id, &others, now),
            None => self.drain(id, now),
        }
    }

    /// Whether an INIT ACK is for DDP, and its cookie can be sent back.
    fn is_acceptable(&self, packet: &Packet<'_>) -> bool {
        packet.init().is_some_and(|(_, all)| {
            let mut cookies = parameters(all).filter(|(kind, _)| *kind == STATE_COOKIE);
            let fits = |(_, cookie): (u16, &[u8])| cookie.len() <= self.settings.longest_message();
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
        // The answer has all that is known of the peer: nothing is kept, and the path not measured.
        let settings = self.settings;
        let mut socket = self.socket(peer, &settings);
        socket.handle_input(bytes);
        self.send_packets(&mut socket, peer, now);
    }

    /// A peer has sent a cookie back, so it receives at its address.
    fn echoed(&mut self, peer: Peer, known: Option<AssociationId>, opened: &[u8], now: Duration) {
        if let Some(id) = known {
            return self.feed(id, opened, now);
        }
        let settings = self.settings_for(peer);
        let mut socket = self.socket(peer, &settings);
        socket.handle_input(opened);
        if socket.state() != SocketState::Connected {
            return;
        }
        if self.is_full() {
            // An ABORT in place of the COOKIE ACK.
            while socket.poll_event().is_some() {}
            socket.close();
            return self.send_packets(&mut socket, peer, now);
        }
        if let Some(id) = self.insert(peer, socket, &settings, now) {
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
    fn socket(&mut self, peer: Peer, settings: &Settings) -> Socket {
        self.seed();
        let times = settings.times;
        Socket::new(
            "",
            &Options {
                local_port: settings.port,
                remote_port: peer.port,
                announced_maximum_incoming_streams: settings.streams,
                announced_maximum_outgoing_streams: settings.streams,
                mtu: settings.longest_packet(),
                max_message_size: settings.longest_message(),
                max_receiver_window_buffer_size: settings.window,
                max_send_buffer_size: settings.unsent,
                per_stream_send_queue_limit: settings.unsent,
                // A message that is given up would be a hole for ever.
                enable_partial_reliability: false,
                rto_initial: times.rto_initial,
                rto_min: times.rto_min,
                rto_max: times.rto_max,
                t1_init_timeout: times.rto_initial,
                t1_cookie_timeout: times.rto_initial,
                max_init_retransmits: Some(times.requests),
                max_timer_backoff_duration: Some(times.longest_backoff()),
                heartbeat_interval: times.heartbeat,
                // The endpoint ends associations whose peer is silent.
                max_retransmissions: None,
                ..Options::default()
            },
        )
    }

    /// Whether there can be no more associations.
    fn is_full(&self) -> bool {
        self.associations.len() + self.ended.len() >= self.settings.associations
    }

    fn insert(
        &mut self,
        peer: Peer,
        socket: Socket,
        settings: &Settings,
        now: Duration,
    ) -> Option<AssociationId> {
        if self.is_full() {
            return None;
        }
        let id = AssociationId(self.next);
        self.next += 1;
        self.by_peer.insert(peer, id);
        let association = Association::new(peer, socket, settings, now);
        self.associations.insert(id, association);
        Some(id)
    }

    fn feed(&mut self, id: AssociationId, bytes: &[u8], now: Duration) {
        if let Some(association) = self.associations.get_mut(&id) {
            association.at(now);
            association.socket.handle_input(bytes);
            self.drain(id, now);
        }
    }

    /// Lets an association do what it can, and reports what has happened to it.
    fn drain(&mut self, id: AssociationId, now: Duration) {
        let Some(association) = self.associations.get_mut(&id) else {
            return;
        };
        let was_established = association.established;
        let mut packets = Vec::new();
        let ended = association.work(&self.settings, now, &mut packets);
        let to = association.peer.address;
        for packet in packets {
            association.note_sent(&packet);
            let packet = completion::complete(packet, &self.key, to, now);
            self.packets.push_back((to, packet));
        }
        if association.established && !was_established {
            self.by_tag.insert(association.socket.verification_tag(), id);
            self.events.push_back(match association.accepted {
                true => Event::Accepted(id, association.peer),
                false => Event::Connected(id),
            });
        }
        let unread = association.unread();
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
        if let Some(association) = self.remove(id) {
            let ready = association.into_ready();
            if !ready.is_empty() {
                self.ended.insert(id, ready);
            }
            self.events.push_back(Event::Ended(id, reason));
        }
    }

    fn remove(&mut self, id: AssociationId) -> Option<Association> {
        let association = self.associations.remove(&id)?;
        self.by_peer.remove(&association.peer);
        self.by_tag.retain(|_, of_tag| *of_tag != id);
        Some(association)
    }

    /// Aborts an association. No event of it follows those that were reported, and its messages are
    /// forgotten.
    pub fn abort(&mut self, id: AssociationId, now: Duration) {
        self.forget(id);
        if let Some(mut association) = self.remove(id) {
            association.socket.close();
            let peer = association.peer;
            self.send_packets(&mut association.socket, peer, now);
        }
    }

    /// Ends an association in order, after all messages that were sent on it: both ends see
    /// [`Reason::Closed`]. Messages of the peer may still come before. Until then it takes no more
    /// messages to be sent.
    pub fn shutdown(&mut self, id: AssociationId, now: Duration) {
        if let Some(association) = self.associations.get_mut(&id) {
            association.at(now);
            association.close();
            self.drain(id, now);
        }
    }

    /// Forgets the messages of an association that has ended, which nobody will take.
    pub fn forget(&mut self, id: AssociationId) {
        self.ended.remove(&id);
    }

    /// The host or the network of this address says that nothing is at this UDP port, and that this
    /// packet, or its beginning, was sent there (RFC 6951 §5.5). Anybody may say so; an established
    /// association ends only if the packet has its peer's tag, as packets sent to it have.
    pub fn unreachable(&mut self, from: SocketAddr, packet: &[u8]) {
        let tag = Packet::tag_of(packet);
        let is_meant = |association: &Association| {
            let knows = association.peer_tag.is_some() && association.peer_tag == tag;
            association.peer.address == from && (knows || !association.established)
        };
        let all = self.associations.iter_mut();
        let meant = all.filter(|(_, association)| is_meant(association));
        let ids: Vec<AssociationId> = meant
            .map(|(id, association)| {
                association.keep_ready(&self.settings);
                *id
            })
            .collect();
        for id in ids {
            self.end(id, Reason::Refused);
        }
    }

    /// Whether [`Endpoint::send`] takes a message of a stream now.
    pub fn has_room(&self, id: AssociationId, stream: u16) -> bool {
        let association = self.associations.get(&id);
        association.is_some_and(|association| association.check_room(stream, &self.settings).is_ok())
    }

    /// Sends a message, which has its DDP-SSN in front, unordered. Before the association is
    /// established the number of its streams is not known: one with a message on a stream that the
    /// peer does not have ends.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send(
        &mut self,
        id: AssociationId,
        (stream, contents): (u16, Contents),
        data: Vec<u8>,
        now: Duration,
    ) -> Result<(), SendError> {
        let association = self.associations.get_mut(&id).ok_or(SendError::Ended)?;
        let message = Message {
            stream,
            contents,
            data,
        };
        association.send(message, &self.settings)?;
        association.at(now);
        self.drain(id, now);
        Ok(())
    }

    /// At least the bytes that were taken by [`Endpoint::send`], with the headers of their chunks,
    /// and that the peer has not acknowledged: 0 if it has all. Also 0 of an association that has
    /// ended: then the [`Reason`] says whether it has all.
    pub fn unacknowledged(&self, id: AssociationId) -> usize {
        self.associations.get(&id).map_or(0, Association::unacknowledged)
    }

    /// At least the number of messages of a stream that were taken by [`Endpoint::send`], and that
    /// the peer has not acknowledged. 0 of an association that has ended.
    pub fn unacknowledged_of(&self, id: AssociationId, stream: u16) -> usize {
        let association = self.associations.get(&id);
        association.map_or(0, |association| association.unacknowledged_of(stream))
    }

    /// Whether an association is about to end in order: it takes no message any more.
    pub fn is_closing(&self, id: AssociationId) -> bool {
        self.associations.get(&id).is_some_and(Association::is_closing)
    }

    /// The number of streams in each direction on which both ends agreed; `None` before that, and
    /// after the end.
    pub fn streams(&self, id: AssociationId) -> Option<u16> {
        let association = self.associations.get(&id)?;
        association.established.then_some(association.streams)
    }

    /// The next message of an association, in the order in which SCTP has it. Those that came
    /// before it ended can still be taken after [`Reason::Closed`] and [`Reason::Aborted`], until
    /// they are [forgotten](Endpoint::forget).
    pub fn take(&mut self, id: AssociationId, now: Duration) -> Option<Received> {
        if let Some(ready) = self.ended.get_mut(&id) {
            let message = ready.pop_front();
            if ready.is_empty() {
                self.ended.remove(&id);
            }
            return message;
        }
        let message = self.associations.get_mut(&id)?.take(&self.settings)?;
        match message {
            Ok(message) => {
                // The window opens.
                self.drain(id, now);
                Some(message)
            }
            Err(reason) => {
                self.abort(id, now);
                self.events.push_back(Event::Ended(id, reason));
                None
            }
        }
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
            let Some(association) = self.associations.get_mut(&id) else {
                continue;
            };
            if association.is_silent(&self.settings, now) {
                association.give_up(&self.settings);
            } else {
                association.at(now);
            }
            self.drain(id, now);
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

    /// Whether peers may begin associations from now on.
    pub fn set_listening(&mut self, listens: bool) {
        self.settings.listens = listens;
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
