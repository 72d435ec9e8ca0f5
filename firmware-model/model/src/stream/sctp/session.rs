//! A DDP session (RFC 5043 §6): the messages of a pair of SCTP streams with one number.

use super::super::descriptor::Descriptor;
use super::super::{Ends, LONGEST_MESSAGE, StreamError};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use urnic_sctp::order::{Incoming, Message, Outgoing};
use urnic_wire::sctp::chunk::{Contents, MAX_IN_FLIGHT, MIN_MULPDU, SSN_LEN, Ssn};
use urnic_wire::sctp::session::{Function, MAX_MESSAGE_LEN, SessionMessage};

/// The longest message, without its DDP-SSN, of an association whose packets are the shortest.
pub(super) const LEAST_LONGEST: usize = MIN_MULPDU as usize - SSN_LEN;

/// Most messages, and most bytes, of a session that have come and were not read. No peer reaches
/// them that keeps to its receive window and to the limit of RFC 5043 §10.
const MOST_UNREAD: usize = MAX_IN_FLIGHT as usize;
const MOST_UNREAD_BYTES: usize = 4 << 20;
/// Bytes of an association, and messages of a session, that are kept for their readers. More stay
/// in the receive window, which closes.
pub(super) const MOST_KEPT_BYTES: usize = 1 << 20;
pub(super) const MOST_KEPT: usize = 8 << 10;
/// Bytes of an association that are kept in all: if all wait for earlier messages, more are taken.
pub(super) const MOST_HELD_BYTES: usize = 16 << 20;
/// Bytes of memory that a message takes besides its own: the shortest ones must not cost the most.
pub(super) const MESSAGE_COST: usize = 192;
/// Bytes that wait for the thread, or for room in the association. A message is taken while there
/// are fewer.
const MOST_UNSENT: usize = 256 << 10;

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) ends: Ends,
    /// It has its pair of SCTP streams.
    established: bool,
    /// The longest message of its association, without its DDP-SSN.
    longest: usize,
    incoming: Incoming,
    outgoing: Outgoing,
    /// Messages, with their DDP-SSN, that the association has not taken, and their bytes.
    unsent: VecDeque<(Contents, Vec<u8>)>,
    unsent_bytes: usize,
    /// Messages that the peer's SCTP has not acknowledged, since this end finished.
    unacknowledged: usize,
    /// An eventfd, which is written when the session can go on.
    notification: Arc<Descriptor>,
    /// The device has a stream for the session.
    pub(super) is_open: bool,
    /// Messages are segments from now on.
    full_operation: bool,
    /// The peer requested it.
    pub(super) by_peer: bool,
    /// An Accept has passed, in either direction.
    accepted: bool,
    /// A message of session control was sent, and may not have arrived: another one must not
    /// overtake it (RFC 5043 §6.6).
    unconfirmed: bool,
    /// The last message of this end is to be sent, or was sent.
    finishes: bool,
    sent_last: bool,
    /// No message of the peer is read any more.
    received_last: bool,
    /// The peer's last message was read: none is outstanding.
    saw_last: bool,
    /// The device waits for room.
    is_blocked: bool,
    /// The peer did what no legal sequence has; only the last message is still sent.
    fault: Option<Errno>,
    /// Why the association ended.
    ended: Option<Errno>,
}

/// The function of a message of session control.
pub(super) fn function(message: &[u8]) -> Option<Function> {
    SessionMessage::parse(message)
        .ok()
        .map(|message| message.function)
}

impl Session {
    pub(super) fn new(ends: Ends, notification: Arc<Descriptor>) -> Session {
        Session {
            ends,
            established: false,
            longest: LEAST_LONGEST,
            incoming: Incoming::new(MOST_UNREAD, MOST_UNREAD_BYTES),
            outgoing: Outgoing::default(),
            unsent: VecDeque::new(),
            unsent_bytes: 0,
            unacknowledged: 0,
            notification,
            is_open: true,
            full_operation: false,
            by_peer: false,
            accepted: false,
            unconfirmed: false,
            finishes: false,
            sent_last: false,
            received_last: false,
            saw_last: false,
            is_blocked: false,
            fault: None,
            ended: None,
        }
    }

    pub(super) fn notification(&self) -> Arc<Descriptor> {
        self.notification.clone()
    }

    /// Lets the device look at the stream.
    pub(super) fn notify(&self) {
        // It fails only if the counter is full, which wakes as well.
        let _ = rustix::io::write(&*self.notification, &1u64.to_ne_bytes());
    }

    /// It has its pair of SCTP streams, of an association whose longest message, with its DDP-SSN,
    /// this is.
    pub(super) fn establish(&mut self, longest: usize) {
        self.established = true;
        self.longest = longest.saturating_sub(SSN_LEN).max(LEAST_LONGEST);
        self.notify();
    }

    /// Whether it can begin; an error ends the attempt.
    pub(super) fn is_established(&self) -> Result<bool, Errno> {
        self.ended.map_or(Ok(self.established), Err)
    }

    /// The longest message; the shortest that there may be, while it is not established.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn enter_full_operation(&mut self) {
        self.full_operation = true;
        self.notify();
    }

    /// Takes a message to be sent.
    ///
    /// # Errors
    /// `WouldBlock`: too much waits.
    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), StreamError> {
        match (self.ended.or(self.fault), self.finishes) {
            (Some(errno), _) => return Err(StreamError::Closed(errno)),
            (None, true) => return Err(StreamError::Closed(Errno::PIPE)),
            (None, false) if self.unsent_bytes >= MOST_UNSENT => {
                self.is_blocked = true;
                return Err(StreamError::WouldBlock);
            }
            (None, false) => {}
        }
        match self.full_operation {
            true => self.push(Contents::Segment, message),
            false => self.push(Contents::SessionControl, message),
        }
        Ok(())
    }

    fn push(&mut self, contents: Contents, message: &[u8]) {
        if contents == Contents::SessionControl {
            self.note_control(message);
        }
        let numbered = self.outgoing.number(message);
        self.outgoing.advance();
        self.unsent_bytes += numbered.len();
        self.unsent.push_back((contents, numbered));
    }

    /// Leaves a hole in the DDP-SSNs.
    #[cfg(test)]
    pub(super) fn skip_a_number(&mut self) {
        self.outgoing.advance();
    }

    /// Notes a message of session control that is sent.
    fn note_control(&mut self, message: &[u8]) {
        match function(message) {
            Some(Function::Accept) => self.accepted = true,
            Some(Function::Terminate) => {
                (self.finishes, self.sent_last) = (true, true);
                // The peer does not answer the end of what did not begin; it may have accepted.
                if !self.accepted {
                    self.stop_reading();
                }
            }
            Some(Function::Reject) => self.end_both(),
            Some(Function::Initiate) | None => {}
        }
    }

    /// Ends our direction, after all that was sent.
    pub(super) fn finish(&mut self) {
        self.finishes = true;
        // Until the thread has looked.
        self.unacknowledged = self.unacknowledged.max(1);
    }

    /// The next message that the association is to take, if it may be sent now: one of session
    /// control must not overtake another, nor a segment the Initiate (RFC 5043 §6.6).
    /// `is_confirmed`: whether the peer's SCTP has acknowledged all that the session has sent.
    pub(super) fn next_unsent(&mut self, is_confirmed: impl FnOnce() -> bool) -> Option<(Contents, Vec<u8>)> {
        if self.unsent.is_empty() && self.finishes && !self.sent_last && self.ended.is_none() {
            let mut message = [0; MAX_MESSAGE_LEN];
            let len = SessionMessage::TERMINATE.emit(&mut message).unwrap_or(0);
            self.push(Contents::SessionControl, message.get(..len).unwrap_or_default());
        }
        let (contents, _) = self.unsent.front()?;
        // A segment may overtake an Accept only: before it, the Initiate is on its way.
        let keeps_order = *contents == Contents::SessionControl || !self.accepted;
        if keeps_order && self.unconfirmed {
            self.unconfirmed = !is_confirmed();
        }
        let waits = keeps_order && self.unconfirmed;
        if waits { None } else { self.unsent.pop_front() }
    }

    /// The association has taken the message.
    pub(super) fn taken(&mut self, contents: Contents, len: usize) {
        self.unconfirmed |= contents == Contents::SessionControl;
        self.unsent_bytes -= len;
        self.unacknowledged += usize::from(self.finishes);
        if self.is_blocked && self.unsent_bytes < MOST_UNSENT / 2 {
            self.is_blocked = false;
            self.notify();
        }
    }

    /// Notes what the peer's SCTP has not acknowledged, if somebody waits for that.
    pub(super) fn note_unacknowledged(&mut self, count: impl FnOnce() -> usize) {
        if self.finishes {
            self.unacknowledged = count();
        }
    }

    /// The device has no stream for the session any more.
    pub(super) fn close(&mut self) {
        self.is_open = false;
        if !self.established {
            // It has sent nothing.
            return self.end(Errno::CONNABORTED);
        }
        self.drop_input();
        self.finish();
    }

    /// Whether there is something to be sent.
    pub(super) fn owes(&self) -> bool {
        self.ended.is_none() && (!self.unsent.is_empty() || self.finishes && !self.sent_last)
    }

    /// 0 if the peer's SCTP has all.
    pub(super) fn in_flight(&self) -> usize {
        match self.ended {
            Some(_) => 0,
            None => self.unsent_bytes + self.unacknowledged + usize::from(self.owes()),
        }
    }

    fn end_both(&mut self) {
        (self.finishes, self.sent_last) = (true, true);
        self.stop_reading();
    }

    /// What has come and was not read is dropped: no legal sequence has it.
    fn stop_reading(&mut self) {
        self.received_last = true;
        self.incoming = Incoming::new(0, 0);
    }

    /// Takes a message of the peer, with its DDP-SSN. Returns whether the next message can be read,
    /// or one can be placed early, which could not before.
    ///
    /// # Errors
    /// `EPROTO`: no legal sequence has it.
    pub(super) fn arrived(&mut self, contents: Contents, message: &[u8]) -> Result<bool, Errno> {
        let is_cancelled = self.received_last && !self.saw_last;
        if self.fault.is_some() || is_cancelled {
            return Ok(false);
        }
        if self.received_last {
            return Err(Errno::PROTO);
        }
        // An empty one is neither a segment nor session control.
        if message.len() <= SSN_LEN || message.len() > LONGEST_MESSAGE + SSN_LEN {
            tracing::debug!("a DDP session: a message of {} bytes", message.len());
            return Err(Errno::PROTO);
        }
        // Its sender cannot have the Accept that it needs (RFC 5043 §6.2).
        if contents == Contents::Segment && self.by_peer && !self.accepted {
            return Err(Errno::PROTO);
        }
        let (could, had_early) = (self.incoming.front().is_some(), self.has_early());
        let inserted = self.incoming.insert(contents, message);
        inserted.map_err(|error| {
            tracing::debug!("a DDP session: {error}");
            Errno::PROTO
        })?;
        // The peer has received what it answers; it may send a Terminate at any time.
        let is_answer = message.get(SSN_LEN..).and_then(function) != Some(Function::Terminate);
        self.unconfirmed &= contents == Contents::SessionControl && !is_answer;
        if !self.is_open {
            self.drop_input();
            return Ok(false);
        }
        Ok(!could && self.incoming.front().is_some() || !had_early && self.has_early())
    }

    fn has_early(&self) -> bool {
        self.full_operation && self.incoming.has_early()
    }

    /// The next segment that came before its turn, each only once.
    pub(super) fn next_early(&mut self) -> Option<(Ssn, Vec<u8>)> {
        if !self.has_early() {
            return None;
        }
        let (ssn, segment) = self.incoming.next_early()?;
        Some((ssn, segment.to_vec()))
    }

    /// The bytes of a segment after the first `kept` ones were placed.
    pub(super) fn note_placed(&mut self, ssn: Ssn, kept: usize) {
        self.incoming.note_placed(ssn, kept);
    }

    /// Reads and drops what has come.
    fn drop_input(&mut self) {
        while let Some(message) = self.incoming.take() {
            self.note_read(&message);
        }
    }

    fn note_read(&mut self, message: &Message) {
        if message.contents == Contents::Segment {
            return;
        }
        match function(&message.data) {
            Some(Function::Accept) => self.accepted = true,
            Some(last @ (Function::Terminate | Function::Reject)) => {
                self.saw_last = true;
                match self.accepted && last == Function::Terminate {
                    true => self.stop_reading(),
                    false => self.end_both(),
                }
            }
            Some(Function::Initiate) | None => {}
        }
    }

    /// Whether a message (true) or the end (false) can be read.
    pub(super) fn peek(&self) -> Result<bool, StreamError> {
        if let Some(errno) = self.fault {
            return Err(StreamError::Closed(errno));
        }
        match self.incoming.front() {
            // The passive end submitted it before its Accept (RFC 5043 §6.2).
            Some(front) if front.contents == Contents::Segment && !self.accepted => {
                Err(StreamError::Closed(Errno::PROTO))
            }
            // A segment that came before full operation waits for it.
            Some(front) if front.contents == Contents::Segment && !self.full_operation => {
                Err(StreamError::WouldBlock)
            }
            Some(front) if front.contents == Contents::SessionControl && self.full_operation => {
                match function(&front.data) {
                    Some(Function::Terminate) => Ok(false),
                    _ => Err(StreamError::Closed(Errno::PROTO)),
                }
            }
            Some(_) => Ok(true),
            None if self.received_last => Ok(false),
            None => Err(self.ended.map_or(StreamError::WouldBlock, StreamError::Closed)),
        }
    }

    /// Reads the next message; `None`: the peer's last one.
    pub(super) fn read(&mut self) -> Result<Option<Message>, StreamError> {
        let is_message = self.peek()?;
        let Some(message) = self.incoming.take() else {
            return Ok(None);
        };
        self.note_read(&message);
        Ok(is_message.then_some(message))
    }

    /// Bytes that have come and were not read.
    #[cfg(test)]
    pub(super) fn unread(&self) -> usize {
        self.incoming.bytes()
    }

    /// Bytes of memory for the messages that have come and were not read.
    pub(super) fn memory(&self) -> usize {
        self.incoming.bytes() + self.incoming.waiting() * MESSAGE_COST
    }

    /// The number of messages that have come and were not read.
    pub(super) fn unread_messages(&self) -> usize {
        self.incoming.waiting()
    }

    /// Whether reading would make room.
    pub(super) fn is_readable(&self) -> bool {
        self.incoming.front().is_some()
    }

    /// The association ended.
    pub(super) fn end(&mut self, errno: Errno) {
        self.ended.get_or_insert(errno);
        self.notify();
    }

    /// The peer did what no legal sequence has: the session ends (RFC 5043 §6.1).
    pub(super) fn refuse(&mut self, errno: Errno) {
        self.fault = Some(errno);
        self.incoming = Incoming::new(0, 0);
        self.finish();
        self.notify();
    }

    /// Whether no message of this session can come or go any more.
    pub(super) fn is_over(&self) -> bool {
        let is_read = self.received_last || self.fault.is_some();
        self.ended.is_some() || self.sent_last && self.unsent.is_empty() && is_read
    }

    /// Whether messages of the peer may still come, although it is over.
    pub(super) fn may_be_outstanding(&self) -> bool {
        self.ended.is_none() && !self.saw_last
    }

    /// Whether it only waits for the peer's last message, which a peer need not send (RFC 5043
    /// §6.2).
    pub(super) fn only_awaits_last(&self) -> bool {
        !self.is_open && !self.owes() && !self.received_last
    }

    /// Whether a new session of the peer may take its place: the peer has ended this one.
    pub(super) fn may_be_replaced(&self) -> bool {
        self.received_last || self.ended.is_some() || !self.is_open && self.sent_last
    }
}

#[cfg(test)]
mod tests;
