//! Has queue pairs run, and carries out what that asks of the rest of the device: other queue pairs may be to run then.

use crate::agenda::Timer;
use crate::asked::Asked;
use crate::counters::Counter;
use crate::effects::Effects;
use crate::qp::Qp;
use crate::state::Core;
use std::sync::Arc;
use urnic_verbs_api::device::event::{Event, EventKind};

impl Qp {
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
            core.agenda.attend_later(self, Asked::AGAIN);
        }
        if judged && let Some(sibling) = self.sibling(core) {
            match asked {
                // Not to and fro, in ever deeper calls.
                Asked::JUDGED => core.agenda.attend_later(&sibling, Asked::JUDGED),
                _ => {
                    sibling.kick(core, Asked::JUDGED);
                }
            }
        }
        arrived
    }

    /// As [`kick`](Qp::kick). If the peer is a queue pair of this device, it receives at once, too, as far as the stream carried
    /// what was sent: our requests complete when it has.
    pub(crate) fn kick_through(self: &Arc<Qp>, core: &Core, asked: Asked) {
        self.kick(core, asked);
        if let Some(sibling) = self.sibling(core) {
            sibling.kick(core, Asked::RECEIVE);
        }
    }
}

impl Core {
    /// Carries out what was gathered under a lock that is dropped by now.
    pub(crate) fn raise(&self, effects: Effects) {
        if effects.is_empty() {
            return;
        }
        for (queue, cqid) in effects.notifications {
            self.post(&queue, [Event::new(EventKind::Completion, cqid)]);
        }
        for (due, cqid) in effects.due {
            self.agenda.set_timer(due, Timer::Cq(cqid));
        }
        let overflows = effects
            .overflowed
            .iter()
            .map(|cqid| Event::new(EventKind::CqError, *cqid));
        self.counters
            .add_shared(Counter::CqOverflows, effects.overflowed.len() as u64);
        let mut events = effects.events.into_iter().chain(overflows).peekable();
        if let Some(queue) = self.async_events.load().as_ref()
            && events.peek().is_some()
        {
            self.post(queue, events);
        }
        for cqid in effects.overflowed {
            for qp in self.qps.all().iter().filter(|qp| qp.uses_cq(cqid)) {
                qp.kick(self, Asked::CQ_LOST);
            }
        }
        for (qid, asked) in effects.kicks {
            if let Some(qp) = self.qps.find(qid) {
                qp.kick(self, asked);
            }
        }
        for lid in effects.listeners {
            let mut effects = Effects::default();
            self.streams.open_listener(&self.agenda, lid, &mut effects);
            self.raise(effects);
        }
        for sid in effects.streams {
            let mut effects = Effects::default();
            self.streams.resume(sid, &mut effects);
            self.raise(effects);
        }
    }
}
