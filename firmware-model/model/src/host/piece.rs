//! Extents of bytes that the kernel reads and writes on behalf of a stream.

use super::fault;
use super::fault::Unreachable;
use super::host_memory::PAGE;
use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// An extent of bytes to be sent, which stays in place for `'a`. It is raw, so that making one does
/// not exclude other writers.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Piece<'a> {
    ptr: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

/// An extent of bytes to be received into, which stays in place for `'a`: a piece whose bytes may
/// be written. A piece of a slice borrows it exclusively.
#[derive(Debug)]
#[repr(transparent)]
pub struct PieceMut<'a>(Piece<'a>);

// SAFETY: a piece borrows bytes, exclusively if they are to be written, or names registered memory,
// which only the kernel reads and writes.
unsafe impl Send for Piece<'_> {}

impl<'a> Piece<'a> {
    /// The bytes of `slice`.
    #[inline]
    pub fn of(slice: &'a [u8]) -> Piece<'a> {
        Piece {
            ptr: slice.as_ptr(),
            len: slice.len(),
            memory: PhantomData,
        }
    }

    /// The `len` bytes of host memory at `ptr`, which may be inaccessible: the kernel checks them
    /// when it reads.
    #[inline]
    pub(super) fn of_host(ptr: NonNull<u8>, len: usize) -> Piece<'a> {
        Piece {
            ptr: ptr.as_ptr(),
            len,
            memory: PhantomData,
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the piece is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The rest after the first `n` bytes.
    #[inline]
    pub fn skip(self, n: usize) -> Piece<'a> {
        let n = n.min(self.len);
        Piece {
            ptr: self.ptr.wrapping_add(n),
            len: self.len - n,
            ..self
        }
    }

    /// The first `n` bytes, or all.
    #[inline]
    pub fn first(self, n: usize) -> Piece<'a> {
        Piece {
            len: n.min(self.len),
            ..self
        }
    }

    /// The first byte.
    #[inline]
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The address of the first byte that cannot be read at present, at the granularity of pages.
    #[cold]
    pub(crate) fn first_missing(&self) -> Option<usize> {
        let (start, end) = (self.ptr.addr(), self.ptr.addr() + self.len);
        let pages = (start & !(PAGE - 1)..end).step_by(PAGE);
        pages
            .map(|page| page.max(start))
            .find(|byte| fault::probe(std::ptr::with_exposed_provenance(*byte), 1).is_err())
    }

    /// Copies bytes out, at most as many as `into` has; returns their number. For simulated streams
    /// and tests.
    ///
    /// # Safety
    ///
    /// The bytes must still be there.
    pub unsafe fn copy_out(&self, into: &mut [u8]) -> usize {
        let n = self.len.min(into.len());
        // SAFETY: the caller answers for the source; `into` is a live slice of at least `n` bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr, into.as_mut_ptr(), n) };
        n
    }

    /// Adds the bytes to `into`.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn append_to(&self, into: &mut Vec<u8>) -> Result<(), Unreachable> {
        let before = into.len();
        into.resize(before + self.len, 0);
        // SAFETY: `into` has room for the bytes after the earlier ones; the source may be missing.
        unsafe { fault::copy(into.as_mut_ptr().add(before), self.ptr, self.len) }
    }

    /// The pieces as the array of iovec that the kernel reads.
    pub(crate) fn as_io_slices<'s>(pieces: &'s [Piece<'a>]) -> &'s [IoSlice<'s>] {
        // SAFETY: `IoSlice` is promised to be ABI-compatible with `iovec`, which is { pointer,
        // length } like `Piece` (asserted below). Only the kernel reads through it, and returns
        // EFAULT for inaccessible memory.
        unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
    }
}

impl<'a> PieceMut<'a> {
    /// The bytes of `slice`.
    #[inline]
    pub fn of(slice: &'a mut [u8]) -> PieceMut<'a> {
        PieceMut(Piece {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
            memory: PhantomData,
        })
    }

    /// The `len` bytes of host memory at `ptr`, which may be inaccessible: the kernel checks them
    /// when it writes.
    ///
    /// # Safety
    ///
    /// The memory must be the device's to write for `'a`, and nothing of this program may hold a
    /// reference to it.
    #[inline]
    pub(super) unsafe fn of_host(ptr: NonNull<u8>, len: usize) -> PieceMut<'a> {
        PieceMut(Piece::of_host(ptr, len))
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the piece is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The rest after the first `n` bytes.
    #[inline]
    pub fn skip(self, n: usize) -> PieceMut<'a> {
        PieceMut(self.0.skip(n))
    }

    /// The rest after the first `n` bytes, for as long as this piece is not used otherwise.
    #[inline]
    pub(crate) fn rest(&mut self, n: usize) -> PieceMut<'_> {
        PieceMut(self.0.skip(n))
    }

    /// The first `n` bytes, or all, for as long as this piece is not used otherwise.
    #[inline]
    pub fn first(&mut self, n: usize) -> PieceMut<'_> {
        PieceMut(self.0.first(n))
    }

    /// The first `n` bytes, or all, now that they were filled.
    #[inline]
    pub(crate) fn filled(&self, n: usize) -> Piece<'_> {
        self.0.first(n)
    }

    /// The first byte.
    #[inline]
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.ptr.cast_mut()
    }

    /// Copies bytes of `from` in, at most as many as there is room for; returns their number. For
    /// simulated streams and tests.
    ///
    /// # Safety
    ///
    /// The memory must still be accessible, and no other reference into it may exist.
    pub unsafe fn copy_in(&self, from: &[u8]) -> usize {
        let n = self.len().min(from.len());
        // SAFETY: the caller answers for the target; `from` is a live slice of at least `n` bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.0.ptr.cast_mut(), n) };
        n
    }

    /// The pieces as the array of iovec that the kernel writes by.
    pub(crate) fn as_io_slices<'s>(pieces: &'s mut [PieceMut<'a>]) -> &'s mut [IoSliceMut<'s>] {
        // SAFETY: `IoSliceMut` is promised to be ABI-compatible with `iovec`, which is { pointer,
        // length } like `PieceMut` (asserted below). Only the kernel writes through it, and returns
        // EFAULT for inaccessible memory.
        unsafe { std::slice::from_raw_parts_mut(pieces.as_mut_ptr().cast(), pieces.len()) }
    }
}

const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(
        size_of::<Piece<'_>>() == size_of::<IoSlice<'_>>()
            && align_of::<Piece<'_>>() == align_of::<IoSlice<'_>>()
    );
    assert!(size_of::<PieceMut<'_>>() == size_of::<IoSliceMut<'_>>());
    assert!(offset_of!(Piece<'_>, ptr) == 0);
};

/// Room for the pieces of one call, so that the next call need not allocate. It holds no pieces
/// between calls.
#[derive(Debug, Default)]
pub(crate) struct PieceRoom(Vec<PieceMut<'static>>);

impl PieceRoom {
    /// The room, empty.
    #[inline]
    pub(crate) fn take<'a>(&mut self) -> Vec<PieceMut<'a>> {
        std::mem::take(&mut self.0)
    }

    /// Takes the room back. The pieces are dropped; their allocation stays.
    #[inline]
    pub(crate) fn give(&mut self, mut pieces: Vec<PieceMut<'_>>) {
        pieces.clear();
        // The vector is empty, so no element is mapped: this collects in place, into the same
        // allocation.
        self.0 = pieces
            .into_iter()
            .map(|_| unreachable!("no piece is left"))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_for_pieces_keeps_its_allocation() {
        let mut room = PieceRoom::default();
        let mut bytes = [0; 8];
        let mut pieces = room.take();
        pieces.push(PieceMut::of(&mut bytes));
        let allocation = (pieces.as_ptr().addr(), pieces.capacity());
        room.give(pieces);
        let pieces = room.take();
        assert!(pieces.is_empty());
        assert_eq!((pieces.as_ptr().addr(), pieces.capacity()), allocation);
    }
}
