//! SCTP from a library, [`urnic_sctp`], in the datagrams of a UDP port (RFC 6951).

use super::super::datagram::{BATCH, DatagramSocket, Incoming, Outgoing};
use super::endpoint::Endpoint;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::collections::HashMap;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use urnic_sctp::endpoint::{AssociationId, Event, Peer, Received, SendError};
use urnic_wire::sctp::chunk::Contents;

/// The associations of a UDP port.
pub(super) struct UdpEndpoint {
    library: urnic_sctp::endpoint::Endpoint,
    /// `None`: it is closed.
    socket: Option<Box<dyn DatagramSocket>>,
    bound: IpAddr,
    traffic_class: u8,
    /// The peer's address, and ours, of each association.
    addresses: HashMap<AssociationId, (SocketAddr, IpAddr)>,
    /// Room for packets that arrive, and for packets to be sent.
    room: Vec<u8>,
    arrived: Vec<Incoming>,
    sending: Vec<u8>,
}

impl UdpEndpoint {
    pub(super) fn new(
        library: urnic_sctp::endpoint::Endpoint,
        socket: Box<dyn DatagramSocket>,
        traffic_class: u8,
    ) -> UdpEndpoint {
        let room = socket.room();
        UdpEndpoint {
            library,
            bound: socket.local().ip(),
            socket: Some(socket),
            traffic_class,
            addresses: HashMap::new(),
            room: vec![0; BATCH * room],
            arrived: Vec::with_capacity(BATCH),
            sending: Vec::new(),
        }
    }

    /// Takes packets that have arrived; returns whether there may be more.
    fn receive_packets(&mut self, now: Duration) -> bool {
        let mut arrived = mem::take(&mut self.arrived);
        arrived.clear();
        let socket = self.socket.as_mut();
        let is_full = socket.is_some_and(|socket| socket.receive(&mut self.room, &mut arrived));
        for packet in &arrived {
            let bytes = packet.bytes(&self.room).unwrap_or_default();
            self.library.receive(packet.source, bytes, now);
        }
        self.arrived = arrived;
        is_full
    }

    /// Takes the packets that did not arrive because nothing listens there. The report may be
    /// forged.
    fn take_refused(&mut self) {
        for _ in 0..BATCH {
            let socket = self.socket.as_mut();
            let Some(refused) = socket.and_then(|socket| socket.refused(&mut self.room)) else {
                return;
            };
            if refused.errno == Errno::CONNREFUSED {
                let packet = self.room.get(..refused.len).unwrap_or_default();
                self.library.unreachable(refused.destination, packet);
            }
        }
    }

    /// Our address for packets to a peer.
    fn source(&self, to: SocketAddr) -> IpAddr {
        if !self.bound.is_unspecified() {
            return self.bound;
        }
        let known = || self.addresses.values().find(|(peer, _)| *peer == to);
        match self.arrived.iter().find(|packet| packet.source == to) {
            Some(packet) => packet.destination,
            None => known().map_or(self.bound, |(_, local)| *local),
        }
    }

    fn note(&mut self, id: AssociationId, peer: Peer) {
        let local = self.source(peer.address);
        self.addresses.insert(id, (peer.address, local));
    }

    /// Sends packets. Those that the network does not take are lost, and SCTP sends them again.
    fn pass_on(&mut self, packets: &[Outgoing]) {
        let mut left = packets;
        while let (Some(socket), Some((first, rest))) = (&mut self.socket, left.split_first()) {
            match socket.send(&self.sending, left) {
                Ok(taken) => left = left.get(taken.max(1)..).unwrap_or_default(),
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    tracing::debug!(%errno, "a packet to {} is not sent", first.destination);
                    left = rest;
                }
            }
        }
    }
}

impl Endpoint for UdpEndpoint {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref()?.descriptor()
    }

    fn receive(&mut self, now: Duration) -> bool {
        let is_full = self.receive_packets(now);
        self.take_refused();
        is_full
    }

    fn flush(&mut self) {
        let mut packets = Vec::new();
        loop {
            let next = self.library.next_packet();
            let is_last = next.is_none();
            if let Some((destination, bytes)) = next {
                packets.push(Outgoing {
                    at: self.sending.len(),
                    len: bytes.len(),
                    source: self.source(destination),
                    destination,
                    traffic_class: self.traffic_class,
                    segment: 0,
                });
                self.sending.extend_from_slice(&bytes);
            }
            if packets.len() == BATCH || is_last {
                self.pass_on(&packets);
                packets.clear();
                self.sending.clear();
            }
            if is_last {
                self.arrived.clear();
                return;
            }
        }
    }

    fn close(&mut self) {
        self.socket = None;
    }

    fn set_listening(&mut self, listens: bool) {
        self.library.set_listening(listens);
    }

    fn connect(&mut self, peer: Peer, now: Duration) -> Result<AssociationId, Errno> {
        let id = self.library.connect(peer, now).ok_or(Errno::NOSR)?;
        if !self.addresses.contains_key(&id) {
            self.note(id, peer);
        }
        Ok(id)
    }

    fn shutdown(&mut self, id: AssociationId, now: Duration) {
        self.library.shutdown(id, now);
    }

    fn abort(&mut self, id: AssociationId, now: Duration) {
        self.addresses.remove(&id);
        self.library.abort(id, now);
    }

    fn forget(&mut self, id: AssociationId) {
        self.addresses.remove(&id);
        self.library.forget(id);
    }

    fn is_closing(&self, id: AssociationId) -> bool {
        self.library.is_closing(id)
    }

    fn local_ip(&self, id: AssociationId) -> IpAddr {
        self.addresses.get(&id).map_or(self.bound, |(_, local)| *local)
    }

    fn streams(&self, id: AssociationId) -> Option<u16> {
        self.library.streams(id)
    }

    fn longest(&self, id: AssociationId) -> usize {
        self.library.longest(id)
    }

    fn has_room(&self, id: AssociationId, stream: u16) -> bool {
        self.library.has_room(id, stream)
    }

    fn send(
        &mut self,
        id: AssociationId,
        to: (u16, Contents),
        data: Vec<u8>,
        now: Duration,
    ) -> Result<(), Errno> {
        self.library.send(id, to, data, now).map_err(|error| match error {
            SendError::Ended => Errno::CONNRESET,
            SendError::Full => Errno::AGAIN,
            SendError::Invalid => Errno::MSGSIZE,
        })
    }

    fn take(&mut self, id: AssociationId, now: Duration) -> Option<Received> {
        self.library.take(id, now)
    }

    fn is_confirmed(&mut self, id: AssociationId) -> bool {
        self.library.unacknowledged(id) == 0
    }

    fn unacknowledged_of(&mut self, id: AssociationId, stream: u16) -> usize {
        self.library.unacknowledged_of(id, stream)
    }

    fn next_event(&mut self) -> Option<Event> {
        let event = self.library.next_event()?;
        match event {
            Event::Accepted(id, peer) => self.note(id, peer),
            Event::Moved(id, peer) => {
                if let Some((address, _)) = self.addresses.get_mut(&id) {
                    *address = peer.address;
                }
            }
            // Its address is forgotten with its messages.
            Event::Connected(_) | Event::Readable(_) | Event::Ended(..) => {}
        }
        Some(event)
    }

    fn timeout(&self) -> Option<Duration> {
        self.library.timeout()
    }

    fn advance(&mut self, now: Duration) {
        self.library.advance(now);
    }
}
