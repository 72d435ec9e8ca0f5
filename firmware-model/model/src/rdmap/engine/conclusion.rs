//! What an end of a connection does before it ends: it takes in what has arrived, and confirms it,
//! so that the peer's requests complete (design: completions). A request of ours completes only if
//! the peer has confirmed it.

use super::{Engine, Progress};
use crate::counters::Counter;
use crate::llp::{Llp, LlpError};
use crate::queues::Overflow;
use crate::rdmap::confirmation;
use crate::rdmap::env::Env;
use crate::rdmap::explain::Lost;
use crate::rdmap::inbound::Halves;
use crate::rdmap::params::RxOutcome;
use crate::rdmap::peer_progress::PeerProgress;
use crate::rdmap::terminate::Outgoing;
use crate::stream::Stream;
use std::time::Duration;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_wire::rdmap::{Terminate, TerminateError};

/// Runs of the receiver before an end, each of up to 256 KiB: more than a ring has, or a socket by
/// default, and no peer that goes on sending keeps the end waiting.
const LAST_RUNS: u32 = 64;
/// How long requests wait after the peer's FIN before they fail, where the peer may close: the time
/// that adapters spend on repetitions at least.
const LOSS_GRACE: Duration = Duration::from_millis(500);

impl Engine {
    /// This side ends the connection next: takes in what has arrived, and confirms it. Never waits
    /// for the peer. If the peer has ended already, that changes nothing.
    pub fn conclude(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        self.concluding = true;
        self.take_in(env, stream);
        if matches!(self.progress, Progress::Open)
            && self.may_send()
            && !self.halves.requester.is_within_message()
        {
            // The answers to Reads.
            self.pump(env, stream);
        }
        self.confirm_last(env, stream);
        self.concluding = false;
        self.end_if_failed(env, stream);
    }

    /// Takes in what has arrived.
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

    /// Takes in what has arrived before this side ends the connection: that the peer has ended it,
    /// too, changes nothing.
    fn take_in_last(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let concluding = std::mem::replace(&mut self.concluding, true);
        self.take_in(env, stream);
        self.concluding = concluding;
    }

    /// The stream does not take what we send. What has arrived counts: it may be the answer to a
    /// Read, or the peer's FIN, which explains a lost stream but no fault of our memory.
    pub(super) fn send_failed(&mut self, error: LlpError, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let is_ours = matches!(error, LlpError::Fault);
        match is_ours {
            true => self.take_in_last(env, stream),
            false => self.take_in(env, stream),
        }
        if matches!(self.progress, Progress::Open) && (is_ours || !self.peer_closed) {
            self.llp_failed(error, env, stream);
        }
    }

    /// Confirms what we have processed, as the last message before our FIN.
    pub(super) fn confirm_last(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if !matches!(self.progress, Progress::Open) || !self.may_send() || !self.frame_confirmation(env) {
            return;
        }
        if let Some(llp) = &mut self.llp {
            let (before, mut calls) = (llp.taken(), 0);
            // A stream that takes no more, or is lost, ends without it.
            let (Ok(_) | Err(_)) = llp.flush(env.memory, stream, &mut calls);
            env.counters.add(Counter::TxCalls, calls);
            env.counters.add(Counter::TxBytes, llp.taken() - before);
        }
    }

    /// While a message waits for a receive: confirms what came before it. A Read that would confirm
    /// that waits as well.
    #[inline]
    pub(super) fn confirm_before_waiting(&mut self, env: &mut Env<'_>) {
        if !self.held.is_empty() && !self.halves.requester.is_within_message() {
            self.frame_confirmation(env);
        }
    }

    /// Frames a confirmation of what we have processed, for a peer that understands it and was not
    /// told yet. In memory the peer finds a word that says so. Returns whether it did.
    pub(super) fn frame_confirmation(&mut self, env: &mut Env<'_>) -> bool {
        let Halves {
            requester, responder, ..
        } = &self.halves;
        let is_understood = responder.answers.takes_confirmations && requester.neighbour.is_none();
        // A segment that is refused may have been read to its end.
        let direct = self.direct.map(|(_, _, position)| position);
        let unprocessed = self.held.position().or(direct);
        let Some(llp @ Llp::Mpa(_)) = self.llp.as_mut().filter(|_| is_understood) else {
            return false;
        };
        let processed = match (unprocessed, &*llp) {
            (Some(position), _) => position,
            (None, Llp::Mpa(mpa)) => mpa.rx.position(),
            (None, Llp::Loopback(_)) => 0,
        };
        if processed <= self.told || !llp.has_room() {
            return false;
        }
        self.told = processed;
        llp.open(env.buffers, confirmation::header(processed), 0);
        llp.seal();
        env.counters.add(Counter::TxFpdus, 1);
        true
    }

    /// The position up to which requests succeed if the connection ends now.
    pub(super) fn known_at_end(&self) -> u64 {
        match self.halves.requester.delivered {
            true => self.known(),
            // A completion says that the stream has taken the request.
            false => self.llp.as_ref().map_or(0, Llp::taken),
        }
    }

    /// The peer has finished, and we have read all: completes what succeeded. Returns whether
    /// requests are left, which nobody will complete.
    pub(super) fn complete_at_end(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> bool {
        if !self.halves.requester.delivered {
            self.halves.requester.await_no_more();
            self.peer_progress = None;
        }
        self.peer_progressed(env, stream);
        self.is_awaiting_peer()
    }

    /// Whether a request waits for something of the peer.
    pub(super) fn is_awaiting_peer(&self) -> bool {
        self.halves.requester.is_outstanding(self.known_at_end())
    }

    /// Requests fail after a while, because the peer has finished.
    pub(super) fn begin_losing(&mut self, env: &Env<'_>) {
        let due = env.now.get() + self.fin_grace.min(LOSS_GRACE);
        self.grace_deadline = Some(self.grace_deadline.map_or(due, |set| set.min(due)));
    }

    /// The peer finished some time ago.
    pub(super) fn end_grace(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.is_awaiting_peer() {
            stream.finish();
            let how = match self.halves.requester.is_in_flight() {
                true => Lost::Closed,
                false => Lost::ClosedBefore,
            };
            self.lose(how, env, stream);
        } else if self.held.is_empty() {
            // The peer will not return. The next send fails because of that (design: native
            // connections).
            self.halves.requester.flush_status = Some(WcStatus::RetryExcErr);
            self.end(env);
        }
    }

    /// The peer has processed more of this end's messages: completes what succeeded.
    pub fn peer_progressed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let known = self.known();
        let Halves { qp, requester, .. } = &mut self.halves;
        if let Err(Overflow) = requester.complete(qp, env, known) {
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
        self.halves.requester.has_failed = true;
        self.halves.requester.delivery.confirm_all();
        self.end_if_failed(env, stream);
    }

    /// Ends the connection if a request failed locally, and nothing before it waits. What has
    /// arrived is taken in before, unless that is being done.
    pub(super) fn end_if_failed(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let Halves { qp, requester, .. } = &self.halves;
        // Nothing, not even a Read that confirms, may come between the segments of a message.
        let waits = requester.delivered && !requester.torn && !requester.is_failed_next();
        if !requester.has_failed || qp.unreliable || waits || self.concluding {
            return;
        }
        self.take_in_last(env, stream);
        let message = Terminate::new(TerminateError::RdmapLocalCatastrophic);
        self.terminate(Outgoing::new(&message), QpFault::LocalWork, env, stream);
    }

    /// The peer is a queue pair of this device: requests complete when it has processed them.
    pub fn track_peer(&mut self, peer_progress: PeerProgress) {
        self.peer_progress = Some(peer_progress);
    }

    /// Whether this end has processed more of the peer's messages since the last call.
    #[inline]
    pub fn has_progressed(&mut self) -> bool {
        self.peer_progress.as_mut().is_some_and(PeerProgress::moved)
    }
}
