//! The verbs: calls of libibverbs, translated to work queue entries, doorbells and driver calls.
//!
//! Posting and polling access only memory shared with the device, ring its doorbell and hold one
//! lock of one queue; they neither allocate nor panic, except for what looks at requests
//! (`ledger.rs`) and for failures. All other verbs call the driver, and return its error as an
//! errno.
//!
//! Objects that libibverbs holds pointers to ([`cq::Cq`], [`qp::Qp`], …) begin with libibverbs'
//! structure and are boxed; the program's pointer is the box. Locks: only the lock of a queue, one
//! at a time, and none while the device works or the driver is called. The lock of a region is held
//! while the driver works on the region, and is taken before the locks of handles and of places on
//! demand.

use urnic_rdma_core::{ContextOps, Level};

use crate::{race_detector, strict};

mod ah;
mod building;
mod checked;
mod completion_ring;
mod cq;
mod cq_ex;
mod device;
mod dm;
mod events;
mod faulted;
mod gated_sends;
mod held_memory;
mod ledger;
mod mr;
mod multicast;
mod mw;
mod observed;
mod parent_domain;
mod pd;
mod polled;
mod post;
mod qp;
mod qp_attr;
mod qp_ex;
mod receive_queue;
mod refusal;
mod reported;
#[cfg(test)]
mod ring_tests;
mod send_entry;
mod send_queue;
mod shared_with_c;
mod srq;
mod unaligned;

pub(crate) use events::Events;

/// The operations of a context. Operations that are not in the table return EOPNOTSUPP.
pub(crate) fn operations(level: Level) -> ContextOps {
    let operations = all(level);
    let operations = match race_detector::present() {
        false => operations,
        true => observed::in_place_of(operations),
    };
    match strict::current() {
        None => operations,
        Some(_) => checked::in_place_of(operations),
    }
}

fn all(level: Level) -> ContextOps {
    ContextOps::new(level)
        .query_device_ex(device::query_device_ex)
        .query_port(device::query_port)
        .query_port_speed(device::query_port_speed)
        .alloc_pd(pd::alloc_pd)
        .dealloc_pd(pd::dealloc_pd)
        .import_pd(pd::import_pd)
        .unimport_pd(pd::unimport_pd)
        .create_ah(ah::create_ah)
        .attach_mcast(multicast::attach_mcast)
        .detach_mcast(multicast::detach_mcast)
        .destroy_ah(ah::destroy_ah)
        .reg_mr(mr::reg_mr)
        .dereg_mr(mr::dereg_mr)
        .rereg_mr(mr::rereg_mr)
        .advise_mr(mr::advise_mr)
        .alloc_null_mr(mr::alloc_null_mr)
        .import_mr(mr::import_mr)
        .unimport_mr(mr::unimport_mr)
        .alloc_mw(mw::alloc_mw)
        .dealloc_mw(mw::dealloc_mw)
        .bind_mw(mw::bind_mw)
        .alloc_dm(dm::alloc_dm)
        .free_dm(dm::free_dm)
        .reg_dm_mr(dm::reg_dm_mr)
        .reg_dmabuf_mr(mr::reg_dmabuf_mr)
        .import_dm(dm::import_dm)
        .unimport_dm(dm::unimport_dm)
        .alloc_td(pd::alloc_td)
        .dealloc_td(pd::dealloc_td)
        .alloc_parent_domain(pd::alloc_parent_domain)
        .create_srq(srq::create_srq)
        .create_srq_ex(srq::create_srq_ex)
        .modify_srq(srq::modify_srq)
        .query_srq(srq::query_srq)
        .destroy_srq(srq::destroy_srq)
        .post_srq_recv(srq::post_srq_recv)
        .create_cq(cq::create_cq)
        .create_cq_ex(cq_ex::create_cq_ex)
        .resize_cq(cq::resize_cq)
        .modify_cq(cq::modify_cq)
        .destroy_cq(cq::destroy_cq)
        .poll_cq(cq::poll_cq)
        .req_notify_cq(cq::req_notify_cq)
        .create_qp(qp::create_qp)
        .create_qp_ex(qp_ex::create_qp_ex)
        .modify_qp(qp::modify_qp)
        .query_qp(qp::query_qp)
        .destroy_qp(qp::destroy_qp)
        .post_send(post::post_send)
        .post_recv(post::post_recv)
}
