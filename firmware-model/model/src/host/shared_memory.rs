//! Memory that this process shares with another one: a sealed memfd, which neither can truncate.

use super::mapping::{Mapping, SharedRecord};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Resource, getrlimit};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

/// Seals without which an access might end with SIGBUS, because the other process may truncate.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Shared memory. All accesses are atomics or raw copies, because the other process may change any
/// byte at any time.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    mapping: Mapping,
}

impl SharedMemory {
    /// Makes `len` zeroed bytes, and the descriptor by which another process reaches them.
    pub(crate) fn create(name: &str, len: usize) -> Result<(SharedMemory, OwnedFd), Errno> {
        Self::create_with(name, len, SEALS)
    }

    /// Maps what another process has made.
    ///
    /// # Errors
    /// `EINVAL`: it is not `len` sealed bytes of memory.
    pub(crate) fn open(file: BorrowedFd<'_>, len: usize) -> Result<SharedMemory, Errno> {
        Self::check(file, len)?;
        Self::map(file, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Checks that a descriptor is one of sealed memory: no operation on it waits for another
    /// process, as a query of a file's attributes may.
    ///
    /// # Errors
    /// `EINVAL`: it is not.
    pub(crate) fn check_sealed(file: BorrowedFd<'_>) -> Result<(), Errno> {
        let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
        sealed.then_some(()).ok_or(Errno::INVAL)
    }

    /// Checks that a descriptor is one of `len` bytes of sealed memory.
    ///
    /// # Errors
    /// `EINVAL`: it is not.
    pub(crate) fn check(file: BorrowedFd<'_>, len: usize) -> Result<(), Errno> {
        Self::check_sealed(file)?;
        let fits = fstat(file)?.st_size == len as i64;
        fits.then_some(()).ok_or(Errno::INVAL)
    }

    /// Like [`create`](Self::create), but other processes can only read the memory.
    pub(crate) fn create_for_readers(name: &str, len: usize) -> Result<(SharedMemory, OwnedFd), Errno> {
        // For mappings from there on (Linux 5.1).
        Self::create_with(name, len, SEALS | SealFlags::FUTURE_WRITE)
    }

    /// Sealed when it is mapped here.
    fn create_with(name: &str, len: usize, seals: SealFlags) -> Result<(SharedMemory, OwnedFd), Errno> {
        // Growing a file beyond the limit raises a signal that would end the program.
        if getrlimit(Resource::Fsize)
            .current
            .is_some_and(|limit| limit < len as u64)
        {
            return Err(Errno::FBIG);
        }
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        let memory = Self::map(file.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(&file, seals)?;
        Ok((memory, file))
    }

    /// Like [`open`](Self::open), for memory that may only be read.
    pub(crate) fn open_to_read(file: BorrowedFd<'_>, len: usize) -> Result<SharedMemory, Errno> {
        Self::check(file, len)?;
        Self::map(file, len, ProtFlags::READ)
    }

    fn map(file: BorrowedFd<'_>, len: usize, rights: ProtFlags) -> Result<SharedMemory, Errno> {
        let mapping = map(file, 0, len, rights)?;
        Ok(SharedMemory { mapping })
    }

    /// The structure at `offset`, all of which must lie inside.
    pub(crate) fn words<T: SharedRecord>(self: &Arc<Self>, offset: usize) -> SharedWords<T> {
        let words = self.part(offset, size_of::<T>()).start().cast::<T>();
        assert!(words.is_aligned());
        SharedWords {
            words,
            memory: self.clone(),
        }
    }
}

/// Words in shared memory, which stays mapped for them: their place is checked once.
#[derive(Debug)]
pub(crate) struct SharedWords<T> {
    words: NonNull<T>,
    memory: Arc<SharedMemory>,
}

// SAFETY: the memory stays mapped as long as this value has a part in it, and all that is reached
// there are atomics.
unsafe impl<T: SharedRecord> Send for SharedWords<T> {}
// SAFETY: as above; a shared value gives `&T` alone, and `T` may be shared.
unsafe impl<T: SharedRecord> Sync for SharedWords<T> {}

impl<T> Clone for SharedWords<T> {
    fn clone(&self) -> SharedWords<T> {
        SharedWords {
            words: self.words,
            memory: self.memory.clone(),
        }
    }
}

impl<T: SharedRecord> SharedWords<T> {
    /// The memory.
    #[inline]
    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }
}

impl<T: SharedRecord> Deref for SharedWords<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: aligned and in range by `words`, mapped as long as `memory`, and all atomics.
        unsafe { self.words.as_ref() }
    }
}

/// A new mapping of a part of a file, which the caller unmaps.
pub(super) fn map(
    file: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    rights: ProtFlags,
) -> Result<Mapping, Errno> {
    // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping.
    let start = unsafe { mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED, file, offset) }?;
    let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
    // SAFETY: the caller unmaps it when nothing refers to it any more.
    Ok(unsafe { Mapping::of_raw(start, len) })
}

impl Deref for SharedMemory {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.mapping.address());
        // SAFETY: this is the whole mapping that `map` made, and nothing refers to it any more.
        let _ = unsafe { munmap(start, self.mapping.len()) };
    }
}
