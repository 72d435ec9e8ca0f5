//! ULPDUs one after the other in a buffer, each with its length in front.

use crate::llp::buffers::{BUFFER_LEN, Buffer, BufferPool};
use crate::llp::ulpdu::Head;
use crate::stream::{LONGEST_MESSAGE, Received};
use urnic_wire::ddp::TAGGED_LEN;

/// Longest ULPDU: small enough for the caches.
pub(crate) const MULPDU: usize = 32 << 10;

/// Bytes before each ULPDU: its length.
const LENGTH_LEN: usize = 4;

/// In the length of a tagged ULPDU: only its header is in the queue, and its payload is placed.
const PLACED: u32 = 1 << 31;

/// A queue of ULPDUs, which has a buffer only while it is not empty.
#[derive(Debug, Default)]
pub(crate) struct UlpduQueue {
    buffer: Option<Buffer>,
    /// The ULPDU at the front.
    start: usize,
    /// The end of the last sealed ULPDU.
    end: usize,
    /// The present end of the open ULPDU.
    filled: usize,
    /// Bytes sealed so far; `position` counts the bytes before `start`.
    sealed: u64,
    position: u64,
}

impl UlpduQueue {
    /// Whether a ULPDU of [`MULPDU`] bytes can be opened.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        BUFFER_LEN - self.end >= LENGTH_LEN + MULPDU + size_of::<Head>()
    }

    /// Whether [`append`](Self::append) can be called.
    #[inline]
    pub(super) fn can_append(&self) -> bool {
        BUFFER_LEN - self.end >= LENGTH_LEN + LONGEST_MESSAGE
    }

    pub(crate) fn open(&mut self, buffers: &BufferPool, head: &Head, payload_len: usize) {
        let ulpdu_len = head.len() + payload_len;
        let buffer = self.buffer.get_or_insert_with(|| buffers.take());
        let body = self.end + LENGTH_LEN;
        buffer[self.end..body].copy_from_slice(&(ulpdu_len as u32).to_ne_bytes());
        head.write(&mut buffer[body..]);
        self.filled = body + head.len();
    }

    pub(crate) fn put(&mut self, len: usize) -> &mut [u8] {
        let at = self.filled;
        self.filled += len;
        self.buffer
            .as_mut()
            .and_then(|buffer| buffer.get_mut(at..at + len))
            .unwrap_or_default()
    }

    /// The open ULPDU.
    pub(super) fn opened(&self) -> Option<&[u8]> {
        self.buffer.as_ref()?.get(self.end + LENGTH_LEN..self.filled)
    }

    pub(crate) fn seal(&mut self) -> u64 {
        self.sealed += (self.filled - self.end) as u64;
        self.end = self.filled;
        self.sealed
    }

    pub(crate) fn cancel(&mut self) {
        self.filled = self.end;
    }

    /// Appends a ULPDU, whose bytes `fill` writes to the front of [`LONGEST_MESSAGE`] bytes and
    /// counts: all, or the header of a tagged one whose payload is placed. The queue must have
    /// room. Returns the length of the whole ULPDU.
    pub(super) fn append<E>(
        &mut self,
        buffers: &BufferPool,
        fill: impl FnOnce(&mut [u8]) -> Result<Received, E>,
    ) -> Result<usize, E> {
        let buffer = self.buffer.get_or_insert_with(|| buffers.take());
        let body = self.end + LENGTH_LEN;
        let room = buffer.get_mut(body..body + LONGEST_MESSAGE).unwrap_or_default();
        let Received { len, placed } = fill(room)?;
        if len > 0 {
            debug_assert!(placed == 0 || len == TAGGED_LEN);
            let mark = if placed > 0 { PLACED } else { 0 };
            let length = (len + placed) as u32 | mark;
            buffer[self.end..body].copy_from_slice(&length.to_ne_bytes());
            self.filled = body + len;
            self.seal();
        }
        Ok(len + placed)
    }

    #[inline]
    pub(crate) fn sealed(&self) -> u64 {
        self.sealed
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The position of the ULPDU at the front, as [`seal`](Self::seal) counts.
    #[inline]
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// The ULPDU at the front, and the bytes after it that are placed.
    fn first(&self) -> Option<(&[u8], usize)> {
        let sealed = self.buffer.as_ref()?.get(self.start..self.end)?;
        let (length, rest) = sealed.split_first_chunk()?;
        let length = u32::from_ne_bytes(*length);
        let whole = (length & !PLACED) as usize;
        let here = if length & PLACED == 0 { whole } else { TAGGED_LEN };
        Some((rest.get(..here)?, whole - here))
    }

    /// The ULPDU at the front, without what is placed.
    pub(crate) fn front(&self) -> Option<&[u8]> {
        self.first().map(|(ulpdu, _)| ulpdu)
    }

    /// Bytes after [`front`](Self::front) that are placed.
    pub(super) fn placed(&self) -> usize {
        self.first().map_or(0, |(_, placed)| placed)
    }

    /// Removes the ULPDU at the front.
    pub(crate) fn consume(&mut self) {
        if let Some((here, placed)) = self.first().map(|(ulpdu, placed)| (ulpdu.len(), placed)) {
            self.start += LENGTH_LEN + here;
            self.position += (LENGTH_LEN + here + placed) as u64;
        }
        if self.start == self.end {
            (self.start, self.end, self.filled) = (0, 0, 0);
        }
    }

    /// Moves what is left to the front of the buffer. No ULPDU may be open.
    pub(super) fn compact(&mut self) {
        if let Some(buffer) = &mut self.buffer {
            buffer.copy_within(self.start..self.end, 0);
        }
        let left = self.end - self.start;
        (self.start, self.end, self.filled) = (0, left, left);
    }

    /// Drops all sealed ULPDUs.
    pub(crate) fn discard(&mut self) {
        (self.start, self.end, self.filled) = (0, 0, 0);
    }

    pub(crate) fn release(&mut self, buffers: &BufferPool) {
        if self.end == 0
            && let Some(buffer) = self.buffer.take()
        {
            buffers.give(buffer);
        }
    }
}
