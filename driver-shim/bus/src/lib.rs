//! How the driver reaches a device: registers, doorbells, DMA, interrupts. Nothing above knows
//! which device it is.

pub mod anonymous;
pub mod doorbells;
pub mod inproc;
pub mod vfio;
pub mod vfio_user;

use std::sync::Arc;

use rustix::io::Errno;
use urnic_device::bus::Bus;

use urnic_config::{Config, Device};
use urnic_process::gids::GidTable;

/// Opens the device that is configured. The device in this process gets these addresses; others
/// have their own.
///
/// # Errors
/// Those of making its thread and descriptors; `ENODEV` if it is not there, `EBUSY` if another
/// process else has it, `EACCES`.
pub fn open(config: &Config, gids: &GidTable) -> Result<Arc<dyn Bus>, Errno> {
    match &config.device {
        Device::Inproc => Ok(inproc::InprocBus::start(gids, config.pcap.as_deref())?),
        Device::VfioUser(path) => Ok(vfio_user::VfioUserBus::open(path)?),
        Device::Vfio(address) => Ok(vfio::VfioBus::open(address, config.vfio.api)?),
    }
}
