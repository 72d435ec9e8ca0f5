//! Queue memory that the server maps, too: files in memory, a gigabyte each and empty until
//! touched.
//!
//! A chunk is sent to the server once, by one DMA_MAP with its descriptor, so that making a queue
//! takes no message. Chunks lie at multiples of their length. Both sides use the same address: an
//! IOVA is an address of this process.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};
use urnic_sync::Mutex;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::doorbells::own_pages;
use urnic_process::file_length;

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
    /// The chunks, which forked children read without a lock. Null, or mapped as long as the arena
    /// lives.
    chunks: [AtomicPtr<u8>; CHUNKS],
    state: Mutex<State>,
}

struct State {
    /// Free pieces by class; zeroed.
    free: [Vec<Piece>; CLASSES],
    chunks: usize,
    /// Bytes of the newest chunk that are allocated.
    used: usize,
}

struct Piece(NonNull<u8>);

// SAFETY: the value is only an address.
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

    /// Allocates `len` zeroed bytes. A new chunk is passed to `share`, with its address and file;
    /// if `share` fails, the chunk is unmapped.
    ///
    /// # Errors
    /// `ENOMEM` if no memory or no chunk is left; the errors of `share`.
    pub(super) fn allocate(
        &self,
        len: usize,
        share: impl FnOnce(NonNull<u8>, OwnedFd) -> Result<(), Errno>,
    ) -> Result<NonNull<u8>, Errno> {
        let class = class(len)?;
        let size = MIN_PIECE << class;
        let mut state = self.state.lock();
        if let Some(Piece(ptr)) = state.free.get_mut(class).and_then(Vec::pop) {
            return Ok(ptr);
        }
        if CHUNK - state.used < size {
            let slot = self.chunks.get(state.chunks).ok_or(Errno::NOMEM)?;
            let (base, file) = chunk()?;
            // SAFETY: the chunk was made above, and after a failed `share` no other code has it.
            share(base, file).inspect_err(|_| unsafe { unmap(base) })?;
            slot.store(base.as_ptr(), Ordering::Release);
            state.chunks += 1;
            state.used = 0;
        }
        let newest = self.chunks.get(state.chunks - 1).ok_or(Errno::NOMEM)?;
        let base = newest.load(Ordering::Relaxed);
        // Sizes are powers of two, so each piece is aligned to a page, which is enough.
        let at = state.used;
        state.used += size;
        // SAFETY: `at` + `size` is within the chunk.
        NonNull::new(unsafe { base.add(at) }).ok_or(Errno::NOMEM)
    }

    /// Frees a piece.
    ///
    /// # Safety
    /// `ptr` came from [`Arena::allocate`] with this `len`, and neither this process nor the device
    /// uses the piece any more.
    pub(super) unsafe fn free(&self, ptr: NonNull<u8>, len: usize) {
        let Ok(class) = class(len) else { return };
        // Also frees the pages, on both sides.
        // SAFETY: the range is an unused piece of the arena.
        if unsafe { madvise(ptr.as_ptr().cast(), MIN_PIECE << class, Advice::LinuxRemove) }.is_err() {
            // SAFETY: the caller promises an unused piece of the arena, and the class gives the
            // length of the piece.
            unsafe { ptr.write_bytes(0, MIN_PIECE << class) };
        }
        if let Some(free) = self.state.lock().free.get_mut(class) {
            free.push(Piece(ptr));
        }
    }

    /// Whether a range is inside the arena.
    pub(super) fn covers(&self, address: u64, len: u64) -> bool {
        let end = address.checked_add(len);
        self.chunks
            .iter()
            .map(|chunk| chunk.load(Ordering::Acquire).addr() as u64)
            .take_while(|base| *base != 0)
            .any(|base| address >= base && end.is_some_and(|end| end <= base + CHUNK as u64))
    }

    /// In a forked child: replaces the memory that the device writes by private memory.
    /// Async-signal-safe.
    pub(super) fn abandon_in_child(&self) {
        for base in self
            .chunks
            .iter()
            .filter_map(|chunk| NonNull::new(chunk.load(Ordering::Acquire)))
        {
            // SAFETY: the range is a chunk of the arena.
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
            // SAFETY: the range is a chunk of the arena, none of whose pieces is in use any more.
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
/// `base` is a chunk that no code uses.
unsafe fn unmap(base: NonNull<u8>) {
    // SAFETY: the caller promises a chunk that no code uses.
    let _ = unsafe { munmap(base.as_ptr().cast(), CHUNK) };
}

/// Makes a new chunk and its file.
fn chunk() -> Result<(NonNull<u8>, OwnedFd), Errno> {
    if file_length::permits(CHUNK as u64).is_err() {
        tracing::error!("files may not grow to 1 GiB here, as queue memory has to: raise `ulimit -f`");
        return Err(Errno::NOMEM);
    }
    let file = memfd_create("urnic-queues", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, CHUNK as u64)?;
    // The seals guarantee the length of the file to every process that maps it.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    // A reservation of twice the length contains an aligned chunk.
    // SAFETY: a new mapping at an address of the kernel's choice changes no other mapping.
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
    // SAFETY: the ranges are the unused parts of the reservation on both sides of the chunk.
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
    // SAFETY: the new mapping replaces the reserved chunk, which no other code uses.
    let mapped = unsafe { mmap(base, CHUNK, prot, flags, file.as_fd(), 0) };
    let base = NonNull::new(base.cast::<u8>()).ok_or(Errno::NOMEM)?;
    // SAFETY: the chunk was reserved above and is not used yet.
    mapped.inspect_err(|_| unsafe { unmap(base) })?;
    // A child must not write what the device reads, whichever way it is made. A child made by
    // fork(3) gets pages of its own instead.
    // SAFETY: the range is the mapping made above; the advice changes no byte.
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
            // SAFETY: the piece has this length.
            unsafe {
                assert!(
                    std::slice::from_raw_parts(piece.as_ptr(), len)
                        .iter()
                        .all(|b| *b == 0)
                );
                piece.write_bytes(0xff, len);
            }
        }
        // SAFETY: the piece came from `allocate`, and is not used any more.
        unsafe { arena.free(pieces[2], lens[2]) };
        let again = allocate(&arena, lens[2]);
        assert_eq!(again, pieces[2]);
        // SAFETY: the piece has this length.
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
