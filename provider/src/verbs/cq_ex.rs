//! Completion queues with the lazy polling interface (`ibv_create_cq_ex(3)`).
//!
//! `start_poll` takes the queue's lock and `end_poll` releases it; between them one completion at a
//! time is current.

use std::ffi::{c_int, c_uint};

use rustix::io::Errno;
use urnic_device::cqe::Cqe;
use urnic_driver::Refusal;
use urnic_process::queue_lock::Held;
use urnic_rdma_core::*;

use super::cq::{Completions, Cq};
use super::pd::Pd;
use super::work_completion::{extra, flags, service_level};
use crate::context::OpenContext;
use crate::from_c::{FromC, Given, functions, pointers};
use crate::guard::contained;
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

pointers! {
    ibv_cq_init_attr_ex {
        channel: ibv_comp_channel;
        parent_domain: Pd, if IBV_CQ_INIT_ATTR_MASK_PD;
    }
}

/// `ibv_create_cq_ex(3)`: EOPNOTSUPP for unsupported fields and flags.
pub(super) fn create_cq_ex(
    context: OpenContext,
    attr: Given<'_, ibv_cq_init_attr_ex>,
) -> Result<Box<Cq>, Refusal> {
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
        attr.flags
    } else {
        0
    };
    if attr.wc_flags & !FIELDS != 0
        || attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
        || flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
    {
        return Err(Errno::OPNOTSUPP.into());
    }
    let timed = attr.wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP != 0;
    let mut cq = Cq::make(
        &context,
        attr.cqe,
        attr.channel(),
        attr.comp_vector,
        attr.parent_domain(),
        timed,
    )?;
    let is_checked = cq.check.is_some();
    // SAFETY: the union is the extended variant from here on, which begins like the other variant.
    let ex = unsafe { &mut *cq.abi.get_mut().cq_ex };
    offer_polling(ex);
    if race_detector::present() {
        offer_observed_polling(ex);
    }
    if is_checked {
        offer_checked_polling(ex);
    }
    Ok(cq)
}

functions! {
    fn offer_polling(ibv_cq_ex);
    start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int = self::start_poll(cq, attr);
    next_poll(cq: *mut ibv_cq_ex) -> c_int = self::next_poll(cq);
    end_poll(cq: *mut ibv_cq_ex) = self::end_poll(cq);
    read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode = self::read_opcode(cq);
    read_vendor_err(cq: *mut ibv_cq_ex) -> u32 = self::read_vendor_err(cq);
    read_byte_len(cq: *mut ibv_cq_ex) -> u32 = self::read_byte_len(cq);
    read_imm_data(cq: *mut ibv_cq_ex) -> u32 = self::read_imm_data(cq);
    read_qp_num(cq: *mut ibv_cq_ex) -> u32 = self::read_qp_num(cq);
    read_src_qp(cq: *mut ibv_cq_ex) -> u32 = self::read_src_qp(cq);
    read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint = self::read_wc_flags(cq);
    read_slid(cq: *mut ibv_cq_ex) -> u32 = self::read_slid(cq);
    read_sl(cq: *mut ibv_cq_ex) -> u8 = self::read_sl(cq);
    read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8 = self::read_dlid_path_bits(cq);
    read_completion_ts(cq: *mut ibv_cq_ex) -> u64 = self::read_completion_ts(cq);
}

functions! {
    fn offer_observed_polling(ibv_cq_ex);
    start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int = self::observed_start_poll(cq, attr);
    next_poll(cq: *mut ibv_cq_ex) -> c_int = self::observed_next_poll(cq);
}

functions! {
    fn offer_checked_polling(ibv_cq_ex);
    start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int = self::checked_start_poll(cq, attr);
}

/// A queue that this thread polls, or is about to poll.
struct Polled<'a>(&'a Cq);

/// A live queue, and in all functions but `start_poll` one that `start_poll` has locked for this
/// thread.
impl<'a> FromC<*mut ibv_cq_ex> for Polled<'a> {
    #[inline(always)]
    unsafe fn from_c(given: *mut ibv_cq_ex) -> Polled<'a> {
        // SAFETY: the caller promises a live queue.
        Polled(unsafe { FromC::from_c(given) })
    }
}

impl<'a> Polled<'a> {
    /// The completions, whose lock was kept.
    #[inline]
    fn resume(&self) -> Held<'a, Completions> {
        // SAFETY: the promise of this type.
        unsafe { self.0.completions.resume() }
    }

    /// Makes the oldest completion current; false if there is none.
    #[inline]
    fn load(&self, completions: &mut Held<'_, Completions>) -> bool {
        let Some((cqe, wr_id)) = completions.take() else {
            return false;
        };
        // SAFETY: these fields belong to the holder of the lock; the union is the extended variant.
        unsafe {
            let ex = self.0.abi.get().cast::<ibv_cq_ex>();
            (*ex).wr_id = wr_id;
            (*ex).status = cqe.status.into();
        }
        completions.current = cqe;
        true
    }

    /// A field of the current completion.
    #[inline]
    fn read<T>(&self, field: impl FnOnce(&Cqe) -> T) -> T {
        let completions = self.resume();
        let value = field(&completions.current);
        completions.keep();
        value
    }
}

/// `ibv_start_poll(3)`: ENOENT when there is no completion, EIO in a forked child. After an error
/// the lock is not held.
fn start_poll(cq: Polled<'_>, attr: Option<&ibv_poll_cq_attr>) -> c_int {
    if attr.is_some_and(|attr| attr.comp_mask != 0) {
        return Errno::INVAL.raw_os_error();
    }
    let queue = cq.0;
    if !queue.created_in.is_current() {
        return Errno::IO.raw_os_error();
    }
    for again in [true, false] {
        let mut completions = queue.completions.hold();
        if cq.load(&mut completions) {
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
fn next_poll(cq: Polled<'_>) -> c_int {
    if !cq.0.created_in.is_current() {
        return Errno::IO.raw_os_error();
    }
    let mut completions = cq.resume();
    let found = cq.load(&mut completions);
    // The completion is copied, so its entry is free: requests that a program posts before
    // `end_poll` also complete, and need the space.
    completions.ring.publish();
    completions.keep();
    if found { 0 } else { Errno::NOENT.raw_os_error() }
}

fn end_poll(cq: Polled<'_>) {
    let queue = cq.0;
    if !queue.created_in.is_current() {
        return;
    }
    let completions = cq.resume();
    completions.ring.publish();
    let last = completions.last;
    drop(completions);
    if queue.device.has_gathered() {
        contained(|| queue.device.progress(last));
    }
}

macro_rules! readers {
    ($($name:ident -> $ty:ty = |$cqe:ident| $value:expr;)*) => { $(
        fn $name(cq: Polled<'_>) -> $ty {
            cq.read(|$cqe| $value)
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

fn read_slid(_: Polled<'_>) -> u32 {
    0
}

fn read_dlid_path_bits(_: Polled<'_>) -> u8 {
    0
}

/// [`start_poll`] in a process with a race detector.
fn observed_start_poll(cq: Polled<'_>, attr: Option<&ibv_poll_cq_attr>) -> c_int {
    let status = start_poll(cq, attr);
    if status == 0 {
        race_detector::taken();
    }
    status
}

/// [`next_poll`] in a process with a race detector.
fn observed_next_poll(cq: Polled<'_>) -> c_int {
    let status = next_poll(cq);
    if status == 0 {
        race_detector::taken();
    }
    status
}

/// [`start_poll`] of a queue with a check.
fn checked_start_poll(cq: Polled<'_>, attr: Option<&ibv_poll_cq_attr>) -> c_int {
    if let Some(check) = &cq.0.check {
        contained(|| check.polled());
    }
    observed_start_poll(cq, attr)
}
