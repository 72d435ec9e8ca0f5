//! Queue memory that only this process maps.

use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// `len` zeroed bytes, at a multiple of 4096. They cost nothing until touched.
///
/// # Errors
/// `ENOMEM`.
pub fn allocate(len: usize) -> Result<NonNull<u8>, Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nothing.
    let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }?;
    NonNull::new(ptr.cast()).ok_or(Errno::NOMEM)
}

/// Gives it back.
///
/// # Safety
/// `ptr` came from [`allocate`] with this `len`, and no code uses it any more.
pub unsafe fn free(ptr: NonNull<u8>, len: usize) {
    // SAFETY: a mapping of its own, as the caller promises.
    let _ = unsafe { munmap(ptr.as_ptr().cast(), len) };
}
