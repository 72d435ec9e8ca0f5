//! Data of files: the data of calls, and the data that READ returns.

use crate::memory::Slice;

/// The data of a WRITE or the text of a SYMLINK.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// The data is a part of the message.
    Inline(&'a [u8]),
    /// The data is in memory of its own, which the tree may keep.
    Apart(&'a Slice),
}

impl Data<'_> {
    /// The bytes of the data.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Inline(bytes) => bytes,
            Self::Apart(slice) => slice,
        }
    }
}

/// The result of a READ.
#[derive(Clone, Debug)]
pub struct Found {
    /// The bytes, in few pieces.
    pub pieces: Vec<Slice>,
    /// Whether the bytes end at the end of the file.
    pub eof: bool,
}
