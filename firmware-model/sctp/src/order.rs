//! The messages of one direction of a DDP stream, in the order of their DDP-SSN.
//!
//! SCTP hands up unordered messages as they come. A segment may be placed at once, but it is
//! delivered only after all that were submitted before it (RFC 5043 §5.2.1, RFC 5041 §5.3).

use std::collections::{BTreeSet, HashMap};

use urnic_wire::sctp::chunk::{Contents, MAX_IN_FLIGHT, Ssn};

/// A message of a DDP stream, without its DDP-SSN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// A segment, or a message that begins or ends a session.
    pub contents: Contents,
    /// Its bytes.
    pub data: Vec<u8>,
    /// Bytes after these that were placed before the message's turn
    /// ([`Incoming::note_placed`]).
    pub placed: usize,
}

impl Message {
    /// A message of which nothing was placed.
    pub fn new(contents: Contents, data: Vec<u8>) -> Message {
        let placed = 0;
        Message {
            contents,
            data,
            placed,
        }
    }
}

/// A message whose DDP-SSN no legal sequence has (RFC 5043 §10): the session must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OutOfOrder {
    /// The message has no DDP-SSN.
    #[error("a message without a DDP-SSN")]
    Missing,
    /// A message with this number has come before, or too many are missing before it.
    #[error("a message with DDP-SSN {found}, while {next} is due")]
    Number {
        /// The number of the message.
        found: u16,
        /// The number that is due.
        next: u16,
    },
    /// Too many bytes wait for a message before them.
    #[error("too many bytes wait for an earlier message")]
    Room,
}

/// What has come of one direction, and was not delivered.
#[derive(Debug)]
pub struct Incoming {
    next: Ssn,
    /// By their numbers, of which fewer than half may wait at once.
    waiting: HashMap<u16, Message>,
    /// The numbers of segments that came before their turn, and that [`Incoming::next_early`] has
    /// not given.
    early: BTreeSet<u16>,
    /// Most messages that may wait.
    most: usize,
    /// Most bytes that may wait, and how many more still may.
    most_bytes: usize,
    room: usize,
}

impl Incoming {
    /// The beginning of a session, of which at most `most` messages with `bytes` bytes may wait,
    /// for one before them or to be taken.
    pub fn new(most: usize, bytes: usize) -> Incoming {
        Incoming {
            next: Ssn::default(),
            waiting: HashMap::new(),
            early: BTreeSet::new(),
            most: most.min(MAX_IN_FLIGHT.into()),
            most_bytes: bytes,
            room: bytes,
        }
    }

    /// Takes a message with its DDP-SSN in front. Returns whether it came before its turn.
    ///
    /// # Errors
    /// [`OutOfOrder`]; nothing is kept then.
    pub fn insert(&mut self, contents: Contents, message: &[u8]) -> Result<bool, OutOfOrder> {
        let (ssn, data) = Ssn::split(message).ok_or(OutOfOrder::Missing)?;
        let wrong = OutOfOrder::Number {
            found: ssn.0,
            next: self.next.0,
        };
        let ahead = self.next.until(ssn).ok_or(wrong)?;
        if usize::from(ahead) >= self.most || self.waiting.contains_key(&ssn.0) {
            return Err(wrong);
        }
        self.room = self.room.checked_sub(data.len()).ok_or(OutOfOrder::Room)?;
        let data = data.to_vec();
        self.waiting.insert(ssn.0, Message::new(contents, data));
        if ahead > 0 && contents == Contents::Segment {
            self.early.insert(ssn.0);
        }
        Ok(ahead > 0)
    }

    /// Whether [`Incoming::next_early`] gives a segment.
    pub fn has_early(&self) -> bool {
        !self.early.is_empty()
    }

    /// The next segment that came before its turn, each only once: it may be placed at once.
    pub fn next_early(&mut self) -> Option<(Ssn, &[u8])> {
        let number = self.early.pop_first()?;
        let message = self.waiting.get(&number)?;
        Some((Ssn(number), &message.data))
    }

    /// All bytes of a segment after the first `kept` ones were placed: they wait no longer. Nothing
    /// is changed if the segment does not wait any more.
    pub fn note_placed(&mut self, ssn: Ssn, kept: usize) {
        if let Some(message) = self.waiting.get_mut(&ssn.0) {
            let placed = message.data.len().saturating_sub(kept);
            message.data.truncate(kept);
            message.data.shrink_to_fit();
            message.placed += placed;
            self.room += placed;
        }
    }

    /// The next message, if it has come; [`Incoming::take`] removes it.
    pub fn front(&self) -> Option<&Message> {
        self.waiting.get(&self.next.0)
    }

    /// The next message, if it has come.
    pub fn take(&mut self) -> Option<Message> {
        let message = self.waiting.remove(&self.next.0)?;
        self.early.remove(&self.next.0);
        self.next = self.next.next();
        self.room += message.data.len();
        Some(message)
    }

    /// Bytes of the messages that wait for one before them, or to be taken, without those that are
    /// placed.
    pub fn bytes(&self) -> usize {
        self.most_bytes - self.room
    }

    /// The number of messages that wait for one before them, or to be taken.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

/// The numbers of one direction that is sent.
#[derive(Debug, Default)]
pub struct Outgoing {
    next: Ssn,
}

impl Outgoing {
    /// A message with the next DDP-SSN in front.
    pub fn number(&self, message: &[u8]) -> Vec<u8> {
        [&self.next.to_bytes()[..], message].concat()
    }

    /// The message with that number was sent: the numbers of a session have no gap (RFC 5043 §6).
    pub fn advance(&mut self) {
        self.next = self.next.next();
    }
}
