//! Runs queue pairs, and carries out what that requests of the rest of the device.
//!
//! A run may request runs of other objects: a completion queue that overflows takes all its queue
//! pairs to the error state, whose flushes may overflow the next one. The objects wait in a list
//! ([`Next`]) and are run one after the other, so that the length of such a chain, which the driver
//! decides, is never the depth of the stack. Only the peer on the same device is run by a call
//! inside a call, at most two deep.

use crate::counters::Counter;
use crate::events::{Effect, Effects, Next, Object, Requests};
use crate::qp::Qp;
use crate::runtime::Core;
use crate::schedule::Timer;
use std::sync::Arc;
use urnic_device::event::{Event, EventKind};

impl Qp {
    /// Has requests done, on this thread or on the thread that already holds the lock. Returns
    /// whether bytes arrived, or left after a wait.
    pub(crate) fn kick(self: &Arc<Qp>, core: &Core, requests: Requests) -> bool {
        let mut next = Next::new();
        let arrived = self.kick_before(core, requests, &mut next);
        core.run_all(next);
        arrived
    }

    /// As [`kick`](Qp::kick), and leaves in `next` what is to be run then.
    fn kick_before(self: &Arc<Qp>, core: &Core, requests: Requests, next: &mut Next) -> bool {
        let (mut arrived, mut progressed) = (false, false);
        let left = self.turns.ask(
            requests.bits(),
            |inner, requests| {
                let mut effects = Effects::default();
                arrived |= self.run(core, inner, Requests::from_bits_retain(requests), &mut effects);
                progressed |= inner.engine.has_progressed();
                effects
            },
            |effects| core.apply(effects, next),
        );
        if left {
            core.schedule.attend_later(self, Requests::AGAIN);
        }
        if progressed && let Some(sibling) = self.sibling(core) {
            match requests {
                // Not to and fro, in ever deeper calls.
                Requests::PEER_PROGRESS => core.schedule.attend_later(&sibling, Requests::PEER_PROGRESS),
                _ => {
                    sibling.kick_before(core, Requests::PEER_PROGRESS, next);
                }
            }
        }
        arrived
    }

    /// Sends what was posted, on this thread, which waits for the one that holds the lock.
    pub(crate) fn catch_up(self: &Arc<Qp>, core: &Core, effects: &mut Effects) {
        let requests = Requests::RESUME | Requests::FLUSH;
        self.run(core, &mut self.turns.lock(), requests, effects);
        // What others requested meanwhile.
        effects.kick(self.id, Requests::empty());
    }

    /// As [`kick`](Qp::kick). If the peer is a queue pair of this device, and no other thread polls
    /// it, it receives at once, too, as far as the stream carried what was sent: our requests
    /// complete when it has. Returns the same.
    pub(crate) fn kick_through(self: &Arc<Qp>, core: &Core, requests: Requests) -> bool {
        let arrived = self.kick(core, requests);
        if let Some(sibling) = self.sibling_to_receive(core)
            && sibling.kick(core, Requests::RECEIVE)
        {
            self.kick(core, Requests::PEER_PROGRESS);
        }
        arrived
    }
}

impl Core {
    /// Carries out what was gathered under a lock that is dropped by now.
    pub(crate) fn raise(&self, effects: Effects) {
        let mut next = Next::new();
        self.apply(effects, &mut next);
        self.run_all(next);
    }

    /// Publishes to the driver what was gathered, and sets timers; what is to be run is added to
    /// `next`.
    #[inline]
    fn apply(&self, effects: Effects, next: &mut Next) {
        if !effects.is_empty() {
            self.apply_all(effects, next);
        }
    }

    /// As [`apply`](Core::apply). A completion that the driver is notified of is there before an
    /// event of the same run is.
    #[inline(never)]
    fn apply_all(&self, effects: Effects, next: &mut Next) {
        let mut events = Vec::new();
        for effect in effects.into_list() {
            match effect {
                Effect::Notification(queue, cqid) => {
                    self.post(&queue, [Event::new(EventKind::Completion, cqid)]);
                }
                Effect::Cq(due, cqid) => self.schedule.set_timer(due, Timer::Cq(cqid)),
                Effect::Stream(due, sid) => self.schedule.set_timer(due, Timer::Stream(sid)),
                Effect::Event(event) => events.push(event),
                Effect::Next(object) => next.push_back(object),
            }
        }
        if !events.is_empty()
            && let Some(queue) = self.async_events.load().as_ref()
        {
            self.post(queue, events);
        }
    }

    /// Runs objects until none is left that another one's run requested.
    fn run_all(&self, mut next: Next) {
        while let Some(object) = next.pop_front() {
            let mut effects = Effects::default();
            match object {
                Object::Overflowed(cqid) => {
                    self.counters.add_shared(Counter::CqOverflows, 1);
                    effects.event(Event::new(EventKind::CqError, cqid));
                    if let Some(cq) = self.cqs.find(cqid) {
                        let pairs = cq.pairs();
                        next.extend(pairs.into_iter().map(|qid| Object::Qp(qid, Requests::CQ_LOST)));
                    }
                }
                Object::Qp(qid, requests) => {
                    if let Some(qp) = self.qps.find(qid) {
                        qp.kick_before(self, requests, &mut next);
                    }
                }
                Object::Stream(sid) => self.streams.resume(sid, self.clock.now(), &mut effects),
                Object::Listener(lid) => self.streams.open_listener(&self.schedule, lid, &mut effects),
            }
            self.apply(effects, &mut next);
        }
    }
}
