//! The background thread, which serves programs that do not poll and leaves the work to programs
//! that poll, and the rounds of every thread that drives the device.
//!
//! Idle, it sleeps in `epoll_wait` and costs nothing. While a poller drives the device, this thread
//! does not watch the streams, so that no packet wakes it. It only checks whether the polls have
//! stopped, [every millisecond or two](Pollers::polled_tick). A one-sided message that arrives
//! while the program does not poll shows that the program waits in its memory: then this thread
//! stays with the streams, and [busy-polls](super::busy_poll) if such messages follow each other.
//! While sends are gathered, it checks at a [shorter interval](Pollers::burst_tick) whether another
//! thread has sent them. During a loan this thread does not serve the streams for the agreed time,
//! and no longer.

use super::Core;
use super::busy_poll::{Budget, BusyPolling, End, Processors};
use crate::counters::Counter;
use crate::events::{Effects, Requests};
use crate::qp::{LAST, Qp};
use crate::schedule::{ASLEEP, AWAKE, Interest, LENT, Rung, Schedule, TICKING, Timer, Token};
use crate::shard::SHARDS;
use crate::sys;
use crate::sys::failed::FailedCall;
use crate::time::Nanos;
use crate::tuning::{
    BURST_TICK, BUSY_POLLS_PER_WAIT, BUSY_PREEMPTED, BUSY_TURN, LAST_POLLS, NICE, POLL_PAUSE, POLLED_TICK,
    POLLED_TICK_LONG, POLLED_TICKS_LONG_AFTER, POLLS_EVERY, RETRY_TICK, SLICE_NS, WARM,
};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, mem};

/// The interval at which connections with local peers are served, also without a notification.
const LOCAL_PEERS: Duration = Duration::from_secs(1);

/// The thread; dropping this stops it.
pub(crate) struct Background {
    core: Arc<Core>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread. All signals are blocked there, because they are for the program's
    /// threads.
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
            // The thread runs in the parent process: there is none to wait for here.
            mem::forget(thread);
            return;
        }
        self.stop.store(true, Ordering::SeqCst);
        if let Some(readiness) = &self.core.schedule.readiness {
            readiness.wake();
        }
        if thread.thread().id() != std::thread::current().id() {
            // The thread can end only by a panic, which has been reported.
            let _ = thread.join();
        }
    }
}

struct Loop<'a> {
    core: &'a Core,
    schedule: &'a Schedule,
    pollers: Pollers,
    busy: BusyPolling,
    processors: Processors,
    /// The polls of each shard when this thread last found something.
    seen: [u32; SHARDS],
    /// Whether another thread ended the last sleep early.
    woken: bool,
    /// Pollers drove the device at the last check.
    driven: bool,
    /// Work was left to pollers.
    left_to_pollers: bool,
    /// The time until which bursts are awaited.
    warm_until: Nanos,
    /// A closing stream is ready.
    linger_ready: bool,
    /// The time at which connections with local peers are served next without a notification.
    local_peers_due: Nanos,
}

impl<'a> Loop<'a> {
    fn new(core: &'a Core) -> Loop<'a> {
        Loop {
            core,
            schedule: &core.schedule,
            pollers: Pollers::new(core.schedule.polls()),
            busy: BusyPolling::new(core.config.busy_poll),
            processors: Processors::default(),
            seen: [0; SHARDS],
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

    /// Does the work that is due; returns the time of the next work.
    fn work(&mut self) -> Option<Nanos> {
        let (core, schedule) = (self.core, self.schedule);
        schedule.pending.store(false, Ordering::SeqCst);
        let now = core.clock.now();
        run_timers(core, now);
        let lingering = schedule.run_lingering(now, mem::take(&mut self.linger_ready));
        self.pollers.check(now, schedule.polls(), self.woken);
        if self.driven && !self.pollers.have_polled() {
            // The polls pause: what arrived since may be what the program waits for in its memory.
            let polled = poll_ready(core, Some(Duration::ZERO));
            self.note_arrival(&polled);
            self.linger_ready |= polled.linger;
        }
        self.driven = self.pollers.go_on() && schedule.is_driven();
        self.pollers.note_driven(self.driven);
        if self.driven {
            self.busy.forget();
            if self.pollers.are_lasting() {
                schedule.trust_pollers();
            }
        }
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

    /// Serves connections with local peers at intervals, also without a notification: all peers
    /// share the notification page, and any of them may overwrite it. Returns the next time.
    fn serve_local_peers(&mut self, now: Nanos) -> Option<Nanos> {
        let same_host = self.schedule.same_host.as_ref()?;
        let offers = same_host.expire().map(|later| now + later);
        if now >= self.local_peers_due {
            self.local_peers_due = now + LOCAL_PEERS;
            for qid in same_host.notifications().connected() {
                if let Some(qp) = self.core.qps.find(qid) {
                    qp.kick(
                        self.core,
                        Requests::RECEIVE | Requests::WRITABLE | Requests::TIMER,
                    );
                }
            }
        }
        let is_due = same_host.notifications().has_connections();
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
        } else if !self.left_to_pollers
            && !schedule.pending.load(Ordering::SeqCst)
            && let Some((qid, until)) = self.busy.next(now, || self.processors.has_free())
        {
            self.busy_poll(qid, now, [until, due.unwrap_or(until)], stop)
        } else {
            if tick.is_none() {
                schedule.sleeper.set(ASLEEP);
            }
            // Work that was left before this thread's sleep was visible did not wake this thread.
            let missed = stop.load(Ordering::SeqCst) || schedule.pending.load(Ordering::SeqCst);
            let timeout = if missed { Some(Duration::ZERO) } else { timeout };
            let polled = poll_ready(self.core, timeout);
            self.note_arrival(&polled);
            self.linger_ready = polled.linger;
            polled.wake
        };
        schedule.sleeper.set(AWAKE);
        if self.woken {
            readiness.take_wakes();
        }
    }
}

impl Loop<'_> {
    /// Polls the stream of queue pair `qid` until something arrives, `limit`, or `due`, when there
    /// is other work; and the others now and then. Returns whether another thread woke this one.
    fn busy_poll(&mut self, qid: u32, now: Nanos, [limit, due]: [Nanos; 2], stop: &AtomicBool) -> bool {
        let core = self.core;
        let until = limit.min(due);
        let granted = Budget::take(now, until.since(now), core.config.busy_poll.share);
        let (mut at, mut polls, mut polled) = (now, 0u32, Polled::default());
        let end = loop {
            if stop.load(Ordering::SeqCst) || core.schedule.pending.load(Ordering::SeqCst) {
                break End::Other;
            }
            polls += 1;
            polled = match core.qps.find_again(qid, &LAST, |qp| poll_stream(core, qp)) {
                Some(Some(polled)) if !polls.is_multiple_of(BUSY_POLLS_PER_WAIT) => polled,
                _ => poll_ready(core, Some(Duration::ZERO)),
            };
            let before = mem::replace(&mut at, core.clock.now());
            let pause = at.since(before);
            if pause >= BUSY_TURN {
                break End::Preempted;
            } else if polled.arrived.is_some() {
                break End::Arrival;
            } else if polled.wake || polled.linger {
                break End::Other;
            } else if pause >= BUSY_PREEMPTED {
                break End::Preempted;
            } else if at >= now + granted {
                break match () {
                    () if at >= limit => End::Limit,
                    () if at >= due => End::Other,
                    () => End::Exhausted,
                };
            }
        };
        Budget::put_back(granted.saturating_sub(at.since(now)));
        self.busy.note_end(end, at);
        let micros = at.since(now).as_micros() as u64;
        core.counters.add_shared(Counter::BusyPollMicros, micros);
        if end == End::Arrival {
            core.counters.add_shared(Counter::BusyPollFinds, 1);
        }
        self.note_arrival(&polled);
        self.linger_ready = polled.linger;
        polled.wake
    }

    /// Notes an arrival that this thread found, if there is one.
    fn note_arrival(&mut self, polled: &Polled) {
        let Some(qid) = polled.arrived else {
            return;
        };
        let schedule = self.schedule;
        let now = self.core.clock.now();
        // With `driven`, no poll was made since the last check.
        let unawaited = polled.one_sided && (self.driven || schedule.empty_polls(&self.seen) <= LAST_POLLS);
        self.seen = schedule.polls_of_shards();
        if unawaited {
            if self.driven {
                schedule.distrust_pollers();
            }
            self.busy.note_arrival(qid, now);
            return schedule.forget_pollers();
        }
        match self.pollers.finder(now, schedule.polls()) {
            Finder::Poller => schedule.note_found(),
            Finder::Nobody => schedule.forget_pollers(),
            Finder::Unknown => {}
        }
    }
}

/// Polls the stream of a queue pair; `None` if only its events tell of its work.
fn poll_stream(core: &Core, qp: &Arc<Qp>) -> Option<Polled> {
    let mut polled = Polled::default();
    polled.kick(core, qp, qp.poll_requests()?);
    Some(polled)
}

// The background thread's estimate of whether other threads poll: it reads the count of their polls
// whenever it wakes.

/// Whether a poller would have found the event that the background thread found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finder {
    /// A poller was active, and would have found the same.
    Poller,
    /// No thread has polled for a while.
    Nobody,
    /// Unknown: the polls are too rare or too old to decide.
    Unknown,
}

/// The polls at the last check.
#[derive(Debug)]
pub(super) struct Pollers {
    polls: u32,
    checked_at: Nanos,
    /// The time of the last check that found polls since the check before it.
    polled_at: Nanos,
    /// The last check found polls, or followed too soon after one that did.
    polled: bool,
    burst_tick: Duration,
    /// The number of consecutive checks at which pollers drove the device.
    driven: u32,
}

impl Pollers {
    /// The state at the start, when the count of polls is `polls`.
    pub(super) fn new(polls: u32) -> Pollers {
        Pollers {
            polls,
            checked_at: Nanos::default(),
            polled_at: Nanos::default(),
            polled: false,
            burst_tick: BURST_TICK,
            driven: 0,
        }
    }

    /// Checks the count `polls`; `woken`: another thread ended the preceding sleep early.
    pub(super) fn check(&mut self, now: Nanos, polls: u32, woken: bool) {
        self.polled = self.polls != polls || (woken && self.polled);
        if self.polls != polls {
            (self.polls, self.polled_at) = (polls, now);
        }
        self.checked_at = now;
        self.burst_tick = match self.polled {
            true => (2 * self.burst_tick).min(POLLED_TICK),
            false => BURST_TICK,
        };
    }

    /// Whether the last two checks found polls.
    pub(super) fn have_polled(&self) -> bool {
        self.polled
    }

    /// Whether the polls continue. Two checks may be so close together that no poll falls between
    /// them.
    pub(super) fn go_on(&self) -> bool {
        self.checked_at.since(self.polled_at) < POLLED_TICK
    }

    /// Notes whether pollers drive the device at this check.
    pub(super) fn note_driven(&mut self, driven: bool) {
        self.driven = if driven { self.driven.saturating_add(1) } else { 0 };
    }

    /// Whether pollers have driven the device for long.
    pub(super) fn are_lasting(&self) -> bool {
        self.driven > POLLED_TICKS_LONG_AFTER
    }

    /// The interval to the next check whether the polls continue: short at first, because the polls
    /// may have been those of a program that now waits in its memory.
    pub(super) fn polled_tick(&self) -> Duration {
        match self.driven {
            0..=3 => POLLED_TICK / 8 * (1 << self.driven.saturating_sub(1)),
            _ if self.are_lasting() => POLLED_TICK_LONG,
            _ => POLLED_TICK,
        }
    }

    /// The interval to the next check whether pollers have sent the gathered entries. As long as
    /// they send, checks become rarer, because each check takes a poller's processor away.
    pub(super) fn burst_tick(&self) -> Duration {
        self.burst_tick
    }

    /// Whether a poller would have found an event that reached the background thread at `now`, when
    /// the count is `polls`.
    pub(super) fn finder(&self, now: Nanos, polls: u32) -> Finder {
        match polls.wrapping_sub(self.polls) {
            0 if now.since(self.polled_at) >= POLL_PAUSE => Finder::Nobody,
            0 => Finder::Unknown,
            polls if POLLS_EVERY.saturating_mul(polls) >= now.since(self.checked_at) => Finder::Poller,
            _ => Finder::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Nanos {
        Nanos(1_000_000_000) + Duration::from_micros(micros)
    }

    #[test]
    fn looks_become_rarer_while_pollers_poll() {
        let mut pollers = Pollers::new(7);
        let mut now = 0;
        let mut ticks = Vec::new();
        for polls in 8..14 {
            now += pollers.burst_tick().as_micros() as u64;
            pollers.check(at(now), polls, false);
            ticks.push(pollers.burst_tick().as_micros());
        }
        assert_eq!(ticks, [200, 400, 800, 1000, 1000, 1000]);
        pollers.check(at(now + 1000), 13, false);
        assert_eq!(pollers.burst_tick(), BURST_TICK);
    }

    #[test]
    fn a_program_that_polls_for_long_is_looked_at_less_often() {
        let mut pollers = Pollers::new(0);
        let mut ticks = Vec::new();
        for _ in 0..=POLLED_TICKS_LONG_AFTER {
            pollers.note_driven(true);
            ticks.push(pollers.polled_tick().as_micros());
        }
        assert_eq!(ticks[..5], [125, 250, 500, 1000, 1000]);
        assert_eq!(ticks[POLLED_TICKS_LONG_AFTER as usize - 1..], [1000, 2000]);
        pollers.note_driven(false);
        pollers.note_driven(true);
        assert_eq!(pollers.polled_tick().as_micros(), 125);
    }

    /// A thread that sends for a while does not poll during that time.
    #[test]
    fn a_short_time_without_polls_is_not_their_end() {
        let mut pollers = Pollers::new(0);
        pollers.check(at(0), 1, false);
        for now in [10, 50, 200, 999] {
            pollers.check(at(now), 1, false);
            assert!(pollers.go_on() && !pollers.have_polled(), "{now}");
        }
        pollers.check(at(1000), 1, false);
        assert!(!pollers.go_on());
    }

    #[test]
    fn a_wake_says_nothing_about_polls() {
        let mut pollers = Pollers::new(0);
        pollers.check(at(0), 1, false);
        pollers.check(at(1), 1, true);
        assert!(pollers.have_polled());
        pollers.check(at(2), 1, false);
        pollers.check(at(3), 1, true);
        assert!(!pollers.have_polled());
    }

    #[test]
    fn who_polls_often_would_have_found_it() {
        let mut pollers = Pollers::new(0);
        pollers.check(at(0), 10, false);
        let cases = [
            (20, 11, Finder::Poller),
            (21, 11, Finder::Unknown),
            (1000, 60, Finder::Poller),
            (1000, 59, Finder::Unknown),
            (199, 10, Finder::Unknown),
            (200, 10, Finder::Nobody),
        ];
        for (now, polls, finder) in cases {
            assert_eq!(
                pollers.finder(at(now), polls),
                finder,
                "{polls} polls by {now} us"
            );
        }
    }
}

// The rounds of a thread that drives the device: work that was left, descriptors that are ready,
// timers that are due.

/// The result of polling the descriptors.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Polled {
    /// The last queue pair with an event.
    pub(super) arrived: Option<u32>,
    /// Writes, Reads or atomics arrived.
    pub(super) one_sided: bool,
    /// The event was a local peer's notification.
    pub(super) by_notification: bool,
    /// A closing stream is ready.
    pub(super) linger: bool,
    /// Another thread requested a check of all objects.
    pub(super) wake: bool,
}

impl Polled {
    /// Has the requests of a queue pair carried out.
    fn kick(&mut self, core: &Core, qp: &Arc<Qp>, requests: Requests) {
        let one_sided = || qp.counters.value(Counter::RxOneSided);
        let before = one_sided();
        if qp.kick(core, requests) {
            self.arrived = Some(qp.id);
            self.one_sided |= one_sided() != before;
        }
    }
}

/// The result of [`attend`].
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Attended {
    /// Bytes or confirmations arrived for one of the queue pairs.
    pub(super) arrived: bool,
    /// A queue pair left more work than sends to gather.
    pub(super) left: bool,
}

/// Runs all queue pairs on the list.
pub(super) fn attend(core: &Core) -> Attended {
    let schedule = &core.schedule;
    let mut arrived = false;
    let mut at = schedule.attention();
    while at > 0 {
        let (batch, before) = schedule.attention_before(at);
        at = before;
        for qp in batch.iter().flatten() {
            arrived |= qp.kick_through(core, qp.take_later());
        }
    }
    let left = schedule.forget_attended();
    Attended { arrived, left }
}

/// Sends gathered requests, and runs the queue pairs on the list.
#[inline]
pub(super) fn flush_gathered(core: &Core) -> Attended {
    match core.schedule.seems_wanted() {
        true => attend(core),
        false => Attended::default(),
    }
}

/// Handles the timers that have expired.
pub(super) fn run_timers(core: &Core, now: Nanos) {
    while let Some(timer) = core.schedule.take_timer(now) {
        match timer {
            Timer::Qp(qid) => {
                if let Some(qp) = core.qps.find(qid) {
                    qp.kick(core, Requests::TIMER);
                }
            }
            Timer::Stream(sid) => {
                let mut effects = Effects::default();
                core.streams.poll(sid, now, &mut effects);
                core.raise(effects);
            }
            Timer::Cq(cqid) => {
                if let Some(cq) = core.cqs.find(cqid) {
                    let mut effects = Effects::default();
                    cq.timer_expired(now, &mut effects);
                    core.raise(effects);
                }
            }
        }
    }
}

/// Retries work for which there was no room. Returns whether some work still has no room.
pub(super) fn retry(core: &Core) -> bool {
    if !core.schedule.take_left_over() {
        return false;
    }
    // First the events: connections may wait for their room.
    let events = core.post_waiting();
    let mut effects = Effects::default();
    let connections = core.streams.accept_paused(&core.schedule, &mut effects);
    core.raise(effects);
    core.schedule.leave_over(connections || events)
}

/// Handles the descriptors that are ready, after a wait for one until `timeout` (`None` = for
/// ever).
pub(super) fn poll_ready(core: &Core, timeout: Option<Duration>) -> Polled {
    let mut polled = Polled::default();
    let Some(readiness) = &core.schedule.readiness else {
        return polled;
    };
    let (timeout, asleep) = match timeout {
        Some(Duration::ZERO) => (timeout, None),
        _ => match core.schedule.fall_asleep() {
            Ok(asleep) => (timeout, asleep),
            Err(Rung) => (Some(Duration::ZERO), None),
        },
    };
    readiness.wait(timeout, |token, requests| match token {
        Token::Qp(qid) => {
            if let Some(qp) = core.qps.find(qid) {
                polled.kick(core, &qp, requests);
            }
        }
        Token::Stream(sid) => {
            let mut effects = Effects::default();
            core.streams.poll(sid, core.clock.now(), &mut effects);
            core.raise(effects);
        }
        Token::Listener(lid) => {
            let mut effects = Effects::default();
            core.streams.accept(&core.schedule, lid, &mut effects);
            core.raise(effects);
        }
        Token::Linger => {
            // The shorter pause makes the background thread serve them.
            polled.linger = true;
        }
        Token::NotificationPage => {
            if let Some(same_host) = &core.schedule.same_host {
                same_host.notifications().take_wakes();
            }
        }
        Token::RocePort => {
            let (read, more) = core.roce.dispatch();
            read.count(&core.counters);
            for qid in read.woken {
                if let Some(qp) = core.qps.find(qid) {
                    polled.kick(core, &qp, Requests::RECEIVE);
                }
            }
            // Others have their turn first.
            if more {
                let rewatch = |fd: BorrowedFd<'_>| {
                    core.schedule.rewatch(fd, Token::RocePort, Interest::Input);
                    Ok::<(), Infallible>(())
                };
                let (Ok(()) | Err(_)) = core.roce.watch(rewatch);
            }
        }
        Token::Wake => polled.wake = true,
    });
    drop(asleep);
    let notified = answer_notifications(core);
    Polled {
        arrived: notified.arrived.or(polled.arrived),
        by_notification: notified.by_notification,
        ..polled
    }
}

/// Serves the queue pairs with notifications of local peers.
#[inline]
pub(super) fn answer_notifications(core: &Core) -> Polled {
    let mut polled = Polled::default();
    let notifications = core
        .schedule
        .same_host
        .as_ref()
        .map(|same_host| same_host.notifications());
    if let Some(notifications) = notifications.filter(|notifications| notifications.is_rung()) {
        notifications.answer(|qid| {
            if let Some(qp) = core.qps.find(qid)
                && qp.kick(core, Requests::RECEIVE | Requests::WRITABLE)
            {
                polled.arrived = Some(qid);
                polled.by_notification = true;
            }
        });
    }
    polled
}
