//! The engine of one queue pair: the order of things, from attachment to end.
//!
//! ```text
//!            attach                 error of ours or theirs
//!  Detached ────────► Open ───────────────────────────────► Terminating
//!                      │  ├─ Sqd and nothing left: our FIN       │ the stream took the Terminate: our FIN
//!                      │  └─ peer's Terminate, modify(Err): FIN  ▼
//!                      └────────────────────────────────────► Lingering ── peer's FIN, or too late ──► Ended
//! ```
//! Work is flushed when `Lingering` or `Ended` begins.

use super::inbound::{Halves, Segment};
use super::requester::Requester;
use super::responder::{Refusal, Responder};
use super::terminate::{Outgoing, Received};
use super::turns::{Framed, Turns};
use super::{Attachment, Identity, QpChange, QpParams, Rtr, RxOutcome, TxOutcome, WrongState};
use crate::counters::Counter;
use crate::env::Env;
use crate::host::PieceMut;
use crate::llp::mpa::{Agreed, Filled, Mpa};
use crate::llp::{Llp, LlpError, loopback};
use crate::queues::Overflow;
use crate::stream::{Stream, StreamError};
use crate::time::Nanos;
use std::time::Duration;
use urnic_verbs_api::device::command::QpStatus;
use urnic_verbs_api::device::event::{Event, EventKind, QpFault};
use urnic_verbs_api::vocabulary::{Access, QpState, WcStatus};
use urnic_wire::ddp;
use urnic_wire::mpa::MAX_MULPDU;
use urnic_wire::mpa::fpdu::CrcMode;
use urnic_wire::rdmap::{ReadRequest, Terminate, TerminateError};

/// How long the stream may take to take a Terminate.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the peer's FIN is waited for behind ours; what it sends meanwhile is thrown away.
const LINGER_TIMEOUT: Duration = Duration::from_secs(5);
/// ULPDUs framed in one run.
const TX_BUDGET: u32 = 4096;
/// Bytes read in one run.
const RX_BUDGET: usize = 1 << 20;

/// How far the connection is on its way.
#[derive(Debug)]
enum Progress {
    /// There is none yet.
    Detached,
    /// In use.
    Open,
    /// An error is being reported.
    Terminating {
        message: Outgoing,
        framed: bool,
        until: Nanos,
    },
    /// Our FIN is sent.
    Lingering { until: Nanos },
    /// There is none any more.
    Ended,
}

/// One queue pair's protocol.
#[derive(Debug)]
pub struct Engine {
    halves: Halves,
    llp: Option<Llp>,
    state: QpState,
    progress: Progress,
    /// We sent the MPA Request: we may send first (RFC 5044 §7.1.2(4)).
    initiator: bool,
    /// A valid FPDU has come.
    heard: bool,
    rtr: Option<Rtr>,
    turns: Turns,
    peer_may_close: bool,
    /// The peer's FIN came, and work goes on.
    peer_closed: bool,
    /// There is no way to the peer: the next send learns it.
    unreachable: bool,
    fin_grace: Duration,
    rnr_timeout: Duration,
    /// A message waits for a receive.
    stalled: bool,
    /// When the message that waits for a receive fails.
    rnr_deadline: Option<Nanos>,
    /// When posted receives are flushed after the peer's FIN.
    grace_deadline: Option<Nanos>,
    /// The segment whose payload is being read to its place, and how much of it is there.
    direct: Option<(Segment, usize)>,
    pieces: Vec<PieceMut>,
    terminate_sent: u32,
    terminate_received: u32,
}

impl Engine {
    /// An engine in the reset state. A queue pair that is reset gets a new one.
    pub fn new(params: QpParams) -> Engine {
        let qp = Identity {
            qid: params.qid,
            label: params.label,
            pd: params.pd,
            access: Access::empty(),
            extensions: params.extensions,
        };
        let requester = Requester::new(params.sq, params.send_cq);
        let responder = Responder::new(params.rq, params.recv_cq);
        Engine {
            halves: Halves::new(qp, requester, responder),
            llp: None,
            state: QpState::Reset,
            progress: Progress::Detached,
            initiator: false,
            heard: false,
            rtr: None,
            turns: Turns::default(),
            stalled: false,
            peer_may_close: false,
            peer_closed: false,
            unreachable: false,
            fin_grace: Duration::ZERO,
            rnr_timeout: Duration::MAX,
            rnr_deadline: None,
            grace_deadline: None,
            direct: None,
            pieces: Vec::new(),
            terminate_sent: 0,
            terminate_received: 0,
        }
    }

    /// An engine in the reset state for the same queue pair, on the same rings; what is posted there is forgotten.
    pub fn anew(&self) -> Engine {
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &self.halves;
        Engine::new(QpParams {
            qid: qp.qid,
            label: qp.label,
            pd: qp.pd,
            sq: requester.sq.anew(),
            send_cq: requester.cq.queue.clone(),
            rq: responder.rq.anew(),
            recv_cq: responder.cq.queue.clone(),
            extensions: qp.extensions,
        })
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// What `QueryQp` answers.
    pub fn status(&self) -> QpStatus {
        QpStatus {
            state: (self.state as u32).into(),
            attached: u32::from(self.is_attached()).into(),
            terminate_sent: self.terminate_sent.into(),
            terminate_received: self.terminate_received.into(),
            ird: self.halves.responder.answers.ird.into(),
            ord: self.halves.requester.ord.into(),
        }
    }

    /// Whether a stream is in use, if only to end it.
    pub fn is_attached(&self) -> bool {
        !matches!(self.progress, Progress::Detached | Progress::Ended)
    }

    /// Whether an error is being reported; work is flushed as soon as that is done.
    pub fn is_ending(&self) -> bool {
        matches!(self.progress, Progress::Terminating { .. })
    }

    /// Whether nothing is outstanding that the peer or the stream could still complete.
    pub fn is_quiet(&self) -> bool {
        self.llp.as_ref().is_none_or(Llp::is_flushed)
            && !self.halves.requester.is_outstanding()
            && self.halves.responder.answers.is_empty()
            && !self.is_ending()
    }

    /// Where the send queue stands, for doorbells.
    pub fn send_queue(&mut self) -> &mut crate::queues::SendQueue {
        &mut self.halves.requester.sq
    }

    /// Where receives come from, for doorbells.
    pub fn receive_source(&mut self) -> &mut crate::queues::ReceiveSource {
        &mut self.halves.responder.rq
    }

    /// Begins full operation over `stream`.
    pub fn attach(
        &mut self,
        attachment: &Attachment,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) -> Result<(), WrongState> {
        let crc = if attachment.crc { CrcMode::On } else { CrcMode::Off };
        let agreed = Agreed {
            crc,
            markers_tx: attachment.markers_tx,
            markers_rx: attachment.markers_rx,
        };
        self.open(attachment, Llp::Mpa(Box::new(Mpa::new(agreed))))?;
        if let Some(llp) = &mut self.llp {
            llp.refresh(env.now, stream);
        }
        if attachment.terminate != 0 {
            // Start-up failed behind the Reply: RFC 6581 §9 has the initiator say so in an FPDU.
            self.heard = true;
            self.terminate(
                Outgoing::from_control(attachment.terminate),
                QpFault::TerminateSent,
                env,
                stream,
            );
        }
        Ok(())
    }

    /// The queue pair becomes its own peer, with no stream.
    pub fn attach_loopback(&mut self, attachment: &Attachment) -> Result<(), WrongState> {
        self.open(attachment, Llp::Loopback(Box::default()))?;
        self.initiator = true;
        self.rtr = None;
        self.halves.expected = None;
        self.halves.responder.msn = attachment.first_msn;
        Ok(())
    }

    fn open(&mut self, attachment: &Attachment, llp: Llp) -> Result<(), WrongState> {
        if !matches!(self.progress, Progress::Detached) || !matches!(self.state, QpState::Rtr | QpState::Rts)
        {
            return Err(WrongState);
        }
        self.llp = Some(llp);
        self.progress = Progress::Open;
        self.initiator = attachment.initiator;
        self.rtr = attachment.rtr_send;
        self.peer_may_close = attachment.peer_may_close;
        self.fin_grace = attachment.fin_grace;
        let needs_slot = |rtr| u32::from(rtr == Some(Rtr::Read));
        let Halves {
            requester,
            responder,
            expected,
            ..
        } = &mut self.halves;
        requester.msn = attachment.first_msn;
        requester.ord = attachment.ord;
        responder.answers.ird = attachment.ird.max(needs_slot(attachment.rtr_expect));
        responder.stalls = attachment.stall_on_empty_rq;
        *expected = attachment.rtr_expect;
        Ok(())
    }

    /// Changes attributes, then the state.
    pub fn modify(
        &mut self,
        change: &QpChange,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) -> Result<(), WrongState> {
        if let Some(state) = change.state {
            self.check_transition(state)?;
        }
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &mut self.halves;
        if let Some(access) = change.access {
            qp.access = access;
        }
        if let Some(ird) = change.ird {
            responder.answers.ird = ird;
        }
        if let Some(ord) = change.ord {
            requester.ord = ord;
        }
        if let Some(timeout) = change.rnr_timeout {
            self.rnr_timeout = timeout;
        }
        if change.unreachable {
            self.give_up_peer(stream);
        }
        match change.state {
            Some(QpState::Err) => self.fail(QpFault::Requested, env, stream),
            Some(state) => {
                self.state = state;
                self.close_if_drained(env, stream);
            }
            None => {}
        }
        Ok(())
    }

    /// There is no way to the peer. Work stays, until the next send learns it.
    fn give_up_peer(&mut self, stream: &mut dyn Stream) {
        match self.progress {
            Progress::Detached => {}
            Progress::Open => {
                stream.reset();
                self.llp = None;
                self.progress = Progress::Ended;
            }
            Progress::Terminating { .. } | Progress::Lingering { .. } | Progress::Ended => return,
        }
        (self.unreachable, self.peer_may_close) = (true, true);
    }

    /// Which transitions a driver may ask for (rows VRB-Q-03 … 05). Reset makes a new engine instead.
    fn check_transition(&self, to: QpState) -> Result<(), WrongState> {
        use QpState::*;
        match (self.state, to) {
            (_, Err) => Ok(()),
            (Reset, Init) | (Init, Rtr) | (Rtr, Rts) | (Rts, Sqd) => Ok(()),
            (from, to) if from == to && matches!(to, Init | Rts) => Ok(()),
            _ => Result::Err(WrongState),
        }
    }

    /// Whether our direction is open (RFC 5044 §7.1.2(4)): a responder says nothing before a valid FPDU came.
    fn may_send(&self) -> bool {
        self.initiator || self.heard
    }

    /// Ends the queue pair from this side: asked for, or because a completion queue overflowed.
    pub fn fail(&mut self, fault: QpFault, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match (&self.progress, fault) {
            (Progress::Open, QpFault::Requested) => self.linger(env, stream),
            (Progress::Open, _) => {
                let message = Terminate::new(TerminateError::RdmapLocalCatastrophic);
                self.terminate(Outgoing::new(&message), fault, env, stream);
            }
            // A second reason changes nothing, but nothing more is waited for.
            (Progress::Terminating { .. }, _) => self.linger(env, stream),
            (Progress::Detached | Progress::Lingering { .. } | Progress::Ended, _) => {
                self.state = QpState::Err;
                self.flush(env);
            }
        }
    }

    /// In the error state: completes in error what was posted since.
    pub fn flush(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::Err {
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
        // Who overflowed is in the effects; there is nothing left to end here.
        let (Ok(()) | Err(Overflow), Ok(()) | Err(Overflow)) = (sends, receives);
    }

    /// When [`tick`](Self::tick) is due.
    pub fn deadline(&self) -> Option<Nanos> {
        let ending = match self.progress {
            Progress::Terminating { until, .. } | Progress::Lingering { until } => Some(until),
            _ => None,
        };
        [ending, self.rnr_deadline, self.grace_deadline]
            .into_iter()
            .flatten()
            .min()
    }

    /// Does what is due.
    pub fn tick(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let now = env.now;
        let due = |deadline: Option<Nanos>| deadline.is_some_and(|at| at <= now);
        if due(self.grace_deadline) {
            // The peer is gone for good. The next send will learn it (design: native connections).
            self.grace_deadline = None;
            self.halves.requester.verdict = Some(WcStatus::RetryExcErr);
            self.end(env);
        }
        if due(self.rnr_deadline) {
            self.rnr_deadline = None;
            let (head, ulpdu_len) = self.waiting_ulpdu();
            let message = complaint(TerminateError::DdpNoBuffer, head, ulpdu_len, None);
            self.terminate(message, QpFault::TerminateSent, env, stream);
        }
        match self.progress {
            Progress::Terminating { until, .. } if until <= env.now => {
                stream.reset();
                self.end(env);
            }
            Progress::Lingering { until } if until <= env.now => {
                stream.reset();
                self.end(env);
            }
            _ => {}
        }
    }

    /// The ULPDU that waits for a receive, as far as it is here, and its length.
    fn waiting_ulpdu(&self) -> (&[u8], usize) {
        let whole = match &self.llp {
            Some(Llp::Mpa(mpa)) => match mpa.rx.direct_candidate() {
                Some(partial) => return partial,
                None => mpa.rx.ulpdu(),
            },
            Some(Llp::Loopback(loopback)) => loopback.front().unwrap_or_default(),
            None => &[],
        };
        (whole, whole.len())
    }

    /// Sends what can be sent.
    pub fn transmit(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        if self.unreachable && self.halves.requester.sq.has_posted() {
            self.unreachable = false;
            self.lose(env);
        }
        match &self.progress {
            Progress::Open => {}
            Progress::Terminating { .. } => return self.push_terminate(env, stream),
            Progress::Detached | Progress::Lingering { .. } | Progress::Ended => {
                self.flush(env);
                return TxOutcome::Idle;
            }
        }
        if !self.may_send() {
            return TxOutcome::Idle;
        }
        if self.peer_closed && self.halves.requester.sq.has_posted() {
            self.lose(env);
            return TxOutcome::Idle;
        }
        let outcome = self.pump(env, stream);
        if let Some(llp) = &mut self.llp {
            llp.release(env.buffers);
        }
        outcome
    }

    /// Frames and flushes in turn until one of them can do no more.
    fn pump(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        let mut budget = TX_BUDGET;
        loop {
            let Some(llp) = &mut self.llp else {
                return TxOutcome::Idle;
            };
            llp.refresh(env.now, stream);
            // A connected stream is ready both ways: RTR is no state of RDMAC verbs, and programs that receive only, and send but
            // credits, stay in it (perftest over iWARP).
            let sends = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
            let rtr = self.rtr.take();
            let framed = self
                .turns
                .frame(&mut self.halves, llp, rtr, sends, env, &mut budget);
            let before = llp.taken();
            let mut calls = 0;
            let flushed = llp.flush(stream, &mut calls);
            let taken = llp.taken();
            env.counters.add(Counter::TxCalls, calls);
            env.counters.add(Counter::TxBytes, taken - before);
            let Halves { qp, requester, .. } = &mut self.halves;
            if let Err(Overflow) = requester.complete(qp, env, taken) {
                self.fail(QpFault::CqOverflow, env, stream);
                return TxOutcome::Idle;
            }
            let all_taken = match flushed {
                Ok(all_taken) => all_taken,
                Err(error) => {
                    self.llp_failed(error, env, stream);
                    return TxOutcome::Idle;
                }
            };
            match framed {
                Framed::LocalError => {
                    let message = Terminate::new(TerminateError::RdmapLocalCatastrophic);
                    self.terminate(Outgoing::new(&message), QpFault::LocalWork, env, stream);
                    return self.pending(all_taken);
                }
                Framed::Refused(message) => {
                    self.terminate(message, QpFault::TerminateSent, env, stream);
                    return self.pending(all_taken);
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
                Framed::NoRoom if budget > 0 => {}
                Framed::NoRoom => return TxOutcome::More,
            }
        }
    }

    fn pending(&self, all_taken: bool) -> TxOutcome {
        if all_taken {
            TxOutcome::Idle
        } else {
            TxOutcome::Blocked
        }
    }

    /// In the closing state with nothing left to do: our FIN (row DDP-T-05).
    fn close_if_drained(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.state == QpState::Sqd && matches!(self.progress, Progress::Open) && self.is_quiet() {
            self.linger(env, stream);
        }
    }

    /// Receives what has arrived.
    pub fn receive(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        let outcome = match (&self.progress, &self.llp) {
            (Progress::Detached, _) | (Progress::Open, None) => {
                self.flush(env);
                RxOutcome::Drained
            }
            (Progress::Ended, _) => {
                self.flush(env);
                RxOutcome::Ended
            }
            (Progress::Open, Some(Llp::Mpa(_))) if self.peer_closed => RxOutcome::Finished,
            (Progress::Open, Some(Llp::Mpa(_))) => self.receive_fpdus(env, stream),
            (Progress::Open, Some(Llp::Loopback(_))) => {
                self.deliver_loopback(env);
                if self.stalled {
                    RxOutcome::Stalled
                } else {
                    RxOutcome::Drained
                }
            }
            (Progress::Terminating { .. } | Progress::Lingering { .. }, _) => {
                self.flush(env);
                self.discard_input(env, stream)
            }
        };
        if let Some(llp) = &mut self.llp {
            llp.release(env.buffers);
        }
        if matches!(self.progress, Progress::Ended) {
            RxOutcome::Ended
        } else {
            outcome
        }
    }

    fn receive_fpdus(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        let mut budget = RX_BUDGET;
        let mut filled = Filled::All;
        loop {
            if let Err(stop) = self.deliver_fpdus(env) {
                return self.stop(stop, env, stream);
            }
            match filled {
                Filled::All if budget == 0 => return RxOutcome::More,
                Filled::All => {}
                Filled::Short | Filled::Nothing => return RxOutcome::Drained,
                Filled::Fin => return self.peer_finished(env, stream),
            }
            env.counters.add(Counter::RxCalls, 1);
            match self.fill(env, stream) {
                Ok((bytes, outcome)) => {
                    env.counters.add(Counter::RxBytes, bytes as u64);
                    budget = budget.saturating_sub(bytes);
                    filled = outcome;
                }
                Err(stop) => return self.stop(stop, env, stream),
            }
        }
    }

    /// Hands up what is complete in the receive buffer.
    fn deliver_fpdus(&mut self, env: &mut Env<'_>) -> Result<(), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok(());
        };
        let rx = &mut mpa.rx;
        let mut fpdus = 0;
        let delivered = loop {
            match rx.next() {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(Stop::Llp(error)),
            }
            if !self.heard {
                self.heard = true;
                env.effects
                    .event(Event::new(EventKind::FirstFpdu, self.halves.qp.qid));
            }
            let ulpdu = rx.ulpdu();
            if let Err(refusal) = self.halves.receive(env, ulpdu) {
                break Err(Stop::new(refusal, ulpdu, ulpdu.len()));
            }
            if ulpdu.len() > MAX_MULPDU.into() {
                env.counters.add(Counter::OversizeUlpdus, 1);
            }
            rx.consume();
            fpdus += 1;
        };
        if fpdus > 0 {
            env.counters.add(Counter::RxFpdus, fpdus);
            (self.stalled, self.rnr_deadline) = (false, None);
        }
        let pushed = self.halves.responder.cq.flush(env);
        delivered?;
        pushed?;
        if let Some((head, ulpdu_len)) = rx.direct_candidate() {
            match self.halves.begin_direct(env, head, ulpdu_len) {
                Ok(None) => {}
                Ok(Some(segment)) => {
                    let at = segment.len - rx.begin_direct();
                    self.direct = Some((segment, at));
                }
                Err(refusal) => return Err(Stop::new(refusal, head, ulpdu_len)),
            }
        }
        Ok(())
    }

    /// Reads from the stream: into the buffer, or payload to its place.
    fn fill(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> Result<(usize, Filled), Stop> {
        let Some(Llp::Mpa(mpa)) = &mut self.llp else {
            return Ok((0, Filled::Nothing));
        };
        let Some((segment, at)) = &mut self.direct else {
            return Ok(mpa.rx.fill(env.buffers, stream)?);
        };
        self.pieces.clear();
        // Pieces are raw; the window is held for as long as they are in use.
        let window = match *at < segment.len {
            false => None,
            true => match self.halves.window(env, segment, *at) {
                Ok((window, n)) => {
                    self.pieces.extend(window.pieces_mut(0, n as u64));
                    Some(window)
                }
                Err(refusal) => return Err(Stop::in_segment(refusal, segment)),
            },
        };
        let read = mpa.rx.fill_direct(env.buffers, stream, &mut self.pieces);
        drop(window);
        let (placed, bytes, filled) = match read {
            Ok(read) => read,
            Err(LlpError::Fault) => {
                self.halves.place_failed(segment);
                let refusal = Refusal::Terminate(TerminateError::DdpLocalCatastrophic);
                return Err(Stop::in_segment(refusal, segment));
            }
            Err(error) => return Err(Stop::Llp(error)),
        };
        *at += placed;
        self.halves.placed(segment, placed);
        if mpa.rx.direct_ended() {
            let segment = *segment;
            self.direct = None;
            env.counters.add(Counter::RxFpdus, 1);
            if let Err(refusal) = self.halves.end(env, &segment) {
                return Err(Stop::in_segment(refusal, &segment));
            }
            self.halves.responder.cq.flush(env)?;
        }
        Ok((bytes, filled))
    }

    /// Hands ULPDUs of ours back to us; returns how many.
    fn deliver_loopback(&mut self, env: &mut Env<'_>) -> usize {
        let Some(Llp::Loopback(loopback)) = &mut self.llp else {
            return 0;
        };
        let mut ulpdus = 0;
        let mut delivered = Ok(());
        while let Some(ulpdu) = loopback.front() {
            if let Err(refusal) = self.halves.receive(env, ulpdu) {
                delivered = Err(Stop::new(refusal, ulpdu, ulpdu.len()));
                break;
            }
            loopback.consume();
            ulpdus += 1;
        }
        if ulpdus > 0 {
            (self.stalled, self.rnr_deadline) = (false, None);
        }
        let pushed = self.halves.responder.cq.flush(env);
        if let Err(stop) = delivered.and(pushed.map_err(Stop::from)) {
            self.stop(stop, env, &mut loopback::NoStream);
        }
        ulpdus
    }

    /// Receiving cannot go on.
    fn stop(&mut self, stop: Stop, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        match stop {
            Stop::Stall => {
                if !self.stalled {
                    self.stalled = true;
                    let waits = self.rnr_timeout < Duration::MAX;
                    self.rnr_deadline = waits.then(|| env.now + self.rnr_timeout);
                    env.counters.add(Counter::RxStalls, 1);
                }
                return RxOutcome::Stalled;
            }
            Stop::Tell(message) => self.terminate(message, QpFault::TerminateSent, env, stream),
            Stop::Terminated(received) => self.terminated(received, env, stream),
            Stop::Silent => {
                stream.reset();
                self.lose(env);
            }
            Stop::Overflow => self.fail(QpFault::CqOverflow, env, stream),
            Stop::Llp(error) => self.llp_failed(error, env, stream),
        }
        RxOutcome::More
    }

    /// The lower layer failed, in either direction.
    fn llp_failed(&mut self, error: LlpError, env: &mut Env<'_>, stream: &mut dyn Stream) {
        match error {
            LlpError::Lost(_) => self.lose(env),
            LlpError::Crc | LlpError::Marker => {
                if error == LlpError::Crc {
                    env.counters.add(Counter::RxCrcErrors, 1);
                }
                if let Some(error) = error.terminate() {
                    let message = Outgoing::new(&Terminate::new(error));
                    self.terminate(message, QpFault::TerminateSent, env, stream);
                }
            }
            LlpError::Fault => {
                // In the middle of an FPDU, so that nothing can follow. The oldest request is the one that is sent.
                self.halves.requester.verdict = Some(WcStatus::LocProtErr);
                env.effects.qp_error(self.halves.qp.qid, QpFault::LocalWork, 0);
                stream.reset();
                self.end(env);
            }
        }
    }

    /// The peer's FIN.
    fn peer_finished(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        let between = match &self.llp {
            Some(Llp::Mpa(mpa)) => mpa.rx.at_boundary() && !self.halves.responder.is_within_message(),
            _ => true,
        };
        if !between || !self.is_quiet() {
            stream.finish();
            self.lose(env);
            return RxOutcome::Ended;
        }
        env.effects
            .event(Event::new(EventKind::PeerClosed, self.halves.qp.qid));
        if self.peer_may_close && self.state != QpState::Sqd {
            self.peer_closed = true;
            self.grace_deadline = Some(env.now + self.fin_grace);
            return RxOutcome::Finished;
        }
        // Nothing is outstanding: an orderly end, and no error (row VRB-Q-07).
        stream.finish();
        self.end(env);
        RxOutcome::Ended
    }

    /// Throws away what comes behind an error (row DDP-T-01), so that closing does not reset the stream.
    fn discard_input(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> RxOutcome {
        let mut scratch = env.buffers.take();
        let mut budget = RX_BUDGET;
        let outcome = loop {
            let asked = scratch.len();
            match stream.receive(&mut [PieceMut::of(&mut scratch)]) {
                Ok(0) if matches!(self.progress, Progress::Terminating { .. }) => break RxOutcome::Finished,
                Ok(0) => {
                    self.end(env);
                    break RxOutcome::Ended;
                }
                Ok(n) => {
                    env.counters.add(Counter::RxBytes, n as u64);
                    budget = budget.saturating_sub(n);
                    if n < asked {
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

    /// An error of ours, or one that we found in what came: the peer is told, once, and nothing is sent behind it
    /// (row RDM-T-04).
    fn terminate(&mut self, message: Outgoing, fault: QpFault, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if !matches!(self.progress, Progress::Open) {
            return;
        }
        let may_send = self.may_send();
        let control = if may_send { message.control() } else { 0 };
        env.effects.qp_error(self.halves.qp.qid, fault, control);
        match &mut self.llp {
            Some(Llp::Mpa(mpa)) if may_send => {
                mpa.rx.discard();
                self.direct = None;
                self.terminate_sent = control;
                self.state = QpState::Sqe;
                (self.stalled, self.rnr_deadline, self.grace_deadline) = (false, None, None);
                let until = env.now + TERMINATE_TIMEOUT;
                self.progress = Progress::Terminating {
                    message,
                    framed: false,
                    until,
                };
                self.push_terminate(env, stream);
            }
            Some(Llp::Loopback(_)) => {
                // We are the peer whose request is at fault.
                if fault == QpFault::TerminateSent
                    && let Ok(terminate) = Terminate::parse(message.payload())
                {
                    self.judge(&Received::new(&terminate));
                }
                self.end(env);
            }
            _ => {
                // A responder that has heard nothing valid may not send even this (row EMPA-23).
                stream.reset();
                self.end(env);
            }
        }
    }

    fn push_terminate(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) -> TxOutcome {
        loop {
            let (Progress::Terminating { message, framed, .. }, Some(llp)) =
                (&mut self.progress, &mut self.llp)
            else {
                return TxOutcome::Idle;
            };
            if !*framed && llp.has_room() {
                llp.open(env.buffers, Outgoing::header(), message.payload().len());
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
            let flushed = llp.flush(stream, &mut calls);
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
    fn terminated(&mut self, received: Received, env: &mut Env<'_>, stream: &mut dyn Stream) {
        self.terminate_received = received.control;
        env.counters.add(Counter::RxTerminates, 1);
        env.effects
            .qp_error(self.halves.qp.qid, QpFault::TerminateReceived, received.control);
        self.judge(&received);
        self.linger(env, stream);
    }

    /// Finds the request that a Terminate complains about. Where it was complete already, a native peer's program
    /// learns the reason from the next one; on an rdma_cm connection the rest is flushed.
    fn judge(&mut self, received: &Received) {
        let Requester {
            flights,
            verdict,
            vendor_error,
            ..
        } = &mut self.halves.requester;
        let stalls = self.halves.responder.stalls;
        let status = match received.status {
            Some(_) if received.no_buffer && stalls => WcStatus::RnrRetryExcErr,
            Some(status) => status,
            None => WcStatus::RetryExcErr,
        };
        *vendor_error = received.control;
        if !received
            .culprit
            .is_some_and(|culprit| flights.blame(culprit, status))
        {
            *verdict = Some(if self.peer_may_close || stalls {
                status
            } else {
                WcStatus::WrFlushErr
            });
        }
    }

    /// The stream is lost (row DDP-T-06).
    fn lose(&mut self, env: &mut Env<'_>) {
        env.effects.qp_error(self.halves.qp.qid, QpFault::StreamLost, 0);
        if self.peer_may_close {
            self.halves.requester.verdict = Some(WcStatus::RetryExcErr);
        }
        self.end(env);
    }

    /// Our FIN goes out behind what the stream has taken, and all work is flushed.
    fn linger(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if matches!(self.llp, Some(Llp::Loopback(_))) {
            return self.end(env);
        }
        stream.finish();
        self.close(env);
        self.progress = Progress::Lingering {
            until: env.now + LINGER_TIMEOUT,
        };
    }

    /// There is no stream any more.
    fn end(&mut self, env: &mut Env<'_>) {
        self.close(env);
        self.progress = Progress::Ended;
        env.effects
            .event(Event::new(EventKind::Closed, self.halves.qp.qid));
    }

    /// Enters the error state: nothing more is sent or taken in.
    fn close(&mut self, env: &mut Env<'_>) {
        (self.stalled, self.rnr_deadline, self.grace_deadline) = (false, None, None);
        self.direct = None;
        match &mut self.llp {
            Some(Llp::Mpa(mpa)) => {
                mpa.tx.drop_unsent();
                mpa.rx.discard();
            }
            Some(Llp::Loopback(loopback)) => loopback.discard(),
            None => {}
        }
        if self.state != QpState::Err {
            self.state = QpState::Err;
            self.halves.responder.note_last_wqe(&self.halves.qp, env);
        }
        self.flush(env);
    }

    /// The next MSN on queue 0 that the peer must use.
    #[cfg(test)]
    pub(super) fn expect_msn(&mut self, msn: u32) {
        self.halves.responder.msn = msn;
    }

    /// A MULPDU that no segment size gives.
    #[cfg(test)]
    pub(super) fn set_mulpdu(&mut self, mulpdu: usize) {
        if let Some(Llp::Mpa(mpa)) = &mut self.llp {
            mpa.tx.set_mulpdu(mulpdu);
        }
    }

    /// Octets that were received and belong to no whole FPDU.
    #[cfg(test)]
    pub(super) fn buffered(&self) -> usize {
        match &self.llp {
            Some(Llp::Mpa(mpa)) => mpa.rx.buffered(),
            _ => 0,
        }
    }
}

/// Why receiving stopped.
enum Stop {
    /// A message waits for a receive.
    Stall,
    /// The peer is at fault, and is to be told.
    Tell(Outgoing),
    /// The peer is at fault, and is not to be told.
    Silent,
    /// The peer says that we are.
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
    fn new(refusal: Refusal, head: &[u8], ulpdu_len: usize) -> Stop {
        let (error, read_request) = match refusal {
            Refusal::Terminate(error) => (error, None),
            Refusal::ReadRequest(error, request) => (error, Some(request)),
            Refusal::Stall => return Stop::Stall,
            Refusal::Silent => return Stop::Silent,
            Refusal::Terminated(received) => return Stop::Terminated(received),
            Refusal::Overflow => return Stop::Overflow,
        };
        Stop::Tell(complaint(error, head, ulpdu_len, read_request))
    }

    /// A refusal in the middle of a segment whose header is not at hand any more.
    fn in_segment(refusal: Refusal, segment: &Segment) -> Stop {
        let mut head = [0; ddp::UNTAGGED_LEN];
        let header_len = segment.header.emit(&mut head);
        Stop::new(refusal, &head[..header_len], header_len + segment.len)
    }
}

/// What to say about a ULPDU (RFC 5040 figure 10).
fn complaint(
    error: TerminateError,
    head: &[u8],
    ulpdu_len: usize,
    read_request: Option<ReadRequest>,
) -> Outgoing {
    if error == TerminateError::RdmapLocalCatastrophic {
        return Outgoing::new(&Terminate::new(error));
    }
    Outgoing::new(&Terminate {
        segment_length: u16::try_from(ulpdu_len).ok(),
        ..Terminate::for_segment(error, head, read_request)
    })
}
