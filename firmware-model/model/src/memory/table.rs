//! The table of STags. Checks are lock-free; changes are made under a lock, and return when no
//! access through a revoked entry is left.

use super::backing::Backing;
use super::borrows::{Borrow, BorrowHolder, Borrows};
use super::domains::{DomainUse, Domains};
use super::entry::{
    Accessor, BindError, Entry, EntryId, Invalidable, InvalidateBy, InvalidateError, MemoryAccess, Need,
    Registration, TableError, Violation,
};
use super::permutation::{DOMAIN, Permutation};
use super::remote_access::RemoteAccessTable;
use super::window::{Recent, Window};
use crate::host::HostProcess;
use arc_swap::ArcSwapOption;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use urnic_device::vocabulary::Access;
use urnic_device::wqe::BindOperands;
use urnic_sync::{Mutex, MutexGuard};

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
    remote_access: OnceLock<Arc<RemoteAccessTable>>,
    admin: Mutex<Admin>,
}

impl MemoryTable {
    /// An empty table with room for these numbers of regions, windows and domains. `seed` should be
    /// secret.
    pub fn new(max_regions: u32, max_windows: u32, max_domains: u32, seed: [u64; 5]) -> MemoryTable {
        // One slot may have the index that no region has.
        let slots = (max_regions as usize + max_windows as usize + QUARANTINE + 1).min(DOMAIN as usize);
        let [a, b, c, d, keys] = seed;
        MemoryTable {
            permutation: Permutation::new([a, b, c, d]),
            chunks: (0..slots.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect(),
            max_regions,
            max_windows,
            domains: Domains::new(max_domains),
            borrows: Arc::default(),
            remote_access: OnceLock::new(),
            admin: Mutex::new(Admin {
                keys,
                ..Admin::default()
            }),
        }
    }

    /// Makes the table, which is still empty, readable for local peers; returns the descriptor by
    /// which they read it. `proof` is any secret number; `host` is the process of the host, if the
    /// table has regions of that process.
    pub(crate) fn export(
        &self,
        proof: u64,
        host: Option<Arc<HostProcess>>,
    ) -> Result<(Arc<RemoteAccessTable>, OwnedFd), Errno> {
        let slots = (self.chunks.len() * CHUNK) as u32;
        let (remote_access, file) = RemoteAccessTable::new(slots, &self.permutation, proof, host)?;
        let remote_access = self.remote_access.get_or_init(|| Arc::new(remote_access));
        Ok((remote_access.clone(), file))
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

    /// Invalidates a STag through a queue pair; the call unbinds a window. On return, nothing uses
    /// the STag any more.
    pub fn invalidate(
        &self,
        stag: u32,
        through: Accessor,
        by: InvalidateBy,
        what: Invalidable,
    ) -> Result<(), InvalidateError> {
        let slot = self.slot(stag);
        let mut admin = self.lock();
        let record = admin.record(slot, stag).ok_or(InvalidateError::InvalidStag)?;
        if record.pd != through.pd || self.owner(slot).is_some_and(|only| only != through.qid) {
            return Err(InvalidateError::NotAssociated);
        }
        if what == Invalidable::OwnWindows && !matches!(record.kind, Kind::Window { exclusive: true, .. }) {
            return Err(InvalidateError::NotInvalidable);
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
        let shared = self.owner(slot).is_none() && self.domains.queue_pairs(through.pd) > 1;
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
        // No region has index 0: STags with it stand for no memory, as those of confirmations.
        if self.permutation.forward(admin.fresh) == 0 {
            admin.fresh += 1;
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
        self.admin.lock()
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
        if let Some(remote_access) = self.remote_access.get() {
            remote_access.publish(slot, entry.as_deref());
        }
        self.cell(slot)?.swap(entry)
    }

    /// Waits until nothing uses the entry that a swap took out: no [`Window`] and no
    /// [`Pin`](super::Pin), which exist for one FPDU or one call of a stream; no borrowed piece of
    /// it; and no access of a local peer.
    fn retire(&self, old: Option<Arc<Entry>>) {
        if let Some(mut old) = old {
            while Arc::get_mut(&mut old).is_none() {
                rustix::thread::sched_yield();
            }
            self.borrows.release(old.id);
            if let Some(remote_access) = self.remote_access.get() {
                remote_access.wait();
            }
        }
    }
}

// The check of an access.

impl MemoryTable {
    /// Checks an access. The first violation in the order of [`Violation`] wins. Zero-length
    /// accesses are the caller's: DDP and verbs leave them unchecked (DDP-S-04, VRB-M-07).
    // A window that is returned in memory, and moved on, costs more than the check.
    #[inline(always)]
    pub fn check(&self, by: Accessor, access: MemoryAccess) -> Result<Window<'_>, Violation> {
        self.check_again(&Recent::default(), by, access)
    }

    /// Like [`check`](Self::check), for one of several accesses that are mostly to one STag.
    #[inline(always)]
    pub(crate) fn check_again(
        &self,
        recent: &Recent,
        by: Accessor,
        access: MemoryAccess,
    ) -> Result<Window<'_>, Violation> {
        let stag = access.stag;
        let guard = match recent.take(stag) {
            Some(found) => found,
            None => self.cell(self.slot(stag)).ok_or(Violation::InvalidStag)?.load(),
        };
        let entry = guard
            .as_ref()
            .filter(|e| e.stag == stag)
            .ok_or(Violation::InvalidStag)?;
        if entry.pd != by.pd || entry.qid.is_some_and(|only| only != by.qid) {
            return Err(Violation::NotAssociated);
        }
        let from_base = access.inside(entry.base, entry.len)?;
        let is_allowed = entry.access.contains(access.need.right().0);
        if !is_allowed || entry.is_window && access.need.is_local() {
            return Err(Violation::AccessRights);
        }
        let start = entry.start + from_base;
        Ok(Window::new(guard, start, access.len))
    }
}

// Why an access is refused, in words, and the memory that was perhaps meant.

/// Most slots that are searched for the nearest memory: a peer can cause this search.
const SEARCHED: usize = 1 << 16;

/// An access that is refused.
#[derive(Debug, Clone, Copy)]
struct Asked {
    by: Accessor,
    access: MemoryAccess,
}

impl Asked {
    /// The number of requested bytes that the entry does not cover, or of bytes between the two.
    fn distance(&self, entry: &Entry) -> u64 {
        let before = entry.base.saturating_sub(self.access.offset);
        let end = self.access.offset.saturating_add(self.access.len);
        let behind = end.saturating_sub(entry.base.saturating_add(entry.len));
        before.max(behind)
    }

    fn lacks_right(&self, entry: &Entry) -> bool {
        !entry.access.contains(self.access.need.right().0)
    }

    /// Whether the queue pair may use the entry for such an access.
    fn may_use(&self, entry: &Entry) -> bool {
        let is_own = entry.pd == self.by.pd && entry.qid.is_none_or(|only| only == self.by.qid);
        is_own && !(entry.is_window && self.access.need.is_local())
    }

    fn describe(&self, entry: &Entry) -> String {
        let Entry { stag, base, len, .. } = entry;
        let right = match (self.access.need, self.lacks_right(entry)) {
            (Need::LocalRead, _) => String::new(),
            (_, false) => format!(" with {}", self.access.need.right().1),
            (_, true) => format!(" without {}", self.access.need.right().1),
        };
        format!("{stag:#010x} covers {base:#x}+{len}{right}")
    }
}

impl MemoryTable {
    /// The reason of the refusal, and the nearest memory in the protection domain.
    #[cold]
    pub(crate) fn explain(&self, by: Accessor, access: MemoryAccess) -> String {
        let asked = &Asked { by, access };
        let reason = self.reason(asked);
        let nearest = self.nearest(asked, |entry| entry.stag != access.stag && asked.may_use(entry));
        match nearest {
            Some(nearest) => format!("{reason}; nearest valid {nearest}"),
            None => reason,
        }
    }

    fn reason(&self, asked: &Asked) -> String {
        let Asked { by, access } = *asked;
        let stag = access.stag;
        let Err(violation) = self.check(by, access) else {
            return "the memory is unmapped, protected or truncated".to_owned();
        };
        let guard = self.cell(self.slot(stag)).map(|cell| cell.load());
        let entry = guard.as_ref().and_then(|guard| guard.as_ref());
        match (violation, entry) {
            (Violation::InvalidStag, Some(entry)) => {
                let keys = [stag, entry.stag].map(|stag| stag & 0xff);
                format!("wrong key {:#04x}, this memory has {:#04x}", keys[0], keys[1])
            }
            (Violation::InvalidStag, None) => "no such STag".to_owned(),
            (Violation::NotAssociated, Some(entry)) if entry.pd == by.pd => {
                "the memory window is bound to another queue pair".to_owned()
            }
            (Violation::NotAssociated, _) => "the STag is of another protection domain".to_owned(),
            (Violation::Bounds | Violation::AccessRights, Some(entry)) => {
                format!("{violation}: {}", asked.describe(entry))
            }
            (violation, _) => violation.to_string(),
        }
    }

    /// The valid entry that covers most of the requested range, in words.
    fn nearest(&self, asked: &Asked, is_fit: impl Fn(&Entry) -> bool) -> Option<String> {
        let chunks = self.chunks.iter().take(SEARCHED / CHUNK);
        let entries = chunks.filter_map(|chunk| chunk.get()).flatten();
        let guards = entries.map(|cell| cell.load());
        let fits = guards.filter(|guard| guard.as_ref().is_some_and(|entry| is_fit(entry)));
        let nearest = fits.min_by_key(|guard| {
            let rank = |entry: &Entry| (asked.distance(entry), asked.lacks_right(entry));
            guard.as_ref().map(|entry| rank(entry))
        });
        Some(asked.describe(nearest?.as_ref()?))
    }
}

// Memory windows: made, bound, unbound and destroyed.

impl MemoryTable {
    /// Makes an unbound window; an `exclusive` one (type 2) serves only the queue pair that binds
    /// it.
    pub fn create_window(&self, pd: u32, exclusive: bool) -> Result<u32, TableError> {
        let mut admin = self.lock();
        if admin.windows >= self.max_windows {
            return Err(TableError::Full);
        }
        let slot = self.allocate(&mut admin, pd)?;
        admin.windows += 1;
        let stag = self.stag(slot, admin.key());
        let kind = Kind::Window {
            exclusive,
            region: None,
        };
        admin.records.insert(slot, Record { stag, pd, kind });
        Ok(stag)
    }

    /// Destroys a window, bound or not. Its key does not matter: a program chooses it anew for
    /// every bind, also for one that fails.
    pub fn destroy_window(&self, stag: u32) -> Result<(), TableError> {
        let record = self
            .lock()
            .records
            .get(&self.slot(stag))
            .map(|record| record.stag);
        self.remove(record.unwrap_or(stag), |kind| match kind {
            Kind::Window { .. } => Ok(()),
            Kind::Region { .. } => Err(TableError::UnknownStag),
        })
    }

    /// Carries out a bind for queue pair `qid` of domain `pd` (VRB-M-03).
    pub fn bind(&self, operands: &BindOperands, pd: u32, qid: u32) -> Result<(), BindError> {
        let (new_stag, mr_stag) = (operands.new_stag.get(), operands.mr_stag.get());
        let (offset, len) = (operands.offset.get(), operands.len.get());
        let access = Access::from_bits_truncate(operands.access.get());
        let (slot, region_slot) = (self.slot(new_stag), self.slot(mr_stag));
        let mut admin = self.lock();
        let id = admin.entry_id();
        let record = admin.records.get(&slot).ok_or(BindError::UnknownWindow)?;
        let Kind::Window {
            exclusive,
            region: bound_to,
        } = record.kind
        else {
            return Err(BindError::UnknownWindow);
        };
        if record.pd != pd {
            return Err(BindError::UnknownWindow);
        }
        if exclusive && (bound_to.is_some() || len == 0) {
            return Err(BindError::AlreadyBound);
        }
        let entry = if len == 0 {
            None
        } else {
            let region = admin
                .record(region_slot, mr_stag)
                .filter(|r| r.pd == pd && self.is_valid(region_slot))
                .ok_or(BindError::UnknownRegion)?;
            let Kind::Region { registration, .. } = &region.kind else {
                return Err(BindError::UnknownRegion);
            };
            let start = offset
                .checked_sub(registration.base)
                .filter(|start| *start <= registration.len && len <= registration.len - start)
                .ok_or(BindError::Bounds)?;
            let rights = registration.access;
            // A right to write from afar needs the region's owner to have the right to write
            // (verbs, ibv_bind_mw).
            let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            if !rights.contains(Access::MW_BIND) || (writes && !rights.contains(Access::LOCAL_WRITE)) {
                return Err(BindError::AccessRights);
            }
            Some(Arc::new(Entry {
                id,
                stag: new_stag,
                pd,
                qid: exclusive.then_some(qid),
                base: if access.contains(Access::ZERO_BASED) {
                    0
                } else {
                    offset
                },
                len,
                access,
                is_window: true,
                backing: registration.backing.clone(),
                start,
                reported: AtomicBool::new(false),
            }))
        };
        let region = entry.is_some().then_some(region_slot);
        admin.release(bound_to);
        if let Some(region) = region
            && let Some(Record {
                kind: Kind::Region { windows, .. },
                ..
            }) = admin.records.get_mut(&region)
        {
            *windows += 1;
        }
        if let Some(record) = admin.records.get_mut(&slot) {
            record.stag = new_stag;
            record.kind = Kind::Window { exclusive, region };
        }
        let old = self.replace(slot, entry);
        drop(admin);
        self.retire(old);
        Ok(())
    }

    /// Unbinds the windows of type 2 of queue pair `qid`, which is being destroyed.
    pub(crate) fn unbind_all_of(&self, qid: u32) {
        let mut admin = self.lock();
        if admin.windows == 0 {
            return;
        }
        let slots: Vec<u32> = admin
            .records
            .iter()
            .filter(|(slot, r)| matches!(r.kind, Kind::Window { .. }) && self.owner(**slot) == Some(qid))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in slots {
            let mut bound_to = None;
            if let Some(Record {
                kind: Kind::Window { region, .. },
                ..
            }) = admin.records.get_mut(&slot)
            {
                bound_to = region.take();
            }
            admin.release(bound_to);
            self.replace(slot, None);
        }
    }
}
