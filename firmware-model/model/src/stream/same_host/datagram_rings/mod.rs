//! Datagrams between queue pairs of kind UD on one host: through a ring in shared memory for each
//! pair of ports, in addition to the UDP sockets.
//!
//! A UDP port also listens on an abstract unix socket that is named by its address. Before its
//! first datagram to a port, a sender offers a ring there. The receiver reads the offer when that
//! datagram arrives, and answers with its notification page; from then on the sender's datagrams go
//! into the ring. Without an answer, while the ring is full, and to other users' processes,
//! datagrams go by UDP.
//!
//! Datagrams of one port to another stay in order: each datagram in the ring comes with the number
//! of datagrams that the sender had sent by UDP before it, and the receiver takes those first. It
//! does not wait for datagrams that UDP has lost.

#[cfg(test)]
mod tests;

use super::by_file::ByFile;
use super::layout::Direction;
use super::messages::{Greeting, LocalSocket};
use super::notification::{NotificationPage, PeerPage, Slot};
use super::port_names::{LocalListener, PortNames, Protocol};
use super::ring::{RingReceiver, RingSender};
use super::{layout, messages};
use crate::host::{Piece, PieceMut, SharedMemory};
use crate::memory::reserve;
use crate::stream::datagram::{Incoming, Outgoing, PACKET_ROOM};
use crate::tuning::{
    OFFER_AGAIN_AFTER, OFFER_LOOK_EVERY, OFFER_LOOKS, OFFERS_LOOKED_AT, RECEIVER_CHECK_EVERY,
};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use urnic_device::stream::{ip_of, octets_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most rings that end at one port.
const INBOUND: usize = 64;
/// Ports that a sender remembers.
const KNOWN: usize = 4096;

/// The state of a device for the datagram rings of all its ports.
#[derive(Debug)]
pub(in crate::stream) struct DatagramRings {
    local: Arc<PortNames>,
    notifications: Arc<NotificationPage>,
    peers: Arc<ByFile<PeerPage>>,
    rings: Arc<AtomicUsize>,
    ports: Arc<AtomicUsize>,
}

impl DatagramRings {
    pub(super) fn new(
        local: &Arc<PortNames>,
        notifications: &Arc<NotificationPage>,
        peers: &Arc<ByFile<PeerPage>>,
    ) -> DatagramRings {
        DatagramRings {
            local: local.clone(),
            notifications: notifications.clone(),
            peers: peers.clone(),
            rings: Arc::default(),
            ports: Arc::default(),
        }
    }
}

/// The way of datagrams to a port.
#[derive(Debug)]
enum Way {
    /// By UDP, for this number of datagrams.
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
        /// The number of checks for the answer since, at intervals.
        looks: u32,
    },
    Ring(Box<Outbound>),
}

/// The rings of a port.
#[derive(Debug)]
pub(in crate::stream) struct DatagramPort {
    datagram_rings: Arc<DatagramRings>,
    /// The socket at which other processes leave their offers.
    listener: LocalListener,
    local: SocketAddr,
    ways: HashMap<SocketAddr, Way>,
    inbound: Vec<Inbound>,
    /// The inbound ring to be read first.
    next: usize,
    qid: u32,
    _share: Share,
}

impl DatagramPort {
    /// The rings of a port that was bound; `None`: others cannot find it.
    pub(in crate::stream) fn open(
        datagram_rings: &Arc<DatagramRings>,
        local: SocketAddr,
    ) -> Option<DatagramPort> {
        let share = Share::take(&datagram_rings.ports, PORTS)?;
        let listener = datagram_rings.local.listen(Protocol::Udp, local).ok()?;
        Some(DatagramPort {
            datagram_rings: datagram_rings.clone(),
            listener,
            local,
            ways: HashMap::new(),
            inbound: Vec::new(),
            next: 0,
            qid: 0,
            _share: share,
        })
    }

    /// Assigns the datagrams that arrive to this queue pair.
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
                if *by_udp < OFFER_LOOK_EVERY || by_udp.is_multiple_of(OFFER_LOOK_EVERY) {
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

    /// Offers a ring to a port, unless it got an offer recently.
    #[cold]
    fn offer(&mut self, packet: &Outgoing) {
        let destination = packet.destination;
        if self.ways.len() >= KNOWN && !self.ways.contains_key(&destination) {
            self.ways.retain(|_, way| matches!(way, Way::Ring(_)));
        }
        let way = self.offered(packet).unwrap_or(Way::Udp {
            left: OFFER_AGAIN_AFTER,
        });
        self.ways.insert(destination, way);
    }

    fn offered(&self, packet: &Outgoing) -> Option<Way> {
        if packet.destination.ip().is_multicast() {
            return None;
        }
        let socket = self
            .datagram_rings
            .local
            .connect(Protocol::Udp, packet.destination)?;
        let share = Share::take(&self.datagram_rings.rings, RINGS)?;
        let watch = self.datagram_rings.notifications.slot()?;
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
        let descriptors = self.datagram_rings.local.descriptors();
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
        }) = self.ways.insert(
            destination,
            Way::Udp {
                left: OFFER_AGAIN_AFTER,
            },
        )
        else {
            return;
        };
        let Ok((message, mut passed)) = answer else {
            return;
        };
        let Ok(notifications) = passed.notifications(&self.datagram_rings.peers, false) else {
            return;
        };
        tracing::debug!(%destination, "datagrams to this port pass through memory");
        let outbound = Outbound {
            sender: RingSender::at_full_length(memory.clone(), Direction::FromInitiator),
            memory,
            by_udp,
            socket,
            notifications,
            slot: message.slot(),
            overflowed: false,
            count: 0,
            owner: getpid(),
            _watch: watch,
            _share: share,
        };
        self.ways.insert(destination, Way::Ring(Box::new(outbound)));
    }

    /// Drops rings whose other end has ended.
    pub(in crate::stream) fn forget_peers(&mut self) {
        // Datagrams left in the ring of a sender that has ended are dropped, as UD permits.
        self.inbound.retain(|inbound| !inbound.socket.is_hung_up());
        self.ways.retain(|_, way| match way {
            Way::Udp { .. } => true,
            Way::Offered { socket, looks, .. } => {
                *looks += 1;
                *looks <= OFFER_LOOKS && !socket.is_hung_up()
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
            for (index, place) in places.iter_mut().enumerate().skip(packets.len() - before) {
                match inbound.take(self.local, place) {
                    Ok(Some(packet)) => packets.push(Incoming {
                        at: index * PACKET_ROOM,
                        ..packet
                    }),
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

    /// Notes that the socket was found empty: the datagrams that were in the rings before, at the
    /// last call of [`look`](Self::look), wait for nothing that comes by UDP.
    pub(in crate::stream) fn note_socket_empty(&mut self) {
        for inbound in &mut self.inbound {
            if let Some(by_udp) = inbound.awaited.take() {
                inbound.by_udp = by_udp;
            }
        }
    }

    /// Whether the rings have datagrams, before the socket is read. If a call of
    /// [`receive`](Self::receive) took none nevertheless, the next datagram comes by UDP: the
    /// caller must take those one by one.
    pub(in crate::stream) fn look(&mut self) -> bool {
        let mut found = false;
        for inbound in &mut self.inbound {
            found |= inbound.has_data();
            inbound.awaited = inbound.header().ok().flatten().map(|header| header.by_udp);
        }
        found
    }

    /// Whether the rings have datagrams.
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
        let mut looks = OFFERS_LOOKED_AT;
        while let Some(socket) = self.listener.accept(&mut looks) {
            let _ = self.take_up(socket, packets);
        }
    }

    fn take_up(&mut self, socket: LocalSocket, packets: &[Incoming]) -> Option<()> {
        // A sender makes its offer as soon as it has connected.
        let descriptors = self.datagram_rings.local.descriptors();
        let (message, mut passed) = messages::receive::<Greeting>(&socket, false, descriptors).ok()?;
        message.is_of_datagrams().then_some(())?;
        self.forget_peers();
        (self.inbound.len() < INBOUND).then_some(())?;
        let share = Share::take(&self.datagram_rings.rings, RINGS)?;
        let (memory, _) = passed.take(|fd| SharedMemory::open(fd, layout::MEMORY)).ok()?;
        let memory = Arc::new(memory);
        let slot = self.datagram_rings.notifications.slot()?;
        slot.bind(self.qid);
        let answer = Greeting::new(message.initiator(), slot.number);
        messages::send(&socket, &answer, &slot.notifications.passed()).ok()?;
        let sender = message.initiator();
        // The offer came right before the sender's first datagram.
        let counted = packets.iter().filter(|packet| packet.source == sender).count();
        self.inbound.push(Inbound {
            receiver: RingReceiver::new(memory.clone(), Direction::FromInitiator),
            back: RingSender::new(memory, Direction::FromResponder),
            socket,
            slot,
            sender,
            by_udp: counted as u32,
            header: None,
            awaited: None,
            _share: share,
        });
        Some(())
    }
}

// The receiver's end of a ring of datagrams.

/// A ring from another port.
#[derive(Debug)]
struct Inbound {
    receiver: RingReceiver,
    /// The sender of the other direction. It sends no bytes; its end shows that this receiver has
    /// ended.
    back: RingSender,
    socket: LocalSocket,
    slot: Slot,
    sender: SocketAddr,
    /// Datagrams that came from the sender by UDP since its offer.
    by_udp: u32,
    /// The next packet of the ring, if its header was taken.
    header: Option<Header>,
    /// The number of datagrams by UDP that it waited for when the socket was last read. What the
    /// sender sends meanwhile may be in the socket.
    awaited: Option<u32>,
    /// Given back with it.
    _share: Share,
}

impl Inbound {
    /// Whether there are bytes of a packet.
    fn has_data(&mut self) -> bool {
        self.header.is_some() || !self.receiver.is_empty()
    }

    /// The header of the next packet.
    fn header(&mut self) -> Result<Option<Header>, Gone> {
        if self.header.is_none() && !self.receiver.is_empty() {
            let mut bytes = [0; HEADER];
            self.take_whole(&mut bytes)?;
            self.header = Some(Header::read_from_bytes(&bytes).map_err(|_| Gone)?);
        }
        Ok(self.header)
    }

    /// A sender publishes whole packets only.
    fn take_whole(&mut self, into: &mut [u8]) -> Result<(), Gone> {
        match self.receiver.receive(&mut [PieceMut::of(into)]) {
            Ok((n, _)) if n == into.len() => Ok(()),
            _ if into.is_empty() => Ok(()),
            _ => Err(Gone),
        }
    }

    /// Takes the next packet into the beginning of `place`, if there is one and all that the
    /// sender sent before it by UDP has come.
    fn take(&mut self, local: SocketAddr, place: &mut [u8]) -> Result<Option<Incoming>, Gone> {
        let Some(header) = self.header()? else {
            return Ok(None);
        };
        // Positions on a circle.
        if header.by_udp.wrapping_sub(self.by_udp).cast_signed() > 0 {
            return Ok(None);
        }
        let len = usize::from(header.len);
        self.take_whole(place.get_mut(..len).ok_or(Gone)?)?;
        self.header = None;
        let destination = ip_of(&header.destination);
        let own = local.ip().to_canonical();
        if !own.is_unspecified() && own != destination {
            return Err(Gone);
        }
        Ok(Some(Incoming {
            at: 0,
            len,
            source: SocketAddr::new(ip_of(&header.source), self.sender.port()),
            destination,
            traffic_class: header.traffic_class,
        }))
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        if self.slot.is_own() {
            self.back.leave();
        }
    }
}

// The sender's end of a ring of datagrams.

/// A ring to another port.
#[derive(Debug)]
struct Outbound {
    sender: RingSender,
    memory: Arc<SharedMemory>,
    /// Datagrams that went by UDP since the offer.
    by_udp: u32,
    /// Has no data; it shows the end of the receiver.
    socket: LocalSocket,
    notifications: Arc<PeerPage>,
    slot: u32,
    /// Datagrams go by UDP, because the ring was full.
    overflowed: bool,
    count: u32,
    /// The process that has the port. A forked child has a copy, which is not its own.
    owner: Pid,
    /// The slot by which the device checks at intervals that the receiver still exists.
    _watch: Slot,
    /// Given back with it.
    _share: Share,
}

impl Drop for Outbound {
    fn drop(&mut self) {
        if getpid() == self.owner {
            self.sender.leave();
        }
    }
}

impl Outbound {
    /// Puts a packet into the ring; `false`: it is to go by UDP.
    fn send(&mut self, packet: &Outgoing, bytes: &[u8]) -> Result<bool, Gone> {
        self.count = self.count.wrapping_add(1);
        let looks = self.count.is_multiple_of(RECEIVER_CHECK_EVERY) || self.overflowed;
        if self.is_left() || (looks && self.socket.is_hung_up()) {
            return Err(Gone);
        }
        if self.overflowed && !self.sender.is_drained().map_err(|_| Gone)? {
            self.by_udp = self.by_udp.wrapping_add(1);
            return Ok(false);
        }
        let header = Header {
            // No packet is longer than `PACKET_ROOM`.
            len: bytes.len() as u16,
            traffic_class: packet.traffic_class,
            reserved: 0,
            by_udp: self.by_udp,
            source: octets_of(packet.source),
            destination: octets_of(packet.destination.ip()),
        };
        let pieces = [Piece::of(header.as_bytes()), Piece::of(bytes)];
        self.overflowed = !self.sender.send_whole(&pieces).map_err(|_| Gone)?;
        if self.overflowed {
            self.by_udp = self.by_udp.wrapping_add(1);
            return Ok(false);
        }
        self.notifications.notify(self.slot);
        Ok(true)
    }

    /// Whether the receiver has closed its port.
    fn is_left(&self) -> bool {
        RingReceiver::is_marked_left(&self.memory, Direction::FromResponder)
    }
}

// The parts that both ends of a ring of datagrams use.

/// The header before a packet in the ring.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    len: u16,
    traffic_class: u8,
    reserved: u8,
    /// Datagrams that the sender sent by UDP before, since it offered the ring.
    by_udp: u32,
    source: [u8; 16],
    destination: [u8; 16],
}

const HEADER: usize = size_of::<Header>();

/// The other end of a ring has ended, or wrote an impossible value.
#[derive(Debug)]
struct Gone;

// The limits of a device on rings of datagrams.

/// Most rings of a device, in both directions together.
const RINGS: usize = 512;
/// Most ports of a device that others can find: each takes a descriptor more.
const PORTS: usize = 128;

/// One of the rings, or of the ports, that a device may have.
#[derive(Debug)]
struct Share(Arc<AtomicUsize>);

impl Share {
    fn take(taken: &Arc<AtomicUsize>, most: usize) -> Option<Share> {
        reserve(taken, 1, most).then(|| Share(taken.clone()))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
