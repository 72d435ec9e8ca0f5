//! The rounds of a thread that drives the device: work that was left, descriptors that are ready,
//! timers that are due.

use crate::events::{Effects, Requests};
use crate::runtime::Core;
use crate::schedule::{Rung, Timer, Token};
use crate::time::Nanos;
use std::time::Duration;

/// The result of polling the descriptors.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Polled {
    /// The last queue pair for which something came.
    pub(super) arrived: Option<u32>,
    /// A peer on this host rang for it.
    pub(super) by_bell: bool,
    /// A closing stream is ready.
    pub(super) linger: bool,
    /// A thread requested this one to look around.
    pub(super) wake: bool,
}

/// The result of [`attend`].
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Attended {
    /// Something came for one of the queue pairs.
    pub(super) arrived: bool,
    /// Some left more than sends to gather.
    pub(super) left: bool,
}

/// Makes all queue pairs on the list do the work that they left.
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

/// Sends gathered requests, and continues with those that were left.
#[inline]
pub(super) fn flush_gathered(core: &Core) -> Attended {
    match core.schedule.seems_wanted() {
        true => attend(core),
        false => Attended::default(),
    }
}

/// Lets timers run out.
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

/// Retries work that found no room; returns whether some still finds none.
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

/// Acts on the descriptors that are ready, waiting for one until `timeout` (`None` = for ever).
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
            if let Some(qp) = core.qps.find(qid)
                && qp.kick(core, requests)
            {
                polled.arrived = Some(qid);
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
        Token::Bell => {
            if let Some(same_host) = &core.schedule.same_host {
                same_host.bell().take_wakes();
            }
        }
        Token::Wake => polled.wake = true,
    });
    drop(asleep);
    let rung = answer_bell(core);
    Polled {
        arrived: rung.arrived.or(polled.arrived),
        by_bell: rung.by_bell,
        ..polled
    }
}

/// Serves the queue pairs for which peers on this host rang.
#[inline]
pub(super) fn answer_bell(core: &Core) -> Polled {
    let mut polled = Polled::default();
    let bell = core.schedule.same_host.as_ref().map(|same_host| same_host.bell());
    if let Some(bell) = bell.filter(|bell| bell.is_rung()) {
        bell.answer(|qid| {
            if let Some(qp) = core.qps.find(qid)
                && qp.kick(core, Requests::RECEIVE | Requests::WRITABLE)
            {
                polled.arrived = Some(qid);
                polled.by_bell = true;
            }
        });
    }
    polled
}
