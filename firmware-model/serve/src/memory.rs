//! The client's memory.
//!
//! Memory that comes with a descriptor is mapped at its place in a *window*: 64 GiB of addresses
//! stand for each 64 GiB of DMA addresses in use. Extents that are adjacent for the client are
//! therefore adjacent here, although QEMU passes a guest's memory page by page when there is an
//! IOMMU. The windows of a function are one [`Block`]; its module explains why no action of a
//! client can remove these addresses. Ranges without client memory are mapped without rights;
//! [`faults`](super::faults) handles accesses there.

use super::block::{Block, Failed, MAX_WINDOWS, Trial, WINDOW};
use super::faults::{FaultLog, Faults, Watch};
use super::function::MAX_DMA_MAPS;
use super::ledger::{Extent, Ledger, Place};
use super::passed::Passed;
use super::remote::Remote;
use rustix::fs::fstat;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use urnic_model::Device;
use urnic_model::host::{HostMemory, HostProcess, RemoteMemory, RemoteWord, Unreachable};
use urnic_sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use urnic_vfio_user::{DmaMap, DmaMapFlags};

const PAGE: u64 = 4096;
/// Windows of all functions together: 64 TiB, half of a 47-bit address space.
const ALL_WINDOWS: usize = 1024;
/// Minimum number of windows of a function; with fewer it is of little use.
const MIN_WINDOWS: usize = 4;

/// The budget of mappings. The kernel limits the mappings of a process, and one client could
/// exhaust them. Each function has its own share; beyond its share a function takes from a common
/// remainder, first come, first served.
#[derive(Debug)]
pub(crate) struct Budget {
    share: usize,
    /// The number of mappings of the common rest that are in use, and the maximum.
    used: AtomicUsize,
    limit: usize,
    /// Windows of each function.
    windows: usize,
}

impl Budget {
    /// The budget of a process that serves at most `functions` functions.
    pub(crate) fn new(functions: usize) -> Arc<Budget> {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        let (granted, functions): (usize, _) = (text.trim().parse().unwrap_or(65_530), functions.max(1));
        // A mapping in the middle of a hole splits the hole in two.
        let total = granted / 8 * 3;
        let share = total / 2 / functions;
        Arc::new(Budget {
            share,
            used: AtomicUsize::new(0),
            limit: total - share * functions,
            windows: (ALL_WINDOWS / functions).clamp(MIN_WINDOWS, MAX_WINDOWS),
        })
    }

    /// Takes `more` mappings for a function that holds `held`.
    fn take(&self, held: usize, more: usize) -> Result<(), Errno> {
        let beyond = self.beyond(held + more) - self.beyond(held);
        let taken = urnic_model::memory::reserve(&self.used, beyond, self.limit);
        taken.then_some(()).ok_or(Errno::NOSPC)
    }

    /// Returns `fewer` of the `held` mappings of a function.
    fn release(&self, held: usize, fewer: usize) {
        let beyond = self.beyond(held) - self.beyond(held.saturating_sub(fewer));
        self.used.fetch_sub(beyond, Ordering::Relaxed);
    }

    /// How many of `held` mappings exceed the function's own share.
    fn beyond(&self, held: usize) -> usize {
        held.saturating_sub(self.share)
    }
}

/// The block of a function, which is watched for faults.
#[derive(Debug)]
struct Windows {
    // Dropped first: no block in the pool is watched for faults.
    _watch: Watch,
    block: Block,
    /// Owner of each window of the block, as DMA address divided by [`WINDOW`].
    owners: Vec<Option<u64>>,
}

#[derive(Debug, Default)]
struct MappedMemory {
    ledger: Ledger,
    windows: Option<Windows>,
    /// Index in the block of each open window, by DMA address divided by [`WINDOW`].
    places: BTreeMap<u64, usize>,
    /// Number of mappings in the block.
    mapped: usize,
}

/// Part of an extent that is one range of the block.
struct Piece {
    /// Offset in the block.
    at: usize,
    len: usize,
    /// Offset from the extent's beginning.
    offset: u64,
}

impl MappedMemory {
    /// The offset in the block of an address, if its window is open.
    fn place_of(&self, address: u64) -> Option<usize> {
        let place = self.places.get(&(address / WINDOW))?;
        Some(place * WINDOW as usize + (address % WINDOW) as usize)
    }

    /// The pointer for an address, if its window is open.
    fn locate(&self, address: u64) -> Option<NonNull<u8>> {
        let block = &self.windows.as_ref()?.block;
        // `place_of` returns offsets of windows of this block only, so the result is inside of it.
        let place = self.place_of(address)?;
        Some(block.start().map_addr(|start| start.saturating_add(place)))
    }

    /// The DMA address of an address in the block.
    fn address_of(&self, place: usize) -> Option<u64> {
        let windows = self.windows.as_ref()?;
        let offset = place.checked_sub(windows.block.start().as_ptr().addr())? as u64;
        let index = (*windows.owners.get((offset / WINDOW) as usize)?)?;
        Some(index * WINDOW + offset % WINDOW)
    }

    /// The parts of an extent whose windows are open. There is one part, unless windows that are
    /// neighbours for the client are not neighbours in the block.
    fn pieces(&self, first: u64, last: u64) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for index in windows_of(first, last) {
            let begin = first.max(index * WINDOW);
            let end = last.min(index * WINDOW + (WINDOW - 1));
            let len = (end - begin + 1) as usize;
            let Some(at) = self.place_of(begin) else {
                continue;
            };
            match pieces.last_mut() {
                Some(piece) if piece.at + piece.len == at => piece.len += len,
                _ => pieces.push(Piece {
                    at,
                    len,
                    offset: begin - first,
                }),
            }
        }
        pieces
    }

    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>> {
        let len = len.max(1) as u64;
        if !self.ledger.covers(iova, len, |place| place == Place::Mapped) {
            return None;
        }
        match &self.pieces(iova, iova + (len - 1))[..] {
            [piece] if piece.len as u64 == len => self.locate(iova),
            _ => None,
        }
    }

    /// Opens a window, next to the windows of adjacent addresses if that place is free.
    fn open_window(&mut self, index: u64) -> Result<(), Errno> {
        let Some(windows) = &mut self.windows else {
            return Err(Errno::NOMEM);
        };
        if self.places.contains_key(&index) {
            return Ok(());
        }
        let is_free = |place: &usize| windows.owners.get(*place).is_some_and(Option::is_none);
        let previous = index.checked_sub(1).and_then(|before| self.places.get(&before));
        let next = previous.map(|place| place + 1);
        let before = self
            .places
            .get(&(index + 1))
            .and_then(|place| place.checked_sub(1));
        let roomy = || (0..windows.owners.len()).find(|place| is_free(place) && is_free(&(place + 1)));
        let place = next
            .filter(is_free)
            .or_else(|| before.filter(is_free))
            .or_else(roomy)
            .or_else(|| (0..windows.owners.len()).find(is_free))
            .ok_or(Errno::NOMEM)?;
        windows.owners[place] = Some(index);
        self.places.insert(index, place);
        Ok(())
    }
}

fn windows_of(first: u64, last: u64) -> RangeInclusive<u64> {
    first / WINDOW..=last / WINDOW
}

/// Memory that a client lends to its function.
#[derive(Debug)]
pub(crate) struct ClientMemory {
    lent: RwLock<MappedMemory>,
    budget: Arc<Budget>,
    /// Set when the client has declared its capabilities.
    remote: OnceLock<Remote>,
    /// Locked by atomic operations on memory that is accessed by copies.
    atomics: Mutex<()>,
    faults: FaultLog,
}

impl ClientMemory {
    pub(crate) fn new(budget: Arc<Budget>) -> Result<ClientMemory, Errno> {
        Ok(ClientMemory {
            lent: RwLock::default(),
            budget,
            remote: OnceLock::new(),
            atomics: Mutex::default(),
            faults: FaultLog::new()?,
        })
    }

    fn lent(&self) -> RwLockReadGuard<'_, MappedMemory> {
        self.lent.read()
    }

    fn lent_mut(&self) -> RwLockWriteGuard<'_, MappedMemory> {
        self.lent.write()
    }

    /// Sets how memory that is not mapped here is accessed.
    pub(crate) fn set_remote(&self, remote: Remote) {
        let _ = self.remote.set(remote);
    }

    /// The log of faults.
    pub(crate) fn faults(&self) -> &FaultLog {
        &self.faults
    }

    /// Maps memory that the client lends.
    pub(crate) fn map(&self, map: &DmaMap, file: Option<Passed>) -> Result<(), Errno> {
        let (read, write) = (
            map.flags.contains(DmaMapFlags::READ),
            map.flags.contains(DmaMapFlags::WRITE),
        );
        if !(DmaMapFlags::READ | DmaMapFlags::WRITE).contains(map.flags) || !(read || write) {
            return Err(Errno::INVAL);
        }
        // The device needs both rights for memory that it may access at any time, and a file that
        // is not memory may block it.
        let file = match file {
            Some(Passed::Memory(file)) if read && write => Some(file),
            _ => None,
        };
        let place = match file {
            Some(_) => Place::Mapped,
            None => Place::Remote { read, write },
        };
        let extent = Extent::new(map.address, map.size, place)?;
        let mut lent = self.lent_mut();
        if lent.ledger.overlaps(&extent) {
            return Err(Errno::EXIST);
        }
        if lent.ledger.len() as u64 >= MAX_DMA_MAPS {
            return Err(Errno::NOSPC);
        }
        if let Some(file) = &file {
            self.map_file(&mut lent, &extent, map.offset, file)?;
        }
        lent.ledger.insert(extent);
        Ok(())
    }

    fn map_file(
        &self,
        lent: &mut MappedMemory,
        extent: &Extent,
        offset: u64,
        file: &OwnedFd,
    ) -> Result<(), Errno> {
        let size = extent.last - extent.first;
        let end = size
            .checked_add(1)
            .and_then(|size| offset.checked_add(size))
            .ok_or(Errno::INVAL)?;
        let aligned = [extent.first, extent.last.wrapping_add(1), offset]
            .iter()
            .all(|n| n.is_multiple_of(PAGE));
        if !aligned || fstat(file)?.st_size.unsigned_abs() < end {
            return Err(Errno::INVAL);
        }
        self.open_windows(lent, extent)?;
        let pieces = lent.pieces(extent.first, extent.last);
        // All steps that can fail because of the file or the client run here, outside the block.
        let trial = |piece: &Piece| Trial::new(file, offset + piece.offset, piece.len, piece.at as u64);
        let trials = pieces.iter().map(trial).collect::<Result<Vec<_>, _>>()?;
        self.budget.take(lent.mapped, pieces.len())?;
        let block = &mut lent.windows.as_mut().ok_or(Errno::NOMEM)?.block;
        for (done, (piece, trial)) in pieces.iter().zip(trials).enumerate() {
            if let Err(failed) = block.place(piece.at, trial) {
                let cleared = pieces[..done].iter().all(|p| block.clear(p.at, p.len).is_ok());
                self.budget.release(lent.mapped + pieces.len(), pieces.len());
                return match failed {
                    Failed::Refused(errno) if cleared => Err(errno),
                    _ => Err(self.lose()),
                };
            }
        }
        lent.mapped += pieces.len();
        Ok(())
    }

    /// Marks the memory as lost, because it is unknown what is mapped at the client's addresses:
    /// the device stops, and the connection ends.
    fn lose(&self) -> Errno {
        self.faults.lose();
        Errno::NOMEM
    }

    /// Opens a window for each address of an extent.
    fn open_windows(&self, lent: &mut MappedMemory, extent: &Extent) -> Result<(), Errno> {
        let indices = windows_of(extent.first, extent.last);
        if indices.end() - indices.start() >= self.budget.windows as u64 {
            return Err(Errno::NOMEM);
        }
        if lent.windows.is_none() {
            let block = Block::new(self.budget.windows)?;
            let watch = self.faults.watch(block.start().as_ptr().addr(), block.len());
            lent.windows = Some(Windows {
                _watch: watch.ok_or(Errno::NOMEM)?,
                owners: vec![None; block.windows()],
                block,
            });
        }
        indices.into_iter().try_for_each(|index| lent.open_window(index))
    }

    /// Unmaps all memory that the client lent between two addresses. When this returns, no region
    /// of the device reaches that memory.
    pub(crate) fn unmap(&self, first: u64, last: u64, device: Option<&Device>) -> Result<(), Errno> {
        let removed = self.lent_mut().ledger.remove(first, last)?;
        let (Some(lowest), Some(highest)) = (removed.first(), removed.last()) else {
            return Ok(());
        };
        if let Some(device) = device {
            // The client passed no other memory between these addresses, so no region was there.
            device.unmapped(lowest.first, (highest.last - lowest.first).saturating_add(1));
        }
        let mut lent = self.lent_mut();
        for extent in removed.iter().filter(|extent| extent.place == Place::Mapped) {
            let pieces = lent.pieces(extent.first, extent.last);
            let block = &mut lent.windows.as_mut().ok_or(Errno::FAULT)?.block;
            for piece in &pieces {
                block.clear(piece.at, piece.len).map_err(|_| self.lose())?;
            }
            self.budget.release(lent.mapped, pieces.len());
            lent.mapped -= pieces.len();
        }
        Ok(())
    }

    /// Turns noted holes into holes again, after the device has been stopped because of these
    /// faults.
    ///
    /// # Errors
    ///
    /// `FAULT`: it is unknown what is mapped in the block; the connection must end.
    pub(crate) fn restore_holes(&self, faults: Faults) -> Result<(), Errno> {
        let pages = match faults {
            Faults::None => return Ok(()),
            Faults::Holes(pages) => pages,
            Faults::Lost => return Err(Errno::FAULT),
        };
        let mut lent = self.lent_mut();
        for page in pages {
            let address = lent.address_of(page).ok_or(Errno::FAULT)?;
            let mapped = lent
                .ledger
                .at(address)
                .is_some_and(|known| known.place == Place::Mapped);
            if mapped {
                continue;
            }
            if let (Some(at), Some(windows)) = (lent.place_of(address), &mut lent.windows) {
                windows.block.clear(at, PAGE as usize).map_err(|_| Errno::FAULT)?;
            }
        }
        Ok(())
    }
}

impl Drop for ClientMemory {
    fn drop(&mut self) {
        let lent = self.lent.get_mut();
        self.budget.release(lent.mapped, lent.mapped);
    }
}

// SAFETY: a pointer from `reach` points into a block, which stays until this object is dropped, and
// the device holds a handle to this object. Mapped memory is mapped readable and writable; once
// unmapped, or when its file is truncated, an access faults and finds a page of zeros (`faults`).
unsafe impl HostMemory for ClientMemory {
    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>> {
        self.lent().reach(iova, len)
    }

    fn remote(&self) -> Option<&dyn RemoteMemory> {
        self.remote.get().map(|_| self as &dyn RemoteMemory)
    }

    fn stopped(&self) -> &'static AtomicBool {
        self.faults.stopped()
    }
}

impl ClientMemory {
    /// Visits the parts of a range, mapped or remote: (address, offset, length, place).
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
                // Under the lock, so that the memory cannot be unmapped meanwhile.
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
    /// Whether all of the range is lent: mapped here or not, in one extent or in several.
    fn covers(&self, iova: u64, len: u64) -> bool {
        self.lent().ledger.covers(iova, len, |_| true)
    }

    fn process(&self) -> Option<&Arc<HostProcess>> {
        self.remote.get().and_then(Remote::process)
    }

    /// The memory of the client, by its address in the client's process: memory that is mapped here
    /// has the same address there.
    fn in_process(&self, iova: u64, len: u64) -> Option<u64> {
        self.process()?;
        let is_whole = |place: &Place| !matches!(place, Place::Remote { read, write } if !(*read && *write));
        let covers = self.lent().ledger.covers(iova, len, |place| is_whole(&place));
        covers.then_some(iova)
    }

    fn word(&self, _iova: u64) -> Result<RemoteWord<'_>, Unreachable> {
        Ok(RemoteWord::Copied(&self.atomics))
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
