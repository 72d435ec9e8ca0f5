//! MPA: markers, FPDUs with their CRC, and the start-up frames (RFC 5044, RFC 6581).

pub mod fpdu;
pub mod marker;
pub mod startup;

/// Minimum MULPDU that an LLP may report, for any EMSS (RFC 5044 §3, §4.5).
pub const MIN_MULPDU: u16 = 128;

/// Maximum MULPDU, and maximum length of a ULPDU that a sender may post (RFC 5044 §3). With this
/// limit no FPDUPTR exceeds 16 bits.
pub const MAX_MULPDU: u16 = 64768;

/// The longest MULPDU that [`mulpdu`] returns: like those of smaller segments, a multiple of four
/// less the length of `ULPDU_Length`, so a full FPDU has no padding.
const MAX_UNPADDED: u16 = MAX_MULPDU - fpdu::LENGTH_LEN as u16;

/// The MULPDU for an effective maximum segment size of `emss` bytes (RFC 5044 §4.5).
///
/// `markers` is whether the peer requires markers in the sent stream; if so, room for the worst
/// case is reserved. The result is at least [`MIN_MULPDU`]; an FPDU of any other result has no
/// padding.
pub const fn mulpdu(emss: u32, markers: bool) -> u16 {
    let marked = if markers {
        marker::LEN as u32 * emss.div_ceil(marker::INTERVAL as u32)
    } else {
        0
    };
    let overhead = (fpdu::LENGTH_LEN + fpdu::CRC_LEN) as u32 + marked + emss % 4;
    let room = emss.saturating_sub(overhead);
    if room < MIN_MULPDU as u32 {
        MIN_MULPDU
    } else if room > MAX_UNPADDED as u32 {
        MAX_UNPADDED
    } else {
        room as u16
    }
}
