//! Work that was shown to the device, which may want a ring for it.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use urnic_device::record;

/// Entries of a queue whose producer index was stored.
#[must_use]
pub(crate) struct Shown {
    event: NonNull<AtomicU32>,
    old: u32,
    new: u32,
}

impl Shown {
    /// Stores the producer index `new`, formerly `old`. A full fence must follow.
    #[inline]
    pub(super) fn new(producer: &AtomicU32, event: &AtomicU32, old: u32, new: u32) -> Shown {
        record::show(producer, new);
        Shown {
            event: NonNull::from(event),
            old,
            new,
        }
    }

    /// The producer index to ring with, if the device requests a ring; behind that fence.
    ///
    /// # Safety
    /// The record of the queue is still there.
    #[inline]
    pub(crate) unsafe fn index_to_ring(self) -> Option<u32> {
        // SAFETY: a word of the record.
        let event = unsafe { self.event.as_ref() };
        record::wants_ring(event, self.old, self.new).then_some(self.new)
    }
}
