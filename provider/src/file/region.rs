//! Memory regions, shared by all contexts that import them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use urnic_driver::Driver;

use super::device_memory::Memory;
use super::domain::Domain;
use crate::mapping::Mapping;

/// A memory region.
pub(crate) struct Region {
    pub(crate) driver: Arc<Driver>,
    /// None after deregistration.
    state: Mutex<Option<State>>,
}

/// The state that a reregistration changes.
pub(crate) struct State {
    pub(crate) device: urnic_driver::Mr,
    pub(crate) domain: Arc<Domain>,
    /// The keys, and the length in bytes, that the program gets.
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) length: usize,
    /// The region's access rights, as the program gave them.
    pub(crate) flags: u32,
    /// The device memory that contains the region, if any; the reference keeps it in use.
    _device_memory: Option<Arc<Memory>>,
    /// The file's pages that the region is, if it is a file's.
    mapped: Option<Mapping>,
}

impl Region {
    /// A region that the device has registered.
    pub(crate) fn new(state: State) -> Region {
        Region {
            driver: state.domain.driver.clone(),
            state: Mutex::new(Some(state)),
        }
    }

    /// Errors: IO in a forked child, where a thread of the parent may hold the lock.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Option<State>>, Errno> {
        self.driver.check_process()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Region {
    /// All handles and the file are gone: the region ends, as in a kernel.
    fn drop(&mut self) {
        if self.driver.check_process().is_err() {
            return;
        }
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = state.take() else { return };
        match self.driver.deregister(&state.device) {
            Ok(()) => drop(state.domain.on_demand.take(state.device.stag)),
            Err(errno) => {
                tracing::debug!("region {:#x}: {errno}", state.device.stag);
                // A window keeps the region: memory that the region leads to must not be freed.
                std::mem::forget(state);
            }
        }
    }
}

impl State {
    /// The state of a region whose local and remote key are the same.
    pub(crate) fn new(device: urnic_driver::Mr, domain: Arc<Domain>, length: usize, flags: u32) -> State {
        State {
            lkey: device.stag,
            rkey: device.stag,
            device,
            domain,
            length,
            flags,
            _device_memory: None,
            mapped: None,
        }
    }

    /// The state of a region in device memory.
    pub(crate) fn within(self, memory: Arc<Memory>) -> State {
        State {
            _device_memory: Some(memory),
            ..self
        }
    }

    /// The state of a region of a file's pages.
    pub(crate) fn of_file(self, mapped: Mapping) -> State {
        State {
            mapped: Some(mapped),
            ..self
        }
    }

    /// The region has other memory now.
    pub(crate) fn unmap(&mut self) {
        self.mapped = None;
    }
}
