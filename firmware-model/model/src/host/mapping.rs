//! Extents of host memory, and the records in them.

use super::fault;
use super::fault::Unreachable;
use super::host_memory::HostMemory;
use super::host_memory::Word64;
use super::piece::{Piece, PieceMut};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use urnic_device::record::{CqRecord, QueueRecord};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An extent of host memory that belongs to an object of the device for the life of that object.
#[derive(Debug, Clone, Copy)]
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory outlives the mapping (contract of `HostMemory`), and every access is a raw
// copy or atomic.
unsafe impl Send for Mapping {}
// SAFETY: a shared mapping allows raw copies and atomics alone, which need no exclusive access.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The `len` bytes at `iova`; `None` if they cannot be reached or do not start at a multiple of
    /// `align` in the device's own address space.
    pub fn new(host: &dyn HostMemory, iova: u64, len: usize, align: usize) -> Option<Mapping> {
        let ptr = host.reach(iova, len)?;
        (ptr.as_ptr().addr() % align == 0).then_some(Mapping { ptr, len })
    }

    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    /// They must be readable and writable for the life of this value and its copies, and no
    /// reference other than to atomics may point to them.
    pub(crate) unsafe fn of_raw(ptr: NonNull<u8>, len: usize) -> Mapping {
        Mapping { ptr, len }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the mapping is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first address of the mapping in this process.
    pub(crate) fn address(&self) -> usize {
        self.ptr.as_ptr().addr()
    }

    /// A pointer to the first byte.
    #[inline]
    pub(super) fn start(&self) -> NonNull<u8> {
        self.ptr
    }

    /// The part of `len` bytes at `offset`; both must lie inside.
    #[inline]
    pub(crate) fn part(&self, offset: usize, len: usize) -> Mapping {
        assert!(offset <= self.len && len <= self.len - offset);
        Mapping {
            // SAFETY: inside the mapping, by the check above.
            ptr: unsafe { self.ptr.add(offset) },
            len,
        }
    }

    /// Copies bytes out from `offset` on; they must lie inside.
    #[inline]
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let from = self.part(offset, into.len());
        // SAFETY: `part` checked the range, and a live mapping is readable. Others may write
        // meanwhile, as under DMA.
        unsafe { std::ptr::copy_nonoverlapping(from.ptr.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes in from `offset` on; they must lie inside.
    #[inline]
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        let into = self.part(offset, from.len());
        // SAFETY: `part` checked the range, and a live mapping is writable.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.ptr.as_ptr(), from.len()) }
    }

    /// Copies a value out.
    #[inline]
    pub fn read<T: FromBytes>(&self, offset: usize) -> T {
        let from = self.part(offset, size_of::<T>());
        // SAFETY: `part` checked the range; any bytes are a `T`.
        unsafe { from.ptr.as_ptr().cast::<T>().read_unaligned() }
    }

    /// Copies a value in.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.copy_in(offset, value.as_bytes());
    }

    /// The 32-bit word at `offset`, a multiple of 4.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        self.atomics(offset)
    }

    /// The 64-bit word at `offset`, a multiple of 8.
    #[inline]
    pub(crate) fn word64(&self, offset: usize) -> &AtomicU64 {
        self.atomics(offset)
    }

    #[inline]
    fn atomics<T: SharedRecord>(&self, offset: usize) -> &T {
        let place = self.part(offset, size_of::<T>()).ptr.cast::<T>();
        assert!(place.is_aligned());
        // SAFETY: in range and aligned; atomics may be shared with anybody.
        unsafe { place.as_ref() }
    }

    /// Copies bytes of registered memory out from `offset` on; they must lie inside.
    ///
    /// # Errors
    /// They are not all there.
    #[inline]
    pub(crate) fn try_copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), Unreachable> {
        let from = self.part(offset, into.len());
        // SAFETY: `part` checked the range, which is the program's. Others may write meanwhile, as
        // under DMA.
        unsafe { fault::copy(into.as_mut_ptr(), from.ptr.as_ptr(), into.len()) }
    }

    /// Copies bytes into registered memory from `offset` on; they must lie inside.
    ///
    /// # Errors
    /// Not all of it can be written.
    #[inline]
    pub(crate) fn try_copy_in(&self, offset: usize, from: &[u8]) -> Result<(), Unreachable> {
        let into = self.part(offset, from.len());
        // SAFETY: `part` checked the range, which is the program's. Others may write meanwhile, as
        // under DMA.
        unsafe { fault::copy(into.ptr.as_ptr(), from.as_ptr(), from.len()) }
    }

    /// Fills this memory from the front of `piece`, which is as long or longer.
    ///
    /// # Errors
    /// The bytes are not all there.
    #[inline]
    pub(crate) fn try_fill_from(&self, piece: &Piece<'_>) -> Result<(), Unreachable> {
        let n = self.len.min(piece.len());
        // SAFETY: no reference points to this memory; the piece may be inaccessible, and is only
        // read.
        unsafe { fault::copy(self.ptr.as_ptr(), piece.as_ptr(), n) }
    }

    /// Copies all bytes to the front of `piece`, which is as long or longer.
    ///
    /// # Errors
    /// Not all of the piece can be written.
    #[inline]
    pub(crate) fn try_copy_to(&self, piece: &mut PieceMut<'_>) -> Result<(), Unreachable> {
        let n = self.len.min(piece.len());
        // SAFETY: no reference points to this memory; the piece is exclusive, or memory of the
        // host, to which no reference points.
        unsafe { fault::copy(piece.as_mut_ptr(), self.ptr.as_ptr(), n) }
    }

    /// Checks whether registered memory, which is not empty, can be read at present.
    ///
    /// # Errors
    /// Some of the memory is inaccessible.
    #[inline]
    pub(crate) fn try_probe(&self) -> Result<(), Unreachable> {
        fault::probe(self.ptr.as_ptr(), self.len)
    }

    /// The address of the first byte that cannot be read at present, at the granularity of pages.
    #[cold]
    pub(crate) fn first_missing(&self) -> Option<usize> {
        self.piece().first_missing()
    }

    /// The bytes as a piece to send.
    #[inline]
    pub(crate) fn piece(&self) -> Piece<'_> {
        Piece::of_host(self.ptr, self.len)
    }

    /// The bytes as a piece to receive into.
    ///
    /// # Safety
    ///
    /// The registration of the memory must last for `'a`.
    #[inline]
    pub(crate) unsafe fn piece_mut<'a>(self) -> PieceMut<'a> {
        // SAFETY: host memory is the device's to write (contract of `HostMemory`), and nothing
        // refers to it; the caller keeps it registered.
        unsafe { PieceMut::of_host(self.ptr, self.len) }
    }

    /// Adds the bytes, which are registered memory, to `copies`.
    ///
    /// # Errors
    /// Some of the bytes are inaccessible; `copies` stays as it is.
    pub(crate) fn append_to(&self, copies: &mut Vec<u8>) -> Result<(), Unreachable> {
        let before = copies.len();
        copies.resize(before + self.len, 0);
        let copied = self.try_copy_out(0, &mut copies[before..]);
        if copied.is_err() {
            copies.truncate(before);
        }
        copied
    }

    /// The 64-bit word of registered memory at `offset` if it is 64-bit aligned there and inside.
    #[inline]
    pub(crate) fn aligned_word64(&self, offset: usize) -> Option<Word64> {
        if offset > self.len || self.len - offset < 8 {
            return None;
        }
        Word64::new(self.part(offset, 8).ptr.as_ptr().cast())
    }
}

/// A record in host memory.
#[derive(Debug)]
pub struct Record<T>(NonNull<T>, PhantomData<T>);

// SAFETY: it points to atomics in memory that outlives it (contract of `HostMemory`).
unsafe impl<T: Sync> Send for Record<T> {}
// SAFETY: a shared record gives `&T` alone, and `T` may be shared.
unsafe impl<T: Sync> Sync for Record<T> {}

/// Structures that others may change at any time.
///
/// # Safety
/// A structure consists of atomics, and padding that no code accesses.
pub unsafe trait SharedRecord: Sync {}
// SAFETY: an atomic.
unsafe impl SharedRecord for AtomicU32 {}
// SAFETY: an atomic.
unsafe impl SharedRecord for AtomicU64 {}
// SAFETY: the fields are `AtomicU32`, and arrays of `u32` that no code accesses.
unsafe impl SharedRecord for QueueRecord {}
// SAFETY: as above.
unsafe impl SharedRecord for CqRecord {}

impl<T: SharedRecord> Record<T> {
    /// The record at `iova`; `None` if it cannot be reached or is not aligned.
    pub fn new(host: &dyn HostMemory, iova: u64) -> Option<Record<T>> {
        let mapping = Mapping::new(host, iova, size_of::<T>(), align_of::<T>())?;
        Some(Record(mapping.ptr.cast(), PhantomData))
    }
}

impl<T: SharedRecord> std::ops::Deref for Record<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: aligned and in range by `new`, alive by the contract of `HostMemory`, and all
        // atomics.
        unsafe { self.0.as_ref() }
    }
}
