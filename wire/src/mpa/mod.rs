//! MPA: markers, FPDUs with their CRC, and the start-up frames (RFC 5044, RFC 6581).

pub mod fpdu;
pub mod marker;
pub mod startup;

/// Least MULPDU an LLP may report; not undercut however small the EMSS (RFC 5044 §3, §4.5).
pub const MIN_MULPDU: u16 = 128;

/// Greatest MULPDU and greatest ULPDU a sender may post (RFC 5044 §3). With it no FPDUPTR exceeds
/// 16 bits.
pub const MAX_MULPDU: u16 = 64768;

/// The MULPDU for an effective maximum segment size of `emss` bytes (RFC 5044 §4.5).
///
/// `markers` says whether the peer asked for markers in what we send; then room for the worst case
/// is kept. The result is clamped to [`MIN_MULPDU`]`..=`[`MAX_MULPDU`].
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
    } else if room > MAX_MULPDU as u32 {
        MAX_MULPDU
    } else {
        room as u16
    }
}
