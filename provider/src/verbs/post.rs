//! Posting work requests.
//!
//! These verbs, and polling, are inlined into the functions that C calls: otherwise their arguments
//! would pass through memory.
//!
//! Another thread may poll the completion of a request as soon as the request is published, and
//! destroy the queue pair while the posting thread still has to ring, or does the work of the
//! device. So the queue is published under its lock, which destroying waits for; nothing of the
//! queue pair is used after the lock is released.

use std::ffi::c_int;

use rustix::io::Errno;
use urnic_device::vocabulary::QpState;
use urnic_driver::{Reason, Refusal};
use urnic_rdma_core::{ibv_recv_wr, ibv_send_wr};

use super::qp::Qp;
use super::receive_queue::{FULL, NotPosted};
use super::srq::Srq;
use crate::from_c::{Out, Requests};
use crate::guard::{contained, uncancelled};
use crate::refusals::reported;

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
#[inline(always)]
pub(super) fn post_send(
    qp: &Qp,
    mut requests: Requests<'_, ibv_send_wr>,
    bad: Option<Out<'_, *mut ibv_send_wr>>,
) -> c_int {
    if !qp.created_in.is_current() {
        return requests.refuse(bad, Errno::IO);
    }
    let mut result = Ok(());
    let mut refusal = None;
    let driver = qp.driver;
    let doorbell = {
        let mut side = qp.sends.side.hold();
        let queue = &mut side.queue;
        if takes_sends(qp.device.last_state()) {
            while let Some(wr) = requests.take() {
                result = queue.post(wr);
                if let Err(errno) = result {
                    refusal = refused(qp, "post_send", errno, || queue.why_refused(wr));
                    break;
                }
            }
        } else {
            result = Err(Errno::INVAL);
            let state = qp.device.last_state();
            refusal = refused(qp, "post_send", Errno::INVAL, || Reason::PostsNothing(state));
        }
        qp.sends.release_queue(&qp.device, side)
    };
    // The device may work on this thread for a while: other threads can post during that time.
    if let Some(doorbell) = doorbell {
        contained(|| driver.ring(doorbell));
    }
    match result {
        Ok(()) => 0,
        Err(errno) => {
            report("post_send", refusal);
            requests.refuse(bad, errno)
        }
    }
}

/// `ibv_post_recv(3)`: EINVAL for too many elements, with a shared receive queue, or in RESET on a
/// RoCE NIC; ENOMEM when the queue is full; EIO in a forked child. Receives may be posted in any
/// other state; in error each completes flushed.
#[inline(always)]
pub(super) fn post_recv(
    qp: &Qp,
    requests: Requests<'_, ibv_recv_wr>,
    bad: Option<Out<'_, *mut ibv_recv_wr>>,
) -> c_int {
    if !qp.created_in.is_current() {
        return requests.refuse(bad, Errno::IO);
    }
    if qp.shares_receives() || !qp.device.takes_receives() {
        let refusal = refused(qp, "post_recv", Errno::INVAL, || match qp.shares_receives() {
            true => Reason::Rule("the queue pair takes the receives of its SRQ"),
            false => Reason::PostsNothing(qp.device.last_state()),
        });
        report("post_recv", refusal);
        return requests.refuse(bad, Errno::INVAL);
    }
    let driver = qp.driver;
    let (doorbell, result) = {
        let mut receives = qp.receives.hold();
        let (index, result) = receives.post_list(requests, bad);
        (index.map(|index| qp.device.receive_doorbell(index)), result)
    };
    if let Some(doorbell) = doorbell {
        contained(|| driver.ring(doorbell));
    }
    answer("post_recv", result)
}

/// `ibv_post_srq_recv(3)`: EINVAL for too many elements, ENOMEM when the queue is full, EIO in a
/// forked child.
pub(super) fn post_srq_recv(
    srq: &Srq,
    requests: Requests<'_, ibv_recv_wr>,
    bad: Option<Out<'_, *mut ibv_recv_wr>>,
) -> c_int {
    if !srq.created_in.is_current() {
        return requests.refuse(bad, Errno::IO);
    }
    let driver = srq.driver;
    let (doorbell, result) = {
        let mut receives = srq.receives.hold();
        let (index, result) = receives.post_list(requests, bad);
        (index.map(|index| srq.device.receive_doorbell(index)), result)
    };
    if let Some(doorbell) = doorbell {
        contained(|| driver.ring(doorbell));
    }
    answer("post_srq_recv", result)
}

/// The answer of a verb that posts receives, after the queue is released.
fn answer(verb: &'static str, result: Result<(), NotPosted>) -> c_int {
    result.map_or_else(
        |not_posted| {
            report(verb, not_posted.refusal);
            not_posted.errno.raw_os_error()
        },
        |()| 0,
    )
}

/// Tells the option `strict` why a request is refused; without it, returns the refusal for
/// [`report`]. A queue that is full is a finding, but no refusal. To be called before the requests
/// that precede it are published.
#[cold]
pub(super) fn refused(
    qp: &Qp,
    verb: &'static str,
    errno: Errno,
    reason: impl FnOnce() -> Reason,
) -> Option<Refusal> {
    let mut refusal = None;
    contained(|| match (errno, qp.ledger.check()) {
        (Errno::NOMEM, Some(check)) => check.refused(FULL, true),
        (Errno::NOMEM, None) => {}
        (_, Some(check)) => check.refused(&format!("ibv_{verb}: {}", reason().with(errno)), false),
        (_, None) => refusal = Some(reason().with(errno)),
    });
    refusal
}

/// Reports a refusal, if there is one, to the log. To be called after the queue is released and the
/// device has its doorbell: it takes long.
#[cold]
pub(super) fn report(verb: &'static str, refusal: Option<Refusal>) {
    if let Some(refusal) = refusal {
        let report = || {
            reported(verb, refusal);
        };
        uncancelled(|| contained(report));
    }
}
