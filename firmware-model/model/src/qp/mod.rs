//! A queue pair: an engine, its stream, and the rules for which thread may run it when.
//!
//! This module does not depend on the device. A queue pair's work on the rest of the device is in
//! the [runtime](crate::runtime).
//!
//! No thread waits for a queue pair's lock on the data path: see [`Turns`].

pub(crate) mod turns;

use crate::counters::{Counter, Counters};
use crate::datagram::DatagramParams;
use crate::events::{Effects, Requests};
use crate::queues::{CompletionQueue, ReceiveSource, SendQueue, SharedReceiveQueue};
use crate::rdmap::{Engine, NoStream};
use crate::stream::roce_port::RocePort;
use crate::stream::{Ends, Stream};
use crate::table::Last;
use crate::time::{Nanos, Now};
use crate::transport::{Env, Identity, QpChange, QpQueues, RxOutcome, TxOutcome, WrongState};
use crate::tuning::{
    BURST_BACKOFF, BURST_RINGS, BURST_RINGS_MAX, GATHERED, GATHERED_CONFIRMED, GATHERED_IN_MEMORY,
    IDLE_FLUSHES,
};
use crate::{datagram, rdmap, roce};
use rustix::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use turns::Turns;
use urnic_device::command::{QpStatus, Status};
use urnic_device::event::QpFault;
use urnic_device::stream::attached;
use urnic_device::vocabulary::QpState;
use urnic_sync::Mutex;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) id: u32,
    pub(crate) identity: Identity,
    pub(crate) uar: u32,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    pub(crate) srq: Option<Arc<SharedReceiveQueue>>,
    pub(crate) counters: Counters,
    pub(crate) turns: Turns<Inner>,
    /// Requests that the runtime makes later.
    later: AtomicU32,
    /// Whether the queue pair is on the runtime's list because of `later`.
    pub(crate) listed: AtomicBool,
    /// Whether a read of the stream may find something.
    pub(crate) readable: AtomicBool,
    /// Whether sends wait for an event of the stream: a poll cannot detect that the stream takes
    /// more bytes.
    pub(crate) blocked: AtomicBool,
    /// Both ends of the stream, while the peer may be a queue pair of this device.
    pub(crate) ends: Mutex<Option<Ends>>,
    /// The queue pair of this device at the other end of the stream; 0 = none.
    pub(crate) same_device_peer: AtomicU32,
    /// The shard of the thread that polled this queue pair last, if it has a same-device peer;
    /// initially none.
    pub(crate) poller: AtomicUsize,
    /// The number of polls of the peer's poller when this queue pair last read it.
    pub(crate) seen_polls: AtomicU32,
}

/// The state of a queue pair that only the thread with the lock uses.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) engine: Service,
    pub(crate) stream: Option<Box<dyn Stream>>,
    /// The stream took no more.
    pub(crate) blocked: bool,
    /// The stream has taken no more at some time, so that the device is told when it has room.
    pub(crate) watches_room: bool,
    /// The peer's side has ended; the bytes that arrived are still read to the end.
    pub(crate) hung_up: bool,
    /// Destroyed: rings and completion queues are not touched any more.
    pub(crate) dead: bool,
    /// The command that attached a stream is not complete yet; the stream's events are handled
    /// after it.
    pub(crate) attaching: bool,
    pub(crate) gathering: Gathering,
    /// The timer that is set.
    pub(crate) timer: Option<Nanos>,
    /// The stream passes its bytes through memory.
    pub(crate) in_memory: bool,
    /// The stream may deliver its bytes with a delay.
    pub(crate) delays: bool,
}

thread_local! {
    /// The queue pair that this thread rang for or polled last.
    pub(crate) static LAST: Last<Qp> = const { Last::none() };
}

impl Qp {
    /// A queue pair of kind RC or UC.
    pub(crate) fn new(
        identity: Identity,
        queues: QpQueues,
        uar: u32,
        srq: Option<Arc<SharedReceiveQueue>>,
    ) -> Qp {
        let cqs = (queues.send_cq.clone(), queues.recv_cq.clone());
        let engine = Engine::new(queues, identity.unreliable);
        Qp::with(identity, cqs, Service::Connected(engine), uar, srq)
    }

    /// A queue pair of kind UD.
    pub(crate) fn of_datagrams(
        identity: Identity,
        params: DatagramParams,
        uar: u32,
        srq: Option<Arc<SharedReceiveQueue>>,
    ) -> Qp {
        let cqs = (params.send_cq.clone(), params.recv_cq.clone());
        let engine = Box::new(datagram::Engine::new(params, identity.qid));
        let qp = Qp::with(identity, cqs, Service::Datagrams(engine), uar, srq);
        qp.readable.store(true, Ordering::Relaxed);
        qp
    }

    fn with(
        identity: Identity,
        (send_cq, recv_cq): (Arc<CompletionQueue>, Arc<CompletionQueue>),
        mut engine: Service,
        uar: u32,
        srq: Option<Arc<SharedReceiveQueue>>,
    ) -> Qp {
        engine.receive_source().ring_never();
        Qp {
            id: identity.qid,
            identity,
            uar,
            send_cq,
            recv_cq,
            srq,
            counters: Counters::default(),
            later: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            readable: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            ends: Mutex::default(),
            same_device_peer: AtomicU32::new(0),
            poller: AtomicUsize::new(usize::MAX),
            seen_polls: AtomicU32::new(0),
            turns: Turns::new(Inner {
                engine,
                stream: None,
                blocked: false,
                watches_room: false,
                hung_up: false,
                dead: false,
                attaching: false,
                gathering: Gathering::default(),
                timer: None,
                in_memory: false,
                delays: false,
            }),
        }
    }

    pub(crate) fn uses_srq(&self, srqid: u32) -> bool {
        self.srq.as_ref().is_some_and(|srq| srq.id == srqid)
    }

    /// Whether a read of the stream may find something.
    #[inline]
    pub(crate) fn is_readable(&self) -> bool {
        self.readable.load(Ordering::Relaxed)
    }

    /// The requests of a thread that polls the stream; `None` if a read finds nothing. A blocked
    /// socket is tried again at once: its event comes only when a third of its buffer is free, and
    /// until then the receiver's processor sends what the socket has.
    #[inline]
    pub(crate) fn poll_requests(&self) -> Option<Requests> {
        let writes = match self.blocked.load(Ordering::Relaxed) {
            true => Requests::WRITABLE,
            false => Requests::empty(),
        };
        self.is_readable().then_some(Requests::RECEIVE | writes)
    }

    /// Adds `requests` to those that the runtime makes later.
    pub(crate) fn note_later(&self, requests: Requests) {
        self.later.fetch_or(requests.bits(), Ordering::SeqCst);
    }

    /// Takes the requests that the runtime must make now.
    pub(crate) fn take_later(&self) -> Requests {
        Requests::from_bits_retain(self.later.swap(0, Ordering::AcqRel)) - Requests::AGAIN
    }

    pub(crate) fn has_later(&self) -> bool {
        self.later.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn has_later_than_flush(&self) -> bool {
        self.later.load(Ordering::Relaxed) & !Requests::FLUSH.bits() != 0
    }

    /// Runs a command that reads or changes the queue pair. Requests that other threads record
    /// during the command are carried out when it is complete.
    pub(crate) fn command<R>(
        &self,
        effects: &mut Effects,
        run: impl FnOnce(&mut Inner, &mut Effects) -> Result<(R, Requests), Status>,
    ) -> Result<R, Status> {
        let done = run(&mut self.turns.lock(), effects);
        let requests = done.as_ref().map_or(Requests::empty(), |(_, requests)| *requests);
        effects.kick(self.id, requests);
        done.map(|(answer, _)| answer)
    }

    /// Adds up the counters, as of now. The accesses of a peer on this host are counted then only,
    /// because they make no run of the queue pair.
    pub(crate) fn sum_counters_into(&self, sums: &mut [u64; Counter::ALL.len()], effects: &mut Effects) {
        self.turns.lock().engine.count_accesses(&self.counters);
        // Requests that other threads recorded during the command.
        effects.kick(self.id, Requests::empty());
        self.counters.sum_into(sums);
    }

    /// Carries out `QueryQp`: returns the state, and both ends of the stream.
    pub(crate) fn status(&self, effects: &mut Effects) -> Result<(QpStatus, Option<Ends>), Status> {
        self.command(effects, |inner, _| {
            let ends = match &inner.stream {
                Some(stream) => Some(stream.ends()),
                None => inner.engine.ends(),
            };
            let mut status = inner.engine.status();
            if inner.is_in_memory() && status.attached.get() == attached::STREAM {
                status.attached = attached::MEMORY.into();
            }
            Ok(((status, ends), Requests::empty()))
        })
    }
}

impl Inner {
    /// Whether packets or bytes may arrive.
    #[inline]
    pub(crate) fn has_input(&self) -> bool {
        self.stream.is_some() || self.engine.has_ports()
    }

    #[inline]
    pub(crate) fn is_in_memory(&self) -> bool {
        self.in_memory && self.stream.is_some()
    }

    /// Whether neither the stream nor the work is about to end: then a poll that finds nothing has
    /// no more to do.
    #[inline]
    pub(crate) fn is_without_end(&self) -> bool {
        !self.hung_up && self.engine.state() != QpState::Err
    }

    /// Whether a stream that took no more bytes probably has room now, if the stream can report
    /// that without an event.
    #[inline]
    pub(crate) fn has_room(&mut self) -> bool {
        self.blocked && self.stream.as_mut().is_some_and(|stream| stream.has_room())
    }

    /// The number of blocks by which the event index must be ahead: without gathering, `ahead`.
    #[inline]
    pub(crate) fn ring_ahead(&self, ahead: u32) -> u32 {
        if !self.gathering.is_on() {
            return ahead;
        }
        let gathered = match self.is_in_memory() {
            true => GATHERED_IN_MEMORY,
            false if self.engine.is_confirmed() => GATHERED_CONFIRMED,
            false => GATHERED,
        };
        ahead.max(gathered)
    }

    /// Lets delayed bytes of the stream continue; returns when to call again.
    #[inline]
    pub(crate) fn advance(&mut self, now: &Now<'_>) -> Option<Nanos> {
        let stream = self.stream.as_mut().filter(|_| self.delays)?;
        stream.advance(now.get())
    }

    #[inline]
    pub(crate) fn with_engine<R>(&mut self, run: impl FnOnce(&mut Service, &mut dyn Stream) -> R) -> R {
        // One call, so that it can be inlined.
        let stream: &mut dyn Stream = match &mut self.stream {
            Some(stream) => &mut **stream,
            None => &mut NoStream,
        };
        run(&mut self.engine, stream)
    }
}

// Whether a queue pair's sends are gathered.
//
// A ring is served at once. From the [`BURST_RINGS`]th ring with no poll between, sends are
// gathered: the event index moves [`GATHERED`] blocks ahead ([`GATHERED_CONFIRMED`] for a peer that
// confirms, [`GATHERED_IN_MEMORY`] for one on this host), and the entries posted until then leave
// with the next poll, arm, or tick of the background thread. [`IDLE_FLUSHES`] flushes in a row that
// find no more than one entry end that. If none of the burst had found more, gathering only delayed
// a program that waits for answers by polling memory: the next burst takes [`BURST_BACKOFF`] times
// as many rings to begin, up to [`BURST_RINGS_MAX`]. Evidence that gathering is useful ends that at
// once, and each poll for completions halves it.

/// A change of the present burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Burst {
    /// The burst continues, or there is none.
    Same,
    Began,
    Ended,
}

/// The program's doorbells, and the benefit of gathering so far.
#[derive(Debug)]
pub(crate) struct Gathering {
    /// Sends are gathered.
    burst: bool,
    /// Flushes in a row that found next to nothing.
    idle_flushes: u32,
    /// Rings since the program last polled for completions, and the number of its polls then.
    rings: u32,
    polls: u32,
    /// Rings that begin a burst: from [`BURST_RINGS`] to [`BURST_RINGS_MAX`].
    begins_at: u32,
    /// The burst gathered something.
    gathered: bool,
}

impl Default for Gathering {
    fn default() -> Gathering {
        Gathering {
            burst: false,
            idle_flushes: 0,
            rings: 0,
            polls: 0,
            begins_at: BURST_RINGS,
            gathered: false,
        }
    }
}

impl Gathering {
    /// Whether sends are gathered.
    pub(crate) fn is_on(&self) -> bool {
        self.burst
    }

    /// Notes a ring of the driver; `polls` changes whenever the program polls for completions.
    pub(crate) fn note_ring(&mut self, polls: u32) {
        if self.polls != polls {
            (self.polls, self.rings) = (polls, 0);
            // The program's behaviour may have changed since the last poll.
            self.begins_at = (self.begins_at / 2).max(BURST_RINGS);
        }
        self.rings = self.rings.saturating_add(1);
    }

    /// Notes that everything posted has been taken: `sent` entries in this run, which is a flush if
    /// `flushed`. `may_begin`: the state of the queue pair allows a burst.
    pub(crate) fn note_sent(&mut self, sent: u32, flushed: bool, may_begin: bool) -> Burst {
        let begins = !self.burst && self.rings >= self.begins_at && may_begin;
        if sent > 1 {
            self.idle_flushes = 0;
            (self.gathered, self.begins_at) = (true, BURST_RINGS);
        } else if flushed {
            self.idle_flushes += 1;
        }
        if begins {
            (self.burst, self.idle_flushes, self.gathered) = (true, 0, false);
            return Burst::Began;
        }
        if self.burst && self.idle_flushes >= IDLE_FLUSHES {
            if !self.gathered {
                self.begins_at = (self.begins_at * BURST_BACKOFF).min(BURST_RINGS_MAX);
            }
            self.end();
            return Burst::Ended;
        }
        Burst::Same
    }

    /// Ends the burst. Returns whether there was one.
    pub(crate) fn end(&mut self) -> bool {
        self.rings = 0;
        std::mem::take(&mut self.burst)
    }

    /// Forgets the program's behaviour: the next burst begins as early as the first.
    pub(crate) fn forget(&mut self) {
        self.begins_at = BURST_RINGS;
    }
}

// The engine of a queue pair, by its kind.

/// The engine of a queue pair. Each function does the same as the function of that name in
/// [`rdmap::Engine`]; datagrams ignore the stream.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "the engine of most queue pairs, without a pointer to it"
)]
pub(crate) enum Service {
    /// Over a stream.
    Connected(rdmap::Engine),
    /// Datagrams over UDP.
    Datagrams(Box<datagram::Engine>),
    /// Packets of RoCE v2.
    Roce(Box<roce::Engine>),
}

impl Service {
    /// The engine of a connected queue pair.
    pub(crate) fn connected(&mut self) -> Result<&mut rdmap::Engine, WrongState> {
        match self {
            Service::Connected(engine) => Ok(engine),
            _ => Err(WrongState),
        }
    }

    /// The engine of a queue pair of kind UD.
    pub(crate) fn datagrams(&mut self) -> Result<&mut datagram::Engine, WrongState> {
        match self {
            Service::Datagrams(engine) => Ok(engine),
            _ => Err(WrongState),
        }
    }

    /// The engine of a queue pair that speaks RoCE v2.
    pub(crate) fn roce(&mut self) -> Result<&mut roce::Engine, WrongState> {
        match self {
            Service::Roce(engine) => Ok(engine),
            _ => Err(WrongState),
        }
    }

    /// The engine of a queue pair of kind RC or UC in the state INIT, which speaks RoCE v2 from now
    /// on, by the `port`. Returns whether it did not before.
    pub(crate) fn speak_roce(
        &mut self,
        port: impl FnOnce() -> Result<RocePort, Status>,
    ) -> Result<bool, Status> {
        let engine = match self {
            Service::Roce(_) => return Ok(false),
            Service::Datagrams(_) => return Err(Status::WrongState),
            Service::Connected(engine) => engine,
        };
        let begun = engine
            .before_connection()
            .map_err(|WrongState| Status::WrongState)?;
        let is_unreliable = engine.is_unreliable();
        *self = Service::Roce(Box::new(roce::Engine::new(begun, port()?, is_unreliable)));
        Ok(true)
    }

    /// Whether packets arrive by UDP ports.
    pub(crate) fn has_ports(&self) -> bool {
        matches!(self, Service::Datagrams(_) | Service::Roce(_))
    }

    /// The descriptors of its UDP ports, to poll for readiness.
    pub(crate) fn ports(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Service::Connected(_) => Vec::new(),
            Service::Datagrams(engine) => engine.descriptors().collect(),
            Service::Roce(engine) => engine.descriptors().collect(),
        }
    }

    /// Whether another stream may take the place of one that ended: kind UC.
    pub(crate) fn is_parted(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.is_parted(),
            Service::Datagrams(_) | Service::Roce(_) => false,
        }
    }

    /// Whether requests complete when messages of the peer confirm them.
    pub(crate) fn is_confirmed(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.is_confirmed(),
            Service::Datagrams(_) | Service::Roce(_) => false,
        }
    }

    #[inline]
    pub(crate) fn state(&self) -> QpState {
        match self {
            Service::Connected(engine) => engine.state(),
            Service::Datagrams(engine) => engine.state(),
            Service::Roce(engine) => engine.state(),
        }
    }

    /// Both ends of a connection without a stream.
    pub(crate) fn ends(&self) -> Option<Ends> {
        match self {
            Service::Connected(_) | Service::Datagrams(_) => None,
            Service::Roce(engine) => engine.ends(),
        }
    }

    pub(crate) fn status(&self) -> QpStatus {
        match self {
            Service::Connected(engine) => engine.status(),
            Service::Datagrams(engine) => engine.status(),
            Service::Roce(engine) => engine.status(),
        }
    }

    /// Returns to the reset state, on the same rings. A connection of RoCE v2 closes its port.
    pub(crate) fn reset(&mut self) {
        match self {
            Service::Connected(engine) => *engine = engine.anew(),
            Service::Datagrams(engine) => engine.reset(),
            Service::Roce(engine) => {
                let anew = Engine::new(engine.queues_anew(), engine.is_unreliable());
                *self = Service::Connected(anew);
            }
        }
    }

    #[inline]
    pub(crate) fn send_queue(&mut self) -> &mut SendQueue {
        match self {
            Service::Connected(engine) => engine.send_queue(),
            Service::Datagrams(engine) => engine.send_queue(),
            Service::Roce(engine) => engine.send_queue(),
        }
    }

    #[inline]
    pub(crate) fn receive_source(&mut self) -> &mut ReceiveSource {
        match self {
            Service::Connected(engine) => engine.receive_source(),
            Service::Datagrams(engine) => engine.receive_source(),
            Service::Roce(engine) => engine.receive_source(),
        }
    }

    #[inline]
    pub(crate) fn is_at_rest(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.is_at_rest(),
            Service::Datagrams(_) => false,
            Service::Roce(engine) => engine.is_at_rest(),
        }
    }

    #[inline]
    pub(crate) fn fast_transmit(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        match self {
            Service::Connected(engine) => engine.fast_transmit(env, stream),
            Service::Datagrams(_) | Service::Roce(_) => false,
        }
    }

    #[inline]
    pub(crate) fn transmit(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        match self {
            Service::Connected(engine) => engine.transmit(env, stream),
            Service::Datagrams(engine) => engine.transmit(env),
            Service::Roce(engine) => engine.transmit(env),
        }
    }

    #[inline]
    pub(crate) fn receive(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        match self {
            Service::Connected(engine) => engine.receive(env, stream),
            Service::Datagrams(engine) => engine.receive(env),
            Service::Roce(engine) => engine.receive(env),
        }
    }

    /// Whether messages of the peer are processed that a confirmation, or RoCE's acknowledgement,
    /// must still confirm.
    #[inline]
    pub(crate) fn owes_confirmation(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.owes_confirmation(),
            Service::Datagrams(_) => false,
            Service::Roce(engine) => engine.owes_acknowledgement(),
        }
    }

    /// Lets the next [`transmit`](Self::transmit) confirm although no message is to be sent, if it
    /// is time; `polled_again`: the program has polled since, and nothing more has arrived;
    /// `is_drained`: nothing more has arrived. Returns whether it is time.
    pub(crate) fn confirm_alone(&mut self, polled_again: bool, is_drained: bool) -> bool {
        match self {
            Service::Connected(engine) => engine.confirm_alone(polled_again, is_drained),
            Service::Datagrams(_) => false,
            Service::Roce(engine) => engine.acknowledge_alone(polled_again, is_drained),
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
            Service::Roce(engine) => engine.modify(change, env),
        }
    }

    pub(crate) fn fail(&mut self, fault: QpFault, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match self {
            Service::Connected(engine) => engine.fail(fault, env, stream),
            Service::Datagrams(engine) => engine.fail(fault, env),
            Service::Roce(engine) => engine.fail(fault, env),
        }
    }

    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        match self {
            Service::Connected(engine) => engine.flush(env),
            Service::Datagrams(engine) => engine.flush(env),
            Service::Roce(engine) => engine.flush(env),
        }
    }

    #[inline]
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        match self {
            Service::Connected(engine) => engine.deadline(),
            Service::Datagrams(_) => None,
            Service::Roce(engine) => engine.deadline(),
        }
    }

    pub(crate) fn tick(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match self {
            Service::Connected(engine) => engine.tick(env, stream),
            Service::Datagrams(engine) => engine.tick(),
            Service::Roce(engine) => engine.tick(env),
        }
    }

    /// Watches the peer while a request waits for it.
    #[inline]
    pub(crate) fn watch_peer(&mut self, env: &Env<'_>, stream: &mut dyn Stream) {
        if let Service::Connected(engine) = self {
            engine.watch_peer(env, stream);
        }
    }

    pub(crate) fn note_end_after_parked(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if let Service::Connected(engine) = self {
            engine.note_end_after_parked(env, stream);
        }
    }

    #[inline]
    pub(crate) fn has_progressed(&mut self) -> bool {
        match self {
            Service::Connected(engine) => engine.has_progressed(),
            Service::Datagrams(_) | Service::Roce(_) => false,
        }
    }

    /// Counts the accesses of a local peer to our memory.
    pub(crate) fn count_accesses(&mut self, counters: &Counters) {
        if let Service::Connected(engine) = self {
            engine.count_accesses(counters);
        }
    }

    pub(crate) fn peer_progressed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if let Service::Connected(engine) = self {
            engine.peer_progressed(env, stream);
        }
    }

    #[inline]
    pub(crate) fn has_parked(&self) -> bool {
        match self {
            Service::Connected(engine) => engine.has_parked(),
            Service::Datagrams(_) | Service::Roce(_) => false,
        }
    }

    /// Before this side ends: takes in the bytes that have arrived, and confirms them.
    pub(crate) fn conclude(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match self {
            Service::Connected(engine) => engine.conclude(env, stream),
            Service::Datagrams(_) => {}
            Service::Roce(engine) => engine.conclude(env),
        }
    }

    pub(crate) fn abandon(&mut self) {
        match self {
            Service::Connected(engine) => engine.abandon(),
            Service::Datagrams(engine) => engine.abandon(),
            Service::Roce(engine) => engine.abandon(),
        }
    }
}
