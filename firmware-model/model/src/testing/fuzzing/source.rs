//! The source of a fuzzer's choices.

/// Pages of the host's memory that addresses select.
const PAGES: u64 = 2000;
const FIRST_PAGE: u64 = 0x7700_0000_0000;

/// The rest of the fuzzer's bytes, then zeroes.
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

    /// Mostly a small number, as handles and sizes are.
    pub(super) fn argument(&mut self) -> u32 {
        match self.byte() {
            0xff => self.word(),
            0xfe => u32::MAX,
            small => small.into(),
        }
    }

    /// Mostly an address inside the host's memory.
    pub(super) fn address(&mut self) -> u64 {
        match self.byte() {
            0xff => u64::from(self.word()) << 32 | u64::from(self.word()),
            0xfe => FIRST_PAGE + (64 << 20) - 8,
            byte => FIRST_PAGE + (u64::from(byte) << 3 | u64::from(self.byte()) & 7) % PAGES * 4096,
        }
    }
}
