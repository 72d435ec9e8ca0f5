//! Queue memory that the server maps, too: files in memory, a gigabyte each and empty until
//! touched.
//!
//! A chunk is sent to the server once, by one DMA_MAP with its descriptor, so that making a queue
//! takes no message. Chunks lie at multiples of their length. Both sides use the same address: an
//! IOVA is an address of this process.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use urnic_sync::Mutex;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use urnic_process::file_length;
use urnic_sys::Pages;

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
    /// The chunks, which forked children read without a lock.
    chunks: [OnceLock<Pages>; CHUNKS],
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
            chunks: [const { OnceLock::new() }; CHUNKS],
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
            let (chunk, file) = chunk()?;
            share(chunk.start(), file)?;
            slot.set(chunk).map_err(|_| Errno::NOMEM)?;
            state.chunks += 1;
            state.used = 0;
        }
        let newest = self.chunks.get(state.chunks - 1).ok_or(Errno::NOMEM)?;
        // Sizes are powers of two, so each piece is aligned to a page, which is enough.
        let at = state.used;
        state.used += size;
        newest.get().and_then(|chunk| chunk.at(at)).ok_or(Errno::NOMEM)
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
        self.chunks().any(|chunk| {
            let base = chunk.start().addr().get() as u64;
            address >= base && end.is_some_and(|end| end <= base + CHUNK as u64)
        })
    }

    /// In a forked child: replaces the memory that the device writes by private memory.
    /// Async-signal-safe.
    pub(super) fn abandon_in_child(&self) {
        for chunk in self.chunks() {
            let _ = chunk.replace_by_zeroes();
        }
    }

    fn chunks(&self) -> impl Iterator<Item = &Pages> {
        self.chunks.iter().map_while(OnceLock::get)
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

/// Makes a new chunk and its file.
fn chunk() -> Result<(Pages, OwnedFd), Errno> {
    if file_length::permits(CHUNK as u64).is_err() {
        tracing::error!("files may not grow to 1 GiB here, as queue memory has to: raise `ulimit -f`");
        return Err(Errno::NOMEM);
    }
    let file = memfd_create("urnic-queues", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, CHUNK as u64)?;
    // The seals guarantee the length of the file to every process that maps it.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    // A reservation of twice the length contains an aligned chunk.
    let chunk = Pages::reserved(2 * CHUNK)?.aligned_part(CHUNK, CHUNK);
    chunk.replace_by_file(&file)?;
    // A child must not write what the device reads, whichever way it is made. A child made by
    // fork(3) gets pages of its own instead.
    let _ = chunk.advise(Advice::LinuxDontFork);
    Ok((chunk, file))
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
