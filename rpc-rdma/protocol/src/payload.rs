//! Payload streams with items left out, and put back (RFC 8166 §3.4.1, §3.4.5).
//!
//! A *reduced* stream lacks some items together with their XDR padding. A Read chunk's Position is
//! where its item begins in the *unreduced* stream, so the second one counts the first item and its
//! padding although neither is there.

use crate::malformed::Malformed;
use crate::xdr::pad;
use std::ops::Range;

/// One stretch of an unreduced stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Of the reduced stream.
    Inline(Range<usize>),
    /// All of the chunk with this index.
    Chunk(usize),
    /// Zeroes, 1 to 3: the padding that the chunk before did not bring.
    Pad(usize),
}

/// Bytes of an item's XDR padding.
pub fn padding(len: u64) -> usize {
    pad(len) as usize
}

/// How the unreduced stream is made of a reduced one of `inline` bytes and chunks, of which
/// `chunks` has Position and bytes by ascending Position.
///
/// A requester may have left the padding out of a chunk, or put it there, as a longer last segment
/// or as one of its own (§3.4.5.2). Either way the next byte comes at a multiple of four.
///
/// # Errors
/// [`Malformed::Position`] for a chunk that begins within the one before, or behind the end of the
/// stream.
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

/// The Positions of items of `items` bytes each, left out at an offset of the reduced stream:
/// `(offset, len)`, offsets ascending.
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
