//! The verbs: calls of libibverbs, translated to work queue entries, doorbells and driver calls.
//!
//! Posting and polling access only memory shared with the device, ring its doorbell and hold one
//! lock of one queue; they neither allocate nor panic, except for observers of requests
//! (`ledger.rs`) and for failures. All other verbs call the driver, and return its error as an
//! errno.
//!
//! The verbs are safe functions; [`from_c`](crate::from_c) turns what C gives them into safe types.
//!
//! Objects that libibverbs holds pointers to ([`cq::Cq`], [`qp::Qp`], …) begin with libibverbs'
//! structure and are boxed; the program's pointer is the box. Locks: only the lock of a queue, one
//! at a time, and none while the device works or the driver is called. The lock of a region is held
//! while the driver works on the region, and is taken before the locks of handles and of places on
//! demand.

use std::ffi::{c_int, c_void};

use urnic_rdma_core::*;

use crate::{race_detector, strict};

mod ah;
mod checked;
mod cq;
mod cq_ex;
mod device;
mod dm;
mod events;
mod faulted;
mod gated_sends;
mod ledger;
mod mr;
mod mw;
mod observed;
mod pd;
mod post;
mod qp;
mod qp_ex;
mod receive_queue;
mod reported;
#[cfg(test)]
mod ring_tests;
mod send_queue;
mod srq;
mod work_completion;

pub(crate) use events::Events;

/// The operations of a context. Operations that are not in the table return EOPNOTSUPP.
pub(crate) fn operations(level: Level) -> ContextOps {
    let operations = all(ContextOps::new(level));
    let operations = match race_detector::present() {
        false => operations,
        true => observed::in_place_of(operations),
    };
    match strict::current() {
        None => operations,
        Some(_) => checked::in_place_of(operations),
    }
}

crate::from_c::operations! {
    fn all;
    query_device_ex(
        context: *mut ibv_context, input: *const ibv_query_device_ex_input, attr: *mut ibv_device_attr_ex,
        size: usize
    ) -> c_int = device::query_device_ex(context, input, (attr.cast::<c_void>(), size));
    query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int =
        device::query_port(context, port, attr);
    query_port_speed(context: *mut ibv_context, port: u32, speed: *mut u64) -> c_int =
        device::query_port_speed(port, speed);
    alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = pd::alloc_pd(context);
    dealloc_pd(pd: *mut ibv_pd) -> c_int = pd::dealloc_pd(pd);
    import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd = pd::import_pd(context, handle);
    unimport_pd(pd: *mut ibv_pd) = pd::unimport_pd(pd);
    create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah = ah::create_ah(pd, attr);
    destroy_ah(ah: *mut ibv_ah) -> c_int = ah::destroy_ah(ah);
    attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int = qp::attach_mcast(qp, gid);
    detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int = qp::detach_mcast(qp, gid);
    reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr =
        mr::reg_mr(pd, addr, length, iova, access);
    dereg_mr(mr: *mut verbs_mr) -> c_int = mr::dereg_mr(mr);
    rereg_mr(
        mr: *mut verbs_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, rights: c_int
    ) -> c_int = mr::rereg_mr(
        mr, flags as u32, mr::changed_domain(flags, pd), mr::Memory { addr, length, rights }
    );
    advise_mr(pd: *mut ibv_pd, advice: c_int, flags: u32, elements: *mut ibv_sge, count: u32) -> c_int =
        mr::advise_mr(
            pd, advice, flags, (elements.cast_const(), if elements.is_null() { 0 } else { count as usize })
        );
    alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr = mr::alloc_null_mr(pd);
    reg_dmabuf_mr(
        pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int
    ) -> *mut ibv_mr = mr::reg_dmabuf_mr(pd, offset, length, iova, fd, access);
    import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr = mr::import_mr(pd, handle);
    unimport_mr(mr: *mut ibv_mr) = mr::unimport_mr(mr);
    alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw = mw::alloc_mw(pd, kind);
    dealloc_mw(mw: *mut ibv_mw) -> c_int = mw::dealloc_mw(mw);
    bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int = mw::bind_mw(qp, mw, bind);
    alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm =
        dm::alloc_dm(context, attr);
    free_dm(dm: *mut ibv_dm) -> c_int = dm::free_dm(dm);
    reg_dm_mr(pd: *mut ibv_pd, dm: *mut ibv_dm, offset: u64, length: usize, access: u32) -> *mut ibv_mr =
        dm::reg_dm_mr(pd, dm, offset, length, access);
    import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm = dm::import_dm(context, handle);
    unimport_dm(dm: *mut ibv_dm) = dm::unimport_dm(dm);
    alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td =
        pd::alloc_td(context, attr);
    dealloc_td(td: *mut ibv_td) -> c_int = pd::dealloc_td(td);
    alloc_parent_domain(context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd =
        pd::alloc_parent_domain(context, attr);
    create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq = srq::create_srq(pd, attr);
    create_srq_ex(context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq =
        srq::create_srq_ex(attr);
    modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int =
        srq::modify_srq(srq, attr, mask);
    query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int = srq::query_srq(srq, attr);
    destroy_srq(srq: *mut ibv_srq) -> c_int = srq::destroy_srq(srq);
    post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int =
        post::post_srq_recv(srq, wr, bad);
    create_cq(
        context: *mut ibv_context, cqe: c_int, channel: *mut ibv_comp_channel, vector: c_int
    ) -> *mut ibv_cq = cq::create_cq(context, cqe, channel, vector);
    create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex =
        cq_ex::create_cq_ex(context, attr);
    resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int = cq::resize_cq(cq, cqe);
    modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int = cq::modify_cq(cq, attr);
    destroy_cq(cq: *mut ibv_cq) -> c_int = cq::destroy_cq(cq);
    poll_cq(cq: *mut ibv_cq, count: c_int, wc: *mut ibv_wc) -> c_int = cq::poll_cq(cq, (wc, count));
    req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int = cq::req_notify_cq(cq, solicited_only);
    create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp = qp::create_qp(pd, attr);
    create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp =
        qp_ex::create_qp_ex(context, attr);
    modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int = qp::modify_qp(qp, attr, mask);
    query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int =
        qp::query_qp(qp, attr, init);
    destroy_qp(qp: *mut ibv_qp) -> c_int = qp::destroy_qp(qp);
    post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int =
        post::post_send(qp, wr, bad);
    post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int =
        post::post_recv(qp, wr, bad);
}
