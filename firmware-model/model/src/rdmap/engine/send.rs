//! Sending: framing and flushing in turn.

use super::receive::{Stop, admit, note_first_fpdu};
use super::{Engine, Progress};
use crate::counters::{Counter, Counters};
use crate::llp::Llp;
use crate::llp::mpa::{Receiver, SHORT_FPDU};
use crate::probes;
use crate::queues::Overflow;
use crate::rdmap::delivery::PeerProgress;
use crate::rdmap::explain::Lost;
use crate::rdmap::inbound::Halves;
use crate::rdmap::params::Env;
use crate::rdmap::params::TxOutcome;
use crate::rdmap::turns::Framed;
use crate::stream::Stream;
use crate::stream::same_host::LocalPeer;
use crate::tuning::TX_BUDGET;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::QpState;
use urnic_device::wqe::Opcode;

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
    #[inline]
    pub(super) fn close_if_drained(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.state == QpState::Sqd {
            self.close_drained(env, stream);
        }
    }

    #[cold]
    fn close_drained(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        if matches!(self.progress, Progress::Open)
            && self.is_quiet()
            && self.halves.requester.is_confirmed(taken)
        {
            self.confirm_last(env, stream);
            self.linger(env, stream);
        }
    }
}

// A fast path for a message that comes, or a request that is posted, alone, where the peer shares
// memory with us: what a program waits for that sends one message to and fro. Whatever is not
// simple takes the usual path ([`transmit`](Engine::transmit), [`receive`](Engine::receive)).

impl Engine {
    /// Carries out the next request, if it is the only one and simple. Returns whether it did, and
    /// nothing is left for the usual way.
    #[inline]
    pub fn transmit_alone(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        let is_plain = matches!(self.progress, Progress::Open)
            && self.state == QpState::Rts
            && self.may_send()
            && self.rtr.is_none()
            && !(self.unreachable || self.peer_closed);
        let Halves {
            qp,
            requester,
            responder,
            silent,
            ..
        } = &mut self.halves;
        if !is_plain || !responder.answers.is_empty() {
            return false;
        }
        let (Some(llp), Some(wqe)) = (&mut self.llp, requester.alone()) else {
            return false;
        };
        match (wqe.opcode, llp) {
            (Opcode::Write | Opcode::Read, llp) => match requester.complete_alone(wqe, qp, env, llp) {
                Some(Ok(())) => true,
                Some(Err(Overflow)) => {
                    self.fail(QpFault::CqOverflow, env, stream);
                    false
                }
                None => false,
            },
            (Opcode::Send, Llp::Mpa(mpa)) => {
                let before = mpa.tx.taken();
                if requester.send_alone(wqe, qp, env, &mut mpa.tx, stream).is_none() {
                    return false;
                }
                *silent = false;
                let taken = mpa.tx.taken() - before;
                env.counters.add(Counter::TxCalls, 1);
                env.counters.add(Counter::TxBytes, taken);
                probes::sent(qp.label, taken);
                mpa.tx.is_flushed()
            }
            _ => false,
        }
    }

    /// Receives what has arrived, if that is nothing, or one short FPDU with nothing before it.
    /// Returns whether it did, and more may have come only since.
    #[inline]
    pub(super) fn receive_alone(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<bool, Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(false);
        };
        if !mpa.rx.is_plain_and_empty() || !self.held.is_empty() || self.input_ended || env.is_stopped() {
            return Ok(false);
        }
        let mut bytes = [0; SHORT_FPDU];
        let Some(bytes) = stream.receive_short(&mut bytes).and_then(|n| bytes.get(..n)) else {
            // Most polls find nothing.
            let is_empty = stream.has_input() == Some(false);
            env.counters.add(Counter::RxCalls, is_empty.into());
            return Ok(is_empty);
        };
        env.counters.add(Counter::RxCalls, 1);
        env.counters.add(Counter::RxBytes, bytes.len() as u64);
        probes::received(self.halves.qp.label, bytes.len());
        let Some(ulpdu) = Receiver::ulpdu_of(bytes) else {
            mpa.rx.accept(env.buffers, bytes);
            return Ok(false);
        };
        let is_first = !std::mem::replace(&mut self.fpdu_received, true);
        let admitted = admit(&mut self.halves, &mut self.held, env, mpa.rx.position(), ulpdu);
        match &admitted {
            Ok(()) => {
                if is_first {
                    note_first_fpdu(&self.halves, env, self.initiator, self.may_begin);
                }
                mpa.rx.pass(bytes.len());
                env.counters.add(Counter::RxFpdus, 1);
            }
            Err(_) => mpa.rx.accept(env.buffers, bytes),
        }
        env.recent.forget();
        let pushed = self.halves.responder.cq.flush(env);
        self.note_progress();
        admitted?;
        pushed?;
        if !self.held.is_empty() {
            self.note_waiting(env);
        }
        Ok(true)
    }
}

// A peer that shares memory with us: what it says there, and what it does in our memory.

impl Engine {
    /// The queue pair's number for programs.
    pub(crate) fn label(&self) -> u32 {
        self.halves.qp.label
    }

    /// The peer shares memory with us: it says there what it has processed, and we may reach into
    /// its memory.
    pub(super) fn meet_local_peer(&mut self, local_peer: Option<LocalPeer>) {
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &mut self.halves;
        let Some(mut local_peer) = local_peer.filter(|_| !qp.unreliable) else {
            return;
        };
        let receives = responder.rq.place();
        if let Some(place) = receives {
            local_peer.offer_receives(&place);
        }
        responder.peer_fills = local_peer.may_fill();
        local_peer.permit(qp.pd, qp.access);
        requester.confirms = requester.delivery.is_on();
        local_peer.begin_awaiting(requester.confirms);
        // The word in memory takes the place of Reads.
        requester.delivery.stop();
        requester.local_peer = Some(local_peer);
    }

    /// Lets the peer place payload in receives by itself.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn let_peer_fill(&mut self) {
        self.halves.responder.peer_fills = true;
    }

    /// A number that grows with what the local peer says it has processed.
    #[inline]
    pub fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// Completes what the local peer has processed since the last look.
    #[inline]
    pub(super) fn note_confirmed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if let Some(local_peer) = &mut self.halves.requester.local_peer {
            local_peer.look_for_introduction();
            self.halves.responder.peer_fills = local_peer.may_fill();
        }
        let Some(local_peer) = self.halves.requester.awaited() else {
            return;
        };
        // A hostile local peer may say anything, at any time.
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        let confirmed = local_peer.confirmed().min(taken);
        if confirmed > self.confirmed {
            self.confirmed = confirmed;
            self.peer_progressed(env, stream);
            self.close_if_drained(env, stream);
        }
    }

    /// Whether the local peer has processed all that was sent, some of it since the last look. That
    /// happens once for what was sent: it cannot say so again and again, byte by byte.
    #[inline]
    pub(super) fn is_newly_confirmed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        let awaited = self.halves.requester.awaited();
        if awaited.is_none_or(|local_peer| local_peer.confirmed() < taken) {
            return false;
        }
        let before = self.confirmed;
        self.note_confirmed(env, stream);
        self.confirmed != before
    }

    /// Counts what the local peer has done in our memory.
    pub fn count_accesses(&mut self, counters: &Counters) {
        if let Some(local_peer) = &mut self.halves.requester.local_peer {
            let accessed = local_peer.take_accessed();
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
