//! Allocator of DMA addresses inside the ranges that the kernel allows.
//!
//! The IOMMU of a type1 container refuses mappings that overlap, and most IOMMUs take fewer bits
//! than a pointer has, so an IOVA cannot be the virtual address: every registration gets a range of
//! its own.

use std::collections::BTreeMap;

/// Mappings of at least this length are placed so that the IOMMU may use pages of this size for
/// them.
const LARGE: u64 = 2 << 20;

/// An address space of a device.
#[derive(Debug, Default)]
pub(super) struct IovaSpace {
    /// Free ranges, start to end (exclusive): disjoint, not adjacent, not empty.
    free: BTreeMap<u64, u64>,
    /// Allocated ranges, start to end (exclusive): disjoint and not empty; they may be adjacent.
    used: BTreeMap<u64, u64>,
    granule: u64,
}

impl IovaSpace {
    /// Makes an empty space whose ranges begin and end at multiples of `granule`, a power of two.
    pub(super) fn new(granule: u64) -> IovaSpace {
        IovaSpace {
            granule: granule.max(1),
            ..IovaSpace::default()
        }
    }

    /// Adds the addresses `first..=last`. The granules at 0 and at the end of all addresses are
    /// left out: no IOVA is 0, and no end overflows.
    pub(super) fn add(&mut self, first: u64, last: u64) {
        let start = first.max(1).checked_next_multiple_of(self.granule);
        let end = last.saturating_add(1) / self.granule * self.granule;
        if let Some(start) = start.filter(|start| *start < end) {
            self.give(start, end);
        }
    }

    /// Whether nothing is free.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Length of the range that was allocated at `start`.
    pub(super) fn len_of(&self, start: u64) -> Option<u64> {
        self.used.get(&start).map(|end| end - start)
    }

    /// Allocates the lowest free range of `len` bytes. A large range has the same offset in a large
    /// page as `like`, the address of the memory.
    pub(super) fn allocate(&mut self, len: u64, like: u64) -> Option<u64> {
        let len = len.max(1).checked_next_multiple_of(self.granule)?;
        let align = if len >= LARGE {
            LARGE.max(self.granule)
        } else {
            self.granule
        };
        let phase = like % align / self.granule * self.granule;
        let (start, end, at) = self.free.iter().find_map(|(&start, &end)| {
            let base = start
                .checked_sub(phase)
                .unwrap_or_else(|| start + (align - phase));
            let at = base.checked_next_multiple_of(align)?.checked_add(phase)?;
            let at = if at - start >= align { at - align } else { at };
            (at >= start && at.checked_add(len)? <= end).then_some((start, end, at))
        })?;
        self.free.remove(&start);
        if start < at {
            self.free.insert(start, at);
        }
        if at + len < end {
            self.free.insert(at + len, end);
        }
        self.used.insert(at, at + len);
        Some(at)
    }

    /// Frees the range that begins at `start`. Returns its length, or `None` if no range begins
    /// there.
    pub(super) fn release(&mut self, start: u64) -> Option<u64> {
        let end = self.used.remove(&start)?;
        self.give(start, end);
        Some(end - start)
    }

    /// Adds a range to the free ones and joins it with its neighbours. Parts of the range may be
    /// free already.
    fn give(&mut self, mut start: u64, mut end: u64) {
        while let Some((&from, &to)) = self
            .free
            .range(..=end)
            .next_back()
            .filter(|(_, to)| **to >= start)
        {
            self.free.remove(&from);
            start = start.min(from);
            end = end.max(to);
        }
        self.free.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;

    #[test]
    fn ranges_are_whole_pages_without_both_ends_of_all_addresses() {
        let mut space = IovaSpace::new(PAGE);
        space.add(0, 2 * PAGE + 5);
        assert_eq!(space.allocate(1, 0), Some(PAGE));
        assert_eq!(space.allocate(1, 0), None);
        let mut space = IovaSpace::new(PAGE);
        space.add(u64::MAX - 2 * PAGE + 1, u64::MAX);
        assert_eq!(space.allocate(PAGE, 0), Some(u64::MAX - 2 * PAGE + 1));
        assert_eq!(space.allocate(PAGE, 0), None);
    }

    #[test]
    fn large_ranges_are_aligned_like_their_memory() {
        let mut space = IovaSpace::new(PAGE);
        space.add(5 * PAGE, 64 * LARGE);
        let memory = 0x7fff_1234_5000;
        let at = space.allocate(3 * LARGE, memory).unwrap();
        assert_eq!(at % LARGE, memory % LARGE);
        assert!(at < LARGE + 5 * PAGE, "the lowest such place");
        assert_eq!(
            space.allocate(PAGE, memory),
            Some(5 * PAGE),
            "no small one is moved for it"
        );
    }

    #[test]
    fn a_range_may_not_be_released_twice() {
        let mut space = IovaSpace::new(PAGE);
        space.add(PAGE, 1 << 30);
        let at = space.allocate(3 * PAGE, 0).unwrap();
        assert_eq!(space.release(at + PAGE), None);
        assert_eq!(space.release(at), Some(3 * PAGE));
        assert_eq!(space.release(at), None);
        assert_eq!(space.allocate(u64::MAX, 0), None);
        // The rest of the address range holds no start of a large page.
        let mut space = IovaSpace::new(PAGE);
        space.add(u64::MAX - LARGE + PAGE, u64::MAX);
        assert_eq!(space.allocate(LARGE, PAGE), None);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Allocate(u64, u64),
        Release(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (1..9 * PAGE, any::<u64>()).prop_map(|(len, like)| Op::Allocate(len, like)),
            1 => (LARGE - PAGE..2 * LARGE, any::<u64>()).prop_map(|(len, like)| Op::Allocate(len, like)),
            3 => any::<usize>().prop_map(Op::Release),
        ]
    }

    proptest! {
        /// Compares with a plain list: an allocated range lies in an added one, overlaps no other,
        /// and is refused only where none fits; a freed range can be allocated again.
        #[test]
        fn ranges_are_apart_and_none_is_lost(
            ranges in proptest::collection::vec((0u64..1 << 24, 0u64..1 << 23), 1..5),
            ops in proptest::collection::vec(op(), 0..120),
        ) {
            let mut space = IovaSpace::new(PAGE);
            for (first, len) in &ranges {
                space.add(*first, first + len);
            }
            let whole: Vec<(u64, u64)> = space.free.iter().map(|(s, e)| (*s, *e)).collect();
            let mut out: Vec<(u64, u64)> = Vec::new();
            for op in ops {
                match op {
                    Op::Allocate(len, like) => {
                        let len_there = len.next_multiple_of(PAGE);
                        let phase = if len_there >= LARGE { like % LARGE / PAGE * PAGE } else { 0 };
                        let align = if len_there >= LARGE { LARGE } else { PAGE };
                        let fits = |at: u64| whole.iter().any(|(s, e)| *s <= at && at + len_there <= *e)
                            && out.iter().all(|(s, e)| at + len_there <= *s || *e <= at);
                        let lowest = (0..(1u64 << 25) / PAGE).map(|page| page * PAGE)
                            .find(|at| at % align == phase && fits(*at));
                        let at = space.allocate(len, like);
                        prop_assert_eq!(at, lowest);
                        out.extend(at.map(|at| (at, at + len_there)));
                    }
                    Op::Release(which) if !out.is_empty() => {
                        let (start, end) = out.swap_remove(which % out.len());
                        prop_assert_eq!(space.release(start), Some(end - start));
                    }
                    Op::Release(_) => {}
                }
            }
            for (start, _) in out {
                space.release(start);
            }
            let again: Vec<(u64, u64)> = space.free.iter().map(|(s, e)| (*s, *e)).collect();
            prop_assert_eq!(again, whole);
        }
    }
}
