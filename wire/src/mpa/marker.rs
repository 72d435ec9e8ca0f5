//! Markers (RFC 5044 §4.2, §4.3): four bytes at every 512th byte of the TCP stream, counted from
//! the first marker, that point back to the start of their FPDU.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |           RESERVED            |            FPDUPTR            |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! In this module a *stream offset* counts bytes of one direction of full operation from its first
//! marker, which is at offset 0; the offset may wrap, because 512 divides 2³². An FPDU *starts* at
//! the offset where its predecessor ends. If that offset is a multiple of 512, a marker comes
//! first; it belongs to the FPDU (whose CRC covers it) and has FPDUPTR 0. FPDUs and markers are
//! multiples of four bytes, so no marker splits ULPDU_Length from the next bytes, nor the CRC.

use super::fpdu::{self, CrcMode, FpduError, LENGTH_LEN, fpdu_len};
use core::ops::Range;

/// Bytes of a marker.
pub const LEN: usize = 4;

/// Bytes from the start of a marker to the start of the next marker.
pub const INTERVAL: usize = 512;

/// Bytes of FPDUs between two markers.
pub const BETWEEN: usize = INTERVAL - LEN;

/// A marker, by its FPDUPTR: bytes from the first byte of ULPDU_Length to the first byte of the
/// marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marker {
    /// A multiple of four. Earlier markers inside the FPDU count, because FPDUPTR is a distance in
    /// the stream.
    pub fpduptr: u16,
}

impl Marker {
    /// Parses a marker; ignores the reserved half and the two low bits of FPDUPTR (RFC 5044 §4.2).
    #[inline]
    pub const fn parse(bytes: [u8; LEN]) -> Self {
        Self {
            fpduptr: u16::from_be_bytes([bytes[2], bytes[3]]) & !3,
        }
    }

    /// The marker's bytes.
    #[inline]
    pub const fn to_bytes(self) -> [u8; LEN] {
        let [high, low] = (self.fpduptr & !3).to_be_bytes();
        [0, 0, high, low]
    }
}

/// Bytes from stream offset `offset` to the next marker; 0 if a marker is due at `offset` itself.
#[inline]
pub const fn distance(offset: u64) -> usize {
    (offset.wrapping_neg() % INTERVAL as u64) as usize
}

/// Number of markers that belong to an FPDU of `fpdu_len` bytes (markers not counted) that starts
/// at `offset`.
#[inline]
pub const fn count(offset: u64, fpdu_len: usize) -> usize {
    fpdu_len.saturating_sub(distance(offset)).div_ceil(BETWEEN)
}

/// Bytes that an FPDU of `fpdu_len` bytes takes on the wire, its markers included.
#[inline]
pub const fn marked_len(offset: u64, fpdu_len: usize) -> usize {
    fpdu_len + LEN * count(offset, fpdu_len)
}

/// A part of an FPDU on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A marker.
    Marker(Marker),
    /// A range of the FPDU's bytes (counted without markers).
    Fpdu(Range<usize>),
}

/// An iterator over the parts of an FPDU on the wire, in order: its bytes and its markers.
///
/// A receiver uses it to remove the markers; [`insert`] is the sender's side.
#[derive(Clone, Debug)]
pub struct Pieces {
    distance: usize,
    position: usize,
    ulpdu_length_at: usize,
    done: usize,
    fpdu_len: usize,
}

/// The pieces of an FPDU of `fpdu_len` bytes that starts at stream offset `offset`.
#[inline]
pub fn pieces(offset: u64, fpdu_len: usize) -> Pieces {
    let distance = distance(offset);
    // A marker at the start is not part of the distance in FPDUPTR.
    let ulpdu_length_at = if distance == 0 { LEN } else { 0 };
    Pieces {
        distance,
        position: 0,
        ulpdu_length_at,
        done: 0,
        fpdu_len,
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        let left = self.fpdu_len - self.done;
        if left == 0 {
            return None;
        }
        if self.distance == 0 {
            // The distance exceeds 65535 only with a ULPDU that no conforming sender posts; the low
            // bits are sent then.
            let fpduptr = self.position.saturating_sub(self.ulpdu_length_at) as u16;
            self.distance = BETWEEN;
            self.position += LEN;
            return Some(Piece::Marker(Marker { fpduptr }));
        }
        let start = self.done;
        self.done += left.min(self.distance);
        let taken = self.done - start;
        self.distance -= taken;
        self.position += taken;
        Some(Piece::Fpdu(start..self.done))
    }
}

/// Bytes of the marked FPDU at the front of `bytes`, if its ULPDU_Length is present.
#[inline]
pub fn wire_len(offset: u64, bytes: &[u8]) -> Option<usize> {
    let lead = if distance(offset) == 0 { LEN } else { 0 };
    let ulpdu_len = fpdu::ulpdu_len(bytes.get(lead..)?)?;
    Some(marked_len(offset, fpdu_len(ulpdu_len)))
}

/// Inserts the markers into the FPDU of `fpdu_len` bytes at the front of `buffer`; returns the
/// number of bytes with markers. The CRC, which covers the markers, is written afterwards
/// ([`fpdu::seal`]).
///
/// # Panics
/// If `buffer` is shorter than [`marked_len`]`(offset, fpdu_len)`.
pub fn insert(offset: u64, fpdu_len: usize, buffer: &mut [u8]) -> usize {
    let lead = distance(offset);
    let ulpdu_length_at = if lead == 0 { LEN } else { 0 };
    let mut from_end = fpdu_len;
    // From the end to the start, so that no byte is overwritten before it is moved.
    for n in (0..count(offset, fpdu_len)).rev() {
        let from = lead + n * BETWEEN;
        let at = lead + n * INTERVAL;
        buffer.copy_within(from..from_end, at + LEN);
        // The distance exceeds 65535 only with a ULPDU that no conforming sender posts; the low
        // bits are sent then.
        let fpduptr = at.saturating_sub(ulpdu_length_at) as u16;
        buffer[at..at + LEN].copy_from_slice(&Marker { fpduptr }.to_bytes());
        from_end = from;
    }
    marked_len(offset, fpdu_len)
}

/// Writes the FPDU of `ulpdu` with its markers to the front of `buffer`; returns the bytes written.
///
/// # Panics
/// If `buffer` is shorter than [`marked_len`]`(offset, fpdu_len(ulpdu.len()))`, or `ulpdu` longer
/// than 65535 bytes.
pub fn emit(offset: u64, ulpdu: &[u8], crc: CrcMode, buffer: &mut [u8]) -> usize {
    let plain = fpdu::emit(ulpdu, CrcMode::Off, buffer);
    let len = insert(offset, plain, buffer);
    if crc == CrcMode::On {
        fpdu::seal(&mut buffer[..len]);
    }
    len
}

/// Parses the marked FPDU at the front of `bytes` and makes its ULPDU contiguous in place.
///
/// Returns the range of the ULPDU in `bytes` and the number of bytes of the FPDU on the wire; bytes
/// after the FPDU are unchanged. The CRC is checked first, over the received bytes; then every
/// marker.
///
/// # Errors
/// The errors of [`fpdu::parse`], and [`FpduError::Marker`] if a marker and ULPDU_Length disagree.
/// On any error `bytes` is unchanged.
pub fn parse(offset: u64, bytes: &mut [u8], crc: CrcMode) -> Result<(Range<usize>, usize), FpduError> {
    let have = bytes.len();
    let lead = if distance(offset) == 0 { LEN } else { 0 };
    let too_short = |needed| FpduError::Incomplete { needed, have };
    let ulpdu_len = bytes
        .get(lead..)
        .and_then(fpdu::ulpdu_len)
        .ok_or(too_short(lead + LENGTH_LEN))?;
    let plain = fpdu_len(ulpdu_len);
    let needed = marked_len(offset, plain);
    let fpdu = bytes.get_mut(..needed).ok_or(too_short(needed))?;
    if crc == CrcMode::On {
        fpdu::check(fpdu)?;
    }
    check_markers(offset, plain, fpdu)?;

    let mut from = 0;
    for piece in pieces(offset, plain) {
        match piece {
            Piece::Marker(_) => from += LEN,
            Piece::Fpdu(to) => {
                fpdu.copy_within(from..from + to.len(), to.start);
                from += to.len();
            }
        }
    }
    Ok((LENGTH_LEN..LENGTH_LEN + ulpdu_len, needed))
}

fn check_markers(offset: u64, plain: usize, fpdu: &[u8]) -> Result<(), FpduError> {
    let mut at = 0;
    for piece in pieces(offset, plain) {
        match piece {
            Piece::Marker(expected) => {
                let found = fpdu[at..]
                    .first_chunk()
                    .map(|bytes| Marker::parse(*bytes).fpduptr);
                let found = found.unwrap_or_default();
                if found != expected.fpduptr {
                    return Err(FpduError::Marker {
                        at,
                        expected: expected.fpduptr,
                        found,
                    });
                }
                at += LEN;
            }
            Piece::Fpdu(bytes) => at += bytes.len(),
        }
    }
    Ok(())
}
