//! A peer that shares memory with us: what it says there, and what it does in our memory.

use super::Engine;
use crate::counters::{Counter, Counters};
use crate::llp::Llp;
use crate::rdmap::env::Env;
use crate::rdmap::inbound::Halves;
use crate::stream::Stream;
use crate::stream::same_host::Neighbour;

impl Engine {
    /// The queue pair's number for programs.
    pub(crate) fn label(&self) -> u32 {
        self.halves.qp.label
    }

    /// The peer shares memory with us: it says there what it has processed, and we may reach into
    /// its memory.
    pub(super) fn meet_neighbour(&mut self, neighbour: Option<Neighbour>) {
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &mut self.halves;
        let Some(mut neighbour) = neighbour.filter(|_| !qp.unreliable) else {
            return;
        };
        let receives = responder.rq.place();
        if let Some(place) = receives {
            neighbour.offer_receives(&place);
        }
        responder.peer_fills = neighbour.may_fill();
        neighbour.permit(qp.pd, qp.access);
        requester.confirms = requester.delivery.is_on();
        neighbour.begin_awaiting(requester.confirms);
        // The word in memory takes the place of Reads.
        requester.delivery.stop();
        requester.neighbour = Some(neighbour);
    }

    /// Lets the peer place payload in receives by itself.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn let_peer_fill(&mut self) {
        self.halves.responder.peer_fills = true;
    }

    /// A number that grows with what the neighbour says it has processed.
    #[inline]
    pub fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// Completes what the neighbour has processed since the last look.
    #[inline]
    pub(super) fn note_confirmed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if let Some(neighbour) = &mut self.halves.requester.neighbour {
            neighbour.look_for_introduction();
            self.halves.responder.peer_fills = neighbour.may_fill();
        }
        let Some(neighbour) = self.halves.requester.awaited() else {
            return;
        };
        // A hostile neighbour may say anything, at any time.
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        let confirmed = neighbour.confirmed().min(taken);
        if confirmed > self.confirmed {
            self.confirmed = confirmed;
            self.peer_progressed(env, stream);
            self.close_if_drained(env, stream);
        }
    }

    /// Whether the neighbour has processed all that was sent, some of it since the last look. That
    /// happens once for what was sent: it cannot say so again and again, byte by byte.
    #[inline]
    pub(super) fn is_newly_confirmed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        let awaited = self.halves.requester.awaited();
        if awaited.is_none_or(|neighbour| neighbour.confirmed() < taken) {
            return false;
        }
        let before = self.confirmed;
        self.note_confirmed(env, stream);
        self.confirmed != before
    }

    /// Counts what the neighbour has done in our memory.
    pub fn count_accesses(&mut self, counters: &Counters) {
        if let Some(neighbour) = &mut self.halves.requester.neighbour {
            let accessed = neighbour.take_accessed();
            counters.add(Counter::RxBytes, accessed.written);
            counters.add(Counter::TxBytes, accessed.read);
        }
    }

    /// The bytes that we sent of which the outcome is known, as far as it can be.
    #[inline]
    pub(super) fn known(&self) -> u64 {
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        let known = self.halves.requester.known(taken);
        self.peer_progress
            .as_ref()
            .map_or(known, |peer_progress| peer_progress.known(known))
    }
}
