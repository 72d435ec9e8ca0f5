//! DMA without an IOMMU: physical addresses, from the kernel's list of the process's pages.
//!
//! Nothing is pinned here. Registered pages are locked, so that they are not swapped out, but the
//! kernel may still move them (compaction, a write after fork); queues are in huge pages, which the
//! kernel does not move.

use std::mem::ManuallyDrop;
use urnic_sync::Mutex;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, pread};
use rustix::mm::{Advice, MapFlags, ProtFlags, mlock};

use super::iova::IovaSpace;
use urnic_device::bus::{Mapping, QueueMemory};
use urnic_process::fds::InternalFd;
use urnic_sys::Pages;

const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// Bits of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Access to memory by physical addresses.
pub(super) struct Physical {
    pagemap: InternalFd,
    /// The memory of queues; it grows and never shrinks.
    runs: Mutex<Vec<Run>>,
    /// The container, which holds the group.
    _container: Option<InternalFd>,
}

/// Memory that is contiguous both in virtual and in physical addresses.
struct Run {
    /// Never unmapped: without an IOMMU, a device that was not reset may still write there.
    pages: ManuallyDrop<Pages>,
    first: u64,
    space: IovaSpace,
}

impl Physical {
    /// Opens the kernel's list of pages, and logs a warning about DMA without an IOMMU.
    ///
    /// # Errors
    /// `EPERM` if this process has no permission to read physical addresses; the errors of opening
    /// a file.
    pub(super) fn open(container: Option<InternalFd>) -> Result<Physical, Errno> {
        let pagemap = open(
            "/proc/self/pagemap",
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let physical = Physical {
            pagemap: InternalFd::of_device(pagemap)?,
            runs: Mutex::default(),
            _container: container,
        };
        let here = 0u8;
        physical.frames((&raw const here).addr() / PAGE * PAGE, 1)?;
        tracing::warn!(
            "no IOMMU: the device gets physical addresses and can reach all memory, and nothing is pinned: what the kernel moves, or a \
             fork copies, the device goes on using where it was"
        );
        Ok(physical)
    }

    /// Locks memory and returns its physical addresses.
    ///
    /// # Errors
    /// `EFAULT` if a page is missing; `EPERM` if the kernel hides physical addresses; `EIO` in a
    /// forked child.
    pub(super) fn map(&self, ptr: *mut u8, len: usize) -> Result<Mapping, Errno> {
        if len == 0 {
            return Ok(Mapping::Contiguous(0));
        }
        let start = ptr.addr() / PAGE * PAGE;
        let end = ptr
            .addr()
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(PAGE));
        let whole = end.ok_or(Errno::INVAL)? - start;
        // The memory stays locked when the registration ends: locks do not nest, and the program,
        // or another registration, may have locked it too.
        // SAFETY: locking changes no byte.
        if let Err(errno) = unsafe { mlock(ptr.with_addr(start).cast(), whole) } {
            tracing::warn!("cannot lock {whole} bytes: {errno}: the kernel may move or swap them");
        }
        let pages = self.frames(start, whole / PAGE)?;
        let offset = (ptr.addr() - start) as u64;
        let contiguous = pages.windows(2).all(|pair| pair[1] == pair[0] + PAGE as u64);
        Ok(match pages.first() {
            Some(first) if contiguous => Mapping::Contiguous(first + offset),
            _ => Mapping::Pages {
                pages,
                log_page: PAGE.ilog2(),
                offset,
            },
        })
    }

    /// Physical addresses of `count` pages.
    fn frames(&self, start: usize, count: usize) -> Result<Vec<u64>, Errno> {
        let pagemap = self.pagemap.get().ok_or(Errno::IO)?;
        let mut bytes = vec![0; count * 8];
        let mut read = 0;
        while read < bytes.len() {
            let at = (start / PAGE * 8 + read) as u64;
            match pread(pagemap, bytes.get_mut(read..).unwrap_or_default(), at) {
                Ok(0) => return Err(Errno::FAULT),
                Ok(n) => read += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        let entries = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
        entries.map(address_in).collect()
    }

    /// Allocates zeroed memory in one contiguous piece.
    ///
    /// # Errors
    /// `ENOMEM` if no piece is long enough.
    pub(super) fn allocate(&self, len: usize) -> Result<QueueMemory, Errno> {
        let mut runs = self.runs.lock();
        let mut memory = runs.iter_mut().find_map(|run| run.take(len));
        if memory.is_none() {
            let at = runs.len();
            self.grow(len, &mut runs)?;
            memory = runs.iter_mut().skip(at).find_map(|run| run.take(len));
        }
        let Some(memory) = memory else {
            tracing::error!(
                "no {len} bytes in one piece for the device: without an IOMMU its queues need huge pages: sysctl vm.nr_hugepages=32"
            );
            return Err(Errno::NOMEM);
        };
        // SAFETY: the memory is `len` bytes of a run, and no other code has them.
        unsafe { std::ptr::write_bytes(memory.ptr.as_ptr(), 0, len) };
        Ok(memory)
    }

    /// Frees memory from [`Physical::allocate`].
    pub(super) fn free(&self, memory: QueueMemory) {
        for run in self.runs.lock().iter_mut() {
            if (run.first..run.first + run.pages.len() as u64).contains(&memory.iova) {
                run.space.release(memory.iova);
            }
        }
    }

    /// Adds memory: huge pages if there are any, else other pages, of which physically adjacent
    /// ones make runs.
    fn grow(&self, len: usize, runs: &mut Vec<Run>) -> Result<(), Errno> {
        let whole = len.checked_next_multiple_of(HUGE).ok_or(Errno::NOMEM)?;
        // A shared mapping, so that a write after a fork does not move the page.
        let huge = MapFlags::SHARED | MapFlags::HUGETLB | MapFlags::POPULATE;
        let pages = match Pages::anonymous(whole, ProtFlags::READ | ProtFlags::WRITE, huge) {
            Ok(pages) => pages,
            Err(_) => transparent(whole)?,
        };
        let frames = self.frames(pages.start().addr().get(), whole / PAGE)?;
        let neighbours = |a: &u64, b: &u64| *b == *a + PAGE as u64;
        if !frames.chunk_by(neighbours).any(|run| run.len() * PAGE >= len) {
            // An unsuitable mapping would stay locked without use, and the next attempt would lock
            // as much again: it is unmapped here.
            return Ok(());
        }
        let mut rest = pages;
        for run in frames.chunk_by(neighbours) {
            let first = run.first().copied().unwrap_or_default();
            let after = rest.split_off(run.len() * PAGE);
            runs.push(Run::new(std::mem::replace(&mut rest, after), first));
        }
        Ok(())
    }
}

/// Locked memory at a multiple of the huge page, made of huge pages if the kernel permits it.
fn transparent(len: usize) -> Result<Pages, Errno> {
    let room = len.checked_add(HUGE).ok_or(Errno::NOMEM)?;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    let pages = Pages::anonymous(room, rights, MapFlags::PRIVATE)?.aligned_part(HUGE, len);
    let _ = pages.advise(Advice::LinuxHugepage);
    pages.advise(Advice::LinuxPopulateWrite)?;
    pages.lock()?;
    Ok(pages)
}

/// The physical address in an entry of the list.
fn address_in(entry: u64) -> Result<u64, Errno> {
    match (entry & PRESENT != 0, entry & FRAME) {
        (false, _) => Err(Errno::FAULT),
        // The kernel shows frame 0 to a process without the permission.
        (true, 0) => Err(Errno::PERM),
        (true, frame) => Ok(frame * PAGE as u64),
    }
}

impl Run {
    fn new(pages: Pages, first: u64) -> Run {
        let mut space = IovaSpace::new(PAGE as u64);
        space.add(first, first + (pages.len() as u64 - 1));
        Run {
            pages: ManuallyDrop::new(pages),
            first,
            space,
        }
    }

    fn take(&mut self, len: usize) -> Option<QueueMemory> {
        let iova = self.space.allocate(len as u64, 0)?;
        let ptr = self.pages.at((iova - self.first) as usize)?;
        Some(QueueMemory { ptr, iova })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_list_entries_separate_missing_from_forbidden() {
        assert_eq!(address_in(PRESENT | 0x1234), Ok(0x123_4000));
        assert_eq!(address_in(0x1234), Err(Errno::FAULT));
        assert_eq!(address_in(PRESENT | 1 << 55), Err(Errno::PERM));
    }

    /// Tests only with the permission to read physical addresses; otherwise opening reports EPERM.
    #[test]
    fn memory_for_queues_is_zeroed_apart_and_in_one_piece() {
        let physical = match Physical::open(None) {
            Ok(physical) => physical,
            Err(errno) => return assert_eq!(errno, Errno::PERM),
        };
        let pieces: Vec<QueueMemory> = [PAGE, 3 * PAGE, 1, 2 * PAGE]
            .map(|len| physical.allocate(len).unwrap())
            .into();
        for piece in &pieces {
            assert_eq!(
                physical.frames(piece.ptr.as_ptr().addr(), 1),
                Ok(vec![piece.iova])
            );
        }
        let mut starts: Vec<u64> = pieces.iter().map(|p| p.iova).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), 4);
        // SAFETY: the piece belongs to this test.
        unsafe { pieces[1].ptr.write(7) };
        physical.free(pieces[1]);
        let again = physical.allocate(3 * PAGE).unwrap();
        assert_eq!(again.iova, pieces[1].iova);
        // SAFETY: the piece belongs to this test and has room for a byte.
        assert_eq!(unsafe { again.ptr.read() }, 0);
    }

    #[test]
    fn registered_memory_is_mapped_by_its_pages() {
        let physical = match Physical::open(None) {
            Ok(physical) => physical,
            Err(errno) => return assert_eq!(errno, Errno::PERM),
        };
        let mut memory = vec![1u8; 5 * PAGE];
        let ptr = memory.as_mut_ptr();
        match physical.map(ptr, 4 * PAGE).unwrap() {
            Mapping::Contiguous(first) => assert_eq!(first % PAGE as u64, (ptr.addr() % PAGE) as u64),
            Mapping::Pages {
                pages,
                log_page,
                offset,
            } => {
                assert_eq!(log_page, 12);
                assert_eq!(offset, (ptr.addr() % PAGE) as u64);
                assert_eq!(pages.len(), (ptr.addr() % PAGE + 4 * PAGE).div_ceil(PAGE));
            }
        }
        assert_eq!(
            physical.map(std::ptr::without_provenance_mut(1 << 46), 1).err(),
            Some(Errno::FAULT)
        );
    }
}
