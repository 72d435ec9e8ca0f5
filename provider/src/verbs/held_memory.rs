//! Memory for what the option `strict` holds back: receives, and what Reads and atomics fetch.

use std::ptr;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use urnic_device::command::features;
use urnic_device::vocabulary::Access;

use crate::file::domain::Domain;
use crate::strict::ARENA;

/// The memory, mapped and registered.
pub(super) struct HeldMemory {
    addr: usize,
    device: urnic_driver::Mr,
    domain: Arc<Domain>,
}

impl HeldMemory {
    /// Memory in this domain. `None` if there is none, or the device is in another process: that
    /// would reserve all of it.
    pub(super) fn new(domain: &Arc<Domain>) -> Option<HeldMemory> {
        if domain.driver.attributes().features & features::ON_DEMAND == 0 {
            return None;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let addr =
            unsafe { mmap_anonymous(ptr::null_mut(), ARENA, ProtFlags::READ | ProtFlags::WRITE, flags) };
        let addr = addr.ok()?;
        // On demand: pages are there when something arrives, not all of them at once.
        let access = Access::LOCAL_WRITE | Access::ON_DEMAND;
        let registered = domain
            .driver
            .register(&domain.device, addr, ARENA, addr.addr() as u64, access);
        match registered {
            Ok(device) => Some(HeldMemory {
                addr: addr.addr(),
                device,
                domain: domain.clone(),
            }),
            Err(_) => {
                unmap(addr.addr());
                None
            }
        }
    }

    /// The address and the key.
    pub(super) fn arena(&self) -> (usize, u32) {
        (self.addr, self.device.stag)
    }
}

fn unmap(addr: usize) {
    // SAFETY: the mapping of `new`, which the device does not use any more.
    let _ = unsafe { munmap(ptr::without_provenance_mut(addr), ARENA) };
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        // Memory that the device may still use stays.
        if self.domain.driver.deregister(&self.device).is_ok() {
            unmap(self.addr);
        }
    }
}
