//! An association: the library's socket, and what it lacks for DDP. The library gives the rest of a
//! packet, of the congestion window or of the peer's window to a part of the next message, which
//! RFC 5043 §9 forbids. So messages wait here until the library certainly sends them whole.

use std::collections::VecDeque;
use std::time::Duration;

use dcsctp::api::{
    DcSctpSocket, ErrorKind, LifecycleId, Message as Sent, PpId, SendOptions, Socket, SocketEvent,
    SocketState, SocketTime, StreamId,
};
use urnic_wire::sctp::chunk::Contents;
use urnic_wire::sctp::packet::Packet;

use crate::in_flight::InFlight;
use crate::interface::{Peer, Reason, Received, SendError};
use crate::reopening::Reopening;
use crate::settings::Settings;
use crate::unsent::{Message, Unsent};

/// An association of an endpoint.
pub(crate) struct Association {
    pub(crate) peer: Peer,
    pub(crate) socket: Socket,
    /// When it began: the library counts from there.
    begun: Duration,
    /// The tag of the peer, which packets to it have.
    pub(crate) peer_tag: Option<u32>,
    /// A peer began it.
    pub(crate) accepted: bool,
    pub(crate) established: bool,
    /// Streams in each direction; fewer than those of the settings if the peer has fewer.
    pub(crate) streams: u16,
    /// The longest message, and the most bytes of DATA chunks in a packet.
    pub(crate) longest: usize,
    longest_bundle: usize,
    unsent: Unsent,
    in_flight: InFlight,
    /// The peer was silent for too long.
    gave_up: bool,
    /// Messages were lost.
    is_lost: bool,
    /// This end was told to end it after all messages.
    closing: bool,
    /// The peer's SHUTDOWN, until it has all messages.
    shutdown: Option<Vec<u8>>,
    /// The peer ends it in order.
    peer_closes: bool,
    pub(crate) reopening: Reopening,
    /// Messages that were taken from the library before the end.
    ready: VecDeque<Received>,
    /// When it will be looked at whether the peer has sent something.
    next_check: Duration,
    /// Checks since the peer sent something.
    unanswered: u32,
}

/// Bytes that may go in one packet, and whether only one message may.
struct Room {
    bytes: usize,
    one: bool,
}

impl Association {
    pub(crate) fn new(peer: Peer, socket: Socket, settings: &Settings, now: Duration) -> Association {
        Association {
            peer,
            peer_tag: None,
            accepted: socket.state() == SocketState::Connected,
            socket,
            begun: now,
            established: false,
            streams: settings.streams,
            longest: settings.longest_message(),
            longest_bundle: settings.longest_bundle(),
            unsent: Unsent::default(),
            in_flight: InFlight::default(),
            gave_up: false,
            is_lost: false,
            closing: false,
            shutdown: None,
            peer_closes: false,
            reopening: Reopening::new(settings.window),
            ready: VecDeque::new(),
            next_check: now + settings.times.heartbeat,
            unanswered: 0,
        }
    }

    /// Notes the tag of a packet to the peer, which that of an INIT does not have.
    pub(crate) fn note_sent(&mut self, packet: &[u8]) {
        let tag = Packet::tag_of(packet).filter(|tag| *tag != 0);
        self.peer_tag = tag.or(self.peer_tag);
    }

    /// Lets the library do what is due at `now`.
    pub(crate) fn at(&mut self, now: Duration) {
        let since = now.saturating_sub(self.begun);
        self.socket.advance_time(SocketTime::zero() + since);
    }

    /// When something is due next.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        let at = self.socket.poll_timeout();
        let library = (at != SocketTime::infinite_future()).then(|| at - SocketTime::zero() + self.begun);
        let check = self.established.then_some(self.next_check);
        library.into_iter().chain(check).min()
    }

    /// The peer has sent something with the tag of this end.
    pub(crate) fn heard(&mut self, settings: &Settings, now: Duration) {
        self.unanswered = 0;
        self.next_check = now + settings.times.heartbeat;
    }

    /// Whether the peer has not sent anything for too long. Checks are counted instead of the time:
    /// a process that was stopped for long hears its peer before the next one.
    pub(crate) fn is_silent(&mut self, settings: &Settings, now: Duration) -> bool {
        if !self.established || now < self.next_check {
            return false;
        }
        self.unanswered += 1;
        self.next_check = now + settings.times.heartbeat;
        self.unanswered >= settings.times.unanswered
    }

    /// Ends it because the peer is silent: in order if only the peer's last packet may be missing.
    pub(crate) fn give_up(&mut self, settings: &Settings) {
        self.keep_ready(settings);
        self.gave_up = true;
        self.is_lost |= !(self.peer_closes && self.is_acknowledged());
        self.socket.close();
    }

    fn is_acknowledged(&self) -> bool {
        self.unsent.is_empty() && self.in_flight.messages() == 0
    }

    /// Bytes that the peer has not acknowledged.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.unsent.bytes() + self.in_flight.bytes()
    }

    /// At least the number of a stream's messages that the peer has not acknowledged.
    pub(crate) fn unacknowledged_of(&self, stream: u16) -> usize {
        self.unsent.of_stream(stream) + self.in_flight.of_stream(stream)
    }

    /// Takes a message to be sent.
    pub(crate) fn send(&mut self, message: Message, settings: &Settings) -> Result<(), SendError> {
        if message.data.len() > self.longest || message.data.is_empty() || message.stream >= self.streams {
            return Err(SendError::Invalid);
        }
        self.check_room(message.stream, settings)?;
        self.unsent.put(message);
        Ok(())
    }

    /// Whether a message of a stream can be taken.
    pub(crate) fn check_room(&self, stream: u16, settings: &Settings) -> Result<(), SendError> {
        if self.is_closing() {
            return Err(SendError::Ended);
        }
        let of_stream = self.unsent.of_stream(stream);
        // A stream of which none waits always has its turn.
        let is_full = self.unsent.bytes() >= settings.unsent && of_stream > 0;
        match is_full || of_stream >= settings.unsent_of_stream {
            true => Err(SendError::Full),
            false => Ok(()),
        }
    }

    /// Ends it in order, after all messages.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Whether it ends in order, so that no message can be sent any more.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing || self.peer_closes || self.shutdown.is_some()
    }

    /// Keeps the peer's SHUTDOWN until all messages were acknowledged. The library does not wait
    /// for those that it has to retransmit.
    pub(crate) fn peer_closes(&mut self, shutdown: Vec<u8>) {
        self.shutdown = Some(shutdown);
    }

    /// Lets the library do all that it can; returns the reason if the association has ended.
    pub(crate) fn work(
        &mut self,
        settings: &Settings,
        now: Duration,
        packets: &mut Vec<Vec<u8>>,
    ) -> Option<Reason> {
        let mut ended = None;
        loop {
            while let Some(event) = self.socket.poll_event() {
                match event {
                    SocketEvent::SendPacket(packet) => {
                        self.reopening.sends(&packet);
                        packets.push(packet);
                    }
                    SocketEvent::OnClosed() if !self.is_lost => _ = ended.get_or_insert(Reason::Closed),
                    SocketEvent::OnAborted(ErrorKind::TooManyRetries, _) => {
                        _ = ended.get_or_insert(Reason::Silent);
                    }
                    SocketEvent::OnClosed() | SocketEvent::OnAborted(..) => {
                        let reason = if self.gave_up {
                            Reason::Silent
                        } else {
                            Reason::Aborted
                        };
                        _ = ended.get_or_insert(reason);
                    }
                    SocketEvent::OnLifecycleMessageDelivered(id) => self.in_flight.acknowledged(id),
                    SocketEvent::OnConnected() if !self.established => self.establish(settings, now),
                    // What was on its way is lost, and DDP cannot go on after a hole.
                    SocketEvent::OnConnected() | SocketEvent::OnConnectionRestarted() => self.lose(),
                    _ => {}
                }
            }
            if ended.is_some() || !(self.pass_on(settings) || self.close_if_done()) {
                return ended;
            }
        }
    }

    fn lose(&mut self) {
        self.is_lost = true;
        self.socket.close();
    }

    fn establish(&mut self, settings: &Settings, now: Duration) {
        self.established = true;
        self.heard(settings, now);
        let agreed = self.socket.get_metrics().map(|metrics| {
            let outgoing = metrics.negotiated_maximum_outgoing_streams;
            outgoing.min(metrics.negotiated_maximum_incoming_streams)
        });
        self.streams = self.streams.min(agreed.unwrap_or(0));
        if self.unsent.has_beyond(self.streams) {
            self.lose();
        }
    }

    /// Gives the library the next messages if it sends them at once. Returns whether it did.
    fn pass_on(&mut self, settings: &Settings) -> bool {
        if self.unsent.is_empty() || self.socket.state() != SocketState::Connected {
            return false;
        }
        let Some(room) = self.room() else {
            return false;
        };
        let mut bundle: Vec<Message> = Vec::new();
        let mut left = room.bytes;
        loop {
            let may_send = |stream| {
                let here = bundle.iter().filter(|message| message.stream == stream).count();
                self.in_flight.of_stream(stream) + here < settings.most_in_flight()
            };
            let Some(message) = self.unsent.next(left, may_send) else {
                break;
            };
            left -= message.chunk_len();
            bundle.push(message);
            if room.one {
                break;
            }
        }
        if bundle.is_empty() {
            return false;
        }
        let name = self.in_flight.put(&bundle);
        self.give(bundle, name);
        true
    }

    /// The bytes of chunks that the library certainly sends at once, in one packet. It splits a
    /// message in these cases, which are excluded:
    ///
    /// * Others wait in it: none does, because each is sent at once.
    /// * The packet begins with a SACK. One with gaps or duplicates is due at once, and was sent by
    ///   [`Association::flush`]. One without them may be delayed until then: there is always room
    ///   for it.
    /// * The packet begins with retransmissions. Those for which there is room were sent by the
    ///   flush, so none goes with the message.
    /// * cwnd or the peer's window has less room. With nothing in flight the library sends a packet
    ///   whatever the window is, and cwnd is never less than a packet.
    ///
    /// `None`: retransmissions may wait for which there is no room. They go first (RFC 9260 §6.1,
    /// rule C), or short new messages could take their room for ever.
    fn room(&mut self) -> Option<Room> {
        self.flush()?;
        let bundle = self.longest_bundle;
        let metrics = self.socket.get_metrics()?;
        let window = metrics.peer_rwnd_bytes as usize;
        if self.in_flight.messages() == 0 {
            return Some(Room {
                bytes: bundle.min(metrics.cwnd_bytes),
                one: window < bundle,
            });
        }
        // Those that are neither acknowledged, also after a gap, nor to be retransmitted.
        let counted = metrics.unack_data_count;
        let most = self.in_flight.bytes().min(counted * bundle);
        let left = metrics.cwnd_bytes.saturating_sub(most).min(window);
        // With room for the longest, the flush has left none.
        let none_waits = counted == self.in_flight.messages() || left >= bundle;
        none_waits.then_some(Room {
            bytes: left.min(bundle) / 4 * 4,
            one: false,
        })
    }

    /// Lets the library send the SACKs that are due and the retransmissions that cwnd and the
    /// window permit, a burst at a time, until it sends nothing. `None`: it has no association.
    fn flush(&mut self) -> Option<()> {
        let mut sent = self.socket.get_metrics()?.tx_packets_count;
        loop {
            let _ = self.socket.send_many(Vec::new(), &SendOptions::default());
            let now_sent = self.socket.get_metrics()?.tx_packets_count;
            if now_sent == sent {
                return Some(());
            }
            sent = now_sent;
        }
    }

    fn give(&mut self, bundle: Vec<Message>, name: Option<LifecycleId>) {
        let options = SendOptions {
            unordered: true,
            lifecycle_id: name,
            ..SendOptions::default()
        };
        let streams: Vec<u16> = bundle.iter().map(|message| message.stream).collect();
        let sent = |message: Message| {
            let contents = PpId(message.contents.ppid());
            Sent::new(StreamId(message.stream), contents, message.data)
        };
        let taken = self
            .socket
            .send_many(bundle.into_iter().map(sent).collect(), &options);
        debug_assert!(taken.is_ok(), "the library has no reason to refuse: {taken:?}");
        if taken.is_err() {
            self.lose();
        }
        let waits = |stream: &u16| self.socket.buffered_amount(StreamId(*stream)) > 0;
        debug_assert!(!streams.iter().any(waits), "all was sent at once");
    }

    /// Lets the library end the association if all messages were acknowledged: it would not wait
    /// for those that it has to retransmit, or does not have. Returns whether it did something.
    fn close_if_done(&mut self) -> bool {
        if !self.is_acknowledged() || self.socket.state() != SocketState::Connected {
            return false;
        }
        if let Some(shutdown) = self.shutdown.take() {
            self.peer_closes = true;
            self.socket.handle_input(&shutdown);
            return true;
        }
        if self.closing {
            self.socket.shutdown();
        }
        self.closing
    }

    /// Messages that can be taken.
    pub(crate) fn unread(&self) -> usize {
        self.ready.len() + self.socket.messages_ready_count()
    }

    /// The next message. An error: it is none of DDP.
    pub(crate) fn take(&mut self, settings: &Settings) -> Option<Result<Received, Reason>> {
        if let Some(ready) = self.ready.pop_front() {
            return Some(Ok(ready));
        }
        let message = self.socket.get_next_message()?;
        if let Some(last) = self.reopening.read(message.payload.len(), settings.window) {
            self.socket.handle_input(&last);
        }
        let contents = Contents::of(message.ppid.0).filter(|_| message.payload.len() <= settings.window);
        Some(contents.ok_or(Reason::Violation).map(|contents| Received {
            stream: message.stream_id.0,
            contents,
            data: message.payload,
        }))
    }

    /// Takes the messages from the library, which forgets them when the association ends. This
    /// opens the peer's window once: if the association goes on, no more are taken before the
    /// program has taken these.
    pub(crate) fn keep_ready(&mut self, settings: &Settings) {
        if !self.ready.is_empty() {
            return;
        }
        let mut ready = VecDeque::new();
        while let Some(Ok(message)) = self.take(settings) {
            ready.push_back(message);
        }
        self.ready = ready;
    }

    /// The messages that can be taken after the end.
    pub(crate) fn into_ready(self) -> VecDeque<Received> {
        self.ready
    }
}
