//! The host's memory in tests.

use crate::host::{HostMemory, Mapping};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::AtomicU32;
use urnic_device::wqe::Sge;
use urnic_testkit::Memory;

/// Memory that stays in place, 64-byte aligned, and is reached only by raw copies.
#[derive(Debug)]
pub(crate) struct Block {
    ptr: NonNull<Line>,
    lines: usize,
    whole: Mapping,
}

#[repr(align(64))]
#[derive(Debug, Clone, Copy)]
struct Line(#[expect(dead_code, reason = "reached by address")] [u8; 64]);

impl Block {
    pub(crate) fn new(len: usize) -> Block {
        let lines = vec![Line([0; 64]); len.div_ceil(64).max(1)].into_boxed_slice();
        let count = lines.len();
        let ptr: NonNull<Line> = NonNull::new(Box::into_raw(lines).cast()).unwrap();
        let iova = ptr.as_ptr().expose_provenance() as u64;
        Block {
            ptr,
            lines: count,
            whole: Mapping::new(&Anywhere, iova, count * size_of::<Line>(), 1).unwrap(),
        }
    }

    /// The first `len` bytes, as the device maps them.
    pub(crate) fn mapping(&self, len: usize) -> Mapping {
        self.whole.part(0, len)
    }
}

impl Memory for Block {
    fn iova(&self) -> u64 {
        self.whole.address() as u64
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        self.whole.word(at)
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.whole.copy_in(at, bytes);
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.whole.copy_out(at, &mut bytes);
        bytes
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

/// The addresses of the host's memory are pointers.
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
        self.block.read(self.skip, self.len)
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        self.block.write(self.skip + at, bytes);
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
