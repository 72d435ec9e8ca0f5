//! Framed bytes that the stream has not taken: extents of the staging buffer and of the program's
//! memory.

use crate::host::{Mapping, Piece};
use crate::memory::{BorrowHolder, EntryId};
use crate::stream::{Stream, StreamError};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Pieces of one system call: gathered payload and the bytes between, as far as the backlog goes.
const PIECES: usize = 64;

/// An extent to be sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// Bytes of the staging buffer.
    Staged { at: usize, len: usize },
    /// Bytes of the program's memory, as it was registered then.
    Memory { memory: Mapping, entry: EntryId },
    /// Bytes that were copied from there when the registration was revoked.
    Copied { at: usize, len: usize },
    /// Bytes that were inaccessible when they were copied.
    Unreachable { len: usize },
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Staged { len, .. } | Part::Copied { len, .. } | Part::Unreachable { len } => *len,
            Part::Memory { memory, .. } => memory.len(),
        }
    }

    fn skip(self, n: usize) -> Part {
        match self {
            Part::Staged { at, len } => Part::Staged {
                at: at + n,
                len: len - n,
            },
            Part::Copied { at, len } => Part::Copied {
                at: at + n,
                len: len - n,
            },
            Part::Memory { memory, entry } => Part::Memory {
                memory: memory.part(n, memory.len() - n),
                entry,
            },
            Part::Unreachable { len } => Part::Unreachable { len: len - n },
        }
    }
}

/// Parts in order.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    parts: Vec<Part>,
    /// Parts taken.
    head: usize,
    copies: Vec<u8>,
}

impl Unsent {
    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }

    #[inline]
    pub(super) fn push(&mut self, part: Part) {
        self.parts.push(part);
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.parts.truncate(len);
    }

    /// Takes over the parts of another, which holds no copies.
    pub(super) fn append(&mut self, other: &mut Unsent) {
        self.parts
            .extend_from_slice(other.parts.get(other.head..).unwrap_or_default());
        other.clear();
    }

    pub(super) fn clear(&mut self) {
        self.parts.clear();
        self.head = 0;
        self.copies = Vec::new();
    }

    /// Sends until all is taken (`true`) or the stream takes no more, counting the bytes taken.
    pub(super) fn send(
        &mut self,
        staging: &[u8],
        stream: &mut dyn Stream,
        calls: &mut u64,
        taken: &mut u64,
    ) -> Result<bool, StreamError> {
        while self.head < self.parts.len() {
            *calls += 1;
            match self.send_once(staging, stream) {
                Ok((n, offered)) => {
                    *taken += n as u64;
                    self.advance(n);
                    // In memory there may be room: what comes next cannot be read. A socket
                    // would tell of the room.
                    if n < offered && !stream.is_in_memory() {
                        return Ok(false);
                    }
                }
                Err(StreamError::WouldBlock) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.clear();
        Ok(true)
    }

    /// One system call; how many bytes it took, of how many.
    #[inline]
    fn send_once(&self, staging: &[u8], stream: &mut dyn Stream) -> Result<(usize, usize), StreamError> {
        let parts = &self.parts[self.head..];
        let staged = |at: usize, len: usize| staging.get(at..at + len).unwrap_or_default();
        // Small messages lie side by side.
        if let [Part::Staged { at, len }] = *parts {
            return Ok((stream.send_bytes(staged(at, len))?, len));
        }
        let mut pieces = [Piece::of(&[]); PIECES];
        let (mut count, mut offered) = (0, 0);
        for (piece, part) in pieces.iter_mut().zip(parts) {
            *piece = match part {
                Part::Staged { at, len } => Piece::of(staged(*at, *len)),
                Part::Memory { memory, .. } => memory.piece(),
                Part::Copied { at, len } => Piece::of(self.copies.get(*at..at + len).unwrap_or_default()),
                Part::Unreachable { .. } => break,
            };
            count += 1;
            offered += piece.len();
        }
        if count == 0 {
            return Err(StreamError::Fault);
        }
        Ok((stream.send(&pieces[..count])?, offered))
    }

    /// The address of the first byte that cannot be read at present, as far as one system call
    /// would send.
    #[cold]
    pub(super) fn first_missing(&self) -> Option<usize> {
        let parts = self.parts.iter().skip(self.head).take(PIECES);
        let mut extents = parts.filter_map(|part| match part {
            Part::Memory { memory, .. } => Some(memory),
            Part::Staged { .. } | Part::Copied { .. } | Part::Unreachable { .. } => None,
        });
        extents.find_map(Mapping::first_missing)
    }

    pub(super) fn advance(&mut self, taken: usize) {
        let mut left = taken;
        while let Some(part) = self.parts.get_mut(self.head) {
            if left < part.len() {
                *part = part.skip(left);
                return;
            }
            left -= part.len();
            self.head += 1;
        }
    }
}

/// The rest when the stream takes no more; a leaf among locks.
#[derive(Debug, Default)]
pub(super) struct SharedUnsent(Mutex<Unsent>);

impl SharedUnsent {
    pub(super) fn lock(&self) -> MutexGuard<'_, Unsent> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BorrowHolder for SharedUnsent {
    fn release(&self, revoked: EntryId) {
        let mut unsent = self.lock();
        let Unsent { parts, head, copies } = &mut *unsent;
        for part in parts.iter_mut().skip(*head) {
            if let Part::Memory { memory, entry } = *part
                && entry == revoked
            {
                let (at, len) = (copies.len(), memory.len());
                *part = match memory.append_to(copies) {
                    Ok(()) => Part::Copied { at, len },
                    Err(_) => Part::Unreachable { len },
                };
            }
        }
    }
}
