//! Sending: framing and flushing in turn.

use super::{Engine, Progress};
use crate::counters::Counter;
use crate::llp::Llp;
use crate::probes;
use crate::queues::Overflow;
use crate::rdmap::env::Env;
use crate::rdmap::explain::Lost;
use crate::rdmap::inbound::Halves;
use crate::rdmap::params::TxOutcome;
use crate::rdmap::peer_progress::PeerProgress;
use crate::rdmap::turns::Framed;
use crate::stream::Stream;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::QpState;

/// ULPDUs framed in one run.
const TX_BUDGET: u32 = 4096;

impl Engine {
    /// Whether [`transmit`](Self::transmit) would find nothing to send, nor to complete.
    #[inline]
    pub fn is_at_rest(&self) -> bool {
        matches!(self.progress, Progress::Open)
            && matches!(self.state, QpState::Rtr | QpState::Rts)
            && self.rtr.is_none()
            && !self.is_peer_tracked()
            && self.halves.requester.is_at_rest()
            && self.halves.responder.answers.is_empty()
            // What came before a message that waits is confirmed.
            && self.held.is_empty()
            && self.llp.as_ref().is_some_and(Llp::is_flushed)
    }

    /// Whether the peer is a queue pair of this device: a stream between two addresses that are one
    /// may turn out to be another process's.
    #[inline]
    fn is_peer_tracked(&self) -> bool {
        self.peer_progress.as_ref().is_some_and(PeerProgress::is_tracked)
    }

    /// Sends what can be sent.
    pub fn transmit(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        if self.unreachable && self.halves.requester.sq.has_posted() {
            self.unreachable = false;
            self.lose(Lost::Unreachable, env, stream);
        }
        match &self.progress {
            Progress::Open => {}
            Progress::Terminating { .. } => return self.push_terminate(env, stream),
            Progress::Detached | Progress::Lingering { .. } | Progress::Ended
                if self.sends_without_stream() =>
            {
                return self.send_nowhere(env);
            }
            Progress::Detached | Progress::Lingering { .. } | Progress::Ended => {
                self.flush(env);
                return TxOutcome::Idle;
            }
        }
        if !self.may_send() {
            return TxOutcome::Idle;
        }
        if self.peer_closed {
            // Requests that are posted now fail, too.
            if self.is_awaiting_peer() {
                self.begin_losing(env);
            }
            return TxOutcome::Idle;
        }
        let mut outcome = self.pump(env, stream);
        // A request may have waited for that.
        while outcome == TxOutcome::Idle && self.is_newly_confirmed(env, stream) {
            outcome = self.pump(env, stream);
        }
        if let Some(llp) = &mut self.llp {
            llp.release(env.buffers);
        }
        outcome
    }

    /// Frames and flushes in turn until one of them can do no more.
    pub(super) fn pump(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        let mut budget = TX_BUDGET;
        loop {
            if !matches!(self.progress, Progress::Open) {
                return self.outcome_of_ending();
            }
            self.confirm_before_waiting(env);
            let Some(llp) = &mut self.llp else {
                return TxOutcome::Idle;
            };
            llp.refresh(&env.now, stream);
            // A connected stream is ready both ways: RTR is no state of RDMAC verbs, and programs
            // that receive only, and send but credits, stay in it (perftest over iWARP).
            let sends = (matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
                || self.halves.requester.has_failed)
                && !self.concluding;
            let rtr = self.rtr.take();
            let delivery = &mut self.halves.requester.delivery;
            if delivery.is_on() && self.peer_progress.as_ref().is_some_and(PeerProgress::is_tracked) {
                // Both ends are on this device, which sees the delivery of messages.
                delivery.stop();
            }
            let framed = self
                .turns
                .frame(&mut self.halves, llp, rtr, sends, env, &mut budget);
            let before = llp.taken();
            let mut calls = 0;
            let flushed = llp.flush(env.memory, stream, &mut calls);
            let taken = llp.taken();
            env.counters.add(Counter::TxCalls, calls);
            env.counters.add(Counter::TxBytes, taken - before);
            if taken != before {
                probes::sent(self.halves.qp.label, taken - before);
            }
            let known = self.known();
            let Halves { qp, requester, .. } = &mut self.halves;
            if let Err(Overflow) = requester.complete(qp, env, known) {
                self.fail(QpFault::CqOverflow, env, stream);
                return TxOutcome::Idle;
            }
            let all_taken = match flushed {
                Ok(all_taken) => all_taken,
                Err(error) => {
                    self.send_failed(error, env, stream);
                    return TxOutcome::Idle;
                }
            };
            if self.state == QpState::Sqe {
                match self.has_failed_send() {
                    true => self.flush_failed_sends(env, stream),
                    false => self.end_if_failed(env, stream),
                }
                if !matches!(self.progress, Progress::Open) {
                    return self.outcome_of_ending();
                }
            }
            match framed {
                Framed::LocalError if self.halves.qp.unreliable => self.state = QpState::Sqe,
                Framed::LocalError => self.fail_locally(env, stream),
                Framed::Refused(message) => {
                    self.terminate(message, QpFault::TerminateSent, env, stream);
                    return self.outcome_of_ending();
                }
                Framed::NoRoom | Framed::Nothing if budget > 0 && self.deliver_loopback(env) > 0 => {}
                _ if !all_taken => {
                    env.counters.add(Counter::TxStalls, 1);
                    return TxOutcome::Blocked;
                }
                Framed::Nothing => {
                    self.close_if_drained(env, stream);
                    return TxOutcome::Idle;
                }
                Framed::NoRoom if budget == 0 => return TxOutcome::More,
                Framed::NoRoom if self.llp.as_ref().is_some_and(Llp::has_room) => {}
                // Our own peer is full: it waits for receives.
                Framed::NoRoom => return TxOutcome::Idle,
            }
        }
    }

    /// A Terminate may still wait for the stream.
    fn outcome_of_ending(&self) -> TxOutcome {
        match self.is_ending() {
            true => TxOutcome::Blocked,
            false => TxOutcome::Idle,
        }
    }

    /// In the closing state with nothing left to do: sends our FIN (row DDP-T-05).
    pub(super) fn close_if_drained(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        if self.state == QpState::Sqd
            && matches!(self.progress, Progress::Open)
            && self.is_quiet()
            && self.halves.requester.is_confirmed(taken)
        {
            self.confirm_last(env, stream);
            self.linger(env, stream);
        }
    }
}
