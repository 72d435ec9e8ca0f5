//! Queue pairs with the work-request builder interface (`ibv_create_qp_ex(3)`, `ibv_wr_start(3)`).
//!
//! `wr_start` takes the send queue's lock; `wr_complete` or `wr_abort` releases it. Between them
//! each `wr_*` call begins an entry and each `wr_set_*` call adds its operands. The first error is
//! recorded, and makes `wr_complete` discard all entries. In a forked child all of these calls do
//! nothing, and `wr_complete` returns EIO.

use std::ffi::{c_int, c_uint, c_void};

use rustix::io::Errno;
use urnic_device::wqe::Opcode;
use urnic_driver::{Reason, Refusal};
use urnic_process::queue_lock::Held;
use urnic_rdma_core::*;
use zerocopy::Unalign;

use super::ah::Ah;
use super::gated_sends::{Building, SendSide};
use super::post::{refused, report, takes_sends};
use super::qp::{Parents, Qp};
use super::send_queue::{Entry, SendQueue};
use crate::context::OpenContext;
use crate::from_c::{Bind, Data, FromC, Given, Pieces, functions, key_of};
use crate::guard::contained;
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
/// flags, except the one of UD that blocks its own multicast.
pub(super) fn create_qp_ex(
    context: OpenContext,
    mut attr: Given<'_, ibv_qp_init_attr_ex>,
) -> Result<Box<Qp>, Refusal> {
    let given = |bit: u32| attr.comp_mask & bit != 0;
    let builds = given(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
    let unsupported = Refusal::from(Errno::OPNOTSUPP);
    let plain = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let flags = match given(IBV_QP_INIT_ATTR_CREATE_FLAGS) {
        true => attr.create_flags,
        false => 0,
    };
    let known_flags = match attr.qp_type {
        IBV_QPT_UD => IBV_QP_CREATE_BLOCK_SELF_MCAST_LB,
        _ => 0,
    };
    if attr.comp_mask & !plain != 0
        || flags & !known_flags != 0
        || builds && attr.send_ops_flags & !OPERATIONS != 0
        || builds && attr.qp_type != IBV_QPT_RC && attr.send_ops_flags & OF_RELIABLE != 0
    {
        return Err(unsupported);
    }
    let parents = Parents {
        pd: attr.pd().ok_or(Reason::Null("pd").invalid())?,
        send_cq: attr.send_cq(),
        recv_cq: attr.recv_cq(),
        srq: attr.srq(),
        blocks_own_multicast: flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0,
    };
    let mut basic = ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    };
    let release = context.release();
    // The position of the builder flag is unknown for a release that is unknown.
    if builds && release.is_none() {
        return Err(unsupported);
    }
    let mut qp = Qp::make(&parents, &mut basic)?;
    attr.cap = basic.cap;
    if builds && let Some(release) = release {
        offer_builder(qp.abi.get_mut(), release);
    }
    Ok(qp)
}

/// Sets the builder's functions, and the flag that announces them, at the place where the given
/// rdma-core release reads the flag.
///
/// `wr_atomic_write` and `wr_flush` stay null: some releases do not have them, and have `comp_mask`
/// in their place.
fn offer_builder(abi: &mut verbs_qp, release: u32) {
    // SAFETY: the union is the extended variant from here on, which begins like the other variant.
    let qp = unsafe { &mut *abi.qp.qp_ex };
    set_builder(qp);
    if race_detector::present() {
        set_observed_builder(qp);
    }
    let offset = qp_comp_mask_offset(release);
    // SAFETY: `verbs_qp` is as large as that of the newest release, and the offset is a multiple of
    // 4.
    unsafe { *(&raw mut *abi).byte_add(offset).cast::<u32>() |= VERBS_QP_EX };
}

functions! {
    fn set_builder(ibv_qp_ex);
    wr_start(qp: *mut ibv_qp_ex) = self::wr_start(qp);
    wr_complete(qp: *mut ibv_qp_ex) -> c_int = self::wr_complete(qp);
    wr_abort(qp: *mut ibv_qp_ex) = self::wr_abort(qp);
    wr_send(qp: *mut ibv_qp_ex) = self::wr_send(qp);
    wr_send_imm(qp: *mut ibv_qp_ex, imm: u32) = self::wr_send_imm(qp, imm);
    wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) = self::wr_send_inv(qp, rkey);
    wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64) = self::wr_rdma_write(qp, rkey, addr);
    wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, imm: u32) =
        self::wr_rdma_write_imm(qp, rkey, addr, imm);
    wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, addr: u64) = self::wr_rdma_read(qp, rkey, addr);
    wr_atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, compare: u64, swap: u64) =
        self::wr_atomic_cmp_swp(qp, rkey, addr, compare, swap);
    wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, add: u64) =
        self::wr_atomic_fetch_add(qp, rkey, addr, add);
    wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) = self::wr_local_inv(qp, rkey);
    wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) =
        self::wr_bind_mw(qp, mw, rkey, info);
    wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) =
        self::wr_set_sge(qp, lkey, addr, length);
    wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) =
        self::wr_set_sge_list(qp, (list, count));
    wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) =
        self::wr_set_ud_addr(qp, ah, qpn, qkey);
    wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) =
        self::wr_set_inline_data(qp, (addr.cast_const(), length));
    wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) =
        self::wr_set_inline_data_list(qp, (list, count));
}

functions! {
    fn set_observed_builder(ibv_qp_ex);
    wr_complete(qp: *mut ibv_qp_ex) -> c_int = self::observed_wr_complete(qp);
}

/// A queue pair in whose send queue this thread builds requests, or is about to.
struct Builder<'a> {
    qp: &'a Qp,
    /// The id and the flags of the next request.
    wr_id: u64,
    flags: c_uint,
}

/// A live queue pair with the builder, and in all functions but `wr_start` one whose send queue
/// `wr_start` has locked for this thread.
impl<'a> FromC<*mut ibv_qp_ex> for Builder<'a> {
    #[inline(always)]
    unsafe fn from_c(given: *mut ibv_qp_ex) -> Builder<'a> {
        // SAFETY: the caller promises a live queue pair; the two fields are the program's, which
        // sets them before each entry.
        unsafe {
            Builder {
                qp: FromC::from_c(given),
                wr_id: (*given).wr_id,
                flags: (*given).wr_flags,
            }
        }
    }
}

impl<'a> Builder<'a> {
    /// The send queue, whose lock was kept; `None` in a forked child.
    fn resume(&self) -> Option<Held<'a, SendSide>> {
        // SAFETY: the promise of this type.
        let resume = || unsafe { self.qp.sends.side.resume() };
        self.qp.created_in.is_current().then(resume)
    }

    /// Runs `act` on the send queue and the builder.
    fn with(&self, act: impl FnOnce(&mut SendQueue, &mut Building)) {
        let Some(mut side) = self.resume() else { return };
        let SendSide { queue, building } = &mut *side;
        act(queue, building);
        side.keep();
    }

    /// Begins an entry, with the flags and id that the program stored in the queue pair.
    fn begin(&self, opcode: Opcode, fill: impl FnOnce(&mut SendQueue, &mut Entry)) {
        // Only `wr_set_inline_data` makes an entry inline.
        let flags = self.flags & !IBV_SEND_INLINE;
        self.with(|queue, building| building.begin(queue, opcode, flags, self.wr_id, fill));
    }

    /// Sets the operands of the entry, replacing earlier operands.
    fn set(&self, put: impl FnOnce(&mut SendQueue, &mut Entry) -> Result<(), Errno>) {
        self.with(|queue, building| {
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

    /// Ends the sequence that `wr_start` began: sends posted before it may have waited for the end.
    /// The queue pair may be destroyed before this returns.
    #[inline]
    fn finish(&self, side: Held<'_, SendSide>) {
        let driver = self.qp.driver;
        if let Some(doorbell) = self.qp.sends.release_queue(&self.qp.device, side) {
            contained(|| driver.ring(doorbell));
        }
    }
}

fn wr_start(to: Builder<'_>) {
    if !to.qp.created_in.is_current() {
        return;
    }
    let mut side = to.qp.sends.side.hold();
    side.building = Building {
        mark: side.queue.mark(),
        ..Building::default()
    };
    side.keep();
}

fn wr_complete(to: Builder<'_>) -> c_int {
    let Some(mut side) = to.resume() else {
        return Errno::IO.raw_os_error();
    };
    let SendSide { queue, building } = &mut *side;
    building.finish(queue);
    if !takes_sends(to.qp.device.last_state()) {
        building.fail(Errno::INVAL);
    }
    let error = building.error;
    let mut refusal = None;
    if let Some(errno) = error {
        queue.rewind(building.mark);
        refusal = refused(to.qp, "wr_complete", errno, || match to.qp.device.last_state() {
            state if !takes_sends(state) => Reason::PostsNothing(state),
            _ => Reason::Rule(
                "a request since ibv_wr_start is not one of the queue pair's, or exceeds max_send_sge or max_inline_data",
            ),
        });
    }
    to.finish(side);
    let Some(errno) = error else { return 0 };
    report("wr_complete", refusal);
    errno.raw_os_error()
}

fn wr_abort(to: Builder<'_>) {
    let Some(mut side) = to.resume() else { return };
    let mark = side.building.mark;
    side.queue.rewind(mark);
    to.finish(side);
}

/// [`wr_complete`] in a process with a race detector.
fn observed_wr_complete(to: Builder<'_>) -> c_int {
    race_detector::handed_over();
    wr_complete(to)
}

fn wr_send(to: Builder<'_>) {
    to.begin(Opcode::Send, |_, _| {});
}

fn wr_send_imm(to: Builder<'_>, imm: u32) {
    to.begin(Opcode::SendImm, |_, e| e.header.immediate = imm.to_ne_bytes());
}

fn wr_send_inv(to: Builder<'_>, rkey: u32) {
    to.begin(Opcode::SendInv, |_, e| e.header.stag = rkey.into());
}

fn wr_rdma_write(to: Builder<'_>, rkey: u32, addr: u64) {
    to.begin(Opcode::Write, |_, e| e.set_remote(rkey, addr));
}

fn wr_rdma_write_imm(to: Builder<'_>, rkey: u32, addr: u64, imm: u32) {
    to.begin(Opcode::WriteImm, |_, e| {
        e.set_remote(rkey, addr);
        e.header.immediate = imm.to_ne_bytes();
    });
}

fn wr_rdma_read(to: Builder<'_>, rkey: u32, addr: u64) {
    to.begin(Opcode::Read, |_, e| e.set_remote(rkey, addr));
}

fn wr_atomic_cmp_swp(to: Builder<'_>, rkey: u32, addr: u64, compare: u64, swap: u64) {
    to.begin(Opcode::CompareSwap, |q, e| {
        e.set_remote(rkey, addr);
        q.put_atomic(e, compare, swap);
    });
}

fn wr_atomic_fetch_add(to: Builder<'_>, rkey: u32, addr: u64, add: u64) {
    to.begin(Opcode::FetchAdd, |q, e| {
        e.set_remote(rkey, addr);
        q.put_atomic(e, add, 0);
    });
}

fn wr_local_inv(to: Builder<'_>, rkey: u32) {
    to.begin(Opcode::LocalInv, |_, e| e.header.stag = rkey.into());
}

fn wr_bind_mw(to: Builder<'_>, window: Option<&ibv_mw>, rkey: u32, memory: Bind) {
    let Some(window) = window else {
        return to.with(|_, building| building.fail(Errno::INVAL));
    };
    let key = key_of(window.rkey, rkey);
    to.begin(Opcode::BindMw, |q, e| q.put_bind(e, key, memory));
}

fn wr_set_sge(to: Builder<'_>, lkey: u32, addr: u64, length: u32) {
    to.set(|q, e| q.set_list(e, &[Unalign::new(ibv_sge { addr, length, lkey })]));
}

fn wr_set_sge_list(to: Builder<'_>, list: &[Unalign<ibv_sge>]) {
    to.set(|q, e| q.set_list(e, list));
}

fn wr_set_ud_addr(to: Builder<'_>, ah: &Ah, qpn: u32, qkey: u32) {
    to.with(|queue, building| {
        if let Some(entry) = &mut building.entry {
            queue.put_address(entry, ah.destination.address(qpn, qkey));
        }
    });
}

fn wr_set_inline_data(to: Builder<'_>, data: Data<'_>) {
    to.set(|q, e| q.set_inline(e, data));
}

fn wr_set_inline_data_list(to: Builder<'_>, pieces: Pieces<'_>) {
    to.set(|q, e| pieces.iter().try_for_each(|piece| q.set_inline(e, piece)));
}
