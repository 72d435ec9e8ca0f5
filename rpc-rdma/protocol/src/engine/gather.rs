//! Messages whose bytes come from several places.

use super::item::Item;
use crate::payload::padding;
use std::sync::Arc;

/// The memory that contains bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source<M> {
    /// Bytes of the engine.
    Bytes(Arc<[u8]>),
    /// Memory of the consumer.
    Memory(M),
}

/// A contiguous part of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span<M> {
    /// The source of the bytes.
    pub source: Source<M>,
    /// Offset of the first byte in the source.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
}

/// The bytes of several spans.
#[derive(Clone, Debug)]
pub(super) struct Gather<M>(Vec<Span<M>>);

impl<M: Clone> Gather<M> {
    fn new() -> Self {
        Self(Vec::new())
    }

    /// A message with the items inserted at their offsets, and padded.
    pub(super) fn with_items<'a>(message: &Arc<[u8]>, items: impl IntoIterator<Item = &'a Item<M>>) -> Self
    where
        M: 'a,
    {
        let mut all = Self::new();
        let mut taken = 0;
        for item in items {
            all.push(Source::Bytes(message.clone()), taken, item.offset - taken);
            taken = item.offset;
            let len = item.len as usize;
            all.push(Source::Memory(item.memory.clone()), 0, len);
            all.push(Source::Bytes(Arc::new([0; 4])), 0, padding(len as u64));
        }
        all.push(Source::Bytes(message.clone()), taken, message.len() - taken);
        all
    }

    pub(super) fn bytes(bytes: Vec<u8>) -> Self {
        let mut all = Self::new();
        let len = bytes.len();
        all.push(Source::Bytes(bytes.into()), 0, len);
        all
    }

    pub(super) fn memory(memory: &M, len: u32) -> Self {
        let mut all = Self::new();
        all.push(Source::Memory(memory.clone()), 0, len as usize);
        all
    }

    fn push(&mut self, source: Source<M>, at: usize, len: usize) {
        if len > 0 {
            self.0.push(Span { source, at, len });
        }
    }

    pub(super) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|span| span.len).sum()
    }

    /// Takes the first `len` bytes, or all bytes if there are fewer.
    pub(super) fn take(&mut self, mut len: usize) -> Vec<Span<M>> {
        let mut taken = Vec::new();
        while len > 0 && !self.0.is_empty() {
            let first = &mut self.0[0];
            if first.len <= len {
                len -= first.len;
                taken.push(self.0.remove(0));
            } else {
                taken.push(Span { len, ..first.clone() });
                first.at += len;
                first.len -= len;
                len = 0;
            }
        }
        taken
    }

    pub(super) fn into_spans(self) -> Vec<Span<M>> {
        self.0
    }
}

/// Whether the items lie within a message of `len` bytes, in ascending order, each at an offset
/// where an XDR item can begin.
pub(super) fn well_placed<M>(len: usize, items: &[Item<M>]) -> bool {
    items.is_sorted_by_key(|item| item.offset)
        && items
            .iter()
            .all(|item| item.offset <= len && item.offset >= 8 && item.offset.is_multiple_of(4))
}
