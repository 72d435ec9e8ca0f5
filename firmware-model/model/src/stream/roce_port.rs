//! UDP port 4791, at which the packets of RoCE v2 arrive (InfiniBand Architecture Specification,
//! annex A17). The queue pairs of a device share it: a packet names its queue pair.
//!
//! Each reader of the port gives the packets of other queue pairs to their inboxes. Packets leave
//! by a socket of the queue pair, whose port differs, so that routers spread connections over
//! paths.

use super::datagram::{BATCH, DatagramOptions, DatagramSocket, Incoming, PACKET_ROOM};
use super::{ANYWHERE, Network};
use crate::counters::{Counter, Counters};
use crate::tuning::DATAGRAM_RX_BATCHES;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use urnic_sync::Mutex;
use urnic_wire::roce::{MULTICAST_QPN, UDP_PORT, destination_of};

/// Packets that wait for a queue pair at most: as many as a peer may have in flight.
const INBOX: usize = 1024;

/// The sockets of the port, and those by which packets leave.
const OPTIONS: DatagramOptions = DatagramOptions {
    shared: false,
    ipv6_only: false,
    reports_refused: false,
    long_packets: false,
    by_udp: true,
};

/// The port, on the addresses of a device.
#[derive(Debug)]
pub(crate) struct RocePorts {
    network: Arc<dyn Network>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// One socket for all addresses, or one for each; bound for the first queue pair.
    sockets: Vec<Box<dyn DatagramSocket>>,
    /// By the number of the queue pair on the wire.
    inboxes: HashMap<u32, Inbox>,
    buffer: Vec<u8>,
    incoming: Vec<Incoming>,
}

/// Packets for a queue pair that another one has read.
#[derive(Debug)]
struct Inbox {
    qid: u32,
    from: Sources,
    /// The multicast groups whose packets are kept, too.
    groups: Vec<IpAddr>,
    packets: VecDeque<(Incoming, Box<[u8]>)>,
}

/// The sources of packets that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sources {
    /// None: the peer is not named yet.
    None,
    /// From the first address to the second one.
    Peer(IpAddr, IpAddr),
    /// Any: datagrams.
    Any,
}

impl Inbox {
    /// Whether a packet to its number is kept. A stranger must not take the room of the peer.
    fn keeps(&self, packet: &Incoming) -> bool {
        match self.from {
            Sources::None => false,
            Sources::Peer(source, own) => (packet.source.ip(), packet.destination) == (source, own),
            Sources::Any => true,
        }
    }

    fn put(&mut self, packet: &Incoming, bytes: &[u8], done: &mut Dispatched) {
        match self.packets.len() < INBOX {
            true => self.packets.push_back((*packet, bytes.into())),
            false => done.dropped += 1,
        }
        if !done.woken.contains(&self.qid) {
            done.woken.push(self.qid);
        }
    }
}

/// What came of the packets that were read.
#[derive(Debug, Default)]
pub(crate) struct Dispatched {
    /// The queue pairs that got packets.
    pub(crate) woken: Vec<u32>,
    /// Packets for no queue pair, or not from its peer.
    pub(crate) strange: u64,
    /// Packets for queue pairs with full inboxes.
    pub(crate) dropped: u64,
}

impl Dispatched {
    /// Counts the packets that were dropped.
    pub(crate) fn count(&self, counters: &Counters) {
        for (counter, packets) in [
            (Counter::RxDatagramErrors, self.strange),
            (Counter::RxDatagramDrops, self.dropped),
        ] {
            if packets > 0 {
                counters.add_shared(counter, packets);
            }
        }
    }
}

impl State {
    /// Reads a batch of each socket into inboxes; returns whether there may be more.
    fn dispatch(&mut self, done: &mut Dispatched) -> bool {
        self.buffer.resize(BATCH * PACKET_ROOM, 0);
        let mut more = false;
        for socket in &mut self.sockets {
            self.incoming.clear();
            socket.receive(&mut self.buffer, &mut self.incoming);
            more |= self.incoming.len() == BATCH;
            for (packet, place) in self.incoming.iter().zip(self.buffer.chunks(PACKET_ROOM)) {
                let Some(bytes) = place.get(..packet.len) else {
                    continue;
                };
                let qpn = destination_of(bytes);
                if packet.destination.is_multicast() && qpn == Some(MULTICAST_QPN) {
                    let is_member = |inbox: &&mut Inbox| inbox.groups.contains(&packet.destination);
                    let members = self.inboxes.values_mut().filter(is_member);
                    members.for_each(|inbox| inbox.put(packet, bytes, done));
                    continue;
                }
                let inbox = qpn.and_then(|qpn| self.inboxes.get_mut(&qpn));
                match inbox.filter(|inbox| inbox.keeps(packet)) {
                    Some(inbox) => inbox.put(packet, bytes, done),
                    None => done.strange += 1,
                }
            }
        }
        more
    }
}

impl RocePorts {
    pub(crate) fn new(network: Arc<dyn Network>) -> RocePorts {
        RocePorts {
            network,
            state: Mutex::default(),
        }
    }

    /// Opens the port for the queue pair with this number on the wire, on `addresses`. Returns true
    /// if its sockets are new: they must be watched.
    ///
    /// # Errors
    /// Those of [`Network::bind_datagrams`].
    pub(crate) fn open(
        self: &Arc<Self>,
        addresses: &[IpAddr],
        qpn: u32,
        qid: u32,
    ) -> Result<(RocePort, bool), Errno> {
        let any = addresses.first().map_or(ANYWHERE.ip(), |ip| *ip);
        let own = self.network.bind_datagrams(SocketAddr::new(any, 0), OPTIONS)?;
        let mut state = self.state.lock();
        if state.inboxes.contains_key(&qpn) {
            return Err(Errno::BUSY);
        }
        let is_new = state.sockets.is_empty();
        if is_new {
            let bind = |ip: &IpAddr| {
                self.network
                    .bind_datagrams(SocketAddr::new(*ip, UDP_PORT), OPTIONS)
            };
            state.sockets = addresses.iter().map(bind).collect::<Result<_, _>>()?;
        }
        let inbox = Inbox {
            qid,
            from: Sources::None,
            groups: Vec::new(),
            packets: VecDeque::new(),
        };
        state.inboxes.insert(qpn, inbox);
        let port = RocePort {
            ports: self.clone(),
            qpn,
            own,
        };
        Ok((port, is_new))
    }

    /// Has `watch` watch the sockets.
    pub(crate) fn watch<E>(&self, mut watch: impl FnMut(BorrowedFd<'_>) -> Result<(), E>) -> Result<(), E> {
        let state = self.state.lock();
        let mut descriptors = state.sockets.iter().filter_map(|socket| socket.descriptor());
        descriptors.try_for_each(|fd| watch(fd.as_fd()))
    }

    /// Shows the descriptor of each socket.
    pub(crate) fn each_socket(&self, mut show: impl FnMut(BorrowedFd<'_>)) {
        let (Ok(()) | Err(())) = self.watch(|fd| {
            show(fd);
            Ok::<(), ()>(())
        });
    }

    /// Takes packets that have arrived; returns whether there may be more.
    pub(crate) fn dispatch(&self) -> (Dispatched, bool) {
        let mut done = Dispatched::default();
        let mut state = self.state.lock();
        let more = (0..DATAGRAM_RX_BATCHES).all(|_| state.dispatch(&mut done));
        (done, more)
    }
}

/// The port, as a queue pair uses it.
#[derive(Debug)]
pub(crate) struct RocePort {
    ports: Arc<RocePorts>,
    qpn: u32,
    /// The socket by which it sends.
    own: Box<dyn DatagramSocket>,
}

impl RocePort {
    /// Keeps packets from these sources from now on. What waits is dropped.
    pub(crate) fn keep_from(&mut self, from: Sources) {
        if let Some(inbox) = self.ports.state.lock().inboxes.get_mut(&self.qpn) {
            inbox.from = from;
            inbox.packets.clear();
        }
    }

    /// Keeps packets to these multicast groups. Somebody else joins them.
    pub(crate) fn keep_groups(&mut self, groups: impl Iterator<Item = IpAddr>) {
        if let Some(inbox) = self.ports.state.lock().inboxes.get_mut(&self.qpn) {
            inbox.groups = groups.collect();
        }
    }

    /// Whether packets to all addresses arrive at the port, those of multicast groups included.
    pub(crate) fn is_everywhere(&self) -> bool {
        self.own.local().ip().is_unspecified()
    }

    /// The socket by which the queue pair sends.
    pub(crate) fn sender(&self) -> &dyn DatagramSocket {
        &*self.own
    }

    /// The socket by which the queue pair sends.
    pub(crate) fn sender_mut(&mut self) -> &mut dyn DatagramSocket {
        &mut *self.own
    }

    /// The port from which the packets come.
    pub(crate) fn source(&self) -> u16 {
        self.own.local().port()
    }

    /// The descriptor to poll for room.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.own.descriptor()
    }

    /// Takes the packets for the queue pair that have arrived, as many as have [`PACKET_ROOM`] in
    /// `buffer`; returns what came of packets that were read for it, with the other queue pairs
    /// that got some.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> Dispatched {
        let mut done = Dispatched::default();
        let mut state = self.ports.state.lock();
        let is_empty = |state: &State| {
            let inbox = state.inboxes.get(&self.qpn);
            inbox.is_none_or(|inbox| inbox.packets.is_empty())
        };
        if is_empty(&state) {
            state.dispatch(&mut done);
        }
        let Some(inbox) = state.inboxes.get_mut(&self.qpn) else {
            return done;
        };
        done.woken.retain(|qid| *qid != inbox.qid);
        for place in buffer.chunks_exact_mut(PACKET_ROOM) {
            let Some((packet, bytes)) = inbox.packets.pop_front() else {
                break;
            };
            if let Some(place) = place.get_mut(..bytes.len()) {
                place.copy_from_slice(&bytes);
                packets.push(packet);
            }
        }
        done
    }
}

impl Drop for RocePort {
    /// The port is free for others after the last queue pair.
    fn drop(&mut self) {
        let mut state = self.ports.state.lock();
        state.inboxes.remove(&self.qpn);
        if state.inboxes.is_empty() {
            state.sockets.clear();
        }
    }
}
