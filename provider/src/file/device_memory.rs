//! Device memory, shared by all contexts that import it. The memory of a model is memory of its
//! process, so regions of it are registered like other regions. Behind a bus, the device also reads
//! and writes it like other memory of the program.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;

/// The largest piece of device memory, in bytes.
pub(crate) const MAX: usize = 1 << 20;
/// Offsets and lengths of copies are multiples of this, in bytes.
const ALIGNMENT: usize = 4;
/// The largest alignment that a program may request, as log2 of bytes.
pub(crate) const MAX_LOG_ALIGN: u32 = 12;
const PAGE: usize = 1 << MAX_LOG_ALIGN;

/// The device memory that contexts share when they import it.
pub(crate) struct DeviceMemory(pub(crate) Arc<Memory>);

/// The memory itself, in whole pages. It lives until the regions in it are gone.
pub(crate) struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is used by its address only; programs order their accesses, as for all memory
// that an adapter reaches.
unsafe impl Send for Memory {}
// SAFETY: the memory is used by its address only; programs order their accesses, as for all memory
// that an adapter reaches.
unsafe impl Sync for Memory {}

impl Memory {
    /// The layout of the memory's pages and one more page, so that an empty region also has an
    /// address in this allocation.
    fn layout(len: usize) -> Result<Layout, Errno> {
        let pages = len.next_multiple_of(PAGE) + PAGE;
        Layout::from_size_align(pages, PAGE).map_err(|_| Errno::NOMEM)
    }

    /// Allocates zeroed memory.
    ///
    /// Errors: NOMEM.
    pub(crate) fn new(len: usize) -> Result<Memory, Errno> {
        let layout = Memory::layout(len)?;
        // SAFETY: the layout is at least a page.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Errno::NOMEM)?;
        Ok(Memory { base, len })
    }

    /// `len` bytes from `offset`, if they are within it.
    ///
    /// Errors: INVAL.
    pub(crate) fn range(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Errno::INVAL);
        }
        // SAFETY: within the memory, or just behind it.
        Ok(unsafe { self.base.as_ptr().add(offset) })
    }

    /// The range that a copy accesses, checked for alignment.
    pub(crate) fn aligned(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        if !offset.is_multiple_of(ALIGNMENT as u64) || !len.is_multiple_of(ALIGNMENT) {
            return Err(Errno::INVAL);
        }
        self.range(offset, len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(layout) = Memory::layout(self.len) {
            // SAFETY: allocated with this layout, and no code uses it any more.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_within_it_and_are_aligned() {
        let memory = Memory::new(100).unwrap();
        assert!(memory.aligned(0, 100).is_ok());
        assert!(memory.aligned(96, 4).is_ok());
        assert!(memory.aligned(100, 0).is_ok());
        for (offset, len) in [(97, 3), (4, 5), (1, 4), (100, 4), (104, 0), (u64::MAX - 3, 8)] {
            assert_eq!(memory.aligned(offset, len), Err(Errno::INVAL), "{offset} {len}");
        }
    }
}
