//! Queue pairs with the work-request builder interface (`ibv_create_qp_ex(3)`, `ibv_wr_start(3)`).
//!
//! `wr_start` takes the send queue's lock; `wr_complete` or `wr_abort` releases it. Between them
//! each `wr_*` call begins an entry and each `wr_set_*` call adds its operands. The first error is
//! recorded, and makes `wr_complete` discard all entries. In a forked child all of these calls do
//! nothing, and `wr_complete` returns EIO.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;
use urnic_device::wqe::Opcode;
use urnic_process::queue_lock::Held;
use urnic_rdma_core::*;
use zerocopy::Unalign;

use super::ah::Ah;
use super::building::Building;
use super::gated_sends::SendSide;
use super::post::{report_refusal, takes_sends};
use super::qp::Qp;
use super::send_queue::{Entry, SendQueue};
use super::unaligned::elements;
use crate::context::Context;
use crate::guard::{contained, pointer};
use crate::race_detector;

/// Operations that the builder supports.
const OPERATIONS: u64 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_SEND_WITH_INV;

/// Operations of the builder that only queue pairs of kind RC have.
const OF_RELIABLE: u64 = IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_SEND_WITH_INV;

/// `ibv_create_qp_ex(3)`: EOPNOTSUPP for a type that the device does not have, and for creation
/// flags.
pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    pointer(|| {
        // SAFETY: the program's attributes.
        let attr = unsafe { &mut *attr };
        let given = |bit: u32| attr.comp_mask & bit != 0;
        let builds = given(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
        let plain = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        if attr.comp_mask & !plain != 0
            || given(IBV_QP_INIT_ATTR_CREATE_FLAGS) && attr.create_flags != 0
            || builds && attr.send_ops_flags & !OPERATIONS != 0
            || builds && attr.qp_type != IBV_QPT_RC && attr.send_ops_flags & OF_RELIABLE != 0
        {
            return Err(Errno::OPNOTSUPP);
        }
        if !given(IBV_QP_INIT_ATTR_PD) || attr.pd.is_null() {
            return Err(Errno::INVAL);
        }
        let mut basic = ibv_qp_init_attr {
            qp_context: attr.qp_context,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            srq: attr.srq,
            cap: attr.cap,
            qp_type: attr.qp_type,
            sq_sig_all: attr.sq_sig_all,
        };
        // SAFETY: libibverbs gives an open context.
        let release = unsafe { Context::of(context) }.release();
        // The position of the builder flag is unknown for a release that is unknown.
        if builds && release.is_none() {
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: the program's domain and queues.
        let qp = unsafe { Qp::make(attr.pd, &mut basic)? };
        attr.cap = basic.cap;
        if builds && let Some(release) = release {
            // SAFETY: no other code has the queue pair yet.
            offer_builder(unsafe { &mut *qp.abi() }, release);
            if race_detector::present() {
                // SAFETY: no other code has the queue pair yet, and the builder is there.
                unsafe { (*(*qp.abi()).qp.qp_ex).wr_complete = Some(observed_wr_complete) };
            }
        }
        Ok(qp)
    })
    .cast()
}

/// Sets the builder's functions, and the flag that announces them, at the place where the given
/// rdma-core release reads the flag.
///
/// `wr_atomic_write` and `wr_flush` stay null: some releases do not have them, and have `comp_mask`
/// in their place.
fn offer_builder(abi: &mut verbs_qp, release: u32) {
    // SAFETY: the union is the extended variant from here on, which begins like the other variant.
    let qp = unsafe { &mut *abi.qp.qp_ex };
    qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    qp.wr_bind_mw = Some(wr_bind_mw);
    qp.wr_local_inv = Some(wr_local_inv);
    qp.wr_rdma_read = Some(wr_rdma_read);
    qp.wr_rdma_write = Some(wr_rdma_write);
    qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    qp.wr_send = Some(wr_send);
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_send_imm = Some(wr_send_imm);
    qp.wr_send_inv = Some(wr_send_inv);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    let offset = qp_comp_mask_offset(release);
    // SAFETY: `verbs_qp` is as large as that of the newest release, and the offset is a multiple of
    // 4.
    unsafe { *(&raw mut *abi).byte_add(offset).cast::<u32>() |= VERBS_QP_EX };
}

/// Runs `act` on the send queue and the builder of a queue pair whose send queue is locked by this
/// builder.
///
/// # Safety
/// `qp` is live, and between `wr_start` and its end.
/// `qp` is live, and between `wr_start` and its end.
unsafe fn with(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut SendQueue, &mut Building)) {
    // SAFETY: the caller promises a live queue pair.
    let qp = unsafe { Qp::of(qp.cast()) };
    if !qp.created_in.is_current() {
        return;
    }
    // SAFETY: the caller promises that `wr_start` locked the queue and that this lock is still
    // held.
    let mut side = unsafe { qp.sends.side.resume() };
    let side_ = &mut *side;
    act(&mut side_.queue, &mut side_.building);
    side.keep();
}

/// Begins an entry, with the flags and id that the program stored in the queue pair.
///
/// # Safety
/// The conditions of [`with`].
unsafe fn begin(qp: *mut ibv_qp_ex, opcode: Opcode, fill: impl FnOnce(&mut SendQueue, &mut Entry)) {
    // SAFETY: the caller promises a live queue pair between `wr_start` and its end; the two fields
    // are the program's, set before each entry.
    unsafe {
        // Only `wr_set_inline_data` makes an entry inline.
        let (flags, wr_id) = ((*qp).wr_flags & !IBV_SEND_INLINE, (*qp).wr_id);
        with(qp, |queue, building| {
            building.begin(queue, opcode, flags, wr_id, fill)
        });
    }
}

/// Sets the operands of the entry, replacing earlier operands.
///
/// # Safety
/// The conditions of [`with`].
unsafe fn set(qp: *mut ibv_qp_ex, put: impl FnOnce(&mut SendQueue, &mut Entry) -> Result<(), Errno>) {
    // SAFETY: the caller promises a live queue pair between `wr_start` and its end.
    unsafe {
        with(qp, |queue, building| {
            let outcome = match &mut building.entry {
                Some(entry) => {
                    entry.clear_data();
                    put(queue, entry)
                }
                // After an error, or without a begun operation.
                None => Err(Errno::INVAL),
            };
            if let Err(errno) = outcome {
                building.fail(errno);
            }
        });
    }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: a live queue pair.
    let this = unsafe { Qp::of(qp.cast()) };
    if !this.created_in.is_current() {
        return;
    }
    let mut side = this.sends.side.hold();
    side.building = Building {
        mark: side.queue.mark(),
        ..Building::default()
    };
    side.keep();
}

pub(super) unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: a live queue pair.
    let this = unsafe { Qp::of(qp.cast()) };
    if !this.created_in.is_current() {
        return Errno::IO.raw_os_error();
    }
    // SAFETY: `wr_start` kept the queue locked.
    let mut side = unsafe { this.sends.side.resume() };
    let side_ = &mut *side;
    side_.building.finish(&mut side_.queue);
    if !takes_sends(this.device.last_state()) {
        side_.building.fail(Errno::INVAL);
    }
    let error = side_.building.error;
    if let Some(errno) = error {
        side_.queue.rewind(side_.building.mark);
        report_refusal(this, errno, || {
            let state = this.device.last_state().verbs_name();
            format!("ibv_wr_complete refused the requests since ibv_wr_start, in state {state}: {errno}")
        });
    }
    finish(this, side);
    error.map_or(0, Errno::raw_os_error)
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: a live queue pair.
    let this = unsafe { Qp::of(qp.cast()) };
    if !this.created_in.is_current() {
        return;
    }
    // SAFETY: `wr_start` kept the queue locked.
    let mut side = unsafe { this.sends.side.resume() };
    let mark = side.building.mark;
    side.queue.rewind(mark);
    finish(this, side);
}

/// Ends the sequence that `wr_start` began: sends posted before it may have waited for the end.
/// The queue pair may be destroyed before this returns.
#[inline]
fn finish(qp: &Qp, side: Held<'_, SendSide>) {
    let driver = qp.driver;
    if let Some(doorbell) = qp.sends.release_queue(&qp.device, side) {
        contained(|| driver.ring(doorbell));
    }
}

macro_rules! builders {
    ($($name:ident($qp:ident $(, $arg:ident: $ty:ty)*) $body:expr;)*) => { $(
        unsafe extern "C" fn $name($qp: *mut ibv_qp_ex $(, $arg: $ty)*) {
            // SAFETY: libibverbs' contract: called between `wr_start` and its end, by the thread
            // that called that, with arguments that can be read.
            unsafe { $body }
        }
    )* };
}

builders! {
    wr_send(qp) begin(qp, Opcode::Send, |_, _| {});
    wr_send_imm(qp, imm: u32) begin(qp, Opcode::SendImm, |_, e| e.header.immediate = imm.to_ne_bytes());
    wr_send_inv(qp, rkey: u32) begin(qp, Opcode::SendInv, |_, e| e.header.stag = rkey.into());
    wr_rdma_write(qp, rkey: u32, addr: u64) begin(qp, Opcode::Write, |_, e| e.set_remote(rkey, addr));
    wr_rdma_write_imm(qp, rkey: u32, addr: u64, imm: u32) begin(qp, Opcode::WriteImm, |_, e| {
        e.set_remote(rkey, addr);
        e.header.immediate = imm.to_ne_bytes();
    });
    wr_rdma_read(qp, rkey: u32, addr: u64) begin(qp, Opcode::Read, |_, e| e.set_remote(rkey, addr));
    wr_atomic_cmp_swp(qp, rkey: u32, addr: u64, compare: u64, swap: u64) begin(qp, Opcode::CompareSwap, |q, e| {
        e.set_remote(rkey, addr);
        q.put_atomic(e, compare, swap);
    });
    wr_atomic_fetch_add(qp, rkey: u32, addr: u64, add: u64) begin(qp, Opcode::FetchAdd, |q, e| {
        e.set_remote(rkey, addr);
        q.put_atomic(e, add, 0);
    });
    wr_local_inv(qp, rkey: u32) begin(qp, Opcode::LocalInv, |_, e| e.header.stag = rkey.into());
    // The new key, `rkey`, identifies the window.
    wr_bind_mw(qp, _mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) begin(qp, Opcode::BindMw, |q, e| {
        q.put_bind(e, rkey, &info.read_unaligned());
    });
    wr_set_sge(qp, lkey: u32, addr: u64, length: u32) {
        set(qp, |q, e| q.set_list(e, &[Unalign::new(ibv_sge { addr, length, lkey })]))
    };
    wr_set_ud_addr(qp, ah: *mut ibv_ah, qpn: u32, qkey: u32) with(qp, |queue, building| {
        if let Some(entry) = &mut building.entry {
            queue.put_address(entry, Ah::of(ah).destination.address(qpn, qkey));
        }
    });
    wr_set_sge_list(qp, count: usize, list: *const ibv_sge) set(qp, |q, e| q.set_list(e, elements(list, count)));
    wr_set_inline_data(qp, addr: *mut c_void, length: usize) {
        set(qp, |q, e| q.set_inline(e, addr.cast(), length))
    };
    wr_set_inline_data_list(qp, count: usize, list: *const ibv_data_buf) set(qp, |q, e| {
        elements(list, count)
            .iter()
            .map(Unalign::get)
            .try_for_each(|buf| q.set_inline(e, buf.addr.cast(), buf.length))
    });
}

/// [`wr_complete`] in a process with a race detector.
unsafe extern "C" fn observed_wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    race_detector::handed_over();
    // SAFETY: the caller's argument.
    unsafe { wr_complete(qp) }
}
