//! How queue pairs come by their streams, and how they end.

use crate::counters::Counter;
use crate::events::{Effects, Requests};
use crate::qp::{Inner, Qp};
use crate::rdmap::{Attachment, QpChange, WrongState};
use crate::runtime::Core;
use crate::schedule::Token;
use crate::stream::Stream;
use crate::stream::datagram::DatagramSocket;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use urnic_device::command::Status;
use urnic_device::vocabulary::QpState;

impl Qp {
    /// Carries out `ModifyQp`.
    pub(crate) fn modify(&self, core: &Core, change: QpChange, effects: &mut Effects) -> Result<(), Status> {
        self.command(effects, |inner, effects| {
            if change.state == Some(QpState::Reset) {
                self.reset(core, inner, effects);
                return Ok(((), Requests::empty()));
            }
            let mut env = core.env(&self.counters, effects);
            inner
                .with_engine(|engine, stream| engine.modify(&change, &mut env, stream))
                .map_err(|WrongState| Status::WrongState)?;
            Ok(((), Requests::RESUME | Requests::RECEIVE))
        })
    }

    /// Returns the queue pair to its first state, on the same rings: posted entries are dropped,
    /// and the indices continue. What has arrived is taken in before.
    fn reset(&self, core: &Core, inner: &mut Inner, effects: &mut Effects) {
        let mut env = core.env(&self.counters, effects);
        inner.with_engine(|engine, stream| engine.conclude(&mut env, stream));
        core.schedule.end_burst(&mut inner.gathering);
        if let Some(stream) = inner.stream.take() {
            core.linger(stream, Vec::new());
        }
        self.leave_sibling(core);
        core.memory.unbind_all_of(self.id);
        inner.engine.reset();
        inner.engine.receive_source().ring_never();
        inner.gathering.forget();
        (inner.blocked, inner.hung_up, inner.held, inner.timer) = (false, false, false, None);
    }

    /// Begins RDMA mode on `stream`, which is taken if that succeeds. `awaited`: its other end is
    /// this device's, too.
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
                self.leave_sibling(core);
            }
            let Some(live) = stream.as_mut().filter(|_| !inner.dead && inner.stream.is_none()) else {
                return Err(Status::WrongState);
            };
            let mut env = core.env(&self.counters, effects);
            let engine = inner
                .engine
                .connected()
                .map_err(|WrongState| Status::WrongState)?;
            if let Err(errno) = live.enter_full_operation(self.id) {
                tracing::warn!(%errno, "a connection on this host is lost");
                live.reset();
            }
            live.note_number(engine.label());
            self.processors.store(live.processors().map(Arc::new));
            let attachment = match live.is_in_memory() {
                true => &attachment.without_checks(),
                false => attachment,
            };
            engine
                .attach(attachment, &mut env, &mut **live)
                .map_err(|WrongState| Status::WrongState)?;
            self.find_sibling(core, &**live, engine, awaited);
            inner.delays = live.delays();
            inner.stream = stream.take();
            inner.held = true;
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

    /// Receives the datagrams to a group as well, by `socket`.
    pub(crate) fn enter_group(
        &self,
        core: &Core,
        group: SocketAddr,
        interface: IpAddr,
        socket: impl FnOnce() -> Result<Box<dyn DatagramSocket>, Status>,
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
            let socket = socket()?;
            if let Some(fd) = socket.descriptor() {
                let watched = core.schedule.watch(fd, Token::Qp(self.id));
                watched.map_err(|_| Status::NoResources)?;
            }
            engine.enter_group(group, interface, socket);
            Ok(((), Requests::RECEIVE))
        })
    }

    /// Receives the datagrams to a group no more.
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

    /// Watches the ports of a queue pair of kind UD.
    pub(crate) fn watch_ports(&self, core: &Core) -> Result<(), Status> {
        let mut inner = self.turns.lock();
        let Ok(engine) = inner.engine.datagrams() else {
            return Ok(());
        };
        for fd in engine.descriptors() {
            let watched = core.schedule.watch(fd, Token::Qp(self.id));
            watched.map_err(|_| Status::NoResources)?;
        }
        Ok(())
    }

    /// Ends the queue pair: on return, no host memory is used any more. What has arrived is taken
    /// in, and what its completed sends put on the stream still arrives; for a reset of the device
    /// the stream just ends.
    pub(crate) fn destroy(&self, core: &Core, reset: bool, effects: &mut Effects) {
        let mut inner = self.turns.lock();
        if inner.dead {
            return;
        }
        if !reset {
            let mut env = core.env(&self.counters, effects);
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
        self.leave_sibling(core);
        if let Some(stream) = stream {
            core.linger(stream, Vec::new());
        }
        core.memory.unbind_all_of(self.id);
        for counter in Counter::ALL {
            core.counters.add_shared(*counter, self.counters.value(*counter));
        }
    }
}
