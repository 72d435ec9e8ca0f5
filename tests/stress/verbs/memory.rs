//! Memory regions and windows.

use std::ffi::c_int;
use std::ptr;

use urnic_rdma_core::*;

use super::device::Device;
use super::library::{api, some, zero};
use crate::arena::Arena;

/// A memory region.
pub(crate) struct Mr {
    mr: *mut ibv_mr,
    name: u64,
}

impl Mr {
    /// Registers `len` bytes of the arena from `at`; `name` is the address of the first byte in
    /// work requests.
    pub(crate) fn new(device: &Device, arena: &Arena, at: usize, len: usize, name: u64, access: u32) -> Mr {
        assert!(at + len <= arena.len());
        // SAFETY: memory that is there as long as the region.
        let mr = unsafe {
            (api().ibv_reg_mr_iova)(device.pd, arena.base().add(at).cast(), len, name, access as c_int)
        };
        Mr {
            mr: some("ibv_reg_mr_iova", mr),
            name,
        }
    }

    /// Other memory, and other rights; the key stays.
    pub(crate) fn moved(&mut self, arena: &Arena, at: usize, len: usize, name: u64, access: u32) {
        assert!(at + len <= arena.len());
        let flags = (IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS) as c_int;
        // SAFETY: a live region, and memory that is there as long.
        zero("ibv_rereg_mr", unsafe {
            let addr = arena.base().add(at).cast();
            (api().ibv_rereg_mr)(self.mr, flags, ptr::null_mut(), addr, len, access as c_int)
        });
        self.name = name;
    }

    /// Other rights.
    pub(crate) fn restricted(&mut self, access: u32) {
        let flags = IBV_REREG_MR_CHANGE_ACCESS as c_int;
        // SAFETY: a live region.
        zero("ibv_rereg_mr", unsafe {
            (api().ibv_rereg_mr)(
                self.mr,
                flags,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                access as c_int,
            )
        });
    }

    /// The address of the region's first byte in work requests.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    pub(crate) fn key(&self) -> u32 {
        // SAFETY: a live region.
        unsafe { (*self.mr).lkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: a live region.
        zero("ibv_dereg_mr", unsafe { (api().ibv_dereg_mr)(self.mr) });
    }
}

/// A memory window.
pub(crate) struct Mw(pub(super) *mut ibv_mw);

impl Mw {
    pub(crate) fn new(device: &Device, kind: ibv_mw_type) -> Mw {
        // SAFETY: an open context, whose operations libibverbs filled in.
        let mw = unsafe { (*device.context).ops.alloc_mw.expect("alloc_mw")(device.pd, kind) };
        Mw(some("ibv_alloc_mw", mw))
    }

    pub(crate) fn key(&self) -> u32 {
        // SAFETY: a live window.
        unsafe { (*self.0).rkey }
    }

    /// The key for the next bind of a window of type 2 (`ibv_inc_rkey`), which it has from now on.
    pub(crate) fn next_key(&self) -> u32 {
        let key = self.key();
        let next = key & !0xff | key.wrapping_add(1) & 0xff;
        // SAFETY: a live window; the program may write its key.
        unsafe { (*self.0).rkey = next };
        next
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: a live window.
        zero("ibv_dealloc_mw", unsafe {
            (*(*self.0).context).ops.dealloc_mw.expect("dealloc_mw")(self.0)
        });
    }
}

/// What a bound window shows.
pub(crate) struct Binding<'a> {
    pub(crate) mr: &'a Mr,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
}

impl Binding<'_> {
    pub(super) fn info(&self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.mr.mr,
            addr: self.address,
            length: self.len,
            mw_access_flags: self.access,
        }
    }
}
