//! Address space for clients' memory.
//!
//! A function has one *block*: a row of [windows](WINDOW) that is reserved in one piece. A client
//! chooses what is mapped there and when, so no sequence of calls, and no failure of any of them,
//! may leave a part of a block unmapped while something still points there: the process's allocator
//! could move in, and a ring of the client, or the next mapping, would overwrite it. Four rules see
//! to that.
//!
//! 1. *Addresses are never given back.* A block that its function no longer needs is cleared by one call and goes to a pool for the next function.
//!    `munmap` is never called on a part of a block.
//! 2. *What a client can make fail, fails elsewhere.* A file is mapped at an address of the kernel's choice first ([`Trial`]). Huge pages that are not
//!    there, seals, limits of the process: all that ends here, with the block untouched. (`mmap` with `MAP_FIXED` removes what lies at its target before
//!    the file agrees, and does not put it back.)
//! 3. *The mapping is then moved* by `mremap`. Nothing that is left can fail but the kernel's own memory: the size stays, the alignment is checked
//!    here, and whether mappings of huge pages can be moved at all (Linux 5.16) was tried on a [scratch range](moves_huge_pages) before. `mremap` removes its
//!    target before it needs that memory, so this failure may leave a hole, as may one of `mmap` when a part is [cleared](Block::clear).
//! 4. *After such a failure the range is taken again* with `MAP_FIXED_NOREPLACE`, which can never replace what is a stranger's. If that succeeds there was a
//!    hole, nobody had moved in, and it is closed. If not, then either nothing had been removed or a stranger is there; these cannot be told
//!    apart, so the block is *spoiled*: nothing in it is mapped, changed or used ever again, its function stops and its client is sent away.
//!
//! Between a failure and rule 4 other threads may allocate. Blocks therefore lie where the kernel
//! puts nothing by itself: it gives out addresses from the top down (or, in the legacy layout, from
//! a third of the address space up), and blocks are asked for [below](LOWEST) all of that.

use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mremap_fixed, munmap};
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Length of a window in bytes.
pub(crate) const WINDOW: u64 = 1 << 36;
/// Windows of one function: 2 TiB.
pub(crate) const MAX_WINDOWS: usize = 32;
/// Blocks begin at multiples of this, as huge pages want.
const ALIGN: usize = 1 << 30;
/// Where blocks are asked for, from the first to below the second: under a third of 47 bits, and
/// above what AddressSanitizer has for itself.
const LOWEST: usize = 20 << 40;
const HIGHEST: usize = 40 << 40;
const HUGETLBFS: u64 = 0x9584_58f6;

/// What became of a change to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The kernel refuses; the block is as it was, or clear where the change was to be.
    Refused(Errno),
    /// What is at these addresses cannot be told any more; the block is out of use.
    Spoiled,
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Failed {
        Failed::Refused(errno)
    }
}

/// Blocks that no function has: clear.
static POOL: Mutex<Vec<Span>> = Mutex::new(Vec::new());

/// A range of addresses.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: NonNull<u8>,
    windows: usize,
}

// SAFETY: an address; what is there belongs to the `Block`, or to nobody while it is in the pool.
unsafe impl Send for Span {}
// SAFETY: a shared span gives its address away and nothing else.
unsafe impl Sync for Span {}

/// A row of windows that belongs to one function.
#[derive(Debug)]
pub(crate) struct Block {
    span: Span,
    spoiled: bool,
}

/// Where the next block is asked for.
fn wish(len: usize) -> *mut u8 {
    static NEXT: AtomicUsize = AtomicUsize::new(LOWEST);
    let step = len + ALIGN;
    let wish = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
        Some(if next + 2 * step > HIGHEST {
            LOWEST
        } else {
            next + step
        })
    });
    std::ptr::without_provenance_mut(wish.unwrap_or(LOWEST))
}

/// Reserves addresses, with a gap of at least a page to other mappings at both ends: mappings that
/// touch become one, and to cut one in two takes a mapping that the kernel may refuse.
fn reserve(windows: usize) -> Result<Span, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let (len, extra) = (windows * WINDOW as usize, 2 * ALIGN);
    // SAFETY: no MAP_FIXED: the kernel picks addresses that are free.
    let start: *mut u8 =
        unsafe { mmap_anonymous(wish(len + extra).cast(), len + extra, ProtFlags::empty(), flags) }?.cast();
    let aligned = start.map_addr(|addr| (addr + 1).next_multiple_of(ALIGN));
    let before = aligned.addr() - start.addr();
    for (part, len) in [(start, before), (aligned.wrapping_add(len), extra - before)] {
        if len > 0 {
            // SAFETY: the ends of the mapping just made, which nobody has used.
            let _ = unsafe { munmap(part.cast(), len) };
        }
    }
    // Found again by address when an access faults.
    aligned.expose_provenance();
    let start = NonNull::new(aligned).ok_or(Errno::NOMEM)?;
    Ok(Span { start, windows })
}

/// Reserves the range again if it is a hole. An error says that something is there.
fn fill_hole(at: NonNull<u8>, len: usize) -> Result<(), Failed> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: replaces nothing.
    let got = unsafe { mmap_anonymous(at.as_ptr().cast(), len, ProtFlags::empty(), flags) };
    match got {
        Ok(got) if got == at.as_ptr().cast() => Ok(()),
        Ok(elsewhere) => {
            // Kernels before 4.17 know no such flag.
            // SAFETY: the mapping just made, which nobody has used.
            let _ = unsafe { munmap(elsewhere, len) };
            Err(Failed::Spoiled)
        }
        Err(_) => Err(Failed::Spoiled),
    }
}

/// A file's mapping at an address of the kernel's choice, before it is moved to its place.
#[derive(Debug)]
pub(crate) struct Trial {
    start: NonNull<u8>,
    len: usize,
}

impl Trial {
    /// Maps a part of a file that [is memory](super::passed::is_memory), to be put at a place whose
    /// offset from a multiple of 1 GiB is `skew`.
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
        // SAFETY: no MAP_FIXED: a mapping at free addresses disturbs nothing.
        let start = unsafe { mmap(null_mut(), len, rights, MapFlags::SHARED, file, offset) }?;
        let mut trial = Trial {
            start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?,
            len,
        };
        if huge && !moves_huge_pages(&mut trial) {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(trial)
    }

    /// Moves the mapping, in place of whatever is there.
    ///
    /// # Safety
    ///
    /// `len` bytes at `to` are not used by anybody, whatever becomes of them.
    unsafe fn move_to(&mut self, to: NonNull<u8>) -> Result<(), Errno> {
        let (from, to) = (self.start.as_ptr().cast(), to.as_ptr().cast());
        // SAFETY: the source is this trial's own; the caller answers for the target.
        let moved = unsafe { mremap_fixed(from, self.len, self.len, MremapFlags::MAYMOVE, to) }?;
        self.start = NonNull::new(moved.cast()).ok_or(Errno::FAULT)?;
        Ok(())
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping made in `new`, which nobody uses: a trial that found its place
            // has no length any more.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// Whether the kernel moves mappings of huge pages. Those that do not refuse when the target has
/// been removed already, so this is tried, once, with a target that nobody needs.
fn moves_huge_pages(trial: &mut Trial) -> bool {
    static MOVES: OnceLock<bool> = OnceLock::new();
    *MOVES.get_or_init(|| {
        let Ok(scratch) = reserve(trial.len.div_ceil(WINDOW as usize)) else {
            return false;
        };
        // SAFETY: addresses just reserved, which nobody uses, then or later.
        unsafe { trial.move_to(scratch.start) }.is_ok()
    })
}

impl Block {
    /// A block of so many windows, or of fewer if the process may have no more addresses.
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

    /// The place at an offset.
    fn part(&self, offset: usize, len: usize) -> Result<NonNull<u8>, Failed> {
        if self.spoiled {
            return Err(Failed::Spoiled);
        }
        let end = offset.checked_add(len).ok_or(Errno::INVAL)?;
        if end > self.len() {
            return Err(Errno::INVAL.into());
        }
        // SAFETY: inside of the block, by the check.
        Ok(unsafe { self.span.start.add(offset) })
    }

    /// Notes whether a failed change has left the block in order.
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

    /// Puts a file's mapping in place of what is at an offset, which must be clear.
    pub(crate) fn place(&mut self, offset: usize, trial: Trial) -> Result<(), Failed> {
        let mut trial = trial;
        let at = self.part(offset, trial.len)?;
        // SAFETY: inside of this block, where nothing is mapped. What still looks there by an old
        // pointer finds no rights, the file, or, if this fails and leaves a hole, nothing, until
        // `repair`.
        match unsafe { trial.move_to(at) } {
            Ok(()) => {
                trial.len = 0;
                Ok(())
            }
            Err(errno) => Err(self.repair(at, trial.len, errno)),
        }
    }

    /// Puts memory without rights in place of what is at an offset.
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
    // SAFETY: inside of a block that belongs to the caller; what still looks there meets a fault
    // that is caught.
    unsafe { mmap_anonymous(at.as_ptr().cast(), len, ProtFlags::empty(), flags) }.map(drop)
}

fn pool() -> std::sync::MutexGuard<'static, Vec<Span>> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block of at least so many windows that no function has.
fn pooled(windows: usize) -> Option<Span> {
    let mut pool = pool();
    let found = pool.iter().position(|span| span.windows >= windows)?;
    Some(pool.swap_remove(found))
}

impl Drop for Block {
    fn drop(&mut self) {
        // The function's device, which alone had pointers here, is gone.
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
            let (first, behind) = range.split_once('-').unwrap();
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            if number(first) <= at && at < number(behind) {
                at = number(behind);
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
        // More than any machine of ours has of huge pages.
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
        // SAFETY: what a failed mremap leaves, made on purpose, at an address that nobody allocates
        // at.
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
    fn a_range_that_may_be_a_strangers_is_never_touched_again() {
        let mut block = fresh();
        let start = block.start();
        let at = start.as_ptr().wrapping_add(8192);
        // SAFETY: what a failed mremap leaves, and an allocator that moves in, made on purpose.
        let stranger: *mut u64 = unsafe {
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
        unsafe { stranger.write(0x5e75) };
        let hole = block.part(8192, 4096).unwrap();
        assert_eq!(block.repair(hole, 4096, Errno::NOMEM), Failed::Spoiled);
        let trial = Trial::new(&file(MemfdFlags::empty(), 4096), 0, 4096, 0).unwrap();
        assert_eq!(block.place(0, trial), Err(Failed::Spoiled));
        assert_eq!(block.clear(8192, 4096), Err(Failed::Spoiled));
        drop(block);
        assert!(!is_in_pool(start));
        // SAFETY: the mapping made above, which is still there.
        assert_eq!(unsafe { stranger.read() }, 0x5e75);
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
