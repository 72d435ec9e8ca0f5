//! Posting, polling and registering in a process with a race detector, which gets annotations of
//! these operations ([`race_detector`]). In other processes libibverbs gets the unannotated
//! functions directly, so the annotations have no cost there.

use std::ffi::{c_int, c_void};

use urnic_driver::Refusal;
use urnic_rdma_core::*;

use super::cq::Cq;
use super::mr::{Memory, Mr, changed_domain};
use super::pd::Pd;
use super::qp::Qp;
use super::srq::Srq;
use super::{cq, mr, post};
use crate::from_c::{Out, Requests, Room, operations};
use crate::race_detector;

operations! {
    /// The operations, with the annotated functions in the place of the functions that they call.
    pub(super) fn in_place_of;
    post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int =
        self::post_send(qp, wr, bad);
    post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int =
        self::post_recv(qp, wr, bad);
    post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int =
        self::post_srq_recv(srq, wr, bad);
    poll_cq(cq: *mut ibv_cq, count: c_int, wc: *mut ibv_wc) -> c_int = self::poll_cq(cq, (wc, count));
    reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr =
        self::reg_mr(pd, addr, length, iova, access);
    rereg_mr(
        mr: *mut verbs_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, rights: c_int
    ) -> c_int = self::rereg_mr(mr, flags as u32, changed_domain(flags, pd), Memory { addr, length, rights });
}

#[inline(always)]
fn post_send(qp: &Qp, requests: Requests<'_, ibv_send_wr>, bad: Option<Out<'_, *mut ibv_send_wr>>) -> c_int {
    race_detector::handed_over();
    post::post_send(qp, requests, bad)
}

#[inline(always)]
fn post_recv(qp: &Qp, requests: Requests<'_, ibv_recv_wr>, bad: Option<Out<'_, *mut ibv_recv_wr>>) -> c_int {
    race_detector::handed_over();
    post::post_recv(qp, requests, bad)
}

fn post_srq_recv(
    srq: &Srq,
    requests: Requests<'_, ibv_recv_wr>,
    bad: Option<Out<'_, *mut ibv_recv_wr>>,
) -> c_int {
    race_detector::handed_over();
    post::post_srq_recv(srq, requests, bad)
}

#[inline(always)]
pub(super) fn poll_cq(cq: &Cq, room: Room<'_, ibv_wc>) -> c_int {
    let found = cq::poll_cq(cq, room);
    if found > 0 {
        race_detector::taken();
    }
    found
}

pub(super) fn reg_mr(
    pd: &Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: c_int,
) -> Result<Box<Mr>, Refusal> {
    let region = mr::reg_mr(pd, addr, length, iova, flags)?;
    race_detector::registered(addr.addr(), length);
    Ok(region)
}

pub(super) fn rereg_mr(mr: &Mr, flags: u32, pd: Option<&Pd>, new: Memory) -> Result<(), Refusal> {
    mr::rereg_mr(mr, flags, pd, new)?;
    // Without IBV_REREG_MR_CHANGE_TRANSLATION the call has no address.
    if !new.addr.is_null() {
        race_detector::registered(new.addr.addr(), new.length);
    }
    Ok(())
}
