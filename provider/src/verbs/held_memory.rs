//! Memory for what the option `strict` holds back: receives, and what Reads and atomics fetch.

use std::sync::Arc;

use urnic_device::command::features;
use urnic_device::vocabulary::Access;

use crate::file::domain::Domain;
use crate::mapping::Mapping;
use crate::strict::ARENA;

/// The memory, mapped and registered.
pub(super) struct HeldMemory {
    /// `None` only while it is dropped.
    mapping: Option<Mapping>,
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
        let mapping = Mapping::anonymous(ARENA).ok()?;
        let addr = mapping.start();
        // On demand: pages are there when something arrives, not all of them at once.
        let access = Access::LOCAL_WRITE | Access::ON_DEMAND;
        let device = domain
            .driver
            .register(&domain.device, addr, ARENA, addr.addr() as u64, access)
            .ok()?;
        Some(HeldMemory {
            addr: addr.addr(),
            mapping: Some(mapping),
            device,
            domain: domain.clone(),
        })
    }

    /// The address and the key.
    pub(super) fn arena(&self) -> (usize, u32) {
        (self.addr, self.device.stag)
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        if self.domain.driver.deregister(&self.device).is_err() {
            // Memory that the device may still use stays.
            std::mem::forget(self.mapping.take());
        }
    }
}
