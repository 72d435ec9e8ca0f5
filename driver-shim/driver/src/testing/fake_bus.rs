//! A bus without a device, for tests that need only memory.

use std::sync::Arc;

use rustix::io::Errno;

use urnic_device::bus::{Bus, Mapping, QueueMemory, SignalHandler};
use urnic_sys::Pages;

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

    fn progress(&self, _queue_pair: u32) {}

    fn has_gathered(&self) -> bool {
        false
    }

    fn allocate(&self, len: usize) -> Result<QueueMemory, Errno> {
        let ptr = Pages::zeroed(len)?.leak();
        let iova = ptr.as_ptr().addr() as u64;
        Ok(QueueMemory { ptr, iova })
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        // SAFETY: a mapping of `allocate`'s, as the caller promises.
        drop(unsafe { Pages::of_leaked(memory.ptr, len) });
    }

    fn map(&self, ptr: *mut u8, _len: usize, _write: bool) -> Result<Mapping, Errno> {
        Ok(Mapping::Contiguous(ptr.addr() as u64))
    }

    fn unmap(&self, _mapping: &Mapping, _len: usize) {}

    fn signals(&self, _handler: SignalHandler) {}

    fn memory(&self) -> &'static str {
        "none"
    }

    fn shutdown(&self) {}

    fn abandon_in_child(&self) {}
}
