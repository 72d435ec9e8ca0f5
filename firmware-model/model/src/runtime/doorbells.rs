//! Doorbells: the work that a ring requests is done on the thread that rings, or on the thread that
//! looks where the driver rang in plain memory.

use super::rounds::flush_gathered;
use crate::events::{Effects, Requests};
use crate::qp::{LAST, Qp};
use crate::runtime::{Core, PageUser};
use std::sync::Arc;
use urnic_device::doorbell::{Doorbell, Kind};

/// A doorbell through page `uar`, which reaches only the queues that were created with it.
#[inline]
pub(crate) fn ring(core: &Core, uar: u32, value: u64) {
    let Some(doorbell) = Doorbell::decode(value) else {
        return;
    };
    match doorbell.kind {
        Kind::Send => with_qp(core, uar, doorbell.queue, |qp| {
            qp.kick_through(core, Requests::SEND);
        }),
        Kind::Receive => with_qp(core, uar, doorbell.queue, |qp| {
            qp.kick(core, Requests::RECEIVE);
        }),
        Kind::SharedReceive => ring_shared(core, uar, doorbell.queue),
        Kind::Arm => arm(core, uar, doorbell, false),
        Kind::ArmSolicited => arm(core, uar, doorbell, true),
    }
}

/// Has the queue pair that was rung for do something, if it uses this page.
#[inline]
fn with_qp(core: &Core, uar: u32, qid: u32, act: impl FnOnce(&Arc<Qp>)) {
    core.qps.find_again(qid, &LAST, |qp| {
        if qp.uar == uar {
            act(qp);
        }
    });
}

/// Resumes the streams that wait for the posted buffers.
fn ring_shared(core: &Core, uar: u32, srqid: u32) {
    let Some(srq) = core.srqs.find(srqid).filter(|srq| srq.uar == uar) else {
        return;
    };
    if srq.take_stalled() {
        for qp in core.qps.all().iter().filter(|qp| qp.uses_srq(srqid)) {
            qp.kick(core, Requests::RECEIVE);
        }
    }
}

/// Arms a completion queue. The program that arms is about to wait, and will not poll for its
/// completions.
fn arm(core: &Core, uar: u32, doorbell: Doorbell, solicited_only: bool) {
    let Some(cq) = core.cqs.find(doorbell.queue).filter(|cq| cq.uar == uar) else {
        return;
    };
    core.schedule.note_waiter();
    flush_gathered(core);
    let mut effects = Effects::default();
    cq.arm(doorbell.index, solicited_only, &mut effects);
    core.raise(effects);
}

/// Serves the doorbells in plain memory since the last poll; returns whether there were any.
pub(crate) fn scan(core: &Core) -> bool {
    let Some(pages) = &core.pages else {
        return false;
    };
    let rung = pages.take();
    for &(page, offset, value) in &rung.doorbells {
        ring(core, page, value);
        // An earlier ring in the same slot is overwritten.
        if rung.shared {
            scan_slot(core, page, offset);
        } else {
            ring_other_half(core, page, value);
        }
    }
    !rung.doorbells.is_empty()
}

/// The other ring of the queue pair that `value` rang for.
fn ring_other_half(core: &Core, uar: u32, value: u64) {
    let Some(doorbell) = Doorbell::decode(value) else {
        return;
    };
    let requests = match doorbell.kind {
        Kind::Send => Requests::RECEIVE,
        Kind::Receive => Requests::SEND,
        Kind::SharedReceive | Kind::Arm | Kind::ArmSolicited => return,
    };
    with_qp(core, uar, doorbell.queue, |qp| {
        // While the stream is read as bytes arrive, no ring is needed for receives.
        if requests == Requests::SEND || !qp.is_readable() {
            qp.kick(core, requests);
        }
    });
}

/// Polls all queues whose doorbells share a slot.
fn scan_slot(core: &Core, uar: u32, offset: u32) {
    let users = core.page(uar).map(|page| page.at(offset));
    for user in users.unwrap_or_default() {
        match user {
            PageUser::Qp(qid) => {
                if let Some(qp) = core.qps.find(qid) {
                    qp.kick(core, Requests::SEND | Requests::RECEIVE);
                }
            }
            PageUser::Srq(srqid) => ring_shared(core, uar, srqid),
            // An arm is only in the doorbell; completion queues share slots last.
            PageUser::Cq(_) => {}
        }
    }
}
