//! Large pieces of a stream that can be received together.

/// Bytes of a stream between two large pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Between {
    bytes: [u8; Between::MOST],
    len: usize,
}

impl Between {
    /// The most bytes.
    pub const MOST: usize = 32;

    /// Zeroes, at most [`MOST`](Self::MOST).
    pub(crate) fn of_len(len: usize) -> Between {
        Between {
            bytes: [0; Between::MOST],
            len: len.min(Between::MOST),
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// The bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(..self.len).unwrap_or_default()
    }
}

/// A large piece of a stream.
#[derive(Debug, Clone, Copy)]
pub struct LargePiece {
    /// Its bytes.
    pub len: usize,
    /// What is between the piece before it and this one; nothing before the first.
    pub between: Between,
}
