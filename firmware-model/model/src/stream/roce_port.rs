//! UDP port 4791, at which the packets of RoCE v2 arrive (InfiniBand Architecture Specification,
//! annex A17). The queue pairs of a device share it, and the devices of a user: a packet names its
//! queue pair, and the number of the queue pair names the device.
//!
//! A device is a member of those that have the port. The kernel gives each flow (both addresses and
//! ports) to some member, which passes packets of others on ([`members`]). A member opens a socket
//! for the flow of a connection ([`State::open_flow`]), which the kernel then prefers.
//!
//! A queue pair reads its packets into its own buffer, and uses them there. Each reader of the port
//! gives the packets of other queue pairs to their inboxes. Packets leave
//! by a socket of the queue pair, whose port differs, so that routers spread connections over
//! paths. See docs/design/roce-wire.md.

mod forwarded;
mod management;
mod members;
mod ready;
#[cfg(test)]
mod tests;

use super::datagram::{BATCH, DatagramOptions, DatagramSocket, Incoming, LONG_ROOM, PACKET_ROOM};
use super::descriptor::Descriptors;
use super::same_host::PortNames;
use super::{ANYWHERE, Network};
use crate::counters::{Counter, Counters};
use crate::sys::datagrams::scope_of;
use crate::sys::thread_start::ThreadStart;
use crate::tuning::DATAGRAM_RX_BATCHES;
use members::{Members, Message, Passed, Recipient};
use ready::{Ready, Source};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::collections::{HashMap, VecDeque};
use std::mem;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use urnic_sync::Mutex;
use urnic_wire::mad::MANAGEMENT_QPN;
use urnic_wire::roce::{MULTICAST_QPN, UDP_PORT, destination_of};

/// Packets that wait for a queue pair at most: as many as a peer may have in flight.
const INBOX: usize = 1024;
/// Packets that wait for the queue pairs of a device at most.
const INBOXES: usize = 16 << 10;
/// Messages that are read into inboxes in one call: each is a packet, or several that the system
/// has merged.
const MESSAGES: usize = 4;
/// Sockets for single flows at most: the kernel may compare a packet with each of them.
const FLOWS: usize = 16;
/// Sockets for flows that a queue pair opens at most, because its peer's port changes.
const MOVES: u32 = 8;
/// A queue pair that polls reads its own socket, and at every fourth time all that are ready.
const POLLS_PER_LOOK: u32 = 4;

/// The sockets of the port.
const PORT: DatagramOptions = DatagramOptions {
    by_udp: true,
    merged: true,
    ..DatagramOptions::EXCLUSIVE
};

/// The sockets by which packets leave.
const SENDER: DatagramOptions = DatagramOptions {
    only_sends: true,
    merged: false,
    ..PORT
};

/// The port, on the addresses of a device.
#[derive(Debug)]
pub(crate) struct RocePorts {
    network: Arc<dyn Network>,
    descriptors: Arc<Descriptors>,
    start: ThreadStart,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Present while there are queue pairs.
    open: Option<Open>,
    /// By the number of the queue pair on the wire.
    inboxes: HashMap<u32, Inbox>,
    /// Packets in all of them.
    waiting: usize,
    /// Sockets of flows that no queue pair has any more.
    closing: Vec<u32>,
    buffer: Vec<u8>,
    incoming: Vec<Incoming>,
    /// The number of polls.
    polls: u32,
}

/// The port's sockets.
#[derive(Debug)]
struct Open {
    network: Arc<dyn Network>,
    ready: Ready,
    sockets: HashMap<u32, Box<dyn DatagramSocket>>,
    /// The sockets for all flows: one for all addresses, or one for each.
    any: Vec<(IpAddr, u32)>,
    flows: Vec<(Flow, Readers)>,
    /// None in a process that does not belong to one user: it has the port alone.
    members: Option<Members>,
    /// The process that has the port. A forked child has a copy.
    process: Pid,
}

/// A socket for one flow.
#[derive(Debug, Clone, Copy)]
struct Flow {
    peer: SocketAddr,
    own: IpAddr,
    socket: u32,
}

/// The queue pairs whose peers have a flow. If there are none, its socket is to be closed.
type Readers = Vec<u32>;

/// Packets for a queue pair that another one has read.
#[derive(Debug)]
struct Inbox {
    qid: u32,
    from: Sources,
    /// The multicast groups whose packets are kept, too.
    groups: Vec<IpAddr>,
    /// The socket for the flow of the peer, if there is one.
    flow: Option<Flow>,
    /// Sockets for flows that may still be opened.
    moves: u32,
    packets: VecDeque<(Incoming, Box<[u8]>)>,
}

/// The sources of packets that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sources {
    /// None: the peer is not named yet.
    None,
    /// From the first address, of any port but in its scope, to the second one.
    Peer(SocketAddr, IpAddr),
    /// Any: datagrams.
    Any,
}

impl Inbox {
    /// Whether a packet to its number is kept. A stranger must not take the room of the peer.
    fn keeps(&self, packet: &Incoming) -> bool {
        match self.from {
            Sources::None => false,
            Sources::Peer(source, own) => packet.destination == own && is_same_host(packet.source, source),
            Sources::Any => true,
        }
    }

    fn put(&mut self, packet: &Incoming, bytes: &[u8], waiting: &mut usize, done: &mut Dispatched) {
        match self.packets.len() < INBOX && *waiting < INBOXES {
            true => {
                self.packets.push_back((*packet, bytes.into()));
                *waiting += 1;
            }
            false => done.dropped += 1,
        }
        done.wake(self.qid);
    }
}

/// Whether a packet from `source` is from the host of a peer.
pub(crate) fn is_same_host(source: SocketAddr, peer: SocketAddr) -> bool {
    // A peer without a scope is on no particular network.
    source.ip() == peer.ip() && [0, scope_of(source)].contains(&scope_of(peer))
}

/// What came of the packets that were read.
#[derive(Debug, Default)]
pub(crate) struct Dispatched {
    /// The queue pairs that got packets.
    pub(crate) woken: Vec<u32>,
    /// Packets for no queue pair, or not from its peer.
    pub(crate) strange: u64,
    /// Packets for queue pairs with full inboxes, or for other members that do not read, and those
    /// that found no room in a socket.
    pub(crate) dropped: u64,
    /// There may be more packets for the queue pair that reads.
    pub(crate) has_more: bool,
}

impl Dispatched {
    fn wake(&mut self, qid: u32) {
        if !self.woken.contains(&qid) {
            self.woken.push(qid);
        }
    }

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

impl Open {
    /// Binds the port on `addresses`.
    fn new(ports: &RocePorts, addresses: &[IpAddr]) -> Result<Open, Errno> {
        let names = PortNames::new(&ports.descriptors, ports.start);
        let names = names.inspect_err(|errno| {
            tracing::debug!(%errno, "UDP port 4791 is not shared with other processes");
        });
        let members = names.ok().map(|names| Members::new(Arc::new(names), addresses));
        let mut open = Open {
            network: ports.network.clone(),
            ready: Ready::new(&ports.descriptors)?,
            sockets: HashMap::new(),
            any: Vec::new(),
            flows: Vec::new(),
            members,
            process: getpid(),
        };
        for ip in addresses {
            let socket = open.bind(SocketAddr::new(*ip, UDP_PORT), None)?;
            open.any.push((*ip, socket));
        }
        Ok(open)
    }

    /// Binds a socket of the port, for one peer or for any.
    fn bind(&mut self, local: SocketAddr, peer: Option<SocketAddr>) -> Result<u32, Errno> {
        let options = DatagramOptions {
            shared_by_user: self.members.is_some(),
            all_groups: peer.is_none(),
            peer,
            ..PORT
        };
        let socket = self.network.bind_datagrams(local, options)?;
        let descriptor = socket.descriptor().ok_or(Errno::OPNOTSUPP)?;
        let id = self.ready.add(descriptor, Source::Socket)?;
        self.sockets.insert(id, socket);
        Ok(id)
    }

    /// The socket for all flows to an address.
    fn any_of(&self, ip: IpAddr) -> Option<u32> {
        let is_of = |of: &&(IpAddr, u32)| of.0 == ip || of.0.is_unspecified();
        self.any.iter().find(is_of).map(|(_, socket)| *socket)
    }

    /// The socket for the flow of a packet, which queue pair `qid` has from now on. The kernel
    /// prefers it to those of other members.
    fn flow_of(&mut self, packet: &Incoming, qid: u32) -> Option<Flow> {
        let ends = (packet.source, packet.destination);
        let is_of = |(flow, _): &&mut (Flow, Readers)| (flow.peer, flow.own) == ends;
        if let Some((known, readers)) = self.flows.iter_mut().find(is_of) {
            readers.push(qid);
            return Some(*known);
        }
        if self.flows.len() >= FLOWS {
            return None;
        }
        let (peer, own) = ends;
        let local = match (own, peer) {
            (IpAddr::V6(ip), SocketAddr::V6(peer)) => {
                SocketAddrV6::new(ip, UDP_PORT, 0, peer.scope_id()).into()
            }
            (ip, _) => SocketAddr::new(ip, UDP_PORT),
        };
        let socket = self.bind(local, Some(peer)).inspect_err(|errno| {
            tracing::debug!(%errno, %peer, "no socket for the packets of one peer");
        });
        let socket = socket.ok()?;
        let flow = Flow { peer, own, socket };
        self.flows.push((flow, vec![qid]));
        Some(flow)
    }

    fn readers(&mut self, socket: u32) -> Option<&mut Readers> {
        let is_it = |(flow, _): &&mut (Flow, Readers)| flow.socket == socket;
        self.flows.iter_mut().find(is_it).map(|(_, readers)| readers)
    }

    /// The queue pair that reads a socket alone.
    fn only_reader(&mut self, socket: u32) -> Option<u32> {
        match self.readers(socket).map(|readers| &readers[..]) {
            Some(&[reader]) => Some(reader),
            _ => None,
        }
    }

    /// A queue pair has no flow any more. Returns whether its socket is to be closed.
    fn release(&mut self, flow: Flow, qid: u32) -> bool {
        self.readers(flow.socket).is_some_and(|readers| {
            readers.retain(|reader| *reader != qid);
            readers.is_empty()
        })
    }

    /// Closes the socket of a flow that no queue pair has. The packets in it are lost.
    fn close_flow(&mut self, socket: u32) {
        if self.readers(socket).is_some_and(|readers| readers.is_empty()) {
            self.flows.retain(|(flow, _)| flow.socket != socket);
            self.sockets.remove(&socket);
        }
    }
}

/// How a packet came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    BySocket,
    /// From another member, which has found it to be for this one.
    Passed,
}

impl State {
    /// Reads a batch of each source that is ready, except the sockets of single queue pairs, which
    /// are woken. Returns whether there may be more: also after a source that had nothing, and
    /// after many sources, because others may have been left out.
    fn look(&mut self, done: &mut Dispatched) -> bool {
        let Some(open) = &mut self.open else {
            return false;
        };
        if let Some(members) = &mut open.members {
            members.begin();
        }
        let (mut found, mut count) = (false, 0);
        for source in open.ready.take() {
            count += 1;
            found |= match source {
                Source::Socket(id) => match self.open.as_mut().and_then(|open| open.only_reader(id)) {
                    Some(reader) => {
                        done.wake(reader);
                        false
                    }
                    None => self.read(id, done).is_some(),
                },
                Source::Member(id) => self.read_member(id, done),
                Source::Listener(id) => self.accept(id),
            };
        }
        found || count == ready::MOST
    }

    fn accept(&mut self, listener: u32) -> bool {
        match &mut self.open {
            Some(Open {
                members: Some(members),
                ready,
                ..
            }) => members.accept(listener, ready),
            _ => false,
        }
    }

    /// Reads a batch of a socket into inboxes. Returns whether there may be more; none if there is
    /// no such socket.
    fn read(&mut self, socket: u32, done: &mut Dispatched) -> Option<bool> {
        let (mut buffer, mut incoming) = (mem::take(&mut self.buffer), mem::take(&mut self.incoming));
        buffer.resize(MESSAGES * LONG_ROOM, 0);
        let read = self.read_for(None, socket, (&mut buffer, &mut incoming), done);
        (self.buffer, self.incoming) = (buffer, incoming);
        read
    }

    /// Reads a batch of a socket into `buffer`. The packets for queue pair `reader` are in
    /// `incoming` afterwards, those of others in inboxes. Returns whether there may be more; none
    /// if there is no such socket.
    fn read_for(
        &mut self,
        reader: Option<u32>,
        socket: u32,
        (buffer, incoming): (&mut [u8], &mut Vec<Incoming>),
        done: &mut Dispatched,
    ) -> Option<bool> {
        let socket = self.open.as_mut()?.sockets.get_mut(&socket)?;
        incoming.clear();
        let is_full = socket.receive(buffer, incoming);
        // A buffer that was full held more than a batch.
        if is_full {
            done.dropped += u64::from(socket.dropped());
        }
        incoming.retain(|packet| match packet.bytes(buffer) {
            Some(bytes) if bytes.len() <= PACKET_ROOM => {
                self.arrived(packet, bytes, (Way::BySocket, reader), done)
            }
            _ => {
                done.strange += 1;
                false
            }
        });
        Some(is_full)
    }

    /// Reads a batch of packets that another member has passed on; returns whether there is a
    /// connection with it.
    fn read_member(&mut self, id: u32, done: &mut Dispatched) -> bool {
        let members = self.open.as_ref().and_then(|open| open.members.as_ref());
        if !members.is_some_and(|members| members.is_connected(id)) {
            return false;
        }
        let mut buffer = mem::take(&mut self.buffer);
        buffer.resize(MESSAGES * LONG_ROOM, 0);
        for _ in 0..BATCH {
            let members = self.open.as_mut().and_then(|open| open.members.as_mut());
            let Some(members) = members else { break };
            match members.receive(id, &mut buffer) {
                Message::Packet(packet, bytes) => {
                    self.arrived(&packet, bytes, (Way::Passed, None), done);
                }
                Message::Nothing | Message::End => break,
            }
        }
        self.buffer = buffer;
        true
    }

    /// Puts a packet into the inbox of its queue pair, or passes it on to its member. Returns
    /// whether it is for `reader`, which takes it.
    fn arrived(
        &mut self,
        packet: &Incoming,
        bytes: &[u8],
        (way, reader): (Way, Option<u32>),
        done: &mut Dispatched,
    ) -> bool {
        let Some(qpn) = destination_of(bytes) else {
            done.strange += 1;
            return false;
        };
        let is_multicast = packet.destination.is_multicast();
        if is_multicast && qpn == MULTICAST_QPN {
            // Each member has a copy of its own.
            let is_in = |inbox: &&mut Inbox| inbox.groups.contains(&packet.destination);
            let inboxes = self.inboxes.values_mut().filter(is_in);
            inboxes.for_each(|inbox| inbox.put(packet, bytes, &mut self.waiting, done));
            return false;
        }
        if !is_multicast && !forwarded::can_be_passed(packet) {
            done.strange += 1;
            return false;
        }
        let is_management = qpn == MANAGEMENT_QPN;
        let inbox = self.inboxes.get_mut(&qpn);
        if way == Way::BySocket && !is_multicast && (is_management || inbox.is_none()) {
            let recipient = match is_management {
                true => management::recipient(bytes),
                false => Recipient::member((qpn >> 8) as u16),
            };
            match recipient.map_or(Passed::Nobody, |to| self.pass(to, packet, bytes)) {
                Passed::On => return false,
                // An answer that there is no such connection would be final.
                Passed::Full | Passed::Unknown => {
                    done.dropped += 1;
                    return false;
                }
                // Queue pair 1 says that there is no such service, or connection.
                Passed::Nobody => {}
            }
        }
        let inbox = self.inboxes.get_mut(&qpn);
        let Some(inbox) = inbox.filter(|inbox| inbox.keeps(packet)) else {
            done.strange += 1;
            return false;
        };
        let is_readers = reader == Some(qpn);
        if !is_readers {
            inbox.put(packet, bytes, &mut self.waiting, done);
        }
        if inbox.flow.is_none_or(|flow| flow.peer != packet.source) {
            self.open_flow(qpn, packet, way);
        }
        is_readers
    }

    /// Passes a packet on. This member's own names are nobody.
    fn pass(&mut self, to: Recipient, packet: &Incoming, bytes: &[u8]) -> Passed {
        match self.open.as_mut().and_then(|open| open.members.as_mut()) {
            Some(members) if !members.has(to, packet.destination) => members.pass(to, packet, bytes),
            _ => Passed::Nobody,
        }
    }

    /// Opens a socket for the flow of a packet that is for queue pair `qpn` and from its peer: for
    /// the first one, and for one that another member has passed on. Else the kernel may give the
    /// next packets to another member, when members come or end, and that one may be stopped.
    fn open_flow(&mut self, qpn: u32, packet: &Incoming, way: Way) {
        let (Some(open), Some(inbox)) = (&mut self.open, self.inboxes.get_mut(&qpn)) else {
            return;
        };
        let is_shared = open.members.is_some();
        let is_wanted = is_shared && (way == Way::Passed || inbox.flow.is_none());
        let is_of_peer = matches!(inbox.from, Sources::Peer(..));
        if !is_wanted || !is_of_peer || inbox.moves == 0 {
            return;
        }
        // One that fails counts, too.
        inbox.moves -= 1;
        let qid = inbox.qid;
        if let Some(before) = inbox.flow.take()
            && open.release(before, qid)
        {
            self.closing.push(before.socket);
        }
        inbox.flow = open.flow_of(packet, qid);
    }

    /// Drops what waits for a queue pair, and its flow.
    fn forget(&mut self, qpn: u32) {
        let Some(inbox) = self.inboxes.get_mut(&qpn) else {
            return;
        };
        self.waiting -= mem::take(&mut inbox.packets).len();
        if let (Some(flow), Some(open)) = (inbox.flow.take(), &mut self.open)
            && open.release(flow, inbox.qid)
        {
            self.closing.push(flow.socket);
        }
    }

    /// Closes the sockets of flows that no queue pair has any more, after their packets are read,
    /// which may be for other queue pairs and members.
    fn close_flows(&mut self, done: &mut Dispatched) {
        while let Some(socket) = self.closing.pop() {
            let _ = (0..DATAGRAM_RX_BATCHES).all(|_| self.read(socket, done) == Some(true));
            // A queue pair may have taken it meanwhile.
            if let Some(open) = &mut self.open {
                open.close_flow(socket);
            }
        }
    }

    /// Reads for queue pair `qpn`, whose inbox is empty: its own socket into `place`, and now and
    /// then all that is ready, for the other queue pairs.
    fn poll(&mut self, qpn: u32, place: (&mut [u8], &mut Vec<Incoming>), done: &mut Dispatched) {
        let Some((open, inbox)) = self.open.as_mut().zip(self.inboxes.get(&qpn)) else {
            return;
        };
        let any = match inbox.from {
            Sources::Peer(_, own) => open.any_of(own),
            _ => open.any.first().map(|(_, socket)| *socket),
        };
        let socket = inbox.flow.map(|flow| flow.socket).or(any);
        if let Some(members) = &mut open.members {
            members.begin();
        }
        if let Some(socket) = socket {
            done.has_more = self.read_for(Some(qpn), socket, place, done).unwrap_or(false);
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_LOOK) {
            self.look(done);
        }
    }
}

impl RocePorts {
    pub(crate) fn new(
        network: Arc<dyn Network>,
        descriptors: Arc<Descriptors>,
        start: ThreadStart,
    ) -> RocePorts {
        RocePorts {
            network,
            descriptors,
            start,
            state: Mutex::default(),
        }
    }

    /// Opens the port for the queue pair with this number on the wire, on `addresses`. Queue pair 1
    /// may give the number of the member, which other numbers have in their upper 16 bits. Returns
    /// true if the sockets are new: they must be watched.
    ///
    /// # Errors
    /// Those of [`Network::bind_datagrams`]; `EBUSY`: a queue pair has the number.
    pub(crate) fn open(
        self: &Arc<Self>,
        addresses: &[IpAddr],
        (qpn, member): (u32, Option<u16>),
        qid: u32,
    ) -> Result<(RocePort, bool), Errno> {
        let any = addresses.first().map_or(ANYWHERE.ip(), |ip| *ip);
        let own = self.network.bind_datagrams(SocketAddr::new(any, 0), SENDER)?;
        let mut state = self.state.lock();
        if state.inboxes.contains_key(&qpn) {
            return Err(Errno::BUSY);
        }
        let is_new = state.open.is_none();
        let open = match state.open.take() {
            Some(open) => open,
            None => Open::new(self, addresses)?,
        };
        let open = state.open.insert(open);
        let name = Recipient::member(member.unwrap_or((qpn >> 8) as u16));
        let name = name.zip(open.members.as_mut()).and_then(|(name, members)| {
            let entered = members.enter(name, &mut open.ready).inspect_err(|errno| {
                tracing::warn!(%errno, qpn, "other processes cannot pass packets on to this queue pair");
            });
            entered.is_ok().then_some(name)
        });
        let inbox = Inbox {
            qid,
            from: Sources::None,
            groups: Vec::new(),
            flow: None,
            moves: MOVES,
            packets: VecDeque::new(),
        };
        state.inboxes.insert(qpn, inbox);
        let port = RocePort {
            ports: self.clone(),
            qpn,
            name,
            own,
        };
        Ok((port, is_new))
    }

    /// Takes the name of the services with this number at `addresses`, where all addresses may mean
    /// those of IPv6 only: other members pass the management datagrams for them on to this device's
    /// queue pair 1, as long as the value lives, or until the end of the last queue pair.
    ///
    /// # Errors
    /// `ENOTCONN` without a queue pair; `EOPNOTSUPP` where the port is not shared; `EADDRINUSE`:
    /// another device has the name. Those of opening sockets.
    pub(crate) fn name_service(
        self: &Arc<Self>,
        number: u16,
        addresses: Vec<IpAddr>,
        ipv6_only: bool,
    ) -> Result<ServiceName, Errno> {
        let name = Recipient::Service(number);
        let mut state = self.state.lock();
        let open = state.open.as_mut().ok_or(Errno::NOTCONN)?;
        let members = open.members.as_mut().ok_or(Errno::OPNOTSUPP)?;
        members.enter_at(name, (&addresses, ipv6_only), &mut open.ready)?;
        drop(state);
        Ok(ServiceName {
            ports: self.clone(),
            name,
            addresses,
        })
    }

    /// Has `watch` watch the port, for input only.
    pub(crate) fn watch<E>(&self, watch: impl FnOnce(BorrowedFd<'_>) -> Result<(), E>) -> Result<(), E> {
        let state = self.state.lock();
        let open = state.open.as_ref();
        open.map_or(Ok(()), |open| watch(open.ready.descriptor()))
    }

    /// Takes packets that have arrived; returns whether there may be more.
    pub(crate) fn dispatch(&self) -> (Dispatched, bool) {
        let mut done = Dispatched::default();
        // Queue pairs that poll have their turn in between.
        let more = (0..DATAGRAM_RX_BATCHES).all(|_| self.state.lock().look(&mut done));
        self.state.lock().close_flows(&mut done);
        (done, more)
    }
}

/// The name of services ([`RocePorts::name_service`]), which is given back at its end.
#[derive(Debug)]
pub(crate) struct ServiceName {
    ports: Arc<RocePorts>,
    name: Recipient,
    addresses: Vec<IpAddr>,
}

impl Drop for ServiceName {
    fn drop(&mut self) {
        let mut state = self.ports.state.lock();
        if let Some(members) = state.open.as_mut().and_then(|open| open.members.as_mut()) {
            members.leave_at(self.name, &self.addresses);
        }
    }
}

/// A message from another process, as one that passes packets on: what is taken is what a member
/// sends.
#[cfg(fuzzing)]
pub(crate) fn fuzz(data: &[u8]) {
    if let Some((packet, bytes)) = forwarded::parse(data) {
        assert_eq!([&forwarded::header(&packet)[..], bytes].concat(), data);
        let _ = (destination_of(bytes), management::recipient(bytes));
    }
}

/// Messages that members send.
#[cfg(fuzzing)]
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let v4 = ("10.1.2.3:5000", "10.1.2.4");
    let v6 = ("[fe80::1%3]:5000", "fe80::2");
    let seed = |(source, destination): (&str, &str)| {
        let packet = Incoming {
            at: 0,
            len: 300,
            source: source.parse().ok()?,
            destination: destination.parse().ok()?,
            traffic_class: 8,
        };
        Some([&forwarded::header(&packet)[..], &[1; 300]].concat())
    };
    [v4, v6].into_iter().filter_map(seed).collect()
}

/// The port, as a queue pair uses it.
#[derive(Debug)]
pub(crate) struct RocePort {
    ports: Arc<RocePorts>,
    qpn: u32,
    /// The name by which other members pass its packets on.
    name: Option<Recipient>,
    /// The socket by which it sends.
    own: Box<dyn DatagramSocket>,
}

impl RocePort {
    /// Keeps packets from these sources from now on. What waits is dropped.
    pub(crate) fn keep_from(&mut self, from: Sources) {
        let mut state = self.ports.state.lock();
        state.forget(self.qpn);
        if let Some(inbox) = state.inboxes.get_mut(&self.qpn) {
            (inbox.from, inbox.moves) = (from, MOVES);
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

    /// Takes packets for the queue pair that have arrived into `buffer`, and adds them to
    /// `packets`, which is empty. Returns what came of packets that were read for it, with the
    /// other queue pairs that got some.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> Dispatched {
        let mut done = Dispatched::default();
        let mut state = self.ports.state.lock();
        let inbox = state.inboxes.get(&self.qpn);
        if inbox.is_none_or(|inbox| inbox.packets.is_empty()) {
            state.poll(self.qpn, (&mut *buffer, &mut *packets), &mut done);
            state.close_flows(&mut done);
        }
        let State { inboxes, waiting, .. } = &mut *state;
        let Some(inbox) = inboxes.get_mut(&self.qpn) else {
            return done;
        };
        done.woken.retain(|qid| *qid != inbox.qid);
        if packets.is_empty() {
            // The socket was not read for those in the inbox.
            done.has_more |= !inbox.packets.is_empty();
            for (at, place) in (0..)
                .step_by(PACKET_ROOM)
                .zip(buffer.chunks_exact_mut(PACKET_ROOM))
            {
                let Some((packet, bytes)) = inbox.packets.pop_front() else {
                    break;
                };
                *waiting -= 1;
                if let Some(place) = place.get_mut(..bytes.len()) {
                    place.copy_from_slice(&bytes);
                    packets.push(Incoming { at, ..packet });
                }
            }
        }
        done.has_more |= !inbox.packets.is_empty();
        done
    }
}

impl Drop for RocePort {
    /// The port is free for others after the last queue pair.
    fn drop(&mut self) {
        let mut state = self.ports.state.lock();
        state.forget(self.qpn);
        state.inboxes.remove(&self.qpn);
        if let Some(members) = state.open.as_mut().and_then(|open| open.members.as_mut())
            && let Some(name) = self.name
        {
            members.leave(name);
        }
        if state.inboxes.is_empty() {
            // Other members get what is in the sockets.
            let is_own = |open: &Open| open.process == getpid();
            let mut done = Dispatched::default();
            if state.open.as_ref().is_some_and(is_own) {
                let _ = (0..DATAGRAM_RX_BATCHES).all(|_| state.look(&mut done));
            }
            state.open = None;
            state.closing.clear();
        }
    }
}
