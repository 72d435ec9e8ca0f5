//! Memory that this library maps for itself and for the device.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A mapping, which ends with this value.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: the value is an address and a length; code that accesses the memory orders its accesses.
unsafe impl Send for Mapping {}
// SAFETY: the value is an address and a length; code that accesses the memory orders its accesses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file, shared with others, from `offset` on.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub(crate) fn of_file(
        file: impl AsFd,
        offset: u64,
        len: usize,
        rights: ProtFlags,
    ) -> Result<Mapping, Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping.
        let start = unsafe { mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, file, offset)? };
        Mapping::new(start, len)
    }

    /// Maps `len` zeroed bytes, which take memory when they are used.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub(crate) fn anonymous(len: usize) -> Result<Mapping, Errno> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, rights, flags)? };
        Mapping::new(start, len)
    }

    fn new(start: *mut c_void, len: usize) -> Result<Mapping, Errno> {
        let start = NonNull::new(start).ok_or(Errno::NOMEM)?;
        Ok(Mapping { start, len })
    }

    /// The address of the first byte.
    pub(crate) fn start(&self) -> *mut c_void {
        self.start.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping that was made for this value, which no code uses any more.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}
