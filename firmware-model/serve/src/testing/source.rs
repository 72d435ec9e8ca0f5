//! The source of a fuzzer's choices.

use super::{BASE, LEN, PAGE};

/// The unread bytes of the fuzzer; zeros follow them.
pub(super) struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Source<'a> {
        Source(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    pub(super) fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A mostly small number, as lengths, indices and numbers of objects are.
    pub(super) fn number(&mut self) -> u32 {
        match self.byte() {
            0xff => self.word(),
            0xfe => u32::MAX,
            0xfd => u32::from(self.byte()) << 12,
            small => small.into(),
        }
    }

    /// An address, mostly in the memory.
    pub(super) fn address(&mut self) -> u64 {
        match self.byte() {
            0xff => u64::from(self.word()) << 32 | u64::from(self.word()),
            0xfe => BASE + LEN - 8,
            page => BASE + u64::from(page) * PAGE + u64::from(self.byte()) * 8,
        }
    }
}
