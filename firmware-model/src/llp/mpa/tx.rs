//! Sending FPDUs: they are written into a staging buffer, large payload excepted, and leave many to a system call.
//!
//! ```text
//! staging   |len hdr small pad crc|len hdr|pad crc|len hdr small pad crc| …
//! parts      Staged ──────────────────────┘ Memory └ Staged ───────────────
//! ```

use crate::buffers::{BUFFER_LEN, Buffer, BufferPool};
use crate::host::{Piece, Unreachable};
use crate::llp::{Head, LlpError};
use crate::memory::Window;
use crate::stream::{Stream, StreamError};
use crate::time::Nanos;
use std::time::Duration;
use urnic_wire::crc::{Crc32c, crc32c};
use urnic_wire::mpa::fpdu::{CRC_LEN, CrcMode, LENGTH_LEN, emit_length, fpdu_len, padding};
use urnic_wire::mpa::{MAX_MULPDU, MIN_MULPDU, marker, mulpdu};

/// Payload of at least so many bytes stays where it is: below, copying is cheaper than an iovec entry.
const GATHER_MIN: usize = 2048;
/// Bytes sealed and not taken, beyond which no further FPDU is opened. What is sent shall still be in the cache, but each system call also
/// wakes whoever receives: from 128 KiB to 1 MiB, 64 KiB messages gain a third.
const BACKLOG: u64 = 1 << 20;
/// Pieces of one system call: gathered payload and what stands between, as far as the backlog goes.
const PIECES: usize = 64;
/// How often the segment size is looked at: it is a system call.
const MSS_INTERVAL: Duration = Duration::from_secs(1);

/// The longest FPDU on the wire, with as many markers as it can have.
const MAX_FPDU: usize = marker::marked_len(0, fpdu_len(MAX_MULPDU as usize));
const _: () = assert!(2 * MAX_FPDU < BUFFER_LEN);

/// A stretch of what is to be sent.
#[derive(Debug, Clone, Copy)]
enum Part {
    /// Bytes of the staging buffer.
    Staged { at: usize, len: usize },
    /// Bytes of the program's memory.
    Memory(Piece),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Staged { len, .. } => *len,
            Part::Memory(piece) => piece.len(),
        }
    }

    fn skip(self, n: usize) -> Part {
        match self {
            Part::Staged { at, len } => Part::Staged {
                at: at + n,
                len: len - n,
            },
            Part::Memory(piece) => Part::Memory(piece.skip(n)),
        }
    }
}

/// The FPDU that is being written, and what to go back to if it is cancelled.
#[derive(Debug, Default, Clone, Copy)]
struct Open {
    /// Where it begins in the staging buffer.
    start: usize,
    /// Parts before it.
    parts: usize,
    /// `loose` before it.
    loose: usize,
    /// Its ULPDU_Length.
    ulpdu_len: usize,
    /// Bytes of it that lie in memory.
    gathered: usize,
    /// Staged bytes up to here are in the digest, if anything was gathered.
    digested: usize,
}

/// The sending side of a stream.
pub(crate) struct Sender {
    crc: CrcMode,
    markers: bool,
    mulpdu: usize,
    looked_at: Option<Nanos>,
    staging: Option<Buffer>,
    /// Bytes of the staging buffer in use.
    filled: usize,
    /// Staged bytes from here on are not in a part yet.
    loose: usize,
    parts: Vec<Part>,
    /// Parts taken.
    head: usize,
    /// Octets of full operation sealed so far; markers count from here (RFC 5044 §4.3).
    sealed: u64,
    /// Octets of full operation that the stream took.
    taken: u64,
    open: Open,
    digest: Crc32c,
}

impl Sender {
    pub(super) fn new(crc: CrcMode, markers: bool) -> Sender {
        Sender {
            crc,
            markers,
            mulpdu: MIN_MULPDU.into(),
            looked_at: None,
            staging: None,
            filled: 0,
            loose: 0,
            parts: Vec::new(),
            head: 0,
            sealed: 0,
            taken: 0,
            open: Open::default(),
            digest: Crc32c::new(),
        }
    }

    #[inline]
    pub(crate) fn mulpdu(&self) -> usize {
        self.mulpdu
    }

    #[cfg(test)]
    pub(crate) fn set_mulpdu(&mut self, mulpdu: usize) {
        self.mulpdu = mulpdu;
    }

    /// Whether what is sent is covered by a CRC, so that it must not change between here and the wire.
    #[inline]
    pub(crate) fn has_digest(&self) -> bool {
        self.crc == CrcMode::On
    }

    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.sealed - self.taken < BACKLOG && BUFFER_LEN - self.filled >= MAX_FPDU
    }

    #[inline]
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    #[inline]
    pub(crate) fn is_flushed(&self) -> bool {
        self.sealed == self.taken
    }

    /// Looks at the stream's segment size now and then, and makes it the MULPDU (RFC 5044 §4.5). FPDUs that are
    /// written already keep their length (RFC 5041 §3.2).
    pub(crate) fn refresh(&mut self, now: Nanos, stream: &dyn Stream) {
        if self.looked_at.is_none_or(|then| now.since(then) >= MSS_INTERVAL) {
            self.looked_at = Some(now);
            self.mulpdu = mulpdu(stream.mss(), self.markers).into();
        }
    }

    #[inline]
    pub(crate) fn open(&mut self, buffers: &BufferPool, head: &Head, payload_len: usize) {
        let ulpdu_len = head.len() + payload_len;
        debug_assert!(ulpdu_len <= MAX_MULPDU.into());
        self.open = Open {
            start: self.filled,
            parts: self.parts.len(),
            loose: self.loose,
            ulpdu_len,
            gathered: 0,
            digested: self.filled,
        };
        let staging = self.staging.get_or_insert_with(|| buffers.take());
        let body = self.filled + LENGTH_LEN;
        staging[self.filled..body].copy_from_slice(&emit_length(ulpdu_len));
        head.write(&mut staging[body..]);
        self.filled = body + head.len();
    }

    #[inline]
    pub(crate) fn put(&mut self, len: usize) -> &mut [u8] {
        let at = self.filled;
        self.filled += len;
        self.staging
            .as_mut()
            .and_then(|staging| staging.get_mut(at..at + len))
            .unwrap_or_default()
    }

    #[inline]
    pub(crate) fn gather(&mut self, window: &Window<'_>, at: u64, len: usize) -> Result<(), Unreachable> {
        if len < GATHER_MIN || self.markers || window.is_elsewhere() {
            // Markers cut payload into stretches that are all cheaper to copy.
            window.copy_out(at, self.put(len))
        } else {
            self.gather_in_place(window, at, len);
            Ok(())
        }
    }

    fn gather_in_place(&mut self, window: &Window<'_>, at: u64, len: usize) {
        if self.has_digest() {
            if self.open.gathered == 0 {
                self.digest.reset();
            }
            self.digest_staged();
            window.visit(at, len as u64, |bytes| self.digest.update(bytes));
        }
        self.close_loose();
        self.parts.extend(window.pieces(at, len as u64).map(Part::Memory));
        self.open.gathered += len;
    }

    /// Takes the staged bytes of the open FPDU that are not in the digest yet into it.
    fn digest_staged(&mut self) {
        if let Some(bytes) = self
            .staging
            .as_ref()
            .and_then(|s| s.get(self.open.digested..self.filled))
        {
            self.digest.update(bytes);
        }
        self.open.digested = self.filled;
    }

    /// Makes a part of the staged bytes that are in none.
    fn close_loose(&mut self) {
        if self.loose < self.filled {
            self.parts.push(Part::Staged {
                at: self.loose,
                len: self.filled - self.loose,
            });
            self.loose = self.filled;
        }
    }

    #[inline]
    pub(crate) fn seal(&mut self) -> u64 {
        let Open {
            start,
            ulpdu_len,
            gathered,
            ..
        } = self.open;
        let end = self.filled + padding(ulpdu_len) + CRC_LEN;
        // Pad and CRC are at most seven octets; a fixed length is one store.
        if let Some(place) = self
            .staging
            .as_mut()
            .and_then(|s| s.get_mut(self.filled..)?.first_chunk_mut::<8>())
        {
            *place = [0; 8];
        }
        self.filled = end;
        debug_assert_eq!(
            self.filled - start + gathered,
            fpdu_len(ulpdu_len),
            "payload as announced"
        );
        if self.markers {
            self.insert_markers(start);
        }
        if self.has_digest() {
            self.sign(start);
        }
        self.sealed += (self.filled - start + gathered) as u64;
        self.sealed
    }

    /// Puts the CRC into the last four octets of the FPDU (RFC 5044 §4.4).
    #[inline]
    fn sign(&mut self, start: usize) {
        let end = self.filled - CRC_LEN;
        let from = if self.open.gathered == 0 {
            start
        } else {
            self.open.digested
        };
        let Some(staged) = self.staging.as_mut().and_then(|s| s.get_mut(from..self.filled)) else {
            return;
        };
        let (covered, crc) = staged.split_at_mut(end - from);
        let value = if self.open.gathered == 0 {
            crc32c(covered)
        } else {
            self.digest.update(covered);
            self.digest.finish()
        };
        crc.copy_from_slice(&value.to_le_bytes());
    }

    /// Spreads the FPDU, which is all staged, to make room for its markers, from the back (RFC 5044 §4.3).
    fn insert_markers(&mut self, start: usize) {
        let plain = self.filled - start;
        let count = marker::count(self.sealed, plain);
        let lead = marker::distance(self.sealed);
        let end = self.filled + count * marker::LEN;
        let Some(fpdu) = self.staging.as_mut().and_then(|s| s.get_mut(start..end)) else {
            return;
        };
        let ulpdu_length_at = if lead == 0 { marker::LEN } else { 0 };
        let mut from_end = plain;
        for n in (0..count).rev() {
            let from = lead + n * marker::BETWEEN;
            let at = lead + n * marker::INTERVAL;
            fpdu.copy_within(from..from_end, at + marker::LEN);
            // At most 64768 + 520 octets from the start; the low half is what goes on the wire.
            let fpduptr = at.saturating_sub(ulpdu_length_at) as u16;
            fpdu[at..at + marker::LEN].copy_from_slice(&marker::Marker { fpduptr }.to_bytes());
            from_end = from;
        }
        self.filled = end;
    }

    pub(crate) fn cancel(&mut self) {
        self.filled = self.open.start;
        self.loose = self.open.loose;
        self.parts.truncate(self.open.parts);
    }

    pub(crate) fn flush(&mut self, stream: &mut dyn Stream, calls: &mut u64) -> Result<bool, LlpError> {
        self.close_loose();
        while self.head < self.parts.len() {
            *calls += 1;
            match self.send(stream) {
                Ok((taken, offered)) => {
                    self.advance(taken);
                    if taken < offered {
                        return Ok(false);
                    }
                }
                Err(StreamError::WouldBlock) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        self.parts.clear();
        (self.head, self.filled, self.loose) = (0, 0, 0);
        Ok(true)
    }

    /// One system call; how many bytes it took, of how many.
    #[inline]
    fn send(&self, stream: &mut dyn Stream) -> Result<(usize, usize), StreamError> {
        let staging = self.staging.as_deref().unwrap_or_default();
        let staged = |at: usize, len: usize| staging.get(at..at + len).unwrap_or_default();
        let parts = &self.parts[self.head..];
        // Small messages lie side by side.
        if let [Part::Staged { at, len }] = *parts {
            return Ok((stream.send_bytes(staged(at, len))?, len));
        }
        let mut pieces = [Piece::of(&[]); PIECES];
        let (mut count, mut offered) = (0, 0);
        for (piece, part) in pieces.iter_mut().zip(parts) {
            *piece = match *part {
                Part::Staged { at, len } => Piece::of(staged(at, len)),
                Part::Memory(piece) => piece,
            };
            count += 1;
            offered += piece.len();
        }
        Ok((stream.send(&pieces[..count])?, offered))
    }

    fn advance(&mut self, taken: usize) {
        self.taken += taken as u64;
        let mut left = taken;
        while let Some(part) = self.parts.get_mut(self.head) {
            if left < part.len() {
                *part = part.skip(left);
                return;
            }
            left -= part.len();
            self.head += 1;
        }
    }

    pub(crate) fn drop_unsent(&mut self) {
        self.parts.clear();
        (self.head, self.filled, self.loose) = (0, 0, 0);
        self.sealed = self.taken;
    }

    #[inline]
    pub(crate) fn release(&mut self, buffers: &BufferPool) {
        if self.filled == 0
            && let Some(staging) = self.staging.take()
        {
            buffers.give(staging);
        }
    }
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender")
            .field("mulpdu", &self.mulpdu)
            .field("sealed", &self.sealed)
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}
