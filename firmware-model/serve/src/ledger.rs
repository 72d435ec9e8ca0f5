//! The ledger of the memory that the client lent, by DMA address.

use rustix::io::Errno;
use std::collections::BTreeMap;

/// The place of an extent of the client's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Mapped in this process, readable and writable.
    Mapped,
    /// Only in the client.
    Remote {
        /// The device may read it.
        read: bool,
        /// The device may write it.
        write: bool,
    },
}

/// An extent of memory. The last address is inclusive, because an extent may end at the last 64-bit
/// address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) place: Place,
}

impl Extent {
    /// The extent of `size` bytes at `address`.
    ///
    /// # Errors
    ///
    /// `INVAL`: the extent is empty, or passes the end of 64 bits.
    pub(crate) fn new(address: u64, size: u64, place: Place) -> Result<Extent, Errno> {
        let last = size.checked_sub(1).and_then(|size| address.checked_add(size));
        Ok(Extent {
            first: address,
            last: last.ok_or(Errno::INVAL)?,
            place,
        })
    }
}

/// All extents that are lent. They do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The extents by first address.
    lent: BTreeMap<u64, Extent>,
}

impl Ledger {
    /// Number of extents.
    pub(crate) fn len(&self) -> usize {
        self.lent.len()
    }

    /// Whether any address of the extent is lent.
    pub(crate) fn overlaps(&self, extent: &Extent) -> bool {
        self.lent
            .range(..=extent.last)
            .next_back()
            .is_some_and(|(_, known)| known.last >= extent.first)
    }

    /// Inserts an extent that overlaps no other.
    pub(crate) fn insert(&mut self, extent: Extent) {
        debug_assert!(!self.overlaps(&extent));
        self.lent.insert(extent.first, extent);
    }

    /// Removes all extents inside of a range. There may be none: QEMU unmaps ranges that it never
    /// passed.
    ///
    /// # Errors
    ///
    /// `INVAL`: the range cuts through an extent. Nothing is removed then.
    pub(crate) fn remove(&mut self, first: u64, last: u64) -> Result<Vec<Extent>, Errno> {
        let inside = self.lent.range(first..=last).next_back();
        let cut_after = inside.is_some_and(|(_, known)| known.last > last);
        let cut_before = first
            .checked_sub(1)
            .and_then(|before| self.lent.range(..=before).next_back())
            .is_some_and(|(_, known)| known.last >= first);
        if cut_after || cut_before {
            return Err(Errno::INVAL);
        }
        let keys: Vec<u64> = self.lent.range(first..=last).map(|(key, _)| *key).collect();
        Ok(keys.iter().filter_map(|key| self.lent.remove(key)).collect())
    }

    /// The extent at an address.
    pub(crate) fn at(&self, address: u64) -> Option<&Extent> {
        let (_, known) = self.lent.range(..=address).next_back()?;
        (known.last >= address).then_some(known)
    }

    /// Whether all of the `len` bytes at `address` are lent, in places that `pleases` accepts.
    pub(crate) fn covers(&self, address: u64, len: u64, pleases: impl Fn(Place) -> bool) -> bool {
        let Ok(asked) = Extent::new(address, len.max(1), Place::Mapped) else {
            return false;
        };
        let mut next = asked.first;
        loop {
            match self.at(next) {
                Some(known) if !pleases(known.place) => return false,
                Some(known) if known.last >= asked.last => return true,
                Some(known) => next = known.last + 1,
                None => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(first: u64, size: u64) -> Extent {
        Extent::new(first, size, Place::Mapped).unwrap()
    }

    #[test]
    fn an_extent_may_end_at_the_last_address_but_not_pass_it() {
        assert_eq!(extent(u64::MAX - 4095, 4096).last, u64::MAX);
        assert_eq!(
            Extent::new(u64::MAX - 4095, 4097, Place::Mapped),
            Err(Errno::INVAL)
        );
        assert_eq!(Extent::new(0, 0, Place::Mapped), Err(Errno::INVAL));
        let mut ledger = Ledger::default();
        ledger.insert(extent(u64::MAX - 4095, 4096));
        assert!(ledger.covers(u64::MAX - 10, 11, |_| true));
        assert!(!ledger.covers(u64::MAX - 10, 12, |_| true));
        assert_eq!(ledger.remove(1 << 63, u64::MAX).unwrap().len(), 1);
    }

    proptest! {
        /// Compares the ledger with a model of one flag per page.
        #[test]
        fn as_a_page_table_would(
            steps in proptest::collection::vec((any::<bool>(), 0..24u64, 1..8u64), 1..60),
            base in prop_oneof![Just(0u64), Just(u64::MAX - 31 * 4096 - 4095), any::<u32>().prop_map(|n| u64::from(n) << 12)],
        ) {
            let mut ledger = Ledger::default();
            // The number of the extent that each page belongs to, or 0.
            let mut pages = [0usize; 32];
            for (number, (map, page, count)) in steps.into_iter().enumerate() {
                let range = page as usize..(page + count) as usize;
                let (address, size) = (base + page * 4096, count * 4096);
                if map {
                    let asked = extent(address, size);
                    let taken = pages[range.clone()].iter().any(|owner| *owner != 0);
                    prop_assert_eq!(ledger.overlaps(&asked), taken);
                    if !taken {
                        ledger.insert(asked);
                        pages[range].fill(number + 1);
                    }
                } else {
                    let outside: Vec<usize> =
                        (0..32).filter(|i| !range.contains(i)).map(|i| pages[i]).collect();
                    let cut = pages[range.clone()].iter().any(|owner| *owner != 0 && outside.contains(owner));
                    let removed = ledger.remove(address, address + (size - 1));
                    prop_assert_eq!(removed.is_err(), cut);
                    if !cut {
                        pages[range].fill(0);
                    }
                }
                for page in 0..31u64 {
                    let expected = pages[page as usize] != 0 && pages[page as usize + 1] != 0;
                    prop_assert_eq!(ledger.covers(base + page * 4096 + 5, 4096, |_| true), expected);
                }
            }
        }
    }
}
