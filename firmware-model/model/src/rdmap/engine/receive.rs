//! Receiving: what came is delivered, then more is read.

use super::ending::terminate_for;
use super::{Engine, Progress};
use crate::counters::Counter;
use crate::host::PieceMut;
use crate::llp::mpa::Filled;
use crate::llp::{Llp, LlpError};
use crate::probes;
use crate::queues::Overflow;
use crate::rdmap::explain::Lost;
use crate::rdmap::inbound::{Halves, Held, Segment};
use crate::rdmap::params::Env;
use crate::rdmap::params::RxOutcome;
use crate::rdmap::responder::Refusal;
use crate::rdmap::terminate::{Outgoing, Received};
use crate::stream::no_stream::NoStream;
use crate::stream::{Stream, StreamError};
use crate::tuning::{CONFIRMED_TOGETHER, RX_BUDGET};
use std::time::Duration;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_wire::ddp;
use urnic_wire::mpa::MAX_MULPDU;

impl Engine {
    /// Receives what has arrived.
    pub fn receive(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        self.note_confirmed(env, stream);
        let outcome = match (&self.progress, &self.llp) {
            (Progress::Detached, _) | (Progress::Open, None) => {
                self.flush(env);
                RxOutcome::Drained
            }
            (Progress::Ended, _) => {
                self.flush(env);
                RxOutcome::Ended
            }
            (Progress::Open, Some(Llp::Mpa(_))) => self.receive_fpdus(env, stream),
            (Progress::Open, Some(Llp::Loopback(_))) => {
                self.deliver_loopback(env);
                self.outcome()
            }
            (Progress::Terminating { .. } | Progress::Lingering { .. }, _) => {
                self.flush(env);
                self.discard_input(env, stream)
            }
        };
        if let Some(llp) = &mut self.llp {
            llp.release(env.buffers);
        }
        if matches!(self.progress, Progress::Ended) || self.is_parted() {
            RxOutcome::Ended
        } else {
            outcome
        }
    }

    /// The outcome when the stream has nothing more.
    fn outcome(&self) -> RxOutcome {
        match (self.held.is_empty(), self.input_ended) {
            (false, _) => RxOutcome::Stalled,
            (true, false) => RxOutcome::Drained,
            (true, true) => RxOutcome::Finished,
        }
    }

    fn receive_fpdus(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        match self.receive_alone(env, stream) {
            Ok(true) => return self.outcome(),
            Ok(false) => {}
            Err(stop) => return self.stop(stop, env, stream),
        }
        let mut budget = RX_BUDGET;
        let mut filled = Filled::All;
        loop {
            if let Err(stop) = self.deliver_fpdus(env) {
                return self.stop(stop, env, stream);
            }
            if self.input_ended && self.held.is_empty() && !(self.peer_closed || self.concluding) {
                return self.peer_finished(env, stream);
            }
            match filled {
                _ if self.input_ended || env.is_stopped() => return self.outcome(),
                Filled::All if budget == 0 => return RxOutcome::More,
                Filled::All => {}
                Filled::Short | Filled::Nothing => return self.outcome(),
                Filled::Fin => {
                    self.input_ended = true;
                    continue;
                }
            }
            env.counters.add(Counter::RxCalls, 1);
            match self.fill(env, stream) {
                Ok((bytes, outcome)) => {
                    env.counters.add(Counter::RxBytes, bytes as u64);
                    probes::received(self.halves.qp.label, bytes);
                    budget = budget.saturating_sub(bytes);
                    filled = outcome;
                }
                Err(stop) => return self.stop(stop, env, stream),
            }
        }
    }

    /// Hands up what waited for a receive, then what is complete in the receive buffer.
    fn deliver_fpdus(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        if !self.held.is_empty() {
            self.deliver_held(env)?;
        }
        while self.deliver_some(env)? {}
        self.begin_direct(env)?;
        self.note_waiting(env);
        Ok(())
    }

    /// Hands up FPDUs that are complete in the receive buffer, at most [`CONFIRMED_TOGETHER`];
    /// returns whether there may be more.
    fn deliver_some(&mut self, env: &mut Env<'_>) -> Result<bool, Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(false);
        };
        let rx = &mut mpa.rx;
        let mut fpdus = 0;
        let delivered = loop {
            if env.is_stopped() {
                break Ok(false);
            }
            match rx.next() {
                Ok(true) if fpdus == CONFIRMED_TOGETHER => break Ok(true),
                Ok(true) => {}
                Ok(false) => break Ok(false),
                Err(error) => break Err(Stop::Llp(error)),
            }
            let is_first = !std::mem::replace(&mut self.fpdu_received, true);
            let ulpdu = rx.ulpdu();
            if let Err(stop) = admit(&mut self.halves, &mut self.held, env, rx.position(), ulpdu) {
                break Err(stop);
            }
            if is_first {
                note_first_fpdu(&self.halves, env, self.initiator, self.may_begin);
            }
            if ulpdu.len() > MAX_MULPDU.into() {
                env.counters.add(Counter::OversizeUlpdus, 1);
            }
            rx.consume();
            fpdus += 1;
        };
        env.recent.forget();
        if fpdus > 0 {
            env.counters.add(Counter::RxFpdus, fpdus);
        }
        let pushed = self.halves.responder.cq.flush(env);
        self.note_progress();
        let more = delivered?;
        pushed?;
        Ok(more)
    }

    /// Counts what is processed of what the peer sent, if the peer is on this device or this host.
    #[inline]
    pub(super) fn note_progress(&mut self) {
        let held = self.held.position();
        match &mut self.llp {
            Some(Llp::Mpa(mpa)) => {
                let position = held.unwrap_or_else(|| mpa.rx.position());
                let local_peer = &mut self.halves.requester.local_peer;
                if let Some(peer_progress) = &mut self.peer_progress {
                    peer_progress.advance(position, local_peer.is_none());
                }
                // A peer that is notified looks at both.
                if let Some(local_peer) = local_peer {
                    local_peer.confirm(position, held.is_some());
                    // It may have been introduced by that.
                    self.halves.responder.peer_fills = local_peer.may_fill();
                }
            }
            Some(Llp::Loopback(own)) => own.advance(held.unwrap_or_else(|| own.position())),
            None => {}
        }
    }

    /// Hands up what waited, as long as there are receives for it.
    fn deliver_held(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        while !env.is_stopped()
            && let Some(ulpdu) = self.held.front()
        {
            match self.halves.receive(env, ulpdu) {
                Ok(()) => {}
                Err(Refusal::Stall) => break,
                Err(refusal) => return Err(Stop::new(refusal, ulpdu, ulpdu.len())),
            }
            self.held.release();
            // The next message has its own waiting time.
            (self.waiting, self.rnr_deadline) = (false, None);
            self.grace_deadline = None;
        }
        Ok(())
    }

    /// Sets the time for a message that has begun to wait for a receive.
    #[inline]
    pub(super) fn note_waiting(&mut self, env: &Env<'_>) {
        if self.held.is_empty() {
            (self.waiting, self.rnr_deadline) = (false, None);
        } else if !self.waiting {
            self.waiting = true;
            let ends = self.rnr_timeout < Duration::MAX;
            self.rnr_deadline = ends.then(|| env.now.get() + self.rnr_timeout);
            env.counters.add(Counter::RxStalls, 1);
        }
    }

    /// Hands ULPDUs of ours back to us; returns how many.
    pub(super) fn deliver_loopback(&mut self, env: &mut Env<'_>) -> usize {
        // `receive` must hand up what a stream brought, because the caller of `receive` also sends
        // the answers.
        if !matches!(self.llp, Some(Llp::Loopback(_))) {
            return 0;
        }
        let waited = self.held.len();
        let mut delivered = self.deliver_held(env);
        let mut ulpdus = waited - self.held.len();
        while let (Ok(()), Some(Llp::Loopback(loopback))) = (&delivered, &mut self.llp) {
            let Some(ulpdu) = loopback.front().filter(|_| !env.is_stopped()) else {
                break;
            };
            let position = loopback.position();
            delivered = admit(&mut self.halves, &mut self.held, env, position, ulpdu);
            if delivered.is_ok() {
                loopback.consume();
                ulpdus += 1;
            }
        }
        self.note_progress();
        let pushed = self.halves.responder.cq.flush(env);
        match delivered.and(pushed.map_err(Stop::from)) {
            Ok(()) => self.note_waiting(env),
            Err(stop) => {
                self.stop(stop, env, &mut NoStream);
            }
        }
        ulpdus
    }

    /// The engine cannot receive any more.
    fn stop(&mut self, stop: Stop, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        match stop {
            Stop::Stall => {
                self.note_waiting(env);
                return RxOutcome::Stalled;
            }
            Stop::Report(message) => self.terminate(message, QpFault::TerminateSent, env, stream),
            Stop::Terminated(received) => self.terminated(received, env, stream),
            Stop::Silent => {
                stream.reset();
                self.lose(Lost::MalformedTerminate, env, stream);
            }
            Stop::Overflow => self.fail(QpFault::CqOverflow, env, stream),
            Stop::Llp(error) => self.llp_failed(error, env, stream),
        }
        RxOutcome::More
    }

    /// Throws away what comes behind an error (row DDP-T-01), so that closing does not reset the
    /// stream.
    fn discard_input(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        let mut scratch = env.buffers.take();
        let mut budget = RX_BUDGET;
        let outcome = loop {
            let requested = scratch.len();
            match stream.receive(&mut [PieceMut::of(&mut *scratch)]) {
                Ok(0) if matches!(self.progress, Progress::Terminating { .. }) => break RxOutcome::Finished,
                Ok(0) => {
                    self.end(env);
                    break RxOutcome::Ended;
                }
                Ok(n) => {
                    env.counters.add(Counter::RxBytes, n as u64);
                    budget = budget.saturating_sub(n);
                    if n < requested && stream.has_input() != Some(true) {
                        break RxOutcome::Drained;
                    }
                    if budget == 0 {
                        break RxOutcome::More;
                    }
                }
                Err(StreamError::WouldBlock) => break RxOutcome::Drained,
                Err(_) => {
                    self.end(env);
                    break RxOutcome::Ended;
                }
            }
        };
        env.buffers.give(scratch);
        outcome
    }
}

/// The first FPDU is complete, and its message or segment was accepted. The driver reports the
/// connection as established at this event: the peer's Terminate, an error or a refused RTR must
/// not cause it (row EMPA-40).
#[cold]
pub(super) fn note_first_fpdu(halves: &Halves, env: &mut Env<'_>, initiator: bool, may_begin: bool) {
    // A responder sends nothing before it has an FPDU (RFC 5044 §7.1.2): this one came with its
    // Reply.
    if initiator && halves.silent {
        env.counters.add(Counter::EarlyFpdus, 1);
    }
    // A side that may begin anyway waits for nothing.
    if !may_begin {
        env.effects.event(Event::new(EventKind::FirstFpdu, halves.qp.qid));
    }
}

/// Takes a ULPDU that begins at `position` of the stream, or holds it until there is a receive.
#[inline(always)]
pub(super) fn admit(
    halves: &mut Halves,
    held: &mut Held,
    env: &mut Env<'_>,
    position: u64,
    ulpdu: &[u8],
) -> Result<(), Stop> {
    if !held.stops(ulpdu) {
        match halves.receive(env, ulpdu) {
            Ok(()) => return Ok(()),
            Err(Refusal::Stall) => {}
            Err(refusal) => return Err(Stop::new(refusal, ulpdu, ulpdu.len())),
        }
    }
    if held.keep(position, ulpdu) {
        Ok(())
    } else {
        Err(Stop::Stall)
    }
}

/// Why receiving stopped.
pub(super) enum Stop {
    /// Too much waits for a receive.
    Stall,
    /// The peer is at fault, and a Terminate reports it.
    Report(Outgoing),
    /// The peer is at fault, and nothing is sent.
    Silent,
    /// The peer's Terminate reports a fault of this side.
    Terminated(Received),
    /// A completion queue is full.
    Overflow,
    /// The lower layer failed.
    Llp(LlpError),
}

impl From<Overflow> for Stop {
    fn from(Overflow: Overflow) -> Stop {
        Stop::Overflow
    }
}

impl From<LlpError> for Stop {
    fn from(error: LlpError) -> Stop {
        Stop::Llp(error)
    }
}

impl Stop {
    /// A refusal of the ULPDU that begins with `head` and has `ulpdu_len` bytes.
    pub(super) fn new(refusal: Refusal, head: &[u8], ulpdu_len: usize) -> Stop {
        let (error, read_request) = match refusal {
            Refusal::Terminate(error) => (error, None),
            Refusal::ReadRequest(error, request) => (error, Some(request)),
            Refusal::Stall => return Stop::Stall,
            Refusal::Silent => return Stop::Silent,
            Refusal::Terminated(received) => return Stop::Terminated(received),
            Refusal::Overflow => return Stop::Overflow,
        };
        Stop::Report(terminate_for(error, head, ulpdu_len, read_request))
    }

    /// A refusal in the middle of a segment whose header is not available any more.
    pub(super) fn in_segment(refusal: Refusal, segment: &Segment) -> Stop {
        let mut head = [0; ddp::UNTAGGED_LEN];
        let header_len = segment.header.emit(&mut head);
        Stop::new(refusal, &head[..header_len], header_len + segment.len)
    }
}

// Payload of large segments goes from the stream directly to its place.

impl Engine {
    /// Has the payload of a large segment read directly to its place, if no other bytes come before
    /// it.
    pub(super) fn begin_direct(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(());
        };
        let Some((head, ulpdu_len)) = mpa
            .rx
            .direct_candidate()
            .filter(|(head, _)| !self.held.stops(head))
        else {
            return Ok(());
        };
        match self.halves.begin_direct(env, head, ulpdu_len) {
            // Without a receive the segment is assembled first, and then held.
            Ok(None) | Err(Refusal::Stall) => {}
            Ok(Some(segment)) => {
                let at = segment.len - mpa.rx.begin_direct();
                self.direct = Some((segment, at, mpa.rx.position()));
            }
            Err(refusal) => return Err(Stop::new(refusal, head, ulpdu_len)),
        }
        Ok(())
    }

    /// Reads from the stream: into the buffer, or payload to its place.
    pub(super) fn fill(
        &mut self,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) -> Result<(usize, Filled), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok((0, Filled::Nothing));
        };
        if self.direct.is_none() {
            return Ok(mpa.rx.fill(env.buffers, stream)?);
        }
        self.fill_direct(env, stream)
    }

    fn fill_direct(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<(usize, Filled), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at, _))) = (&mut self.llp, &self.direct) else {
            return Ok((0, Filled::Nothing));
        };
        let (segment, at) = (*segment, *at);
        let window = match at < segment.len {
            false => None,
            true => match self.halves.window(env, &segment, at) {
                Ok(window) => window,
                Err(refusal) => return Err(Stop::in_segment(refusal, &segment)),
            },
        };
        // Where memory is reached by copies, which may begin in the middle of a segment
        // (`ibv_rereg_mr`), one more buffer lies between.
        let unmapped = window.as_ref().filter(|(window, _)| window.is_unmapped());
        // What is dropped goes into such a buffer, too.
        let dropped = if window.is_none() { segment.len - at } else { 0 };
        let mut between = (unmapped.is_some() || dropped > 0).then(|| env.buffers.take());
        let mut pieces = self.pieces.take();
        match (&window, &mut between) {
            (Some((_, n)), Some(buffer)) => {
                let n = buffer.len().min(*n);
                pieces.push(PieceMut::of(&mut buffer[..n]));
            }
            (Some((window, n)), None) => pieces.extend(window.pieces_mut(0, *n as u64)),
            (None, Some(buffer)) => {
                let n = buffer.len().min(dropped);
                pieces.push(PieceMut::of(&mut buffer[..n]));
            }
            (None, None) => {}
        }
        let mut read = mpa.rx.fill_direct(env.buffers, stream, &mut pieces);
        self.pieces.give(pieces);
        if let Some(buffer) = between {
            if let (Ok((placed, ..)), Some((window, _))) = (&read, &window)
                && window.copy_in(0, &buffer[..*placed]).is_err()
            {
                read = Err(LlpError::Fault);
            }
            env.buffers.give(buffer);
        }
        if let (Err(LlpError::Fault), Some((window, n))) = (&read, &window) {
            window.report(0, *n as u64);
        }
        drop(window);
        let (placed, bytes, filled) = match read {
            Ok(read) => read,
            Err(LlpError::Fault) => {
                return Err(Stop::in_segment(self.halves.place_failed(&segment), &segment));
            }
            Err(error) => return Err(Stop::Llp(error)),
        };
        self.note_placed(env, placed)?;
        Ok((bytes, filled))
    }

    /// Notes that `placed` bytes of the segment are in their place, and ends it if it is complete.
    fn note_placed(&mut self, env: &mut Env<'_>, placed: usize) -> Result<(), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at, _))) = (&self.llp, &mut self.direct) else {
            return Ok(());
        };
        *at += placed;
        self.halves.placed(segment, placed);
        if !mpa.rx.direct_ended() {
            return Ok(());
        }
        let segment = *segment;
        let is_first = !std::mem::replace(&mut self.fpdu_received, true);
        env.counters.add(Counter::RxFpdus, 1);
        if let Err(refusal) = self.halves.end(env, &segment) {
            return Err(Stop::in_segment(refusal, &segment));
        }
        self.direct = None;
        if is_first {
            note_first_fpdu(&self.halves, env, self.initiator, self.may_begin);
        }
        self.halves.responder.cq.flush(env)?;
        self.note_progress();
        Ok(())
    }
}
