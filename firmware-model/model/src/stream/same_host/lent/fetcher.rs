//! The receiver of a stream, which fetches pieces that the sender lends.

use super::super::direction::Direction;
use super::super::neighbour::process::PeerProcess;
use super::super::neighbour::thread_number;
use super::words::{
    ADDRESS, BUFFER, BUFFERED, COUNT, DECLINED, FETCHED, FETCHES, GUARD, LENGTH, WITHDRAWN, Words, pair,
};
use crate::handshakes;
use crate::host::revocable::{self, Condition, NotCopied};
use crate::host::{PieceMut, SharedMemory, Unreachable};
use crate::memory::OwnGuard;
use crate::stream::StreamError;
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A sender that has lent many pieces is told whenever so many more were fetched.
const TOLD_AFTER: u64 = 4;

/// The piece that comes next.
#[derive(Debug, Clone, Copy)]
struct Next {
    /// Where in the ring.
    position: u64,
    address: u64,
    len: u32,
}

/// Fetches the pieces of one direction.
#[derive(Debug)]
pub(in super::super) struct Fetcher {
    words: Words,
    process: Arc<PeerProcess>,
    /// The number of the piece that comes next, and how many bytes of it are there.
    number: u64,
    fetched: u32,
    next: Option<Next>,
    /// The next piece and those behind it, as far as [`ahead`](Self::ahead) showed them.
    ahead: Vec<Next>,
    declined: bool,
    /// The sender was told that it has to pass the piece through the buffer.
    asked: bool,
    /// Counts accesses.
    turn: u32,
    /// This process.
    owner: Pid,
}

impl Fetcher {
    pub(in super::super) fn new(
        memory: &Arc<SharedMemory>,
        direction: Direction,
        process: &Arc<PeerProcess>,
    ) -> Fetcher {
        let words = Words::new(memory, direction);
        words.word(FETCHES).store(1, Ordering::Release);
        Fetcher {
            words,
            process: process.clone(),
            number: 0,
            fetched: 0,
            next: None,
            ahead: Vec::new(),
            declined: false,
            asked: false,
            turn: 0,
            owner: getpid(),
        }
    }

    /// Where in the ring the next piece belongs, as far as one is known. To be asked behind a look
    /// at the ring's tail: the sender lends a piece before it sends what comes behind.
    #[inline]
    pub(in super::super) fn position(&mut self) -> Option<u64> {
        if self.next.is_none() && self.words.word(COUNT).load(Ordering::Acquire) != self.number {
            self.next = Some(self.piece(self.number));
        }
        self.next.map(|next| next.position)
    }

    /// A piece that the sender has lent.
    #[inline]
    fn piece(&self, number: u64) -> Next {
        let word = |offset| self.words.of_piece(number, offset).load(Ordering::Relaxed);
        Next {
            position: word(0),
            address: word(ADDRESS),
            // A piece of no bytes would never end.
            len: (word(LENGTH) as u32).max(1),
        }
    }

    /// The piece `n` places behind the next one: its length, and where in the ring the piece before
    /// it and it itself belong. All pieces from the next one on must lie side by side in the
    /// sender's memory, and none be received in part. To be asked for 0, 1 and so on.
    pub(in super::super) fn ahead(&mut self, n: usize) -> Option<(usize, u64, u64)> {
        let (piece, before) = match n {
            0 => {
                let is_whole = self.fetched == 0 && !self.needs_buffer();
                let next = self.next.filter(|_| is_whole)?;
                self.ahead.clear();
                (next, next)
            }
            _ => {
                let number = self.number + n as u64;
                let before = *self.ahead.get(n - 1).filter(|_| n == self.ahead.len())?;
                if self.words.word(COUNT).load(Ordering::Acquire) <= number {
                    return None;
                }
                (self.piece(number), before)
            }
        };
        if n > 0 && before.address.checked_add(before.len.into()) != Some(piece.address) {
            return None;
        }
        self.ahead.push(piece);
        Some((piece.len as usize, before.position, piece.position))
    }

    /// Receives this number of pieces that [`ahead`](Self::ahead) showed, by one copy that fills
    /// `into`; returns where in the ring the last one belonged, and whether the sender is to be
    /// told. None if that is not possible: nothing was received.
    pub(in super::super) fn receive_ahead(
        &mut self,
        pieces: usize,
        into: PieceMut<'_>,
    ) -> Option<(u64, bool)> {
        let shown = self.ahead.get(..pieces)?;
        let (first, last) = (*shown.first()?, *shown.last()?);
        let len: u64 = shown.iter().map(|piece| u64::from(piece.len)).sum();
        if len != into.len() as u64 || self.next.is_none() || self.fetched > 0 || self.needs_buffer() {
            return None;
        }
        self.fetch(first, into).ok()?;
        self.number += pieces as u64;
        self.next = None;
        Some((last.position, self.tell(true)))
    }

    /// Whether nothing of the next piece was received yet.
    pub(in super::super) fn is_at_front(&self) -> bool {
        self.fetched == 0
    }

    /// How many bytes of the next piece can be received now.
    pub(in super::super) fn available(&self) -> usize {
        let Some(next) = self.next else { return 0 };
        let left = match self.needs_buffer() {
            false => next.len - self.fetched,
            true if !self.asked => 1,
            true => self.buffered().unwrap_or(1),
        };
        left as usize
    }

    /// Whether the sender passes the next piece through the buffer.
    fn needs_buffer(&self) -> bool {
        self.declined || self.words.word(WITHDRAWN).load(Ordering::Acquire) > self.number
    }

    /// Bytes of the next piece that are in the buffer; `None`: what the sender wrote cannot be.
    fn buffered(&self) -> Option<u32> {
        let word = self.words.word(BUFFERED).load(Ordering::Acquire);
        if (word >> 32) as u32 != self.number as u32 {
            return Some(0);
        }
        let end = word as u32;
        let fits = end <= self.next.map_or(0, |next| next.len);
        // The word may be of a time before the last bytes were fetched without the buffer.
        let n = end.saturating_sub(self.fetched);
        (fits && n as usize <= BUFFER).then_some(n)
    }

    /// Receives bytes of the next piece, as many as there is room for; returns how many, and
    /// whether the sender is to be told. None: the sender has to act.
    pub(in super::super) fn receive(
        &mut self,
        into: &mut PieceMut<'_>,
    ) -> Result<(usize, bool), StreamError> {
        let Some(next) = self.next else {
            return Ok((0, false));
        };
        let n = into.len().min((next.len - self.fetched) as usize);
        if n > 0 && !self.needs_buffer() {
            match self.fetch(next, into.first(n)) {
                Ok(()) => return Ok((n, self.note(n))),
                // Withdrawn: it may be in the buffer already.
                Err(NotCopied::Refused) => {}
                Err(NotCopied::Interrupted | NotCopied::Failed(_)) => self.decline(),
            }
        }
        let ready = self.buffered().ok_or(StreamError::Closed(Errno::PROTO))?;
        let n = n.min(ready as usize);
        if n == 0 {
            self.asked = true;
            return Ok((0, self.tell(true)));
        }
        let mut at = 0;
        while at < n {
            let from = self.words.buffer(self.fetched + at as u32, n - at);
            from.try_copy_to(&mut into.rest(at))
                .map_err(|Unreachable| StreamError::Fault)?;
            at += from.len();
        }
        Ok((n, self.note(n)))
    }

    /// Copies from the sender's memory; nothing if the sender has withdrawn the piece.
    fn fetch(&mut self, next: Next, mut into: PieceMut<'_>) -> Result<(), NotCopied> {
        let withdrawn = self.words.word(WITHDRAWN);
        let value = withdrawn.load(Ordering::Acquire);
        if value > self.number {
            return Err(NotCopied::Refused);
        }
        let unchanged = Condition {
            word: withdrawn,
            value,
        };
        self.turn = self.turn.wrapping_add(1);
        let thread = thread_number(self.owner);
        let _guard = OwnGuard::set(self.words.word(GUARD), self.turn, thread);
        let address = next.address.wrapping_add(self.fetched.into());
        let (expected, proof) = self.process.proof();
        loop {
            let (number, into) = (self.process.number, into.rest(0));
            match revocable::read_proven_if(unchanged, number, address, into, proof) {
                // The bytes are of the program that lent the piece.
                Ok(found) if found == expected => return Ok(()),
                Ok(_) => return Err(NotCopied::Failed(Errno::SRCH)),
                Err(NotCopied::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The sender has to pass the piece through the buffer.
    fn decline(&mut self) {
        self.declined = true;
        let declined = self.words.word(DECLINED);
        declined.store(self.number + 1, Ordering::Release);
    }

    /// Notes `n` bytes; whether the sender waits for that.
    fn note(&mut self, n: usize) -> bool {
        self.fetched += n as u32;
        if self.next.is_some_and(|next| self.fetched == next.len) {
            self.number += 1;
            (self.fetched, self.next) = (0, None);
            (self.declined, self.asked) = (false, false);
        }
        // Not for each piece, unless it is the last.
        let is_last = self.words.word(COUNT).load(Ordering::Relaxed) == self.number;
        let is_due = self.fetched == 0 && (is_last || self.number.is_multiple_of(TOLD_AFTER));
        let is_due = is_due || self.needs_buffer();
        self.tell(is_due)
    }

    /// Publishes what is there; whether the sender waits, and is to be told.
    fn tell(&self, is_due: bool) -> bool {
        let progress = pair(self.number, self.fetched);
        handshakes::give_room(self.words.word(FETCHED), progress, self.words.wanted(), || is_due)
    }
}
