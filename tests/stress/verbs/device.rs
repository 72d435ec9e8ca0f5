//! The device.

use std::ffi::{CStr, c_int};
use std::ptr;

use urnic_rdma_core::*;

use super::library::{api, some, zero};

/// The open device and a protection domain in it.
pub(crate) struct Device {
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    on_demand: bool,
}

impl Device {
    pub(crate) fn open() -> Device {
        let mut count = 0;
        // SAFETY: as the manual has it.
        unsafe {
            let list = some("ibv_get_device_list", (api().ibv_get_device_list)(&raw mut count));
            let named = |i: &usize| CStr::from_ptr((api().ibv_get_device_name)(*list.add(*i))) == c"urnic0";
            let found = (0..count as usize).find(named).expect("no urnic0");
            let context = some("ibv_open_device", (api().ibv_open_device)(*list.add(found)));
            let pd = some("ibv_alloc_pd", (api().ibv_alloc_pd)(context));
            // All of the address space, where there are regions on demand.
            let access = IBV_ACCESS_ON_DEMAND as c_int;
            let mr = (api().ibv_reg_mr_iova)(pd, ptr::null_mut(), usize::MAX, 0, access);
            let on_demand = !mr.is_null();
            if on_demand {
                zero("ibv_dereg_mr", (api().ibv_dereg_mr)(mr));
            }
            Device {
                context,
                pd,
                on_demand,
            }
        }
    }

    /// Whether the device supports on-demand regions.
    pub(crate) fn on_demand(&self) -> bool {
        self.on_demand
    }

    pub(crate) fn gid(&self) -> ibv_gid {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: an open context.
        zero("ibv_query_gid", unsafe {
            (api().ibv_query_gid)(self.context, 1, 0, &raw mut gid)
        });
        gid
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: all objects that were made in them are destroyed.
        unsafe {
            zero("ibv_dealloc_pd", (api().ibv_dealloc_pd)(self.pd));
            zero("ibv_close_device", (api().ibv_close_device)(self.context));
        }
    }
}
