//! `verbs_context_ops`: every operation a provider can offer, sorted by name.
//!
//! The struct consists of function pointers in alphabetical order, so each operation that rdma-core
//! adds moves all operations after it. [`OPS`] is the only list, with the level of each operation;
//! offsets are computed from it.

use core::ffi::{c_int, c_void};

use super::level::Level;
use super::private::verbs_mr;
use super::{attr::*, consts::*, objects::*};

/// One operation of `verbs_context_ops`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpInfo {
    /// Name of the operation in the C struct.
    pub name: &'static str,
    /// The first level with the operation.
    pub since: Level,
}

/// A `verbs_context_ops` under construction, laid out for one level.
///
/// Operations that are not set stay null: libibverbs then returns EOPNOTSUPP for them. Setting an
/// operation that the level does not have does nothing.
#[derive(Clone)]
pub struct ContextOps {
    level: Level,
    slots: [*const c_void; OPS.len()],
}

macro_rules! ops {
    ($($since:ident $name:ident $(($($arg:ty),*) $(-> $ret:ty)?)?;)*) => {
        /// Every operation of the newest level, in the order of the C struct.
        pub const OPS: &[OpInfo] =
            &[$(OpInfo { name: stringify!($name), since: Level::$since },)*];

        impl ContextOps {
            $($(
                #[doc = concat!("Sets `", stringify!($name), "`.")]
                #[must_use]
                pub fn $name(self, op: unsafe extern "C" fn($($arg),*) $(-> $ret)?) -> Self {
                    self.set(stringify!($name), op as *const c_void)
                }
            )?)*
        }
    };
}

ops! {
    V34 advise_mr(*mut ibv_pd, c_int, u32, *mut ibv_sge, u32) -> c_int;
    V64 alloc_buf;
    V34 alloc_dm(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm;
    V59 alloc_dmah;
    V34 alloc_mw(*mut ibv_pd, ibv_mw_type) -> *mut ibv_mw;
    V34 alloc_null_mr(*mut ibv_pd) -> *mut ibv_mr;
    V34 alloc_parent_domain(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd;
    V34 alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    V34 alloc_td(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td;
    V34 async_event(*mut ibv_context, *mut ibv_async_event);
    V34 attach_counters_point_flow;
    V34 attach_mcast(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    V34 bind_mw(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int;
    V34 close_xrcd;
    V34 cq_event(*mut ibv_cq);
    V34 create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    V65 create_comp_cntr;
    V34 create_counters;
    V34 create_cq(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    V34 create_cq_ex(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
    V34 create_flow;
    V34 create_flow_action_esp;
    V34 create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    V34 create_qp_ex(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
    V34 create_rwq_ind_table;
    V34 create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    V34 create_srq_ex(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
    V34 create_wq;
    V59 dealloc_dmah;
    V34 dealloc_mw(*mut ibv_mw) -> c_int;
    V34 dealloc_pd(*mut ibv_pd) -> c_int;
    V34 dealloc_td(*mut ibv_td) -> c_int;
    V34 dereg_mr(*mut verbs_mr) -> c_int;
    V34 destroy_ah(*mut ibv_ah) -> c_int;
    V65 destroy_comp_cntr;
    V34 destroy_counters;
    V34 destroy_cq(*mut ibv_cq) -> c_int;
    V34 destroy_flow;
    V34 destroy_flow_action;
    V34 destroy_qp(*mut ibv_qp) -> c_int;
    V34 destroy_rwq_ind_table;
    V34 destroy_srq(*mut ibv_srq) -> c_int;
    V34 destroy_wq;
    V34 detach_mcast(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    V62 dm_export_dmabuf_fd;
    V64 free_buf;
    V34 free_context(*mut ibv_context);
    V34 free_dm(*mut ibv_dm) -> c_int;
    V34 get_srq_num;
    V35 import_dm(*mut ibv_context, u32) -> *mut ibv_dm;
    V34 import_mr(*mut ibv_pd, u32) -> *mut ibv_mr;
    V34 import_pd(*mut ibv_context, u32) -> *mut ibv_pd;
    V65 inc_comp_cntr;
    V65 inc_err_comp_cntr;
    V34 modify_cq(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int;
    V34 modify_flow_action_esp;
    V34 modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    V34 modify_qp_rate_limit;
    V34 modify_srq(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
    V34 modify_wq;
    V34 open_qp;
    V34 open_xrcd;
    V34 poll_cq(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
    V34 post_recv(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    V34 post_send(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
    V34 post_srq_ops;
    V34 post_srq_recv(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    V65 qp_attach_comp_cntr;
    V65 query_comp_cntr_caps;
    V34 query_device_ex(*mut ibv_context, *const ibv_query_device_ex_input, *mut ibv_device_attr_ex, usize) -> c_int;
    V34 query_ece(*mut ibv_qp, *mut ibv_ece) -> c_int;
    V34 query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    V62 query_port_speed(*mut ibv_context, u32, *mut u64) -> c_int;
    V34 query_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    V36 query_qp_data_in_order(*mut ibv_qp, ibv_wr_opcode, u32) -> c_int;
    V34 query_rt_values(*mut ibv_context, *mut ibv_values_ex) -> c_int;
    V34 query_srq(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    V65 read_comp_cntr;
    V34 read_counters;
    V65 read_err_comp_cntr;
    V34 reg_dm_mr(*mut ibv_pd, *mut ibv_dm, u64, usize, u32) -> *mut ibv_mr;
    V34 reg_dmabuf_mr(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    V34 reg_mr(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr;
    V59 reg_mr_ex;
    V34 req_notify_cq(*mut ibv_cq, c_int) -> c_int;
    V34 rereg_mr(*mut verbs_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
    V34 resize_cq(*mut ibv_cq, c_int) -> c_int;
    V65 set_comp_cntr;
    V34 set_ece;
    V65 set_err_comp_cntr;
    V35 unimport_dm(*mut ibv_dm);
    V34 unimport_mr(*mut ibv_mr);
    V34 unimport_pd(*mut ibv_pd);
}

impl ContextOps {
    /// A struct without operations.
    pub const fn new(level: Level) -> ContextOps {
        ContextOps {
            level,
            slots: [core::ptr::null(); OPS.len()],
        }
    }

    /// Size of the C struct on `level`, in bytes.
    pub fn size(level: Level) -> usize {
        OPS.iter().filter(|op| op.since <= level).count() * size_of::<*const c_void>()
    }

    /// Offset of an operation in the C struct on `level`, in bytes; `None` if the level does not
    /// have the operation.
    pub fn offset(level: Level, name: &str) -> Option<usize> {
        let index = OPS
            .iter()
            .filter(|op| op.since <= level)
            .position(|op| op.name == name)?;
        Some(index * size_of::<*const c_void>())
    }

    /// Pointer to the struct for `verbs_set_ops`, which copies it.
    pub fn as_ptr(&self) -> *const c_void {
        self.slots.as_ptr().cast()
    }

    fn set(mut self, name: &str, op: *const c_void) -> Self {
        if let Some(slot) = Self::offset(self.level, name)
            .and_then(|offset| self.slots.get_mut(offset / size_of::<*const c_void>()))
        {
            *slot = op;
        }
        self
    }
}
