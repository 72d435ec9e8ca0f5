//! The background thread: it serves programs that do not poll, and leaves the work to those that
//! do.
//!
//! Idle, it sleeps in `epoll_wait` and costs nothing. While a poller drives the device, this thread
//! leaves the streams alone, so that no packet wakes it. It only checks whether the polls have
//! stopped, [every millisecond or two](Pollers::polled_tick). While sends are gathered, it checks
//! at a [shorter interval](Pollers::burst_tick) whether another thread has sent them. While a
//! thread lends itself, this thread leaves the streams alone for the agreed time, and no longer.

use super::pollers::{Finder, Pollers};
use super::rounds::{flush_gathered, poll_ready, retry, run_timers};
use crate::counters::Counter;
use crate::events::Requests;
use crate::runtime::Core;
use crate::schedule::Schedule;
use crate::schedule::sleeper::{ASLEEP, AWAKE, LENT, TICKING};
use crate::sys;
use crate::sys::failed::FailedCall;
use crate::time::Nanos;
use rustix::io::Errno;
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often listeners that could not accept a connection, and events that found no room, are tried
/// again.
const RETRY_TICK: Duration = Duration::from_millis(20);
/// The interval at which connections with local peers are served, whether or not a peer rang.
const LOCAL_PEERS: Duration = Duration::from_secs(1);
/// For so long after the last burst the thread keeps ticking, so that the next needs no waking.
const WARM: Duration = Duration::from_millis(10);
/// Scheduling slice and priority to request: a thread that waits for this thread often spins, and
/// must make way for it.
const SLICE_NS: u64 = 100_000;
const NICE: i32 = -10;

/// The thread; dropping this stops it.
pub(crate) struct Background {
    core: Arc<Core>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread, with all signals blocked: they are the program's.
    pub(crate) fn spawn(core: &Arc<Core>) -> io::Result<Background> {
        let stop = Arc::new(AtomicBool::new(false));
        let (of_thread, stopped) = (core.clone(), stop.clone());
        let builder = std::thread::Builder::new().name("urnic-device".to_owned());
        let run = Box::new(move || {
            sys::ask_for_prompt_running(SLICE_NS, NICE);
            of_thread.on_own_thread();
            Loop::new(&of_thread).run(&stopped);
        });
        let thread = sys::with_signals_blocked(|| (core.config.thread_start.0)(builder, run));
        Ok(Background {
            core: core.clone(),
            stop,
            thread: Some(FailedCall::named("clone3", thread.map_err(errno))?),
        })
    }
}

/// The errno of a thread that could not be made.
fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)
}

impl Drop for Background {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.core.is_abandoned() {
            // The thread is the parent's. There is none to wait for here.
            mem::forget(thread);
            return;
        }
        self.stop.store(true, Ordering::SeqCst);
        if let Some(readiness) = &self.core.schedule.readiness {
            readiness.wake();
        }
        if thread.thread().id() != std::thread::current().id() {
            // It can end by a panic only, and that has been reported.
            let _ = thread.join();
        }
    }
}

struct Loop<'a> {
    core: &'a Core,
    schedule: &'a Schedule,
    pollers: Pollers,
    /// Whether another thread ended the last sleep early.
    woken: bool,
    /// Pollers drive the device, as of the last look.
    driven: bool,
    /// Something was left to pollers.
    left_to_pollers: bool,
    /// Until when bursts are awaited.
    warm_until: Nanos,
    /// A closing stream is ready.
    linger_ready: bool,
    /// When connections with local peers are served next, though no peer rang.
    local_peers_due: Nanos,
}

impl<'a> Loop<'a> {
    fn new(core: &'a Core) -> Loop<'a> {
        Loop {
            core,
            schedule: &core.schedule,
            pollers: Pollers::new(core.schedule.polls()),
            woken: false,
            driven: false,
            left_to_pollers: false,
            warm_until: Nanos::default(),
            linger_ready: false,
            local_peers_due: Nanos::default(),
        }
    }

    fn run(&mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::SeqCst) {
            self.core.counters.add_shared(Counter::Wakeups, 1);
            let due = self.work();
            self.sleep(due, stop);
        }
    }

    /// Does the due work; returns the time of the next work.
    fn work(&mut self) -> Option<Nanos> {
        let (core, schedule) = (self.core, self.schedule);
        schedule.pending.store(false, Ordering::SeqCst);
        let now = core.clock.now();
        run_timers(core, now);
        let lingering = schedule.run_lingering(now, mem::take(&mut self.linger_ready));
        self.pollers.look(now, schedule.polls(), self.woken);
        self.driven = self.pollers.go_on() && schedule.is_driven();
        if !self.pollers.go_on() && schedule.is_driven() {
            // The polls have stopped: polls count again only after a poller has found something for
            // a while.
            schedule.forget_pollers();
        }
        let gathered = schedule.has_gathered();
        if gathered {
            self.warm_until = now + WARM;
        }
        // Pollers serve the list themselves; the next tick checks whether they did.
        self.left_to_pollers = self.pollers.have_polled() && schedule.attention() > 0;
        let left = !self.left_to_pollers && flush_gathered(core).left;
        let retry = retry(core).then(|| now + RETRY_TICK);
        let local = self.serve_local_peers(now);
        [
            schedule.next_timer(),
            lingering,
            retry,
            local,
            left.then_some(now),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Serves connections with local peers at intervals, though no peer rang: all peers share the
    /// page by which they ring, and one may write there what it likes. Returns the next time.
    fn serve_local_peers(&mut self, now: Nanos) -> Option<Nanos> {
        let same_host = self.schedule.same_host.as_ref()?;
        let offers = same_host.expire().map(|later| now + later);
        if now >= self.local_peers_due {
            self.local_peers_due = now + LOCAL_PEERS;
            for qid in same_host.bell().connected() {
                if let Some(qp) = self.core.qps.find(qid) {
                    qp.kick(
                        self.core,
                        Requests::RECEIVE | Requests::WRITABLE | Requests::TIMER,
                    );
                }
            }
        }
        let is_due = same_host.bell().has_connections();
        [offers, is_due.then_some(self.local_peers_due)]
            .into_iter()
            .flatten()
            .min()
    }

    fn sleep(&mut self, due: Option<Nanos>, stop: &AtomicBool) {
        let schedule = self.schedule;
        let Some(readiness) = &schedule.readiness else {
            return;
        };
        let now = self.core.clock.now();
        let until_due = due.map(|due| due.since(now));
        let lent = schedule.lent(now);
        let tick = if self.left_to_pollers || now < self.warm_until {
            Some(self.pollers.burst_tick())
        } else if self.driven {
            Some(self.pollers.polled_tick())
        } else {
            None
        };
        let timeout = [tick, until_due, lent].into_iter().flatten().min();
        self.woken = if self.driven {
            schedule.sleeper.set(TICKING);
            // A thread that began to wait for an interrupt before this state was visible did not
            // wake this thread.
            schedule.is_driven() && readiness.wait_for_wake(timeout.unwrap_or(self.pollers.polled_tick()))
        } else if let Some(lent) = lent {
            schedule.sleeper.set(LENT);
            // A thread that borrowed the streams, or left work, before this state was visible did
            // not wake this thread either.
            let missed = schedule.lent(now).is_none() || schedule.pending.load(Ordering::SeqCst);
            !missed && readiness.wait_for_wake(timeout.unwrap_or(lent))
        } else {
            if tick.is_none() {
                schedule.sleeper.set(ASLEEP);
            }
            // Work that was left before the sleep of this thread was visible came without a wake.
            let missed = stop.load(Ordering::SeqCst) || schedule.pending.load(Ordering::SeqCst);
            let timeout = if missed { Some(Duration::ZERO) } else { timeout };
            let polled = poll_ready(self.core, timeout);
            if polled.arrived.is_some() {
                match self.pollers.finder(self.core.clock.now(), schedule.polls()) {
                    Finder::Poller => schedule.note_found(),
                    Finder::Nobody => schedule.forget_pollers(),
                    Finder::Unknown => {}
                }
            }
            self.linger_ready = polled.linger;
            polled.wake
        };
        schedule.sleeper.set(AWAKE);
        if self.woken {
            readiness.take_wakes();
        }
    }
}
