//! Items, which may go by a chunk.

/// Memory for, or with, an item that may go by a chunk (DDP-eligible, RFC 8166 §3.4.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<M> {
    /// Where it is left out of the message: bytes of the message before it. Behind its count, if it
    /// has one.
    pub offset: usize,
    /// The memory, of which the item is the first `len` bytes.
    pub memory: M,
    /// Bytes.
    pub len: u32,
}
