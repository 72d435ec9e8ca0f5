//! Device memory (`ibv_alloc_dm(3)`): memory that the program accesses only by copies and
//! registered regions.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use urnic_driver::{Reason, Refusal, at_most};
use urnic_rdma_core::*;

use super::mr::{self, Mr};
use super::pd::Pd;
use crate::context::OpenContext;
use crate::file::device_memory::{DeviceMemory, MAX, MAX_LOG_ALIGN, Memory};
use crate::file::{File, Handles};
use crate::from_c::{Buffer, Data, SharedWithC, ToFree, called_by_c, objects};

/// Device memory: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(super) struct Dm {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<ibv_dm>,
    handle: u32,
    object: Arc<DeviceMemory>,
    file: Weak<File>,
}

objects! { Dm: ibv_dm; }

impl Dm {
    /// A handle for this memory in this context.
    fn boxed(
        context: OpenContext,
        handle: u32,
        object: Arc<DeviceMemory>,
        file: Option<&Arc<File>>,
    ) -> Box<Dm> {
        called_by_c! {
            memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, len: usize) -> c_int =
                self::memcpy_to_dm(dm, offset, (from, len))
        }
        called_by_c! {
            memcpy_from_dm(to: *mut c_void, dm: *mut ibv_dm, offset: u64, len: usize) -> c_int =
                self::memcpy_from_dm((to, len), dm, offset)
        }
        Box::new(Dm {
            abi: SharedWithC::new(ibv_dm {
                context: context.public(),
                memcpy_to_dm: Some(memcpy_to_dm),
                memcpy_from_dm: Some(memcpy_from_dm),
                comp_mask: 0,
                handle,
            }),
            handle,
            object,
            file: file.map(Arc::downgrade).unwrap_or_default(),
        })
    }

    fn memory(&self) -> &Arc<Memory> {
        &self.object.0
    }

    /// Runs an operation on the handles of device memory, with the memory's handle. In a forked
    /// child the memory stays valid, but cannot be imported.
    fn with_handle(
        &self,
        what: impl FnOnce(&Handles<DeviceMemory>, u32, &Arc<DeviceMemory>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let file = File::upgraded(&self.file);
        file.map_or(Ok(()), |file| {
            what(&file.device_memory, self.handle, &self.object)
        })
    }
}

/// `ibv_alloc_dm(3)`: EINVAL for length 0 or unknown attributes, ENOMEM for more than
/// `max_dm_size`.
pub(super) fn alloc_dm(context: OpenContext, attr: &ibv_alloc_dm_attr) -> Result<Box<Dm>, Refusal> {
    if attr.comp_mask != 0 {
        let (argument, bits) = ("comp_mask", attr.comp_mask.into());
        return Err(Reason::Bits { argument, bits }.invalid());
    }
    if attr.length == 0 {
        return Err(Reason::Rule("length is 0").invalid());
    }
    at_most("log_align_req", attr.log_align_req.into(), MAX_LOG_ALIGN.into())?;
    let too_long = |refusal| Refusal {
        errno: Errno::NOMEM,
        ..refusal
    };
    at_most("length", attr.length as u64, MAX as u64).map_err(too_long)?;
    let object = Arc::new(DeviceMemory(Arc::new(Memory::new(attr.length)?)));
    let file = context.file();
    let handle = file.map_or(0, |file| file.device_memory.enter_anywhere(object.clone()));
    Ok(Dm::boxed(context, handle, object, file))
}

/// `ibv_import_dm(3)`: ENOENT if no context of the file has such memory; EIO in a forked child.
pub(super) fn import_dm(context: OpenContext, handle: u32) -> Result<Box<Dm>, Errno> {
    let file = context.file().ok_or(Errno::IO)?;
    let object = file.device_memory.find(handle)?;
    Ok(Dm::boxed(context, handle, object, Some(file)))
}

/// `ibv_unimport_dm(3)`: removes one handle of the memory.
pub(super) fn unimport_dm(dm: ToFree<Dm>) -> Result<(), Errno> {
    dm.free();
    Ok(())
}

/// `ibv_free_dm(3)`: EBUSY while regions are registered in the memory; ENOENT if another context
/// freed it.
pub(super) fn free_dm(dm: ToFree<Dm>) -> Result<(), Refusal> {
    if Arc::strong_count(dm.memory()) > 1 {
        return Err(Reason::UsedBy("memory regions").with(Errno::BUSY));
    }
    dm.with_handle(Handles::withdraw)?;
    dm.free();
    Ok(())
}

/// `ibv_memcpy_to_dm(3)`: EINVAL outside of the memory, or unless offset and length are multiples
/// of 4.
fn memcpy_to_dm(dm: &Dm, offset: u64, from: Data<'_>) -> Result<(), Errno> {
    dm.memory().copy_in(offset, from)
}

/// `ibv_memcpy_from_dm(3)`: EINVAL outside of the memory, or unless offset and length are multiples
/// of 4.
fn memcpy_from_dm(to: Buffer<'_>, dm: &Dm, offset: u64) -> Result<(), Errno> {
    dm.memory().copy_out(offset, to)
}

/// `ibv_reg_dm_mr(3)`: EINVAL outside of the memory, or unless the region is zero-based; ENOENT if
/// another context freed it.
pub(super) fn reg_dm_mr(pd: &Pd, dm: &Dm, offset: u64, len: usize, access: u32) -> Result<Box<Mr>, Refusal> {
    if access & IBV_ACCESS_ZERO_BASED == 0 {
        return Err(Reason::Rule("regions of device memory need ZERO_BASED").invalid());
    }
    dm.with_handle(Handles::check)?;
    mr::of_device_memory(pd, dm.memory(), offset, len, access)
}
