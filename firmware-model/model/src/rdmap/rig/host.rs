//! Memory of a host.

use crate::host::{HostMemory, Mapping};
use std::ptr::NonNull;
use std::rc::Rc;
use urnic_device::wqe::Sge;

/// Memory that stays in place, 64-byte aligned, and is reached only by raw copies.
#[derive(Debug)]
pub(crate) struct Block {
    ptr: NonNull<Line>,
    lines: usize,
}

#[repr(align(64))]
#[derive(Debug, Clone, Copy)]
struct Line(#[expect(dead_code, reason = "reached by address")] [u8; 64]);

impl Block {
    pub(crate) fn new(len: usize) -> Block {
        let lines = vec![Line([0; 64]); len.div_ceil(64).max(1)].into_boxed_slice();
        let count = lines.len();
        let ptr = NonNull::new(Box::into_raw(lines).cast()).unwrap();
        Block { ptr, lines: count }
    }

    pub(crate) fn iova(&self) -> u64 {
        self.ptr.as_ptr().expose_provenance() as u64
    }

    pub(crate) fn mapping(&self, len: usize) -> Mapping {
        assert!(len <= self.lines * 64);
        Mapping::new(&Anywhere, self.iova(), len, 1).unwrap()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let slice = std::ptr::slice_from_raw_parts_mut(self.ptr.as_ptr(), self.lines);
        // SAFETY: the pointer was made by `Box::into_raw` in `new`; all users of the memory are in
        // the same `Node`.
        drop(unsafe { Box::from_raw(slice) });
    }
}

/// Addresses are pointers.
pub(super) struct Anywhere;

// SAFETY: tests name only blocks that outlive the engines that use them.
unsafe impl HostMemory for Anywhere {
    fn reach(&self, iova: u64, _: usize) -> Option<NonNull<u8>> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(iova as usize))
    }
}

/// A registered region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) stag: u32,
    pub(crate) base: u64,
    pub(crate) len: usize,
    pub(super) skip: usize,
    pub(super) block: Rc<Block>,
}

impl Region {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.mapping().copy_out(self.skip, &mut bytes);
        bytes
    }

    fn mapping(&self) -> Mapping {
        self.block.mapping(self.skip + self.len)
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        self.mapping().copy_in(self.skip + at, bytes);
    }

    /// An entry for the memory, or for a part of it.
    pub(crate) fn sge(&self, at: usize, len: usize) -> Sge {
        sge(self.base + at as u64, len, self.stag)
    }
}

pub(crate) fn sge(offset: u64, len: usize, stag: u32) -> Sge {
    Sge {
        offset: offset.into(),
        len: (len as u32).into(),
        stag: stag.into(),
    }
}
