//! A bus without a device, for tests of what only needs memory.

use std::sync::Arc;

use rustix::io::Errno;

use super::{Bus, InterruptHandler};

pub(crate) struct FakeBus;

impl FakeBus {
    pub(crate) fn new() -> Arc<FakeBus> {
        Arc::new(FakeBus)
    }
}

impl Bus for FakeBus {
    fn read32(&self, _offset: u32) -> u32 {
        0
    }

    fn write32(&self, _offset: u32, _value: u32) {}

    fn doorbell(&self, _uar: u32, _offset: u32, _value: u64) {}

    fn progress(&self) {}

    fn has_gathered(&self) -> bool {
        false
    }

    fn map(&self, ptr: *mut u8, _len: usize) -> Result<u64, Errno> {
        Ok(ptr.addr() as u64)
    }

    fn unmap(&self, _iova: u64, _len: usize) {}

    fn interrupts(&self, _handler: InterruptHandler) {}

    fn shutdown(&self) {}

    fn abandon_in_child(&self) {}
}
