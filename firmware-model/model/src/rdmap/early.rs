//! Segments whose payload is placed before their turn (RFC 5041 §5.3), where the lower layer hands
//! up segments as they come.
//!
//! Only a segment that can be placed without doubt is. Whatever else it does, it does at its turn:
//! there it is checked again, as if it had just come, and delivered. Another segment that comes
//! early is placed at its turn. So an early segment never causes an error.
//!
//! Memory has the same bytes after the turn as if all had been placed in order: of two segments of
//! Writes for the same place, the later one counts (RFC 5040 §5.5 does not require that). Until
//! then a program sees those of an early segment before those of an earlier one.

use std::collections::BTreeMap;
use std::ops::Range;
use urnic_wire::ddp::TaggedHeader;

/// The places of Write segments that are filled and have not had their turn. They do not overlap.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// The end of each, by its STag and beginning.
    places: BTreeMap<(u32, u64), u64>,
}

impl Early {
    /// The first place of the STag that has bytes of `range`.
    fn first_in(&self, stag: u32, range: Range<u64>) -> Option<Range<u64>> {
        let before = self.places.range((stag, 0)..(stag, range.start)).next_back();
        let before = before.filter(|(_, end)| **end > range.start);
        let after = || self.places.range((stag, range.start)..(stag, range.end)).next();
        before.or_else(after).map(|((_, begin), end)| *begin..*end)
    }

    /// The bytes of a Write segment with this header were placed before its turn.
    pub(super) fn insert(&mut self, header: &TaggedHeader, len: usize) {
        let end = header.to.saturating_add(len as u64);
        self.places.insert((header.stag, header.to), end);
    }

    /// It is the segment's turn.
    pub(super) fn remove(&mut self, header: &TaggedHeader) {
        self.places.remove(&(header.stag, header.to));
    }

    /// Whether a place has bytes of this segment.
    pub(super) fn overlaps(&self, header: &TaggedHeader, len: usize) -> bool {
        let end = header.to.saturating_add(len as u64);
        self.first_in(header.stag, header.to..end).is_some()
    }

    /// Calls `put` for the parts of `len` bytes at `to` that are in no place, as offsets from `to`.
    #[inline]
    pub(super) fn outside<E>(
        &self,
        stag: u32,
        (to, len): (u64, usize),
        mut put: impl FnMut(Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.places.is_empty() {
            return put(0..len);
        }
        let end = to.saturating_add(len as u64);
        let mut at = to;
        while at < end {
            let place = self.first_in(stag, at..end).unwrap_or(end..end);
            if place.start > at {
                put((at - to) as usize..(place.start - to) as usize)?;
            }
            at = place.end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_parts_outside_are_those_in_no_place(
            cuts in prop::collection::btree_set(10u64..100, 0..12),
            to in 0u64..120,
            len in 1usize..120,
        ) {
            let mut early = Early::default();
            let cuts: Vec<u64> = cuts.into_iter().collect();
            for place in cuts.chunks_exact(2) {
                early.places.insert((7, place[0]), place[1]);
                early.places.insert((8, place[0] + 5), place[1] + 5);
            }
            let mut put = vec![0; len];
            early.outside(7, (to, len), |range| {
                assert!(!range.is_empty());
                put[range].iter_mut().for_each(|byte| *byte += 1);
                Ok::<(), ()>(())
            }).unwrap();
            for (at, count) in (to..).zip(put) {
                let is_inside = cuts.chunks_exact(2).any(|place| (place[0]..place[1]).contains(&at));
                prop_assert_eq!(count, u8::from(!is_inside), "the byte at {}", at);
            }
        }
    }
}
