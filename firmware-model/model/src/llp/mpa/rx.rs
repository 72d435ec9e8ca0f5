//! Receiving FPDUs: they arrive in pieces of any length, are assembled in one buffer, checked, and
//! handed up one at a time. DDP gets no byte whose CRC was not checked (RFC 5044 §6).

use crate::host::PieceMut;
use crate::llp::buffers::{BUFFER_LEN, Buffer, BufferPool};
use crate::llp::ulpdu::LlpError;
use crate::stream::{Stream, StreamError};
use crate::tuning::{MEMORY_READ, MEMORY_TAIL, READ_EXACT_MIN, RECEIVE_DIRECT_MIN};
use std::ops::Range;
use urnic_wire::ddp;
use urnic_wire::mpa::fpdu::{self, CRC_LEN, CrcMode, FpduError, LENGTH_LEN, fpdu_len, padding};
use urnic_wire::mpa::marker;

/// Bytes read beyond the end of directly placed payload: pad, CRC, and the next FPDU's length and
/// header.
const TAIL: usize = 7 + LENGTH_LEN + ddp::UNTAGGED_LEN;
/// The longest FPDU that a ULPDU_Length can express.
const MAX_FPDU: usize = marker::marked_len(0, fpdu_len(u16::MAX as usize));
const _: () = assert!(2 * MAX_FPDU < BUFFER_LEN);

/// The result of a read from the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    /// As many bytes as were requested, or the stream was cut: there may be more bytes.
    All,
    /// Fewer bytes than were requested: the stream is empty for now.
    Short,
    /// No byte arrived.
    Nothing,
    /// The peer's FIN, after all its bytes.
    Fin,
}

/// The FPDU at the front, complete and checked.
#[derive(Debug, Clone)]
struct Current {
    ulpdu: Range<usize>,
    wire_len: usize,
}

/// An FPDU whose payload is being read directly to its place.
#[derive(Debug, Clone, Copy)]
struct Direct {
    /// Payload that has not arrived yet.
    missing: usize,
    /// Pad and CRC after the payload.
    trailer: usize,
    /// Bytes of full operation before the FPDU.
    began_at: u64,
}

impl Direct {
    /// The FPDU if it is not complete when `end` bytes are in the buffer, and the position in the
    /// buffer at which the next FPDU begins.
    #[inline]
    fn after(self, end: usize, start: usize) -> (Option<Direct>, usize) {
        match self.missing == 0 && end >= self.trailer {
            true => (None, self.trailer),
            false => (Some(self), start),
        }
    }
}

/// The receiving side of a stream.
#[derive(Debug)]
pub(crate) struct FpduReceiver {
    crc: CrcMode,
    markers: bool,
    buffer: Option<Buffer>,
    start: usize,
    end: usize,
    /// Bytes of full operation before `start`.
    position: u64,
    current: Option<Current>,
    direct: Option<Direct>,
}

impl FpduReceiver {
    pub(super) fn new(crc: CrcMode, markers: bool) -> FpduReceiver {
        FpduReceiver {
            crc,
            markers,
            buffer: None,
            start: 0,
            end: 0,
            position: 0,
            current: None,
            direct: None,
        }
    }

    /// Whether a complete and checked FPDU is at the front: [`ulpdu`](Self::ulpdu) has it until
    /// [`consume`](Self::consume).
    ///
    /// # Errors
    /// [`LlpError::Crc`] and [`LlpError::Marker`]; no byte after such an FPDU may be used.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<bool, LlpError> {
        if self.current.is_some() {
            return Ok(true);
        }
        if self.start == self.end || self.direct.is_some() {
            return Ok(false);
        }
        let (start, position) = (self.start, self.position);
        let Some(bytes) = self.buffer.as_mut().and_then(|b| b.get_mut(start..self.end)) else {
            return Ok(false);
        };
        let parsed = if self.markers {
            marker::parse(position, bytes, self.crc)
                .map(|(ulpdu, wire_len)| (ulpdu.start, ulpdu.len(), wire_len))
        } else {
            fpdu::parse(bytes, self.crc).map(|(ulpdu, _)| (LENGTH_LEN, ulpdu.len(), fpdu_len(ulpdu.len())))
        };
        match parsed {
            Ok((at, len, wire_len)) => {
                self.current = Some(Current {
                    ulpdu: start + at..start + at + len,
                    wire_len,
                });
                Ok(true)
            }
            Err(FpduError::Incomplete { .. }) => Ok(false),
            Err(FpduError::Crc { .. }) => Err(LlpError::Crc),
            Err(FpduError::Marker { .. }) => Err(LlpError::Marker),
        }
    }

    /// The ULPDU at the front; empty if there is none.
    #[inline]
    pub(crate) fn ulpdu(&self) -> &[u8] {
        match (&self.buffer, &self.current) {
            (Some(buffer), Some(current)) => buffer.get(current.ulpdu.clone()).unwrap_or_default(),
            _ => &[],
        }
    }

    /// Removes the FPDU at the front.
    #[inline]
    pub(crate) fn consume(&mut self) {
        if let Some(current) = self.current.take() {
            self.start += current.wire_len;
            self.position += current.wire_len as u64;
        }
    }

    /// The position in full operation up to which FPDUs were removed.
    #[inline]
    pub(crate) fn position(&self) -> u64 {
        self.direct.map_or(self.position, |direct| direct.began_at)
    }

    /// Whether the peer may end the stream here: no FPDU has begun.
    pub(crate) fn at_boundary(&self) -> bool {
        self.start == self.end && self.direct.is_none()
    }

    /// Whether no FPDU has begun, and the next will have neither markers nor a CRC.
    #[inline]
    pub(crate) fn is_plain_and_empty(&self) -> bool {
        !self.markers && self.crc == CrcMode::Off && self.start == self.end && self.direct.is_none()
    }

    /// The ULPDU in `bytes`, if they are one whole FPDU and were read with an empty buffer.
    #[inline]
    pub(crate) fn ulpdu_of(bytes: &[u8]) -> Option<&[u8]> {
        let len = fpdu::ulpdu_len(bytes).filter(|len| fpdu_len(*len) == bytes.len())?;
        bytes.get(LENGTH_LEN..LENGTH_LEN + len)
    }

    /// Counts an FPDU of `len` bytes that was processed without the buffer.
    #[inline]
    pub(crate) fn pass(&mut self, len: usize) {
        self.position += len as u64;
    }

    /// Puts bytes into the empty buffer.
    pub(crate) fn accept(&mut self, buffers: &BufferPool, bytes: &[u8]) {
        let buffer = self.buffer.get_or_insert_with(|| buffers.take());
        buffer[..bytes.len()].copy_from_slice(bytes);
        (self.start, self.end) = (0, bytes.len());
    }

    /// Bytes that wait in the buffer.
    #[cfg(test)]
    pub(crate) fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// The length on the wire of the FPDU at the front of the buffer; `None` while it is not known.
    fn expected_len(&self) -> Option<usize> {
        let bytes = self.buffer.as_ref()?.get(self.start..self.end)?;
        if self.markers {
            marker::wire_len(self.position, bytes)
        } else {
            fpdu::ulpdu_len(bytes).map(fpdu_len)
        }
    }

    /// Reads from the stream to the end of the buffered bytes, which are no whole FPDU (see
    /// [`next`](Self::next)); returns the number of bytes read.
    pub(crate) fn fill(
        &mut self,
        buffers: &BufferPool,
        stream: &mut dyn Stream,
    ) -> Result<(usize, Filled), LlpError> {
        let input = stream.has_input();
        if self.buffer.is_none() && input == Some(false) {
            return Ok((0, Filled::Nothing));
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        let have = self.end - self.start;
        let expected_len = self.expected_len();
        // Make room for the whole FPDU, or for the longest one while the length is not known.
        if BUFFER_LEN - self.start < expected_len.unwrap_or(MAX_FPDU) {
            if let Some(buffer) = &mut self.buffer {
                buffer.copy_within(self.start..self.end, 0);
            }
            (self.start, self.end) = (0, have);
        }
        let limit = match expected_len {
            Some(len) if len.saturating_sub(have) >= READ_EXACT_MIN => self.start + len,
            // Without a system call a read costs little.
            len if input.is_some() => (self.start + len.unwrap_or(0).max(have + MEMORY_READ)).min(BUFFER_LEN),
            _ => BUFFER_LEN,
        };
        let buffer = self.buffer.get_or_insert_with(|| buffers.take());
        let room = buffer.get_mut(self.end..limit).unwrap_or_default();
        let requested = room.len();
        let read = stream.receive_bytes(room);
        let (bytes, filled) = outcome(read, requested, stream)?;
        self.end += bytes;
        Ok((bytes, filled))
    }

    /// The partial ULPDU at the front and its full length, if its payload should go directly to its
    /// place: no check must precede, and many bytes are missing.
    #[inline]
    pub(crate) fn direct_candidate(&self) -> Option<(&[u8], usize)> {
        if self.crc == CrcMode::On || self.markers || self.direct.is_some() || self.current.is_some() {
            return None;
        }
        let bytes = self.buffer.as_ref()?.get(self.start..self.end)?;
        let ulpdu_len = fpdu::ulpdu_len(bytes)?;
        let ulpdu = bytes.get(LENGTH_LEN..)?;
        let header_len = ddp::header_len(*ulpdu.first()?);
        (ulpdu.len() >= header_len && ulpdu_len >= ulpdu.len() + RECEIVE_DIRECT_MIN)
            .then_some((ulpdu, ulpdu_len))
    }

    /// The upper layer has taken the part of the payload that
    /// [`direct_candidate`](Self::direct_candidate) returned. Returns the length of the missing
    /// part, which [`fill_direct`](Self::fill_direct) reads.
    pub(crate) fn begin_direct(&mut self) -> usize {
        let Some((ulpdu, ulpdu_len)) = self.direct_candidate().map(|(u, len)| (u.len(), len)) else {
            return 0;
        };
        let missing = ulpdu_len - ulpdu;
        self.direct = Some(Direct {
            missing,
            trailer: padding(ulpdu_len) + CRC_LEN,
            began_at: self.position,
        });
        self.position += fpdu_len(ulpdu_len) as u64;
        (self.start, self.end) = (0, 0);
        missing
    }

    /// Whether no FPDU is being read directly.
    pub(crate) fn direct_ended(&self) -> bool {
        self.direct.is_none()
    }

    /// Reads the next payload into `pieces`, which are not longer than the missing part; returns
    /// how many bytes of payload were read, and how many bytes in all. If `pieces` cover all that
    /// is missing, the read continues a little beyond the payload.
    /// [`direct_ended`](Self::direct_ended) reports when the FPDU is complete.
    pub(crate) fn fill_direct<'p>(
        &'p mut self,
        buffers: &BufferPool,
        stream: &mut dyn Stream,
        pieces: &mut Vec<PieceMut<'p>>,
    ) -> Result<(usize, usize, Filled), LlpError> {
        let Some(mut direct) = self.direct else {
            return Ok((0, 0, Filled::Nothing));
        };
        let payload: usize = pieces.iter().map(PieceMut::len).sum();
        let mut requested = payload;
        if payload == direct.missing {
            let buffer = self.buffer.get_or_insert_with(|| buffers.take());
            let tail = match stream.has_input() {
                Some(_) => MEMORY_TAIL,
                None => TAIL,
            };
            let tail = buffer.get_mut(self.end..tail).unwrap_or_default();
            requested += tail.len();
            pieces.push(PieceMut::of(tail));
        }
        let read = stream.receive(pieces);
        let (read, filled) = outcome(read, requested, stream)?;
        let placed = read.min(payload);
        direct.missing -= placed;
        self.end += read - placed;
        (self.direct, self.start) = direct.after(self.end, self.start);
        Ok((placed, read, filled))
    }

    /// Drops all bytes that arrived: no byte after an error may be used (RFC 5044 §8).
    pub(crate) fn discard(&mut self) {
        (self.start, self.end) = (0, 0);
        self.current = None;
        self.direct = None;
    }

    #[inline]
    pub(crate) fn release(&mut self, buffers: &BufferPool) {
        if self.start == self.end
            && let Some(buffer) = self.buffer.take()
        {
            buffers.give(buffer);
        }
    }
}

/// Interprets the result of a read of at most `requested` bytes.
fn outcome(
    read: Result<usize, StreamError>,
    requested: usize,
    stream: &mut dyn Stream,
) -> Result<(usize, Filled), LlpError> {
    match read {
        Ok(0) => Ok((0, Filled::Fin)),
        Ok(n) if n < requested && stream.has_input() != Some(true) => Ok((n, Filled::Short)),
        Ok(n) => Ok((n, Filled::All)),
        Err(StreamError::WouldBlock) => Ok((0, Filled::Nothing)),
        Err(error) => Err(error.into()),
    }
}
