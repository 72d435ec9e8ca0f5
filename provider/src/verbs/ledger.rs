//! What of a queue pair's posted work was polled: shared between its queues and the completion
//! queues they complete to.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The books of one queue pair. Slot numbers and counts run freely modulo 2^32.
pub(crate) struct Ledger {
    /// `wr_id` of each send slot; a power of two of them.
    wr_ids: Box<[AtomicU64]>,
    /// Send slots before this one are free again.
    sends: AtomicU32,
    /// Receive completions polled.
    receives: AtomicU32,
}

impl Ledger {
    /// Books for so many send slots, a power of two.
    pub(crate) fn new(slots: u32) -> Ledger {
        Ledger {
            wr_ids: (0..slots.next_power_of_two())
                .map(|_| AtomicU64::new(0))
                .collect(),
            sends: AtomicU32::new(0),
            receives: AtomicU32::new(0),
        }
    }

    #[inline]
    fn wr_id(&self, slot: u32) -> Option<&AtomicU64> {
        self.wr_ids.get(slot as usize & self.wr_ids.len().wrapping_sub(1))
    }

    /// A work request goes into a free send slot.
    #[inline]
    pub(crate) fn enter_send(&self, slot: u32, wr_id: u64) {
        if let Some(entry) = self.wr_id(slot) {
            entry.store(wr_id, Ordering::Relaxed);
        }
    }

    /// The completion of a send slot was polled: it and all before it are free. Returns its
    /// `wr_id`.
    #[inline]
    pub(crate) fn settle_send(&self, slot: u32) -> u64 {
        let wr_id = self.wr_id(slot).map_or(0, |entry| entry.load(Ordering::Relaxed));
        // Release: the slot's wr_id was read before it may be entered anew.
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

    /// First send slot that is not free.
    #[inline]
    pub(crate) fn sends_settled(&self) -> u32 {
        self.sends.load(Ordering::Acquire)
    }

    /// Count of receive completions polled.
    #[inline]
    pub(crate) fn receives_settled(&self) -> u32 {
        self.receives.load(Ordering::Acquire)
    }

    /// The queues were emptied (RESET): so many sends and receives had been posted, and none of
    /// them completes any more.
    pub(crate) fn settle_all(&self, sends: u32, receives: u32) {
        self.sends.store(sends, Ordering::Release);
        self.receives.store(receives, Ordering::Release);
    }
}
