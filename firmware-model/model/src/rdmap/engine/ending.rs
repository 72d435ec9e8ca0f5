//! How a connection ends: errors of ours and theirs, the Terminate, FIN and RST, the flush.

use super::{Engine, Progress};
use crate::counters::Counter;
use crate::llp::{Llp, LlpError};
use crate::queues::Overflow;
use crate::rdmap::env::Env;
use crate::rdmap::explain::{self, Lost};
use crate::rdmap::inbound::Halves;
use crate::rdmap::params::{RxOutcome, TxOutcome};
use crate::rdmap::peer_progress::PeerProgress;
use crate::rdmap::terminate::{Outgoing, Received};
use crate::stream::Stream;
use crate::time::Nanos;
use std::time::Duration;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_wire::rdmap::{ReadRequest, Terminate, TerminateError};

/// How long the stream may take to take a Terminate.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time to wait for the peer's FIN after ours; data that arrive meanwhile are discarded.
const LINGER_TIMEOUT: Duration = Duration::from_secs(5);

impl Engine {
    /// Ends the queue pair from this side: on request, or because a completion queue overflowed.
    pub fn fail(&mut self, fault: QpFault, env: &mut Env<'_>, stream: &mut dyn Stream) {
        self.parting = false;
        match (&self.progress, fault) {
            (Progress::Open, QpFault::Requested) => {
                self.conclude(env, stream);
                match self.progress {
                    Progress::Open => self.linger(env, stream),
                    // What had arrived has ended the connection.
                    _ => self.fail(fault, env, stream),
                }
            }
            (Progress::Open, _) => {
                let message = Terminate::new(TerminateError::RdmapLocalCatastrophic);
                self.terminate(Outgoing::new(&message), fault, env, stream);
            }
            // A second fault changes nothing, but the engine waits for nothing more.
            (Progress::Terminating { .. }, _) => self.linger(env, stream),
            (Progress::Detached | Progress::Lingering { .. } | Progress::Ended, _) => {
                self.state = QpState::Err;
                self.flush(env);
            }
        }
    }

    /// In the error state: completes in error what was posted since.
    pub fn flush(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::Err || env.is_stopped() {
            return;
        }
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &mut self.halves;
        let sends = requester.flush(qp, env, taken);
        let receives = responder.flush(qp, env);
        // The effects name the queue that overflowed; nothing is left to end here.
        let (Ok(()) | Err(Overflow), Ok(()) | Err(Overflow)) = (sends, receives);
    }

    /// When [`tick`](Self::tick) is due.
    pub fn deadline(&self) -> Option<Nanos> {
        let ending = match self.progress {
            Progress::Terminating { until, .. } | Progress::Lingering { until } => Some(until),
            _ => None,
        };
        let watch = self.watch.deadline();
        let deadlines = [ending, self.rnr_deadline, self.grace_deadline, watch];
        deadlines.into_iter().flatten().min()
    }

    /// Does what is due.
    pub fn tick(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let now = env.now.get();
        let due = |deadline: Option<Nanos>| deadline.is_some_and(|at| at <= now);
        if due(self.grace_deadline) {
            self.grace_deadline = None;
            self.end_grace(env, stream);
        }
        if due(self.watch.deadline()) {
            self.look_for_peer(env, stream);
        }
        if due(self.rnr_deadline) {
            self.rnr_deadline = None;
            let ulpdu = self.held.front().unwrap_or_default();
            let message = terminate_for(TerminateError::DdpNoBuffer, ulpdu, ulpdu.len(), None);
            self.terminate(message, QpFault::TerminateSent, env, stream);
        }
        match self.progress {
            Progress::Terminating { until, .. } if until <= env.now.get() => {
                stream.reset();
                self.end(env);
            }
            Progress::Lingering { until } if until <= env.now.get() => {
                stream.reset();
                self.end(env);
            }
            _ => {}
        }
    }

    /// The lower layer failed, in either direction.
    pub(super) fn llp_failed(&mut self, error: LlpError, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match error {
            LlpError::Lost(errno) => self.lose(Lost::Stream(errno), env, stream),
            LlpError::Crc | LlpError::Marker => {
                let counter = match error {
                    LlpError::Crc => Counter::RxCrcErrors,
                    _ => Counter::RxMarkerErrors,
                };
                env.counters.add(counter, 1);
                if let Some(error) = error.terminate() {
                    let message = Outgoing::new(&Terminate::new(error));
                    self.terminate(message, QpFault::TerminateSent, env, stream);
                }
            }
            LlpError::Fault => {
                // The stream is in the middle of an FPDU, so nothing can follow.
                if let Some(Llp::Mpa(mpa)) = &self.llp {
                    let taken = mpa.tx.taken();
                    self.halves.requester.fail_untaken(taken, WcStatus::LocProtErr);
                    if let Some(address) = mpa.tx.first_missing() {
                        env.memory.report_at(address);
                    }
                }
                env.effects.qp_error(self.halves.qp.qid, QpFault::LocalWork, 0);
                stream.reset();
                self.end(env);
            }
        }
    }

    /// Says in the log why this end ends the connection.
    fn explain(&self, message: &Outgoing, fault: QpFault, env: &Env<'_>, stream: &dyn Stream) {
        let Halves { qp, requester, .. } = &self.halves;
        match (fault, Terminate::parse(message.payload())) {
            (QpFault::LocalWork, _) => explain::failed_here(qp, requester, env, stream),
            (_, Ok(terminate)) => explain::refused_here(&terminate, qp, env, stream),
            (_, Err(_)) => {}
        }
    }

    /// The peer's FIN.
    pub(super) fn peer_finished(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        let between = match &self.llp {
            Some(Llp::Mpa(mpa)) => mpa.rx.at_boundary() && !self.halves.responder.is_within_message(),
            _ => true,
        };
        if self.begin_parting() {
            stream.finish();
            self.end(env);
            return RxOutcome::Ended;
        }
        // The peer confirms no more, and answers no more Reads of ours.
        let awaits = self.complete_at_end(env, stream);
        if !matches!(self.progress, Progress::Open) {
            return RxOutcome::More;
        }
        let may_close = self.peer_may_close && self.state != QpState::Sqd;
        if between && may_close && awaits {
            self.peer_closed = true;
            self.begin_losing(env);
            return RxOutcome::Finished;
        }
        if !between || awaits || self.halves.responder.answers.is_data_wanted() {
            stream.finish();
            self.lose(Lost::Closed, env, stream);
            return RxOutcome::Ended;
        }
        env.effects
            .event(Event::new(EventKind::PeerClosed, self.halves.qp.qid));
        if may_close {
            self.peer_closed = true;
            self.grace_deadline = Some(env.now.get() + self.fin_grace);
            return RxOutcome::Finished;
        }
        // Nothing is outstanding: an orderly end, and no error (row VRB-Q-07).
        stream.finish();
        self.end(env);
        RxOutcome::Ended
    }

    /// The peer has ended, and its end lies behind a message that waits for a receive. A program
    /// that waits for its requests may never post that receive: a request that only the peer could
    /// complete fails after the grace period. The message is delivered if there is a receive in
    /// time.
    pub fn note_end_behind(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.held.is_empty() || !matches!(self.progress, Progress::Open) {
            return;
        }
        if self.input_ended {
            // All is read: no confirmation comes any more.
            self.complete_at_end(env, stream);
        }
        if self.grace_deadline.is_none() && self.is_awaiting_peer() {
            self.grace_deadline = Some(env.now.get() + self.fin_grace);
        }
    }

    /// Handles an error of this side, or one that it found in what arrived: the peer gets one
    /// Terminate, and nothing is sent behind it (row RDM-T-04). Before it, what came before the
    /// error is confirmed: a Terminate may name no request.
    pub(super) fn terminate(
        &mut self,
        message: Outgoing,
        fault: QpFault,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) {
        if !matches!(self.progress, Progress::Open) {
            return;
        }
        let may_send = self.may_send();
        let control = message.control();
        let at_fault = self.halves.responder.is_at_fault();
        if fault != QpFault::TerminateSent || at_fault || !self.begin_parting() {
            env.effects.qp_error(self.halves.qp.qid, fault, control);
            self.explain(&message, fault, env, stream);
        }
        if may_send {
            self.frame_confirmation(env);
        }
        match &mut self.llp {
            Some(Llp::Mpa(mpa)) if may_send => {
                mpa.rx.discard();
                self.direct = None;
                self.terminate_sent = control;
                if !self.parting {
                    self.state = QpState::Sqe;
                }
                self.stop_waiting();
                let until = env.now.get() + TERMINATE_TIMEOUT;
                self.progress = Progress::Terminating {
                    message,
                    framed: false,
                    until,
                };
                self.push_terminate(env, stream);
            }
            Some(Llp::Loopback(_)) => {
                // This side is the peer whose request is at fault. The requests before that one
                // succeeded.
                if fault == QpFault::TerminateSent
                    && !self.parting
                    && let Ok(terminate) = Terminate::parse(message.payload())
                {
                    let known = self.known();
                    let Halves { qp, requester, .. } = &mut self.halves;
                    // The effects name the overflowed queue; the queue pair ends in any case.
                    let (Ok(()) | Err(Overflow)) = requester.complete(qp, env, known);
                    self.apply_terminate(&Received::new(&terminate));
                }
                self.end(env);
            }
            _ => {
                // A responder that has received nothing valid may not send even a Terminate (row
                // EMPA-23).
                stream.reset();
                self.end(env);
            }
        }
    }

    pub(super) fn push_terminate(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        loop {
            let (Progress::Terminating { message, framed, .. }, Some(llp)) =
                (&mut self.progress, &mut self.llp)
            else {
                return TxOutcome::Idle;
            };
            if !*framed && llp.has_room() {
                llp.open(env.buffers, Terminate::header(), message.payload().len());
                llp.put(message.payload().len())
                    .copy_from_slice(message.payload());
                llp.seal();
                *framed = true;
                env.counters.add(Counter::TxTerminates, 1);
                env.counters.add(Counter::TxFpdus, 1);
            }
            let framed = *framed;
            let before = llp.taken();
            let mut calls = 0;
            let flushed = llp.flush(env.memory, stream, &mut calls);
            env.counters.add(Counter::TxCalls, calls);
            env.counters.add(Counter::TxBytes, llp.taken() - before);
            match flushed {
                Ok(true) if framed => {
                    self.linger(env, stream);
                    return TxOutcome::Idle;
                }
                Ok(true) => {}
                Ok(false) => return TxOutcome::Blocked,
                Err(_) => {
                    stream.reset();
                    self.end(env);
                    return TxOutcome::Idle;
                }
            }
        }
    }

    /// The peer's Terminate (row RDM-T-06): all that is outstanding fails.
    pub(super) fn terminated(&mut self, received: Received, env: &mut Env<'_>, stream: &mut dyn Stream) {
        self.terminate_received = received.control;
        env.counters.add(Counter::RxTerminates, 1);
        if self.begin_parting() {
            return self.linger(env, stream);
        }
        env.effects
            .qp_error(self.halves.qp.qid, QpFault::TerminateReceived, received.control);
        // Requests that the peer has processed succeed; the request at fault is one of the others.
        let known = self.known();
        let Halves { qp, requester, .. } = &mut self.halves;
        let completed = requester.complete(qp, env, known);
        explain::refused_there(&received, &self.halves.qp, &self.halves.requester, env, stream);
        self.apply_terminate(&received);
        let Halves { qp, requester, .. } = &mut self.halves;
        let flushed = requester.flush(qp, env, known);
        // The effects name the overflowed queue; the queue pair ends in any case.
        let (Ok(()) | Err(Overflow), Ok(()) | Err(Overflow)) = (completed, flushed);
        self.linger(env, stream);
    }

    /// Makes the offending request of a received Terminate fail. Where that request is already
    /// complete, a native peer's program gets the reason from the next request; on an rdma_cm
    /// connection the rest is flushed.
    pub(super) fn apply_terminate(&mut self, received: &Received) {
        let stalls = self.halves.responder.stalls;
        // The peer stopped at the oldest request that is not complete.
        let requester = &self.halves.requester;
        let tracked = requester.delivery.is_on()
            || requester.confirms
            || self.peer_progress.as_ref().is_some_and(PeerProgress::is_tracked)
            || matches!(self.llp, Some(Llp::Loopback(_)));
        let status = match received.status {
            Some(_) if received.no_buffer && stalls => WcStatus::RnrRetryExcErr,
            Some(status) => status,
            None => WcStatus::RetryExcErr,
        };
        let requester = &mut self.halves.requester;
        requester.vendor_error = received.control;
        if !received
            .offending
            .is_some_and(|offending| requester.fail_offending(offending, status))
        {
            requester.flush_status = Some(if self.peer_may_close || stalls || tracked {
                status
            } else {
                WcStatus::WrFlushErr
            });
        }
    }

    /// The stream is lost (row DDP-T-06).
    pub(super) fn lose(&mut self, how: Lost, env: &mut Env<'_>, stream: &dyn Stream) {
        if self.concluding {
            self.input_ended = true;
            return;
        }
        env.counters.add(Counter::StreamsLost, 1);
        if self.begin_parting() {
            return self.end(env);
        }
        explain::lost(how, &self.halves.qp, &self.halves.requester, env, stream);
        let lost = u32::from(TerminateError::MpaConnectionLost as u16) << 16;
        env.effects
            .qp_error(self.halves.qp.qid, QpFault::StreamLost, lost);
        if self.peer_may_close || self.halves.requester.delivered {
            self.halves.requester.flush_status = Some(WcStatus::RetryExcErr);
        }
        self.end(env);
    }

    /// Our FIN goes out behind what the stream has taken, and all work is flushed.
    pub(super) fn linger(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if matches!(self.llp, Some(Llp::Loopback(_))) {
            return self.end(env);
        }
        stream.finish();
        self.close(env);
        self.progress = Progress::Lingering {
            until: env.now.get() + LINGER_TIMEOUT,
        };
    }

    /// There is no stream any more.
    pub(super) fn end(&mut self, env: &mut Env<'_>) {
        self.close(env);
        if self.parting {
            self.finish_parting();
        } else {
            self.progress = Progress::Ended;
        }
        env.effects
            .event(Event::new(EventKind::Closed, self.halves.qp.qid));
    }

    /// Stops all waiting: no message waits for a receive any more, and no deadline remains.
    fn stop_waiting(&mut self) {
        self.held.clear();
        self.waiting = false;
        (self.rnr_deadline, self.grace_deadline) = (None, None);
        self.watch.end();
    }

    /// Enters the error state, unless the queue pair outlives its stream: nothing more is sent or
    /// taken in.
    pub(super) fn close(&mut self, env: &mut Env<'_>) {
        self.stop_waiting();
        self.direct = None;
        // What is not confirmed by now fails.
        if !self.parting {
            let known = self.known_at_end();
            self.halves.requester.flights.settle(known);
        }
        self.peer_progress = None;
        self.count_accesses(env.counters);
        self.halves.requester.part();
        if self.parting {
            self.drop_messages(env);
        }
        match &mut self.llp {
            Some(Llp::Mpa(mpa)) => {
                mpa.tx.drop_unsent();
                mpa.rx.discard();
            }
            Some(Llp::Loopback(loopback)) => loopback.discard(),
            None => {}
        }
        if self.state != QpState::Err && !self.parting {
            self.state = QpState::Err;
            self.halves.responder.note_last_wqe(&self.halves.qp, env);
        }
        self.flush(env);
    }
}

/// What to report about a ULPDU (RFC 5040 figure 10).
pub(super) fn terminate_for(
    error: TerminateError,
    head: &[u8],
    ulpdu_len: usize,
    read_request: Option<ReadRequest>,
) -> Outgoing {
    if matches!(
        error,
        TerminateError::RdmapLocalCatastrophic | TerminateError::MpaLocalCatastrophic
    ) {
        return Outgoing::new(&Terminate::new(error));
    }
    Outgoing::new(&Terminate {
        segment_length: u16::try_from(ulpdu_len).ok(),
        ..Terminate::for_segment(error, head, read_request)
    })
}
