//! The memory of the program that the server may access. Registrations may overlap; each page is
//! sent to the server once.
//!
//! The memory is divided into stretches that do not overlap. Each stretch counts the registrations
//! over it. A registration makes stretches of the pages that none covered yet; a stretch is removed
//! together with the last registration over it, and is not split.

use std::collections::BTreeMap;

/// A range of addresses: the first one, and the one after the last.
pub(super) type Range = (u64, u64);

/// Smallest unit of mapping.
const PAGE: u64 = 4096;

#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, Stretch>);

#[derive(Debug)]
struct Stretch {
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
    /// Stretches over a range, from the first on.
    fn over(&mut self, (start, end): Range) -> impl Iterator<Item = (u64, &mut Stretch)> {
        let first = match self.0.range(..=start).next_back() {
            Some((at, stretch)) if stretch.end > start => *at,
            _ => start,
        };
        self.0
            .range_mut(first..end.max(first))
            .map(|(at, stretch)| (*at, stretch))
    }

    /// Counts one more registration of whole pages; returns the new stretches.
    pub(super) fn add(&mut self, range: Range) -> Vec<Range> {
        let (mut at, end) = range;
        let mut gaps = Vec::new();
        for (start, stretch) in self.over(range) {
            if at < start {
                gaps.push((at, start));
            }
            stretch.count += 1;
            at = stretch.end;
        }
        if at < end {
            gaps.push((at, end));
        }
        for (start, end) in &gaps {
            self.0.insert(*start, Stretch { end: *end, count: 1 });
        }
        gaps
    }

    /// Removes one registration; returns the stretches that no registration covers any more.
    pub(super) fn remove(&mut self, range: Range) -> Vec<Range> {
        let mut gone = Vec::new();
        for (start, stretch) in self.over(range) {
            stretch.count = stretch.count.saturating_sub(1);
            if stretch.count == 0 {
                gone.push((start, stretch.end));
            }
        }
        for (start, _) in &gone {
            self.0.remove(start);
        }
        gone
    }

    /// Whether the server may access all of a range.
    pub(super) fn covers(&mut self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else {
            return false;
        };
        let mut at = address;
        for (start, stretch) in self.over((address, end)) {
            if start > at {
                return false;
            }
            at = stretch.end;
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
    fn what_is_covered_is_told_of_once() {
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
        /// Compares with a count for each page: stretches do not overlap, and the server has every
        /// registered page.
        #[test]
        fn the_server_knows_exactly_what_it_needs(steps in prop::collection::vec((0u64..16, 1u64..6, any::<bool>()), 1..60)) {
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
