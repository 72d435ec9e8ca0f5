//! Doorbells of queues that may be destroyed before the doorbell is rung.

use urnic_device::doorbell::{Doorbell, Kind};

use crate::driver::Driver;

/// A doorbell write, to be passed to [`Driver::ring`]. As soon as an entry is published, another
/// thread may poll its completion and destroy the queue, while the posting thread still has to
/// ring. So this refers to no queue. The device ignores a doorbell of a queue that it does not
/// have.
#[must_use]
#[derive(Debug, Clone, Copy)]
pub struct DoorbellWrite {
    uar: u32,
    offset: u32,
    value: u64,
}

impl DoorbellWrite {
    /// The write of `doorbell` at `offset` of doorbell page `uar`.
    #[inline]
    pub(crate) fn new((uar, offset): (u32, u32), kind: Kind, queue: u32, index: u32) -> DoorbellWrite {
        let value = Doorbell { kind, queue, index }.encode();
        DoorbellWrite { uar, offset, value }
    }
}

impl Driver {
    /// Rings. A device in this process does the work before this returns.
    #[inline]
    pub fn ring(&self, write: DoorbellWrite) {
        self.bus.doorbell(write.uar, write.offset, write.value);
        if self.commands.is_lost() {
            self.event_loop.wake();
        }
    }
}
