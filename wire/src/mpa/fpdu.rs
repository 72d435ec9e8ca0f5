//! The FPDU (RFC 5044 §4.1).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |          ULPDU_Length         |                               |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+                               +
//! |                             ULPDU                             |
//! |                               +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                               |         PAD (0-3 bytes)      |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                              CRC                              |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! This module handles no markers; [`super::marker`] inserts and removes them.

use crate::crc::crc32c;

/// Bytes of the ULPDU_Length field.
pub const LENGTH_LEN: usize = 2;

/// Bytes of the CRC field, which is present even if CRCs are off (RFC 5044 §4.1).
pub const CRC_LEN: usize = 4;

/// Whether the two ends agreed to generate and check CRCs (RFC 5044 §7.1.1, the C bit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrcMode {
    /// The CRC is generated, and checked before any data is delivered.
    On,
    /// The field is sent as zero, and any received value is valid.
    Off,
}

/// Why no ULPDU could be parsed from the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FpduError {
    /// More bytes are needed, which is no fault: the FPDU ends after `needed` bytes (counted from
    /// its start, markers included), of which `have` are present. If ULPDU_Length itself is
    /// incomplete, `needed` is the number of bytes required to read it.
    #[error("FPDU incomplete: {have} bytes of {needed}")]
    Incomplete {
        /// Number of bytes to wait for.
        needed: usize,
        /// Number of bytes present.
        have: usize,
    },
    /// The CRC does not match (RFC 5044 §8, error code 2).
    #[error("FPDU CRC is 0x{found:08x}, computed 0x{computed:08x}")]
    Crc {
        /// CRC computed from the bytes.
        computed: u32,
        /// CRC that the peer sent.
        found: u32,
    },
    /// A marker does not point at the start of the FPDU it lies in (RFC 5044 §8, error code 3).
    #[error("marker at FPDU byte {at} has FPDUPTR {found}, expected {expected}")]
    Marker {
        /// Position of the marker, in bytes from the FPDU's first byte on the wire.
        at: usize,
        /// The distance that ULPDU_Length implies.
        expected: u16,
        /// FPDUPTR that the peer sent.
        found: u16,
    },
}

/// Bytes of padding after a ULPDU of `ulpdu_len` bytes, which make length field, ULPDU and pad a
/// multiple of four.
#[inline]
pub const fn padding(ulpdu_len: usize) -> usize {
    LENGTH_LEN.wrapping_sub(ulpdu_len) & 3
}

/// Bytes of the FPDU that carries `ulpdu_len` bytes, without markers.
#[inline]
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    LENGTH_LEN + ulpdu_len + padding(ulpdu_len) + CRC_LEN
}

/// The ULPDU_Length at the front of `bytes`, if both bytes of the field are present.
#[inline]
pub fn ulpdu_len(bytes: &[u8]) -> Option<usize> {
    bytes
        .first_chunk()
        .map(|length| u16::from_be_bytes(*length).into())
}

/// Parses the FPDU at the front of `bytes`; returns its ULPDU and the bytes after the FPDU.
///
/// ULPDU_Length is accepted up to 65535: Linux's soft-iWARP exceeds [`super::MAX_MULPDU`] on
/// loopback. Pad bytes are not checked, except by the CRC.
///
/// # Errors
/// [`FpduError::Incomplete`] if more bytes are needed, [`FpduError::Crc`] if the CRC does not
/// match.
#[inline]
pub fn parse(bytes: &[u8], crc: CrcMode) -> Result<(&[u8], &[u8]), FpduError> {
    let have = bytes.len();
    let ulpdu_len = ulpdu_len(bytes).ok_or(FpduError::Incomplete {
        needed: LENGTH_LEN,
        have,
    })?;
    let needed = fpdu_len(ulpdu_len);
    let (fpdu, rest) = bytes
        .split_at_checked(needed)
        .ok_or(FpduError::Incomplete { needed, have })?;
    if crc == CrcMode::On {
        check(fpdu)?;
    }
    Ok((&fpdu[LENGTH_LEN..LENGTH_LEN + ulpdu_len], rest))
}

/// Compares the last four bytes of `fpdu` with the CRC32C of all bytes before them.
#[inline]
pub(super) fn check(fpdu: &[u8]) -> Result<(), FpduError> {
    let Some((covered, sent)) = fpdu.split_last_chunk() else {
        return Err(FpduError::Incomplete {
            needed: CRC_LEN,
            have: fpdu.len(),
        });
    };
    let (computed, found) = (crc32c(covered), u32::from_le_bytes(*sent));
    if computed == found {
        Ok(())
    } else {
        Err(FpduError::Crc { computed, found })
    }
}

/// Writes the FPDU of `ulpdu` to the front of `buffer` and returns its length,
/// [`fpdu_len`]`(ulpdu.len())`.
///
/// # Panics
/// If `buffer` is shorter than the FPDU, or `ulpdu` is longer than the maximum ULPDU_Length
/// (65535).
#[inline]
pub fn emit(ulpdu: &[u8], crc: CrcMode, buffer: &mut [u8]) -> usize {
    let length = emit_length(ulpdu.len());
    let end = LENGTH_LEN + ulpdu.len();
    buffer[..LENGTH_LEN].copy_from_slice(&length);
    buffer[LENGTH_LEN..end].copy_from_slice(ulpdu);
    let len = fpdu_len(ulpdu.len());
    buffer[end..len].fill(0);
    if crc == CrcMode::On {
        seal(&mut buffer[..len]);
    }
    len
}

/// Writes the CRC32C of all bytes before the last four of `fpdu` into these four (markers count,
/// RFC 5044 §4.4).
#[inline]
pub fn seal(fpdu: &mut [u8]) {
    if let Some((covered, crc)) = fpdu.split_last_chunk_mut::<CRC_LEN>() {
        *crc = crc32c(covered).to_le_bytes();
    }
}

/// The ULPDU_Length field for `ulpdu_len` bytes.
///
/// # Panics
/// If `ulpdu_len` exceeds 65535.
#[inline]
pub fn emit_length(ulpdu_len: usize) -> [u8; LENGTH_LEN] {
    assert!(
        ulpdu_len <= usize::from(u16::MAX),
        "a ULPDU of {ulpdu_len} bytes does not fit ULPDU_Length"
    );
    (ulpdu_len as u16).to_be_bytes()
}
