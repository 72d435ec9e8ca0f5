//! The polled part of a queue pair's posted work: shared between its queues and the completion
//! queues to which they complete.

use crate::strict::PairCheck;
use crate::trace::PairTrace;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The ledger of one queue pair. Slot numbers and counts run freely modulo 2^32.
pub(crate) struct Ledger {
    /// The number of the queue pair.
    qpn: u32,
    /// The `wr_id` of each send slot; the number of slots is a power of two.
    wr_ids: Box<[AtomicU64]>,
    /// Send slots before this one are free again.
    sends: AtomicU32,
    /// Receive completions polled.
    receives: AtomicU32,
    /// A request failed other than by a flush.
    failed: AtomicBool,
    /// A request failed by a plan of faults: those after it are flushed.
    failed_by_plan: AtomicBool,
    observers: Option<Box<Observers>>,
}

/// The observers of the requests of a queue pair: the options `strict` and `trace`.
struct Observers {
    check: Option<PairCheck>,
    trace: Option<PairTrace>,
}

impl Ledger {
    /// Creates a ledger of queue pair `qpn` for `slots` send slots, a power of two.
    pub(crate) fn new(qpn: u32, slots: u32) -> Ledger {
        Ledger {
            qpn,
            wr_ids: (0..slots.next_power_of_two())
                .map(|_| AtomicU64::new(0))
                .collect(),
            sends: AtomicU32::new(0),
            receives: AtomicU32::new(0),
            failed: AtomicBool::new(false),
            failed_by_plan: AtomicBool::new(false),
            observers: None,
        }
    }

    /// The ledger with its observers.
    pub(crate) fn observed(self, check: Option<PairCheck>, trace: Option<PairTrace>) -> Ledger {
        let is_observed = check.is_some() || trace.is_some();
        Ledger {
            observers: is_observed.then(|| Box::new(Observers { check, trace })),
            ..self
        }
    }

    /// The number of the queue pair.
    #[inline]
    pub(crate) fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Whether the ledger has an observer.
    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.observers.is_some()
    }

    /// The check of posts and polls, if there is one.
    #[inline]
    pub(crate) fn check(&self) -> Option<&PairCheck> {
        self.observers.as_ref()?.check.as_ref()
    }

    /// The trace of posts and polls, if there is one.
    #[inline]
    pub(crate) fn trace(&self) -> Option<&PairTrace> {
        self.observers.as_ref()?.trace.as_ref()
    }

    /// The queues are empty, and nothing in them completes any more.
    pub(crate) fn emptied(&self) {
        if let Some(check) = self.check() {
            check.emptied();
        }
        if let Some(trace) = self.trace() {
            trace.emptied();
        }
    }

    #[inline]
    fn wr_id(&self, slot: u32) -> Option<&AtomicU64> {
        self.wr_ids.get(slot as usize & self.wr_ids.len().wrapping_sub(1))
    }

    /// Enters the `wr_id` of a work request into a free send slot.
    #[inline]
    pub(crate) fn enter_send(&self, slot: u32, wr_id: u64) {
        if let Some(entry) = self.wr_id(slot) {
            entry.store(wr_id, Ordering::Relaxed);
        }
    }

    /// The completion of a send slot was polled: this slot and all earlier slots are free. Returns
    /// the `wr_id` of the slot.
    #[inline]
    pub(crate) fn settle_send(&self, slot: u32) -> u64 {
        let wr_id = self.wr_id(slot).map_or(0, |entry| entry.load(Ordering::Relaxed));
        // Release: the slot's `wr_id` was read before another thread may enter a new one.
        self.sends.store(slot.wrapping_add(1), Ordering::Release);
        wr_id
    }

    /// The completion of a receive was polled.
    #[inline]
    pub(crate) fn settle_receive(&self) {
        // Completions of one receive queue are polled under the lock of one completion queue.
        let polled = self.receives.load(Ordering::Relaxed);
        self.receives.store(polled.wrapping_add(1), Ordering::Release);
    }

    /// The first send slot that is not free.
    #[inline]
    pub(crate) fn sends_settled(&self) -> u32 {
        self.sends.load(Ordering::Acquire)
    }

    /// The number of receive completions that were polled.
    #[inline]
    pub(crate) fn receives_settled(&self) -> u32 {
        self.receives.load(Ordering::Acquire)
    }

    /// The queues were emptied (RESET): this number of sends and receives had been posted, and none
    /// of them completes any more.
    pub(crate) fn settle_all(&self, sends: u32, receives: u32) {
        self.sends.store(sends, Ordering::Release);
        self.receives.store(receives, Ordering::Release);
        self.failed.store(false, Ordering::Relaxed);
        self.failed_by_plan.store(false, Ordering::Relaxed);
        self.emptied();
    }

    /// A request fails by a plan of faults.
    pub(crate) fn fail_by_plan(&self) {
        self.failed_by_plan.store(true, Ordering::Relaxed);
    }

    /// Whether a request failed by a plan of faults.
    pub(crate) fn is_failed_by_plan(&self) -> bool {
        self.failed_by_plan.load(Ordering::Relaxed)
    }

    /// A request failed: whether it is the first since the queues were empty.
    pub(crate) fn fails_first(&self) -> bool {
        !self.failed.swap(true, Ordering::Relaxed)
    }
}
