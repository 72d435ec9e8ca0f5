//! Host memory of tests, and extents of it.

use crate::host::{HostMemory, HostProcess, Mapping, RemoteMemory, RemoteWord, Unreachable};
use rustix::mm::{MprotectFlags, mprotect};
use rustix::process::getpid;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use urnic_sync::Mutex;
use urnic_testkit::Memory;

/// Host memory: one piece, at an IOVA that is no pointer.
pub(crate) struct Arena {
    words: Box<[AtomicU64]>,
    len: usize,
    next: AtomicUsize,
    /// The owner of remote memory has unmapped it: it cannot be copied any more.
    pub(crate) unmapped: AtomicBool,
    /// The process in which peers reach the remote memory.
    process: Option<Arc<HostProcess>>,
    atomics: Mutex<()>,
}

/// A second range of addresses for the memory, which has no address in the device's process.
pub(crate) const REMOTE: u64 = 1 << 56;
pub(crate) const ARENA_IOVA: u64 = 0x7700_0000_0000;
const RING_ALIGN: usize = 4096;

impl Arena {
    pub(crate) fn new(bytes: usize) -> Arc<Arena> {
        // Zeroed pages, which the kernel allocates at the first access.
        let zeroes = Box::into_raw(vec![0u64; bytes / 8].into_boxed_slice());
        // SAFETY: an `AtomicU64` has the size of a `u64`, and on this machine its alignment.
        let words = unsafe { Box::from_raw(zeroes as *mut [AtomicU64]) };
        Arc::new(Self::of(words, bytes))
    }

    /// An arena whose remote memory peers reach: in this process, which is the host's, too.
    pub(crate) fn in_process(bytes: usize) -> Arc<Arena> {
        let arena = Arc::into_inner(Self::new(bytes)).expect("the only handle");
        let process = HostProcess::open(getpid()).expect("this process may access itself");
        Arc::new(Arena {
            process: Some(Arc::new(process)),
            ..arena
        })
    }

    fn of(words: Box<[AtomicU64]>, len: usize) -> Arena {
        Arena {
            words,
            len,
            next: AtomicUsize::new(RING_ALIGN),
            unmapped: AtomicBool::new(false),
            process: None,
            atomics: Mutex::default(),
        }
    }

    fn start(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    /// Zeroed memory, aligned as rings are; never freed.
    pub(crate) fn alloc(&self, len: usize) -> u64 {
        // The memory is also in the device's address space.
        let skew = self.start().addr() % RING_ALIGN;
        let len = len.next_multiple_of(RING_ALIGN);
        let at = self.next.fetch_add(len, Ordering::Relaxed);
        assert!(at + len + RING_ALIGN <= self.len, "the arena is too small");
        ARENA_IOVA + (at + (RING_ALIGN - skew) % RING_ALIGN) as u64
    }

    /// Whether that range is inside.
    pub(crate) fn holds(&self, iova: u64, len: usize) -> bool {
        self.reach(iova, len).is_some()
    }

    fn map(&self, iova: u64, len: usize) -> Mapping {
        Mapping::new(self, iova, len, 1).expect("inside the arena")
    }

    pub(crate) fn read(&self, iova: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.map(iova, len).copy_out(0, &mut bytes);
        bytes
    }

    pub(crate) fn write(&self, iova: u64, bytes: &[u8]) {
        self.map(iova, bytes.len()).copy_in(0, bytes);
    }
}

impl Arena {
    /// Takes away the rights to the page at `iova`, as a program does that unmaps it.
    pub(crate) fn take_page_away(&self, iova: u64) {
        let page = self.map(iova, RING_ALIGN).address();
        let page = std::ptr::with_exposed_provenance_mut(page);
        // SAFETY: the page is whole, and tests access it by guarded copies only from now on.
        unsafe { mprotect(page, RING_ALIGN, MprotectFlags::empty()) }.unwrap();
    }
}

/// An extent of an arena, which must outlive it.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    pub(super) iova: u64,
    pub(super) mapping: Mapping,
}

impl Extent {
    pub(super) fn new(arena: &Arena, iova: u64, len: usize) -> Extent {
        Extent {
            iova,
            mapping: arena.map(iova, len),
        }
    }

    /// New memory of the arena.
    pub(super) fn alloc(arena: &Arena, len: usize) -> Extent {
        Extent::new(arena, arena.alloc(len), len)
    }
}

impl Memory for Extent {
    fn iova(&self) -> u64 {
        self.iova
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        self.mapping.word(at)
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.mapping.copy_in(at, bytes);
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mapping.copy_out(at, &mut bytes);
        bytes
    }
}

// SAFETY: the device keeps the arena alive, and the only references into it are to atomics.
unsafe impl HostMemory for Arena {
    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>> {
        let at = usize::try_from(iova.checked_sub(ARENA_IOVA)?).ok()?;
        if at.checked_add(len)? > self.len {
            return None;
        }
        NonNull::new(self.start().wrapping_add(at))
    }

    fn remote(&self) -> Option<&dyn RemoteMemory> {
        Some(self)
    }
}

impl RemoteMemory for Arena {
    fn covers(&self, iova: u64, len: u64) -> bool {
        iova.checked_sub(REMOTE)
            .is_some_and(|at| self.holds(at, len as usize))
    }

    fn process(&self) -> Option<&Arc<HostProcess>> {
        self.process.as_ref()
    }

    fn in_process(&self, iova: u64, len: u64) -> Option<u64> {
        self.process()?;
        let here = self.reach(iova.checked_sub(REMOTE)?, len as usize)?;
        Some(here.expose_provenance().get() as u64)
    }

    fn word(&self, _iova: u64) -> Result<RemoteWord<'_>, Unreachable> {
        Ok(RemoteWord::Copied(&self.atomics))
    }

    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        if self.unmapped.load(Ordering::Relaxed) {
            return Err(Unreachable);
        }
        into.copy_from_slice(&self.read(iova - REMOTE, into.len()));
        Ok(())
    }

    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Unreachable> {
        if self.unmapped.load(Ordering::Relaxed) {
            return Err(Unreachable);
        }
        self.write(iova - REMOTE, from);
        Ok(())
    }
}
