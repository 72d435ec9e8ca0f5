//! Payload streams without chunked items, and the places at which the items are inserted again (RFC
//! 8166 §3.4.1, §3.4.5).
//!
//! A *reduced* stream lacks some items together with their XDR padding. The Position of a Read
//! chunk is the place of its item in the *unreduced* stream. The Position of the second item
//! therefore counts the first item and its padding, although the reduced stream contains neither.

use crate::malformed::Malformed;
use crate::xdr::pad;
use std::ops::Range;

/// A contiguous part of an unreduced stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// This range of the reduced stream.
    Inline(Range<usize>),
    /// The whole chunk with this index.
    Chunk(usize),
    /// 1 to 3 zero bytes: the padding that the chunk before did not contain.
    Pad(usize),
}

/// Bytes of the XDR padding of an item with `len` bytes.
pub fn padding(len: u64) -> usize {
    pad(len) as usize
}

/// The pieces of the unreduced stream, made of a reduced stream of `inline` bytes and of chunks.
/// `chunks` has Position and bytes of each chunk, by ascending Position.
///
/// A requester may leave the padding out of a chunk, or include it in the last segment or in a
/// segment of its own (§3.4.5.2). In each case the next byte follows at a multiple of four.
///
/// # Errors
/// [`Malformed::Position`] for a chunk that begins within the chunk before, or beyond the end of
/// the stream.
pub fn unreduced(inline: usize, chunks: &[(u32, u64)]) -> Result<Vec<Piece>, Malformed> {
    let mut pieces = Vec::with_capacity(2 * chunks.len() + 1);
    let mut taken = 0;
    let mut offset = 0_u64;
    for (index, &(position, len)) in chunks.iter().enumerate() {
        let impossible = Malformed::Position(position);
        let before = u64::from(position).checked_sub(offset).ok_or(impossible)?;
        let before = usize::try_from(before).map_err(|_| impossible)?;
        if before > inline - taken {
            return Err(impossible);
        }
        if before > 0 {
            pieces.push(Piece::Inline(taken..taken + before));
            taken += before;
        }
        pieces.push(Piece::Chunk(index));
        let pad = pad(len);
        if pad > 0 {
            pieces.push(Piece::Pad(pad as usize));
        }
        offset = u64::from(position) + len + pad;
    }
    if taken < inline {
        pieces.push(Piece::Inline(taken..inline));
    }
    Ok(pieces)
}

/// The Positions of items that are left out of a stream. `items` has an item's offset in the
/// reduced stream and its bytes, by ascending offset.
///
/// `None` if a Position does not fit into 32 bits.
pub fn positions(items: impl IntoIterator<Item = (usize, u64)>) -> Option<Vec<u32>> {
    let mut left_out = 0_u64;
    items
        .into_iter()
        .map(|(offset, len)| {
            let position = u32::try_from(offset as u64 + left_out).ok()?;
            left_out += len + pad(len);
            Some(position)
        })
        .collect()
}
