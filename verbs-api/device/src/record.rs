//! Queue records: indices that host and device share, and the shadow doorbell.
//!
//! A record is in host memory, 64-byte aligned. Only the driver writes its first cache line, and
//! only the device its second. Indices run freely modulo 2^32, also through the Reset state, in
//! which the device consumes posted entries without a completion.
//!
//! *Shadow doorbell.* The driver publishes a new producer index, then reads the device's event
//! index and rings only if the publication passed it ([`must_ring`]). The device sets the event
//! index to the index at which it requires the next ring: its consumer index when it sleeps, an
//! index further ahead while it polls. Both sides need a full fence between their store and their
//! load, or each may miss the other; [`publish`] and [`sleep_at`] contain the fences.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The record of a queue pair or shared receive queue (which uses the receive half only).
#[repr(C, align(64))]
#[derive(Debug)]
pub struct QueueRecord {
    /// Driver: producer index of the send queue, in blocks.
    pub sq_producer: AtomicU32,
    /// Driver: producer index of the receive queue, in entries.
    pub rq_producer: AtomicU32,
    driver_reserved: [u32; 14],
    /// Device: consumer index of the send queue, in blocks: earlier blocks may be overwritten.
    pub sq_consumer: AtomicU32,
    /// Device: consumer index of the receive queue, in entries.
    pub rq_consumer: AtomicU32,
    /// Device: event index of the send queue.
    pub sq_event: AtomicU32,
    /// Device: event index of the receive queue.
    pub rq_event: AtomicU32,
    device_reserved: [u32; 12],
}

/// The record of a completion queue.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CqRecord {
    /// Driver: consumer index: entries before it may be overwritten.
    pub consumer: AtomicU32,
    driver_reserved: [u32; 15],
}

/// The record of an event queue.
pub type EqRecord = CqRecord;

/// Whether a move of the producer index from `old` to `new` passes `event`, so that the device
/// requires a ring.
#[inline]
pub fn must_ring(event: u32, new: u32, old: u32) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Driver side: publishes the producer index `new` (formerly `old`) after the new entries were
/// written. Returns whether to ring.
#[inline]
pub fn publish(producer: &AtomicU32, event: &AtomicU32, old: u32, new: u32) -> bool {
    producer.store(new, Ordering::Release);
    fence(Ordering::SeqCst);
    must_ring(event.load(Ordering::Relaxed), new, old)
}

/// Device side: requests a ring as soon as an entry is posted after `seen`, and returns the
/// producer index as of after that request. If it differs from `seen`, there is more work, for
/// which no ring may come.
#[inline]
pub fn sleep_at(producer: &AtomicU32, event: &AtomicU32, seen: u32) -> u32 {
    event.store(seen, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    producer.load(Ordering::Acquire)
}

#[cfg(not(loom))]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<QueueRecord>() == 128);
    assert!(offset_of!(QueueRecord, sq_producer) == 0);
    assert!(offset_of!(QueueRecord, rq_producer) == 4);
    assert!(offset_of!(QueueRecord, sq_consumer) == 64);
    assert!(offset_of!(QueueRecord, rq_consumer) == 68);
    assert!(offset_of!(QueueRecord, sq_event) == 72);
    assert!(offset_of!(QueueRecord, rq_event) == 76);
    assert!(size_of::<CqRecord>() == 64);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_due_exactly_when_the_event_index_is_stepped_over() {
        assert!(must_ring(5, 6, 5));
        assert!(!must_ring(6, 6, 5));
        assert!(!must_ring(4, 6, 5));
        assert!(must_ring(u32::MAX, 0, u32::MAX));
        assert!(must_ring(7, 10, 5));
        assert!(!must_ring(10, 10, 5));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// The driver posts once while the device goes to sleep: either the driver rings or the device
    /// sees the post.
    #[test]
    fn no_post_is_lost_between_driver_and_device() {
        loom::model(|| {
            let shared = Arc::new((AtomicU32::new(0), AtomicU32::new(8)));
            let device = {
                let s = shared.clone();
                thread::spawn(move || sleep_at(&s.0, &s.1, 0) != 0)
            };
            let rings = publish(&shared.0, &shared.1, 0, 1);
            let seen = device.join().unwrap();
            assert!(rings || seen);
        });
    }
}
