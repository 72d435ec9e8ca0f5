//! Device memory (`ibv_alloc_dm(3)`): memory that the program reaches by copies and registered regions only. A model's own memory is its process's, so it lies
//! there, and regions of it are registered like others; behind a bus, too, the device reads and writes it as it does the program's.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use urnic_verbs_api::rdma_core::*;

use super::file::{File, Handles};
use super::foreign::Foreign;
use super::mr;
use crate::context::Context;
use crate::guard::{pointer, status};

/// The largest piece, in bytes.
pub(super) const MAX: usize = 1 << 20;
/// Offsets and lengths of copies are multiples of this, in bytes.
const ALIGNMENT: usize = 4;
/// The largest alignment that may be asked for.
const MAX_LOG_ALIGN: u32 = 12;
const PAGE: usize = 1 << MAX_LOG_ALIGN;

/// Device memory as libibverbs knows it, and what is ours behind it.
#[repr(C)]
struct Dm {
    /// Must be first: libibverbs' pointer is ours.
    abi: Foreign<ibv_dm>,
    object: Arc<DeviceMemory>,
    file: Weak<File>,
}

/// What contexts that import it share.
pub(super) struct DeviceMemory(Arc<Memory>);

/// The memory itself, whole pages. It lives until the regions in it are gone.
pub(super) struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it is used by its address only, with the program's care for who writes what when, as all memory that an adapter reaches.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Its pages, and one more, so that a region without any octet has an address that is ours.
    fn layout(len: usize) -> Result<Layout, Errno> {
        let pages = len.next_multiple_of(PAGE) + PAGE;
        Layout::from_size_align(pages, PAGE).map_err(|_| Errno::NOMEM)
    }

    fn new(len: usize) -> Result<Memory, Errno> {
        let layout = Memory::layout(len)?;
        // SAFETY: the layout is at least a page.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Errno::NOMEM)?;
        Ok(Memory { base, len })
    }

    /// `len` bytes from `offset`, if they are within it.
    ///
    /// Errors: INVAL.
    pub(super) fn range(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Errno::INVAL);
        }
        // SAFETY: within the memory, or just behind it.
        Ok(unsafe { self.base.as_ptr().add(offset) })
    }

    /// What a copy may touch.
    fn aligned(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        if !offset.is_multiple_of(ALIGNMENT as u64) || !len.is_multiple_of(ALIGNMENT) {
            return Err(Errno::INVAL);
        }
        self.range(offset, len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(layout) = Memory::layout(self.len) {
            // SAFETY: allocated with this layout, and nobody uses it any more.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        }
    }
}

/// The memory behind libibverbs' pointer.
///
/// # Safety
/// `dm` came from [`alloc_dm`] or [`import_dm`] and was not freed.
unsafe fn memory<'a>(dm: *mut ibv_dm) -> &'a Arc<Memory> {
    // SAFETY: as promised; `abi` is the first field.
    unsafe { &(&*dm.cast::<Dm>()).object.0 }
}

/// Has those who know it by its handle do something with it. In a forked child memory is still memory, but nobody imports it.
///
/// # Safety
/// As for [`memory`].
unsafe fn with_handle(
    dm: *mut ibv_dm,
    what: impl FnOnce(&Handles<DeviceMemory>, u32, &Arc<DeviceMemory>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // SAFETY: as promised; `abi` is the first field.
    let (this, handle) = unsafe { (&*dm.cast::<Dm>(), (*dm).handle) };
    File::upgraded(&this.file).map_or(Ok(()), |file| what(&file.device_memory, handle, &this.object))
}

/// A name for that memory in this context.
fn boxed(
    context: *mut ibv_context,
    handle: u32,
    object: Arc<DeviceMemory>,
    file: Option<&Arc<File>>,
) -> Box<Dm> {
    Box::new(Dm {
        abi: Foreign::new(ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: 0,
            handle,
        }),
        object,
        file: file.map(Arc::downgrade).unwrap_or_default(),
    })
}

/// `ibv_alloc_dm(3)`: EINVAL for nothing or unknown attributes, ENOMEM for more than `max_dm_size`.
pub(super) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    pointer(|| {
        // SAFETY: the program's attributes.
        let attr = unsafe { &*attr };
        if attr.comp_mask != 0 || attr.length == 0 || attr.log_align_req > MAX_LOG_ALIGN {
            return Err(Errno::INVAL);
        }
        if attr.length > MAX {
            return Err(Errno::NOMEM);
        }
        let object = Arc::new(DeviceMemory(Arc::new(Memory::new(attr.length)?)));
        // SAFETY: libibverbs gives an open context.
        let file = unsafe { Context::of(context) }.file();
        let handle = file.map_or(0, |file| file.device_memory.enter_anywhere(object.clone()));
        Ok(boxed(context, handle, object, file))
    })
    .cast()
}

/// `ibv_import_dm(3)`: ENOENT if no context of the file has such memory; EIO in a forked child.
pub(super) unsafe extern "C" fn import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    pointer(|| {
        // SAFETY: libibverbs gives an open context.
        let file = unsafe { Context::of(context) }.file().ok_or(Errno::IO)?;
        let object = file.device_memory.find(handle)?;
        Ok(boxed(context, handle, object, Some(file)))
    })
    .cast()
}

/// `ibv_unimport_dm(3)`: one name less for the memory.
pub(super) unsafe extern "C" fn unimport_dm(dm: *mut ibv_dm) {
    status(|| {
        // SAFETY: from `Box::into_raw`, and nobody has it any more.
        drop(unsafe { Box::from_raw(dm.cast::<Dm>()) });
        Ok(())
    });
}

/// `ibv_free_dm(3)`: EBUSY while regions are registered in it; ENOENT if it was freed in another context.
pub(super) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    status(|| {
        // SAFETY: live memory of ours.
        if Arc::strong_count(unsafe { memory(dm) }) > 1 {
            return Err(Errno::BUSY);
        }
        // SAFETY: as above.
        unsafe { with_handle(dm, Handles::withdraw) }?;
        // SAFETY: from `Box::into_raw`, and nobody has it any more.
        drop(unsafe { Box::from_raw(dm.cast::<Dm>()) });
        Ok(())
    })
}

/// `ibv_memcpy_to_dm(3)`: EINVAL outside of it, or unless offset and length are multiples of four.
unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, len: usize) -> c_int {
    status(|| {
        // SAFETY: live memory of ours.
        let to = unsafe { memory(dm) }.aligned(offset, len)?;
        // SAFETY: the program's bytes, and so many of ours, which are elsewhere.
        unsafe { ptr::copy_nonoverlapping(from.cast(), to, len) };
        Ok(())
    })
}

/// `ibv_memcpy_from_dm(3)`: EINVAL outside of it, or unless offset and length are multiples of four.
unsafe extern "C" fn memcpy_from_dm(to: *mut c_void, dm: *mut ibv_dm, offset: u64, len: usize) -> c_int {
    status(|| {
        // SAFETY: live memory of ours.
        let from = unsafe { memory(dm) }.aligned(offset, len)?;
        // SAFETY: the program's buffer, and so many bytes of ours, which are elsewhere.
        unsafe { ptr::copy_nonoverlapping(from, to.cast(), len) };
        Ok(())
    })
}

/// `ibv_reg_dm_mr(3)`: EINVAL outside of it, or unless it is zero-based; ENOENT if it was freed in another context.
pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    len: usize,
    access: u32,
) -> *mut ibv_mr {
    pointer(|| {
        if access & IBV_ACCESS_ZERO_BASED == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: live memory of ours, and a live domain.
        unsafe {
            with_handle(dm, Handles::check)?;
            mr::of_device_memory(pd, memory(dm), offset, len, access)
        }
    })
    .cast()
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
