//! The end of a connection: errors of this side and of the peer, the Terminate, FIN and RST, the
//! flush.

use super::{Engine, Input, Progress, RnrWait};
use crate::counters::Counter;
use crate::llp::loopback::Loopback;
use crate::llp::{Llp, LlpError};
use crate::queues::Overflow;
use crate::rdmap::attachment::WithoutReceive;
use crate::rdmap::explain::Lost;
use crate::rdmap::framing::Framed;
use crate::rdmap::inbound::{Rdmap, Ulpdu};
use crate::rdmap::startup::Startup;
use crate::rdmap::terminate::{Outgoing, Received};
use crate::rdmap::watch::Check;
use crate::rdmap::{PeerProgress, explain, framing};
use crate::stream::no_stream::NoStream;
use crate::stream::{Probing, Stream};
use crate::time::Nanos;
use crate::transport::{Env, RxOutcome, TxOutcome};
use crate::tuning::{DROP_BUDGET, LAST_RUNS};
use std::time::Duration;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_wire::rdmap::{ReadRequest, Terminate, TerminateError};

/// The time within which the stream must take a Terminate.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time within which a stream whose peer has finished must take more bytes.
const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(5);
/// The time to wait for the peer's FIN after ours; data that arrive during this time are discarded.
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
                    // A message that had arrived has ended the connection.
                    _ => self.fail(fault, env, stream),
                }
            }
            (Progress::Open, _) => {
                let message = Terminate::new(TerminateError::RdmapLocalCatastrophic);
                self.terminate(Outgoing::new(&message), fault, env, stream);
            }
            // A second fault is not reported: our FIN follows at once.
            (Progress::Terminating { .. }, _) => self.linger(env, stream),
            (Progress::Detached | Progress::Lingering { .. } | Progress::Ended, _) => {
                self.enter_error_state(env);
                self.flush(env);
            }
        }
    }

    fn enter_error_state(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::Err {
            self.state = QpState::Err;
            self.rdmap.responder.note_last_wqe(env);
        }
    }

    /// In the error state: completes in error the requests posted since.
    pub fn flush(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::Err || env.is_stopped() {
            return;
        }
        let taken = self.taken();
        let Rdmap {
            requester, responder, ..
        } = &mut self.rdmap;
        let sends = requester.flush(env, taken);
        let receives = responder.flush(env);
        // The effects name the queue that overflowed; nothing is left to end here.
        let (Ok(()) | Err(Overflow), Ok(()) | Err(Overflow)) = (sends, receives);
    }

    /// The time at which [`tick`](Self::tick) is due.
    #[inline]
    pub fn deadline(&self) -> Option<Nanos> {
        let ending = match self.progress {
            Progress::Terminating { until, .. } | Progress::Lingering { until } => Some(until),
            _ => None,
        };
        let watch = self.watch.deadline();
        Nanos::earliest([ending, self.rnr_wait.deadline(), self.grace_deadline, watch])
    }

    /// Carries out the actions whose time has come.
    pub fn tick(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let now = env.now.get();
        let due = |deadline: Option<Nanos>| deadline.is_some_and(|at| at <= now);
        if due(self.grace_deadline) {
            self.grace_deadline = None;
            self.end_grace(env, stream);
        }
        if due(self.watch.deadline()) {
            self.check_peer(env, stream);
        }
        if due(self.rnr_wait.deadline()) {
            // The message still waits; `terminate` ends that.
            self.rnr_wait = RnrWait::Endless;
            let ulpdu = self.parked.front().unwrap_or(Ulpdu::from(&[][..]));
            let message = terminate_for(TerminateError::DdpNoBuffer, ulpdu.bytes, ulpdu.len(), None);
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
                    self.rdmap.requester.fail_untaken(taken, WcStatus::LocProtErr);
                    if let Some(address) = mpa.tx.first_missing() {
                        env.memory.report_at(address);
                    }
                }
                env.effects.qp_error(env.qp.qid, QpFault::LocalWork, 0);
                stream.reset();
                self.end(env);
            }
        }
    }

    /// Logs the reason why this end ends the connection.
    fn explain(&self, message: &Outgoing, fault: QpFault, env: &Env<'_>, stream: &dyn Stream) {
        let Rdmap {
            requester, responder, ..
        } = &self.rdmap;
        match (fault, Terminate::parse(message.payload())) {
            (QpFault::LocalWork, _) => explain::failed_here(requester, env, stream),
            (_, Ok(terminate)) => explain::refused_here(&terminate, responder.access, env, stream),
            (_, Err(_)) => {}
        }
    }

    /// Handles the peer's FIN.
    pub(super) fn peer_finished(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        let between = match &self.llp {
            Some(Llp::Loopback(_)) | None => true,
            Some(llp) => llp.is_between_ulpdus() && !self.rdmap.responder.is_within_message(),
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
            self.input = Input::Closed;
            self.begin_losing(env);
            return RxOutcome::Finished;
        }
        if between && !may_close && self.sends_after_fin(env, stream) {
            env.effects.event(Event::new(EventKind::PeerClosed, env.qp.qid));
            return RxOutcome::Finished;
        }
        if !matches!(self.progress, Progress::Open) {
            return RxOutcome::More;
        }
        if !between || self.is_awaiting_peer() || self.rdmap.responder.answers.is_data_wanted() {
            stream.finish();
            self.lose(Lost::Closed, env, stream);
            return RxOutcome::Ended;
        }
        env.effects.event(Event::new(EventKind::PeerClosed, env.qp.qid));
        if may_close {
            self.input = Input::Closed;
            self.grace_deadline = Some(env.now.get() + self.fin_grace);
            return RxOutcome::Finished;
        }
        // Nothing is outstanding: an orderly end, and no error (row VRB-Q-07).
        stream.finish();
        self.end(env);
        RxOutcome::Ended
    }

    /// The peer has ended, but a message that waits for a receive comes before the end. A program
    /// that waits for its requests may never post that receive: a request that only the peer could
    /// complete fails after the grace period. The message is delivered if a receive is posted in
    /// time.
    pub fn note_end_after_parked(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.parked.is_empty() || !matches!(self.progress, Progress::Open) {
            return;
        }
        if self.input != Input::Open {
            // All bytes are read: no further confirmation can arrive.
            self.complete_at_end(env, stream);
        }
        if self.grace_deadline.is_none() && self.is_awaiting_peer() {
            self.grace_deadline = Some(env.now.get() + self.fin_grace);
        }
    }

    /// Handles an error of this side, or one that it found in the received bytes: the peer gets one
    /// Terminate, and nothing is sent after it (row RDM-T-04). Before the Terminate, this side
    /// confirms all messages before the error, because a Terminate may name no request.
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
        let may_send = self.rdmap.startup.may_send();
        let control = message.control();
        let at_fault = self.rdmap.responder.is_at_fault();
        if fault != QpFault::TerminateSent || at_fault || !self.begin_parting() {
            env.effects.qp_error(env.qp.qid, fault, control);
            self.explain(&message, fault, env, stream);
        }
        if may_send {
            self.frame_confirmation(env);
        }
        match &mut self.llp {
            Some(llp @ (Llp::Mpa(_) | Llp::Messages(_))) if may_send => {
                llp.discard_input();
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
                    let known = self.complete_upto();
                    let requester = &mut self.rdmap.requester;
                    // The effects name the overflowed queue; the queue pair ends in any case.
                    let (Ok(()) | Err(Overflow)) = requester.complete(env, known);
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
            env.sent(llp.taken() - before);
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
        // The peer failed by an error of its own. A peer for InfiniBand would only fall silent, and
        // this queue pair would go on.
        let only_ends = env.qp.infiniband && self.peer_may_close && self.state != QpState::Sqd;
        if only_ends && received.is_of_peer_itself() {
            explain::refused_there(&received, &self.rdmap.requester, env, stream);
            if let Some(llp) = &mut self.llp {
                llp.discard_input();
            }
            // Nothing follows a Terminate (RFC 5040 §4.8): it ends the peer's bytes as a FIN does.
            self.input = Input::Ended;
            return;
        }
        env.effects
            .qp_error(env.qp.qid, QpFault::TerminateReceived, received.control);
        // Requests that the peer has processed succeed; the request at fault is one of the others.
        let known = self.complete_upto();
        let requester = &mut self.rdmap.requester;
        let completed = requester.complete(env, known);
        explain::refused_there(&received, &self.rdmap.requester, env, stream);
        self.apply_terminate(&received);
        let requester = &mut self.rdmap.requester;
        let flushed = requester.flush(env, known);
        // The effects name the overflowed queue; the queue pair ends in any case.
        let (Ok(()) | Err(Overflow), Ok(()) | Err(Overflow)) = (completed, flushed);
        self.linger(env, stream);
    }

    /// Makes the offending request of a received Terminate fail. Where that request is already
    /// complete, a native peer's program gets the reason from the next request; on an rdma_cm
    /// connection the rest is flushed.
    pub(super) fn apply_terminate(&mut self, received: &Received) {
        let stalls = self.rdmap.responder.without_receive == WithoutReceive::Waits;
        // The peer stopped at the oldest request that is not complete.
        let requester = &self.rdmap.requester;
        let tracked = requester.confirmation.is_by_peer() || matches!(self.llp, Some(Llp::Loopback(_)));
        let status = match received.status {
            Some(_) if received.no_buffer && stalls => WcStatus::RnrRetryExcErr,
            Some(status) => status,
            None => WcStatus::RetryExcErr,
        };
        let requester = &mut self.rdmap.requester;
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
            if self.input == Input::Open {
                self.input = Input::Ended;
            }
            return;
        }
        env.counters.add(Counter::StreamsLost, 1);
        if self.begin_parting() {
            return self.end(env);
        }
        explain::lost(how, &self.rdmap.requester, env, stream);
        let lost = u32::from(TerminateError::MpaConnectionLost as u16) << 16;
        env.effects.qp_error(env.qp.qid, QpFault::StreamLost, lost);
        if self.peer_may_close || self.rdmap.requester.confirmation.is_delivery() {
            self.rdmap.requester.flush_status = Some(WcStatus::RetryExcErr);
        }
        self.end(env);
    }

    /// Sends our FIN after the bytes that the stream has taken, and flushes all work.
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
        env.effects.event(Event::new(EventKind::Closed, env.qp.qid));
    }

    /// Stops all waiting: no message waits for a receive any more, and no deadline remains.
    fn stop_waiting(&mut self) {
        self.parked.clear();
        (self.rnr_wait, self.grace_deadline) = (RnrWait::None, None);
        self.watch.end();
    }

    /// Enters the error state, unless the queue pair outlives its stream: nothing more is sent or
    /// taken in.
    pub(super) fn close(&mut self, env: &mut Env<'_>) {
        self.stop_waiting();
        self.direct = None;
        self.rdmap.requester.sq.reopen();
        self.rdmap.startup.take_rtr();
        // Requests that are not confirmed by now fail.
        if !self.parting {
            let known = self.known_at_end();
            self.rdmap.requester.flights.settle(known);
        }
        self.count_accesses(env.counters);
        self.rdmap.requester.part();
        if self.parting {
            self.drop_messages(env);
        }
        if let Some(llp) = &mut self.llp {
            llp.discard();
        }
        if !self.parting {
            self.enter_error_state(env);
        }
        self.flush(env);
    }
}

/// The error to report about a ULPDU (RFC 5040 figure 10).
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

// The last actions of an end before it ends the connection: it takes in the bytes that have
// arrived, and confirms them, so that the peer's requests complete (design: completions). Our own
// requests complete only if the peer has confirmed them.

/// The time for which requests wait after the peer's FIN before they fail, where the peer may
/// close: at least the time for which adapters retransmit.
const LOSS_GRACE: Duration = Duration::from_millis(500);

impl Engine {
    /// Called before this side ends the connection: takes in the bytes that have arrived, and
    /// confirms them. Never waits for the peer. An end that the peer has sent already changes
    /// nothing.
    pub fn conclude(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        self.concluding = true;
        self.take_in(env, stream);
        if matches!(self.progress, Progress::Open)
            && self.rdmap.startup.may_send()
            && !self.rdmap.requester.is_within_message()
        {
            // The answers to Reads.
            self.pump(env, stream);
        }
        self.confirm_last(env, stream);
        self.concluding = false;
        self.end_if_failed(env, stream);
    }

    /// Takes in the bytes that have arrived.
    pub(super) fn take_in(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        for _ in 0..LAST_RUNS {
            let more = matches!(self.progress, Progress::Open)
                && !env.is_stopped()
                && self.receive(env, stream) == RxOutcome::More;
            if !more {
                return;
            }
        }
    }

    /// Takes in the bytes that have arrived before this side ends the connection. An end of the
    /// peer among them changes nothing.
    fn take_in_last(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let concluding = std::mem::replace(&mut self.concluding, true);
        self.take_in(env, stream);
        self.concluding = concluding;
    }

    /// The stream does not take our bytes. Bytes that have arrived count: they may contain the
    /// answer to a Read, or the peer's FIN, which explains a lost stream but no fault of our
    /// memory.
    pub(super) fn send_failed(&mut self, error: LlpError, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let is_ours = matches!(error, LlpError::Fault);
        match is_ours {
            true => self.take_in_last(env, stream),
            false => self.take_in(env, stream),
        }
        match (&self.progress, self.input) {
            // The peer had closed both halves.
            (Progress::Open, Input::HalfClosed) if !is_ours => self.end_half_closed(env, stream),
            (Progress::Open, Input::Closed) if !is_ours => {}
            (Progress::Open, _) => self.llp_failed(error, env, stream),
            _ => {}
        }
    }

    /// Confirms all messages that we have processed, as the last message before our FIN.
    pub(super) fn confirm_last(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if !matches!(self.progress, Progress::Open)
            || !self.rdmap.startup.may_send()
            || !self.frame_confirmation(env)
        {
            return;
        }
        if let Some(llp) = &mut self.llp {
            let (before, mut calls) = (llp.taken(), 0);
            // A stream that takes no more, or is lost, ends without it.
            let (Ok(_) | Err(_)) = llp.flush(env.memory, stream, &mut calls);
            env.counters.add(Counter::TxCalls, calls);
            env.sent(llp.taken() - before);
        }
    }

    /// Frames the confirmation that is owed to the peer, before this side ends. Returns whether one
    /// was owed.
    fn frame_confirmation(&mut self, env: &Env<'_>) -> bool {
        // The last message before a Terminate or FIN may come between segments, as these do.
        let is_owed = self.owes_confirmation();
        let Some(llp) = self.llp.as_mut().filter(|llp| is_owed && llp.has_room()) else {
            return false;
        };
        let framed = framing::frame_confirmation(&mut self.rdmap.responder, llp, env);
        env.counters.add(Counter::TxFpdus, u64::from(framed));
        framed
    }

    /// The position up to which requests succeed if the connection ends now.
    pub(super) fn known_at_end(&self) -> u64 {
        self.rdmap.requester.confirmation.at_end(self.taken())
    }

    /// The peer has finished, and we have read all its bytes: completes the requests that
    /// succeeded. Returns whether requests are left, which can no longer complete.
    pub(super) fn complete_at_end(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        self.rdmap.requester.confirmation.peer_finished();
        self.peer_progressed(env, stream);
        self.is_awaiting_peer()
    }

    /// Whether a request waits for the peer.
    pub(super) fn is_awaiting_peer(&self) -> bool {
        self.rdmap.requester.is_outstanding(self.known_at_end())
    }

    /// Sets the time at which requests fail, because the peer has finished.
    pub(super) fn begin_losing(&mut self, env: &Env<'_>) {
        let due = env.now.get() + self.fin_grace.min(LOSS_GRACE);
        self.grace_deadline = Some(self.grace_deadline.map_or(due, |set| set.min(due)));
    }

    /// The grace period after the peer's FIN is over.
    pub(super) fn end_grace(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.input == Input::HalfClosed {
            let outcome = self.pump(env, stream);
            self.end_if_all_sent(outcome, env, stream);
            match &self.progress {
                Progress::Open if self.taken() > self.taken_at_deadline => self.await_room(env),
                Progress::Open => self.end_half_closed(env, stream),
                _ => {}
            }
        } else if self.is_awaiting_peer() {
            stream.finish();
            let how = match self.rdmap.requester.is_in_flight() {
                true => Lost::Closed,
                false => Lost::ClosedBefore,
            };
            self.lose(how, env, stream);
        } else if self.parked.is_empty() {
            // The peer will not return. The next send fails because of that (design: native
            // connections).
            self.rdmap.requester.flush_status = Some(WcStatus::RetryExcErr);
            self.end(env);
        }
    }

    /// The peer has processed more of this end's messages: completes the requests that succeeded.
    pub fn peer_progressed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let known = self.complete_upto();
        let requester = &mut self.rdmap.requester;
        if let Err(Overflow) = requester.complete(env, known) {
            self.fail(QpFault::CqOverflow, env, stream);
        } else if self.has_failed_send() {
            self.flush_failed_sends(env, stream);
        } else {
            self.end_if_failed(env, stream);
        }
    }

    /// A request failed locally. Those before it complete first, if the peer confirms them.
    pub(super) fn fail_locally(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        self.state = QpState::Sqe;
        self.rdmap.requester.has_failed = true;
        self.rdmap.requester.confirmation.confirm_all();
        self.end_if_failed(env, stream);
    }

    /// Ends the connection if a request failed locally, and no request before it waits. Bytes that
    /// have arrived are taken in first, unless that is already in progress.
    #[inline]
    pub(super) fn end_if_failed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.rdmap.requester.has_failed {
            self.end_failed(env, stream);
        }
    }

    #[cold]
    fn end_failed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let requester = &self.rdmap.requester;
        // No other message, not even a Read that confirms, may be sent between the segments of a
        // message.
        let waits = requester.confirmation.is_delivery() && !requester.torn && !requester.is_failed_next();
        if env.qp.unreliable || waits || self.concluding {
            return;
        }
        self.take_in_last(env, stream);
        let message = Terminate::new(TerminateError::RdmapLocalCatastrophic);
        self.terminate(Outgoing::new(&message), QpFault::LocalWork, env, stream);
    }

    /// Tracks a peer of this device: requests complete when it has processed them.
    pub fn track_peer(&mut self, peer_progress: PeerProgress) {
        self.rdmap.requester.confirmation.track(peer_progress);
    }

    /// Whether this end has processed more of the peer's messages since the last call.
    #[inline]
    pub fn has_progressed(&mut self) -> bool {
        self.rdmap.requester.confirmation.must_notify()
    }
}

// A peer that has closed its half of the stream only (RFC 5041 §6.2.1): messages that were posted
// are still sent. Neither answers nor confirmations can arrive: when the stream has taken what can
// be sent, requests that wait for the peer fail, and the queue pair ends as after any FIN. Linux
// and adapters close both halves, so that the stream reports an error at the next byte.

impl Engine {
    /// Sends what is left after the peer's FIN. Returns whether the stream has not taken all of it,
    /// so that this side stays half closed.
    fn sends_after_fin(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        let is_flushed = self.llp.as_ref().is_none_or(Llp::is_flushed);
        let has_work = !is_flushed
            || self.rdmap.requester.sq.has_posted()
            || self.rdmap.responder.answers.is_data_wanted();
        if !has_work || !self.rdmap.startup.may_send() {
            return false;
        }
        self.input = Input::HalfClosed;
        // A program that posts for each completion would otherwise not see the end.
        self.rdmap.requester.sq.close();
        let outcome = self.pump(env, stream);
        let is_left = matches!(outcome, TxOutcome::Blocked | TxOutcome::More);
        let stays = is_left && matches!(self.progress, Progress::Open);
        if stays {
            self.await_room(env);
        }
        stays
    }

    /// Sets the time by which the half-closed stream must take more.
    fn await_room(&mut self, env: &Env<'_>) {
        self.taken_at_deadline = self.taken();
        self.grace_deadline = Some(env.now.get() + HALF_CLOSED_TIMEOUT);
    }

    /// Ends the half-closed connection if the last call of `pump` left nothing to be sent.
    pub(super) fn end_if_all_sent(&mut self, outcome: TxOutcome, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let is_open = self.input == Input::HalfClosed && matches!(self.progress, Progress::Open);
        if is_open && outcome == TxOutcome::Idle {
            self.end_half_closed(env, stream);
        }
    }

    /// Sends our FIN after that of the peer, and ends.
    #[cold]
    fn end_half_closed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        stream.finish();
        let is_flushed = self.llp.as_ref().is_none_or(Llp::is_flushed);
        let is_unsent = !is_flushed || self.rdmap.responder.answers.is_data_wanted();
        match is_unsent || self.is_awaiting_peer() {
            true => self.lose(Lost::Closed, env, stream),
            false => self.end(env),
        }
    }
}

// A queue pair of kind UC and its stream.
//
// InfiniBand's UC has no connection that could fail: messages get lost, and the queue pair does not
// change. So an end of the stream that this side did not cause leaves the queue pair in its state,
// with its receives, and another stream may be attached. Without a stream messages are dropped:
// their requests complete as if they were sent. A request that fails here puts the send queue into
// the state SQE (InfiniBand Architecture Specification vol. 1 §10.3.1.8).

impl Engine {
    /// Whether the stream of a queue pair of kind UC has ended, or was never there.
    pub(crate) fn is_parted(&self) -> bool {
        self.is_unreliable() && matches!(self.progress, Progress::Detached)
    }

    /// Ends the stream for a reason of the peer or the network. Returns whether the queue pair
    /// outlives the stream.
    pub(super) fn begin_parting(&mut self) -> bool {
        self.parting = self.is_unreliable() && self.state != QpState::Err;
        self.parting
    }

    /// Gives up the stream.
    pub(super) fn part_from(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if matches!(self.progress, Progress::Open) && self.begin_parting() {
            stream.reset();
            self.end(env);
        }
    }

    /// Drops the messages that the stream has only in part, in both directions.
    pub(super) fn drop_messages(&mut self, env: &mut Env<'_>) {
        let taken = self.llp.as_ref().map_or(u64::MAX, Llp::taken);
        let Rdmap {
            requester, responder, ..
        } = &mut self.rdmap;
        responder.part(env);
        let dropped = requester.drop_flights(taken);
        env.counters.add(Counter::TxMessageDrops, dropped);
        // The effects name a queue that overflowed, and the event ends the queue pair.
        let (Ok(()) | Err(Overflow)) = requester.complete(env, taken);
    }

    /// The stream is gone: another one may be attached.
    pub(super) fn finish_parting(&mut self) {
        self.parting = false;
        self.progress = Progress::Detached;
        self.llp = None;
        self.input = Input::Open;
        self.rdmap.answered_last = false;
        (self.rdmap.startup, self.rdmap.response_msn) = (Startup::default(), 1);
    }

    /// Whether requests are carried out although there is no stream.
    pub(super) fn sends_without_stream(&self) -> bool {
        self.is_unreliable() && matches!(self.state, QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Carries out requests without a stream: messages are dropped.
    pub(super) fn send_nowhere(&mut self, env: &mut Env<'_>) -> TxOutcome {
        let mut nowhere = Loopback::default();
        let mut budget = DROP_BUDGET;
        let outcome = loop {
            let sends = self.state != QpState::Sqe;
            let before = env.counters.value(Counter::TxMessages);
            let mut llp = Llp::Loopback(Box::new(nowhere));
            let framed = self.rdmap.frame(&mut llp, sends, env, &mut budget);
            nowhere = match llp {
                Llp::Loopback(loopback) => *loopback,
                Llp::Mpa(_) | Llp::Messages(_) => Loopback::default(),
            };
            nowhere.queue.discard();
            let dropped = env.counters.value(Counter::TxMessages).wrapping_sub(before);
            env.counters.add(Counter::TxMessageDrops, dropped);
            let requester = &mut self.rdmap.requester;
            if let Err(Overflow) = requester.complete(env, u64::MAX) {
                self.fail(QpFault::CqOverflow, env, &mut NoStream);
            } else if self.has_failed_send() {
                self.flush_failed_sends(env, &mut NoStream);
            }
            match framed {
                _ if self.state == QpState::Err => break TxOutcome::Idle,
                Framed::LocalError => self.state = QpState::Sqe,
                Framed::NoRoom if budget > 0 => {}
                Framed::NoRoom => {
                    // The next stream does not begin within a message.
                    self.drop_messages(env);
                    break TxOutcome::More;
                }
                Framed::Nothing | Framed::Refused(_) => break TxOutcome::Idle,
            }
        };
        nowhere.queue.release(env.buffers);
        outcome
    }

    /// Whether the state SQE is reached by a request that failed.
    #[inline]
    pub(super) fn has_failed_send(&self) -> bool {
        self.state == QpState::Sqe && self.is_unreliable()
    }

    /// In the state SQE: completes the request that failed when those before it are complete, and
    /// flushes the later ones. A peer that got a part of the message cannot recognise the next one,
    /// so the stream ends.
    pub(super) fn flush_failed_sends(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if !self.rdmap.requester.is_failed_next() {
            return;
        }
        let known = self.complete_upto();
        let requester = &mut self.rdmap.requester;
        let torn = std::mem::take(&mut requester.torn);
        if let Err(Overflow) = requester.flush(env, known) {
            self.fail(QpFault::CqOverflow, env, stream);
        } else if torn {
            self.part_from(env, stream);
        }
    }
}

// A silent peer: the retransmission timer of a queue pair (InfiniBand Architecture Specification
// vol. 1 §9.7.6.1.3: Local ACK Timeout and retry count).
//
// TCP retransmits by itself, and gives up after many minutes. A queue pair whose driver set a limit
// is lost earlier: when nothing at all has arrived from the peer's system for that time in spite of
// data, retransmissions or probes. The system answers for a program that is stopped or posts no
// receive, as an adapter does, so such a peer is not silent. (TCP_USER_TIMEOUT cannot be used here:
// it also ends a connection whose peer answers every probe of its closed window.)
//
// The device checks only while a request waits for the peer, and at intervals, not with each
// message.

impl Engine {
    /// Sets the time after which a silent peer is lost; zero leaves that to TCP.
    pub(super) fn limit_silence(&mut self, limit: Duration, stream: &mut dyn Stream) {
        if self.watch.set_limit(limit) {
            stream.probe_peer(Probing::Usual);
        }
    }

    /// Begins to watch the peer if a request has begun to wait for it.
    #[inline]
    pub fn watch_peer(&mut self, env: &Env<'_>, stream: &mut dyn Stream) {
        if let Some(limit) = self.watch.may_start()
            && self.waits_for_peer()
        {
            self.begin_watch(limit, env, stream);
        }
    }

    #[cold]
    fn begin_watch(&mut self, limit: Duration, env: &Env<'_>, stream: &mut dyn Stream) {
        if let Some(answers) = stream.answers()
            && self.watch.start(limit, env.now.get(), &answers)
        {
            stream.probe_peer(Probing::Within(limit));
        }
    }

    /// Whether a request waits for the peer, or a message that completed when the stream took it
    /// may not have reached the peer's system.
    fn waits_for_peer(&self) -> bool {
        matches!(self.progress, Progress::Open)
            && (self.is_awaiting_peer()
                || self.rdmap.requester.confirmation.last_sent() > self.watch.acknowledged)
    }

    /// Checks how the peer's system has answered since the last check.
    pub(super) fn check_peer(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let Some(answers) = stream.answers() else {
            return self.watch.end();
        };
        let taken = self.taken();
        self.watch.acknowledged = taken.saturating_sub(answers.unacknowledged.into());
        if !self.waits_for_peer() {
            if self.watch.rest() {
                stream.probe_peer(Probing::Usual);
            }
            return;
        }
        match self.watch.check(env.now.get(), &answers) {
            Check::Answering => {}
            Check::Probe(interval) => stream.probe_peer(Probing::Every(interval)),
            Check::Silent(silence) => {
                if !env.qp.unreliable {
                    self.rdmap.requester.flush_status = Some(WcStatus::RetryExcErr);
                }
                stream.reset();
                self.lose(Lost::Silent(silence), env, stream);
            }
        }
    }
}
