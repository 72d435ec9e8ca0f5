//! Device memory (`ibv_alloc_dm(3)`): memory that the program accesses only by copies and
//! registered regions.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use urnic_rdma_core::*;

use super::mr;
use super::shared_with_c::SharedWithC;
use crate::context::Context;
use crate::file::device_memory::{DeviceMemory, MAX, MAX_LOG_ALIGN, Memory};
use crate::file::{File, Handles};
use crate::guard::{pointer, status};

/// Device memory: the part of libibverbs, then the part of the provider.
#[repr(C)]
struct Dm {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<ibv_dm>,
    object: Arc<DeviceMemory>,
    file: Weak<File>,
}

/// The memory behind libibverbs' pointer.
///
/// # Safety
/// `dm` came from [`alloc_dm`] or [`import_dm`] and was not freed.
unsafe fn memory<'a>(dm: *mut ibv_dm) -> &'a Arc<Memory> {
    // SAFETY: the caller promises memory of this provider, and `abi` is the first field.
    unsafe { &(&*dm.cast::<Dm>()).object.0 }
}

/// Runs an operation on the handles of device memory, with the memory's handle. In a forked child
/// the memory stays valid, but cannot be imported.
///
/// # Safety
/// The conditions of [`memory`].
unsafe fn with_handle(
    dm: *mut ibv_dm,
    what: impl FnOnce(&Handles<DeviceMemory>, u32, &Arc<DeviceMemory>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // SAFETY: the caller promises memory of this provider, and `abi` is the first field.
    let (this, handle) = unsafe { (&*dm.cast::<Dm>(), (*dm).handle) };
    File::upgraded(&this.file).map_or(Ok(()), |file| what(&file.device_memory, handle, &this.object))
}

/// A handle for this memory in this context.
fn boxed(
    context: *mut ibv_context,
    handle: u32,
    object: Arc<DeviceMemory>,
    file: Option<&Arc<File>>,
) -> Box<Dm> {
    Box::new(Dm {
        abi: SharedWithC::new(ibv_dm {
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

/// `ibv_alloc_dm(3)`: EINVAL for length 0 or unknown attributes, ENOMEM for more than
/// `max_dm_size`.
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

/// `ibv_unimport_dm(3)`: removes one handle of the memory.
pub(super) unsafe extern "C" fn unimport_dm(dm: *mut ibv_dm) {
    status(|| {
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(dm.cast::<Dm>()) });
        Ok(())
    });
}

/// `ibv_free_dm(3)`: EBUSY while regions are registered in the memory; ENOENT if another context
/// freed it.
pub(super) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    status(|| {
        // SAFETY: the program passes live memory of this provider.
        if Arc::strong_count(unsafe { memory(dm) }) > 1 {
            return Err(Errno::BUSY);
        }
        // SAFETY: the program passes live memory of this provider.
        unsafe { with_handle(dm, Handles::withdraw) }?;
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(dm.cast::<Dm>()) });
        Ok(())
    })
}

/// `ibv_memcpy_to_dm(3)`: EINVAL outside of the memory, or unless offset and length are multiples
/// of 4.
unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, len: usize) -> c_int {
    status(|| {
        // SAFETY: the program passes live memory of this provider.
        let to = unsafe { memory(dm) }.aligned(offset, len)?;
        // SAFETY: `len` bytes of the program, and `len` bytes of device memory, which do not
        // overlap.
        unsafe { ptr::copy_nonoverlapping(from.cast(), to, len) };
        Ok(())
    })
}

/// `ibv_memcpy_from_dm(3)`: EINVAL outside of the memory, or unless offset and length are multiples
/// of 4.
unsafe extern "C" fn memcpy_from_dm(to: *mut c_void, dm: *mut ibv_dm, offset: u64, len: usize) -> c_int {
    status(|| {
        // SAFETY: the program passes live memory of this provider.
        let from = unsafe { memory(dm) }.aligned(offset, len)?;
        // SAFETY: the program's buffer, and `len` bytes of device memory, which do not overlap.
        unsafe { ptr::copy_nonoverlapping(from, to.cast(), len) };
        Ok(())
    })
}

/// `ibv_reg_dm_mr(3)`: EINVAL outside of the memory, or unless the region is zero-based; ENOENT if
/// another context freed it.
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
        // SAFETY: the program passes live memory of this provider, and a live domain.
        unsafe {
            with_handle(dm, Handles::check)?;
            mr::of_device_memory(pd, memory(dm), offset, len, access)
        }
    })
    .cast()
}
