//! A confirmation: what an end tells a peer that understands it about messages that no Read may
//! confirm in time, a Read Response of length zero that answers no Read (design: completions).

use urnic_wire::ddp::TaggedHeader;
use urnic_wire::rdmap::{Control, Opcode, ReadRequest};

/// STag in zero-length messages of our own: some hardware faults on 0, though no peer may check it
/// (row EMPA-20).
pub(super) const ANY_STAG: u32 = 1;

/// Source offset of the Reads of length zero that confirm messages: whoever sends it takes a last
/// confirmation.
pub(super) const MARK: u64 = u64::from_be_bytes(*b"urnic\0\0\x01");

/// The header of a confirmation: all up to `position` of what the peer sent is processed.
pub(super) fn header(position: u64) -> TaggedHeader {
    TaggedHeader {
        last: true,
        rsvd_ulp: Control::from(Opcode::ReadResponse).byte(),
        stag: ANY_STAG,
        to: position,
    }
}

/// Whether a Read Response with this header and `len` bytes is a confirmation. The Response to
/// a Read of ours of length zero has the offset 0.
#[inline]
pub(super) fn is_confirmation(header: &TaggedHeader, len: usize) -> bool {
    header.last && len == 0 && header.stag == ANY_STAG && header.to != 0
}

/// Whether the peer that sent this request takes a confirmation.
pub(super) fn is_taken_by_sender_of(request: &ReadRequest) -> bool {
    request.size == 0 && request.source_stag == ANY_STAG && request.source_to == MARK
}
