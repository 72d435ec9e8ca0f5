//! How the driver reaches a device: registers, doorbells, DMA, interrupts. The layers above do not
//! depend on the kind of device.

pub mod doorbells;
pub mod inproc;
pub mod vfio;
pub mod vfio_user;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use urnic_device::bus::Bus;
use urnic_model::BusyPoll;
use urnic_model::capture::CaptureFile;

use urnic_config::{Config, Device, Placement, SameHost, SctpTransport};
use urnic_process::gids::GidTable;
use urnic_process::program;

/// State that the devices of a process share.
#[derive(Debug, Default)]
pub struct Shared {
    /// The capture file, made with the first device.
    capture: OnceLock<CaptureFile>,
}

/// Opens the configured device. The device in this process gets the addresses of `gids`; other
/// devices have their own.
///
/// # Errors
/// The errors of starting threads and making descriptors; `ENODEV` if the device does not exist;
/// `EBUSY` if another process has it; `EACCES` if this user may not open it.
pub fn open(config: &Config, gids: &GidTable, shared: &Shared) -> Result<Arc<dyn Bus>, Errno> {
    match &config.device {
        Device::Inproc => {
            let file = |path: &PathBuf| shared.capture.get_or_init(|| inproc::capture_file(path.clone()));
            let capture = config.pcap.as_ref().map(|path| {
                let process = format!("process {}, {}", std::process::id(), program::name());
                file(path).interface(&config.name, &process)
            });
            let faulty = config.faults.as_ref().map(|_| config.name.clone());
            let options = inproc::Options {
                same_host: config.same_host == SameHost::Auto,
                busy_poll: BusyPoll {
                    limit: config.busy_poll.limit,
                    share: config.busy_poll.share,
                },
                capture,
                faulty,
                last_first: config.placement == Placement::LastFirst,
                sctp: match config.sctp.transport {
                    SctpTransport::Udp => urnic_model::SctpTransport::Udp,
                    SctpTransport::Kernel => urnic_model::SctpTransport::Kernel,
                    SctpTransport::KernelUdp => urnic_model::SctpTransport::KernelUdp,
                },
            };
            Ok(inproc::InprocBus::start(gids, options)?)
        }
        Device::VfioUser(path) => Ok(vfio_user::VfioUserBus::open(path)?),
        Device::Vfio(address) => Ok(vfio::VfioBus::open(address, config.vfio.api)?),
    }
}
