//! Sending FPDUs: they are written into a staging buffer, large payload excepted, and many of them
//! leave by one system call.
//!
//! ```text
//! staging   |len hdr small pad crc|len hdr|pad crc|len hdr small pad crc| …
//! parts      Staged ──────────────────────┘ Memory └ Staged ───────────────
//! ```
//!
//! Between framing and the call of the stream the entries of gathered memory are pinned. What the
//! stream does not take is registered as [borrowed](crate::memory): a revocation copies it.

use crate::host::{Mapping, Piece, Unreachable};
use crate::llp::buffers::{BUFFER_LEN, Buffer, BufferPool};
use crate::llp::ulpdu::{Head, LlpError};
use crate::memory::{Borrow, BorrowHolder, EntryId, MemoryTable, Pin, Window};
use crate::stream::{Stream, StreamError};
use crate::time::{Nanos, Now};
use crate::tuning::{BACKLOG, GATHER_MIN, LONG_FPDU, MSS_INTERVAL};
use std::sync::Arc;
use urnic_sync::{Mutex, MutexGuard};
use urnic_wire::ddp;
use urnic_wire::mpa::fpdu::{CRC_LEN, CrcMode, LENGTH_LEN, emit_length, fpdu_len, padding};
use urnic_wire::mpa::{MAX_MULPDU, MIN_MULPDU, fpdu, marker, mulpdu};

/// Most bytes of a short FPDU, and of its payload.
pub(crate) const SHORT_FPDU: usize = 128;
pub(crate) const MAX_SHORT: usize = SHORT_FPDU - fpdu_len(ddp::UNTAGGED_LEN);

/// The length of the longest FPDU on the wire, with the maximum number of markers.
const MAX_FPDU: usize = marker::marked_len(0, fpdu_len(MAX_MULPDU as usize));
const _: () = assert!(2 * MAX_FPDU < BUFFER_LEN);

/// The FPDU that is being written, and the state to restore if it is cancelled.
#[derive(Debug, Default, Clone, Copy)]
struct Open {
    /// The position of the FPDU in the staging buffer.
    start: usize,
    /// The number of parts before the FPDU.
    parts: usize,
    /// `loose` before the FPDU.
    loose: usize,
    /// The ULPDU_Length of the FPDU.
    ulpdu_len: usize,
    /// Bytes of the FPDU that lie in registered memory.
    gathered: usize,
}

/// The sending side of a stream.
pub(crate) struct FpduSender {
    crc: CrcMode,
    markers: bool,
    mulpdu: usize,
    mss_checked_at: Option<Nanos>,
    /// The stream has a segment size, which may change.
    has_segments: bool,
    /// The peer takes FPDUs that are longer than a segment.
    long: bool,
    staging: Option<Buffer>,
    /// Bytes of the staging buffer in use.
    filled: usize,
    /// The position in the staging buffer from which on bytes belong to no part yet.
    loose: usize,
    /// Extents to be sent after the borrowed ones.
    unsent: Unsent,
    /// The entries of the gathered memory.
    pins: Vec<Pin>,
    /// The pieces that the stream did not take, while they are borrowed.
    shared_unsent: Arc<SharedUnsent>,
    borrow: Option<Borrow>,
    /// Bytes of full operation sealed so far; markers count from here (RFC 5044 §4.3).
    sealed: u64,
    /// Bytes of full operation that the stream took.
    taken: u64,
    open: Open,
}

impl FpduSender {
    pub(super) fn new(crc: CrcMode, markers: bool) -> FpduSender {
        FpduSender {
            crc,
            markers,
            mulpdu: MIN_MULPDU.into(),
            mss_checked_at: None,
            has_segments: true,
            long: false,
            staging: None,
            filled: 0,
            loose: 0,
            unsent: Unsent::default(),
            pins: Vec::new(),
            shared_unsent: Arc::default(),
            borrow: None,
            sealed: 0,
            taken: 0,
            open: Open::default(),
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

    /// Whether sent bytes are covered by a CRC, so that it must not change between here and the
    /// wire.
    #[inline]
    fn has_crc(&self) -> bool {
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
    pub(crate) fn sealed(&self) -> u64 {
        self.sealed
    }

    #[inline]
    pub(crate) fn is_flushed(&self) -> bool {
        self.sealed == self.taken
    }

    /// Reads the stream's segment size at intervals, and makes it the MULPDU (RFC 5044 §4.5).
    /// FPDUs that are written already keep their length (RFC 5041 §3.2).
    #[inline]
    pub(crate) fn refresh(&mut self, now: &Now<'_>, stream: &dyn Stream) {
        if !self.has_segments {
            return;
        }
        let now = now.get();
        if self
            .mss_checked_at
            .is_none_or(|then| now.since(then) >= MSS_INTERVAL)
        {
            self.mss_checked_at = Some(now);
            let mss = stream.mss();
            self.has_segments = mss < u32::MAX;
            // Markers are for receivers that find FPDUs in segments by themselves.
            let longest = match self.long && !self.markers {
                true => mss.max(LONG_FPDU),
                false => mss,
            };
            self.mulpdu = mulpdu(longest.min(u16::MAX.into()), self.markers).into();
        }
    }

    /// The peer takes FPDUs that are longer than a segment. RFC 5044 §4.5 recommends shorter ones
    /// for peers that place segments in any order, which no stack above a socket does.
    #[inline]
    pub(crate) fn allow_long(&mut self) {
        if !self.long {
            (self.long, self.mss_checked_at) = (true, None);
        }
    }

    #[inline]
    pub(crate) fn open(&mut self, buffers: &BufferPool, head: &Head, payload_len: usize) {
        let ulpdu_len = head.len() + payload_len;
        debug_assert!(ulpdu_len <= MAX_MULPDU.into());
        self.open = Open {
            start: self.filled,
            parts: self.unsent.len(),
            loose: self.loose,
            ulpdu_len,
            gathered: 0,
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
        if len < GATHER_MIN || self.markers || self.has_crc() || window.is_unmapped() {
            // Markers cut payload into extents that are all cheaper to copy. With a CRC the
            // payload is read once: a program may change it until the completion (for example a
            // guest's memory), and the CRC must be that of the bytes that are sent.
            window.copy_out(at, self.put(len))
        } else {
            self.gather_in_place(window, at, len)
        }
    }

    fn gather_in_place(&mut self, window: &Window<'_>, at: u64, len: usize) -> Result<(), Unreachable> {
        // Memory that is inaccessible already is an error before the FPDU begins, which a Terminate
        // can report to the peer.
        window.probe(at, len as u64)?;
        self.close_loose();
        let Some(entry) = window.entry() else {
            return Ok(());
        };
        if self.pins.last().is_none_or(|pin| pin.entry() != entry) {
            self.pins.extend(window.pin());
        }
        for memory in window.extents(at, len as u64) {
            self.unsent.push(Part::Memory { memory, entry });
        }
        self.open.gathered += len;
        Ok(())
    }

    /// Makes a part of the staged bytes that belong to no part yet.
    fn close_loose(&mut self) {
        if self.loose < self.filled {
            self.unsent.push(Part::Staged {
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
        // Pad and CRC are at most seven bytes; a fixed length is one store.
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
            "payload length"
        );
        if self.markers {
            self.insert_markers(start);
        }
        if self.has_crc() {
            self.sign(start);
        }
        self.sealed += (self.filled - start + gathered) as u64;
        self.sealed
    }

    /// Whether FPDUs have neither markers nor CRCs, and none waits for the stream.
    #[inline]
    pub(crate) fn is_plain_and_flushed(&self) -> bool {
        !self.markers && !self.has_crc() && self.is_flushed()
    }

    /// Frames and sends one FPDU at once, past the staging buffer: `head`, then `len` bytes, at
    /// most [`MAX_SHORT`], that `fill` writes. [`is_plain_and_flushed`] must hold. Bytes that the
    /// stream does not take, and its errors, are left for [`flush`](Self::flush). Returns the
    /// position after the FPDU; `None`: `fill` failed, and there is no FPDU.
    ///
    /// [`is_plain_and_flushed`]: Self::is_plain_and_flushed
    #[inline(always)]
    pub(crate) fn send_short(
        &mut self,
        buffers: &BufferPool,
        head: &Head,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Option<()>,
        stream: &mut dyn Stream,
    ) -> Option<u64> {
        let mut bytes = [0; SHORT_FPDU];
        let ulpdu_len = head.len() + len;
        let body = LENGTH_LEN + head.len();
        bytes[..LENGTH_LEN].copy_from_slice(&emit_length(ulpdu_len));
        head.write(&mut bytes[LENGTH_LEN..]);
        fill(bytes.get_mut(body..body + len)?)?;
        let fpdu = bytes.get(..fpdu_len(ulpdu_len))?;
        let taken = stream.send_bytes(fpdu).unwrap_or(0);
        self.sealed += fpdu.len() as u64;
        self.taken += taken as u64;
        if let Some(rest) = fpdu.get(taken..).filter(|rest| !rest.is_empty()) {
            let staging = self.staging.get_or_insert_with(|| buffers.take());
            staging[..rest.len()].copy_from_slice(rest);
            (self.filled, self.loose) = (rest.len(), 0);
        }
        Some(self.sealed)
    }

    /// Puts the CRC into the last four bytes of the FPDU (RFC 5044 §4.4).
    #[inline]
    fn sign(&mut self, start: usize) {
        // With a CRC nothing is gathered in place: the whole FPDU is staged.
        if let Some(staged) = self.staging.as_mut().and_then(|s| s.get_mut(start..self.filled)) {
            fpdu::seal(staged);
        }
    }

    /// Puts its markers into the FPDU, which is all staged (RFC 5044 §4.3).
    fn insert_markers(&mut self, start: usize) {
        let plain = self.filled - start;
        let end = start + marker::marked_len(self.sealed, plain);
        if let Some(place) = self.staging.as_mut().and_then(|s| s.get_mut(start..end)) {
            self.filled = start + marker::insert(self.sealed, plain, place);
        }
    }

    pub(crate) fn cancel(&mut self) {
        self.filled = self.open.start;
        self.loose = self.open.loose;
        self.unsent.truncate(self.open.parts);
    }

    pub(crate) fn flush(
        &mut self,
        memory: &MemoryTable,
        stream: &mut dyn Stream,
        calls: &mut u64,
    ) -> Result<bool, LlpError> {
        self.close_loose();
        let staging = self.staging.as_deref().map_or(&[][..], |staging| staging);
        let sent = match &self.borrow {
            None => self.unsent.send(staging, stream, calls, &mut self.taken),
            Some(_) => {
                // A thread that revokes waits for the lock, and finds the bytes that were not
                // taken.
                let mut shared_unsent = self.shared_unsent.lock();
                shared_unsent.append(&mut self.unsent);
                shared_unsent.send(staging, stream, calls, &mut self.taken)
            }
        };
        match sent {
            Ok(true) => {
                self.borrow = None;
                (self.filled, self.loose) = (0, 0);
            }
            Ok(false) => self.rest(memory),
            Err(_) => {}
        }
        self.pins.clear();
        Ok(sent?)
    }

    /// The address of the first unsent byte that cannot be read at present, among the bytes that
    /// one system call would send.
    #[cold]
    pub(crate) fn first_missing(&self) -> Option<usize> {
        match &self.borrow {
            None => self.unsent.first_missing(),
            Some(_) => self.shared_unsent.lock().first_missing(),
        }
    }

    /// Lends out the gathered memory that is not sent, and removes all pins: afterwards this queue
    /// pair may wait for revocations, or for its stream.
    pub(crate) fn rest(&mut self, memory: &MemoryTable) {
        if self.pins.is_empty() {
            return;
        }
        let mut shared_unsent = self.shared_unsent.lock();
        if self.borrow.is_some() {
            shared_unsent.append(&mut self.unsent);
        } else {
            std::mem::swap(&mut *shared_unsent, &mut self.unsent);
            drop(shared_unsent);
            self.borrow = Some(memory.register_borrow(self.shared_unsent.clone()));
        }
        self.pins.clear();
    }

    pub(crate) fn drop_unsent(&mut self) {
        if self.borrow.take().is_some() {
            self.shared_unsent.lock().clear();
        }
        self.unsent.clear();
        self.pins.clear();
        (self.filled, self.loose) = (0, 0);
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

impl std::fmt::Debug for FpduSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FpduSender")
            .field("mulpdu", &self.mulpdu)
            .field("sealed", &self.sealed)
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}

// Framed bytes that the stream has not taken: extents of the staging buffer and of the program's
// memory.

/// Pieces of one system call: gathered payload and the staged bytes between them.
const PIECES: usize = 64;

/// An extent to be sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// Bytes of the staging buffer.
    Staged { at: usize, len: usize },
    /// Bytes of the program's memory, as it was registered when the FPDU was framed.
    Memory { memory: Mapping, entry: EntryId },
    /// Bytes that were copied from registered memory when its registration was revoked.
    Copied { at: usize, len: usize },
    /// Bytes that were inaccessible when they were copied.
    Unreachable { len: usize },
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Staged { len, .. } | Part::Copied { len, .. } | Part::Unreachable { len } => *len,
            Part::Memory { memory, .. } => memory.len(),
        }
    }

    fn skip(self, n: usize) -> Part {
        match self {
            Part::Staged { at, len } => Part::Staged {
                at: at + n,
                len: len - n,
            },
            Part::Copied { at, len } => Part::Copied {
                at: at + n,
                len: len - n,
            },
            Part::Memory { memory, entry } => Part::Memory {
                memory: memory.part(n, memory.len() - n),
                entry,
            },
            Part::Unreachable { len } => Part::Unreachable { len: len - n },
        }
    }
}

/// Parts in order.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    parts: Vec<Part>,
    /// Parts taken.
    head: usize,
    copies: Vec<u8>,
}

impl Unsent {
    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }

    #[inline]
    pub(super) fn push(&mut self, part: Part) {
        self.parts.push(part);
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.parts.truncate(len);
    }

    /// Takes over the parts of `other`, which contains no copies.
    pub(super) fn append(&mut self, other: &mut Unsent) {
        self.parts
            .extend_from_slice(other.parts.get(other.head..).unwrap_or_default());
        other.clear();
    }

    pub(super) fn clear(&mut self) {
        self.parts.clear();
        self.head = 0;
        self.copies = Vec::new();
    }

    /// Sends until all is taken (`true`) or the stream takes no more, counting the bytes taken.
    pub(super) fn send(
        &mut self,
        staging: &[u8],
        stream: &mut dyn Stream,
        calls: &mut u64,
        taken: &mut u64,
    ) -> Result<bool, StreamError> {
        while self.head < self.parts.len() {
            *calls += 1;
            match self.send_once(staging, stream) {
                Ok((n, offered)) => {
                    *taken += n as u64;
                    self.advance(n);
                    // A socket reports room later. In memory, where `has_input` needs no system
                    // call, the next attempt shows whether room is missing or a piece cannot be
                    // read.
                    if n < offered && stream.has_input().is_none() {
                        return Ok(false);
                    }
                }
                Err(StreamError::WouldBlock) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.clear();
        Ok(true)
    }

    /// Makes one system call. Returns how many bytes the stream took, and how many were offered.
    #[inline]
    fn send_once(&self, staging: &[u8], stream: &mut dyn Stream) -> Result<(usize, usize), StreamError> {
        let parts = &self.parts[self.head..];
        let staged = |at: usize, len: usize| staging.get(at..at + len).unwrap_or_default();
        // Small messages are adjacent in the staging buffer.
        if let [Part::Staged { at, len }] = *parts {
            return Ok((stream.send_bytes(staged(at, len))?, len));
        }
        let mut pieces = [Piece::of(&[]); PIECES];
        let (mut count, mut offered) = (0, 0);
        for (piece, part) in pieces.iter_mut().zip(parts) {
            *piece = match part {
                Part::Staged { at, len } => Piece::of(staged(*at, *len)),
                Part::Memory { memory, .. } => memory.piece(),
                Part::Copied { at, len } => Piece::of(self.copies.get(*at..at + len).unwrap_or_default()),
                Part::Unreachable { .. } => break,
            };
            count += 1;
            offered += piece.len();
        }
        if count == 0 {
            return Err(StreamError::Fault);
        }
        Ok((stream.send(&pieces[..count])?, offered))
    }

    /// The address of the first byte that cannot be read at present, among the bytes that one
    /// system call would send.
    #[cold]
    pub(super) fn first_missing(&self) -> Option<usize> {
        let parts = self.parts.iter().skip(self.head).take(PIECES);
        let mut extents = parts.filter_map(|part| match part {
            Part::Memory { memory, .. } => Some(memory),
            Part::Staged { .. } | Part::Copied { .. } | Part::Unreachable { .. } => None,
        });
        extents.find_map(Mapping::first_missing)
    }

    pub(super) fn advance(&mut self, taken: usize) {
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
}

/// The bytes that remain when the stream takes no more. The lock is a leaf.
#[derive(Debug, Default)]
pub(super) struct SharedUnsent(Mutex<Unsent>);

impl SharedUnsent {
    pub(super) fn lock(&self) -> MutexGuard<'_, Unsent> {
        self.0.lock()
    }
}

impl BorrowHolder for SharedUnsent {
    fn release(&self, revoked: EntryId) {
        let mut unsent = self.lock();
        let Unsent { parts, head, copies } = &mut *unsent;
        for part in parts.iter_mut().skip(*head) {
            if let Part::Memory { memory, entry } = *part
                && entry == revoked
            {
                let (at, len) = (copies.len(), memory.len());
                *part = match memory.append_to(copies) {
                    Ok(()) => Part::Copied { at, len },
                    Err(_) => Part::Unreachable { len },
                };
            }
        }
    }
}
