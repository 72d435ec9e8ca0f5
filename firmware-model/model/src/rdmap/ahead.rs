//! Payload that goes from the stream directly to its place, and what came for the segments behind.

use super::inbound::Segment;
use crate::host::PieceRoom;
use crate::stream::Between;
use std::collections::VecDeque;
use urnic_wire::ddp::{Header, TaggedHeader, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::mpa::fpdu::{CRC_LEN, LENGTH_LEN, emit_length, padding};

/// Segments that come by one copy. The peer lends about twice as many at a time, so that it can
/// lend more during a copy.
pub(super) const TOGETHER: usize = 8;

/// The segment whose payload is being read to its place, and how much of it is there; what came
/// for the segments behind it.
#[derive(Debug, Default)]
pub(super) struct Direct {
    pub(super) segment: Option<(Segment, usize)>,
    pub(super) ahead: VecDeque<Ahead>,
    pub(super) pieces: PieceRoom,
}

/// Payload of one segment that is in its place already.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ahead {
    pub(super) len: usize,
    /// What came behind it: the rest of its FPDU, and the header of the next.
    pub(super) behind: Option<Between>,
}

impl Direct {
    /// Forgets what was begun: nothing behind an error may be used.
    pub(super) fn clear(&mut self) {
        self.segment = None;
        self.ahead.clear();
    }
}

/// The header of the segment behind one with `len` bytes of payload, in the same message.
pub(super) fn continued(header: &Header, len: usize, last: bool) -> Header {
    match *header {
        Header::Untagged(header) => Header::Untagged(UntaggedHeader {
            last,
            mo: header.mo.wrapping_add(len as u32),
            ..header
        }),
        Header::Tagged(header) => Header::Tagged(TaggedHeader {
            last,
            to: header.to.wrapping_add(len as u64),
            ..header
        }),
    }
}

/// Whether `between`, behind the first `trailer` bytes, is the beginning of an FPDU with this
/// header and `len` bytes of payload. Returns the length of that FPDU's pad and CRC.
pub(super) fn begins(between: &Between, trailer: usize, header: &Header, len: usize) -> Option<usize> {
    let mut expected = [0; UNTAGGED_LEN];
    let header_len = header.emit(&mut expected);
    let ulpdu_len = header_len + len;
    let found = between.bytes().get(trailer..)?;
    let (found_len, found_header) = found.split_at_checked(LENGTH_LEN)?;
    let is_same = ulpdu_len <= u16::MAX.into()
        && found_len == emit_length(ulpdu_len)
        && expected.get(..header_len) == Some(found_header);
    is_same.then(|| padding(ulpdu_len) + CRC_LEN)
}
