//! Datagrams between queue pairs of kind UD on one host: through a ring in shared memory for each
//! pair of ports, beside the UDP sockets.
//!
//! A port of UDP also listens on an abstract unix socket that its address names. Before its first
//! datagram to a port, a sender offers a ring there. The receiver takes the offer up when that
//! datagram arrives, and answers with its bell; from then on the sender's datagrams go into the
//! ring. Where nobody answers, where the ring is full, and for other users' processes it is UDP.
//!
//! Datagrams of one port to another stay in order: one in the ring has with it how many the sender
//! had sent by UDP before, and the receiver takes those first. What UDP has lost is not waited for.

mod inbound;
mod outbound;
mod packet;
mod share;
#[cfg(test)]
mod tests;

use super::bell::{Bell, PeerBell, Slot};
use super::by_file::ByFile;
use super::direction::Direction;
use super::layout;
use super::local_peers::{LocalListener, LocalPeers, Protocol};
use super::local_socket::LocalSocket;
use super::messages::{self, Greeting};
use super::ring::{Receiver, Sender};
use crate::host::SharedMemory;
use crate::stream::datagram::{Incoming, Outgoing, PACKET_ROOM};
use inbound::Inbound;
use outbound::Outbound;
use packet::Gone;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::process::getpid;
use share::{PORTS, RINGS, Share};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Most rings that end at one port.
const INBOUND: usize = 64;
/// Ports that a sender remembers.
const KNOWN: usize = 4096;
/// Datagrams to a port until it is asked again.
const RETRY: u32 = 4096;
/// Datagrams between two looks for the answer to an offer, once it was not answered at once.
const LATER: u32 = 32;
/// How often an offer is looked at, once a second, before it is taken back.
const LOOKS: u32 = 2;
/// Offers that are looked at for one datagram.
const LOOKED_AT: usize = 16;

/// What a device has for the rings of all its ports.
#[derive(Debug)]
pub(in crate::stream) struct Office {
    local: Arc<LocalPeers>,
    bell: Arc<Bell>,
    peers: Arc<ByFile<PeerBell>>,
    rings: Arc<AtomicUsize>,
    ports: Arc<AtomicUsize>,
}

impl Office {
    pub(super) fn new(local: &Arc<LocalPeers>, bell: &Arc<Bell>, peers: &Arc<ByFile<PeerBell>>) -> Office {
        Office {
            local: local.clone(),
            bell: bell.clone(),
            peers: peers.clone(),
            rings: Arc::default(),
            ports: Arc::default(),
        }
    }
}

/// How datagrams to a port go.
#[derive(Debug)]
enum Way {
    /// By UDP, for so many.
    Udp {
        left: u32,
    },
    /// By UDP until the offer is answered.
    Offered {
        socket: LocalSocket,
        memory: Arc<SharedMemory>,
        share: Share,
        by_udp: u32,
        watch: Slot,
        /// How often it was looked at since, at intervals.
        looks: u32,
    },
    Ring(Box<Outbound>),
}

/// The rings of a port.
#[derive(Debug)]
pub(in crate::stream) struct Mail {
    office: Arc<Office>,
    /// Where others leave their offers.
    listener: LocalListener,
    local: SocketAddr,
    ways: HashMap<SocketAddr, Way>,
    inbound: Vec<Inbound>,
    /// The inbound ring to be read first.
    next: usize,
    qid: u32,
    _share: Share,
}

impl Mail {
    /// The rings of a port that was bound; `None`: others cannot find it.
    pub(in crate::stream) fn open(office: &Arc<Office>, local: SocketAddr) -> Option<Mail> {
        let share = Share::take(&office.ports, PORTS)?;
        let listener = office.local.listen(Protocol::Udp, local).ok()?;
        Some(Mail {
            office: office.clone(),
            listener,
            local,
            ways: HashMap::new(),
            inbound: Vec::new(),
            next: 0,
            qid: 0,
            _share: share,
        })
    }

    /// What arrives is this queue pair's.
    pub(in crate::stream) fn bind(&mut self, qid: u32) {
        self.qid = qid;
    }

    /// Whether datagrams to a port may go into a ring, now or soon.
    pub(in crate::stream) fn knows(&self, destination: SocketAddr) -> bool {
        !matches!(self.ways.get(&destination), Some(Way::Udp { left: 1.. }))
    }

    /// Sends a packet through a ring; `false`: it is to go by UDP.
    #[inline]
    pub(in crate::stream) fn send(&mut self, packet: &Outgoing, bytes: &[u8]) -> bool {
        let destination = packet.destination;
        match self.ways.get_mut(&destination) {
            Some(Way::Ring(outbound)) => match outbound.send(packet, bytes) {
                Ok(sent) => sent,
                Err(Gone) => {
                    self.ways.insert(destination, Way::Udp { left: 0 });
                    false
                }
            },
            Some(Way::Udp { left: left @ 1.. }) => {
                *left -= 1;
                false
            }
            Some(Way::Offered { by_udp, .. }) => {
                *by_udp = by_udp.wrapping_add(1);
                if *by_udp < LATER || by_udp.is_multiple_of(LATER) {
                    self.conclude(destination);
                }
                false
            }
            Some(Way::Udp { .. }) | None => {
                self.offer(packet);
                false
            }
        }
    }

    /// Offers a ring to a port that was not asked recently.
    #[cold]
    fn offer(&mut self, packet: &Outgoing) {
        let destination = packet.destination;
        if self.ways.len() >= KNOWN && !self.ways.contains_key(&destination) {
            self.ways.retain(|_, way| matches!(way, Way::Ring(_)));
        }
        let way = self.offered(packet).unwrap_or(Way::Udp { left: RETRY });
        self.ways.insert(destination, way);
    }

    fn offered(&self, packet: &Outgoing) -> Option<Way> {
        if packet.destination.ip().is_multicast() {
            return None;
        }
        let socket = self.office.local.connect(Protocol::Udp, packet.destination)?;
        let share = Share::take(&self.office.rings, RINGS)?;
        let watch = self.office.bell.slot()?;
        watch.bind(self.qid);
        let (memory, file) = SharedMemory::create("urnic-datagrams", layout::MEMORY).ok()?;
        let source = SocketAddr::new(packet.source, self.local.port());
        messages::send(&socket, &Greeting::of_datagrams(source), &[file.as_fd()]).ok()?;
        Some(Way::Offered {
            socket,
            memory: Arc::new(memory),
            share,
            by_udp: 1,
            watch,
            looks: 0,
        })
    }

    /// Begins to use a ring whose offer was answered.
    fn conclude(&mut self, destination: SocketAddr) {
        let descriptors = self.office.local.descriptors();
        let Some(Way::Offered { socket, .. }) = self.ways.get(&destination) else {
            return;
        };
        let answer = messages::receive::<Greeting>(socket, true, descriptors);
        if answer.as_ref().is_err_and(|errno| *errno == Errno::AGAIN) {
            return;
        }
        let Some(Way::Offered {
            socket,
            memory,
            share,
            by_udp,
            watch,
            ..
        }) = self.ways.insert(destination, Way::Udp { left: RETRY })
        else {
            return;
        };
        let Ok((message, mut passed)) = answer else {
            return;
        };
        let Ok(bell) = passed.bell(&self.office.peers) else {
            return;
        };
        tracing::debug!(%destination, "datagrams to this port pass through memory");
        let outbound = Outbound {
            sender: Sender::at_full_length(memory.clone(), Direction::FromInitiator),
            memory,
            by_udp,
            socket,
            bell,
            slot: message.slot(),
            overflowed: false,
            count: 0,
            owner: getpid(),
            _watch: watch,
            _share: share,
        };
        self.ways.insert(destination, Way::Ring(Box::new(outbound)));
    }

    /// Lets rings go whose other end is gone.
    pub(in crate::stream) fn forget_peers(&mut self) {
        // What is left in the ring of a sender that is gone is a drop, as UD allows.
        self.inbound.retain(|inbound| !inbound.socket.is_hung_up());
        self.ways.retain(|_, way| match way {
            Way::Udp { .. } => true,
            Way::Offered { socket, looks, .. } => {
                *looks += 1;
                *looks <= LOOKS && !socket.is_hung_up()
            }
            Way::Ring(outbound) => !outbound.socket.is_hung_up(),
        });
    }

    /// Takes packets out of the rings, as many as have room in `buffer`; whether there were any.
    #[inline]
    pub(in crate::stream) fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool {
        let before = packets.len();
        let count = self.inbound.len();
        for turn in 0..count {
            let at = (self.next + turn) % count.max(1);
            let Some(inbound) = self.inbound.get_mut(at) else {
                break;
            };
            let places = buffer.as_chunks_mut::<PACKET_ROOM>().0;
            for place in places.iter_mut().skip(packets.len() - before) {
                match inbound.take(self.local, place) {
                    Ok(Some(packet)) => packets.push(packet),
                    Ok(None) => break,
                    Err(Gone) => {
                        self.inbound.swap_remove(at);
                        self.next = 0;
                        return packets.len() > before;
                    }
                }
            }
        }
        self.next = (self.next + 1) % count.max(1);
        packets.len() > before
    }

    /// The socket was read and has nothing: what is in the rings comes next.
    pub(in crate::stream) fn note_socket_empty(&mut self) {
        for inbound in &mut self.inbound {
            if let Ok(Some(header)) = inbound.header() {
                inbound.by_udp = header.by_udp;
            }
        }
    }

    /// Whether there is something in the rings. Behind a call of [`receive`](Self::receive) that
    /// took nothing, it waits for packets that come by UDP: those are to be taken one by one.
    #[inline]
    pub(in crate::stream) fn has_data(&mut self) -> bool {
        self.inbound.iter_mut().any(Inbound::has_data)
    }

    /// Datagrams came by UDP: their senders may have offered rings before.
    pub(in crate::stream) fn arrived(&mut self, packets: &[Incoming]) {
        for packet in packets {
            let from = |inbound: &&mut Inbound| inbound.sender == packet.source;
            if let Some(inbound) = self.inbound.iter_mut().find(from) {
                inbound.by_udp = inbound.by_udp.wrapping_add(1);
            }
        }
        let mut looks = LOOKED_AT;
        while let Some(socket) = self.listener.accept(&mut looks) {
            let _ = self.take_up(socket, packets);
        }
    }

    fn take_up(&mut self, socket: LocalSocket, packets: &[Incoming]) -> Option<()> {
        // A sender makes its offer as soon as it has connected.
        let descriptors = self.office.local.descriptors();
        let (message, mut passed) = messages::receive::<Greeting>(&socket, false, descriptors).ok()?;
        message.is_of_datagrams().then_some(())?;
        self.forget_peers();
        (self.inbound.len() < INBOUND).then_some(())?;
        let share = Share::take(&self.office.rings, RINGS)?;
        let (memory, _) = passed.take(|fd| SharedMemory::open(fd, layout::MEMORY)).ok()?;
        let memory = Arc::new(memory);
        let slot = self.office.bell.slot()?;
        slot.bind(self.qid);
        let answer = Greeting::new(message.initiator(), slot.number);
        messages::send(&socket, &answer, &slot.bell.passed()).ok()?;
        let sender = message.initiator();
        // The offer came right before the sender's first datagram.
        let counted = packets.iter().filter(|packet| packet.source == sender).count();
        self.inbound.push(Inbound {
            receiver: Receiver::new(memory.clone(), Direction::FromInitiator),
            back: Sender::new(memory, Direction::FromResponder),
            socket,
            slot,
            sender,
            by_udp: counted as u32,
            header: None,
            _share: share,
        });
        Some(())
    }
}
