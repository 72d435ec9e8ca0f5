//! The words of shared memory by which pieces are lent.

use super::super::direction::Direction;
use super::super::layout::{BUFFERS, LENT_WORDS};
use crate::host::{Mapping, SharedMemory};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// The sender's words: how many pieces it has lent; those before this number it has withdrawn; of
/// which piece how many bytes have passed through the buffer; and whether it waits.
pub(super) const COUNT: usize = 0;
pub(super) const WITHDRAWN: usize = 8;
pub(super) const BUFFERED: usize = 16;
pub(super) const WANTED: usize = 24;
/// The receiver's words: of which piece it has how many bytes; the piece that it declines, counted
/// from one; the guard of its copies; and whether it fetches pieces at all.
pub(super) const FETCHED: usize = 64;
pub(super) const DECLINED: usize = 72;
pub(super) const GUARD: usize = 80;
pub(super) const FETCHES: usize = 88;
/// Then the pieces.
pub(super) const PIECES: usize = 128;
/// Pieces that are lent at the same time.
pub(super) const MOST: usize = 32;
/// In a piece: its position in the ring, its address in the sender's process, its length.
const PIECE: usize = 24;
pub(super) const ADDRESS: usize = 8;
pub(super) const LENGTH: usize = 16;
const _: () = assert!(PIECES + MOST * PIECE <= LENT_WORDS.len);
/// Bytes of the buffer of a direction.
pub(super) const BUFFER: usize = BUFFERS.len;

/// A piece of at least this length is lent: below, a system call takes longer than the copies of
/// the ring, which two processors share.
pub(crate) const WORTH_LENDING: usize = 16 << 10;

/// The words of one direction, and its buffer.
#[derive(Debug, Clone)]
pub(super) struct Words {
    pub(super) memory: Arc<SharedMemory>,
    pub(super) at: usize,
    buffer: usize,
}

impl Words {
    pub(super) fn new(memory: &Arc<SharedMemory>, direction: Direction) -> Words {
        Words {
            memory: memory.clone(),
            at: LENT_WORDS.of(direction),
            buffer: BUFFERS.of(direction),
        }
    }

    #[inline]
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        self.memory.word64(self.at + offset)
    }

    /// Set while the sender waits until the receiver has more.
    pub(super) fn wanted(&self) -> &AtomicU32 {
        self.memory.word(self.at + WANTED)
    }

    /// A word of piece `number`.
    #[inline]
    pub(super) fn of_piece(&self, number: u64, offset: usize) -> &AtomicU64 {
        self.word(PIECES + (number as usize % MOST) * PIECE + offset)
    }

    /// The place in the buffer of the bytes of a piece from `offset` on, at most `most`, as far as
    /// they lie side by side.
    pub(super) fn buffer(&self, offset: u32, most: usize) -> Mapping {
        let at = offset as usize % BUFFER;
        self.memory.part(self.buffer + at, most.min(BUFFER - at))
    }
}

/// The low half of a piece's number, with a number of its bytes.
#[inline]
pub(super) fn pair(number: u64, bytes: u32) -> u64 {
    number << 32 | u64::from(bytes)
}
