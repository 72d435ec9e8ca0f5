//! Protection domains, for all contexts that know them.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::io::Errno;
use urnic_driver::Driver;

use super::on_demand::Places;

/// A domain. It lives until what is in it is gone.
pub(crate) struct Domain {
    pub(crate) driver: Arc<Driver>,
    pub(crate) device: urnic_driver::Pd,
    pub(crate) on_demand: Places,
    /// Queues in it, and parent domains of it, whichever context knows them.
    pub(crate) tenants: Arc<AtomicU32>,
}

impl Domain {
    /// A new one, with nothing in it.
    ///
    /// Errors: those of the driver.
    pub(crate) fn alloc(driver: &Arc<Driver>) -> Result<Domain, Errno> {
        let device = driver.alloc_pd()?;
        Ok(Domain {
            driver: driver.clone(),
            device,
            on_demand: Places::default(),
            tenants: Arc::default(),
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
