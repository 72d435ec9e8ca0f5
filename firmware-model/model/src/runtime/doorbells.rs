//! Doorbells: the work that a ring requests is done on the thread that rings, or on the thread that
//! reads the doorbells in plain memory.

use super::background::flush_gathered;
use super::uar::Rung;
use crate::counters::Counter;
use crate::events::{Effects, Requests};
use crate::log_limit::LogLimit;
use crate::qp::{LAST, Qp};
use crate::runtime::{Core, PageUser};
use std::sync::Arc;
use urnic_device::doorbell::{Doorbell, Kind};

/// A doorbell through page `uar`, which reaches only the queues that were created with it.
#[inline]
pub(crate) fn ring(core: &Core, uar: u32, value: u64) {
    let reached = Doorbell::decode(value).is_some_and(|doorbell| match doorbell.kind {
        Kind::Send => with_qp(core, uar, doorbell.queue, |qp| {
            qp.kick_through(core, Requests::SEND);
        }),
        Kind::Receive => with_qp(core, uar, doorbell.queue, |qp| {
            qp.kick(core, Requests::RECEIVE);
        }),
        Kind::SharedReceive => ring_shared(core, uar, doorbell.queue),
        Kind::Arm => arm(core, uar, doorbell, false),
        Kind::ArmSolicited => arm(core, uar, doorbell, true),
    });
    if !reached {
        invalid(core, uar, value);
    }
}

/// Counts and logs a doorbell that reached no queue. A driver may ring without end, so the number
/// of lines is limited.
#[cold]
fn invalid(core: &Core, uar: u32, value: u64) {
    core.counters.add_shared(Counter::InvalidDoorbells, 1);
    if may_log(core) {
        let reason = why_invalid(core, uar, value);
        tracing::debug!("ignored doorbell {value:#018x} in page {uar}: {reason}");
    }
}

/// Whether the log may have another line on an ignored doorbell.
fn may_log(core: &Core) -> bool {
    static LIMIT: LogLimit = LogLimit::new("ignored doorbells");
    tracing::enabled!(tracing::Level::DEBUG) && LIMIT.may_say(core.clock.now())
}

fn why_invalid(core: &Core, uar: u32, value: u64) -> String {
    let Some(Doorbell { kind, queue, .. }) = Doorbell::decode(value) else {
        return format!("there is no kind {}", value >> 56);
    };
    let (name, page) = match kind {
        Kind::Send | Kind::Receive => ("queue pair", core.qps.find(queue).map(|qp| qp.uar)),
        Kind::SharedReceive => ("shared receive queue", core.srqs.find(queue).map(|srq| srq.uar)),
        Kind::Arm | Kind::ArmSolicited => ("completion queue", core.cqs.find(queue).map(|cq| cq.uar)),
    };
    match page {
        // The queue was created after the doorbell rang.
        Some(page) if page == uar => format!("{name} {queue} did not exist yet"),
        Some(page) => format!("{name} {queue} belongs to page {page}"),
        None => format!("no {name} has the number {queue}"),
    }
}

/// Makes `requests` of the queue pair that the doorbell names, if it uses this page. Returns
/// whether it does.
#[inline]
fn with_qp(core: &Core, uar: u32, qid: u32, act: impl FnOnce(&Arc<Qp>)) -> bool {
    let acted = core.qps.find_again(qid, &LAST, |qp| {
        let is_its_page = qp.uar == uar;
        if is_its_page {
            act(qp);
        }
        is_its_page
    });
    acted == Some(true)
}

/// Resumes the streams that wait for the posted buffers; returns whether there is such a queue.
fn ring_shared(core: &Core, uar: u32, srqid: u32) -> bool {
    let Some(srq) = core.srqs.find(srqid).filter(|srq| srq.uar == uar) else {
        return false;
    };
    if srq.take_stalled() {
        for qp in core.qps.all().iter().filter(|qp| qp.uses_srq(srqid)) {
            qp.kick(core, Requests::RECEIVE);
        }
    }
    true
}

/// Arms a completion queue; returns whether there is such a queue. The program that arms is about
/// to wait, and will not poll for its completions.
fn arm(core: &Core, uar: u32, doorbell: Doorbell, solicited_only: bool) -> bool {
    let Some(cq) = core.cqs.find(doorbell.queue).filter(|cq| cq.uar == uar) else {
        return false;
    };
    core.schedule.note_waiter();
    flush_gathered(core);
    let mut effects = Effects::default();
    cq.arm(doorbell.index, solicited_only, &mut effects);
    core.raise(effects);
    true
}

/// The driver wrote `KICK`: serves the doorbells in plain memory. If there are none, the driver may
/// have rung in a slot of no queue.
pub(crate) fn kicked(core: &Core) {
    let Some(pages) = &core.pages else {
        return;
    };
    if serve(core, &pages.take()) {
        return;
    }
    for (page, offset, value) in pages.take_from_free_slots() {
        core.counters.add_shared(Counter::InvalidDoorbells, 1);
        if may_log(core) {
            tracing::debug!(
                "ignored doorbell {value:#018x} in page {page}: no queue has the slot at {offset:#x}"
            );
        }
    }
}

/// Serves the doorbells in plain memory since the last poll; returns whether there were any.
pub(crate) fn scan(core: &Core) -> bool {
    (core.pages.as_ref()).is_some_and(|pages| serve(core, &pages.take()))
}

/// Serves these doorbells; returns whether there are any.
fn serve(core: &Core, rung: &Rung) -> bool {
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
            PageUser::Srq(srqid) => {
                ring_shared(core, uar, srqid);
            }
            // An arm is only in the doorbell; completion queues share slots last.
            PageUser::Cq(_) => {}
        }
    }
}
