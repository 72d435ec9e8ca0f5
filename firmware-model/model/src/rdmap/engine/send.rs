//! Sending: framing and flushing in turn.

use super::receive::{Stop, admit};
use super::{Engine, Input, Progress};
use crate::counters::{Counter, Counters};
use crate::llp::Llp;
use crate::llp::mpa::{FpduReceiver, SHORT_FPDU};
use crate::probes;
use crate::queues::Overflow;
use crate::rdmap::explain::Lost;
use crate::rdmap::framing::Framed;
use crate::rdmap::inbound::Rdmap;
use crate::stream::Stream;
use crate::stream::same_host::LocalPeer;
use crate::transport::{Env, TxOutcome};
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
            && !self.rdmap.startup.owes_rtr()
            && !self.rdmap.requester.confirmation.is_same_device()
            && self.rdmap.requester.is_at_rest()
            && self.rdmap.responder.answers.is_empty()
            && self.llp.as_ref().is_some_and(Llp::is_flushed)
    }

    /// Sends as much as possible.
    pub fn transmit(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        if self.unreachable && self.rdmap.requester.sq.has_posted() {
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
        if !self.rdmap.startup.may_send() {
            return TxOutcome::Idle;
        }
        if self.input == Input::Closed {
            // Requests that are posted now fail, too.
            if self.is_awaiting_peer() {
                self.begin_losing(env);
            }
            return TxOutcome::Idle;
        }
        let mut outcome = self.pump(env, stream);
        // A request may have waited for the local peer to process all bytes.
        while outcome == TxOutcome::Idle && self.reads_all_processed() {
            // A request that waited for access to the peer's memory goes by the stream if there is
            // no such access.
            self.check_introduction();
            self.complete_confirmed(env, stream);
            outcome = self.pump(env, stream);
        }
        self.end_if_all_sent(outcome, env, stream);
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
            let Some(llp) = &mut self.llp else {
                return TxOutcome::Idle;
            };
            // RFC 5044 permits FPDUs that are longer than a segment; a urnic takes them.
            let Rdmap {
                requester, responder, ..
            } = &self.rdmap;
            if requester.confirmation.is_unasked() || responder.confirming.is_announced() {
                llp.allow_long();
            }
            llp.refresh(&env.now, stream);
            // A connected stream is ready both ways: RTR is no state of RDMAC verbs, and programs
            // that receive, and send only credits, stay in it (perftest over iWARP).
            let sends = (matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
                || self.rdmap.requester.has_failed)
                && !self.concluding;
            self.rdmap.requester.confirmation.prefer_same_device();
            let framed = self.rdmap.frame(llp, sends, env, &mut budget);
            let before = llp.taken();
            let mut calls = 0;
            let flushed = llp.flush(env.memory, stream, &mut calls);
            let taken = llp.taken();
            env.counters.add(Counter::TxCalls, calls);
            env.sent(taken - before);
            if taken != before {
                probes::sent(env.qp.label, taken - before);
            }
            let known = self.complete_upto();
            let requester = &mut self.rdmap.requester;
            if let Err(Overflow) = requester.complete(env, known) {
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
                Framed::LocalError if env.qp.unreliable => self.state = QpState::Sqe,
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
                // A queue pair that is its own peer is full: it waits for receives.
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
        let taken = self.taken();
        if matches!(self.progress, Progress::Open)
            && self.is_quiet()
            && self.rdmap.requester.confirmation.is_all(taken)
        {
            self.confirm_last(env, stream);
            self.linger(env, stream);
        }
    }
}

// Confirmations to the peer (`rdmap/confirming.rs`).

impl Engine {
    /// Whether messages of the peer are processed that a confirmation must still confirm.
    #[inline]
    pub fn owes_confirmation(&self) -> bool {
        let Rdmap {
            requester, responder, ..
        } = &self.rdmap;
        responder.confirming.is_owed()
            && matches!(self.progress, Progress::Open)
            && self.rdmap.startup.may_send()
            && requester.local_peer.is_none()
    }

    /// Lets the next [`transmit`](Self::transmit) confirm although no message is to be sent, if it
    /// is time; `polled_again`: the program has polled since, and nothing more has arrived;
    /// `is_drained`: nothing more has arrived. Returns whether it is time.
    pub fn confirm_alone(&mut self, polled_again: bool, is_drained: bool) -> bool {
        self.rdmap.responder.confirming.go_alone(polled_again, is_drained)
    }
}

// The fast path for a single message to or from a peer that shares memory with us: a program that
// sends one message and waits for the answer waits for exactly this code. Other messages take the
// usual path ([`transmit`](Engine::transmit), [`receive`](Engine::receive)).

impl Engine {
    /// Carries out the next request on the fast path, if it is the only one and simple. Returns
    /// whether it did, and nothing is left for the usual path.
    #[inline]
    pub fn fast_transmit(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        let is_plain = matches!(self.progress, Progress::Open)
            && self.state == QpState::Rts
            && self.rdmap.startup.may_send()
            && !self.rdmap.startup.owes_rtr()
            && !self.unreachable
            && !matches!(self.input, Input::Closed | Input::HalfClosed);
        let Rdmap {
            requester,
            responder,
            startup,
            ..
        } = &mut self.rdmap;
        if !is_plain || !responder.answers.is_empty() {
            return false;
        }
        let (Some(llp), Some(wqe)) = (&mut self.llp, requester.only_request()) else {
            return false;
        };
        match (wqe.opcode, llp) {
            (Opcode::Write | Opcode::Read, llp) => match requester.fast_access(wqe, env, llp) {
                Some(Ok(())) => true,
                Some(Err(Overflow)) => {
                    self.fail(QpFault::CqOverflow, env, stream);
                    false
                }
                None => false,
            },
            (Opcode::Send, Llp::Mpa(mpa)) => {
                let before = mpa.tx.taken();
                if requester.fast_send(wqe, env, &mut mpa.tx, stream).is_none() {
                    return false;
                }
                startup.note_sent();
                let taken = mpa.tx.taken() - before;
                env.counters.add(Counter::TxCalls, 1);
                env.sent(taken);
                probes::sent(env.qp.label, taken);
                mpa.tx.is_flushed()
            }
            _ => false,
        }
    }

    /// Receives on the fast path, if nothing or one short FPDU has arrived, and nothing is
    /// buffered. Returns whether it did: then all further bytes arrived later.
    #[inline]
    pub(super) fn fast_receive(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<bool, Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(false);
        };
        if !mpa.rx.is_plain_and_empty()
            || !self.parked.is_empty()
            || self.input != Input::Open
            || env.is_stopped()
        {
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
        env.received(bytes.len() as u64);
        probes::received(env.qp.label, bytes.len());
        let Some(ulpdu) = FpduReceiver::ulpdu_of(bytes) else {
            mpa.rx.accept(env.buffers, bytes);
            return Ok(false);
        };
        let admitted = admit(
            &mut self.rdmap,
            &mut self.parked,
            env,
            mpa.rx.position(),
            ulpdu.into(),
        );
        self.rdmap.startup.fpdu_received(env, admitted.is_ok());
        match &admitted {
            Ok(()) => {
                mpa.rx.pass(bytes.len());
                env.counters.add(Counter::RxFpdus, 1);
            }
            Err(_) => mpa.rx.accept(env.buffers, bytes),
        }
        env.recent.forget();
        let pushed = self.rdmap.responder.cq.flush(env);
        self.note_progress();
        admitted?;
        pushed?;
        if !self.parked.is_empty() {
            self.note_waiting(env);
        }
        Ok(true)
    }
}

// A peer that shares memory with us: its word there, and its accesses to our memory.

impl Engine {
    /// The peer shares memory with us: it counts there the bytes that it has processed, and we may
    /// access its memory.
    pub(super) fn use_local_peer(&mut self, local_peer: Option<LocalPeer>, env: &Env<'_>) {
        let Rdmap {
            requester, responder, ..
        } = &mut self.rdmap;
        let Some(mut local_peer) = local_peer.filter(|_| !env.qp.unreliable) else {
            return;
        };
        let receives = responder.rq.place();
        if let Some(place) = receives {
            local_peer.offer_receives(&place);
        }
        responder.peer_fills = local_peer.may_fill();
        local_peer.permit(env.qp.pd, responder.access);
        let is_awaited = requester.confirmation.use_word(local_peer.processed_word());
        local_peer.begin_awaiting(is_awaited);
        requester.local_peer = Some(local_peer);
    }

    /// Whether requests complete when messages of the peer confirm them.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.rdmap.requester.confirmation.is_unasked()
    }

    /// Lets the peer place payload in receives by itself.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn let_peer_fill(&mut self) {
        self.rdmap.responder.peer_fills = true;
    }

    /// Completes the requests that the local peer has processed since its word was last read.
    #[inline]
    pub(super) fn note_confirmed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        self.check_introduction();
        let taken = self.taken();
        if self.rdmap.requester.confirmation.read_word(taken) {
            self.complete_confirmed(env, stream);
        }
    }

    /// Checks whether the two devices have introduced themselves, and may access each other's
    /// memory.
    #[inline]
    fn check_introduction(&mut self) {
        if let Some(local_peer) = &mut self.rdmap.requester.local_peer {
            local_peer.check_introduction();
            self.rdmap.responder.peer_fills = local_peer.may_fill();
        }
    }

    /// The local peer has processed more: completes those requests.
    fn complete_confirmed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        env.moved.confirmed = true;
        self.peer_progressed(env, stream);
        self.close_if_drained(env, stream);
    }

    /// Counts the local peer's accesses to our memory.
    pub fn count_accesses(&mut self, counters: &Counters) {
        if let Some(local_peer) = &mut self.rdmap.requester.local_peer {
            let accessed = local_peer.take_accessed();
            counters.add(Counter::RxBytes, accessed.written);
            counters.add(Counter::TxBytes, accessed.read);
        }
    }

    /// The position up to which the stream has taken our bytes.
    #[inline]
    pub(super) fn taken(&self) -> u64 {
        self.llp.as_ref().map_or(0, Llp::taken)
    }

    /// Whether the local peer has processed all bytes that were sent, some of them since its word
    /// was last read.
    #[inline]
    fn reads_all_processed(&mut self) -> bool {
        let taken = self.taken();
        self.rdmap.requester.confirmation.reads_all_processed(taken)
    }

    /// The position up to which our requests are complete.
    #[inline]
    pub(super) fn complete_upto(&self) -> u64 {
        self.rdmap.requester.confirmation.upto(self.taken())
    }
}
