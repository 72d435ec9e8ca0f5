//! A bus without a device, for tests that need only memory.

use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use urnic_device::bus::{Bus, Mapping, QueueMemory, SignalHandler};

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
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nothing.
        let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::PRIVATE) }?;
        let ptr: NonNull<u8> = NonNull::new(ptr.cast()).ok_or(Errno::NOMEM)?;
        let iova = ptr.as_ptr().addr() as u64;
        Ok(QueueMemory { ptr, iova })
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        // SAFETY: a mapping of `allocate`'s, as the caller promises.
        let _ = unsafe { munmap(memory.ptr.as_ptr().cast(), len) };
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
