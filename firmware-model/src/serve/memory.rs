//! The client's memory.
//!
//! What comes with a descriptor is mapped at its place in a *window*: 64 GiB of addresses are reserved for each 64 GiB of DMA addresses in
//! use, so that stretches that are neighbours for the client are neighbours here, although QEMU lends a guest's memory page by page when there
//! is an IOMMU. Where nothing is lent there is a hole, memory without rights; [`faults`](super::faults) sees to accesses there.

use super::faults::{FaultLog, Faults, Watch};
use super::function::MAX_DMA_MAPS;
use super::ledger::{Ledger, Place, Stretch};
use super::remote::Remote;
use crate::device::Device;
use crate::host::{HostMemory, RemoteMemory, Unreachable};
use rustix::fs::{fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use urnic_vfio_user::{DmaMap, DmaMapFlags};

const WINDOW: u64 = 1 << 36;
/// Windows of a function: 2 TiB.
const MAX_WINDOWS: u64 = 32;
/// Windows begin at multiples of this, as huge pages want.
const ALIGN: usize = 1 << 30;
const PAGE: u64 = 4096;

/// How many mappings the kernel grants a process is limited, and a client could use them all up. Each function has a share of its own; what is
/// left over goes to whoever comes first.
#[derive(Debug)]
pub(crate) struct Budget {
    share: usize,
    left: AtomicUsize,
}

impl Budget {
    /// The budget of a process that serves at most so many functions.
    pub(crate) fn new(functions: usize) -> Arc<Budget> {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        let granted: usize = text.trim().parse().unwrap_or(65_530);
        // A mapping in the middle of a hole makes two of that.
        let total = granted / 8 * 3;
        let share = total / 2 / functions.max(1);
        Arc::new(Budget {
            share,
            left: AtomicUsize::new(total - share * functions),
        })
    }

    fn take(&self, held: usize) -> Result<(), Errno> {
        if held < self.share {
            return Ok(());
        }
        let left = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| Errno::NOSPC)
    }

    fn give_back(&self, held: usize) {
        if held > self.share {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct Window {
    start: NonNull<u8>,
    _watch: Watch,
}

// SAFETY: an address; what is there belongs to `ClientMemory`.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

#[derive(Debug, Default)]
struct Lent {
    ledger: Ledger,
    /// By DMA address over [`WINDOW`].
    windows: BTreeMap<u64, Window>,
    /// Stretches that are mapped here.
    mapped: usize,
}

/// Part of a stretch in one window.
struct Piece {
    ptr: NonNull<u8>,
    len: usize,
    /// From the stretch's beginning.
    offset: u64,
}

impl Lent {
    /// Where an address is, if its window is there.
    fn locate(&self, address: u64) -> Option<NonNull<u8>> {
        let window = self.windows.get(&(address / WINDOW))?;
        // SAFETY: windows are `WINDOW` bytes long.
        Some(unsafe { window.start.add((address % WINDOW) as usize) })
    }

    /// The DMA address of a place.
    fn address_of(&self, place: usize) -> Option<u64> {
        self.windows.iter().find_map(|(index, window)| {
            let offset = place.checked_sub(window.start.as_ptr().addr())? as u64;
            (offset < WINDOW).then(|| index * WINDOW + offset)
        })
    }

    /// The parts of a stretch whose windows are there.
    fn pieces(&self, first: u64, last: u64) -> Vec<Piece> {
        let piece = |index: u64| {
            let begin = first.max(index * WINDOW);
            let end = last.min(index * WINDOW + (WINDOW - 1));
            Some(Piece {
                ptr: self.locate(begin)?,
                len: (end - begin + 1) as usize,
                offset: begin - first,
            })
        };
        windows_of(first, last).filter_map(piece).collect()
    }

    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>> {
        let len = len.max(1) as u64;
        if !self.ledger.covers(iova, len, |place| place == Place::Mapped) {
            return None;
        }
        let start = self.locate(iova)?;
        let last = iova + (len - 1);
        let in_order = |index: u64| {
            let begin = iova.max(index * WINDOW);
            let expected = start.as_ptr().addr().checked_add((begin - iova) as usize);
            self.locate(begin).map(|ptr| ptr.as_ptr().addr()) == expected
        };
        windows_of(iova, last).all(in_order).then_some(start)
    }
}

fn windows_of(first: u64, last: u64) -> RangeInclusive<u64> {
    first / WINDOW..=last / WINDOW
}

/// Memory that a client lends to its function.
#[derive(Debug)]
pub(crate) struct ClientMemory {
    lent: RwLock<Lent>,
    budget: Arc<Budget>,
    /// Set when the client has said what it can.
    remote: OnceLock<Remote>,
    faults: FaultLog,
}

/// Whether a file is memory, of which a part that is mapped stays there unless the client makes the file shorter. Access to other files may wait
/// for whoever serves them, for ever.
fn is_memory(file: &OwnedFd) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const HUGETLBFS: u64 = 0x9584_58f6;
    fstatfs(file).is_ok_and(|fs| matches!(fs.f_type as u64, TMPFS | HUGETLBFS))
}

/// Reserves a window, next to its neighbours if the kernel likes.
fn reserve(near: *mut u8) -> Result<NonNull<u8>, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let (len, extra) = (WINDOW as usize, ALIGN);
    // SAFETY: no MAP_FIXED: the kernel picks addresses that are free; `near` is a wish.
    let start: *mut u8 =
        unsafe { mmap_anonymous(near.cast(), len + extra, ProtFlags::empty(), flags) }?.cast();
    let aligned = start.map_addr(|addr| addr.next_multiple_of(ALIGN));
    let before = aligned.addr() - start.addr();
    for (part, len) in [(start, before), (aligned.wrapping_add(len), extra - before)] {
        if len > 0 {
            // SAFETY: the ends of the mapping just made, which nobody uses.
            let _ = unsafe { munmap(part.cast(), len) };
        }
    }
    // Found again by address when an access faults.
    aligned.expose_provenance();
    NonNull::new(aligned).ok_or(Errno::NOMEM)
}

/// Puts a hole in place of what is there.
fn dig(ptr: NonNull<u8>, len: usize) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: inside of a window, which belongs to its `ClientMemory`; who still looks there meets a fault that is caught.
    unsafe { mmap_anonymous(ptr.as_ptr().cast(), len, ProtFlags::empty(), flags) }.map(drop)
}

impl ClientMemory {
    pub(crate) fn new(budget: Arc<Budget>) -> Result<ClientMemory, Errno> {
        Ok(ClientMemory {
            lent: RwLock::default(),
            budget,
            remote: OnceLock::new(),
            faults: FaultLog::new()?,
        })
    }

    fn lent(&self) -> RwLockReadGuard<'_, Lent> {
        self.lent.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lent_mut(&self) -> RwLockWriteGuard<'_, Lent> {
        self.lent.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// How memory is reached that is not mapped here.
    pub(crate) fn set_remote(&self, remote: Remote) {
        let _ = self.remote.set(remote);
    }

    /// Where faults are noted.
    pub(crate) fn faults(&self) -> &FaultLog {
        &self.faults
    }

    /// The client lends memory.
    pub(crate) fn map(&self, map: &DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        let (read, write) = (
            map.flags.contains(DmaMapFlags::READ),
            map.flags.contains(DmaMapFlags::WRITE),
        );
        if !(DmaMapFlags::READ | DmaMapFlags::WRITE).contains(map.flags) || !(read || write) {
            return Err(Errno::INVAL);
        }
        // The device needs both rights for what it may touch at any time; and a file that is no memory may make it wait.
        let file = file.filter(|file| read && write && is_memory(file));
        let place = match file {
            Some(_) => Place::Mapped,
            None => Place::Remote { read, write },
        };
        let stretch = Stretch::new(map.address, map.size, place)?;
        let mut lent = self.lent_mut();
        if lent.ledger.overlaps(&stretch) {
            return Err(Errno::EXIST);
        }
        if lent.ledger.len() as u64 >= MAX_DMA_MAPS {
            return Err(Errno::NOSPC);
        }
        if let Some(file) = &file {
            self.map_file(&mut lent, &stretch, map.offset, file)?;
        }
        lent.ledger.insert(stretch);
        Ok(())
    }

    fn map_file(&self, lent: &mut Lent, stretch: &Stretch, offset: u64, file: &OwnedFd) -> Result<(), Errno> {
        let size = stretch.last - stretch.first;
        let end = size
            .checked_add(1)
            .and_then(|size| offset.checked_add(size))
            .ok_or(Errno::INVAL)?;
        let aligned = [stretch.first, stretch.last.wrapping_add(1), offset]
            .iter()
            .all(|n| n.is_multiple_of(PAGE));
        if !aligned || fstat(file)?.st_size.unsigned_abs() < end {
            return Err(Errno::INVAL);
        }
        self.open_windows(lent, stretch)?;
        self.budget.take(lent.mapped)?;
        let pieces = lent.pieces(stretch.first, stretch.last);
        for (done, piece) in pieces.iter().enumerate() {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            let (ptr, at) = (piece.ptr.as_ptr().cast(), offset + piece.offset);
            // SAFETY: inside of a window, where the ledger says that nothing is lent: nobody has a pointer there but to what was taken back.
            if let Err(errno) = unsafe { mmap(ptr, piece.len, rights, flags, file, at) } {
                pieces[..done]
                    .iter()
                    .try_for_each(|piece| dig(piece.ptr, piece.len))?;
                self.budget.give_back(lent.mapped + 1);
                return Err(errno);
            }
        }
        lent.mapped += 1;
        Ok(())
    }

    /// Sees that there is a window for each address of a stretch.
    fn open_windows(&self, lent: &mut Lent, stretch: &Stretch) -> Result<(), Errno> {
        let indices = windows_of(stretch.first, stretch.last);
        if indices.end() - indices.start() >= MAX_WINDOWS {
            return Err(Errno::NOMEM);
        }
        for index in indices {
            if lent.windows.contains_key(&index) {
                continue;
            }
            if lent.windows.len() as u64 >= MAX_WINDOWS {
                return Err(Errno::NOMEM);
            }
            let before = index.checked_sub(1).and_then(|before| lent.windows.get(&before));
            let near = before.map_or(null_mut(), |window| {
                window.start.as_ptr().wrapping_add(WINDOW as usize)
            });
            let start = reserve(near)?;
            let Some(watch) = self.faults.watch(start.as_ptr().addr(), WINDOW as usize) else {
                // SAFETY: the window just made, which nobody uses.
                let _ = unsafe { munmap(start.as_ptr().cast(), WINDOW as usize) };
                return Err(Errno::NOMEM);
            };
            lent.windows.insert(index, Window { start, _watch: watch });
        }
        Ok(())
    }

    /// The client takes back all that it lent between two addresses. When this returns, no region of the device reaches it any more.
    pub(crate) fn unmap(&self, first: u64, last: u64, device: Option<&Device>) -> Result<(), Errno> {
        let removed = self.lent_mut().ledger.remove(first, last)?;
        let (Some(lowest), Some(highest)) = (removed.first(), removed.last()) else {
            return Ok(());
        };
        if let Some(device) = device {
            // Nothing between them is lent: no region was there.
            device.unmapped(lowest.first, (highest.last - lowest.first).saturating_add(1));
        }
        let mut lent = self.lent_mut();
        for stretch in removed.iter().filter(|stretch| stretch.place == Place::Mapped) {
            for piece in lent.pieces(stretch.first, stretch.last) {
                dig(piece.ptr, piece.len)?;
            }
            self.budget.give_back(lent.mapped);
            lent.mapped -= 1;
        }
        Ok(())
    }

    /// The device has been stopped after these faults: holes are holes again.
    ///
    /// # Errors
    ///
    /// What is there cannot be told any more; the connection must end.
    pub(crate) fn after(&self, faults: Faults) -> Result<(), Errno> {
        let pages = match faults {
            Faults::None => return Ok(()),
            Faults::Holes(pages) => pages,
            Faults::Lost => return Err(Errno::FAULT),
        };
        let lent = self.lent();
        for page in pages {
            let address = lent.address_of(page).ok_or(Errno::FAULT)?;
            let mapped = lent
                .ledger
                .at(address)
                .is_some_and(|known| known.place == Place::Mapped);
            if let Some(ptr) = lent.locate(address).filter(|_| !mapped) {
                dig(ptr, PAGE as usize)?;
            }
        }
        Ok(())
    }
}

impl Drop for ClientMemory {
    fn drop(&mut self) {
        let lent = self.lent.get_mut().unwrap_or_else(PoisonError::into_inner);
        while lent.mapped > 0 {
            self.budget.give_back(lent.mapped);
            lent.mapped -= 1;
        }
        for (_, window) in std::mem::take(&mut lent.windows) {
            let start = window.start.as_ptr().cast();
            drop(window);
            // SAFETY: the device, which alone had pointers there, holds a handle to this and so is gone.
            let _ = unsafe { munmap(start, WINDOW as usize) };
        }
    }
}

// SAFETY: what `reach` points to is in a window, which stays until this is dropped, and the device holds a handle to it. While it is lent it is
// mapped readable and writable; once taken back, or when its file is made shorter, an access faults and finds a page of zeros (`faults`).
unsafe impl HostMemory for ClientMemory {
    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>> {
        self.lent().reach(iova, len)
    }

    fn remote(&self) -> Option<&dyn RemoteMemory> {
        self.remote.get().map(|_| self as &dyn RemoteMemory)
    }
}

impl ClientMemory {
    /// Visits the parts of a range, wherever they are: (address, offset, length, place).
    fn parts(
        &self,
        iova: u64,
        len: usize,
        mut visit: impl FnMut(&Remote, u64, usize, usize, Place, Option<NonNull<u8>>) -> Result<(), Unreachable>,
    ) -> Result<(), Unreachable> {
        let remote = self.remote.get().ok_or(Unreachable)?;
        let mut done = 0;
        while done < len {
            let address = iova.checked_add(done as u64).ok_or(Unreachable)?;
            let lent = self.lent();
            let known = *lent.ledger.at(address).ok_or(Unreachable)?;
            let within = (known.last - address)
                .saturating_add(1)
                .min(WINDOW - address % WINDOW);
            let part = within.min((len - done) as u64) as usize;
            match known.place {
                // Under the lock: it cannot be taken back meanwhile.
                Place::Mapped => visit(remote, address, done, part, known.place, lent.locate(address))?,
                Place::Remote { .. } => {
                    drop(lent);
                    visit(remote, address, done, part, known.place, None)?;
                }
            }
            done += part;
        }
        Ok(())
    }
}

impl RemoteMemory for ClientMemory {
    /// Whatever is lent, if not in one stretch here.
    fn covers(&self, iova: u64, len: u64) -> bool {
        self.lent().ledger.covers(iova, len, |_| true)
    }

    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        self.parts(iova, into.len(), |remote, address, done, len, place, ptr| {
            let into = &mut into[done..done + len];
            match (place, ptr) {
                (Place::Mapped, Some(ptr)) => {
                    // SAFETY: `len` bytes that are mapped here, by `parts`.
                    unsafe { ptr.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), len) };
                    Ok(())
                }
                (Place::Remote { read: true, .. }, _) => remote.read(address, into),
                _ => Err(Unreachable),
            }
        })
    }

    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Unreachable> {
        self.parts(iova, from.len(), |remote, address, done, len, place, ptr| {
            let from = &from[done..done + len];
            match (place, ptr) {
                (Place::Mapped, Some(ptr)) => {
                    // SAFETY: `len` bytes that are mapped here, by `parts`.
                    unsafe { ptr.as_ptr().copy_from_nonoverlapping(from.as_ptr(), len) };
                    Ok(())
                }
                (Place::Remote { write: true, .. }, _) => remote.write(address, from),
                _ => Err(Unreachable),
            }
        })
    }
}
