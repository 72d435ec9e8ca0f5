//! Memory for the receives of a queue pair that the option `strict` holds back.

use std::ptr;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use urnic_device::command::features;
use urnic_device::vocabulary::Access;

use crate::file::domain::Domain;
use crate::strict::ARENA;

/// The memory, mapped and registered.
pub(super) struct HeldReceives {
    addr: usize,
    device: urnic_driver::Mr,
    domain: Arc<Domain>,
}

impl HeldReceives {
    /// Memory in this domain. `None` if there is none, or the device is in another process: that
    /// would reserve all of it.
    pub(super) fn new(domain: &Arc<Domain>) -> Option<HeldReceives> {
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
            Ok(device) => Some(HeldReceives {
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

impl Drop for HeldReceives {
    fn drop(&mut self) {
        // Memory that the device may still use stays.
        if self.domain.driver.deregister(&self.device).is_ok() {
            unmap(self.addr);
        }
    }
}
