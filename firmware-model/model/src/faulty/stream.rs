//! A connection where things go wrong.

use super::last_words::LastWords;
use super::line::{Line, PORTION};
use super::silence::{Down, PATIENCE, Silence};
use crate::frames::Follower;
use crate::host::{Piece, PieceMut};
use crate::stream::wrapper::Wrapper;
use crate::stream::{Answers, Probing, Stream, StreamError};
use crate::time::Nanos;
use rustix::io::Errno;
use std::time::Duration;
use urnic_faults::occasion::{self, Passed};
use urnic_faults::{ByteFault, DevicePlan, Lateness, Origin, Origins, SendingFault, StreamFault};

/// Most reads of a silent connection in one call.
const MOST_LOST: usize = 64;

/// A connection with its faults.
#[derive(Debug)]
pub(super) struct FaultyStream {
    stream: Box<dyn Stream>,
    plan: DevicePlan,
    /// The position from which each fault of the plan counts.
    origins: Origins,
    /// Sent bytes that arrive late.
    line: Line,
    /// The injected end has not been signalled yet; the underlying socket may never become
    /// readable.
    ended: bool,
    /// Bytes sent, and bytes that passed in either direction.
    sent: u64,
    passed: u64,
    /// The position among the sent bytes up to which damage was decided, and the byte to damage.
    decided: u64,
    damaged: Option<u64>,
    /// The frames that are sent, and received.
    sends: Follower,
    receives: Follower,
    /// The error of a Terminate that is to come, and the number of messages that this end had sent
    /// before.
    terminates: Option<(u16, u64)>,
    /// In the condition `Rejecting`: the bytes that were sent.
    request: Vec<u8>,
    /// In the condition `Ended`: the bytes still to be received.
    last_words: Option<LastWords>,
    /// The last call received fewer bytes than had arrived.
    cut: bool,
    condition: Condition,
    /// The time of the last call that passed it.
    now: Nanos,
    silence: Silence,
    /// While the port is down: since when, and the bytes that the peer has sent since.
    down: Option<Down>,
    /// The time after which this queue pair gives up a silent peer, and a peer gives up this end.
    patience: Duration,
}

/// The condition of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    Well,
    /// It is never established.
    Unanswered,
    /// The peer waits for the Request, to reject it.
    Rejecting,
    /// The peer said its last words, and closed.
    Ended,
    /// It passes nothing more, and does not end.
    Silent,
    /// It was reset.
    Reset,
    /// It was closed in order.
    Closed,
}

impl FaultyStream {
    pub(super) fn new(stream: Box<dyn Stream>, plan: DevicePlan, condition: Condition) -> FaultyStream {
        FaultyStream {
            stream,
            origins: plan.origins(),
            plan,
            line: Line::default(),
            ended: false,
            sent: 0,
            passed: 0,
            decided: 0,
            damaged: None,
            sends: Follower::new(),
            receives: Follower::new(),
            terminates: None,
            request: Vec::new(),
            last_words: None,
            cut: false,
            condition,
            now: Nanos(0),
            silence: Silence::default(),
            down: None,
            patience: PATIENCE,
        }
    }

    /// Checks whether the port is down. While it is, a connection passes nothing, and loses
    /// nothing: bytes that an adapter would retransmit pass when the port is up.
    fn look_at_port(&mut self) {
        let until = self.plan.port_down_for().map(|left| self.now + left);
        match (until, &mut self.down) {
            (Some(until), Some(down)) => down.until = until,
            (Some(until), None) => {
                self.down = Some(Down::new(until));
                if self.condition == Condition::Well {
                    self.silence = Silence::of_port(self.now);
                }
            }
            (None, Some(_)) => self.down = None,
            (None, None) => return,
        }
        self.line.hold(until);
    }

    /// While the port is down: notes whether the peer waits for an answer, and resets the
    /// connection when the peer would give up by its own timer. Returns the time of the next check.
    fn await_port(&mut self) -> Option<Nanos> {
        let down = self.down.as_mut()?;
        let until = down.until;
        if self.condition != Condition::Well {
            return Some(until);
        }
        // Bytes of the peer, or our answer to earlier bytes.
        let waits = || !self.line.is_empty() || self.stream.peek() == Ok(true);
        match down.peer_gives_up(self.now, self.patience, waits) {
            Some(at) if at <= self.now => {}
            Some(at) => return Some(at.min(until)),
            // No event announces bytes that arrive while the port is down.
            None => return Some(until.min(self.now + self.patience / 8)),
        }
        self.line.clear();
        self.stream.reset();
        self.condition = Condition::Reset;
        Some(self.now)
    }

    /// Whether the connection passes nothing now, and has not ended.
    fn is_still(&self) -> bool {
        self.condition == Condition::Silent || self.down.is_some() && self.condition == Condition::Well
    }

    /// The result of an attempt to send in this condition; `None`: the connection sends.
    fn refuses_to_send(&mut self, pieces: &[Piece<'_>], len: usize) -> Option<Result<usize, StreamError>> {
        match self.condition {
            Condition::Well => None,
            // As a kernel does while the peer does not acknowledge.
            Condition::Silent | Condition::Unanswered | Condition::Ended => {
                self.silence.sent.get_or_insert(self.now);
                Some(Ok(len))
            }
            Condition::Rejecting => Some(self.reject(pieces).map(|()| len)),
            Condition::Reset => Some(Err(StreamError::Closed(Errno::CONNRESET))),
            Condition::Closed => Some(Err(StreamError::Closed(Errno::PIPE))),
        }
    }

    /// The result of an attempt to receive in this condition; `None`: the connection receives.
    fn refuses_to_receive(&mut self) -> Option<Result<usize, StreamError>> {
        match self.condition {
            Condition::Well => None,
            Condition::Rejecting => Some(Err(StreamError::WouldBlock)),
            Condition::Ended => match &self.last_words {
                Some(words) if !words.is_over() => None,
                _ => Some(Ok(0)),
            },
            Condition::Silent | Condition::Unanswered => {
                // Arriving bytes are dropped. A peer that sends without end must not occupy the
                // thread.
                let mut lost = [0; 4096];
                for _ in 0..MOST_LOST {
                    let Ok(1..) = self.stream.receive_bytes(&mut lost) else {
                        break;
                    };
                }
                Some(Err(StreamError::WouldBlock))
            }
            Condition::Reset => Some(Err(StreamError::Closed(Errno::CONNRESET))),
            Condition::Closed => Some(Ok(0)),
        }
    }

    /// The delay of the next `len` bytes; `None`: no fault delays them.
    fn lateness(&self, len: usize) -> Option<Lateness> {
        let occasion = occasion::sending(self.stream.ends().remote.ip());
        let strikes = self.plan.strikes(&occasion).into_iter();
        let late = strikes.map(|SendingFault::Delay(delay)| delay.lateness(len));
        late.reduce(|a, b| Lateness {
            transfer: a.transfer + b.transfer,
            time: a.time + b.time,
        })
    }

    /// Ends our direction after the bytes that were sent, late ones included.
    fn finish_when_sent(&mut self) {
        self.line.finish(&mut *self.stream);
    }

    /// The position of the damaged byte among the next `len` bytes to be sent, if one is there.
    fn damage(&mut self, len: usize) -> Option<usize> {
        self.note_new_faults();
        let end = self.sent + len as u64;
        if end > self.decided {
            let bytes = self.decided.max(self.sent)..end;
            let occasion = occasion::bytes(self.stream.ends().remote.ip(), bytes, &self.origins);
            for ByteFault::Corrupt(at) in self.plan.strikes(&occasion) {
                self.damaged = Some(at);
            }
            self.decided = end;
        }
        let at = self.damaged?;
        (self.sent..end).contains(&at).then(|| (at - self.sent) as usize)
    }

    /// The Request, or a part of it, is sent to a peer that rejects it.
    fn reject(&mut self, pieces: &[Piece<'_>]) -> Result<(), StreamError> {
        for piece in pieces {
            piece
                .append_to(&mut self.request)
                .map_err(|_| StreamError::Fault)?;
        }
        let words = LastWords::rejection(&self.request).map_err(StreamError::Closed)?;
        if let Some(words) = words {
            self.end(Ok(words));
        }
        Ok(())
    }

    /// The peer seems to send these bytes and to close. The real peer sees an orderly end.
    fn end(&mut self, words: Result<LastWords, Errno>) {
        self.finish_when_sent();
        self.ended = true;
        self.condition = Condition::Ended;
        self.last_words = words.ok();
    }

    /// A Terminate that is due comes when this end has sent a message, which it answers, and a
    /// frame of the peer has ended.
    fn terminate_if_due(&mut self) {
        if let (Some((code, sent)), Some(offset)) = (self.terminates, self.receives.fpdu_begins())
            && self.sends.messages() > sent
        {
            self.terminates = None;
            let marked = self.sends.requests_markers();
            self.end(LastWords::terminate(code, offset, marked));
        }
    }

    /// Receives arrived bytes; not beyond the end of a frame, if a Terminate waits for that.
    fn receive_real(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        if self.terminates.is_none() {
            return self.stream.receive(into);
        }
        let most = self.receives.in_frame();
        match into.iter_mut().find(|piece| !piece.is_empty()) {
            Some(piece) => self.stream.receive(&mut [piece.first(most)]),
            None => Ok(0),
        }
    }

    /// Faults that were added since the last call count from here on. For bytes that were offered
    /// to the real connection and not taken, the decision is already made.
    fn note_new_faults_at(&mut self, messages: u64) {
        let here = Origin {
            passed: self.passed,
            messages,
            sent: self.decided.max(self.sent),
        };
        self.plan.note(&mut self.origins, here);
    }

    fn note_new_faults(&mut self) {
        self.note_new_faults_at(self.messages());
    }

    /// Messages that have passed in either direction.
    fn messages(&self) -> u64 {
        self.sends.messages() + self.receives.messages()
    }

    /// Bytes have passed, after this many messages of ours and of the peer.
    fn pass(&mut self, len: usize, (ours_before, peers_before): (u64, u64)) {
        if len == 0 {
            return;
        }
        let before = ours_before + peers_before;
        self.note_new_faults_at(before);
        let passed = Passed {
            bytes: self.passed..self.passed + len as u64,
            messages: before..self.messages(),
            origins: &self.origins,
        };
        let occasion = occasion::passed(self.stream.ends().remote.ip(), passed);
        self.passed += len as u64;
        for fault in self.plan.strikes(&occasion) {
            match fault {
                StreamFault::Reset => {
                    self.line.clear();
                    self.stream.reset();
                    self.ended = true;
                    self.condition = Condition::Reset;
                }
                StreamFault::Close => {
                    self.finish_when_sent();
                    self.ended = true;
                    self.condition = Condition::Closed;
                }
                StreamFault::Silence => {
                    self.condition = Condition::Silent;
                    self.silence.since = self.now;
                }
                StreamFault::Terminate(code) => self.terminates = Some((code, ours_before)),
            }
        }
        if self.condition == Condition::Well {
            self.terminate_if_due();
        }
    }

    fn note_sent(&mut self, pieces: &[Piece<'_>], taken: usize) -> usize {
        self.sent += taken as u64;
        let before = (self.sends.messages(), self.receives.messages());
        let marked = self.receives.requests_markers();
        let pieces = pieces.iter().copied();
        self.sends.pass(pieces, taken, marked, Nanos(0), &mut |_| {});
        self.pass(taken, before);
        taken
    }
}

impl Wrapper for FaultyStream {
    const DELAYS: bool = true;

    fn inner(&self) -> &dyn Stream {
        &*self.stream
    }

    fn inner_mut(&mut self) -> &mut Box<dyn Stream> {
        &mut self.stream
    }

    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let len = pieces.iter().map(Piece::len).sum();
        if let Some(refusal) = self.refuses_to_send(pieces, len) {
            return refusal;
        }
        self.look_at_port();
        self.line.check()?;
        let late = self.lateness(len.min(PORTION));
        let is_late = late.is_some() || !self.line.is_empty() || self.down.is_some();
        let len = if is_late { len.min(PORTION) } else { len };
        let damage = self.damage(len);
        if !is_late && damage.is_none() {
            let taken = self.stream.send(pieces)?;
            return Ok(self.note_sent(pieces, taken));
        }
        let mut bytes = Vec::with_capacity(len);
        for piece in pieces {
            let left = len - bytes.len();
            (piece.first(left).append_to(&mut bytes)).map_err(|_| StreamError::Fault)?;
        }
        if let Some(byte) = damage.and_then(|at| bytes.get_mut(at)) {
            *byte ^= 1;
        }
        let taken = if is_late {
            self.line.push(bytes.clone(), late.unwrap_or_default());
            len
        } else {
            self.stream.send_bytes(&bytes)?
        };
        Ok(self.note_sent(&[Piece::of(&bytes)], taken))
    }

    fn advance(&mut self, now: Nanos) -> Option<Nanos> {
        self.now = now;
        self.look_at_port();
        let again = self.await_port();
        let due = self.line.advance(now, &mut *self.stream);
        match std::mem::take(&mut self.ended) {
            true => Some(now),
            false => [again, due].into_iter().flatten().min(),
        }
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        if let Some(refusal) = self.refuses_to_receive() {
            return refusal;
        }
        self.look_at_port();
        if self.down.is_some() {
            return Err(StreamError::WouldBlock);
        }
        self.cut = false;
        if let Some(words) = &mut self.last_words {
            return words.receive(into);
        }
        let n = self.receive_real(into)?;
        let before = (self.sends.messages(), self.receives.messages());
        let marked = self.sends.requests_markers();
        let pieces = into.iter().map(|piece| piece.filled(piece.len()));
        self.receives.pass(pieces, n, marked, Nanos(0), &mut |_| {});
        let was_limited = self.terminates.is_some();
        self.pass(n, before);
        self.cut = was_limited || self.last_words.is_some();
        Ok(n)
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        self.look_at_port();
        match self.refuses_to_receive() {
            None if self.down.is_some() => Err(StreamError::WouldBlock),
            None if self.last_words.is_some() => Ok(true),
            None => self.stream.peek(),
            Some(Ok(_)) => Ok(false),
            Some(Err(error)) => Err(error),
        }
    }

    fn has_input(&mut self) -> Option<bool> {
        match self.cut {
            true => Some(true),
            false => self.stream.has_input(),
        }
    }

    fn finish(&mut self) {
        self.finish_when_sent();
    }

    fn reset(&mut self) {
        self.line.clear();
        self.stream.reset();
    }

    fn established(&mut self) -> Result<bool, Errno> {
        match self.condition {
            Condition::Unanswered => Ok(false),
            _ if self.down.is_some() => Ok(false),
            _ => self.stream.established(),
        }
    }

    fn unacknowledged(&self) -> u32 {
        match self.condition {
            // Bytes that were taken since are never acknowledged.
            Condition::Silent | Condition::Unanswered => 1,
            Condition::Ended | Condition::Rejecting => 0,
            _ => self
                .stream
                .unacknowledged()
                .saturating_add(self.line.len() as u32),
        }
    }

    fn answers(&self) -> Option<Answers> {
        if !self.is_still() {
            return self.stream.answers();
        }
        Some(self.silence.answers(self.now))
    }

    fn probe_peer(&mut self, probing: Probing) {
        match probing {
            Probing::Within(limit) => self.patience = limit,
            Probing::Every(_) => self.silence.asked = Some(self.now),
            Probing::Usual => self.silence.asked = None,
        }
        self.stream.probe_peer(probing);
    }
}
