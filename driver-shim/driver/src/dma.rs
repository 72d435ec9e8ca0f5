//! Memory that driver and device share: rings, records, buffers.
//!
//! Large pieces are separate mappings: zeroed, and without pages until touched. Small pieces share
//! 64 KiB slabs, so that an idle queue pair takes some hundred bytes and not some pages.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use urnic_sync::Mutex;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use urnic_device::bus::{Bus, QueueMemory};

/// Smallest piece: records need 64-byte alignment.
const MIN_PIECE: usize = 64;
/// Largest piece that shares a slab.
const MAX_SHARED: usize = 16 << 10;
const PAGE: usize = 4096;
/// Bytes of a slab.
const SLAB: usize = 64 << 10;
/// Power-of-two sizes from [`MIN_PIECE`] to [`MAX_SHARED`].
const CLASSES: usize = (MAX_SHARED / MIN_PIECE).ilog2() as usize + 1;

/// The source of shared memory. A pool lives as long as its device, and keeps its slabs.
pub(crate) struct DmaPool {
    bus: Arc<dyn Bus>,
    /// Free pieces of each class.
    free: Mutex<[Vec<QueueMemory>; CLASSES]>,
}

/// A piece of zeroed memory that the device can reach. Its address is a multiple of its length, up
/// to a page. Dropping the value frees the piece (memory of the program stays the program's), so
/// the code that makes a device object over it keeps it until that object is destroyed.
pub struct DmaMemory {
    piece: QueueMemory,
    len: usize,
    origin: Origin,
    pool: Arc<DmaPool>,
}

/// The owner of a piece.
#[derive(Debug, Clone, Copy)]
enum Origin {
    /// The piece belongs to this size class of the pool.
    Class(usize),
    /// The piece is a separate mapping.
    Mapping,
    /// The piece belongs to the program, which frees it.
    Program,
}

/// The placement of queues' rings by a program (the allocators of a parent domain).
///
/// # Safety
/// A returned pointer leads to that many bytes, which no other code uses until the queue is
/// destroyed or its creation fails.
pub unsafe trait RingPlacement {
    /// The address for a ring of `len` bytes, at a multiple of `align`; `None` leaves the choice to
    /// the driver.
    ///
    /// # Errors
    /// `ENOMEM` if no memory is left, or the error of the program's allocator.
    fn place(&self, len: usize, align: usize) -> Result<Option<NonNull<u8>>, Errno>;
}

/// The placement that lets the driver choose the address.
#[derive(Debug, Clone, Copy, Default)]
pub struct Anywhere;

// SAFETY: `place` returns no pointer.
unsafe impl RingPlacement for Anywhere {
    fn place(&self, _: usize, _: usize) -> Result<Option<NonNull<u8>>, Errno> {
        Ok(None)
    }
}

fn rounded(len: usize) -> Result<usize, Errno> {
    let len = len.max(MIN_PIECE);
    len.checked_next_power_of_two().ok_or(Errno::NOMEM)
}

// SAFETY: the value owns memory as a `Box<[AtomicU8]>` does: all access goes through raw copies and
// atomics.
unsafe impl Send for DmaMemory {}
// SAFETY: the value owns memory as a `Box<[AtomicU8]>` does: all access goes through raw copies and
// atomics.
unsafe impl Sync for DmaMemory {}

impl fmt::Debug for DmaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DmaMemory({:#x}, {} bytes)", self.piece.iova, self.len)
    }
}

impl DmaPool {
    pub(crate) fn new(bus: Arc<dyn Bus>) -> Arc<DmaPool> {
        Arc::new(DmaPool {
            bus,
            free: Mutex::default(),
        })
    }

    /// Allocates at least `len` zeroed bytes.
    ///
    /// # Errors
    /// `ENOMEM`: no memory is left.
    pub(crate) fn allocate(self: &Arc<Self>, len: usize) -> Result<DmaMemory, Errno> {
        let len = rounded(len)?;
        if len > MAX_SHARED {
            let piece = self.bus.allocate(len)?;
            return Ok(DmaMemory {
                piece,
                len,
                origin: Origin::Mapping,
                pool: self.clone(),
            });
        }
        let class = (len / MIN_PIECE).ilog2() as usize;
        let piece = self.take(class, len)?;
        let memory = DmaMemory {
            piece,
            len,
            origin: Origin::Class(class),
            pool: self.clone(),
        };
        memory.zero();
        Ok(memory)
    }

    /// Allocates a ring of at least `len` zeroed bytes, at the address that `placement` returns, if
    /// any.
    ///
    /// # Errors
    /// `ENOMEM` if no memory is left; the errors of the program's allocator; `EINVAL` for an
    /// address that is not aligned as requested; `EOPNOTSUPP` if the device cannot reach memory of
    /// the program.
    pub(crate) fn ring(
        self: &Arc<Self>,
        len: usize,
        placement: &dyn RingPlacement,
    ) -> Result<DmaMemory, Errno> {
        let len = rounded(len)?;
        let Some(ptr) = placement.place(len, PAGE)? else {
            return self.allocate(len);
        };
        if ptr.as_ptr().addr() % PAGE != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the contract of `RingPlacement` gives `len` bytes at `ptr` that no other code
        // uses.
        let piece = unsafe { self.bus.adopt(ptr) }.ok_or(Errno::OPNOTSUPP)?;
        let memory = DmaMemory {
            piece,
            len,
            origin: Origin::Program,
            pool: self.clone(),
        };
        memory.zero();
        Ok(memory)
    }

    fn take(&self, class: usize, len: usize) -> Result<QueueMemory, Errno> {
        let mut free = self.free.lock();
        let Some(pieces) = free.get_mut(class) else {
            return Err(Errno::NOMEM);
        };
        if let Some(piece) = pieces.pop() {
            return Ok(piece);
        }
        let slab = self.bus.allocate(SLAB)?;
        pieces.extend((0..SLAB / len).rev().map(|i| QueueMemory {
            ptr: slab.ptr.map_addr(|address| address.saturating_add(i * len)),
            iova: slab.iova + (i * len) as u64,
        }));
        pieces.pop().ok_or(Errno::NOMEM)
    }
}

impl DmaMemory {
    /// The first byte of the memory.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.piece.ptr.as_ptr()
    }

    /// The first byte of the memory.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.piece.ptr
    }

    /// Length in bytes: a power of two.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: no piece is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The device's address of the first byte.
    #[inline]
    pub fn iova(&self) -> u64 {
        self.piece.iova
    }

    fn zero(&self) {
        // SAFETY: the piece is `len` bytes long, and neither device nor driver uses it now.
        unsafe { std::ptr::write_bytes(self.as_ptr(), 0, self.len) };
    }

    fn part(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset);
        self.as_ptr().wrapping_add(offset)
    }

    /// Copies a value into the piece at `offset`; the value must lie inside.
    pub(crate) fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.copy_in(offset, value.as_bytes());
    }

    /// Copies a value out of the piece at `offset`; the value must lie inside.
    pub(crate) fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        let mut value = T::new_zeroed();
        self.copy_out(offset, value.as_mut_bytes());
        value
    }

    /// Copies bytes into the piece at `offset`; they must fit.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) {
        // SAFETY: `part` checked the range, and `from` is a separate slice.
        unsafe {
            self.part(offset, from.len())
                .copy_from_nonoverlapping(from.as_ptr(), from.len())
        };
    }

    /// Copies bytes out of the piece at `offset`; they must lie inside.
    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) {
        // SAFETY: `part` checked the range, and `into` is a separate slice.
        unsafe {
            self.part(offset, into.len())
                .copy_to_nonoverlapping(into.as_mut_ptr(), into.len())
        };
    }

    /// The 32-bit word at `offset`, a multiple of 4.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        self.record_at(offset)
    }

    /// The piece as a record: a structure of atomics.
    pub(crate) fn record<T: Record>(&self) -> &T {
        self.record_at(0)
    }

    fn record_at<T: Record>(&self, offset: usize) -> &T {
        let record = self.part(offset, size_of::<T>()).cast::<T>();
        assert!(record.is_aligned());
        // SAFETY: `record` is inside the piece and aligned, initialised by zeroes, and made of
        // atomics (contract of `Record`).
        unsafe { &*record }
    }
}

/// Structures of atomics and ignored padding, for which all zeroes is a value.
///
/// # Safety
///
/// Every accessed field is an atomic, and all zeroes is a value of the structure.
pub(crate) unsafe trait Record: Sync {}
// SAFETY: an atomic.
unsafe impl Record for AtomicU32 {}
// SAFETY: the fields are `AtomicU32`, and arrays of `u32` that no code accesses.
unsafe impl Record for urnic_device::record::QueueRecord {}
// SAFETY: the fields are `AtomicU32`, and arrays of `u32` that no code accesses.
unsafe impl Record for urnic_device::record::CqRecord {}

impl Drop for DmaMemory {
    fn drop(&mut self) {
        match self.origin {
            // SAFETY: the mapping was allocated for this value alone, with this length.
            Origin::Mapping => unsafe { self.pool.bus.free(self.piece, self.len) },
            Origin::Class(class) => {
                if let Some(pieces) = self.pool.free.lock().get_mut(class) {
                    pieces.push(self.piece);
                }
            }
            Origin::Program => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_bus::FakeBus;

    #[test]
    fn pieces_are_zeroed_aligned_and_disjoint() {
        let pool = DmaPool::new(FakeBus::new());
        for round in 0..2u8 {
            let pieces: Vec<DmaMemory> = [1, 64, 65, 128, 4096, MAX_SHARED, MAX_SHARED + 1, 1 << 20]
                .map(|len| pool.allocate(len).unwrap())
                .into();
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for piece in &pieces {
                assert_eq!(piece.iova() % piece.len().min(4096) as u64, 0);
                let mut bytes = vec![1u8; piece.len()];
                piece.copy_out(0, &mut bytes);
                assert!(
                    bytes.iter().all(|b| *b == 0),
                    "round {round}: a piece of {} bytes was not zeroed",
                    piece.len()
                );
                piece.copy_in(0, &vec![0xff; piece.len()]);
                ranges.push((piece.iova(), piece.iova() + piece.len() as u64));
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|w| w[0].1 <= w[1].0));
        }
    }

    #[test]
    fn small_pieces_share_pages() {
        let pool = DmaPool::new(FakeBus::new());
        let pieces: Vec<DmaMemory> = (0..64).map(|_| pool.allocate(128).unwrap()).collect();
        let pages: std::collections::BTreeSet<u64> = pieces.iter().map(|p| p.iova() >> 12).collect();
        assert_eq!(pages.len(), 2);
    }
}
