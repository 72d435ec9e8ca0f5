//! Several copies by one call.

use super::{Condition, NotCopied, copy_extents_if};
use crate::host::process_memory::extents;
use crate::host::{Piece, PieceMut};
use rustix::process::Pid;
use std::marker::PhantomData;

/// Most copies of a batch.
pub(crate) const MOST: usize = 32;

/// Copies between pieces of this process, of type `P`, and places in another process.
#[derive(Debug)]
pub(crate) struct Batch<P> {
    local: [libc::iovec; MOST],
    remote: [libc::iovec; MOST],
    number: usize,
    len: usize,
    pieces: PhantomData<P>,
}

impl<P> Batch<P> {
    pub(crate) fn new() -> Self {
        let none = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Batch {
            local: [none; MOST],
            remote: [none; MOST],
            number: 0,
            len: 0,
            pieces: PhantomData,
        }
    }

    /// Bytes of all pieces.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no room for another piece.
    pub(crate) fn is_full(&self) -> bool {
        self.number == MOST
    }

    /// The lengths of the pieces, and where their places in the other process are noted.
    pub(crate) fn places(&mut self) -> impl Iterator<Item = (usize, impl FnMut(u64))> {
        self.remote[..self.number].iter_mut().map(|place| {
            let set = |address: u64| place.iov_base = std::ptr::without_provenance_mut(address as usize);
            (place.iov_len, set)
        })
    }

    fn add(&mut self, here: *mut u8, len: usize) {
        assert!(!self.is_full(), "a batch has a limit");
        [self.local[self.number], self.remote[self.number]] = extents(0, here, len);
        self.number += 1;
        self.len += len;
    }

    fn copy_if(
        &self,
        conditions: [Condition<'_>; 2],
        call: libc::c_long,
        process: Pid,
    ) -> Result<usize, NotCopied> {
        let lists = [&self.local[..self.number], &self.remote[..self.number]];
        copy_extents_if(conditions, call, process, lists)
    }
}

impl<'a> Batch<Piece<'a>> {
    pub(crate) fn push(&mut self, from: Piece<'a>) {
        // The kernel only reads there.
        self.add(from.as_ptr().cast_mut(), from.len());
    }

    /// Copies to the other process if the conditions are met; returns how many bytes.
    ///
    /// # Errors
    /// See [`NotCopied`].
    pub(crate) fn write_if(&self, conditions: [Condition<'_>; 2], process: Pid) -> Result<usize, NotCopied> {
        self.copy_if(conditions, libc::SYS_process_vm_writev, process)
    }
}

impl<'a> Batch<PieceMut<'a>> {
    pub(crate) fn push(&mut self, mut into: PieceMut<'a>) {
        self.add(into.as_mut_ptr(), into.len());
    }

    /// Copies from the other process if the conditions are met; returns how many bytes.
    ///
    /// # Errors
    /// See [`NotCopied`].
    pub(crate) fn read_if(
        &mut self,
        conditions: [Condition<'_>; 2],
        process: Pid,
    ) -> Result<usize, NotCopied> {
        self.copy_if(conditions, libc::SYS_process_vm_readv, process)
    }
}
