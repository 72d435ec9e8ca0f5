//! Items that may go by chunk.

/// Memory for an item, or with an item, that may go by chunk (DDP-eligible, RFC 8166 §3.4.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<M> {
    /// Offset in the message at which the item is left out, after its count if it has one.
    pub offset: usize,
    /// The memory. Its first `len` bytes are the item.
    pub memory: M,
    /// Bytes of the item.
    pub len: u32,
}
