//! A queue pair of kind UC and its stream.
//!
//! InfiniBand's UC has no connection that could fail: messages get lost, and the queue pair stays
//! as it is. So an end of the stream that this side did not cause leaves the queue pair in its
//! state, with its receives, and another stream may be attached. Without a stream messages are
//! dropped: their requests complete as if they were sent. A request that fails here puts the send
//! queue into the state SQE (InfiniBand Architecture Specification vol. 1 §10.3.1.8).

use super::{Engine, Progress};
use crate::counters::Counter;
use crate::llp::Llp;
use crate::llp::loopback::{Loopback, NoStream};
use crate::queues::Overflow;
use crate::rdmap::env::Env;
use crate::rdmap::inbound::Halves;
use crate::rdmap::params::TxOutcome;
use crate::rdmap::turns::{Framed, Turns};
use crate::stream::Stream;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::QpState;

/// ULPDUs dropped in one run.
const DROP_BUDGET: u32 = 4096;

impl Engine {
    /// Whether the stream of a queue pair of kind UC has ended, or was never there.
    pub(crate) fn is_parted(&self) -> bool {
        self.halves.qp.unreliable && matches!(self.progress, Progress::Detached)
    }

    /// The stream ends for a reason of the peer or the network; returns whether the queue pair
    /// outlives it.
    pub(super) fn begin_parting(&mut self) -> bool {
        self.parting = self.halves.qp.unreliable && self.state != QpState::Err;
        self.parting
    }

    /// Gives up the stream.
    pub(super) fn part_from(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if matches!(self.progress, Progress::Open) && self.begin_parting() {
            stream.reset();
            self.end(env);
        }
    }

    /// Messages that the stream has only in part are dropped, in both directions.
    pub(super) fn drop_messages(&mut self, env: &mut Env<'_>) {
        let taken = self.llp.as_ref().map_or(u64::MAX, Llp::taken);
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &mut self.halves;
        responder.part(env);
        let dropped = requester.drop_flights(taken);
        env.counters.add(Counter::TxMessageDrops, dropped);
        // The effects name a queue that overflowed, and the event ends the queue pair.
        let (Ok(()) | Err(Overflow)) = requester.complete(qp, env, taken);
    }

    /// The stream is gone: another one may come.
    pub(super) fn finish_parting(&mut self) {
        self.parting = false;
        self.progress = Progress::Detached;
        self.llp = None;
        (self.fpdu_received, self.input_ended, self.peer_closed) = (false, false, false);
        self.turns = Turns::default();
        self.rtr = None;
        let Halves {
            fresh,
            silent,
            response_msn,
            expected,
            ..
        } = &mut self.halves;
        (*fresh, *silent, *response_msn, *expected) = (true, true, 1, None);
    }

    /// Whether requests are carried out though there is no stream.
    pub(super) fn sends_without_stream(&self) -> bool {
        self.halves.qp.unreliable && matches!(self.state, QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Carries out requests without a stream: messages are dropped.
    pub(super) fn send_nowhere(&mut self, env: &mut Env<'_>) -> TxOutcome {
        let mut nowhere = Loopback::default();
        let mut budget = DROP_BUDGET;
        let outcome = loop {
            let sends = self.state != QpState::Sqe;
            let before = env.counters.value(Counter::TxMessages);
            let mut llp = Llp::Loopback(Box::new(nowhere));
            let framed = self
                .turns
                .frame(&mut self.halves, &mut llp, None, sends, env, &mut budget);
            nowhere = match llp {
                Llp::Loopback(loopback) => *loopback,
                Llp::Mpa(_) => Loopback::default(),
            };
            nowhere.discard();
            let dropped = env.counters.value(Counter::TxMessages).wrapping_sub(before);
            env.counters.add(Counter::TxMessageDrops, dropped);
            let Halves { qp, requester, .. } = &mut self.halves;
            if let Err(Overflow) = requester.complete(qp, env, u64::MAX) {
                self.fail(QpFault::CqOverflow, env, &mut NoStream);
            } else if self.has_failed_send() {
                self.flush_failed_sends(env, &mut NoStream);
            }
            match framed {
                _ if self.state == QpState::Err => break TxOutcome::Idle,
                Framed::LocalError => self.state = QpState::Sqe,
                Framed::NoRoom if budget > 0 => {}
                Framed::NoRoom => {
                    // A stream that comes next does not begin within a message.
                    self.drop_messages(env);
                    break TxOutcome::More;
                }
                Framed::Nothing | Framed::Refused(_) => break TxOutcome::Idle,
            }
        };
        nowhere.release(env.buffers);
        outcome
    }

    /// Whether the state SQE is reached by a request that failed.
    #[inline]
    pub(super) fn has_failed_send(&self) -> bool {
        self.state == QpState::Sqe && self.halves.qp.unreliable
    }

    /// In the state SQE: completes the request that failed when those before it are complete, and
    /// flushes those behind it. A peer that got a part of the message cannot recognise the next
    /// one, so the stream ends.
    pub(super) fn flush_failed_sends(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if !self.halves.requester.is_failed_next() {
            return;
        }
        let known = self.known();
        let Halves { qp, requester, .. } = &mut self.halves;
        let torn = std::mem::take(&mut requester.torn);
        if let Err(Overflow) = requester.flush(qp, env, known) {
            self.fail(QpFault::CqOverflow, env, stream);
        } else if torn {
            self.part_from(env, stream);
        }
    }
}
