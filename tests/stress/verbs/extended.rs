//! Functions of the extended context.

use urnic_rdma_core::*;

/// A member of the extended context, as far before the context proper as `infiniband/verbs.h` has
/// it (all of the members lie at fixed distances from its end).
///
/// # Safety
/// `F` is the member's type.
pub(super) unsafe fn extended<F: Copy>(context: *mut ibv_context, before: usize) -> F {
    // SAFETY: an open context, which is extended since rdma-core 14.
    unsafe { *context.byte_sub(before).cast::<F>() }
}

pub(super) type CreateQpEx = unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
pub(super) const CREATE_QP_EX: usize = 56;
pub(super) type CreateCqEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
pub(super) const CREATE_CQ_EX: usize = 120;
