//! A queue pair: an engine, its stream, and who may run it when.
//!
//! Nobody waits for a queue pair's lock on the data path: see [`Turns`].
//!
//! *Gathering.* A ring is served at once. From the [`BURST`]th ring with no poll between, sends are gathered: the event
//! index moves [`GATHERED`] blocks ahead, and what is posted until then leaves with the next poll, arm, or tick of the
//! background thread. [`CALM`] flushes in a row that find no more than one entry end that. If none of the burst had found more, gathering only
//! delayed a program that waits for answers by looking at memory: the next burst takes [`BACKOFF`] times as many rings to begin, up to
//! [`MAX_BURST`]. What shows that gathering pays ends that at once, and each look for completions halves it.

use crate::asked::Asked;
use crate::counters::Counter;
use crate::effects::Effects;
use crate::env::Env;
use crate::innards::Core;
use crate::queues::{CompletionQueue, SharedReceiveQueue};
use crate::rdmap::{
    Attachment, Engine, NoStream, QpChange, QpParams, RxOutcome, TxOutcome, Verdicts, WrongState,
};
use crate::runtime::{Timer, Token};
use crate::stream::Stream;
use crate::table::Found;
use crate::time::Nanos;
use crate::turns::Turns;
use crate::{Counters, counters};
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use urnic_verbs_api::device::command::{QpStatus, Status};
use urnic_verbs_api::device::event::QpFault;
use urnic_verbs_api::vocabulary::QpState;

/// Rings with no poll between that begin a burst, at first.
const BURST: u32 = 4;
/// Flushes that find next to nothing and end a burst: one is but the program catching up with its completions.
const CALM: u32 = 8;
/// How many times as many the next one takes after one that gathered nothing, and the most that it takes.
const BACKOFF: u32 = 8;
const MAX_BURST: u32 = 1 << 12;
/// Blocks that may be posted in a burst without a ring.
const GATHERED: u32 = 64;
/// Event index so far ahead that no ring comes: the device looks by itself.
const NO_RING: u32 = 1 << 30;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) id: u32,
    pub(crate) pd: u32,
    pub(crate) uar: u32,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    pub(crate) srq: Option<Arc<SharedReceiveQueue>>,
    pub(crate) counters: Counters,
    turns: Turns<Inner>,
    /// What the runtime is to ask for later.
    later: AtomicU32,
    /// Whether the runtime has it on its list for that.
    pub(crate) listed: AtomicBool,
    /// Whether a read of the stream may find something.
    readable: AtomicBool,
    /// Whether sends wait for the stream.
    blocked: AtomicBool,
    /// Both ends of the stream, while the peer may be a queue pair of this device.
    ends: Mutex<Option<(SocketAddr, SocketAddr)>>,
    /// The queue pair of this device at the other end of the stream; 0 = none.
    sibling: AtomicU32,
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    stream: Option<Box<dyn Stream>>,
    /// The stream took no more.
    blocked: bool,
    /// The peer's side has ended; what is left is to be read to the end.
    hung_up: bool,
    /// Destroyed: rings and completion queues are not touched any more.
    dead: bool,
    /// The command that attached a stream is not complete yet; its events come later.
    held: bool,
    /// Sends are gathered.
    burst: bool,
    /// Flushes in a row that found next to nothing.
    calm: u32,
    /// Rings since the program last looked for completions, and what [`Qp::looks`] was then.
    rings: u32,
    looks: u32,
    /// Rings that begin a burst: from [`BURST`] to [`MAX_BURST`].
    begins_at: u32,
    /// The burst gathered something.
    gathered: bool,
    /// The timer that is set.
    timer: Option<Nanos>,
}

/// Our end of a stream, and the peer's.
pub(crate) type Ends = (SocketAddr, SocketAddr);

impl Qp {
    pub(crate) fn new(params: QpParams, uar: u32, srq: Option<Arc<SharedReceiveQueue>>) -> Qp {
        let (id, pd) = (params.qid, params.pd);
        let (send_cq, recv_cq) = (params.send_cq.clone(), params.recv_cq.clone());
        let mut engine = Engine::new(params);
        engine.receive_source().ring_never();
        Qp {
            id,
            pd,
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
            sibling: AtomicU32::new(0),
            turns: Turns::new(Inner {
                engine,
                stream: None,
                blocked: false,
                hung_up: false,
                dead: false,
                held: false,
                burst: false,
                calm: 0,
                rings: 0,
                looks: 0,
                begins_at: BURST,
                gathered: false,
                timer: None,
            }),
        }
    }

    pub(crate) fn uses_cq(&self, cqid: u32) -> bool {
        self.send_cq.id == cqid || self.recv_cq.id == cqid
    }

    pub(crate) fn uses_srq(&self, srqid: u32) -> bool {
        self.srq.as_ref().is_some_and(|srq| srq.id == srqid)
    }

    /// Has something done, here or by whoever is at it already. Returns whether bytes arrived, or left after a wait.
    pub(crate) fn kick(self: &Arc<Qp>, core: &Core, asked: Asked) -> bool {
        let (mut arrived, mut judged) = (false, false);
        let left = self.turns.ask(
            asked.0,
            |inner, asked| {
                let mut effects = Effects::default();
                arrived |= self.run(core, inner, Asked(asked), &mut effects);
                judged |= inner.engine.has_judged();
                effects
            },
            |effects| core.raise(effects),
        );
        if left {
            self.do_later(core, Asked::AGAIN);
        }
        if judged && let Some(sibling) = self.sibling(core) {
            match asked {
                // Not to and fro, in ever deeper calls.
                Asked::JUDGED => sibling.do_later(core, Asked::JUDGED),
                _ => {
                    sibling.kick(core, Asked::JUDGED);
                }
            }
        }
        arrived
    }

    fn env<'a>(&'a self, core: &'a Core, now: Nanos, effects: &'a mut Effects) -> Env<'a> {
        Env {
            memory: &core.memory,
            now,
            buffers: &core.buffers,
            counters: &self.counters,
            effects,
        }
    }

    /// Does what was asked; returns whether bytes arrived.
    fn run(self: &Arc<Qp>, core: &Core, inner: &mut Inner, asked: Asked, effects: &mut Effects) -> bool {
        if asked.has(Asked::ATTACHED) {
            inner.held = false;
            if let Some(fd) = inner.stream.as_ref().and_then(|s| s.descriptor()) {
                core.runtime.rewatch(fd, Token::Qp(self.id));
                self.readable.store(true, Ordering::Relaxed);
            }
        }
        if inner.dead || inner.held {
            return false;
        }
        let mut env = self.env(core, core.clock.now(), effects);
        let moved = || {
            let waited = if asked.has(Asked::WRITABLE) {
                self.counters.value(Counter::TxBytes)
            } else {
                0
            };
            self.counters.value(Counter::RxBytes).wrapping_add(waited)
        };
        let before = moved();
        if asked.has(Asked::CQ_LOST) {
            inner.with_engine(|engine, stream| engine.fail(QpFault::CqOverflow, &mut env, stream));
        }
        if asked.has(Asked::JUDGED) {
            inner.with_engine(|engine, stream| engine.judged(&mut env, stream));
        }
        if asked.has(Asked::TIMER) {
            inner.timer = None;
            inner.with_engine(|engine, stream| engine.tick(&mut env, stream));
        }
        if asked.has(Asked::SEND) {
            self.counters.add(Counter::Doorbells, 1);
            inner.note_ring(self.looks(core));
        }
        inner.hung_up |= asked.has(Asked::HANG_UP);
        let receives = Asked::RECEIVE | Asked::HANG_UP | Asked::TIMER | Asked::CQ_LOST;
        // A poll that finds nothing changes nothing.
        let only_looks = asked.only(Asked::RECEIVE | Asked::JUDGED)
            && inner.stream.is_some()
            && !inner.engine.is_held_up();
        if asked.has(receives) {
            self.receive(core, inner, &mut env);
        }
        let arrived = moved() != before;
        let sends =
            !inner.blocked || asked.has(Asked::WRITABLE | Asked::HANG_UP | Asked::TIMER | Asked::CQ_LOST);
        if sends && (arrived || !only_looks) {
            self.transmit(core, inner, &mut env, asked);
        }
        self.settle(core, inner, &mut env);
        moved() != before
    }

    /// A number that changes whenever the program looks for completions: with every poll that finds none, and with those taken.
    fn looks(&self, core: &Core) -> u32 {
        let taken = self.send_cq.consumer().wrapping_add(self.recv_cq.consumer());
        core.runtime.polls().wrapping_add(taken)
    }

    /// Reads the stream until it has nothing more, or as far as one run goes.
    fn receive(self: &Arc<Qp>, core: &Core, inner: &mut Inner, env: &mut Env<'_>) {
        let mut read = u64::MAX;
        // No ring is wanted for receives unless the stream turns out to wait for one.
        if !self.is_readable() && inner.stream.is_some() {
            self.readable.store(true, Ordering::Relaxed);
            inner.engine.receive_source().ring_never();
        }
        loop {
            match inner.with_engine(|engine, stream| engine.receive(env, stream)) {
                // The end may wait behind what was read, and nothing will tell of it again.
                RxOutcome::Drained if inner.hung_up && self.counters.value(Counter::RxBytes) != read => {
                    read = self.counters.value(Counter::RxBytes);
                }
                RxOutcome::Drained => return,
                RxOutcome::More => return self.do_later(core, Asked::RECEIVE),
                RxOutcome::Stalled => {
                    if !inner.engine.receive_source().ring_at_next() {
                        self.counters.add(Counter::RxStalls, 1);
                        self.readable.store(false, Ordering::Relaxed);
                        return;
                    }
                }
                RxOutcome::Finished => {
                    inner.hung_up = false;
                    self.readable.store(false, Ordering::Relaxed);
                    return;
                }
                RxOutcome::Ended => {
                    inner.hung_up = false;
                    inner.stream = None;
                    self.leave_sibling(core);
                    self.readable.store(false, Ordering::Relaxed);
                    return;
                }
            }
        }
    }

    /// Sends until there is nothing to send, or as far as one run goes; then says when to ring next.
    fn transmit(self: &Arc<Qp>, core: &Core, inner: &mut Inner, env: &mut Env<'_>, asked: Asked) {
        let before = inner.engine.send_queue().taken();
        let mut known = false;
        loop {
            let taken = inner.engine.send_queue().taken();
            let outcome = inner.with_engine(|engine, stream| engine.transmit(env, stream));
            inner.blocked = outcome == TxOutcome::Blocked;
            self.blocked.store(inner.blocked, Ordering::Relaxed);
            let ahead = match outcome {
                TxOutcome::Idle => 0,
                TxOutcome::Blocked => NO_RING,
                TxOutcome::More => {
                    self.do_later(core, Asked::RESUME);
                    NO_RING
                }
            };
            if ahead == 0 {
                self.gather(core, inner, before, asked);
            }
            let queue = inner.engine.send_queue();
            let ahead = if inner.burst { ahead.max(GATHERED) } else { ahead };
            let posted = queue.ring_after(ahead);
            if !posted {
                return;
            }
            if known {
                // What was posted before the last run and still not taken waits for something other than a ring. If more was
                // posted, it may be by a program that polls: this thread may have better things to do than to send for it.
                if queue.taken() != taken {
                    self.do_later(core, Asked::RESUME);
                }
                return;
            }
            known = true;
        }
    }

    /// Begins or ends a burst, now that everything posted has been taken; `before` entries had been before.
    fn gather(self: &Arc<Qp>, core: &Core, inner: &mut Inner, before: u32, asked: Asked) {
        let sent = inner.engine.send_queue().taken().wrapping_sub(before);
        let begins = !inner.burst && inner.rings >= inner.begins_at && inner.engine.state() == QpState::Rts;
        if sent > 1 {
            inner.calm = 0;
            (inner.gathered, inner.begins_at) = (true, BURST);
        } else if asked.has(Asked::FLUSH) {
            inner.calm += 1;
        }
        if begins {
            (inner.burst, inner.calm, inner.gathered) = (true, 0, false);
            core.runtime.burst_began();
        } else if inner.burst && inner.calm >= CALM {
            if !inner.gathered {
                inner.begins_at = (inner.begins_at * BACKOFF).min(MAX_BURST);
            }
            inner.end_burst(core);
        }
        if inner.burst {
            if sent > 1 {
                self.counters.add(Counter::GatheredFlushes, 1);
            }
            self.do_later(core, Asked::FLUSH);
        }
    }

    /// After every run: no ring may be missed in the error state, no timer forgotten.
    fn settle(self: &Arc<Qp>, core: &Core, inner: &mut Inner, env: &mut Env<'_>) {
        if inner.engine.state() == QpState::Err {
            inner.end_burst(core);
            let mut left = u32::MAX;
            loop {
                inner.engine.flush(env);
                let sends = inner.engine.send_queue();
                let unsent = u32::from(sends.ring_after(0));
                let unfilled = inner.engine.receive_source().ring_for_flush();
                // What stays unflushed finds no room in its completion queue.
                let now_left = unsent + unfilled;
                if now_left == 0 || now_left >= left {
                    break;
                }
                left = now_left;
            }
        }
        let due = inner.engine.deadline();
        if let Some(due) = due
            && inner.timer.is_none_or(|set| due < set)
        {
            inner.timer = Some(due);
            core.runtime.set_timer(due, Timer::Qp(self.id));
        }
    }

    /// Leaves something to the runtime.
    fn do_later(self: &Arc<Qp>, core: &Core, asked: Asked) {
        self.later.fetch_or(asked.0, Ordering::SeqCst);
        core.runtime.attend_later(self);
    }

    /// What the runtime is to ask for now.
    pub(crate) fn take_later(&self) -> Asked {
        Asked(self.later.swap(0, Ordering::AcqRel) & !Asked::AGAIN.0)
    }

    pub(crate) fn has_later(&self) -> bool {
        self.later.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn has_later_than_flush(&self) -> bool {
        self.later.load(Ordering::Relaxed) & !Asked::FLUSH.0 != 0
    }

    /// Has a command look at or change the queue pair; what others asked for meanwhile is done when it is complete.
    fn command<R>(
        &self,
        effects: &mut Effects,
        run: impl FnOnce(&mut Inner, &mut Effects) -> Result<(R, Asked), Status>,
    ) -> Result<R, Status> {
        let done = run(&mut self.turns.lock(), effects);
        let asked = done.as_ref().map_or(Asked::NOTHING, |(_, asked)| *asked);
        effects.kick(self.id, asked);
        done.map(|(answer, _)| answer)
    }

    /// Carries out `ModifyQp`.
    pub(crate) fn modify(&self, core: &Core, change: QpChange, effects: &mut Effects) -> Result<(), Status> {
        self.command(effects, |inner, effects| {
            if change.state == Some(QpState::Reset) {
                self.reset(core, inner);
                return Ok(((), Asked::NOTHING));
            }
            let mut env = self.env(core, core.clock.now(), effects);
            inner
                .with_engine(|engine, stream| engine.modify(&change, &mut env, stream))
                .map_err(|WrongState| Status::WrongState)?;
            Ok(((), Asked::RESUME | Asked::RECEIVE))
        })
    }

    /// Back to the beginning, on the same rings: what is posted there is forgotten, and the indices go on.
    fn reset(&self, core: &Core, inner: &mut Inner) {
        inner.end_burst(core);
        if let Some(mut stream) = inner.stream.take() {
            stream.reset();
        }
        self.leave_sibling(core);
        core.memory.unbind_all_of(self.id);
        inner.engine = inner.engine.anew();
        inner.engine.receive_source().ring_never();
        inner.begins_at = BURST;
        (inner.blocked, inner.hung_up, inner.held, inner.timer) = (false, false, false, None);
    }

    /// Whether a read of the stream may find something.
    #[inline]
    pub(crate) fn is_readable(&self) -> bool {
        self.readable.load(Ordering::Relaxed)
    }

    /// Whether only a read may find something to do.
    #[inline]
    pub(crate) fn only_receives(&self) -> bool {
        self.is_readable() && !self.blocked.load(Ordering::Relaxed)
    }

    /// Carries out `QueryQp`: its state, and both ends of its stream.
    pub(crate) fn status(&self, effects: &mut Effects) -> Result<(QpStatus, Option<Ends>), Status> {
        self.command(effects, |inner, _| {
            let ends = inner
                .stream
                .as_ref()
                .map(|stream| (stream.local(), stream.remote()));
            Ok(((inner.engine.status(), ends), Asked::NOTHING))
        })
    }

    /// Begins RDMA mode on `stream`, which is taken if that succeeds. `awaited`: its other end is this device's, too.
    pub(crate) fn attach(
        &self,
        core: &Core,
        stream: &mut Option<Box<dyn Stream>>,
        attachment: &Attachment,
        awaited: bool,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        self.command(effects, |inner, effects| {
            let Some(live) = stream.as_mut().filter(|_| !inner.dead && inner.stream.is_none()) else {
                return Err(Status::WrongState);
            };
            let mut env = self.env(core, core.clock.now(), effects);
            inner
                .engine
                .attach(attachment, &mut env, &mut **live)
                .map_err(|WrongState| Status::WrongState)?;
            self.find_sibling(core, &**live, &mut inner.engine, awaited);
            inner.stream = stream.take();
            inner.held = true;
            Ok(((), Asked::ATTACHED | Asked::RESUME | Asked::RECEIVE))
        })
    }

    /// Looks whether the other end of `stream` is a queue pair of this device, too; `awaited`: it will be.
    fn find_sibling(&self, core: &Core, stream: &dyn Stream, engine: &mut Engine, awaited: bool) {
        let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        let (local, remote) = (plain(stream.local()), plain(stream.remote()));
        if local.ip() != remote.ip() {
            return;
        }
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner) = Some((local, remote));
        let mut ends = core.ends();
        let sibling = (ends.get(&(remote, local)))
            .and_then(|(id, meeting)| Some((core.qps.find(*id)?, meeting.join()?)));
        let (sibling, verdicts) = match sibling {
            Some((sibling, verdicts)) => (Some(sibling), verdicts),
            None => (None, Verdicts::first(awaited)),
        };
        ends.insert((local, remote), (self.id, verdicts.meeting()));
        drop(ends);
        engine.await_verdicts(verdicts);
        if let Some(sibling) = sibling {
            self.sibling.store(sibling.id, Ordering::Relaxed);
            sibling.sibling.store(self.id, Ordering::Relaxed);
        }
    }

    /// The stream is gone: its ends may be those of another one next.
    fn leave_sibling(&self, core: &Core) {
        self.sibling.store(0, Ordering::Relaxed);
        let own_ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(own_ends) = own_ends
            && let Entry::Occupied(entry) = core.ends().entry(own_ends)
            && entry.get().0 == self.id
        {
            entry.remove();
        }
    }

    /// The queue pair of this device at the other end of the stream.
    #[inline]
    fn sibling(&self, core: &Core) -> Option<Found<Qp>> {
        match self.sibling.load(Ordering::Relaxed) {
            0 => None,
            id => core.qps.find(id),
        }
    }

    /// As [`kick`](Qp::kick). If the peer is a queue pair of this device, it receives at once, too, as far as the stream carried
    /// what was sent: our requests complete when it has.
    pub(crate) fn kick_through(self: &Arc<Qp>, core: &Core, asked: Asked) {
        self.kick(core, asked);
        if let Some(sibling) = self.sibling(core) {
            sibling.kick(core, Asked::RECEIVE);
        }
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
            let attached = inner.engine.attach_loopback(attachment, tap);
            attached.map_err(|WrongState| Status::WrongState)?;
            Ok(((), Asked::RESUME))
        })
    }

    /// Ends the queue pair: nothing of the host's is touched any more when this returns. What its completed sends put on
    /// the stream still arrives; for a reset no more is sent.
    pub(crate) fn destroy(&self, core: &Core, reset: bool, effects: &mut Effects) {
        let mut inner = self.turns.lock();
        if inner.dead {
            return;
        }
        if !reset {
            let mut env = self.env(core, core.clock.now(), effects);
            inner.with_engine(|engine, stream| engine.transmit(&mut env, stream));
        }
        inner.dead = true;
        inner.end_burst(core);
        let stream = inner.stream.take();
        drop(inner);
        self.leave_sibling(core);
        if let Some(stream) = stream {
            core.runtime.linger(core, stream, Vec::new());
        }
        core.memory.unbind_all_of(self.id);
        for counter in counters::Counter::ALL {
            core.counters.add_shared(*counter, self.counters.value(*counter));
        }
    }
}

impl Inner {
    fn with_engine<R>(&mut self, run: impl FnOnce(&mut Engine, &mut dyn Stream) -> R) -> R {
        match &mut self.stream {
            Some(stream) => run(&mut self.engine, &mut **stream),
            None => run(&mut self.engine, &mut NoStream),
        }
    }

    fn note_ring(&mut self, looks: u32) {
        if self.looks != looks {
            (self.looks, self.rings) = (looks, 0);
            // What it does may have changed meanwhile.
            self.begins_at = (self.begins_at / 2).max(BURST);
        }
        self.rings = self.rings.saturating_add(1);
    }

    fn end_burst(&mut self, core: &Core) {
        self.rings = 0;
        if std::mem::take(&mut self.burst) {
            core.runtime.burst_ended();
        }
    }
}
