//! Device memory, shared by all contexts that import it. The memory of a model is memory of its
//! process, so regions of it are registered like other regions. On a bus, the device also reads
//! and writes it like other memory of the program.

use std::sync::Arc;

use rustix::io::Errno;

use crate::from_c::{Buffer, Data};
use urnic_sys::Pages;

/// The largest piece of device memory, in bytes.
pub(crate) const MAX: usize = 1 << 20;
/// Offsets and lengths of copies are multiples of this, in bytes.
const ALIGNMENT: usize = 4;
/// The largest alignment that a program may request, as log2 of bytes.
pub(crate) const MAX_LOG_ALIGN: u32 = 12;
const PAGE: usize = 1 << MAX_LOG_ALIGN;

/// The device memory that contexts share when they import it.
pub(crate) struct DeviceMemory(pub(crate) Arc<Memory>);

/// The memory itself, in whole pages. It exists until the regions in it are deregistered.
pub(crate) struct Memory {
    mapping: Pages,
    len: usize,
}

impl Memory {
    /// Bytes of the memory's pages and of one more page, so that an empty region also has an
    /// address in this mapping.
    fn mapped(len: usize) -> usize {
        len.next_multiple_of(PAGE) + PAGE
    }

    /// Makes zeroed memory.
    ///
    /// Errors: NOMEM.
    pub(crate) fn new(len: usize) -> Result<Memory, Errno> {
        let mapping = Pages::zeroed(Memory::mapped(len)).map_err(|_| Errno::NOMEM)?;
        Ok(Memory { mapping, len })
    }

    /// `len` bytes from `offset`, if they are within it.
    ///
    /// Errors: INVAL.
    pub(crate) fn range(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Errno::INVAL);
        }
        Ok(self.mapping.start().as_ptr().wrapping_byte_add(offset).cast())
    }

    /// The range that a copy accesses, checked for alignment.
    fn aligned(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        if !offset.is_multiple_of(ALIGNMENT as u64) || !len.is_multiple_of(ALIGNMENT) {
            return Err(Errno::INVAL);
        }
        self.range(offset, len)
    }
}

impl Memory {
    /// Copies these bytes to `offset`.
    ///
    /// # Errors
    /// `EINVAL` outside of the memory, or unless offset and length are multiples of 4.
    pub(crate) fn copy_in(&self, offset: u64, from: Data<'_>) -> Result<(), Errno> {
        let to = self.aligned(offset, from.len())?;
        // SAFETY: the memory has that many bytes there, of which no reference exists.
        unsafe { to.copy_from_nonoverlapping(from.bytes().as_ptr(), from.len()) };
        Ok(())
    }

    /// Copies bytes from `offset` on.
    ///
    /// # Errors
    /// As for [`copy_in`](Self::copy_in).
    pub(crate) fn copy_out(&self, offset: u64, to: Buffer<'_>) -> Result<(), Errno> {
        let from = self.aligned(offset, to.len())?;
        let to = to.bytes();
        // SAFETY: the memory has that many bytes there, of which no reference exists.
        unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr().cast(), to.len()) };
        Ok(())
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
