//! Words that atomic operations change.

use super::fault::access::{self, Unreachable};

/// An aligned 64-bit word of registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Word64(*mut u64);

impl Word64 {
    /// A word at `word`; `None` if the pointer is not aligned.
    pub(super) fn new(word: *mut u64) -> Option<Word64> {
        word.is_aligned().then_some(Word64(word))
    }

    /// Replaces the word by the result of `update` in one atomic step and returns the old value.
    /// `update` may run more than once.
    ///
    /// # Errors
    /// The word is inaccessible, or cannot be written.
    #[inline]
    pub fn update(self, update: impl Fn(u64) -> u64) -> Result<u64, Unreachable> {
        // SAFETY: aligned by `new`; registered memory is the program's.
        unsafe { access::update(self.0, update) }
    }
}
