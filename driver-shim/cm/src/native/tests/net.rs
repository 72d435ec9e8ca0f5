//! A simulated network: hosts with engines, streams with latency, a clock that jumps.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;

use super::*;
use crate::carrier::Inbox;
use crate::carrier::testing::{Received, with_llp};

/// An event of a host's device.
#[derive(Debug, Clone)]
enum Event {
    Accepted { lid: u32, sid: u32 },
    Connected { sid: u32, result: Result<(), Errno> },
    Bytes { sid: u32, bytes: Vec<u8> },
    Fin { sid: u32 },
    FirstFpdu { sid: u32 },
}

#[derive(Debug)]
struct End {
    host: usize,
    ends: Endpoints,
    peer: u32,
    inbox: Received,
    wanted: Option<usize>,
    /// The peer closed.
    fin: bool,
    attached: Option<Attachment>,
}

/// The state of the network between the hosts.
#[derive(Debug, Default)]
struct Wire {
    now: Time,
    latency: Duration,
    sequence: u64,
    agenda: BTreeMap<(Time, u64), (usize, Event)>,
    listeners: HashMap<(usize, Llp, u16), u32>,
    ends: HashMap<u32, End>,
    next_sid: u32,
    next_port: u16,
    next_source: u16,
    /// Connection attempts that are lost: from host, to host.
    black_holes: BTreeSet<(usize, usize)>,
    /// Hosts whose process has ended: connections are refused.
    stopped: BTreeSet<usize>,
    /// Since when sends of queue pairs wait.
    waiting: BTreeMap<(usize, u32), Time>,
    /// Queue pairs whose program does something else.
    gone_on: BTreeSet<(usize, u32)>,
    /// The source address of a host's connections, if the program names none.
    routes: HashMap<usize, IpAddr>,
    /// The source address of all connections of a host, as other hosts see it.
    translated: HashMap<usize, IpAddr>,
    loops: Vec<(usize, u32)>,
}

impl Wire {
    fn at(&mut self, delay: Duration, host: usize, event: Event) {
        self.sequence += 1;
        self.agenda
            .insert((self.now + delay, self.sequence), (host, event));
    }

    fn sid(&mut self) -> u32 {
        self.next_sid += 1;
        self.next_sid
    }
}

pub(super) fn address(host: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, 1 + host as u8).into()
}

/// Another address of the same host.
pub(super) fn other_address(host: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 1, 1 + host as u8).into()
}

/// A host's device.
struct Port {
    host: usize,
    wire: Rc<RefCell<Wire>>,
}

impl Carrier for Port {
    fn send(&mut self, sid: u32, bytes: &[u8]) -> Result<(), Errno> {
        let mut wire = self.wire.borrow_mut();
        let latency = wire.latency;
        let end = wire.ends.get(&sid).ok_or(Errno::INVAL)?;
        let peer = end.peer;
        if let Some(host) = wire.ends.get(&peer).map(|end| end.host) {
            wire.at(
                latency,
                host,
                Event::Bytes {
                    sid: peer,
                    bytes: bytes.to_vec(),
                },
            );
        }
        Ok(())
    }

    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno> {
        let mut wire = self.wire.borrow_mut();
        let end = wire.ends.get_mut(&sid).ok_or(Errno::INVAL)?;
        assert_eq!(end.wanted.replace(len), None, "two receives at a time");
        let host = end.host;
        wire.at(
            Duration::ZERO,
            host,
            Event::Bytes {
                sid,
                bytes: Vec::new(),
            },
        );
        Ok(())
    }

    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno> {
        let wire = self.wire.borrow();
        let end = wire.ends.get(&sid).ok_or(Errno::INVAL)?;
        Ok(end.inbox.inbox(end.fin))
    }

    fn close(&mut self, sid: u32, _how: Close) {
        let mut wire = self.wire.borrow_mut();
        let latency = wire.latency;
        let end = wire.ends.remove(&sid).expect("closed a stream that is not open");
        if let Some(host) = wire.ends.get(&end.peer).map(|peer| peer.host) {
            wire.at(latency, host, Event::Fin { sid: end.peer });
        }
    }
}

impl Streams for Port {
    fn listen(&mut self, llp: Llp, local: SocketAddr) -> Result<(u32, u16), Errno> {
        let mut wire = self.wire.borrow_mut();
        wire.next_port += 1;
        let port = if local.port() == 0 {
            wire.next_port
        } else {
            local.port()
        };
        if wire.listeners.contains_key(&(self.host, llp, port)) {
            return Err(Errno::ADDRINUSE);
        }
        let lid = wire.sid();
        wire.listeners.insert((self.host, llp, port), lid);
        Ok((lid, port))
    }

    fn unlisten(&mut self, lid: u32) {
        self.wire.borrow_mut().listeners.retain(|_, other| *other != lid);
    }

    fn connect(&mut self, llp: Llp, remote: SocketAddr, local: Option<SocketAddr>) -> Result<u32, Errno> {
        let mut wire = self.wire.borrow_mut();
        let sid = wire.sid();
        let to = (0..=255)
            .find(|host| address(*host) == remote.ip())
            .ok_or(Errno::NETUNREACH)?;
        wire.next_source = wire.next_source.wrapping_add(1);
        let default_source = || wire.routes.get(&self.host).copied().unwrap_or(address(self.host));
        let source = local.map_or_else(default_source, |local| local.ip());
        let source = wire.translated.get(&self.host).copied().unwrap_or(source);
        let source = SocketAddr::new(source, wire.next_source);
        let latency = wire.latency;
        let lid = wire
            .listeners
            .get(&(to, llp, remote.port()))
            .copied()
            .filter(|_| !wire.stopped.contains(&to));
        let end = |host, peer| End {
            host,
            ends: if peer == sid {
                Endpoints {
                    local: remote,
                    remote: source,
                }
            } else {
                Endpoints {
                    local: source,
                    remote,
                }
            },
            peer,
            inbox: Received::new(llp),
            wanted: None,
            fin: false,
            attached: None,
        };
        if wire.black_holes.contains(&(self.host, to)) {
            wire.ends.insert(sid, end(self.host, 0));
        } else if let Some(lid) = lid {
            let there = wire.sid();
            wire.ends.insert(sid, end(self.host, there));
            wire.ends.insert(there, end(to, sid));
            wire.at(latency, to, Event::Accepted { lid, sid: there });
            wire.at(latency * 2, self.host, Event::Connected { sid, result: Ok(()) });
        } else {
            wire.ends.insert(sid, end(self.host, 0));
            wire.at(
                latency * 2,
                self.host,
                Event::Connected {
                    sid,
                    result: Err(Errno::CONNREFUSED),
                },
            );
        }
        Ok(sid)
    }

    fn ends(&mut self, sid: u32) -> Result<Endpoints, Errno> {
        let wire = self.wire.borrow();
        wire.ends.get(&sid).map(|end| end.ends).ok_or(Errno::INVAL)
    }

    fn is_own(&mut self, candidate: HostAddress) -> bool {
        let own = [
            address(self.host),
            other_address(self.host),
            Ipv4Addr::LOCALHOST.into(),
        ];
        own.iter()
            .any(|ip| HostAddress::from(SocketAddr::new(*ip, 0)) == candidate)
    }

    fn attach(&mut self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno> {
        let mut wire = self.wire.borrow_mut();
        let latency = wire.latency;
        let Some(sid) = sid else {
            let looped = (self.host, attachment.qid);
            wire.loops.push(looped);
            return Ok(());
        };
        let end = wire.ends.get_mut(&sid).ok_or(Errno::INVAL)?;
        assert_eq!(end.wanted, None, "attached with a receive outstanding");
        if end.fin {
            return Err(Errno::INVAL);
        }
        end.attached = Some(*attachment);
        let peer = end.peer;
        if attachment
            .negotiated
            .is_some_and(|negotiated| negotiated.rtr.is_some() && negotiated.initiator)
            && let Some(host) = wire.ends.get(&peer).map(|peer| peer.host)
        {
            wire.at(latency, host, Event::FirstFpdu { sid: peer });
        }
        Ok(())
    }

    fn waiting_since(&mut self, qid: u32) -> Option<Time> {
        self.wire.borrow().waiting.get(&(self.host, qid)).copied()
    }

    fn has_moved_on(&mut self, qid: u32) -> bool {
        self.wire.borrow().gone_on.contains(&(self.host, qid))
    }
}

/// A process on a host of its own.
struct Host {
    engine: Engine,
    notices: Vec<Notice>,
    wake: Option<Time>,
}

/// The simulated network and its hosts.
pub(super) struct Net {
    wire: Rc<RefCell<Wire>>,
    hosts: Vec<Host>,
}

impl Net {
    pub(super) fn new(hosts: usize) -> Net {
        Net::with(hosts, &Config::default())
    }

    pub(super) fn with(hosts: usize, config: &Config) -> Net {
        Net::of(&vec![config.clone(); hosts])
    }

    /// A host with each of these configurations.
    pub(super) fn of(configs: &[Config]) -> Net {
        let wire = Wire {
            latency: Duration::from_millis(1),
            next_port: 999,
            ..Wire::default()
        };
        let host = |(n, config): (usize, &Config)| Host {
            engine: Engine::new(&with_llp(config), n as u128),
            notices: Vec::new(),
            wake: None,
        };
        Net {
            wire: Rc::new(RefCell::new(wire)),
            hosts: configs.iter().enumerate().map(host).collect(),
        }
    }

    pub(super) fn now(&self) -> Time {
        self.wire.borrow().now
    }

    pub(super) fn latency(&self, latency: Duration) {
        self.wire.borrow_mut().latency = latency;
    }

    /// Runs `work` on a host's engine, then its timers.
    pub(super) fn on<T>(&mut self, host: usize, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let now = self.now();
        let mut port = Port {
            host,
            wire: self.wire.clone(),
        };
        let mut world = World {
            now,
            streams: &mut port,
        };
        let this = &mut self.hosts[host];
        let result = work(&mut this.engine, &mut world);
        this.wake = this.engine.tick(&mut world);
        this.notices.extend(this.engine.notices());
        result
    }

    /// Continues to the next event; returns `false` if there is none until `end`.
    fn step(&mut self, end: Time) -> bool {
        let event = self
            .wire
            .borrow()
            .agenda
            .first_key_value()
            .map(|((at, _), _)| *at);
        let timer = (0..self.hosts.len())
            .filter_map(|h| self.hosts[h].wake.map(|at| (at, h)))
            .min();
        let next = [event, timer.map(|(at, _)| at)]
            .into_iter()
            .flatten()
            .min()
            .filter(|at| *at <= end);
        let Some(at) = next else {
            self.wire.borrow_mut().now = end;
            return false;
        };
        let due = {
            let mut wire = self.wire.borrow_mut();
            wire.now = wire.now.max(at);
            (event == Some(at)).then(|| wire.agenda.pop_first()).flatten()
        };
        match due {
            Some((_, (host, event))) => self.deliver(host, event),
            None => self.on(timer.unwrap().1, |_, _| ()),
        }
        true
    }

    fn deliver(&mut self, host: usize, event: Event) {
        match event {
            Event::Accepted { lid, sid } => self.on(host, |engine, world| engine.arrived(world, lid, sid)),
            Event::Connected { sid, result } => {
                self.on(host, |engine, world| engine.connected(world, sid, result))
            }
            Event::Bytes { sid, bytes } => {
                if let Some(end) = self.wire.borrow_mut().ends.get_mut(&sid) {
                    end.inbox.push(&bytes);
                }
                self.receive(host, sid);
            }
            // Only an outstanding receive reports the end of a stream.
            Event::Fin { sid } => {
                if let Some(end) = self.wire.borrow_mut().ends.get_mut(&sid) {
                    end.fin = true;
                }
                self.receive(host, sid);
            }
            Event::FirstFpdu { sid } => {
                let qid = self
                    .wire
                    .borrow()
                    .ends
                    .get(&sid)
                    .and_then(|end| end.attached)
                    .map(|to| to.qid);
                if let Some(qid) = qid {
                    self.on(host, |engine, world| engine.first_fpdu(world, qid));
                }
            }
        }
    }

    /// Completes an outstanding receive if its bytes have arrived or the stream ended.
    fn receive(&mut self, host: usize, sid: u32) {
        let bytes = {
            let mut wire = self.wire.borrow_mut();
            let Some(end) = wire.ends.get_mut(&sid) else {
                return;
            };
            match end.wanted {
                Some(wanted) if end.inbox.has(wanted) || end.fin => {
                    end.wanted = None;
                    end.inbox.take(wanted)
                }
                _ => return,
            }
        };
        self.on(host, |engine, world| engine.received(world, sid, Ok(&bytes)));
    }

    /// Runs the network for `time`.
    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now() + time;
        while self.step(end) {}
    }

    /// Runs until `done`, and returns the time that this took. Panics after `limit`.
    pub(super) fn until(&mut self, limit: Duration, done: impl Fn(&Net) -> bool) -> Duration {
        let start = self.now();
        while !done(self) {
            assert!(self.step(start + limit), "not done within {limit:?}");
        }
        self.now() - start
    }

    pub(super) fn notices(&self, host: usize) -> &[Notice] {
        &self.hosts[host].notices
    }

    pub(super) fn is_open(&self, host: usize, qid: u32) -> bool {
        self.notices(host).contains(&Notice::Open(qid))
    }

    pub(super) fn is_unreachable(&self, host: usize, qid: u32) -> bool {
        self.notices(host).contains(&Notice::Unreachable(qid))
    }

    /// The attachments of a queue pair to streams that still exist.
    pub(super) fn attached(&self, host: usize, qid: u32) -> Vec<Attachment> {
        let wire = self.wire.borrow();
        let of = |end: &&End| end.host == host && end.attached.is_some_and(|to| to.qid == qid);
        wire.ends
            .values()
            .filter(of)
            .filter_map(|end| end.attached)
            .collect()
    }

    /// Whether two queue pairs are attached to the two ends of one stream.
    pub(super) fn are_joined(&self, a: (usize, u32), b: (usize, u32)) -> bool {
        let wire = self.wire.borrow();
        let is = |end: &End, (host, qid): (usize, u32)| {
            end.host == host && end.attached.is_some_and(|to| to.qid == qid)
        };
        wire.ends
            .values()
            .any(|end| is(end, a) && wire.ends.get(&end.peer).is_some_and(|peer| is(peer, b)))
    }

    /// Streams on a host that are open and not attached.
    pub(super) fn in_start_up(&self, host: usize) -> usize {
        self.wire
            .borrow()
            .ends
            .values()
            .filter(|end| end.host == host && end.attached.is_none())
            .count()
    }

    pub(super) fn loops(&self) -> Vec<(usize, u32)> {
        self.wire.borrow().loops.clone()
    }

    pub(super) fn listeners(&self, host: usize) -> usize {
        self.wire
            .borrow()
            .listeners
            .keys()
            .filter(|(h, ..)| *h == host)
            .count()
    }

    /// Another program of the host listens at a port.
    pub(super) fn take_port(&self, host: usize, llp: Llp, port: u16) {
        let mut wire = self.wire.borrow_mut();
        let lid = wire.sid();
        wire.listeners.insert((host, llp, port), lid);
    }

    pub(super) fn black_hole(&self, from: usize, to: usize) {
        self.wire.borrow_mut().black_holes.insert((from, to));
    }

    pub(super) fn set_stopped(&self, host: usize, stopped: bool) {
        let mut wire = self.wire.borrow_mut();
        if stopped {
            wire.stopped.insert(host)
        } else {
            wire.stopped.remove(&host)
        };
    }

    /// The host's connections come from this address, if the program names none.
    pub(super) fn route_from(&self, host: usize, source: IpAddr) {
        self.wire.borrow_mut().routes.insert(host, source);
    }

    /// All connections of the host appear to come from this address.
    pub(super) fn translate(&self, host: usize, source: IpAddr) {
        self.wire.borrow_mut().translated.insert(host, source);
    }

    pub(super) fn send_waits(&self, host: usize, qid: u32) {
        let now = self.now();
        self.wire.borrow_mut().waiting.insert((host, qid), now);
    }

    /// The program of a queue pair does something else since it brought it to RTR.
    pub(super) fn goes_on(&self, host: usize, qid: u32) {
        self.wire.borrow_mut().gone_on.insert((host, qid));
    }

    /// Opens a stream from host `from` to the listener of `qpn` without an engine, and sends
    /// `bytes` on it.
    pub(super) fn raw_stream(&mut self, from: usize, qpn: u32, to: usize, bytes: &[u8]) -> u32 {
        let mut port = Port {
            host: from,
            wire: self.wire.clone(),
        };
        let remote = SocketAddr::new(address(to), super::super::address::port_of(qpn));
        let sid = port.connect(llp(), remote, None).unwrap();
        port.send(sid, bytes).unwrap();
        sid
    }

    /// Sends bytes on a raw stream.
    pub(super) fn send_raw(&mut self, sid: u32, bytes: &[u8]) {
        let (host, wire) = (0, self.wire.clone());
        Port { host, wire }.send(sid, bytes).unwrap();
    }

    /// The bytes received on a raw stream, and whether it is closed.
    pub(super) fn received_on(&self, sid: u32) -> (Vec<u8>, bool) {
        let wire = self.wire.borrow();
        let end = &wire.ends[&sid];
        (end.inbox.bytes(), end.fin)
    }
}
