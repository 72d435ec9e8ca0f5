//! Address space for clients' memory.
//!
//! A function has one *block*: a row of [windows](WINDOW) that is reserved in one piece. A client
//! chooses what is mapped in a block and when. No sequence of calls, and no failure of a call, may
//! leave a part of a block unmapped while a pointer to it exists: the process's allocator could
//! take that range, and a ring of the client, or the next mapping, would overwrite the allocator's
//! data. Four rules prevent that.
//!
//! 1. *Addresses are never returned to the kernel.* A block that its function no longer needs is
//!    cleared by one call and goes to a pool for the next function. `munmap` is never called on a
//!    part of a block.
//! 2. *A step that the client can make fail runs outside the block.* A file is first mapped at an
//!    address of the kernel's choice ([`Trial`]). Missing huge pages, seals and limits of the
//!    process make this step fail and leave the block untouched. (`mmap` with `MAP_FIXED` removes
//!    the mapping at its target before the file agrees, and does not restore it.)
//! 3. *The mapping is then moved* by `mremap`. This step can fail only for lack of kernel memory:
//!    the size stays, the alignment is checked here, and a [scratch range](moves_huge_pages) has
//!    shown before whether mappings of huge pages can be moved at all (Linux 5.16). `mremap`
//!    removes its target before it needs that memory, so this failure may leave a hole, as may a
//!    failure of `mmap` when a part is [cleared](Block::clear).
//! 4. *After such a failure the range is reserved again* with `MAP_FIXED_NOREPLACE`, which never
//!    replaces a mapping. If that succeeds, there was a hole, no other mapping had taken it, and it
//!    is closed. If it fails, then either nothing had been removed or a foreign mapping is in the
//!    range. These two cases cannot be distinguished, so the block is *spoiled*: nothing in it is
//!    mapped, changed or used again, its function stops and its client is disconnected.
//!
//! Between a failure and rule 4 other threads may allocate. Blocks therefore lie where the kernel
//! places no mapping by its own choice: the kernel assigns addresses from the top down (or, in the
//! legacy layout, from a third of the address space up), and blocks are requested [below](LOWEST)
//! all of those.

use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use urnic_sync::Mutex;
use urnic_sys::Pages;

/// Length of a window in bytes.
pub(crate) const WINDOW: u64 = 1 << 36;
/// Windows of one function: 2 TiB.
pub(crate) const MAX_WINDOWS: usize = 32;
/// Alignment of blocks in bytes, as huge pages require.
const ALIGN: usize = 1 << 30;
/// The range in which blocks are requested, from `LOWEST` to below `HIGHEST`: under a third of 47
/// bits, and above the range that AddressSanitizer reserves.
const LOWEST: usize = 20 << 40;
const HIGHEST: usize = 40 << 40;
const HUGETLBFS: u64 = 0x9584_58f6;

/// Why a change to a block failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The kernel refuses; the block is unchanged, or clear where the change was requested.
    Refused(Errno),
    /// The mapping at these addresses is unknown; the block is not used any more.
    Spoiled,
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Failed {
        Failed::Refused(errno)
    }
}

/// Clear blocks that belong to no function.
static POOL: Mutex<Vec<Span>> = Mutex::new(Vec::new());

/// A range of addresses.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: NonNull<u8>,
    windows: usize,
}

// SAFETY: a span is an address and a count; only the `Block` that holds the span uses the memory
// there, and no code uses it while the span is in the pool.
unsafe impl Send for Span {}
// SAFETY: a shared span only yields its address and count, which do not change.
unsafe impl Sync for Span {}

/// A row of windows that belongs to one function.
#[derive(Debug)]
pub(crate) struct Block {
    span: Span,
    spoiled: bool,
}

/// The address at which the next block is requested. After the last one of the range comes the
/// first one again.
fn next_address(len: usize) -> usize {
    static REQUESTED: AtomicUsize = AtomicUsize::new(0);
    let step = len + ALIGN;
    let requested = REQUESTED.fetch_add(step, Ordering::Relaxed);
    LOWEST + requested % (HIGHEST - LOWEST - step)
}

/// Reserves addresses, with a gap of at least a page to other mappings at both ends. The kernel
/// merges mappings that touch, and to split one again takes a mapping that the kernel may refuse.
fn reserve(windows: usize) -> Result<Span, Errno> {
    let (len, extra) = (windows * WINDOW as usize, 2 * ALIGN);
    let mut whole = Pages::reserved_near(next_address(len + extra), len + extra)?;
    let start = whole.start().addr().get();
    let mut aligned = whole.split_off((start + 1).next_multiple_of(ALIGN) - start);
    drop(aligned.split_off(len));
    let start = aligned.leak();
    // Faults look the block up by its address.
    start.as_ptr().expose_provenance();
    Ok(Span { start, windows })
}

/// Reserves the range again if it is a hole. An error means that a mapping is there.
fn fill_hole(at: NonNull<u8>, len: usize) -> Result<(), Failed> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: replaces nothing.
    let got = unsafe { mmap_anonymous(at.as_ptr().cast(), len, ProtFlags::empty(), flags) };
    match got {
        Ok(got) if got == at.as_ptr().cast() => Ok(()),
        Ok(elsewhere) => {
            // Kernels before 4.17 ignore this flag.
            // SAFETY: the mapping just made, to which no other pointer exists.
            let _ = unsafe { munmap(elsewhere, len) };
            Err(Failed::Spoiled)
        }
        Err(_) => Err(Failed::Spoiled),
    }
}

/// A file's mapping at an address of the kernel's choice, before it is moved to its place.
#[derive(Debug)]
pub(crate) struct Trial(Pages);

impl Trial {
    /// Maps a part of a file that [is memory](super::passed::is_memory). Its later place has the
    /// offset `skew` from a multiple of 1 GiB.
    pub(crate) fn new(file: &OwnedFd, offset: u64, len: usize, skew: u64) -> Result<Trial, Errno> {
        let fs = fstatfs(file)?;
        let huge = fs.f_type as u64 == HUGETLBFS;
        if huge {
            let page = u64::try_from(fs.f_bsize).ok().filter(|page| *page > 0);
            let page = page.ok_or(Errno::INVAL)?;
            if ![skew, len as u64, offset].iter().all(|n| n.is_multiple_of(page)) {
                return Err(Errno::INVAL);
            }
        }
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let mut trial = Trial(Pages::of_file(file, offset, len, rights)?);
        if huge && !moves_huge_pages(&mut trial) {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(trial)
    }

    /// Moves the mapping to `to`, and replaces the mapping there.
    ///
    /// # Safety
    ///
    /// No code uses the `len` bytes at `to`, whatever the call does with them.
    unsafe fn move_to(&mut self, to: NonNull<u8>) -> Result<(), Errno> {
        let (from, len) = (self.0.start().as_ptr().cast(), self.0.len());
        // SAFETY: the source is this trial's own mapping; the caller guarantees that the target is
        // unused. The mapping, which is now there, belongs to this trial.
        let moved = unsafe {
            mremap_fixed(from, len, len, MremapFlags::MAYMOVE, to.as_ptr().cast())?;
            Pages::of_leaked(to, len)
        };
        std::mem::replace(&mut self.0, moved).leak();
        Ok(())
    }
}

/// Whether the kernel moves mappings of huge pages. A kernel that cannot move them refuses only
/// after it has removed the target, so this is tested once, with a target that is not in use.
fn moves_huge_pages(trial: &mut Trial) -> bool {
    static MOVES: OnceLock<bool> = OnceLock::new();
    *MOVES.get_or_init(|| {
        let Ok(scratch) = reserve(trial.0.len().div_ceil(WINDOW as usize)) else {
            return false;
        };
        // SAFETY: addresses just reserved for this test, which no code uses, now or later.
        unsafe { trial.move_to(scratch.start) }.is_ok()
    })
}

impl Block {
    /// A block of `windows` windows, or of fewer if the process cannot reserve as many addresses.
    pub(crate) fn new(windows: usize) -> Result<Block, Errno> {
        let windows = windows.clamp(1, MAX_WINDOWS);
        let halves = (0..=MAX_WINDOWS.ilog2()).map(|times| windows >> times);
        let mut sizes = halves.filter(|windows| *windows > 0);
        let span = sizes.find_map(|windows| pooled(windows).or_else(|| reserve(windows).ok()));
        let span = span.ok_or(Errno::NOMEM)?;
        Ok(Block { span, spoiled: false })
    }

    /// Address of the first byte, a multiple of 1 GiB.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.span.start
    }

    /// Number of windows.
    pub(crate) fn windows(&self) -> usize {
        self.span.windows
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.span.windows * WINDOW as usize
    }

    /// The address at an offset.
    fn part(&self, offset: usize, len: usize) -> Result<NonNull<u8>, Failed> {
        if self.spoiled {
            return Err(Failed::Spoiled);
        }
        let end = offset.checked_add(len).ok_or(Errno::INVAL)?;
        if end > self.len() {
            return Err(Errno::INVAL.into());
        }
        Ok(self.span.start.map_addr(|address| address.saturating_add(offset)))
    }

    /// Closes a hole that a failed change may have left, or marks the block as spoiled.
    fn repair(&mut self, at: NonNull<u8>, len: usize, errno: Errno) -> Failed {
        match fill_hole(at, len) {
            Ok(()) => Failed::Refused(errno),
            Err(failed) => {
                tracing::error!(%errno, "a part of the address space may be lost; it is not used any more");
                self.spoiled = true;
                failed
            }
        }
    }

    /// Puts a file's mapping in place of the part at an offset, which must be clear.
    pub(crate) fn place(&mut self, offset: usize, trial: Trial) -> Result<(), Failed> {
        let mut trial = trial;
        let len = trial.0.len();
        let at = self.part(offset, len)?;
        // SAFETY: inside of this block, where nothing is mapped. An old pointer to this range finds
        // no rights, the file, or, if this fails and leaves a hole, nothing, until `repair`.
        match unsafe { trial.move_to(at) } {
            Ok(()) => {
                // It is the block's now.
                trial.0.leak();
                Ok(())
            }
            Err(errno) => Err(self.repair(at, len, errno)),
        }
    }

    /// Puts memory without rights in place of the part at an offset.
    pub(crate) fn clear(&mut self, offset: usize, len: usize) -> Result<(), Failed> {
        let at = self.part(offset, len)?;
        let Err(errno) = clear(at, len) else {
            return Ok(());
        };
        match self.repair(at, len, errno) {
            // A hole that is filled is clear.
            Failed::Refused(_) => Ok(()),
            Failed::Spoiled => Err(Failed::Spoiled),
        }
    }
}

fn clear(at: NonNull<u8>, len: usize) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: inside of a block that belongs to the caller; an access by an old pointer causes a
    // fault that is caught.
    unsafe { mmap_anonymous(at.as_ptr().cast(), len, ProtFlags::empty(), flags) }.map(drop)
}

fn pool() -> urnic_sync::MutexGuard<'static, Vec<Span>> {
    POOL.lock()
}

/// A block of at least `windows` windows from the pool.
fn pooled(windows: usize) -> Option<Span> {
    let mut pool = pool();
    let found = pool.iter().position(|span| span.windows >= windows)?;
    Some(pool.swap_remove(found))
}

impl Drop for Block {
    fn drop(&mut self) {
        // The function's device, which alone had pointers into the block, is gone.
        if self.clear(0, self.len()).is_ok() && !self.spoiled {
            pool().push(self.span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn file(flags: MemfdFlags, len: u64) -> OwnedFd {
        let file = memfd_create("block", flags | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        file
    }

    /// A block that no other test gets from the pool.
    fn fresh() -> Block {
        Block {
            span: reserve(1).unwrap(),
            spoiled: false,
        }
    }

    /// Whether every address of a block is mapped.
    fn is_whole(block: &Block) -> bool {
        let (mut at, end) = (
            block.start().as_ptr().addr(),
            block.start().as_ptr().addr() + block.len(),
        );
        for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
            let (range, _) = line.split_once(' ').unwrap();
            let (first, after) = range.split_once('-').unwrap();
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            if number(first) <= at && at < number(after) {
                at = number(after);
            }
        }
        at >= end
    }

    fn is_in_pool(start: NonNull<u8>) -> bool {
        pool().iter().any(|span| span.start == start)
    }

    #[test]
    fn a_file_that_cannot_be_mapped_leaves_no_hole() {
        let mut block = fresh();
        block
            .place(
                0,
                Trial::new(&file(MemfdFlags::empty(), 1 << 21), 0, 1 << 21, 0).unwrap(),
            )
            .unwrap();
        // More huge pages than any test machine has.
        const LEN: u64 = 32 << 30;
        let huge = file(MemfdFlags::HUGETLB, LEN);
        let refused = Trial::new(&huge, 0, LEN as usize, 0).err();
        assert_eq!(refused, Some(Errno::NOMEM), "32 GiB of huge pages are there");
        assert_eq!(Trial::new(&huge, 0, 4096, 0).err(), Some(Errno::INVAL));
        assert_eq!(Trial::new(&huge, 0, 1 << 21, 4096).err(), Some(Errno::INVAL));
        let sealed = file(MemfdFlags::ALLOW_SEALING, 4096);
        rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
        assert_eq!(Trial::new(&sealed, 0, 4096, 0).err(), Some(Errno::PERM));
        assert!(is_whole(&block));
        let start = block.start();
        drop(block);
        assert!(is_in_pool(start));
    }

    #[test]
    fn a_hole_that_a_failed_call_left_is_filled() {
        let mut block = fresh();
        // SAFETY: imitates the hole that a failed mremap leaves, at an address that no other code
        // allocates.
        unsafe { munmap(block.start().as_ptr().wrapping_add(8192).cast(), 4096) }.unwrap();
        assert!(!is_whole(&block));
        let hole = block.part(8192, 4096).unwrap();
        assert_eq!(
            block.repair(hole, 4096, Errno::NOMEM),
            Failed::Refused(Errno::NOMEM)
        );
        assert!(is_whole(&block));
        block.clear(0, 1 << 20).unwrap();
    }

    #[test]
    fn a_possibly_foreign_range_is_never_accessed_again() {
        let mut block = fresh();
        let start = block.start();
        let at = start.as_ptr().wrapping_add(8192);
        // SAFETY: imitates the hole that a failed mremap leaves, and a foreign mapping in it.
        let foreign_mapping: *mut u64 = unsafe {
            munmap(at.cast(), 4096).unwrap();
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(
                at.cast(),
                4096,
                rights,
                MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE,
            )
            .unwrap()
            .cast()
        };
        // SAFETY: the mapping just made.
        unsafe { foreign_mapping.write(0x5e75) };
        let hole = block.part(8192, 4096).unwrap();
        assert_eq!(block.repair(hole, 4096, Errno::NOMEM), Failed::Spoiled);
        let trial = Trial::new(&file(MemfdFlags::empty(), 4096), 0, 4096, 0).unwrap();
        assert_eq!(block.place(0, trial), Err(Failed::Spoiled));
        assert_eq!(block.clear(8192, 4096), Err(Failed::Spoiled));
        drop(block);
        assert!(!is_in_pool(start));
        // SAFETY: the mapping made above, which is still there.
        assert_eq!(unsafe { foreign_mapping.read() }, 0x5e75);
    }

    #[test]
    fn addresses_are_kept_and_used_again() {
        let block = fresh();
        let start = block.start();
        assert!(
            (LOWEST..HIGHEST).contains(&start.as_ptr().addr()),
            "where nothing is allocated"
        );
        drop(block);
        let mut held = Vec::new();
        while held.len() < 1000 && held.last().is_none_or(|block: &Block| block.start() != start) {
            held.push(Block::new(1).unwrap());
        }
        assert!(held.len() < 1000, "the block does not come out of the pool again");
        assert!(held.iter().all(is_whole));
    }
}
