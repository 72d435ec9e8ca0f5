//! Protection domains, shared by all contexts that import them.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::io::Errno;
use urnic_driver::Driver;

use super::on_demand::Places;

/// A protection domain. It lives until the objects in it are gone.
pub(crate) struct Domain {
    pub(crate) driver: Arc<Driver>,
    pub(crate) device: urnic_driver::Pd,
    pub(crate) on_demand: Places,
    /// The number of queues and parent domains in this domain, from all contexts that import it.
    pub(crate) members: Arc<AtomicU32>,
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
        })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if let Err(errno) = self.driver.free_pd(&self.device) {
            tracing::debug!("protection domain {}: {errno}", self.device.id);
        }
    }
}
