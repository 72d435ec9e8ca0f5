//! Completion queues with the lazy polling interface (`ibv_create_cq_ex(3)`).
//!
//! `start_poll` takes the queue's lock and `end_poll` releases it; between them one completion at a
//! time is current.

use std::ffi::{c_int, c_uint};
use std::ptr;

use rustix::io::Errno;
use urnic_process::queue_lock::Held;
use urnic_rdma_core::*;

use super::completion_ring::{extra, flags, service_level};
use super::cq::{Completions, Cq};
use crate::context::Context;
use crate::guard::{contained, pointer};
use crate::race_detector;

/// Fields of a completion that a program can request. The datagram fields read as 0.
const FIELDS: u64 = IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;

/// `ibv_create_cq_ex(3)`: EOPNOTSUPP for unsupported fields and flags.
pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    pointer(|| {
        // SAFETY: the program's attributes.
        let attr = unsafe { &*attr };
        let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
            attr.flags
        } else {
            0
        };
        if attr.wc_flags & !FIELDS != 0
            || attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
            || flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
        {
            return Err(Errno::OPNOTSUPP);
        }
        let pd = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            attr.parent_domain
        } else {
            ptr::null_mut()
        };
        let timed = attr.wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP != 0;
        // SAFETY: libibverbs gives an open context.
        let context = unsafe { Context::of(context) };
        // SAFETY: the program gives its channel and domain.
        let cq = unsafe { Cq::make(context, attr.cqe, attr.channel, attr.comp_vector, pd, timed)? };
        // SAFETY: no other code has the queue yet; the union is the extended one from here on.
        let ex = unsafe { &mut *(*cq.abi()).cq_ex };
        ex.start_poll = Some(start_poll);
        ex.next_poll = Some(next_poll);
        ex.end_poll = Some(end_poll);
        ex.read_opcode = Some(read_opcode);
        ex.read_vendor_err = Some(read_vendor_err);
        ex.read_byte_len = Some(read_byte_len);
        ex.read_imm_data = Some(read_imm_data);
        ex.read_qp_num = Some(read_qp_num);
        ex.read_src_qp = Some(read_src_qp);
        ex.read_wc_flags = Some(read_wc_flags);
        ex.read_slid = Some(read_nothing);
        ex.read_sl = Some(read_sl);
        ex.read_dlid_path_bits = Some(read_no_byte);
        ex.read_completion_ts = Some(read_completion_ts);
        if race_detector::present() {
            ex.start_poll = Some(observed_start_poll);
            ex.next_poll = Some(observed_next_poll);
        }
        if cq.check.is_some() {
            ex.start_poll = Some(checked_start_poll);
        }
        Ok(cq)
    })
    .cast()
}

unsafe fn of<'a>(cq: *mut ibv_cq_ex) -> &'a Cq {
    // SAFETY: the caller passes a live `ibv_cq_ex` of this provider.
    unsafe { Cq::of(cq.cast()) }
}

/// Makes the oldest completion current; false if there is none.
///
/// # Safety
/// `cq` is the queue of `completions`, and its lock is held.
#[inline]
unsafe fn load(cq: *mut ibv_cq_ex, completions: &mut Held<'_, Completions>) -> bool {
    let Some((cqe, wr_id)) = completions.take() else {
        return false;
    };
    // SAFETY: these fields belong to the holder of the lock.
    unsafe {
        (*cq).wr_id = wr_id;
        (*cq).status = cqe.status.into();
    }
    completions.current = cqe;
    true
}

/// `ibv_start_poll(3)`: ENOENT when there is no completion, EIO in a forked child. After an error
/// the lock is not held.
pub(super) unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the program's attributes.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return Errno::INVAL.raw_os_error();
    }
    // SAFETY: a live queue.
    let queue = unsafe { of(cq) };
    if !queue.created_in.is_current() {
        return Errno::IO.raw_os_error();
    }
    for again in [true, false] {
        let mut completions = queue.completions.hold();
        // SAFETY: the lock of the queue is held.
        if unsafe { load(cq, &mut completions) } {
            completions.keep();
            return 0;
        }
        // Entries of destroyed queue pairs were skipped.
        completions.ring.publish();
        let last = completions.last;
        drop(completions);
        if again {
            contained(|| queue.device.progress(last));
        }
    }
    Errno::NOENT.raw_os_error()
}

/// `ibv_next_poll(3)`: ENOENT when there is no further completion; EIO in a child forked between
/// `start_poll` and this call.
pub(super) unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: a live queue.
    if !unsafe { of(cq) }.created_in.is_current() {
        return Errno::IO.raw_os_error();
    }
    // SAFETY: a live queue, kept locked by `start_poll`.
    unsafe {
        let mut completions = of(cq).completions.resume();
        let found = load(cq, &mut completions);
        // The completion is copied, so its entry is free: requests that a program posts before
        // `end_poll` also complete, and need the space.
        completions.ring.publish();
        completions.keep();
        if found { 0 } else { Errno::NOENT.raw_os_error() }
    }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: a live queue.
    let queue = unsafe { of(cq) };
    if !queue.created_in.is_current() {
        return;
    }
    // SAFETY: `start_poll` kept the queue locked.
    let completions = unsafe { queue.completions.resume() };
    completions.ring.publish();
    let last = completions.last;
    drop(completions);
    if queue.device.has_gathered() {
        contained(|| queue.device.progress(last));
    }
}

macro_rules! readers {
    ($($name:ident -> $ty:ty = |$cqe:ident| $value:expr;)*) => { $(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $ty {
            // SAFETY: a live queue, which `start_poll` kept locked and which stays locked.
            let completions = unsafe { of(cq).completions.resume() };
            let $cqe = &completions.current;
            let value = $value;
            completions.keep();
            value
        }
    )* };
}

readers! {
    read_opcode -> ibv_wc_opcode = |cqe| cqe.opcode.into();
    read_vendor_err -> u32 = |cqe| cqe.vendor_error.get();
    read_byte_len -> u32 = |cqe| cqe.byte_len.get();
    read_imm_data -> u32 = |cqe| extra(cqe);
    read_qp_num -> u32 = |cqe| cqe.label.get();
    read_sl -> u8 = |cqe| service_level(cqe);
    read_src_qp -> u32 = |cqe| cqe.source_qpn.get();
    read_wc_flags -> c_uint = |cqe| flags(cqe);
    read_completion_ts -> u64 = |cqe| cqe.timestamp.get();
}

unsafe extern "C" fn read_nothing(_: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_no_byte(_: *mut ibv_cq_ex) -> u8 {
    0
}

/// [`start_poll`] in a process with a race detector.
unsafe extern "C" fn observed_start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the caller's arguments.
    let status = unsafe { start_poll(cq, attr) };
    if status == 0 {
        race_detector::taken();
    }
    status
}

/// [`next_poll`] in a process with a race detector.
unsafe extern "C" fn observed_next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller's argument.
    let status = unsafe { next_poll(cq) };
    if status == 0 {
        race_detector::taken();
    }
    status
}

/// [`start_poll`] of a queue with a check.
unsafe extern "C" fn checked_start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: a live queue.
    if let Some(check) = unsafe { &of(cq).check } {
        contained(|| check.polled());
    }
    // SAFETY: the caller's arguments.
    unsafe { observed_start_poll(cq, attr) }
}
