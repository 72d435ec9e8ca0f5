//! The count of events that the program received and has not acknowledged.
//!
//! An object may be destroyed only when the program acknowledged every event of the object that it
//! read (`ibv_ack_cq_events(3)`, `ibv_ack_async_event(3)`); events that it has not read are
//! removed. The kernel keeps these counts for other providers.

use std::sync::atomic::{AtomicU32, Ordering};

use urnic_presence::{ChannelSender, Sent};
use urnic_rdma_core::ib_uverbs_comp_event_desc;

use crate::strict::{self, CallSite, Rule};

/// The number of events of one kind that were sent for one object.
#[derive(Default)]
pub(crate) struct Reported(AtomicU32);

impl Reported {
    /// Sends one event to the program.
    pub(super) fn send(&self, channel: &ChannelSender, record: &[u8]) {
        // The event is counted first: the program may acknowledge it before this call returns.
        self.0.fetch_add(1, Ordering::Relaxed);
        if channel.send(record) == Sent::Dropped {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Removes events that the program has not read; `element` is the object's address.
    pub(super) fn purge(&self, channel: &ChannelSender, element: u64) {
        let purged = channel.purge(|record| record.get(..8) == Some(&element.to_ne_bytes()));
        self.0.fetch_sub(purged as u32, Ordering::Relaxed);
    }

    /// The number of events that the program has read, or will read.
    pub(super) fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Sends a completion event for the queue at this address.
pub(super) fn send_completion(reported: &Reported, channel: &ChannelSender, cq: u64) {
    let record = ib_uverbs_comp_event_desc { cq_handle: cq };
    reported.send(channel, &record.cq_handle.to_ne_bytes());
}

/// The mutex, condition variable and counts of an object, which libibverbs changes in `ibv_ack_*`.
pub(super) struct Acknowledgements<'a, const N: usize> {
    pub(super) mutex: *mut libc::pthread_mutex_t,
    pub(super) cond: *mut libc::pthread_cond_t,
    /// For each kind of event: the program's count, and the provider's count.
    pub(super) counts: [(*const u32, &'a Reported); N],
}

impl<const N: usize> Acknowledgements<'_, N> {
    /// Reports events that the program read and did not acknowledge, if `strict` is on.
    ///
    /// # Safety
    /// As for [`wait`](Self::wait).
    unsafe fn check(&self) {
        let Some(strict) = strict::current() else { return };
        let missing = |(acknowledged, reported): &(*const u32, &Reported)| {
            // SAFETY: the caller promises pointers to fields of a live object.
            reported
                .count()
                .wrapping_sub(unsafe { acknowledged.read_volatile() })
        };
        let missing: u32 = self.counts.iter().map(missing).sum();
        if missing > 0 {
            strict.findings.report(Rule::EventNotAcknowledged, &CallSite::here(), || {
                format!(
                    "an object is destroyed before the program has acknowledged {missing} of the events it read: the call \
                 waits for ibv_ack_cq_events or ibv_ack_async_event"
                )
            });
        }
    }

    /// Waits until the program acknowledged the events that it read. No event is sent any more. The
    /// wait is a cancellation point, so cancellation is disabled here (`guard`).
    ///
    /// # Safety
    /// The pointers lead to fields of the live object.
    pub(super) unsafe fn wait(&self) {
        // SAFETY: the caller promises pointers to fields of a live object.
        unsafe {
            self.check();
            libc::pthread_mutex_lock(self.mutex);
            while self
                .counts
                .iter()
                .any(|(acknowledged, reported)| acknowledged.read_volatile() != reported.count())
            {
                libc::pthread_cond_wait(self.cond, self.mutex);
            }
            libc::pthread_mutex_unlock(self.mutex);
        }
    }
}
