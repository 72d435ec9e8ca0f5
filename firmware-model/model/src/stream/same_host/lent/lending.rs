//! What a sender has lent, and how it is taken back.

use super::words::{ADDRESS, COUNT, FETCHED, GUARD, LENGTH, WITHDRAWN, Words};
use crate::host::Piece;
use crate::memory::Guard;
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A piece that is lent.
#[derive(Debug, Clone, Copy)]
pub(super) struct LentPiece {
    /// Bytes of the stream before it.
    pub(super) before: u64,
    pub(super) len: u32,
}

/// What a sender has lent.
#[derive(Debug, Default)]
pub(super) struct Lent {
    /// The pieces that the receiver does not have yet, and the number of the first of them.
    pub(super) pieces: VecDeque<LentPiece>,
    pub(super) first: u64,
    /// Bytes of the stream that were sent or lent, and those of them that count as taken.
    pub(super) published: u64,
    pub(super) taken: u64,
    /// Bytes of the first piece that were put into the buffer.
    pub(super) buffered: u32,
    /// The receiver has declined a piece: it would decline others.
    pub(super) declined: bool,
}

impl Lent {
    /// Notes what the receiver has fetched.
    ///
    /// # Errors
    /// What it wrote cannot be.
    pub(super) fn settle(&mut self, words: &Words) -> Result<(), Errno> {
        let fetched = words.word(FETCHED).load(Ordering::Acquire);
        let (number, bytes) = ((fetched >> 32) as u32, fetched as u32);
        let done = number.wrapping_sub(self.first as u32) as usize;
        if done > self.pieces.len() {
            return Err(Errno::PROTO);
        }
        if done > 0 {
            self.pieces.drain(..done);
            self.first += done as u64;
            self.buffered = 0;
        }
        let taken = match self.pieces.front() {
            Some(piece) if bytes <= piece.len => piece.before + u64::from(bytes),
            None if bytes == 0 => self.published,
            _ => return Err(Errno::PROTO),
        };
        if taken < self.taken {
            return Err(Errno::PROTO);
        }
        self.taken = taken;
        Ok(())
    }
}

/// The pieces that a connection has lent, for whoever must take them back.
#[derive(Debug)]
pub struct Lending {
    pub(super) words: Words,
    lent: Mutex<Lent>,
    /// Pieces lent so far.
    count: AtomicU64,
    guard: Guard,
    /// A forked child has a copy, which is not its own.
    owner: Pid,
}

impl Lending {
    pub(super) fn new(words: Words, fetcher: Pid) -> Lending {
        Lending {
            guard: Guard::new(&words.memory, words.at + GUARD, fetcher),
            words,
            lent: Mutex::default(),
            count: AtomicU64::new(0),
            owner: getpid(),
        }
    }

    pub(super) fn lent(&self) -> MutexGuard<'_, Lent> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends a piece that belongs at `position` of the ring.
    pub(super) fn lend(&self, lent: &mut Lent, position: u64, piece: Piece<'_>) {
        let number = lent.first + lent.pieces.len() as u64;
        let of_piece = |offset| self.words.of_piece(number, offset);
        of_piece(0).store(position, Ordering::Relaxed);
        of_piece(ADDRESS).store(piece.address(), Ordering::Relaxed);
        of_piece(LENGTH).store(piece.len() as u64, Ordering::Relaxed);
        // Before the receiver can have it: who withdraws must not miss it.
        self.count.store(number + 1, Ordering::SeqCst);
        self.words.word(COUNT).store(number + 1, Ordering::Release);
        lent.pieces.push_back(LentPiece {
            before: lent.published,
            len: piece.len() as u32,
        });
        lent.published += piece.len() as u64;
    }

    /// How many bytes of the stream count as taken since a piece was lent for the first time: the
    /// receiver may have fetched pieces since the last call of the stream.
    pub(crate) fn taken(&self) -> u64 {
        let mut lent = self.lent();
        if !lent.pieces.is_empty() {
            let _ = lent.settle(&self.words);
        }
        lent.taken
    }

    /// Takes all pieces back. On return, the receiver does not read them any more.
    pub(crate) fn withdraw(&self) {
        if getpid() != self.owner {
            return;
        }
        let count = self.count.load(Ordering::SeqCst);
        let withdrawn = self.words.word(WITHDRAWN);
        if withdrawn.swap(count, Ordering::SeqCst) != count {
            self.guard.wait();
        }
    }
}
