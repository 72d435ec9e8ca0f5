//! Stretches of bytes that the kernel reads and writes on behalf of a stream.

use super::fault::access::{self, Unreachable};
use super::host_memory::PAGE;

/// A stretch of bytes to be sent: raw, so that making one claims nothing about who else writes there.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Piece {
    pub(super) ptr: *const u8,
    pub(super) len: usize,
}

/// A stretch of bytes to be received into.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PieceMut {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
}

// SAFETY: a piece is a plain address; whoever reads or writes through it answers for it.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Send for PieceMut {}

impl Piece {
    /// The bytes of `slice`, which must stay in place for as long as the piece is in use.
    #[inline]
    pub fn of(slice: &[u8]) -> Piece {
        Piece {
            ptr: slice.as_ptr(),
            len: slice.len(),
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is left behind the first `n` bytes.
    #[inline]
    pub fn skip(self, n: usize) -> Piece {
        let n = n.min(self.len);
        Piece {
            ptr: self.ptr.wrapping_add(n),
            len: self.len - n,
        }
    }

    /// The first `n` bytes, or all.
    #[inline]
    pub fn first(self, n: usize) -> Piece {
        Piece {
            len: n.min(self.len),
            ..self
        }
    }

    /// The address of the first byte that cannot be read at this moment, as far as pages go.
    #[cold]
    pub(crate) fn first_missing(&self) -> Option<usize> {
        let (start, end) = (self.ptr.addr(), self.ptr.addr() + self.len);
        let pages = (start & !(PAGE - 1)..end).step_by(PAGE);
        pages
            .map(|page| page.max(start))
            .find(|byte| access::probe(std::ptr::with_exposed_provenance(*byte), 1).is_err())
    }

    /// Copies the bytes out, as far as `into` is long; returns how many. For simulated streams and tests.
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

    /// Adds the bytes to `copies`, which stays as it is if they are gone.
    pub(crate) fn append_to(&self, copies: &mut Vec<u8>) -> Result<(), Unreachable> {
        let before = copies.len();
        copies.resize(before + self.len, 0);
        let into = &mut copies[before..];
        // SAFETY: `into` is ours alone and as long as the piece; the piece is registered memory, which may be gone.
        let copied = unsafe { access::copy(into.as_mut_ptr(), self.ptr, into.len()) };
        if copied.is_err() {
            copies.truncate(before);
        }
        copied
    }

    /// The same as the iovec that the kernel takes.
    pub(crate) fn as_io_slices(pieces: &[Piece]) -> &[std::io::IoSlice<'_>] {
        // SAFETY: `IoSlice` is promised to be ABI-compatible with `iovec`, which is { pointer, length } like
        // `Piece` (asserted below). Only the kernel reads through it, and answers EFAULT for what is gone.
        unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
    }
}

impl PieceMut {
    /// The bytes of `slice`, which must stay in place for as long as the piece is in use.
    #[inline]
    pub fn of(slice: &mut [u8]) -> PieceMut {
        PieceMut {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is left behind the first `n` bytes.
    #[inline]
    pub fn skip(self, n: usize) -> PieceMut {
        let n = n.min(self.len);
        PieceMut {
            ptr: self.ptr.wrapping_add(n),
            len: self.len - n,
        }
    }

    /// The first `n` bytes, or all.
    #[inline]
    pub fn first(self, n: usize) -> PieceMut {
        PieceMut {
            len: n.min(self.len),
            ..self
        }
    }

    /// The first `n` bytes, or all, now that they were filled.
    #[inline]
    pub(crate) fn filled(&self, n: usize) -> Piece {
        Piece {
            ptr: self.ptr,
            len: n.min(self.len),
        }
    }

    /// Copies `from` in, as far as there is room; returns how many bytes. For simulated streams and tests.
    ///
    /// # Safety
    ///
    /// The memory must still be there, and nobody else may hold a reference into it.
    pub unsafe fn copy_in(&self, from: &[u8]) -> usize {
        let n = self.len.min(from.len());
        // SAFETY: the caller answers for the target; `from` is a live slice of at least `n` bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.ptr, n) };
        n
    }

    pub(crate) fn as_io_slices(pieces: &mut [PieceMut]) -> &mut [std::io::IoSliceMut<'_>] {
        // SAFETY: as in `Piece::as_io_slices`; the kernel writes through it, nobody makes a reference of it.
        unsafe { std::slice::from_raw_parts_mut(pieces.as_mut_ptr().cast(), pieces.len()) }
    }
}

const _: () = {
    use std::io::{IoSlice, IoSliceMut};
    use std::mem::{align_of, offset_of, size_of};
    assert!(
        size_of::<Piece>() == size_of::<IoSlice<'_>>() && align_of::<Piece>() == align_of::<IoSlice<'_>>()
    );
    assert!(size_of::<PieceMut>() == size_of::<IoSliceMut<'_>>());
    assert!(offset_of!(Piece, ptr) == 0 && offset_of!(PieceMut, ptr) == 0);
};
