//! Queue memory that only this process maps.

use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Allocates `len` zeroed bytes at a multiple of 4096. Untouched pages take no memory.
///
/// # Errors
/// `ENOMEM`: the kernel has no memory or no address range left.
pub fn allocate(len: usize) -> Result<NonNull<u8>, Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nothing.
    let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }?;
    NonNull::new(ptr.cast()).ok_or(Errno::NOMEM)
}

/// Unmaps memory from [`allocate`].
///
/// # Safety
/// `ptr` came from [`allocate`] with this `len`, and no code uses the memory any more.
pub unsafe fn free(ptr: NonNull<u8>, len: usize) {
    // SAFETY: the range is a whole mapping that `allocate` made and no code uses, as the caller
    // promises.
    let _ = unsafe { munmap(ptr.as_ptr().cast(), len) };
}
