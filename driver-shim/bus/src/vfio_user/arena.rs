//! Queue memory that the server maps, too: files in memory, a gigabyte each and empty until
//! touched.
//!
//! A chunk goes to the server once, by one DMA_MAP with its descriptor, so that making a queue
//! takes no message. Chunks lie at multiples of their length, at the same address for both: an IOVA
//! is an address here.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};

use crate::doorbells::own_pages;
use urnic_process::lock::lock;

/// Bytes of a chunk, and the largest piece.
pub(super) const CHUNK: usize = 1 << 30;
/// Most chunks.
const CHUNKS: usize = 64;
/// Smallest piece.
const MIN_PIECE: usize = 4096;
/// Power-of-two sizes from [`MIN_PIECE`] to [`CHUNK`].
const CLASSES: usize = (CHUNK / MIN_PIECE).ilog2() as usize + 1;

/// All chunks of a device.
pub(super) struct Arena {
    /// Known without a lock, for forked children. Null, or mapped for as long as the arena lives.
    chunks: [AtomicPtr<u8>; CHUNKS],
    state: Mutex<State>,
}

struct State {
    /// Pieces that were given back, by class; zeroed.
    free: [Vec<Piece>; CLASSES],
    chunks: usize,
    /// Bytes of the newest chunk that were given out.
    used: usize,
}

struct Piece(NonNull<u8>);

// SAFETY: an address.
unsafe impl Send for Piece {}

impl Arena {
    pub(super) fn new() -> Arena {
        Arena {
            chunks: [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS],
            state: Mutex::new(State {
                free: [const { Vec::new() }; CLASSES],
                chunks: 0,
                used: CHUNK,
            }),
        }
    }

    /// `len` zeroed bytes. A new chunk is offered to `share`, with its address and file; without
    /// its consent there is none.
    ///
    /// # Errors
    /// `ENOMEM`; those of `share`.
    pub(super) fn allocate(
        &self,
        len: usize,
        share: impl FnOnce(NonNull<u8>, OwnedFd) -> Result<(), Errno>,
    ) -> Result<NonNull<u8>, Errno> {
        let class = class(len)?;
        let size = MIN_PIECE << class;
        let mut state = lock(&self.state);
        if let Some(Piece(ptr)) = state.free.get_mut(class).and_then(Vec::pop) {
            return Ok(ptr);
        }
        if CHUNK - state.used < size {
            let slot = self.chunks.get(state.chunks).ok_or(Errno::NOMEM)?;
            let (base, file) = chunk()?;
            // SAFETY: the chunk just made, which nobody else knows if it is not taken.
            share(base, file).inspect_err(|_| unsafe { unmap(base) })?;
            slot.store(base.as_ptr(), Ordering::Release);
            state.chunks += 1;
            state.used = 0;
        }
        let newest = self.chunks.get(state.chunks - 1).ok_or(Errno::NOMEM)?;
        let base = newest.load(Ordering::Relaxed);
        // Sizes are powers of two: pieces are aligned to a page and need no more.
        let at = state.used;
        state.used += size;
        // SAFETY: `at` + `size` is within the chunk.
        NonNull::new(unsafe { base.add(at) }).ok_or(Errno::NOMEM)
    }

    /// Takes a piece back.
    ///
    /// # Safety
    /// `ptr` came from [`Arena::allocate`] with this `len`, and neither we nor the device use it
    /// any more.
    pub(super) unsafe fn free(&self, ptr: NonNull<u8>, len: usize) {
        let Ok(class) = class(len) else { return };
        // Also gives the pages back, on both sides.
        // SAFETY: an unused piece of the arena.
        if unsafe { madvise(ptr.as_ptr().cast(), MIN_PIECE << class, Advice::LinuxRemove) }.is_err() {
            // SAFETY: the caller promises a piece of the arena that nobody uses, and its class
            // gives its length.
            unsafe { ptr.write_bytes(0, MIN_PIECE << class) };
        }
        if let Some(free) = lock(&self.state).free.get_mut(class) {
            free.push(Piece(ptr));
        }
    }

    /// Whether a range is inside.
    pub(super) fn covers(&self, address: u64, len: u64) -> bool {
        let end = address.checked_add(len);
        self.chunks
            .iter()
            .map(|chunk| chunk.load(Ordering::Acquire).addr() as u64)
            .take_while(|base| *base != 0)
            .any(|base| address >= base && end.is_some_and(|end| end <= base + CHUNK as u64))
    }

    /// In a forked child: memory of its own in the place of what the device writes.
    /// Async-signal-safe.
    pub(super) fn abandon_in_child(&self) {
        for base in self
            .chunks
            .iter()
            .filter_map(|chunk| NonNull::new(chunk.load(Ordering::Acquire)))
        {
            // SAFETY: the arena's range.
            unsafe { own_pages(base, CHUNK) };
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for base in self
            .chunks
            .iter()
            .filter_map(|chunk| NonNull::new(chunk.load(Ordering::Relaxed)))
        {
            // SAFETY: the arena's mapping, of which nobody has a piece any more.
            unsafe { unmap(base) };
        }
    }
}

fn class(len: usize) -> Result<usize, Errno> {
    let size = len
        .max(MIN_PIECE)
        .checked_next_power_of_two()
        .filter(|size| *size <= CHUNK)
        .ok_or(Errno::NOMEM)?;
    Ok((size / MIN_PIECE).ilog2() as usize)
}

/// # Safety
/// An unused chunk.
unsafe fn unmap(base: NonNull<u8>) {
    // SAFETY: the caller promises an unused chunk.
    let _ = unsafe { munmap(base.as_ptr().cast(), CHUNK) };
}

/// A new chunk and its file.
fn chunk() -> Result<(NonNull<u8>, OwnedFd), Errno> {
    // Growing a file beyond the limit is a signal, which would end the program.
    if getrlimit(Resource::Fsize)
        .current
        .is_some_and(|limit| limit < CHUNK as u64)
    {
        tracing::error!("files may not grow to 1 GiB here, as queue memory has to: raise `ulimit -f`");
        return Err(Errno::NOMEM);
    }
    let file = memfd_create("urnic-queues", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, CHUNK as u64)?;
    // Whoever maps it can count on its length.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    // Twice the room has an aligned chunk in it.
    // SAFETY: a new mapping at an address of the kernel's choice.
    let room = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            2 * CHUNK,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    let before = room.addr().next_multiple_of(CHUNK) - room.addr();
    let base = room.wrapping_byte_add(before);
    // SAFETY: what is left of the room on both sides, and nobody uses.
    unsafe {
        if before > 0 {
            let _ = munmap(room, before);
        }
        let _ = munmap(base.wrapping_byte_add(CHUNK), CHUNK - before);
    }
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::SHARED | MapFlags::FIXED,
    );
    // SAFETY: over the reserved chunk, which is ours.
    let mapped = unsafe { mmap(base, CHUNK, prot, flags, file.as_fd(), 0) };
    let base = NonNull::new(base.cast::<u8>()).ok_or(Errno::NOMEM)?;
    // SAFETY: ours, and not used yet.
    mapped.inspect_err(|_| unsafe { unmap(base) })?;
    // A child must not write what the device reads, whichever way it is made. One made by fork(3)
    // gets pages of its own instead.
    // SAFETY: the mapping just made; no byte changes.
    let _ = unsafe { madvise(base.as_ptr().cast(), CHUNK, Advice::LinuxDontFork) };
    Ok((base, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocate(arena: &Arena, len: usize) -> NonNull<u8> {
        arena.allocate(len, |_, _| Ok(())).unwrap()
    }

    #[test]
    fn pieces_are_apart_and_zeroed_again() {
        let arena = Arena::new();
        let lens = [4096, 65536, 1 << 20, 4096];
        let pieces: Vec<_> = lens.iter().map(|len| allocate(&arena, *len)).collect();
        for (piece, len) in pieces.iter().zip(lens) {
            assert!(piece.addr().get().is_multiple_of(4096));
            assert!(arena.covers(piece.addr().get() as u64, len as u64));
            // SAFETY: a piece of this length.
            unsafe {
                assert!(
                    std::slice::from_raw_parts(piece.as_ptr(), len)
                        .iter()
                        .all(|b| *b == 0)
                );
                piece.write_bytes(0xff, len);
            }
        }
        // SAFETY: from `allocate`, and not used any more.
        unsafe { arena.free(pieces[2], lens[2]) };
        let again = allocate(&arena, lens[2]);
        assert_eq!(again, pieces[2]);
        // SAFETY: a piece of this length.
        let bytes = unsafe { std::slice::from_raw_parts(again.as_ptr(), lens[2]) };
        assert!(bytes.iter().all(|b| *b == 0));
    }

    #[test]
    fn a_chunk_is_offered_once_and_only_kept_with_consent() {
        let arena = Arena::new();
        assert_eq!(arena.allocate(4096, |_, _| Err(Errno::IO)), Err(Errno::IO));
        let mut offered = Vec::new();
        for _ in 0..3 {
            arena
                .allocate(CHUNK / 2, |base, _| {
                    offered.push(base.addr().get());
                    Ok(())
                })
                .unwrap();
        }
        assert_eq!(offered.len(), 2);
        assert!(offered.iter().all(|base| base.is_multiple_of(CHUNK)));
        assert!(!arena.covers(offered[0] as u64, CHUNK as u64 + 1) || offered[1] == offered[0] + CHUNK);
        assert_eq!(arena.allocate(CHUNK + 1, |_, _| Ok(())), Err(Errno::NOMEM));
    }
}
