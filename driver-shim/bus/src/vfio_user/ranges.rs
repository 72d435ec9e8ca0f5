//! The memory of the program that the server may access. Registrations may overlap; each page is
//! sent to the server once.
//!
//! The memory is divided into extents that do not overlap. Each extent counts the registrations
//! over it. A registration makes extents of the pages that none covered yet; an extent is removed
//! together with the last registration over it, and is not split.

use std::collections::BTreeMap;

/// A range of addresses: the first one, and the one after the last.
pub(super) type Range = (u64, u64);

/// Smallest unit of mapping.
const PAGE: u64 = 4096;

#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, Extent>);

#[derive(Debug)]
struct Extent {
    end: u64,
    count: u32,
}

/// The pages that contain `len` bytes at `address`.
pub(super) fn pages(address: u64, len: u64) -> Range {
    let start = address & !(PAGE - 1);
    let end = address.saturating_add(len).checked_next_multiple_of(PAGE);
    (start, end.unwrap_or(!(PAGE - 1)))
}

impl Ranges {
    /// Extents over a range, from the first on.
    fn over(&mut self, (start, end): Range) -> impl Iterator<Item = (u64, &mut Extent)> {
        let first = match self.0.range(..=start).next_back() {
            Some((at, extent)) if extent.end > start => *at,
            _ => start,
        };
        self.0
            .range_mut(first..end.max(first))
            .map(|(at, extent)| (*at, extent))
    }

    /// Counts one more registration of whole pages; returns the new extents.
    pub(super) fn add(&mut self, range: Range) -> Vec<Range> {
        let (mut at, end) = range;
        let mut gaps = Vec::new();
        for (start, extent) in self.over(range) {
            if at < start {
                gaps.push((at, start));
            }
            extent.count += 1;
            at = extent.end;
        }
        if at < end {
            gaps.push((at, end));
        }
        for (start, end) in &gaps {
            self.0.insert(*start, Extent { end: *end, count: 1 });
        }
        gaps
    }

    /// Removes one registration; returns the extents that no registration covers any more.
    pub(super) fn remove(&mut self, range: Range) -> Vec<Range> {
        let mut removed = Vec::new();
        for (start, extent) in self.over(range) {
            extent.count = extent.count.saturating_sub(1);
            if extent.count == 0 {
                removed.push((start, extent.end));
            }
        }
        for (start, _) in &removed {
            self.0.remove(start);
        }
        removed
    }

    /// Whether the server may access all of a range.
    pub(super) fn covers(&mut self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else {
            return false;
        };
        let mut at = address;
        for (start, extent) in self.over((address, end)) {
            if start > at {
                return false;
            }
            at = extent.end;
        }
        at >= end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_are_whole() {
        assert_eq!(pages(0x1001, 1), (0x1000, 0x2000));
        assert_eq!(pages(0x1000, 0x1000), (0x1000, 0x2000));
        assert_eq!(pages(u64::MAX - 5, 100).1, !0xfff);
    }

    #[test]
    fn covered_pages_are_sent_to_the_server_once() {
        let mut ranges = Ranges::default();
        assert_eq!(ranges.add((0x2000, 0x4000)), [(0x2000, 0x4000)]);
        assert_eq!(ranges.add((0x1000, 0x5000)), [(0x1000, 0x2000), (0x4000, 0x5000)]);
        assert_eq!(ranges.add((0x3000, 0x4000)), []);
        assert!(ranges.covers(0x1800, 0x3000) && !ranges.covers(0x4800, 0x1000));
        assert_eq!(ranges.remove((0x2000, 0x4000)), []);
        assert_eq!(
            ranges.remove((0x1000, 0x5000)),
            [(0x1000, 0x2000), (0x4000, 0x5000)]
        );
        assert_eq!(ranges.remove((0x3000, 0x4000)), [(0x2000, 0x4000)]);
        assert!(!ranges.covers(0x3000, 1));
    }

    proptest! {
        /// Compares with a count for each page: extents do not overlap, and the server has every
        /// registered page.
        #[test]
        fn the_server_has_exactly_the_registered_pages(steps in prop::collection::vec((0u64..16, 1u64..6, any::<bool>()), 1..60)) {
            let mut ranges = Ranges::default();
            let mut live: Vec<Range> = Vec::new();
            let mut known = [0u32; 32];
            for (at, len, add) in steps {
                if add || live.is_empty() {
                    let range = (at * PAGE, (at + len) * PAGE);
                    live.push(range);
                    for (start, end) in ranges.add(range) {
                        (start / PAGE..end / PAGE).for_each(|page| known[page as usize] += 1);
                    }
                } else {
                    let range = live.swap_remove(at as usize % live.len());
                    for (start, end) in ranges.remove(range) {
                        (start / PAGE..end / PAGE).for_each(|page| known[page as usize] -= 1);
                    }
                }
                prop_assert!(known.iter().all(|count| *count <= 1));
                for (page, count) in known.iter().enumerate() {
                    let address = page as u64 * PAGE;
                    let needed = live.iter().any(|(start, end)| (*start..*end).contains(&address));
                    prop_assert!(!needed || *count == 1);
                    prop_assert_eq!(ranges.covers(address, PAGE), *count == 1);
                }
            }
            for range in live {
                for (start, end) in ranges.remove(range) {
                    (start / PAGE..end / PAGE).for_each(|page| known[page as usize] -= 1);
                }
            }
            prop_assert!(known.iter().all(|count| *count == 0));
        }
    }
}
