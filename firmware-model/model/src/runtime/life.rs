//! The life of queue pairs: how they get their streams, and how they end; and peers on the same
//! device.

use super::Core;
use crate::counters::Counter;
use crate::events::{Effects, Requests};
use crate::qp::{Inner, Qp, Service};
use crate::rdmap::{Attachment, Engine, PeerProgress};
use crate::roce::Path;
use crate::schedule::{Interest, Token};
use crate::shard::home_shard;
use crate::stream::datagram::DatagramSocket;
use crate::stream::roce_port::RocePort;
use crate::stream::{Ends, QpNumbers, Stream};
use crate::table::Found;
use crate::transport::{QpChange, WrongState};
use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use urnic_device::command::Status;
use urnic_device::vocabulary::QpState;
use urnic_roce::message::Mtu;
use urnic_roce::{requester, responder};

impl Qp {
    /// Carries out `ModifyQp`.
    pub(crate) fn modify(&self, core: &Core, change: QpChange, effects: &mut Effects) -> Result<(), Status> {
        self.command(effects, |inner, effects| {
            if change.state == Some(QpState::Reset) {
                self.reset(core, inner, effects);
                return Ok(((), Requests::empty()));
            }
            let mut env = core.env(self, effects);
            inner
                .with_engine(|engine, stream| engine.modify(&change, &mut env, stream))
                .map_err(|WrongState| Status::WrongState)?;
            Ok(((), Requests::RESUME | Requests::RECEIVE))
        })
    }

    /// Returns the queue pair to its first state, on the same rings: posted entries are dropped,
    /// and the indices continue. Bytes that have arrived are taken in before.
    fn reset(&self, core: &Core, inner: &mut Inner, effects: &mut Effects) {
        let mut env = core.env(self, effects);
        inner.with_engine(|engine, stream| engine.conclude(&mut env, stream));
        core.schedule.end_burst(&mut inner.gathering);
        if let Some(stream) = inner.stream.take() {
            core.linger(stream, Vec::new());
        }
        self.leave_same_device_peer(core);
        core.memory.unbind_all_of(self.id);
        inner.engine.reset();
        self.readable.store(inner.engine.has_ports(), Ordering::Relaxed);
        inner.engine.receive_source().ring_never();
        inner.gathering.forget();
        (inner.blocked, inner.hung_up, inner.attaching, inner.timer) = (false, false, false, None);
    }

    /// Begins RDMA mode on `stream`, which is taken if that succeeds. `awaited`: the other end of
    /// the stream will be attached to this device, too.
    pub(crate) fn attach(
        &self,
        core: &Core,
        stream: &mut Option<Box<dyn Stream>>,
        attachment: &Attachment,
        awaited: bool,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        self.command(effects, |inner, effects| {
            if inner.engine.is_parted() {
                // Nothing has read the end of an earlier stream yet.
                inner.stream = None;
                self.leave_same_device_peer(core);
            }
            if inner.dead || inner.stream.is_some() {
                return Err(Status::WrongState);
            }
            let engine = inner
                .engine
                .connected()
                .map_err(|WrongState| Status::WrongState)?;
            let started = stream.take().ok_or(Status::WrongState)?;
            let numbers = QpNumbers {
                id: self.id,
                label: self.identity.label,
            };
            let entered = started.enter_full_operation(numbers);
            inner.in_memory = entered.local_peer.is_some();
            inner.delays = entered.delays;
            let attachment = match inner.in_memory {
                true => &attachment.without_checks(),
                false => attachment,
            };
            let live = stream.insert(entered.stream);
            let mut env = core.env(self, effects);
            engine
                .attach(attachment, entered.local_peer, &mut env, &mut **live)
                .map_err(|WrongState| Status::WrongState)?;
            self.find_same_device_peer(core, &**live, engine, awaited);
            inner.stream = stream.take();
            inner.attaching = true;
            Ok(((), Requests::ATTACHED | Requests::RESUME | Requests::RECEIVE))
        })
    }

    /// Makes the queue pair its own peer.
    pub(crate) fn attach_loopback(
        &self,
        core: &Core,
        attachment: &Attachment,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        let tap = || {
            let ip = core.config.addresses.first()?.ip;
            Some(core.config.capture.as_ref()?.own_peer(ip, self.id))
        };
        self.command(effects, |inner, _| {
            let engine = inner
                .engine
                .connected()
                .map_err(|WrongState| Status::WrongState)?;
            let attached = engine.attach_loopback(attachment, tap);
            attached.map_err(|WrongState| Status::WrongState)?;
            Ok(((), Requests::RESUME))
        })
    }

    /// Receives the datagrams to a group as well: `socket` binds a socket at a place and joins.
    pub(crate) fn enter_group(
        &self,
        core: &Core,
        group: SocketAddr,
        interface: IpAddr,
        socket: impl FnOnce(SocketAddr) -> Result<Box<dyn DatagramSocket>, Status>,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        self.command(effects, |inner, _| {
            let engine = inner
                .engine
                .datagrams()
                .map_err(|WrongState| Status::WrongState)?;
            if engine.is_in_group(group, interface) {
                return Ok(((), Requests::empty()));
            }
            let socket = socket(engine.place_of(group))?;
            if let Some(fd) = socket.descriptor() {
                let watched = core
                    .schedule
                    .watch(fd, Token::Qp(self.id), Interest::InputAndRoom);
                watched.map_err(|_| Status::NoResources)?;
            }
            engine.enter_group(group, interface, socket);
            Ok(((), Requests::RECEIVE))
        })
    }

    /// Stops receiving the datagrams to a group.
    pub(crate) fn leave_group(
        &self,
        group: SocketAddr,
        interface: IpAddr,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        self.command(effects, |inner, _| {
            let engine = inner
                .engine
                .datagrams()
                .map_err(|WrongState| Status::WrongState)?;
            if !engine.is_in_group(group, interface) {
                return Err(Status::InvalidArgument);
            }
            engine.leave_group(group, interface);
            Ok(((), Requests::empty()))
        })
    }

    /// Names the peer of a queue pair, which speaks RoCE v2 from now on, by the `port`.
    pub(crate) fn connect_path(
        &self,
        core: &Core,
        (path, attributes): (Path, responder::Attributes),
        port: impl FnOnce() -> Result<RocePort, Status>,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        self.command(effects, |inner, _| {
            if inner.engine.speak_roce(port)? {
                self.watch_ports_of(&inner.engine, core)?;
                self.readable.store(true, Ordering::Relaxed);
            }
            let connected = inner
                .engine
                .roce()
                .and_then(|engine| engine.connect(path, attributes));
            connected.map_err(|WrongState| Status::WrongState)?;
            Ok(((), Requests::empty()))
        })
    }

    /// Lets a queue pair that speaks RoCE v2 send requests.
    pub(crate) fn start_path(
        &self,
        attributes: impl FnOnce(Mtu) -> requester::Attributes,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        self.command(effects, |inner, _| {
            let started = inner.engine.roce().and_then(|engine| engine.start(attributes));
            started.map_err(|WrongState| Status::WrongState)?;
            Ok(((), Requests::empty()))
        })
    }

    /// Watches the UDP ports of a queue pair.
    pub(crate) fn watch_ports(&self, core: &Core) -> Result<(), Status> {
        self.watch_ports_of(&self.turns.lock().engine, core)
    }

    fn watch_ports_of(&self, engine: &Service, core: &Core) -> Result<(), Status> {
        for fd in engine.ports() {
            let watched = core
                .schedule
                .watch(fd, Token::Qp(self.id), Interest::InputAndRoom);
            watched.map_err(|_| Status::NoResources)?;
        }
        Ok(())
    }

    /// Ends the queue pair: on return, no host memory is used any more. Bytes that have arrived are
    /// taken in, and bytes of completed sends that are in the stream still arrive. For a reset of
    /// the device, the stream just ends.
    pub(crate) fn destroy(&self, core: &Core, reset: bool, effects: &mut Effects) {
        let mut inner = self.turns.lock();
        if inner.dead {
            return;
        }
        if !reset {
            let mut env = core.env(self, effects);
            inner.with_engine(|engine, stream| {
                engine.transmit(&mut env, stream);
                engine.conclude(&mut env, stream);
            });
        }
        inner.dead = true;
        inner.engine.count_accesses(&self.counters);
        inner.engine.abandon();
        core.schedule.end_burst(&mut inner.gathering);
        let stream = inner.stream.take();
        drop(inner);
        self.leave_same_device_peer(core);
        if let Some(stream) = stream {
            core.linger(stream, Vec::new());
        }
        core.memory.unbind_all_of(self.id);
        for counter in Counter::ALL {
            core.counters.add_shared(*counter, self.counters.value(*counter));
        }
    }
}

// Queue pairs of one device at both ends of a stream.

impl Qp {
    /// Connects this queue pair with the one at the other end of `stream`, if that one is of this
    /// device; `awaited`: it will be attached later.
    pub(super) fn find_same_device_peer(
        &self,
        core: &Core,
        stream: &dyn Stream,
        engine: &mut Engine,
        awaited: bool,
    ) {
        let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        let Ends { local, remote } = stream.ends();
        let (local, remote) = (plain(local), plain(remote));
        if local.ip() != remote.ip() {
            return;
        }
        let own_ends = Ends { local, remote };
        *self.ends.lock() = Some(own_ends);
        let mut ends = core.ends();
        let peer = (ends.get(&own_ends.reversed()))
            .and_then(|(id, rendezvous)| Some((core.qps.find(*id)?, rendezvous.join()?)));
        let (peer, peer_progress) = match peer {
            Some((peer, peer_progress)) => (Some(peer), peer_progress),
            None => (None, PeerProgress::first(awaited)),
        };
        ends.insert(own_ends, (self.id, peer_progress.rendezvous()));
        drop(ends);
        engine.track_peer(peer_progress);
        if let Some(peer) = peer {
            self.same_device_peer.store(peer.id, Ordering::Relaxed);
            peer.same_device_peer.store(self.id, Ordering::Relaxed);
        }
    }

    /// Removes the entry of a closed stream, because another stream may have the same ends later.
    pub(super) fn leave_same_device_peer(&self, core: &Core) {
        self.same_device_peer.store(0, Ordering::Relaxed);
        let own_ends = self.ends.lock().take();
        if let Some(own_ends) = own_ends
            && let Entry::Occupied(entry) = core.ends().entry(own_ends)
            && entry.get().0 == self.id
        {
            entry.remove();
        }
    }

    /// The [same-device peer](Qp::same_device_peer), if this thread must run it so that it
    /// receives. If another thread polls that peer, the other thread receives, because two threads
    /// at one queue pair contend for its cache lines.
    #[inline]
    pub(super) fn peer_to_run(&self, core: &Core) -> Option<Found<Qp>> {
        let peer = self.same_device_peer(core)?;
        let poller = peer.poller.load(Ordering::Relaxed);
        let is_polled = core.schedule.has_polled_elsewhere(poller, &self.seen_polls);
        (!is_polled).then_some(peer)
    }

    /// The requests of this thread when it polls the queue pair: to receive and, if there is a
    /// same-device peer, to read the peer's progress.
    #[inline]
    pub(crate) fn polled(&self) -> Requests {
        match self.same_device_peer.load(Ordering::Relaxed) {
            0 => Requests::RECEIVE,
            _ => self.polled_with_peer(),
        }
    }

    #[inline(never)]
    fn polled_with_peer(&self) -> Requests {
        let home = home_shard();
        if self.poller.load(Ordering::Relaxed) != home {
            self.poller.store(home, Ordering::Relaxed);
        }
        Requests::RECEIVE | Requests::PEER_PROGRESS
    }

    /// The queue pair of this device at the other end of the stream.
    #[inline]
    pub(super) fn same_device_peer(&self, core: &Core) -> Option<Found<Qp>> {
        match self.same_device_peer.load(Ordering::Relaxed) {
            0 => None,
            id => core.qps.find(id),
        }
    }
}
