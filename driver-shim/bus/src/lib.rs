//! How the driver reaches a device: registers, doorbells, DMA, interrupts. The layers above do not
//! depend on the kind of device.

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

/// Opens the configured device. The device in this process gets the addresses of `gids`; other
/// devices have their own.
///
/// # Errors
/// The errors of starting threads and making descriptors; `ENODEV` if the device does not exist;
/// `EBUSY` if another process has it; `EACCES` if this user may not open it.
pub fn open(config: &Config, gids: &GidTable) -> Result<Arc<dyn Bus>, Errno> {
    match &config.device {
        Device::Inproc => Ok(inproc::InprocBus::start(gids, config.pcap.as_deref())?),
        Device::VfioUser(path) => Ok(vfio_user::VfioUserBus::open(path)?),
        Device::Vfio(address) => Ok(vfio::VfioBus::open(address, config.vfio.api)?),
    }
}
