//! Who drives the device, and when.
//!
//! | who | drives |
//! |---|---|
//! | a ringing thread | the queue pair it rang for |
//! | a poller ([`progress`]) | what was gathered; the stream that last delivered to this thread; every [`LOOK_AROUND`]th time all that are ready |
//! | who waits for an event ([`lend`]) | all that is ready, for a short time |
//! | the [background](background) thread | all that is ready, while nobody polls; timers; streams on their way out |
//!
//! All descriptors are registered once, edge-triggered for both directions, so nothing on the data path changes a
//! registration. Whoever is told of an edge must act on it, or leave it on the list of [`Runtime::attend_later`].

mod background;
mod readiness;
mod sleeper;

pub(crate) use background::Background;
pub(crate) use readiness::Token;

use crate::asked::Asked;
use crate::counters::Counter;
use crate::effects::Effects;
use crate::innards::{Clock, Core};
use crate::qp::Qp;
use crate::shard::{SHARDS, home_shard};
use crate::stream::descriptor::Descriptors;
use crate::stream::{Lingering, Stream};
use crate::time::Nanos;
use readiness::Readiness;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use sleeper::Sleeper;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Polls between two looks at all streams instead of the hottest one.
const LOOK_AROUND: u32 = 16;
/// Arrivals, and streams that take bytes again, that pollers found in a row, after which they drive the device.
const POLLER: u32 = 16;
/// Polls in a row to which nothing came after which a poller lets others onto its processor, and how often then. Whoever is
/// to send may be waiting for just that; with a processor of one's own it costs next to nothing.
const PATIENCE: u32 = 256;
const YIELD_EVERY: u32 = 16;
/// Threads that waited for an event and got it are back within this time, as a rule, to wait for the next.
const RETURN: Duration = Duration::from_micros(500);
/// Queue pairs attended to between two looks at the list.
const BATCH: usize = 8;

/// Whose time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A queue pair's.
    Qp(u32),
    /// That of a completion queue's notification.
    Cq(u32),
}

#[repr(align(64))]
#[derive(Debug, Default)]
struct Hot {
    /// The queue pair that last delivered to a thread of this shard; 0 = none.
    qid: AtomicU32,
    polls: AtomicU32,
    /// Polls since something came.
    idle: AtomicU32,
}

impl Hot {
    /// Something came, or nothing.
    fn note(&self, arrived: bool) {
        if arrived {
            self.idle.store(0, Ordering::Relaxed);
            return;
        }
        let idle = self.idle.load(Ordering::Relaxed).wrapping_add(1);
        self.idle.store(idle, Ordering::Relaxed);
        if idle >= PATIENCE && idle.is_multiple_of(YIELD_EVERY) {
            rustix::thread::sched_yield();
        }
    }
}

/// What came of a look at the descriptors.
#[derive(Debug, Default, Clone, Copy)]
struct Told {
    /// The last queue pair for which something came.
    arrived: Option<u32>,
    /// A stream on its way out is ready.
    linger: bool,
    /// Somebody wants it to look around.
    wake: bool,
}

/// What is to be done, and by whom.
#[derive(Debug)]
pub(crate) struct Runtime {
    readiness: Option<Readiness>,
    sleeper: Sleeper,
    hot: [Hot; SHARDS],
    polls: AtomicU32,
    /// Something was left for the background thread since it last looked.
    pending: AtomicBool,
    /// Arrivals in a row that pollers found, up to [`POLLER`].
    found: AtomicU32,
    /// Until when the background thread leaves the streams to threads that wait for events ([`lend`]); 0 = it does not.
    lent_until: AtomicU64,
    /// Queue pairs with something left to do.
    attention: Mutex<Vec<Arc<Qp>>>,
    attention_len: AtomicUsize,
    /// Queue pairs that gather sends.
    bursts: AtomicUsize,
    timers: Mutex<BinaryHeap<Reverse<(Nanos, Timer)>>>,
    lingering: Mutex<Vec<Lingering>>,
    /// Calls or events that found no room.
    left_over: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runtime {
    /// One that waits for descriptors.
    pub(crate) fn with_epoll(descriptors: &Arc<Descriptors>) -> io::Result<Runtime> {
        Ok(Runtime {
            readiness: Some(Readiness::new(descriptors)?),
            ..Runtime::manual()
        })
    }

    /// One that only [`step`] moves.
    pub(crate) fn manual() -> Runtime {
        Runtime {
            readiness: None,
            sleeper: Sleeper::default(),
            hot: Default::default(),
            polls: AtomicU32::new(0),
            pending: AtomicBool::new(false),
            found: AtomicU32::new(0),
            lent_until: AtomicU64::new(0),
            attention: Mutex::default(),
            attention_len: AtomicUsize::new(0),
            bursts: AtomicUsize::new(0),
            timers: Mutex::default(),
            lingering: Mutex::default(),
            left_over: AtomicBool::new(false),
        }
    }

    /// Registers a descriptor.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: Token) -> Result<(), Errno> {
        self.readiness.as_ref().map_or(Ok(()), |r| r.add(fd, token))
    }

    /// Gives a registered descriptor a new meaning; if it is ready, that is told anew.
    pub(crate) fn rewatch(&self, fd: BorrowedFd<'_>, token: Token) {
        if let Some(readiness) = &self.readiness {
            readiness.change(fd, token);
        }
    }

    /// Makes sure that the background thread looks around soon.
    fn wake(&self) {
        self.pending.store(true, Ordering::SeqCst);
        if self.sleeper.must_be_woken()
            && let Some(readiness) = &self.readiness
        {
            readiness.wake();
        }
    }

    #[inline]
    pub(crate) fn polls(&self) -> u32 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Whether queue pairs left something for the next poll or tick.
    fn has_attention(&self) -> bool {
        self.attention_len.load(Ordering::SeqCst) > 0
    }

    /// Whether sends wait for a poll.
    #[inline]
    pub(crate) fn has_gathered(&self) -> bool {
        self.bursts.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn burst_began(&self) {
        self.bursts.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn burst_ended(&self) {
        self.bursts.fetch_sub(1, Ordering::SeqCst);
    }

    /// Somebody is about to wait for an interrupt: what pollers found before does not count any more, nor that others are about to come back.
    pub(crate) fn note_waiter(&self) {
        self.forget_pollers();
        if self.lent_until.load(Ordering::SeqCst) != 0 {
            self.lent_until.store(0, Ordering::SeqCst);
        }
        self.look_at_streams();
    }

    /// The background thread is not to leave the streams alone any more.
    fn look_at_streams(&self) {
        if self.sleeper.ignores_streams()
            && let Some(readiness) = &self.readiness
        {
            readiness.wake();
        }
    }

    /// Not the pollers find what comes, or not any more.
    fn forget_pollers(&self) {
        if self.found.load(Ordering::Relaxed) != 0 {
            self.found.store(0, Ordering::SeqCst);
        }
    }

    /// A poller found what came.
    #[inline]
    fn note_found(&self) {
        // Approximate, and not written to any more once it is enough.
        let found = self.found.load(Ordering::Relaxed);
        if found < POLLER {
            self.found.store(found + 1, Ordering::Relaxed);
            if found + 1 == POLLER {
                // The background thread is told once to leave the streams alone.
                self.wake();
            }
        }
    }

    /// Whether pollers drive the device.
    fn is_driven(&self) -> bool {
        self.found.load(Ordering::SeqCst) >= POLLER
    }

    /// A thread that waits for an event looks at the streams itself. If the background thread sleeps on them, it finds out when something comes.
    fn borrow_until(&self, until: Nanos) {
        self.lent_until.store(until.0, Ordering::SeqCst);
    }

    /// Nobody waits there any more.
    fn give_back(&self) {
        self.lent_until.store(0, Ordering::SeqCst);
        if !self.is_driven() {
            self.look_at_streams();
        }
    }

    /// For how long threads that wait for events look at the streams; `None` if they do not.
    fn lent(&self, now: Nanos) -> Option<Duration> {
        let until = Nanos(self.lent_until.load(Ordering::SeqCst));
        (until > now).then(|| until.since(now))
    }

    /// A call could not be taken, or an event not be posted: to be tried again.
    pub(crate) fn note_left_over(&self) {
        self.left_over.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Tries again what found no room; returns whether something still does not.
    fn retry(&self, core: &Core) -> bool {
        if !self.left_over.swap(false, Ordering::SeqCst) {
            return false;
        }
        let mut effects = Effects::default();
        let calls = core.streams.accept_paused(core, &mut effects);
        core.raise(effects);
        core.post_waiting();
        // Posting says by itself if there is no room still.
        self.left_over.fetch_or(calls, Ordering::SeqCst);
        self.left_over.load(Ordering::SeqCst)
    }

    /// Puts a queue pair with something left to do on the list.
    pub(crate) fn attend_later(&self, qp: &Arc<Qp>) {
        if !qp.listed.swap(true, Ordering::SeqCst) {
            let mut attention = lock(&self.attention);
            attention.push(qp.clone());
            self.attention_len.store(attention.len(), Ordering::SeqCst);
            drop(attention);
            self.wake();
        }
    }

    /// Sets a timer.
    pub(crate) fn set_timer(&self, due: Nanos, timer: Timer) {
        lock(&self.timers).push(Reverse((due, timer)));
        self.wake();
    }

    /// Streams on their way out.
    #[cfg(test)]
    pub(crate) fn lingering(&self) -> usize {
        lock(&self.lingering).len()
    }

    fn next_timer(&self) -> Option<Nanos> {
        lock(&self.timers).peek().map(|Reverse((due, _))| *due)
    }

    /// Lets a stream go, behind `unsent`.
    pub(crate) fn linger(&self, core: &Core, stream: Box<dyn Stream>, unsent: Vec<u8>) {
        if let Some(fd) = stream.descriptor() {
            self.rewatch(fd, Token::Linger);
        }
        let now = core.clock.now();
        let lingering = Lingering::new(stream, unsent, now, now + core.config.linger);
        lock(&self.lingering).push(lingering);
        self.wake();
    }

    /// Forgets everything, for a reset, but the streams on their way out: a driver's process that ended, however it did, is followed by a
    /// reset, and what completed before still arrives. They own what they hold, and end in a bounded time.
    pub(crate) fn clear(&self) {
        lock(&self.timers).clear();
        lock(&self.attention).clear();
        self.attention_len.store(0, Ordering::SeqCst);
    }

    /// Lets timers run out.
    fn run_timers(&self, core: &Core, now: Nanos) {
        loop {
            let mut timers = lock(&self.timers);
            match timers.peek() {
                Some(Reverse((due, _))) if *due <= now => {}
                _ => return,
            }
            let Some(Reverse((_, timer))) = timers.pop() else {
                return;
            };
            drop(timers);
            match timer {
                Timer::Qp(qid) => {
                    if let Some(qp) = core.qps.find(qid) {
                        qp.kick(core, Asked::TIMER);
                    }
                }
                Timer::Cq(cqid) => {
                    if let Some(cq) = core.cqs.find(cqid) {
                        let mut effects = Effects::default();
                        cq.look(now, &mut effects);
                        core.raise(effects);
                    }
                }
            }
        }
    }

    /// Looks at the streams on their way out; returns when to look again. `told`: one of them is ready.
    fn run_lingering(&self, now: Nanos, told: bool) -> Option<Nanos> {
        let mut lingering = lock(&self.lingering);
        if told {
            lingering.iter_mut().for_each(|l| l.next_look = now);
        }
        lingering.retain_mut(|l| !l.look(now));
        lingering.iter().map(|l| l.next_look).min()
    }

    /// Has all queue pairs on the list do what they left; returns whether some left more than sends to gather.
    fn attend(&self, core: &Core) -> bool {
        let mut at = self.attention_len.load(Ordering::SeqCst);
        while at > 0 {
            // From the end, a few at a time, so that nothing is locked or allocated while they run.
            let mut batch: [Option<Arc<Qp>>; BATCH] = Default::default();
            let attention = lock(&self.attention);
            at = at.min(attention.len());
            let start = at.saturating_sub(BATCH);
            for (slot, qp) in batch.iter_mut().zip(&attention[start..at]) {
                *slot = Some(qp.clone());
            }
            at = start;
            drop(attention);
            for qp in batch.iter().flatten() {
                qp.kick_through(core, qp.take_later());
            }
        }
        let mut busy = false;
        let mut attention = lock(&self.attention);
        attention.retain(|qp| {
            busy |= qp.has_later_than_flush();
            if qp.has_later() {
                return true;
            }
            qp.listed.store(false, Ordering::SeqCst);
            // Whoever left something between the two found it listed.
            qp.has_later() && !qp.listed.swap(true, Ordering::SeqCst)
        });
        self.attention_len.store(attention.len(), Ordering::SeqCst);
        busy
    }

    /// Acts on the descriptors that are ready, waiting for one until `timeout` (`None` = for ever).
    fn poll_ready(&self, core: &Core, timeout: Option<Duration>) -> Told {
        let mut told = Told::default();
        let Some(readiness) = &self.readiness else {
            return told;
        };
        readiness.wait(timeout, |token, asked| match token {
            Token::Qp(qid) => {
                if let Some(qp) = core.qps.find(qid)
                    && qp.kick(core, asked)
                {
                    told.arrived = Some(qid);
                }
            }
            Token::Stream(sid) => {
                let mut effects = Effects::default();
                core.streams.look(sid, &mut effects);
                core.raise(effects);
            }
            Token::Listener(lid) => {
                let mut effects = Effects::default();
                core.streams.accept(core, lid, &mut effects);
                core.raise(effects);
            }
            Token::Linger => {
                // The background thread, which is told by the shorter pause, looks after them.
                told.linger = true;
            }
            Token::Wake => told.wake = true,
        });
        told
    }
}

impl Core {
    /// Sends what was gathered, and goes on with what was left; returns whether something is left again.
    #[inline]
    pub(crate) fn flush_gathered(&self) -> bool {
        self.runtime.attention_len.load(Ordering::Relaxed) > 0 && self.runtime.attend(self)
    }
}

/// A poller found its completion queue empty.
#[inline]
pub(crate) fn progress(core: &Core) {
    let runtime = &core.runtime;
    runtime.polls.fetch_add(1, Ordering::Relaxed);
    core.flush_gathered();
    let hot = &runtime.hot[home_shard()];
    // Approximate: threads of one shard may lose counts to one another.
    let polls = hot.polls.load(Ordering::Relaxed).wrapping_add(1);
    hot.polls.store(polls, Ordering::Relaxed);
    if !polls.is_multiple_of(LOOK_AROUND)
        && let Some(qp) = core.qps.find(hot.qid.load(Ordering::Relaxed))
        && qp.only_receives()
    {
        let arrived = qp.kick(core, Asked::RECEIVE);
        if arrived {
            runtime.note_found();
        }
        hot.note(arrived);
        return;
    }
    let arrived = runtime.poll_ready(core, Some(Duration::ZERO)).arrived;
    if let Some(qid) = arrived {
        hot.qid.store(qid, Ordering::Relaxed);
        runtime.note_found();
    }
    hot.note(arrived.is_some());
}

/// The calling thread waits until `done` for what the device has to tell, for `patience` at the longest, and looks at all streams itself: what comes wakes the
/// thread that wants it, with no other in between. `told` becomes readable when it may be done by the work of others. Returns whether it is done.
pub(crate) fn lend(
    core: &Core,
    patience: Duration,
    told: BorrowedFd<'_>,
    done: &mut dyn FnMut() -> bool,
) -> bool {
    let runtime = &core.runtime;
    let Some(readiness) = &runtime.readiness else {
        return done();
    };
    let mut now = core.clock.now();
    let until = now + patience;
    loop {
        // No further ahead than that: the background thread sleeps for as long as it was told.
        runtime.borrow_until(now + RETURN);
        core.flush_gathered();
        runtime.poll_ready(core, Some(Duration::ZERO));
        if done() {
            return true;
        }
        now = core.clock.now();
        if now >= until {
            runtime.give_back();
            return false;
        }
        readiness.wait_beside(told, until.since(now).min(RETURN));
    }
}

/// In manual mode: everything once.
pub(crate) fn step(core: &Core, now: Nanos) -> Option<Nanos> {
    if let Clock::Manual(time) = &core.clock {
        time.store(now.0, Ordering::Relaxed);
    }
    let runtime = &core.runtime;
    let mut effects = Effects::default();
    core.streams.look_at_all(core, &mut effects);
    core.raise(effects);
    runtime.run_timers(core, now);
    runtime.attend(core);
    for qp in core.qps.all() {
        qp.kick(core, Asked::RECEIVE | Asked::WRITABLE | Asked::RESUME);
    }
    runtime.retry(core);
    let lingering = runtime.run_lingering(now, true);
    [runtime.next_timer(), lingering].into_iter().flatten().min()
}

/// The process ends: lets all streams go, and waits until their peers have what was sent, but not for ever.
pub(crate) fn shutdown(core: &Core) {
    core.streams.close_all(core);
    for qp in core.qps.all() {
        let mut effects = Effects::default();
        qp.destroy(core, false, &mut effects);
        core.raise(effects);
    }
    let until = core.clock.now() + core.config.linger;
    loop {
        let now = core.clock.now();
        match core.runtime.run_lingering(now, true) {
            Some(_) if now < until && matches!(core.clock, Clock::Monotonic) => {
                let pause = rustix::thread::Timespec {
                    tv_sec: 0,
                    tv_nsec: 1_000_000,
                };
                let _ = rustix::thread::nanosleep(&pause);
            }
            _ => return,
        }
    }
}

/// Counts a poll that drove the receive side.
pub(crate) fn count_polls(core: &Core, sums: &mut [u64; Counter::ALL.len()]) {
    sums[Counter::Polls as usize] += u64::from(core.runtime.polls());
}
