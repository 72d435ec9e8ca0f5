//! Posting work requests.
//!
//! Another thread may poll the completion of a request as soon as the request is published, and
//! destroy the queue pair while the posting thread still has to ring, or does the work of the
//! device. So the queue is published under its lock, which destroying waits for; nothing of the
//! queue pair is used after the lock is released.

use std::ffi::c_int;
use std::mem::MaybeUninit;

use rustix::io::Errno;
use urnic_device::vocabulary::QpState;
use urnic_rdma_core::{ibv_qp, ibv_recv_wr, ibv_send_wr};

use super::qp::Qp;
use super::refusal::refuse;
use super::unaligned::structure;
use crate::guard::contained;

/// Whether the send queue takes work requests: when it is connected, or nearly connected, and in
/// the error state, where each request completes flushed. In other states no request would ever
/// complete (conformance VRB-Q-02).
///
/// RTR is included: both directions of a stream become ready together, and programs written for
/// iWARP that only receive (perftest's) send their credits in RTR.
#[inline]
pub(super) fn takes_sends(state: QpState) -> bool {
    matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqe | QpState::Err)
}

/// `ibv_post_send(3)`: EINVAL for an invalid request, or in a state without posting; ENOMEM when
/// the queue is full; EIO in a forked child. The requests before `*bad_wr` are posted, and the
/// device gets all of them at once.
pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::of(qp) };
    if !qp.created_in.is_current() {
        // SAFETY: the program's variable.
        return unsafe { refuse(wr, bad_wr, Errno::IO) };
    }
    let mut next = wr;
    let mut copy = MaybeUninit::uninit();
    let mut result = 0;
    let driver = qp.driver;
    let doorbell = {
        let mut side = qp.sends.side.hold();
        let queue = &mut side.queue;
        if takes_sends(qp.device.last_state()) {
            // SAFETY: the program's list, which ends with null.
            while let Some(wr) = unsafe { structure(next, &mut copy) } {
                // SAFETY: as the program filled it.
                if let Err(errno) = unsafe { queue.post(wr) } {
                    result = errno.raw_os_error();
                    report_refusal(qp, errno, || queue.why_refused(wr, errno));
                    break;
                }
                next = wr.next;
            }
        } else {
            result = Errno::INVAL.raw_os_error();
            let state = qp.device.last_state().verbs_name();
            report_refusal(qp, Errno::INVAL, || {
                format!("nothing can be sent in state {state}")
            });
        }
        qp.sends.release_queue(&qp.device, side)
    };
    // The device may work on this thread for a while: other threads can post during that time.
    if let Some(doorbell) = doorbell {
        contained(|| driver.ring(doorbell));
    }
    if result != 0 && !bad_wr.is_null() {
        // SAFETY: the program's variable.
        unsafe { bad_wr.write_unaligned(next) };
    }
    result
}

/// `ibv_post_recv(3)`: EINVAL for too many elements, with a shared receive queue, or in RESET on a
/// RoCE NIC; ENOMEM when the queue is full; EIO in a forked child. Receives may be posted in any
/// other state; in error each completes flushed.
pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::of(qp) };
    if !qp.created_in.is_current() {
        // SAFETY: the program's variable.
        return unsafe { refuse(wr, bad_wr, Errno::IO) };
    }
    if qp.shares_receives() || !qp.device.takes_receives() {
        // SAFETY: the program's variable.
        return unsafe { refuse(wr, bad_wr, Errno::INVAL) };
    }
    let driver = qp.driver;
    let (doorbell, result) = {
        let mut receives = qp.receives.hold();
        // SAFETY: the program's list.
        let (index, result) = unsafe { receives.post_list(wr, bad_wr) };
        if result != 0
            && let Some(check) = qp.ledger.check()
        {
            let errno = Errno::from_raw_os_error(result);
            contained(|| check.refused(&format!("a receive was refused: {errno}"), false));
        }
        (index.map(|index| qp.device.receive_doorbell(index)), result)
    };
    if let Some(doorbell) = doorbell {
        contained(|| driver.ring(doorbell));
    }
    result
}

/// Shows the option `strict` why a request is refused. To be called before the requests that
/// precede it are published.
#[inline]
pub(super) fn report_refusal(qp: &Qp, errno: Errno, reason: impl FnOnce() -> String) {
    if let Some(check) = qp.ledger.check() {
        contained(|| check.refused(&reason(), errno == Errno::NOMEM));
    }
}
