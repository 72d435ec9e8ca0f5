//! A queue pair that is its own peer: ULPDUs are handed back in memory, with no stream, framing or
//! CRC.

use crate::capture::own_peer::OwnPeerTap;
use crate::llp::buffers::{BUFFER_LEN, Buffer, BufferPool};
use crate::llp::ulpdu::Head;

/// Longest ULPDU: small enough for the caches.
pub(crate) const MULPDU: usize = 32 << 10;

/// Bytes before each ULPDU: its length.
const LENGTH_LEN: usize = 4;

/// ULPDUs that were sent and not received yet, in one buffer.
#[derive(Debug, Default)]
pub(crate) struct Loopback {
    buffer: Option<Buffer>,
    /// The position of the next ULPDU to be received.
    start: usize,
    /// The end of the last sealed ULPDU.
    end: usize,
    /// The present end of the open ULPDU.
    filled: usize,
    /// Bytes sealed so far; `position` counts the bytes before `start`.
    sealed: u64,
    position: u64,
    /// Bytes up to which everything was placed, delivered or answered.
    processed: u64,
    tap: Option<Box<OwnPeerTap>>,
}

impl Loopback {
    /// A loopback that is captured.
    pub(crate) fn captured(tap: OwnPeerTap) -> Loopback {
        Loopback {
            tap: Some(Box::new(tap)),
            ..Loopback::default()
        }
    }

    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        BUFFER_LEN - self.end >= LENGTH_LEN + MULPDU + size_of::<Head>()
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

    pub(crate) fn seal(&mut self) -> u64 {
        if let Some(tap) = &mut self.tap
            && let Some(ulpdu) = self
                .buffer
                .as_ref()
                .and_then(|b| b.get(self.end + LENGTH_LEN..self.filled))
        {
            tap.ulpdu(ulpdu);
        }
        self.sealed += (self.filled - self.end) as u64;
        self.end = self.filled;
        self.sealed
    }

    pub(crate) fn cancel(&mut self) {
        self.filled = self.end;
    }

    /// The position up to which messages are delivered. The outcome of each message to a queue pair
    /// that is its own peer is known, so no message completes earlier.
    #[inline]
    pub(crate) fn taken(&self) -> u64 {
        self.processed
    }

    pub(crate) fn sealed(&self) -> u64 {
        self.sealed
    }

    /// Whether no ULPDU is in flight.
    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The position of the next ULPDU to be received, as [`seal`](Self::seal) counts.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Records that everything up to `position` is placed, delivered or answered.
    pub(crate) fn advance(&mut self, position: u64) {
        self.processed = position;
    }

    /// The next ULPDU to be received.
    pub(crate) fn front(&self) -> Option<&[u8]> {
        let sealed = self.buffer.as_ref()?.get(self.start..self.end)?;
        let (length, rest) = sealed.split_first_chunk()?;
        rest.get(..u32::from_ne_bytes(*length) as usize)
    }

    /// Removes the ULPDU at the front.
    pub(crate) fn consume(&mut self) {
        if let Some(len) = self.front().map(<[u8]>::len) {
            self.start += LENGTH_LEN + len;
            self.position += (LENGTH_LEN + len) as u64;
        }
        if self.start == self.end {
            (self.start, self.end, self.filled) = (0, 0, 0);
        }
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
