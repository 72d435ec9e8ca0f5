//! The sender of a stream, which lends large pieces.

use super::super::direction::Direction;
use super::super::ring::Sender;
use super::lending::{Lending, Lent};
use super::words::{BUFFER, BUFFERED, DECLINED, FETCHES, MOST, WITHDRAWN, WORTH_LENDING, Words, pair};
use crate::handshakes;
use crate::host::{Piece, SharedMemory, Unreachable};
use crate::stream::{Stable, StreamError};
use rustix::process::Pid;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Lends pieces of one direction.
#[derive(Debug)]
pub(in super::super) struct Lender {
    lending: Arc<Lending>,
    /// Bytes of the stream that were sent or lent.
    published: u64,
    /// The receiver has all pieces.
    is_idle: bool,
}

impl Lender {
    /// `fetcher`: the receiver's process.
    pub(in super::super) fn new(memory: &Arc<SharedMemory>, direction: Direction, fetcher: Pid) -> Lender {
        let words = Words::new(memory, direction);
        Lender {
            lending: Arc::new(Lending::new(words, fetcher)),
            published: 0,
            is_idle: true,
        }
    }

    pub(in super::super) fn lending(&self) -> &Arc<Lending> {
        &self.lending
    }

    /// Whether the next bytes may go into the ring without another thought.
    #[inline]
    pub(in super::super) fn is_idle(&self) -> bool {
        self.is_idle
    }

    /// Notes bytes that went into the ring while this was idle.
    #[inline]
    pub(in super::super) fn note_sent(&mut self, bytes: usize) {
        self.published += bytes as u64;
    }

    /// As [`Sender::send`]. The pieces marked in `stable` may be lent.
    pub(in super::super) fn send(
        &mut self,
        ring: &mut Sender,
        pieces: &[Piece<'_>],
        stable: Stable,
    ) -> Result<usize, StreamError> {
        let lending = self.lending.clone();
        let mut lent = lending.lent();
        if self.is_idle {
            (lent.published, lent.taken) = (self.published, self.published);
        }
        let offer = Offer {
            pieces,
            stable,
            start: lent.taken,
        };
        let sent = offer.send(&lending, &mut lent, ring);
        self.published = lent.published;
        self.is_idle = lent.pieces.is_empty();
        sent
    }
}

/// What one call offers.
#[derive(Debug, Clone, Copy)]
struct Offer<'a> {
    pieces: &'a [Piece<'a>],
    stable: Stable,
    /// Where in the stream the pieces begin.
    start: u64,
}

impl<'a> Offer<'a> {
    /// What of the pieces is behind `position` of the stream, with their numbers.
    fn behind(self, position: u64) -> impl Iterator<Item = (usize, Piece<'a>)> {
        let mut skip = (position - self.start) as usize;
        self.pieces.iter().enumerate().filter_map(move |(n, piece)| {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            let rest = piece.skip(skipped);
            (!rest.is_empty()).then_some((n, rest))
        })
    }

    fn send(self, lending: &Lending, lent: &mut Lent, ring: &mut Sender) -> Result<usize, StreamError> {
        let words = &lending.words;
        lent.settle(words).map_err(StreamError::Closed)?;
        let mut is_missing = self.fill_buffer(words, lent);
        if !is_missing {
            self.publish(lending, lent, ring)?;
        }
        if lent.pieces.is_empty() {
            lent.taken = lent.published;
        } else {
            handshakes::want_room(words.wanted());
            lent.settle(words).map_err(StreamError::Closed)?;
            is_missing |= self.fill_buffer(words, lent);
        }
        let offered: usize = self.pieces.iter().map(Piece::len).sum();
        match (lent.taken - self.start) as usize {
            0 if is_missing => Err(StreamError::Fault),
            0 if offered > 0 => Err(StreamError::WouldBlock),
            taken => Ok(taken),
        }
    }

    /// Passes on bytes of the first piece that is lent, if the receiver cannot have it otherwise;
    /// whether they are not there.
    fn fill_buffer(self, words: &Words, lent: &mut Lent) -> bool {
        let Some(first) = lent.pieces.front().copied() else {
            return false;
        };
        let declined = words.word(DECLINED).load(Ordering::Acquire);
        let is_declined = declined as u32 == (lent.first + 1) as u32;
        let withdrawn = words.word(WITHDRAWN).load(Ordering::Relaxed);
        let fetched = lent.taken.saturating_sub(first.before) as u32;
        let is_wanted = is_declined || withdrawn > lent.first;
        if !is_wanted || lent.taken < first.before || fetched < lent.buffered || fetched == first.len {
            return false;
        }
        lent.declined |= is_declined;
        let mut left = (BUFFER as u32).min(first.len - fetched);
        let mut at = fetched;
        'pieces: for (_, mut piece) in self.behind(lent.taken) {
            while left > 0 && !piece.is_empty() {
                let into = words.buffer(at, piece.len().min(left as usize));
                if let Err(Unreachable) = into.try_fill_from(&piece) {
                    break 'pieces;
                }
                piece = piece.skip(into.len());
                at += into.len() as u32;
                left -= into.len() as u32;
            }
        }
        let is_missing = at == fetched;
        if !is_missing {
            lent.buffered = at;
            words
                .word(BUFFERED)
                .store(pair(lent.first, at), Ordering::Release);
        }
        is_missing
    }

    /// Sends and lends what is not published yet.
    fn publish(self, lending: &Lending, lent: &mut Lent, ring: &mut Sender) -> Result<(), StreamError> {
        let lends = !lent.declined && lending.words.word(FETCHES).load(Ordering::Relaxed) != 0;
        // Pieces that go through the ring.
        let mut pending = Vec::with_capacity(self.pieces.len());
        for (n, piece) in self.behind(lent.published) {
            let is_lent = lends
                && self.stable.contains(n)
                && piece.len() >= WORTH_LENDING
                && lent.pieces.len() + 1 < MOST;
            if !is_lent {
                pending.push(piece);
                continue;
            }
            if !send_all(lent, ring, &pending)? {
                return Ok(());
            }
            pending.clear();
            lending.lend(lent, ring.position(), piece.first(u32::MAX as usize));
        }
        send_all(lent, ring, &pending).map(|_| ())
    }
}

/// Sends through the ring; whether there was room for all.
fn send_all(lent: &mut Lent, ring: &mut Sender, pieces: &[Piece<'_>]) -> Result<bool, StreamError> {
    let offered: usize = pieces.iter().map(Piece::len).sum();
    if offered == 0 {
        return Ok(true);
    }
    let sent = match ring.send(pieces) {
        Ok(sent) => sent,
        Err(StreamError::WouldBlock) => 0,
        // It shows again when the bytes before were taken.
        Err(StreamError::Fault) if lent.published > lent.taken => 0,
        Err(error) => return Err(error),
    };
    lent.published += sent as u64;
    Ok(sent == offered)
}
