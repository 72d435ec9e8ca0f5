//! Data of files: those that calls bring, and those that are read.

use crate::memory::Slice;

/// The data of a WRITE or the text of a SYMLINK.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// A part of the message.
    Inline(&'a [u8]),
    /// Memory that the tree may keep.
    Apart(&'a Slice),
}

impl Data<'_> {
    /// The bytes.
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
    /// The bytes end at the end of the file.
    pub eof: bool,
}
