//! One run of a queue pair, and the choice of the object that runs next.

use super::Core;
use crate::counters::Counter;
use crate::events::{Effect, Effects, Next, Object, Requests};
use crate::qp::Burst;
use crate::qp::{Inner, Qp};
use crate::schedule::{Interest, Timer, Token};
use crate::time::Nanos;
use crate::transport::{Env, Moved, RxOutcome, TxOutcome};
use crate::tuning::GATHERED_IN_MEMORY;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::QpState;

/// The requests that read the stream.
const RECEIVES: Requests = Requests::RECEIVE
    .union(Requests::CONFIRM)
    .union(Requests::HANG_UP)
    .union(Requests::TIMER)
    .union(Requests::CQ_LOST);

/// Event index so far ahead that the driver does not ring: the device polls by itself.
const NO_RING: u32 = 1 << 30;

impl Qp {
    /// Carries out `requests`. Returns whether bytes or a confirmation arrived, or bytes left after
    /// a wait.
    #[inline(always)]
    pub(super) fn run(
        self: &Arc<Qp>,
        core: &Core,
        inner: &mut Inner,
        requests: Requests,
        effects: &mut Effects,
    ) -> bool {
        if requests.intersects(Requests::ATTACHED) {
            self.begin_stream(core, inner);
        }
        let is_confirmed = requests == Requests::CONFIRM && !inner.engine.owes_confirmation();
        if inner.dead || inner.attaching || is_confirmed || core.is_stopped() {
            return false;
        }
        let mut env = core.env(self, effects);
        if requests.intersects(Requests::SEND) {
            self.counters.add(Counter::Doorbells, 1);
            inner.gathering.note_ring(self.poll_count(core));
            let is_plain = requests == Requests::SEND && !inner.blocked && !inner.hung_up;
            if is_plain && self.fast_send(core, inner, &mut env) {
                return false;
            }
        }
        let due = inner.advance(&env.now);
        let has_room = inner.has_room();
        let waited = has_room || requests.intersects(Requests::WRITABLE);
        let arrived = |moved: Moved| moved.received || moved.confirmed || waited && moved.sent;
        if requests.intersects(Requests::CQ_LOST) {
            inner.with_engine(|engine, stream| engine.fail(QpFault::CqOverflow, &mut env, stream));
        }
        if requests.intersects(Requests::PEER_PROGRESS) {
            inner.with_engine(|engine, stream| engine.peer_progressed(&mut env, stream));
        }
        if requests.intersects(Requests::TIMER) {
            inner.timer = None;
            inner.with_engine(|engine, stream| engine.tick(&mut env, stream));
        }
        if requests.intersects(Requests::HANG_UP) {
            inner.hung_up = true;
            inner.with_engine(|_, stream| stream.note_hang_up());
        }
        // A poll that finds nothing does not change state.
        let only_polls = (Requests::RECEIVE | Requests::PEER_PROGRESS | Requests::CONFIRM).contains(requests)
            && inner.has_input()
            && !inner.engine.has_parked();
        let is_drained = requests.intersects(RECEIVES) && self.receive(core, inner, &mut env);
        let found_nothing = only_polls && is_drained && !arrived(env.moved) && !has_room && !inner.delays;
        if found_nothing && requests == Requests::RECEIVE && inner.is_without_end() {
            return false;
        }
        let owes = inner.engine.owes_confirmation();
        let polled_again = requests.intersects(Requests::CONFIRM) && !env.moved.received;
        let confirms = owes && inner.engine.confirm_alone(polled_again, is_drained);
        // Bytes that arrived may confirm requests before those that wait for room.
        let sends = !inner.blocked
            || has_room
            || env.moved.received
            || requests
                .intersects(Requests::WRITABLE | Requests::HANG_UP | Requests::TIMER | Requests::CQ_LOST);
        let is_to_send = match only_polls {
            // Bytes that arrived may only have been for the program.
            true => confirms || has_room || arrived(env.moved) && !inner.engine.is_at_rest(),
            false => true,
        };
        if sends && is_to_send {
            self.transmit(core, inner, &mut env, requests);
        }
        // A queue pair that is its own peer waits for a receive: the post of a receive must ring.
        if inner.stream.is_none() && inner.engine.has_parked() {
            self.receive(core, inner, &mut env);
            self.transmit(core, inner, &mut env, requests);
        }
        // The program may answer what has arrived: the confirmation then goes with its message.
        if !confirms && inner.engine.owes_confirmation() {
            core.schedule.attend_later(self, Requests::CONFIRM);
        }
        self.settle(core, inner, &mut env, due);
        arrived(env.moved)
    }

    /// The command that attached the stream is complete.
    #[cold]
    fn begin_stream(&self, core: &Core, inner: &mut Inner) {
        // A wrapper that delays bytes may have some left when the queue pair has none.
        (inner.attaching, inner.watches_room) = (false, inner.delays);
        let interest = match inner.watches_room {
            true => Interest::InputAndRoom,
            false => Interest::Input,
        };
        if let Some(fd) = inner.stream.as_ref().and_then(|s| s.descriptor()) {
            core.schedule.rewatch(fd, Token::Qp(self.id), interest);
            self.readable.store(true, Ordering::Relaxed);
        }
    }

    /// The stream takes no more: from now on its readiness for output is reported, also if it has
    /// room again by now.
    #[cold]
    fn watch_room(&self, core: &Core, inner: &mut Inner) {
        inner.watches_room = true;
        if let Some(fd) = inner.stream.as_ref().and_then(|s| s.descriptor()) {
            core.schedule
                .rewatch(fd, Token::Qp(self.id), Interest::InputAndRoom);
        }
    }

    /// A number that changes with each empty poll of the program for completions, and with each
    /// completion that the program takes.
    fn poll_count(&self, core: &Core) -> u32 {
        let taken = self.send_cq.consumer().wrapping_add(self.recv_cq.consumer());
        core.schedule.polls().wrapping_add(taken)
    }

    /// Reads the stream until it has nothing more, or up to the limit of one run. Returns whether
    /// it has nothing more.
    #[inline(always)]
    fn receive(self: &Arc<Qp>, core: &Core, inner: &mut Inner, env: &mut Env<'_>) -> bool {
        let mut read = u64::MAX;
        // No ring is requested for receives unless the stream turns out to wait for one.
        if !self.is_readable() && inner.has_input() {
            self.readable.store(true, Ordering::Relaxed);
            inner.engine.receive_source().ring_never();
        }
        loop {
            match inner.with_engine(|engine, stream| engine.receive(env, stream)) {
                // The end of the stream may follow the bytes that were read, and no further event
                // will report it.
                RxOutcome::Drained if inner.hung_up && self.counters.value(Counter::RxBytes) != read => {
                    read = self.counters.value(Counter::RxBytes);
                }
                RxOutcome::Drained => return true,
                RxOutcome::More => {
                    core.schedule.attend_later(self, Requests::RECEIVE);
                    return false;
                }
                RxOutcome::Stalled => {
                    if !inner.engine.receive_source().ring_at_next() {
                        self.counters.add(Counter::RxStalls, 1);
                        self.readable.store(false, Ordering::Relaxed);
                        return false;
                    }
                }
                RxOutcome::Finished => {
                    inner.hung_up = false;
                    self.readable.store(false, Ordering::Relaxed);
                    return false;
                }
                RxOutcome::Ended => {
                    (inner.hung_up, inner.blocked) = (false, false);
                    self.blocked.store(false, Ordering::Relaxed);
                    inner.stream = None;
                    self.leave_same_device_peer(core);
                    self.readable.store(false, Ordering::Relaxed);
                    return false;
                }
            }
        }
    }

    /// Carries out a request that involves only the peer's memory, so that neither the stream nor
    /// the queue pair's timers change. Returns whether no work is left.
    #[inline]
    fn fast_send(self: &Arc<Qp>, core: &Core, inner: &mut Inner, env: &mut Env<'_>) -> bool {
        let before = inner.engine.send_queue().taken();
        if !inner.with_engine(|engine, stream| engine.fast_transmit(env, stream)) {
            return false;
        }
        self.gather(core, inner, before, Requests::SEND);
        let ahead = inner.ring_ahead(0);
        !inner.engine.send_queue().ring_after(ahead)
    }

    /// Sends until there is nothing to send, or up to the limit of one run; then sets when the
    /// driver must ring next.
    fn transmit(self: &Arc<Qp>, core: &Core, inner: &mut Inner, env: &mut Env<'_>, requests: Requests) {
        let before = inner.engine.send_queue().taken();
        let mut known = false;
        loop {
            let taken = inner.engine.send_queue().taken();
            let outcome = inner.with_engine(|engine, stream| engine.transmit(env, stream));
            inner.blocked = outcome == TxOutcome::Blocked;
            // A poll retries a stream that passes through memory.
            let waits = inner.blocked && !inner.is_in_memory();
            self.blocked.store(waits, Ordering::Relaxed);
            if waits && !inner.watches_room {
                self.watch_room(core, inner);
            }
            if outcome == TxOutcome::More {
                core.schedule.attend_later(self, Requests::RESUME);
            }
            if outcome != TxOutcome::Idle {
                let ahead = match inner.is_in_memory() {
                    // If the program continues to post, its entries must be sent as well.
                    true => GATHERED_IN_MEMORY,
                    false => NO_RING,
                };
                return inner.engine.send_queue().ring_after_more(ahead);
            }
            self.gather(core, inner, before, requests);
            let ahead = inner.ring_ahead(0);
            let posted = inner.engine.send_queue().ring_after(ahead);
            if !posted {
                return;
            }
            if known {
                // Entries that were posted before the last run and not taken wait for something
                // other than a ring. If more were posted, the poster may be a program that polls,
                // and this thread leaves them to that program.
                if inner.engine.send_queue().taken() != taken {
                    core.schedule.attend_later(self, Requests::RESUME);
                }
                return;
            }
            known = true;
        }
    }

    /// Begins or ends a burst, now that everything posted has been taken. `before` is the number of
    /// entries taken before this run.
    #[inline]
    fn gather(self: &Arc<Qp>, core: &Core, inner: &mut Inner, before: u32, requests: Requests) {
        let sent = inner.engine.send_queue().taken().wrapping_sub(before);
        let sending = inner.engine.state() == QpState::Rts;
        match inner
            .gathering
            .note_sent(sent, requests.intersects(Requests::FLUSH), sending)
        {
            Burst::Began => core.schedule.burst_began(),
            Burst::Ended => core.schedule.burst_ended(),
            Burst::Same => {}
        }
        if inner.gathering.is_on() {
            if sent > 1 {
                self.counters.add(Counter::GatheredFlushes, 1);
            }
            core.schedule.attend_later(self, Requests::FLUSH);
        }
    }

    /// After every run: makes sure that no ring is missed in the error state, and that no timer is
    /// lost; `late` is the time at which delayed bytes of the stream continue.
    #[inline(always)]
    fn settle(self: &Arc<Qp>, core: &Core, inner: &mut Inner, env: &mut Env<'_>, late: Option<Nanos>) {
        let has_ended = || inner.stream.as_ref().is_some_and(|stream| stream.has_ended());
        if inner.hung_up || inner.engine.has_parked() && has_ended() {
            inner.with_engine(|engine, stream| engine.note_end_after_parked(env, stream));
        }
        if inner.engine.state() == QpState::Err {
            core.schedule.end_burst(&mut inner.gathering);
            let mut left = u32::MAX;
            while !env.is_stopped() {
                inner.engine.flush(env);
                let sends = inner.engine.send_queue();
                let unsent = u32::from(sends.ring_after(0));
                let unfilled = inner.engine.receive_source().ring_for_flush();
                // Entries that stay unflushed find no room in their completion queue.
                let now_left = unsent + unfilled;
                if now_left == 0 || now_left >= left {
                    break;
                }
                left = now_left;
            }
        }
        inner.with_engine(|engine, stream| engine.watch_peer(env, stream));
        let due = Nanos::earliest([inner.engine.deadline(), late, inner.advance(&env.now)]);
        if let Some(due) = due
            && inner.timer.is_none_or(|set| due < set)
        {
            inner.timer = Some(due);
            core.schedule.set_timer(due, Timer::Qp(self.id));
        }
    }
}

// Runs queue pairs, and carries out the effects of these runs on the rest of the device.
//
// A run may request runs of other objects: a completion queue that overflows takes all its queue
// pairs to the error state, whose flushes may overflow the next one. The objects wait in a list
// ([`Next`]) and are run one after the other, so that the length of such a chain, which the driver
// decides, is never the depth of the stack. Only the peer on the same device is run by a call
// inside a call, at most two deep.

impl Qp {
    /// Has requests carried out, on this thread or on the thread that already has the lock. Returns
    /// whether bytes arrived, or left after a wait.
    #[inline]
    pub(crate) fn kick(self: &Arc<Qp>, core: &Core, requests: Requests) -> bool {
        let mut next = Next::new();
        let arrived = self.kick_before(core, requests, &mut next);
        core.run_all(next);
        arrived
    }

    /// Has requests carried out like [`kick`](Qp::kick), but adds the objects that must run
    /// afterwards to `next`.
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
        if progressed && let Some(peer) = self.same_device_peer(core) {
            match requests {
                // A request instead of a call: the two peers must not call each other deeper and
                // deeper.
                Requests::PEER_PROGRESS => core.schedule.attend_later(&peer, Requests::PEER_PROGRESS),
                _ => {
                    peer.kick_before(core, Requests::PEER_PROGRESS, next);
                }
            }
        }
        arrived
    }

    /// Sends all posted entries on this thread, after a wait for the thread that has the lock.
    pub(crate) fn catch_up(self: &Arc<Qp>, core: &Core, effects: &mut Effects) {
        let requests = Requests::RESUME | Requests::FLUSH;
        self.run(core, &mut self.turns.lock(), requests, effects);
        // Requests that other threads recorded during the run.
        effects.kick(self.id, Requests::empty());
    }

    /// Has requests carried out like [`kick`](Qp::kick). If the peer is a queue pair of this device
    /// that no other thread polls, the peer then receives at once all that the stream carried, so
    /// that our requests complete. Returns the result of `kick`.
    #[inline]
    pub(crate) fn kick_through(self: &Arc<Qp>, core: &Core, requests: Requests) -> bool {
        let arrived = self.kick(core, requests);
        if let Some(peer) = self.peer_to_run(core)
            && peer.kick(core, Requests::RECEIVE)
        {
            self.kick(core, Requests::PEER_PROGRESS);
        }
        arrived
    }
}

impl Core {
    /// Carries out effects that were collected under a lock; the lock must be dropped.
    pub(crate) fn raise(&self, effects: Effects) {
        let mut next = Next::new();
        self.apply(effects, &mut next);
        self.run_all(next);
    }

    /// Publishes collected entries to the driver, and sets timers; adds the objects that must run
    /// to `next`.
    #[inline]
    fn apply(&self, effects: Effects, next: &mut Next) {
        if !effects.is_empty() {
            self.apply_all(effects, next);
        }
    }

    /// Applies effects. Completion notifications are posted before the asynchronous events of the
    /// same run.
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

    /// Runs the objects in `next`, and those that their runs request.
    #[inline]
    fn run_all(&self, next: Next) {
        if !next.is_empty() {
            self.run_each(next);
        }
    }

    #[inline(never)]
    fn run_each(&self, mut next: Next) {
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
