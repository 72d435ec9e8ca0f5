//! The memory regions of the process, by key.

use std::collections::{HashMap, VecDeque};
use urnic_sync::Mutex;

use super::findings::Findings;
use super::findings::Rule;
use super::memory;
use crate::call_site::CallSite;

/// Deregistered regions that are remembered.
const MOST_GONE: usize = 4096;

/// A region, as the program registered it.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    /// The number of its protection domain.
    pub(crate) pd: u32,
    /// The name of its first byte in work requests.
    pub(crate) base: u64,
    /// The length of the region.
    pub(crate) len: u64,
    /// The address of the region in this process; `None`: not in the program's own memory.
    pub(crate) addr: Option<usize>,
    /// Whether the region has `IBV_ACCESS_LOCAL_WRITE`.
    pub(crate) writable: bool,
    /// Whether peers may read or write it.
    pub(crate) remote: bool,
    /// Whether peers may write it.
    pub(crate) remote_write: bool,
}

/// The place of an element of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) addr: usize,
    /// Whether peers may read or write there.
    pub(super) remote: bool,
}

/// All regions.
#[derive(Debug, Default)]
pub(crate) struct Regions(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_key: HashMap<u32, Entry>,
    /// Keys of deregistered regions, oldest first.
    gone: VecDeque<u32>,
}

#[derive(Debug)]
struct Entry {
    region: Region,
    /// The call site at which it was deregistered.
    gone: Option<CallSite>,
}

impl Regions {
    /// Whether peers may write to a page with bytes between `addr` and `addr + len`, by any region.
    pub(super) fn peers_write(&self, addr: usize, len: usize) -> bool {
        const PAGE: usize = 4096;
        let (start, end) = (
            addr & !(PAGE - 1),
            addr.saturating_add(len).next_multiple_of(PAGE),
        );
        let reaches = |entry: &Entry| {
            let Region {
                addr,
                len,
                remote_write,
                ..
            } = entry.region;
            let overlaps = |at: usize| at < end && start < at.saturating_add(len as usize);
            entry.gone.is_none() && remote_write && addr.is_none_or(overlaps)
        };
        self.0.lock().by_key.values().any(reaches)
    }

    /// A region was registered, or changed.
    pub(crate) fn registered(&self, key: u32, region: Region) {
        self.0.lock().by_key.insert(key, Entry { region, gone: None });
    }

    /// The region of this key.
    pub(crate) fn of(&self, key: u32) -> Option<Region> {
        self.0.lock().by_key.get(&key).map(|entry| entry.region.clone())
    }

    /// Reports a region whose memory is not mapped any more.
    pub(crate) fn check_mapped(&self, key: u32, findings: &Findings) {
        let Some(Region {
            addr: Some(addr),
            len,
            ..
        }) = self.of(key)
        else {
            return;
        };
        if memory::has_hole(addr, len as usize) {
            findings.report(Rule::UnmappedWhileRegistered, &CallSite::here(), || {
                format!("the memory of a region, {addr:#x}+{len}, was unmapped before it was deregistered")
            });
        }
    }

    /// A region was deregistered.
    pub(crate) fn deregistered(&self, key: u32) {
        let mut known = self.0.lock();
        if let Some(entry) = known.by_key.get_mut(&key) {
            entry.gone = Some(CallSite::here());
            known.gone.push_back(key);
        }
        if known.gone.len() > MOST_GONE
            && let Some(oldest) = known.gone.pop_front()
            && known
                .by_key
                .get(&oldest)
                .is_some_and(|entry| entry.gone.is_some())
        {
            known.by_key.remove(&oldest);
        }
    }

    /// The address of an element of a request in this process, if it is in the program's own
    /// memory.
    ///
    /// # Errors
    /// What is wrong with the element.
    pub(super) fn place(
        &self,
        pd: u32,
        key: u32,
        offset: u64,
        len: u64,
        writes: bool,
    ) -> Result<Option<Place>, String> {
        let known = self.0.lock();
        let entry = known
            .by_key
            .get(&key)
            .ok_or_else(|| format!("lkey {key:#010x} belongs to no memory region"))?;
        let region = &entry.region;
        if let Some(site) = &entry.gone {
            return Err(format!(
                "lkey {key:#010x} belongs to a memory region that was deregistered (at {site})"
            ));
        }
        if region.pd != pd {
            return Err(format!("lkey {key:#010x} belongs to another protection domain"));
        }
        let at = offset.wrapping_sub(region.base);
        if at > region.len || len > region.len - at {
            return Err(format!(
                "{len} B at {offset:#x} are not within the memory region of lkey {key:#010x}, {:#x}+{}",
                region.base, region.len
            ));
        }
        if writes && !region.writable {
            return Err(format!(
                "the memory region of lkey {key:#010x} lacks IBV_ACCESS_LOCAL_WRITE"
            ));
        }
        Ok(region.addr.map(|addr| Place {
            addr: addr.wrapping_add(at as usize),
            remote: region.remote,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fault_of_an_element_is_named() {
        let regions = Regions::default();
        let region = Region {
            pd: 1,
            base: 0x1000,
            len: 100,
            addr: Some(0x7000),
            writable: false,
            remote: false,
            remote_write: false,
        };
        regions.registered(5, region);
        let wrong = |pd, key, offset, len, writes| regions.place(pd, key, offset, len, writes).unwrap_err();
        let addr = |offset, len| regions.place(1, 5, offset, len, false).unwrap().unwrap().addr;
        assert_eq!((addr(0x1010, 84), addr(0x1064, 0)), (0x7010, 0x7064));
        assert_eq!(
            wrong(1, 6, 0x1000, 1, false),
            "lkey 0x00000006 belongs to no memory region"
        );
        assert!(wrong(2, 5, 0x1000, 1, false).ends_with("another protection domain"));
        assert!(wrong(1, 5, 0x1010, 85, false).ends_with("lkey 0x00000005, 0x1000+100"));
        assert!(wrong(1, 5, 0xfff, 1, false).contains("not within"));
        assert!(wrong(1, 5, 0x1000, 1, true).ends_with("lacks IBV_ACCESS_LOCAL_WRITE"));
        regions.deregistered(5);
        assert!(wrong(1, 5, 0x1000, 1, false).contains("was deregistered"));
    }

    #[test]
    fn only_so_many_deregistered_regions_are_remembered() {
        let regions = Regions::default();
        for key in 0..2 * MOST_GONE as u32 {
            let region = Region {
                pd: 1,
                base: 0,
                len: 1,
                addr: None,
                writable: true,
                remote: true,
                remote_write: true,
            };
            regions.registered(key, region);
            regions.deregistered(key);
        }
        assert_eq!(regions.0.lock().by_key.len(), MOST_GONE);
    }
}
