//! The engine of a queue pair, by its kind.

use crate::counters::Counters;
use crate::datagram;
use crate::queues::{ReceiveSource, SendQueue};
use crate::rdmap::env::Env;
use crate::rdmap::{self, QpChange, RxOutcome, TxOutcome, WrongState};
use crate::stream::Stream;
use crate::time::Nanos;
use urnic_device::command::QpStatus;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::QpState;

/// The engine of a queue pair. The functions have the meaning that those of
/// [`rdmap::Engine`] have; datagrams have no use for a stream.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "the engine of most queue pairs, without a pointer to it"
)]
pub(crate) enum Service {
    /// Over a stream.
    Connected(rdmap::Engine),
    /// Over UDP.
    Datagrams(Box<datagram::Engine>),
}

impl Service {
    /// The engine of a connected queue pair.
    pub(crate) fn connected(&mut self) -> Result<&mut rdmap::Engine, WrongState> {
        match self {
            Service::Connected(engine) => Ok(engine),
            Service::Datagrams(_) => Err(WrongState),
        }
    }

    /// The engine of a queue pair of kind UD.
    pub(crate) fn datagrams(&mut self) -> Result<&mut datagram::Engine, WrongState> {
        match self {
            Service::Connected(_) => Err(WrongState),
            Service::Datagrams(engine) => Ok(engine),
        }
    }

    pub(crate) fn is_datagrams(&self) -> bool {
        matches!(self, Service::Datagrams(_))
    }

    /// Whether another stream may take the place of one that ended: kind UC.
    pub(crate) fn is_parted(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.is_parted(),
            Service::Datagrams(_) => false,
        }
    }

    #[inline]
    pub(crate) fn state(&self) -> QpState {
        match self {
            Service::Connected(engine) => engine.state(),
            Service::Datagrams(engine) => engine.state(),
        }
    }

    pub(crate) fn status(&self) -> QpStatus {
        match self {
            Service::Connected(engine) => engine.status(),
            Service::Datagrams(engine) => engine.status(),
        }
    }

    /// Returns to the reset state, on the same rings.
    pub(crate) fn reset(&mut self) {
        match self {
            Service::Connected(engine) => *engine = engine.anew(),
            Service::Datagrams(engine) => engine.reset(),
        }
    }

    #[inline]
    pub(crate) fn send_queue(&mut self) -> &mut SendQueue {
        match self {
            Service::Connected(engine) => engine.send_queue(),
            Service::Datagrams(engine) => engine.send_queue(),
        }
    }

    #[inline]
    pub(crate) fn receive_source(&mut self) -> &mut ReceiveSource {
        match self {
            Service::Connected(engine) => engine.receive_source(),
            Service::Datagrams(engine) => engine.receive_source(),
        }
    }

    #[inline]
    pub(crate) fn is_at_rest(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.is_at_rest(),
            Service::Datagrams(_) => false,
        }
    }

    #[inline]
    pub(crate) fn transmit_alone(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        match self {
            Service::Connected(engine) => engine.transmit_alone(env, stream),
            Service::Datagrams(_) => false,
        }
    }

    #[inline]
    pub(crate) fn transmit(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        match self {
            Service::Connected(engine) => engine.transmit(env, stream),
            Service::Datagrams(engine) => engine.transmit(env),
        }
    }

    #[inline]
    pub(crate) fn receive(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        match self {
            Service::Connected(engine) => engine.receive(env, stream),
            Service::Datagrams(engine) => engine.receive(env),
        }
    }

    pub(crate) fn modify(
        &mut self,
        change: &QpChange,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) -> Result<(), WrongState> {
        match self {
            Service::Connected(engine) => engine.modify(change, env, stream),
            Service::Datagrams(engine) => engine.modify(change, env),
        }
    }

    pub(crate) fn fail(&mut self, fault: QpFault, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match self {
            Service::Connected(engine) => engine.fail(fault, env, stream),
            Service::Datagrams(engine) => engine.fail(fault, env),
        }
    }

    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        match self {
            Service::Connected(engine) => engine.flush(env),
            Service::Datagrams(engine) => engine.flush(env),
        }
    }

    #[inline]
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        match self {
            Service::Connected(engine) => engine.deadline(),
            Service::Datagrams(_) => None,
        }
    }

    pub(crate) fn tick(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match self {
            Service::Connected(engine) => engine.tick(env, stream),
            Service::Datagrams(engine) => engine.tick(),
        }
    }

    /// Watches the peer while a request waits for it.
    #[inline]
    pub(crate) fn watch_peer(&mut self, env: &Env<'_>, stream: &mut dyn Stream) {
        if let Service::Connected(engine) = self {
            engine.watch_peer(env, stream);
        }
    }

    pub(crate) fn note_end_behind(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if let Service::Connected(engine) = self {
            engine.note_end_behind(env, stream);
        }
    }

    #[inline]
    pub(crate) fn has_progressed(&mut self) -> bool {
        match self {
            Service::Connected(engine) => engine.has_progressed(),
            Service::Datagrams(_) => false,
        }
    }

    /// Counts what a peer on this host has done in our memory.
    pub(crate) fn count_accesses(&mut self, counters: &Counters) {
        if let Service::Connected(engine) = self {
            engine.count_accesses(counters);
        }
    }

    /// A number that grows with what a peer on this host confirms.
    #[inline]
    pub(crate) fn confirmed(&self) -> u64 {
        match self {
            Service::Connected(engine) => engine.confirmed(),
            Service::Datagrams(_) => 0,
        }
    }

    pub(crate) fn peer_progressed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if let Service::Connected(engine) = self {
            engine.peer_progressed(env, stream);
        }
    }

    #[inline]
    pub(crate) fn is_held_up(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.is_held_up(),
            Service::Datagrams(_) => false,
        }
    }

    /// This side ends: takes in what has arrived, and confirms it.
    pub(crate) fn conclude(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match self {
            Service::Connected(engine) => engine.conclude(env, stream),
            Service::Datagrams(_) => {}
        }
    }

    pub(crate) fn abandon(&mut self) {
        match self {
            Service::Connected(engine) => engine.abandon(),
            Service::Datagrams(engine) => engine.abandon(),
        }
    }
}
