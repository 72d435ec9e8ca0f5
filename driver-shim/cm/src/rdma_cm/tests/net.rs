//! Processes, each with a connection manager, and a network without delays between them.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use super::ud_net::{Fate, Sent, UdWire, host};
use super::*;
use crate::carrier::Inbox;
use crate::carrier::testing::{Received, with_llp};
use crate::rdma_cm::abi::IdAddresses;
use urnic_process::port_gids::gid_of;
use urnic_wire::mad::MAD_LEN;

/// The port that TCP chooses.
pub(super) const FREE_PORT: u16 = 39_999;
/// The port in the numbers of the first process's queue pairs. Each further process has the next.
pub(super) const NATIVE_PORT: u16 = 0x8100;
/// An address that belongs to no process.
pub(super) const OTHER_HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 1));

/// The GID of each process: that of 192.0.2.1.
pub(super) const OWN_GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];

/// A stream's end.
#[derive(Debug, Default)]
struct End {
    peer: u32,
    side: usize,
    inbox: Received,
    bytes_needed: Option<usize>,
    fin: bool,
    qid: Option<u32>,
    ends: Option<(SocketAddr, SocketAddr)>,
}

/// A listener of a process.
#[derive(Debug)]
struct Listening {
    side: usize,
    llp: Llp,
    port: u16,
    /// Whether it takes IPv4 and IPv6.
    families: [bool; 2],
}

#[derive(Debug)]
enum DeviceEvent {
    Accepted(u32, u32),
    Connected(u32, Result<(), Errno>),
    Received(u32, Result<Vec<u8>, Errno>),
    FirstFpdu(u32),
    Lost(u32),
    Message(Sent),
    /// A message from this port, with this number, did not arrive.
    Refused(u32, u32),
}

/// The state that all processes share.
#[derive(Debug, Default)]
pub(super) struct Wire {
    ends: BTreeMap<u32, End>,
    listeners: BTreeMap<u32, Listening>,
    events: VecDeque<(usize, DeviceEvent)>,
    next: u32,
    pub(super) attached: Vec<(usize, Attachment)>,
    pub(super) aborted: Vec<(usize, u32)>,
    pub(super) readable: BTreeMap<(usize, u64), bool>,
    /// SYNs are not answered.
    pub(super) silent: bool,
    /// Queue pairs that cannot be attached.
    pub(super) unattachable: Vec<u32>,
    /// Queue pairs that the program of a RoCE NIC did not bring to RTR.
    pub(super) unmoved: Vec<u32>,
    /// The bytes of the last send.
    pub(super) last_sent: Vec<u8>,
    /// Ports at which other processes listen over a lower layer.
    pub(super) busy: Vec<(Llp, u16)>,
    /// The devices have no streams over SCTP.
    pub(super) without_sctp: bool,
    /// Queue pairs of kind UC.
    pub(super) unreliable: Vec<u32>,
    /// Ports that other processes use.
    pub(super) taken: Vec<u16>,
    pub(super) ud: UdWire,
}

impl Wire {
    pub(super) fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The ports of all listeners.
    pub(super) fn listening(&self) -> Vec<u16> {
        self.listeners.values().map(|listener| listener.port).collect()
    }

    /// The lower layers of the listeners of a port.
    pub(super) fn llps(&self, port: u16) -> Vec<Llp> {
        let at = self.listeners.values().filter(|listener| listener.port == port);
        at.map(|listener| listener.llp).collect()
    }

    fn require(&self, llp: Llp) -> Result<(), Errno> {
        match llp == Llp::Sctp && self.without_sctp {
            true => Err(Errno::OPNOTSUPP),
            false => Ok(()),
        }
    }

    fn deliver(&mut self, sid: u32) {
        let Some(end) = self.ends.get_mut(&sid) else {
            return;
        };
        let Some(bytes_needed) = end.bytes_needed.filter(|_| !end.inbox.is_empty() || end.fin) else {
            return;
        };
        end.bytes_needed = None;
        let bytes = end.inbox.take(bytes_needed);
        self.events
            .push_back((end.side, DeviceEvent::Received(sid, Ok(bytes))));
    }

    fn end_connection(&mut self, side: usize, qid: u32) {
        let found = self
            .ends
            .iter()
            .find(|(_, end)| (end.side, end.qid) == (side, Some(qid)))
            .map(|(sid, end)| (*sid, end.peer));
        let Some((sid, peer)) = found else { return };
        self.ends.remove(&sid);
        self.events.push_back((side, DeviceEvent::Lost(qid)));
        if let Some(peer) = self.ends.get(&peer).and_then(|end| Some((end.side, end.qid?))) {
            self.end_connection(peer.0, peer.1);
        }
    }
}

struct Port<'a> {
    side: usize,
    wire: &'a Rc<RefCell<Wire>>,
}

impl Carrier for Port<'_> {
    fn send(&mut self, sid: u32, bytes: &[u8]) -> Result<(), Errno> {
        let mut wire = self.wire.borrow_mut();
        wire.last_sent = bytes.to_vec();
        let peer = wire.ends.get(&sid).ok_or(Errno::INVAL)?.peer;
        if let Some(end) = wire.ends.get_mut(&peer) {
            end.inbox.push(bytes);
        }
        wire.deliver(peer);
        Ok(())
    }

    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno> {
        let mut wire = self.wire.borrow_mut();
        wire.ends.get_mut(&sid).ok_or(Errno::INVAL)?.bytes_needed = Some(len);
        wire.deliver(sid);
        Ok(())
    }

    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno> {
        let wire = self.wire.borrow();
        let end = wire.ends.get(&sid).ok_or(Errno::INVAL)?;
        Ok(end.inbox.inbox(end.fin))
    }

    fn close(&mut self, sid: u32, _how: Close) {
        let mut wire = self.wire.borrow_mut();
        if let Some(End { peer, .. }) = wire.ends.remove(&sid)
            && let Some(end) = wire.ends.get_mut(&peer)
        {
            end.fin = true;
            match (end.side, end.qid) {
                (side, Some(qid)) => wire.events.push_back((side, DeviceEvent::Lost(qid))),
                _ => wire.deliver(peer),
            }
        }
    }
}

impl Device for Port<'_> {
    fn listen(
        &mut self,
        llp: Llp,
        local: SocketAddr,
        _traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<(u32, u16), Errno> {
        let dual = local.is_ipv6() && local.ip().is_unspecified() && !ipv6_only;
        let families = [dual || local.is_ipv4(), local.is_ipv6()];
        let mut wire = self.wire.borrow_mut();
        wire.require(llp)?;
        let lid = wire.number();
        let port = if local.port() == 0 {
            40_000 + lid as u16
        } else {
            local.port()
        };
        if local.ip() == OTHER_HOST {
            return Err(Errno::ADDRNOTAVAIL);
        }
        let shared = |other: &[bool; 2]| (0..2).any(|family| other[family] && families[family]);
        let taken = |other: &Listening| (other.llp, other.port) == (llp, port) && shared(&other.families);
        if wire.listeners.values().any(taken) || wire.busy.contains(&(llp, port)) {
            return Err(Errno::ADDRINUSE);
        }
        let side = self.side;
        let listening = Listening {
            side,
            llp,
            port,
            families,
        };
        wire.listeners.insert(lid, listening);
        Ok((lid, port))
    }

    fn unlisten(&mut self, lid: u32) {
        assert!(self.wire.borrow_mut().listeners.remove(&lid).is_some());
    }

    fn connect(
        &mut self,
        llp: Llp,
        remote: SocketAddr,
        local: SocketAddr,
        _traffic_class: u8,
    ) -> Result<u32, Errno> {
        let mut wire = self.wire.borrow_mut();
        wire.require(llp)?;
        let listens = wire.llps(local.port()).contains(&llp);
        if listens || wire.taken.contains(&local.port()) {
            return Err(Errno::ADDRINUSE);
        }
        let ours = wire.number();
        // A port for messages answers no packets of SCTP.
        let is_for_messages = llp == Llp::Sctp && wire.has_udp_port(remote.port());
        if wire.silent || is_for_messages {
            wire.ends.insert(
                ours,
                End {
                    side: self.side,
                    ..End::default()
                },
            );
            return Ok(ours);
        }
        let listener = wire
            .listeners
            .iter()
            .find(|(_, listener)| {
                (listener.llp, listener.port) == (llp, remote.port())
                    && listener.families[usize::from(remote.is_ipv6())]
            })
            .map(|(lid, listener)| (*lid, listener.side));
        let Some((lid, side)) = listener else {
            wire.events
                .push_back((self.side, DeviceEvent::Connected(ours, Err(Errno::CONNREFUSED))));
            return Ok(ours);
        };
        // TCP chooses a port if the program does not.
        let local = match local.port() {
            0 => with_port(local, FREE_PORT),
            _ => local,
        };
        let theirs = wire.number();
        let end = |peer, side, ends| End {
            peer,
            side,
            inbox: Received::new(llp),
            ends: Some(ends),
            ..End::default()
        };
        wire.ends.insert(ours, end(theirs, self.side, (local, remote)));
        wire.ends.insert(theirs, end(ours, side, (remote, local)));
        wire.events
            .push_back((self.side, DeviceEvent::Connected(ours, Ok(()))));
        wire.events.push_back((side, DeviceEvent::Accepted(lid, theirs)));
        Ok(ours)
    }

    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno> {
        self.wire
            .borrow()
            .ends
            .get(&sid)
            .and_then(|end| end.ends)
            .ok_or(Errno::INVAL)
    }

    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno> {
        match remote.port() {
            // Represents an unreachable address.
            9 => Err(Errno::NETUNREACH),
            _ if self.wire.borrow().ud.hosts => Ok(SocketAddr::new(host(self.side), 7)),
            _ => Ok(SocketAddr::new(remote.ip(), 7)),
        }
    }

    fn node_guid(&mut self, _: SocketAddr) -> u64 {
        77
    }

    fn queue_pair(&mut self, _: SocketAddr, qpn: u32) -> Option<u32> {
        (qpn != 0).then_some(qpn)
    }

    /// As of a host with another address: no loopback address has a GID.
    fn own_gid(&mut self, address: SocketAddr) -> (u8, [u8; 16]) {
        match address.ip() {
            ip if ip.is_loopback() => (3, OWN_GID),
            ip => (5, gid_of(ip)),
        }
    }

    fn is_unreliable(&mut self, qid: u32) -> bool {
        self.wire.borrow().unreliable.contains(&qid)
    }

    fn awaits_stream(&mut self, qid: u32) -> bool {
        !self.wire.borrow().unmoved.contains(&qid)
    }

    fn attach(&mut self, sid: u32, attachment: &Attachment) -> Result<(), Errno> {
        let mut wire = self.wire.borrow_mut();
        if wire.unattachable.contains(&attachment.qid) {
            return Err(Errno::INVAL);
        }
        wire.attached.push((self.side, *attachment));
        let end = wire.ends.get_mut(&sid).ok_or(Errno::INVAL)?;
        assert_eq!(end.bytes_needed, None, "no receive is outstanding");
        end.qid = Some(attachment.qid);
        let peer = end.peer;
        let negotiated = attachment.negotiated.unwrap();
        if negotiated.initiator
            && negotiated.rtr.is_some()
            && let Some((side, qid)) = wire.ends.get(&peer).and_then(|end| Some((end.side, end.qid?)))
        {
            wire.events.push_back((side, DeviceEvent::FirstFpdu(qid)));
        }
        if negotiated.terminate.is_some() {
            wire.end_connection(self.side, attachment.qid);
        }
        Ok(())
    }

    fn drain(&mut self, qid: u32) {
        self.wire.borrow_mut().end_connection(self.side, qid);
    }

    fn abort(&mut self, qid: u32) {
        self.wire.borrow_mut().aborted.push((self.side, qid));
        self.wire.borrow_mut().end_connection(self.side, qid);
    }

    fn open_ports(&mut self, local: SocketAddr, ipv6_only: bool) -> Result<(Vec<u32>, u16), Errno> {
        let mut wire = self.wire.borrow_mut();
        if wire.ud.unsupported {
            return Err(Errno::OPNOTSUPP);
        }
        wire.open_ports(self.side, local, ipv6_only)
    }

    fn open_port_of(&mut self, device: u32, local: SocketAddr) -> Result<u32, Errno> {
        let mut wire = self.wire.borrow_mut();
        if wire.ud.unsupported {
            return Err(Errno::OPNOTSUPP);
        }
        wire.open_port(self.side, device, local, false)
    }

    fn device_of(&mut self, local: SocketAddr) -> Result<u32, Errno> {
        Ok(self.wire.borrow().ud.device_of(self.side, local.ip()))
    }

    fn device_of_port(&mut self, port: u32) -> u32 {
        self.wire.borrow().ud.ports[&port].device
    }

    fn channel_adapter(&mut self, device: u32) -> Result<ChannelAdapter, Errno> {
        Ok(ChannelAdapter {
            guid: 0x10 * (self.side as u64 + 1) + u64::from(device),
            path_mtu: 3,
            native_port: NATIVE_PORT + self.side as u16,
        })
    }

    fn close_port(&mut self, port: u32) {
        assert!(self.wire.borrow_mut().ud.ports.remove(&port).is_some());
    }

    fn send_message(
        &mut self,
        port: u32,
        local: IpAddr,
        remote: SocketAddr,
        _traffic_class: u8,
        message: &[u8; MAD_LEN],
    ) -> Result<u32, Errno> {
        let mut wire = self.wire.borrow_mut();
        let fate = wire.message(self.side, port, (local, remote), message)?;
        let number = wire.ud.sent;
        match fate {
            Fate::Arrives(sent) => wire.events.push_back((sent.to, DeviceEvent::Message(sent))),
            Fate::Refused => wire
                .events
                .push_back((self.side, DeviceEvent::Refused(port, number))),
            Fate::Lost => {}
        }
        Ok(number)
    }

    fn signal(&mut self, channel: u64, events: bool) {
        let before = self
            .wire
            .borrow_mut()
            .readable
            .insert((self.side, channel), events);
        assert_ne!(before.unwrap_or(false), events, "signal only on a change");
    }
}

/// The processes and their time.
pub(super) struct Net {
    pub(super) engines: Vec<Engine>,
    pub(super) wire: Rc<RefCell<Wire>>,
    now: Time,
}

/// An event as reported to the program: cookie of the id, handle, event, status.
pub(super) type EventSummary = (u64, u32, u32, i32);

impl Net {
    pub(super) fn new(configs: &[Config]) -> Net {
        Net {
            engines: configs
                .iter()
                .map(|config| Engine::new(&with_llp(config), 16, 16, 1))
                .collect(),
            wire: Rc::default(),
            now: Time::ZERO,
        }
    }

    pub(super) fn pair() -> Net {
        Net::new(&[Config::default(), Config::default()])
    }

    /// Runs `work` on an engine.
    pub(super) fn at<T>(&mut self, side: usize, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let mut device = Port {
            side,
            wire: &self.wire,
        };
        let mut world = World {
            now: self.now,
            device: &mut device,
        };
        work(&mut self.engines[side], &mut world)
    }

    /// Delivers the pending events.
    pub(super) fn run(&mut self) {
        loop {
            let events = self.wire.borrow_mut().events.pop_front();
            let Some((side, events)) = events else { return };
            self.at(side, |engine, world| match events {
                DeviceEvent::Accepted(lid, sid) => engine.arrived(world, lid, sid),
                DeviceEvent::Connected(sid, result) => engine.connected(world, sid, result),
                DeviceEvent::Received(sid, bytes) => {
                    engine.received(world, sid, bytes.as_deref().map_err(|errno| *errno));
                }
                DeviceEvent::FirstFpdu(qid) => engine.first_fpdu(world, qid),
                DeviceEvent::Message(Sent {
                    port, arrival, bytes, ..
                }) => engine.message_received(world, port, arrival, &bytes),
                DeviceEvent::Refused(port, number) => {
                    engine.message_refused(world, port, number, Errno::CONNREFUSED);
                }
                DeviceEvent::Lost(qid) => engine.connection_ended(world, qid, Errno::CONNRESET),
            });
        }
    }

    /// Advances the time.
    pub(super) fn advance(&mut self, time: Duration) {
        self.run();
        self.now += time;
        for side in 0..self.engines.len() {
            self.at(side, |engine, world| engine.tick(world));
        }
        self.run();
    }

    pub(super) fn event(&mut self, side: usize, channel: u64) -> Option<EventResponse> {
        self.run();
        self.at(side, |engine, world| engine.take_event(world, channel))
    }

    pub(super) fn take_events(&mut self, side: usize, channel: u64) -> Vec<EventSummary> {
        std::iter::from_fn(|| self.event(side, channel))
            .map(|event| (event.uid, event.id, event.event, event.status.cast_signed()))
            .collect()
    }

    pub(super) fn is_readable(&self, side: usize, channel: u64) -> bool {
        self.wire
            .borrow()
            .readable
            .get(&(side, channel))
            .copied()
            .unwrap_or(false)
    }

    /// Connects a stream to a port without an engine, and sends bytes on it.
    pub(super) fn raw_stream(&mut self, side: usize, llp: Llp, port: u16, bytes: &[u8]) -> u32 {
        let wire = &self.wire.clone();
        let mut device = Port { side, wire };
        let remote = SocketAddr::new([127, 0, 0, 1].into(), port);
        let sid = device.connect(llp, remote, with_port(remote, 0), 0).unwrap();
        device.send(sid, bytes).unwrap();
        self.run();
        sid
    }

    /// Whether the peer has closed a raw stream.
    pub(super) fn has_ended(&self, sid: u32) -> bool {
        self.wire.borrow().ends[&sid].fin
    }

    /// Closes a raw stream.
    pub(super) fn close_raw(&mut self, side: usize, sid: u32) {
        let wire = &self.wire.clone();
        Port { side, wire }.close(sid, Close::Orderly);
        self.run();
    }

    /// A listener on a channel of its own.
    pub(super) fn listen(&mut self, side: usize, port: u16, backlog: u32) -> (u64, u32) {
        self.at(side, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, 100, PS_TCP).unwrap();
            let local = CmAddress::Ip(format!("0.0.0.0:{port}").parse().unwrap());
            engine.bind(world, channel, id, local).unwrap();
            engine.listen(world, channel, id, backlog).unwrap();
            (channel, id)
        })
    }

    /// An id that is ready to connect, with a managed queue pair unless `external`.
    pub(super) fn ready(&mut self, side: usize, port: u16, uid: u64, external: bool) -> (u64, u32) {
        let (channel, id) = self.at(side, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, uid, PS_TCP).unwrap();
            let remote = CmAddress::Ip(format!("127.0.0.1:{port}").parse().unwrap());
            engine.resolve_address(world, channel, id, None, remote).unwrap();
            engine.resolve_route(world, channel, id).unwrap();
            if !external {
                engine.qp_attributes(world, channel, id, 1).unwrap();
            }
            (channel, id)
        });
        assert_eq!(
            self.take_events(side, channel),
            [(uid, id, 0, 0), (uid, id, 2, 0)]
        );
        (channel, id)
    }

    pub(super) fn addresses(&mut self, side: usize, (channel, id): (u64, u32)) -> Result<IdAddresses, Errno> {
        self.at(side, |engine, world| engine.addresses(world, channel, id))
    }

    /// The local port of an id, as the program gets it.
    pub(super) fn port_of(&mut self, side: usize, (channel, id): (u64, u32)) -> u16 {
        let addresses = self.addresses(side, (channel, id)).unwrap();
        addresses.local.unwrap().port()
    }

    pub(super) fn connect(&mut self, side: usize, (channel, id): (u64, u32), parameters: Parameters) {
        self.at(side, |engine, world| {
            engine.connect(world, channel, id, parameters)
        })
        .unwrap();
        self.run();
    }

    /// Takes the next event, which must be a Request: returns the new id and its parameters.
    pub(super) fn request(&mut self, side: usize, channel: u64) -> (u32, ConnParam) {
        let event = self
            .event(side, channel)
            .expect("the channel has no Request event");
        assert_eq!((event.event, event.uid), (4, 100));
        (event.id, event.param)
    }

    pub(super) fn accept(&mut self, side: usize, channel: u64, id: u32, uid: u64, parameters: Parameters) {
        self.at(side, |engine, world| {
            engine.accept(world, channel, id, uid, Some(parameters))
        })
        .unwrap();
        self.run();
    }

    /// Closes all channels, and checks that nothing is left.
    pub(super) fn finish(mut self) {
        for side in 0..self.engines.len() {
            let channels: Vec<u64> = self.engines[side].channels.keys().copied().collect();
            for channel in channels {
                self.at(side, |engine, world| engine.close_channel(world, channel));
            }
            self.run();
            let engine = &self.engines[side];
            assert!(engine.ids.is_empty() && engine.streams.is_empty() && engine.listeners.is_empty());
            assert!(engine.queue_pairs.is_empty() && engine.channels.is_empty());
            let datagrams = &engine.datagrams;
            assert!(datagrams.places.is_empty() && datagrams.firsts.is_empty());
            assert!(datagrams.lookups.is_empty() && datagrams.requests.is_empty());
            assert!(datagrams.inquiries.is_empty() && datagrams.memberships.is_empty());
            assert_eq!(engine.deadline(), None);
        }
        let wire = self.wire.borrow();
        assert!(wire.listeners.is_empty());
        assert!(wire.ends.values().all(|end| end.qid.is_some()), "{:?}", wire.ends);
    }
}

pub(super) fn parameters(
    qpn: u32,
    responder_resources: u8,
    initiator_depth: u8,
    private_data: &[u8],
) -> Parameters {
    Parameters {
        qpn,
        responder_resources,
        initiator_depth,
        retry_count: 7,
        rnr_retry_count: 7,
        private_data: private_data.to_vec(),
        ..Parameters::default()
    }
}
