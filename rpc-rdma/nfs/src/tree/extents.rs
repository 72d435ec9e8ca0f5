//! The contents of a file in memory: pieces with holes between them.
//!
//! A large buffer that a transport received is kept without a copy. Each buffer belongs to one
//! extent only, which uses at least half of it. Old contents that are overwritten piece by piece
//! therefore do not occupy memory for long. A write to a piece that is being sent copies the piece.

use crate::memory::{MAX_BUFFER, Pool, Slice};
use crate::tree::Data;
use std::collections::BTreeMap;

/// The bytes of a file.
#[derive(Debug, Default)]
pub(super) struct Extents {
    pieces: BTreeMap<u64, Slice>,
    size: u64,
    /// Bytes of the buffers.
    used: u64,
}

/// The error that there is no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Length from which a buffer of a transport is kept and not copied.
const KEEP: usize = 64 << 10;

/// Maximum pieces of the result of a READ. More pieces are copied into one.
const MAX_PIECES: usize = 16;

impl Extents {
    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    pub(super) const fn used(&self) -> u64 {
        self.used
    }

    /// The bytes from `offset`, at most `count`.
    pub(super) fn read(
        &self,
        offset: u64,
        count: usize,
        zeroes: &Slice,
        pool: &Pool,
    ) -> Result<Vec<Slice>, Full> {
        let end = self.size.min(offset.saturating_add(count as u64));
        let mut at = offset;
        let mut found = Vec::new();
        let first = self
            .pieces
            .range(..=offset)
            .next_back()
            .map_or(offset, |(&start, _)| start);
        let hole = |at: &mut u64, until: u64, found: &mut Vec<Slice>| {
            while *at < until {
                let piece = zeroes.part(0..usize::try_from(until - *at).unwrap_or(usize::MAX));
                *at += piece.len() as u64;
                found.push(piece);
            }
        };
        for (&start, piece) in self.pieces.range(first..end.max(first)) {
            let stop = start + piece.len() as u64;
            if stop <= at {
                continue;
            }
            hole(&mut at, start.min(end), &mut found);
            let part = piece.part((at - start) as usize..(end.min(stop) - start) as usize);
            at += part.len() as u64;
            found.push(part);
        }
        hole(&mut at, end, &mut found);
        if found.len() <= MAX_PIECES {
            return Ok(found);
        }
        let mut together = pool.take((end - offset) as usize).ok_or(Full)?;
        let mut filled = 0;
        for piece in found {
            together[filled..filled + piece.len()].copy_from_slice(&piece);
            filled += piece.len();
        }
        Ok(vec![together.share()])
    }

    /// Writes data. The file may take `room` more bytes of memory.
    pub(super) fn write(&mut self, offset: u64, data: Data, room: u64, pool: &Pool) -> Result<(), Full> {
        let bytes = data.bytes();
        if bytes.is_empty() {
            return Ok(());
        }
        match data {
            Data::Apart(slice) if bytes.len() >= KEEP && slice.footprint() < 2 * bytes.len() => {
                self.make_room(
                    offset,
                    offset + bytes.len() as u64,
                    room,
                    slice.footprint() as u64,
                    pool,
                )?;
                self.insert(offset, slice.clone());
            }
            _ => {
                let mut end = offset;
                let copied = self.copy(&mut end, bytes, room, pool);
                // The part for which there was room is written, as on a full disk.
                if end > offset {
                    self.size = self.size.max(end);
                }
                return copied;
            }
        }
        self.size = self.size.max(offset + bytes.len() as u64);
        Ok(())
    }

    /// Truncates the contents, or extends them with a hole.
    pub(super) fn resize(&mut self, size: u64, pool: &Pool) -> Result<(), Full> {
        if size < self.size {
            self.make_room(size, u64::MAX, u64::MAX, 0, pool)?;
        }
        self.size = size;
        Ok(())
    }

    /// Writes at `offset`, and advances the offset.
    fn copy(&mut self, offset: &mut u64, mut bytes: &[u8], room: u64, pool: &Pool) -> Result<(), Full> {
        while !bytes.is_empty() {
            let left = bytes.len() as u64;
            let before = self.pieces.range_mut(..=*offset).next_back();
            // The bytes go into the extent there, if no reader shares it, or after it into the
            // rest of its buffer.
            if let Some((&start, piece)) = before {
                let mut within = piece.len() as u64 - (*offset - start).min(piece.len() as u64);
                if within == 0 && start + piece.len() as u64 == *offset {
                    let next = self
                        .pieces
                        .range(*offset..)
                        .next()
                        .map_or(u64::MAX, |(&next, _)| next);
                    let more = usize::try_from((next - *offset).min(left)).unwrap_or(usize::MAX);
                    if let Some(piece) = self.pieces.get_mut(&start) {
                        within = piece.grow(more) as u64;
                    }
                }
                let len = within.min(left) as usize;
                if len > 0
                    && let Some(piece) = self.pieces.get_mut(&start).and_then(Slice::exclusive)
                {
                    let at = (*offset - start) as usize;
                    piece[at..at + len].copy_from_slice(&bytes[..len]);
                    *offset += len as u64;
                    bytes = &bytes[len..];
                    continue;
                }
            }
            // The bytes go into a new buffer. At the end of a file, the buffer has room for the
            // data that will follow.
            let len = bytes.len().min(MAX_BUFFER);
            let end = *offset + len as u64;
            let capacity = if end > self.size {
                usize::try_from(*offset).unwrap_or(KEEP).min(KEEP).max(len)
            } else {
                len
            };
            let mut buffer = pool.take(capacity).ok_or(Full)?;
            buffer.resize(len);
            buffer.copy_from_slice(&bytes[..len]);
            self.make_room(*offset, end, room, buffer.capacity() as u64, pool)?;
            self.insert(*offset, buffer.share());
            *offset = end;
            bytes = &bytes[len..];
        }
        Ok(())
    }

    /// Removes `start..end` from the pieces, if the rest and `more` bytes fit into `room`.
    fn make_room(&mut self, start: u64, end: u64, room: u64, more: u64, pool: &Pool) -> Result<(), Full> {
        let first = self
            .pieces
            .range(..start)
            .next_back()
            .map_or(start, |(&first, _)| first);
        let touched: Vec<u64> = (self.pieces.range(first..end))
            .filter(|(at, piece)| **at + piece.len() as u64 > start)
            .map(|(at, _)| *at)
            .collect();
        // At most two parts remain. The longer one stays in its old buffer if it is at least half
        // of it. Other parts move to new buffers.
        let mut stay = Vec::new();
        let mut freed = 0;
        for at in &touched {
            let Some(piece) = self.pieces.get(at) else {
                continue;
            };
            freed += piece.footprint() as u64;
            let stop = at + piece.len() as u64;
            let head = piece.part(0..start.saturating_sub(*at) as usize);
            let tail = piece.part(end.saturating_sub(*at).min(piece.len() as u64) as usize..piece.len());
            let keeps_head = head.len() >= tail.len();
            for (at, part, first) in [
                (*at, head, keeps_head),
                (stop - tail.len() as u64, tail, !keeps_head),
            ] {
                if part.is_empty() {
                    continue;
                }
                let part = if first && 2 * part.len() >= part.footprint() {
                    part
                } else {
                    let mut own = pool.take(part.len()).ok_or(Full)?;
                    own.copy_from_slice(&part);
                    own.share()
                };
                stay.push((at, part));
            }
        }
        let again: u64 = stay.iter().map(|(_, part)| part.footprint() as u64).sum();
        if (again + more).saturating_sub(freed) > room {
            return Err(Full);
        }
        for at in &touched {
            self.pieces.remove(at);
        }
        self.used -= freed;
        for (at, part) in stay {
            self.insert(at, part);
        }
        Ok(())
    }

    fn insert(&mut self, at: u64, piece: Slice) {
        self.used += piece.footprint() as u64;
        self.pieces.insert(at, piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_without_room_leaves_nothing_after_the_end() {
        let pool = Pool::new();
        let mut file = Extents::default();
        file.write(0, Data::Inline(b"abc"), u64::MAX, &pool).ok();
        let full = file.write(3, Data::Inline(&[b'x'; 1 << 20]), 0, &pool);
        assert!(full.is_err());
        let size = file.size();
        file.resize(1 << 20, &pool).ok();
        let zeroes = pool.take(1 << 16).map(|mut zeroes| {
            zeroes.fill(0);
            zeroes.share()
        });
        let there: Vec<u8> = file
            .read(0, 1 << 20, &zeroes.expect("memory"), &pool)
            .unwrap_or_default()
            .iter()
            .flat_map(|piece| piece.to_vec())
            .collect();
        let (data, hole) = there.split_at(size as usize);
        assert!(data.starts_with(b"abc") && data[3..].iter().all(|byte| *byte == b'x'));
        assert!(hole.iter().all(|byte| *byte == 0));
    }
}
