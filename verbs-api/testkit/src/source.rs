//! The choices of a fuzzer.

/// The unread bytes of a fuzzer; zeros follow them.
#[derive(Debug)]
pub struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    /// All of `bytes` are unread.
    pub fn new(bytes: &'a [u8]) -> Source<'a> {
        Source(bytes)
    }

    /// Whether only zeros follow.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `N` bytes.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    /// The next four bytes, the least significant one first.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    /// A mostly small number, as lengths, handles and numbers of objects are.
    pub fn number(&mut self) -> u32 {
        match self.byte() {
            0xff => self.word(),
            0xfe => u32::MAX,
            0xfd => u32::from(self.byte()) << 12,
            small => small.into(),
        }
    }
}
