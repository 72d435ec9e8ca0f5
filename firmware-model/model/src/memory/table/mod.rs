//! The table of STags. Checks are lock-free; changes are made under a lock, and end when no access
//! through what they revoked is left.

mod check;
pub(super) mod explain;
mod windows;

use super::backing::Backing;
use super::borrows::{Borrow, BorrowHolder, Borrows};
use super::domains::{DomainUse, Domains};
use super::entry::{Entry, EntryId};
use super::exports::Exports;
use super::permutation::{DOMAIN, Permutation};
use super::registration::{InvalidateBy, InvalidateError, Registration, TableError};
use crate::host::HostProcess;
use arc_swap::ArcSwapOption;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A freed slot is used again after this number of others were freed (row SEC-04: slow reuse).
const QUARANTINE: usize = 4096;
const CHUNK: usize = 1024;

type Cell = ArcSwapOption<Entry>;

#[derive(Debug)]
enum Kind {
    Region {
        registration: Registration,
        windows: u32,
    },
    Window {
        /// Type 2: for one queue pair, and to be unbound before it is bound again.
        exclusive: bool,
        /// Slot of the region that the window is bound to.
        region: Option<u32>,
    },
}

#[derive(Debug)]
struct Record {
    stag: u32,
    pd: u32,
    kind: Kind,
}

#[derive(Debug, Default)]
struct Admin {
    records: HashMap<u32, Record>,
    fresh: u32,
    freed: VecDeque<u32>,
    regions: u32,
    windows: u32,
    keys: u64,
    entries: EntryId,
}

impl Admin {
    /// A number for another entry.
    fn entry_id(&mut self) -> EntryId {
        self.entries += 1;
        self.entries
    }

    /// The next key byte (SplitMix64 over a secret start).
    fn key(&mut self) -> u32 {
        self.keys = self.keys.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.keys ^ self.keys >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 56) as u32
    }

    /// The record of that very STag, key included.
    fn record(&mut self, slot: u32, stag: u32) -> Option<&mut Record> {
        self.records.get_mut(&slot).filter(|r| r.stag == stag)
    }

    fn release(&mut self, region: Option<u32>) {
        if let Some(slot) = region
            && let Some(Record {
                kind: Kind::Region { windows, .. },
                ..
            }) = self.records.get_mut(&slot)
        {
            *windows = windows.saturating_sub(1);
        }
    }
}

/// All STags of a device, and its protection domains.
#[derive(Debug)]
pub struct MemoryTable {
    permutation: Permutation,
    chunks: Box<[OnceLock<Box<[Cell]>>]>,
    max_regions: u32,
    max_windows: u32,
    domains: Domains,
    borrows: Arc<Borrows>,
    /// The table as peers on this host read it.
    exports: OnceLock<Arc<Exports>>,
    admin: Mutex<Admin>,
}

impl MemoryTable {
    /// An empty table with room for these numbers of regions, windows and domains. `seed` should be
    /// secret.
    pub fn new(max_regions: u32, max_windows: u32, max_domains: u32, seed: [u64; 5]) -> MemoryTable {
        let slots = (max_regions as usize + max_windows as usize + QUARANTINE).min(DOMAIN as usize);
        let [a, b, c, d, keys] = seed;
        MemoryTable {
            permutation: Permutation::new([a, b, c, d]),
            chunks: (0..slots.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect(),
            max_regions,
            max_windows,
            domains: Domains::new(max_domains),
            borrows: Arc::default(),
            exports: OnceLock::new(),
            admin: Mutex::new(Admin {
                keys,
                ..Admin::default()
            }),
        }
    }

    /// Lets peers on this host read the table, which is empty as yet; returns the descriptor by
    /// which they do. `proof` is any secret number; `host` is the process of the host, if regions
    /// there are to be in the table.
    pub(crate) fn export(
        &self,
        proof: u64,
        host: Option<Arc<HostProcess>>,
    ) -> Result<(Arc<Exports>, OwnedFd), Errno> {
        let slots = (self.chunks.len() * CHUNK) as u32;
        let (exports, file) = Exports::new(slots, &self.permutation, proof, host)?;
        let exports = self.exports.get_or_init(|| Arc::new(exports));
        Ok((exports.clone(), file))
    }

    /// Registers a holder that has pieces of registered memory, and still pins for them. It
    /// releases the pieces when the registration is revoked.
    pub(crate) fn register_borrow(&self, holder: Arc<dyn BorrowHolder>) -> Borrow {
        self.borrows.enter(holder)
    }

    /// Whether a region's STag is no longer valid.
    #[cfg(test)]
    pub(crate) fn is_revoked(&self, stag: u32) -> bool {
        !self.is_valid(self.slot(stag))
    }

    /// The holders of such pieces.
    #[cfg(test)]
    pub(crate) fn borrows(&self) -> &Borrows {
        &self.borrows
    }

    /// The protection domains.
    pub fn domains(&self) -> &Domains {
        &self.domains
    }

    /// Registers a region and returns its STag, which is also its lkey.
    pub fn register(&self, registration: Registration) -> Result<u32, TableError> {
        if registration
            .base
            .checked_add(registration.len.saturating_sub(1))
            .is_none()
        {
            return Err(TableError::Wrap);
        }
        let mut admin = self.lock();
        if admin.regions >= self.max_regions {
            return Err(TableError::Full);
        }
        let pd = registration.pd;
        let slot = self.allocate(&mut admin, pd)?;
        admin.regions += 1;
        let stag = self.stag(slot, admin.key());
        let id = admin.entry_id();
        self.replace(slot, Some(Arc::new(Entry::of_region(id, stag, &registration))));
        let kind = Kind::Region {
            registration,
            windows: 0,
        };
        admin.records.insert(slot, Record { stag, pd, kind });
        Ok(stag)
    }

    /// Changes a region by `change`. Its STag stays, because programs that sent it to their peers
    /// before depend on it. On return, nothing uses the former region. A STag that was revoked
    /// because the memory became inaccessible, or that was invalidated, becomes valid again only
    /// with other memory.
    pub fn reregister(&self, stag: u32, change: impl FnOnce(&mut Registration)) -> Result<(), TableError> {
        let slot = self.slot(stag);
        let mut admin = self.lock();
        let record = admin.record(slot, stag).ok_or(TableError::UnknownStag)?;
        let Kind::Region {
            registration,
            windows,
        } = &mut record.kind
        else {
            return Err(TableError::UnknownStag);
        };
        if *windows > 0 {
            return Err(TableError::Bound);
        }
        let mut new = registration.clone();
        change(&mut new);
        if new.base.checked_add(new.len.saturating_sub(1)).is_none() {
            return Err(TableError::Wrap);
        }
        if new.pd != record.pd {
            if !self.domains.enter(new.pd, DomainUse::Memory) {
                return Err(TableError::UnknownDomain);
            }
            self.domains.leave(record.pd, DomainUse::Memory);
        }
        record.pd = new.pd;
        let stays = self.is_valid(slot) || !Arc::ptr_eq(&new.backing, &registration.backing);
        *registration = new.clone();
        let id = admin.entry_id();
        let entry = stays.then(|| Arc::new(Entry::of_region(id, stag, &new)));
        let old = self.replace(slot, entry);
        drop(admin);
        self.retire(old);
        Ok(())
    }

    /// Revokes a region's STag: on return, nothing is placed or read through it any more.
    pub fn deregister(&self, stag: u32) -> Result<(), TableError> {
        self.remove(stag, |kind| match kind {
            Kind::Region { windows: 0, .. } => Ok(()),
            Kind::Region { .. } => Err(TableError::Bound),
            Kind::Window { .. } => Err(TableError::UnknownStag),
        })
    }

    /// Invalidates a STag for queue pair `qid` of domain `pd`; the call unbinds a window. On
    /// return, nothing uses the STag any more.
    pub fn invalidate(&self, stag: u32, pd: u32, qid: u32, by: InvalidateBy) -> Result<(), InvalidateError> {
        let slot = self.slot(stag);
        let mut admin = self.lock();
        let record = admin.record(slot, stag).ok_or(InvalidateError::InvalidStag)?;
        if record.pd != pd || self.owner(slot).is_some_and(|only| only != qid) {
            return Err(InvalidateError::NotAssociated);
        }
        if !self.is_valid(slot) {
            // Invalidating what is invalid already is no error of the local program (VRB-M-04).
            return match by {
                InvalidateBy::Local => Ok(()),
                InvalidateBy::Peer => Err(InvalidateError::InvalidStag),
            };
        }
        let region = match &mut record.kind {
            Kind::Region { windows: 1.., .. } => return Err(InvalidateError::Bound),
            Kind::Region { .. } => None,
            Kind::Window { region, .. } => *region,
        };
        let shared = self.owner(slot).is_none() && self.domains.queue_pairs(pd) > 1;
        if by == InvalidateBy::Peer && shared {
            return Err(InvalidateError::Shared);
        }
        if let Kind::Window { region, .. } = &mut record.kind {
            *region = None;
        }
        admin.release(region);
        let old = self.replace(slot, None);
        drop(admin);
        self.retire(old);
        Ok(())
    }

    /// Revokes every region that touches the `len` bytes at `iova`, which the host removes: on
    /// return, nothing is placed or read through these regions any more. Their STags stay taken
    /// until they are deregistered.
    pub(crate) fn revoke_over(&self, iova: u64, len: u64) {
        let admin = self.lock();
        let touched: Vec<Arc<Backing>> = admin
            .records
            .values()
            .filter_map(|record| match &record.kind {
                Kind::Region { registration: r, .. } if r.backing.touches(r.len, iova, len) => {
                    Some(r.backing.clone())
                }
                _ => None,
            })
            .collect();
        if touched.is_empty() {
            return;
        }
        let over = |entry: &Entry| touched.iter().any(|backing| Arc::ptr_eq(backing, &entry.backing));
        let old: Vec<_> = admin
            .records
            .keys()
            .filter(|slot| {
                self.cell(**slot)
                    .is_some_and(|cell| cell.load().as_deref().is_some_and(over))
            })
            .map(|slot| self.replace(*slot, None))
            .collect();
        drop(admin);
        old.into_iter().for_each(|old| self.retire(old));
    }

    /// Reports in the log that a system call could not access the byte at `address` of this
    /// process, in whichever region it lies.
    #[cold]
    pub(crate) fn report_at(&self, address: usize) {
        let admin = self.lock();
        for slot in admin.records.keys() {
            let entry = self.cell(*slot).and_then(|cell| cell.load_full());
            if let Some(entry) = entry.filter(|entry| !entry.is_window)
                && let Some(at) = entry.backing.place_of(address, entry.len)
            {
                return entry.report(at, 1);
            }
        }
    }

    /// Revokes everything.
    pub(crate) fn clear(&self) {
        let mut admin = self.lock();
        let slots: Vec<u32> = admin.records.drain().map(|(slot, _)| slot).collect();
        let old: Vec<_> = slots.iter().map(|slot| self.replace(*slot, None)).collect();
        admin.freed.extend(slots);
        (admin.regions, admin.windows) = (0, 0);
        drop(admin);
        old.into_iter().for_each(|old| self.retire(old));
        self.domains.clear();
    }

    fn remove(
        &self,
        stag: u32,
        allowed: impl FnOnce(&Kind) -> Result<(), TableError>,
    ) -> Result<(), TableError> {
        let slot = self.slot(stag);
        let mut admin = self.lock();
        let record = admin.record(slot, stag).ok_or(TableError::UnknownStag)?;
        allowed(&record.kind)?;
        let pd = record.pd;
        if let Some(record) = admin.records.remove(&slot) {
            match record.kind {
                Kind::Region { .. } => admin.regions -= 1,
                Kind::Window { region, .. } => {
                    admin.windows -= 1;
                    admin.release(region);
                }
            }
        }
        let old = self.replace(slot, None);
        drop(admin);
        self.retire(old);
        self.lock().freed.push_back(slot);
        self.domains.leave(pd, DomainUse::Memory);
        Ok(())
    }

    fn allocate(&self, admin: &mut Admin, pd: u32) -> Result<u32, TableError> {
        let capacity = (self.chunks.len() * CHUNK) as u32;
        if !self.domains.enter(pd, DomainUse::Memory) {
            return Err(TableError::UnknownDomain);
        }
        let reusable = admin.freed.len() > QUARANTINE || admin.fresh >= capacity;
        let slot = if reusable {
            admin.freed.pop_front()
        } else {
            admin.fresh += 1;
            Some(admin.fresh - 1)
        };
        let Some(slot) = slot else {
            self.domains.leave(pd, DomainUse::Memory);
            return Err(TableError::Full);
        };
        self.chunks[slot as usize / CHUNK].get_or_init(|| (0..CHUNK).map(|_| Cell::empty()).collect());
        Ok(slot)
    }

    fn lock(&self) -> MutexGuard<'_, Admin> {
        self.admin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn slot(&self, stag: u32) -> u32 {
        self.permutation.backward(stag >> 8)
    }

    fn stag(&self, slot: u32, key: u32) -> u32 {
        self.permutation.forward(slot) << 8 | key
    }

    #[inline]
    fn cell(&self, slot: u32) -> Option<&Cell> {
        let chunk = self.chunks.get(slot as usize / CHUNK)?.get()?;
        chunk.get(slot as usize % CHUNK)
    }

    fn is_valid(&self, slot: u32) -> bool {
        self.cell(slot).is_some_and(|c| c.load().is_some())
    }

    fn owner(&self, slot: u32) -> Option<u32> {
        self.cell(slot)?.load().as_ref()?.qid
    }

    /// Makes a slot refer to `entry`; the caller has the lock.
    fn replace(&self, slot: u32, entry: Option<Arc<Entry>>) -> Option<Arc<Entry>> {
        if let Some(exports) = self.exports.get() {
            exports.publish(slot, entry.as_deref());
        }
        self.cell(slot)?.swap(entry)
    }

    /// Waits until nothing uses the entry that a swap took out: no [`Window`] and no
    /// [`Pin`](super::Pin) holds it, which last one FPDU or one call of a stream, and no piece of
    /// it is left to be sent; and no peer on this host is in an access through it.
    fn retire(&self, old: Option<Arc<Entry>>) {
        if let Some(mut old) = old {
            while Arc::get_mut(&mut old).is_none() {
                rustix::thread::sched_yield();
            }
            self.borrows.release(old.id);
            if let Some(exports) = self.exports.get() {
                exports.wait();
            }
        }
    }
}
