//! Protection domains, shared by all contexts that import them, and their regions on demand.
//!
//! Memory of regions on demand (`IBV_ACCESS_ON_DEMAND`) may be mapped and unmapped at any time. The
//! device lets the kernel copy there, so advice is not necessary; if a program gives advice
//! (`ibv_advise_mr(3)`), the kernel loads its pages.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use urnic_device::vocabulary::Access;
use urnic_driver::Driver;
use urnic_rdma_core::ibv_sge;

/// A protection domain. It exists until the objects in it are destroyed.
pub(crate) struct Domain {
    pub(crate) driver: Arc<Driver>,
    pub(crate) device: urnic_driver::Pd,
    pub(crate) on_demand: Places,
    /// The number of objects and parent domains in this domain, from all contexts that import it.
    pub(crate) members: Arc<AtomicU32>,
    /// A queue pair of an RNIC in this domain connected to a peer that its program named.
    connects_natively: AtomicBool,
}

/// The membership of an object or parent domain in a domain.
pub(crate) struct DomainMembership {
    members: Arc<AtomicU32>,
    domain: Arc<Domain>,
}

impl DomainMembership {
    /// Counts a member. The call must come before the object is created, so that the domain cannot
    /// be freed in the meantime.
    pub(crate) fn new(members: &Arc<AtomicU32>, domain: &Arc<Domain>) -> DomainMembership {
        members.fetch_add(1, Ordering::Relaxed);
        DomainMembership {
            members: members.clone(),
            domain: domain.clone(),
        }
    }

    /// The domain of this membership.
    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }
}

impl Deref for DomainMembership {
    type Target = Domain;
    fn deref(&self) -> &Domain {
        &self.domain
    }
}

impl Drop for DomainMembership {
    fn drop(&mut self) {
        self.members.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Domain {
    /// Allocates an empty domain.
    ///
    /// Errors: the errors of the driver.
    pub(crate) fn alloc(driver: &Arc<Driver>) -> Result<Domain, Errno> {
        let device = driver.alloc_pd()?;
        Ok(Domain {
            driver: driver.clone(),
            device,
            on_demand: Places::default(),
            members: Arc::default(),
            connects_natively: AtomicBool::new(false),
        })
    }

    /// Records that a queue pair in this domain connects to a peer that its program named.
    pub(crate) fn note_native_connection(&self) {
        self.connects_natively.store(true, Ordering::Relaxed);
    }

    /// Whether the domain may be freed with regions in it. perftest 4.5 leaves one registered if an
    /// RNIC connects natively, and would report an error after a correct measurement; no adapter
    /// for iWARP has such connections.
    pub(crate) fn may_leave_regions(&self) -> bool {
        self.connects_natively.load(Ordering::Relaxed) && !self.driver.identity().is_roce()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if let Err(errno) = self.driver.free_pd(&self.device) {
            tracing::debug!("protection domain {}: {errno}", self.device.id);
        }
    }
}

/// The place of a region on demand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The address of the first byte.
    pub(crate) addr: usize,
    pub(crate) len: usize,
    /// The address by which work requests name the first byte.
    pub(crate) base: u64,
    pub(crate) access: Access,
}

impl Place {
    /// The address of the element.
    ///
    /// Errors: FAULT outside of the region.
    fn of(&self, element: &ibv_sge) -> Result<*mut c_void, Errno> {
        let offset = element.addr.checked_sub(self.base).ok_or(Errno::FAULT)?;
        let end = offset.checked_add(element.length.into()).ok_or(Errno::FAULT)?;
        if end > self.len as u64 {
            return Err(Errno::FAULT);
        }
        Ok(std::ptr::without_provenance_mut(
            self.addr.wrapping_add(offset as usize),
        ))
    }
}

/// The regions on demand of a domain, by their keys.
#[derive(Debug, Default)]
pub(crate) struct Places(Mutex<BTreeMap<u32, Place>>);

impl Places {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Place>> {
        self.0.lock()
    }

    /// A region was registered, or changed: adds it if it is on demand.
    pub(crate) fn put(&self, key: u32, place: Place) {
        if place.access.contains(Access::ON_DEMAND) {
            self.lock().insert(key, place);
        } else {
            self.take(key);
        }
    }

    /// Removes a deregistered region.
    pub(crate) fn take(&self, key: u32) -> Option<Place> {
        self.lock().remove(&key)
    }

    /// The memory of an element, and whether it must be writable.
    ///
    /// Errors: NOENT for a key that does not belong to a region on demand in the domain; PERM for
    /// writing if the device may not write there; FAULT outside of the region.
    pub(crate) fn asked(&self, element: &ibv_sge, write: bool) -> Result<(*mut c_void, usize), Errno> {
        let place = *self.lock().get(&element.lkey).ok_or(Errno::NOENT)?;
        if write && !place.access.contains(Access::LOCAL_WRITE) {
            return Err(Errno::PERM);
        }
        Ok((place.of(element)?, element.length as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(addr: u64, length: u32, lkey: u32) -> ibv_sge {
        ibv_sge { addr, length, lkey }
    }

    #[test]
    fn advice_is_checked_against_the_region() {
        let places = Places::default();
        let place = Place {
            addr: 0x7000,
            len: 100,
            base: 40,
            access: Access::ON_DEMAND,
        };
        places.put(7, place);
        let at = |element, write| {
            places
                .asked(&element, write)
                .map(|(addr, len)| (addr.addr(), len))
        };
        assert_eq!(at(element(60, 80, 7), false), Ok((0x7014, 80)));
        assert_eq!(at(element(60, 81, 7), false), Err(Errno::FAULT));
        assert_eq!(at(element(39, 1, 7), false), Err(Errno::FAULT));
        assert_eq!(at(element(u64::MAX, u32::MAX, 7), false), Err(Errno::FAULT));
        assert_eq!(at(element(60, 80, 7), true), Err(Errno::PERM));
        assert_eq!(at(element(60, 80, 8), false), Err(Errno::NOENT));
        let access = Access::LOCAL_WRITE;
        places.put(7, Place { access, ..place });
        assert_eq!(
            at(element(60, 80, 7), false),
            Err(Errno::NOENT),
            "not on demand any more"
        );
    }
}
