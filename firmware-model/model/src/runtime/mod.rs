//! The whole device: its state ([`Core`]), the threads that drive it, and the work of queue pairs
//! on the rest of it: runs, and the objects that run next ([`run`]); streams, their ends, and peers
//! on the same device ([`life`]).
//!
//! These threads drive it:
//!
//! | thread | drives |
//! |---|---|
//! | a ringing thread | the queue pair it rang for |
//! | a poller ([`progress`]) | gathered sends; the stream that last delivered to the poller's queue; [at times](crate::schedule::Hot::is_to_poll_all) all ready objects; [more often](crate::schedule::Hot::is_to_look_at_notifications) the ready objects with notifications of local peers |
//! | a thread that waits for an event ([`lend`]) | all ready objects, for a short time |
//! | the [background](background) thread | all ready objects, while no program polls; timers; closing streams |
//!
//! The [schedule](crate::schedule) lists the work.

mod background;
mod busy_poll;
mod core;
pub(crate) mod doorbells;
mod life;
mod registers;
mod run;
pub(crate) mod streaming;
mod uar;

pub(crate) use self::core::{BoundPort, Core};
pub(crate) use background::Background;
pub use core::Interrupts;
pub(crate) use registers::{CommandQueue, Registers};
pub use uar::DoorbellPages;
pub(crate) use uar::{PageUser, Uar};

use crate::events::{Effects, Requests};
use crate::qp::{LAST, Qp};
use crate::time::{Clock, Nanos};
use crate::tuning::EVENT_WAIT_USUAL;
use background::{answer_notifications, attend, flush_gathered, poll_ready, retry, run_timers};
use rustix::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Drives the device for a poller whose completion queue is empty. `last` is the queue pair that
/// completed something there last, or 0. The poller polls `last`, and not the queue pair for which
/// this thread found something last, which may belong to another thread's queue.
#[inline]
pub(crate) fn progress(core: &Core, last: u32) {
    let schedule = &core.schedule;
    let hot = schedule.hot();
    hot.count_poll();
    if flush_gathered(core).arrived {
        schedule.note_found();
    }
    let poll_hot = |qp: &Arc<Qp>| {
        let arrived = qp.kick(core, qp.poll_requests()? | qp.polled());
        hot.note(arrived, || yield_now(core));
        Some(arrived)
    };
    let qid = match last {
        0 => hot.qid.load(Ordering::Relaxed),
        last => last,
    };
    let found = if hot.is_to_poll_all() {
        None
    } else {
        core.qps.find_again(qid, &LAST, poll_hot).flatten()
    };
    let polled = match found {
        Some(true) => {
            hot.note_found(qid, false);
            schedule.note_found();
            return;
        }
        Some(false) if !hot.is_to_look_at_notifications() => return,
        Some(false) => answer_notifications(core),
        None => poll_ready(core, Some(Duration::ZERO)),
    };
    if let Some(qid) = polled.arrived {
        hot.note_found(qid, polled.by_notification);
        schedule.note_found();
    }
    if polled.arrived.is_some() || found.is_none() {
        hot.note(polled.arrived.is_some(), || yield_now(core));
    }
}

/// Yields the processor. Returns the time that this took.
#[cold]
fn yield_now(core: &Core) -> Duration {
    let before = core.clock.now();
    rustix::thread::sched_yield();
    core.clock.now().since(before)
}

/// The calling thread waits until `done` for events of the device, for `timeout` at the longest,
/// and polls all streams itself. An arrival then wakes the waiting thread directly. `notifications`
/// becomes readable when other threads may have made `done` true. Returns whether `done` is true.
pub(crate) fn lend(
    core: &Core,
    timeout: Duration,
    notifications: BorrowedFd<'_>,
    done: &mut dyn FnMut() -> bool,
) -> bool {
    let schedule = &core.schedule;
    let Some(readiness) = &schedule.readiness else {
        return done();
    };
    let mut now = core.clock.now();
    let until = now + timeout;
    loop {
        // At most `EVENT_WAIT_USUAL` ahead: the background thread sleeps until the time that is set
        // here.
        schedule.borrow_until(now + EVENT_WAIT_USUAL);
        flush_gathered(core);
        poll_ready(core, Some(Duration::ZERO));
        if done() {
            return true;
        }
        now = core.clock.now();
        if now >= until {
            schedule.give_back();
            return false;
        }
        if let Ok(_asleep) = schedule.fall_asleep() {
            readiness.wait_beside(notifications, until.since(now).min(EVENT_WAIT_USUAL));
        }
    }
}

/// The calling thread will [`lend`] itself in a moment. The background thread, if it does not sleep
/// on the streams already, leaves them to that thread for as long as after a loan.
pub(crate) fn will_lend(core: &Core) {
    core.schedule.borrow_until(core.clock.now() + EVENT_WAIT_USUAL);
}

/// In manual mode: serves all objects once.
pub(crate) fn step(core: &Core, now: Nanos) -> Option<Nanos> {
    if let Clock::Manual(time) = &core.clock {
        time.store(now.0, Ordering::Relaxed);
    }
    let schedule = &core.schedule;
    let mut effects = Effects::default();
    core.streams.poll_all(schedule, now, &mut effects);
    core.raise(effects);
    run_timers(core, now);
    attend(core);
    for qp in core.qps.all() {
        qp.kick(core, Requests::RECEIVE | Requests::WRITABLE | Requests::RESUME);
    }
    retry(core);
    let lingering = schedule.run_lingering(now, true);
    [schedule.next_timer(), lingering].into_iter().flatten().min()
}

/// The process ends: closes all streams in an orderly way, and waits for a limited time until the
/// peers have all sent bytes.
pub(crate) fn shutdown(core: &Core) {
    core.streams
        .close_all(|stream, unsent| core.linger(stream, unsent));
    for qp in core.qps.all() {
        let mut effects = Effects::default();
        qp.destroy(core, false, &mut effects);
        core.raise(effects);
    }
    linger(core);
    if let Some(sctp) = &core.sctp {
        sctp.end();
    }
}

/// Waits for a limited time until the peers have all sent bytes.
fn linger(core: &Core) {
    let until = core.clock.now() + core.config.linger;
    loop {
        let now = core.clock.now();
        match core.schedule.run_lingering(now, true) {
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
