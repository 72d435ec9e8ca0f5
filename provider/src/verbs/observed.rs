//! Posting, polling and registering in a process with a race detector, which gets annotations of
//! these operations ([`race_detector`]). In other processes libibverbs gets the unannotated
//! functions directly, so the annotations have no cost there.

use std::ffi::{c_int, c_void};

use urnic_rdma_core::{
    ContextOps, ibv_cq, ibv_mr, ibv_pd, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_wc, verbs_mr,
};

use super::{cq, mr, post, srq};
use crate::race_detector;

/// The operations, with the annotated functions in the place of the functions that they call.
pub(super) fn in_place_of(operations: ContextOps) -> ContextOps {
    operations
        .post_send(post_send)
        .post_recv(post_recv)
        .post_srq_recv(post_srq_recv)
        .poll_cq(poll_cq)
        .reg_mr(reg_mr)
        .rereg_mr(rereg_mr)
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    race_detector::handed_over();
    // SAFETY: the caller's arguments.
    unsafe { post::post_send(qp, wr, bad_wr) }
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    race_detector::handed_over();
    // SAFETY: the caller's arguments.
    unsafe { post::post_recv(qp, wr, bad_wr) }
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    race_detector::handed_over();
    // SAFETY: the caller's arguments.
    unsafe { srq::post_srq_recv(srq, wr, bad_wr) }
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's arguments.
    let found = unsafe { cq::poll_cq(cq, num_entries, wc) };
    if found > 0 {
        race_detector::taken();
    }
    found
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's arguments.
    let region = unsafe { mr::reg_mr(pd, addr, length, iova, flags) };
    if !region.is_null() {
        race_detector::registered(addr.addr(), length);
    }
    region
}

pub(super) unsafe extern "C" fn rereg_mr(
    region: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    rights: c_int,
) -> c_int {
    // SAFETY: the caller's arguments.
    let status = unsafe { mr::rereg_mr(region, flags, pd, addr, length, rights) };
    // Without IBV_REREG_MR_CHANGE_TRANSLATION the call has no address.
    if status == 0 && !addr.is_null() {
        race_detector::registered(addr.addr(), length);
    }
    status
}
