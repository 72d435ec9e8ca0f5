//! Receiving: complete messages are delivered, then more bytes are read.

use super::ending::terminate_for;
use super::{Engine, Input, Progress, RnrWait};
use crate::counters::Counter;
use crate::host::PieceMut;
use crate::llp::mpa::Filled;
use crate::llp::{Arrived, Llp, LlpError};
use crate::probes;
use crate::queues::Overflow;
use crate::rdmap::explain::Lost;
use crate::rdmap::inbound::{Parked, Rdmap, Segment, Ulpdu};
use crate::rdmap::requester::Requester;
use crate::rdmap::responder::Refusal;
use crate::rdmap::terminate::{Outgoing, Received};
use crate::stream::no_stream::NoStream;
use crate::stream::{Stream, StreamError};
use crate::transport::{Env, RxOutcome};
use crate::tuning::{CONFIRMED_TOGETHER, RX_BUDGET};
use std::time::Duration;
use urnic_device::event::QpFault;
use urnic_wire::ddp;
use urnic_wire::mpa::MAX_MULPDU;

impl Engine {
    /// Receives the bytes that have arrived.
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
            (Progress::Open, Some(Llp::Mpa(_) | Llp::Messages(_))) => self.receive_ulpdus(env, stream),
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
        match (self.parked.is_empty(), self.input != Input::Open) {
            (false, _) => RxOutcome::Stalled,
            (true, false) => RxOutcome::Drained,
            (true, true) => RxOutcome::Finished,
        }
    }

    fn receive_ulpdus(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        match self.fast_receive(env, stream) {
            Ok(true) => return self.outcome(),
            Ok(false) => {}
            Err(stop) => return self.stop(stop, env, stream),
        }
        let mut budget = RX_BUDGET;
        let mut filled = Filled::All;
        loop {
            if let Err(stop) = self.deliver_ulpdus(env) {
                return self.stop(stop, env, stream);
            }
            if self.input == Input::Ended && self.parked.is_empty() && !self.concluding {
                return self.peer_finished(env, stream);
            }
            match filled {
                _ if self.input != Input::Open || env.is_stopped() => return self.outcome(),
                Filled::All if budget == 0 => return RxOutcome::More,
                Filled::All => {}
                Filled::Short | Filled::Nothing => {
                    self.place_early(env, stream);
                    return self.outcome();
                }
                Filled::Fin => {
                    self.input = Input::Ended;
                    continue;
                }
            }
            env.counters.add(Counter::RxCalls, 1);
            match self.fill(env, stream) {
                Ok((bytes, outcome)) => {
                    env.received(bytes as u64);
                    probes::received(env.qp.label, bytes);
                    budget = budget.saturating_sub(bytes);
                    filled = outcome;
                }
                Err(stop) => return self.stop(stop, env, stream),
            }
        }
    }

    /// Hands up the parked messages, then the complete messages in the receive buffer.
    fn deliver_ulpdus(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        if !self.parked.is_empty() {
            let delivered = self.deliver_parked(env);
            self.note_progress();
            delivered?;
        }
        while self.deliver_some(env)? {}
        self.begin_direct(env)?;
        self.note_waiting(env);
        Ok(())
    }

    /// Hands up ULPDUs that have arrived, at most [`CONFIRMED_TOGETHER`]; returns whether there may
    /// be more.
    fn deliver_some(&mut self, env: &mut Env<'_>) -> Result<bool, Stop> {
        let Engine {
            llp, rdmap, parked, ..
        } = self;
        let (ulpdus, delivered) = match llp {
            Some(Llp::Mpa(mpa)) => hand_up(&mut mpa.rx, rdmap, parked, env),
            Some(Llp::Messages(messages)) => hand_up(&mut messages.rx, rdmap, parked, env),
            _ => return Ok(false),
        };
        env.recent.forget();
        if ulpdus > 0 {
            env.counters.add(Counter::RxFpdus, ulpdus);
        }
        let pushed = self.rdmap.responder.cq.flush(env);
        self.note_progress();
        let more = delivered?;
        pushed?;
        Ok(more)
    }

    /// Places what can be placed of the messages that have arrived before their turn.
    fn place_early(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        // Parked messages wait for the program: more than they need not be placed.
        let is_idle = self.parked.is_empty() && !self.concluding && self.input == Input::Open;
        if !is_idle || !matches!(self.llp, Some(Llp::Messages(_))) {
            return;
        }
        // Others must have their turn.
        let mut budget = RX_BUDGET;
        while budget > 0 && !env.is_stopped() {
            let mut placed = 0;
            let offered = stream.place_early(&mut |ulpdu| {
                placed = self.rdmap.place_early(env, ulpdu);
                placed
            });
            if !offered {
                break;
            }
            budget = budget.saturating_sub(placed.max(1));
        }
    }

    /// Counts the processed bytes of the peer.
    #[inline]
    pub(super) fn note_progress(&mut self) {
        let parked = self.parked.position();
        let position = match &mut self.llp {
            Some(Llp::Mpa(mpa)) => mpa.rx.position(),
            Some(Llp::Messages(messages)) => messages.rx.position(),
            Some(Llp::Loopback(own)) => return own.advance(parked.unwrap_or(own.queue.position())),
            None => return,
        };
        let position = parked.unwrap_or(position);
        let Requester {
            confirmation,
            local_peer,
            ..
        } = &mut self.rdmap.requester;
        // A local peer also reads the count when its word changes.
        confirmation.note_processed(position, local_peer.is_none());
        if let Some(local_peer) = local_peer {
            local_peer.confirm(position, parked.is_some());
            // The peer may have introduced itself with this word.
            self.rdmap.responder.peer_fills = local_peer.may_fill();
        }
        self.rdmap.responder.confirming.processed_to(position);
    }

    /// Hands up parked messages, as long as there are receives for them.
    fn deliver_parked(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        while !env.is_stopped()
            && let Some(ulpdu) = self.parked.front()
        {
            match self.rdmap.receive(env, ulpdu) {
                Ok(()) => {}
                Err(Refusal::Stall) => break,
                Err(refusal) => return Err(Stop::new(refusal, ulpdu.bytes, ulpdu.len())),
            }
            self.parked.release();
            // The next message has its own waiting time.
            self.rnr_wait = RnrWait::None;
            self.grace_deadline = None;
        }
        Ok(())
    }

    /// Sets the time for a message that has begun to wait for a receive.
    #[inline]
    pub(super) fn note_waiting(&mut self, env: &Env<'_>) {
        if self.parked.is_empty() {
            self.rnr_wait = RnrWait::None;
        } else if self.rnr_wait == RnrWait::None {
            self.rnr_wait = match self.rnr_timeout {
                Duration::MAX => RnrWait::Endless,
                timeout => RnrWait::Until(env.now.get() + timeout),
            };
            env.counters.add(Counter::RxStalls, 1);
        }
    }

    /// Delivers ULPDUs of a queue pair that is its own peer; returns their number.
    pub(super) fn deliver_loopback(&mut self, env: &mut Env<'_>) -> usize {
        // `receive` must hand up the bytes of a stream, because the caller of `receive` also sends
        // the answers.
        if !matches!(self.llp, Some(Llp::Loopback(_))) {
            return 0;
        }
        let waited = self.parked.len();
        let mut delivered = self.deliver_parked(env);
        let mut ulpdus = waited - self.parked.len();
        while let (Ok(()), Some(Llp::Loopback(loopback))) = (&delivered, &mut self.llp) {
            let queue = &mut loopback.queue;
            let Some(ulpdu) = queue.front().filter(|_| !env.is_stopped()) else {
                break;
            };
            let position = queue.position();
            delivered = admit(&mut self.rdmap, &mut self.parked, env, position, ulpdu.into());
            if delivered.is_ok() {
                queue.consume();
                ulpdus += 1;
            }
        }
        self.note_progress();
        let pushed = self.rdmap.responder.cq.flush(env);
        match delivered.and(pushed.map_err(Stop::from)) {
            Ok(()) => self.note_waiting(env),
            Err(stop) => {
                self.stop(stop, env, &mut NoStream);
            }
        }
        ulpdus
    }

    /// Ends the connection, or the stream, because the engine cannot receive any more.
    fn stop(&mut self, stop: Stop, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        match stop {
            Stop::Stall => {
                self.note_waiting(env);
                return RxOutcome::Stalled;
            }
            Stop::Report(message) => self.terminate(message, QpFault::TerminateSent, env, stream),
            Stop::LocalWork(message) => self.terminate(message, QpFault::LocalWork, env, stream),
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

    /// Discards the bytes after an error (row DDP-T-01), so that closing does not reset the stream.
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
                    env.received(n as u64);
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

/// Hands up ULPDUs that have arrived, at most [`CONFIRMED_TOGETHER`]; returns their number, and
/// whether there may be more.
#[inline(always)]
fn hand_up(
    arrived: &mut impl Arrived,
    rdmap: &mut Rdmap,
    parked: &mut Parked,
    env: &mut Env<'_>,
) -> (u64, Result<bool, Stop>) {
    let mut ulpdus = 0;
    let delivered = loop {
        if env.is_stopped() {
            break Ok(false);
        }
        match arrived.next() {
            Ok(true) if ulpdus == CONFIRMED_TOGETHER => break Ok(true),
            Ok(true) => {}
            Ok(false) => break Ok(false),
            Err(error) => break Err(Stop::Llp(error)),
        }
        let ulpdu = Ulpdu {
            bytes: arrived.ulpdu(),
            placed: arrived.placed(),
        };
        let admitted = admit(rdmap, parked, env, arrived.position(), ulpdu);
        rdmap.startup.fpdu_received(env, admitted.is_ok());
        if let Err(stop) = admitted {
            break Err(stop);
        }
        if ulpdu.len() > MAX_MULPDU.into() {
            env.counters.add(Counter::OversizeUlpdus, 1);
        }
        arrived.consume();
        ulpdus += 1;
    };
    (ulpdus, delivered)
}

/// Takes a ULPDU that begins at `position` of the stream, or parks it until there is a receive.
#[inline(always)]
pub(super) fn admit(
    rdmap: &mut Rdmap,
    parked: &mut Parked,
    env: &mut Env<'_>,
    position: u64,
    ulpdu: Ulpdu<'_>,
) -> Result<(), Stop> {
    if !parked.stops(ulpdu.bytes) {
        match rdmap.receive(env, ulpdu) {
            Ok(()) => return Ok(()),
            Err(Refusal::Stall) => {}
            Err(refusal) => return Err(Stop::new(refusal, ulpdu.bytes, ulpdu.len())),
        }
    }
    if parked.keep(position, ulpdu) {
        rdmap.note_parked(ulpdu.bytes);
        Ok(())
    } else {
        Err(Stop::Stall)
    }
}

/// The reason why receiving stopped.
pub(super) enum Stop {
    /// Too many bytes wait for a receive.
    Stall,
    /// The peer is at fault, and a Terminate reports the fault.
    Report(Outgoing),
    /// A request of this side failed when its answer arrived, and a Terminate reports that.
    LocalWork(Outgoing),
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
            Refusal::Sink(error) => return Stop::LocalWork(terminate_for(error, head, ulpdu_len, None)),
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
    /// Has the payload of a large segment read directly to its place, if no other bytes precede it.
    pub(super) fn begin_direct(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(());
        };
        let Some((head, ulpdu_len)) = mpa
            .rx
            .direct_candidate()
            .filter(|(head, _)| !self.parked.stops(head))
        else {
            return Ok(());
        };
        match self.rdmap.begin_direct(env, head, ulpdu_len) {
            // Without a receive the segment is assembled first, and then parked.
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
        match &mut self.llp {
            Some(Llp::Mpa(mpa)) if self.direct.is_none() => Ok(mpa.rx.fill(env.buffers, stream)?),
            Some(Llp::Mpa(_)) => self.fill_direct(env, stream),
            Some(Llp::Messages(messages)) => Ok(messages.fill(env.buffers, stream)?),
            _ => Ok((0, Filled::Nothing)),
        }
    }

    fn fill_direct(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<(usize, Filled), Stop> {
        let (Some(Llp::Mpa(mpa)), Some((segment, at, _))) = (&mut self.llp, &self.direct) else {
            return Ok((0, Filled::Nothing));
        };
        let (segment, at) = (*segment, *at);
        let window = match at < segment.len {
            false => None,
            true => match self.rdmap.window(env, &segment, at) {
                Ok(window) => window,
                Err(refusal) => return Err(Stop::in_segment(refusal, &segment)),
            },
        };
        // Memory that is accessed by copies goes through one more buffer; such memory may begin in
        // the middle of a segment (`ibv_rereg_mr`).
        let unmapped = window.as_ref().filter(|(window, _)| window.is_unmapped());
        // Dropped payload goes into such a buffer, too.
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
                return Err(Stop::in_segment(self.rdmap.place_failed(&segment), &segment));
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
        self.rdmap.placed(segment, placed);
        if !mpa.rx.direct_ended() {
            return Ok(());
        }
        let segment = *segment;
        env.counters.add(Counter::RxFpdus, 1);
        let ended = self.rdmap.end(env, &segment);
        self.rdmap.startup.fpdu_received(env, ended.is_ok());
        if let Err(refusal) = ended {
            return Err(Stop::in_segment(refusal, &segment));
        }
        self.direct = None;
        self.rdmap.responder.cq.flush(env)?;
        self.note_progress();
        Ok(())
    }
}
