//! The device in another process (`urnic serve`) compared with the device in the program's process,
//! measured one after the other.

use std::path::PathBuf;

use urnic_config::{Config, Device};
use urnic_device_checks::rate::{Ringing, writes_per_second};
use urnic_process::gids::GidTable;
use urnic_tests::served::Served;

use crate::ours;
use crate::table::{Measured, tried};

/// The figures of the served device and of the device in the process.
pub(crate) type Both = (Measured<f64>, Measured<f64>);

fn both(measurement: impl Fn(Option<&str>) -> Measured<f64>) -> Both {
    let served = tried(|| {
        let device = Served::start();
        measurement(Some(&device.device()))
    });
    (served, tried(|| measurement(None)))
}

/// Microseconds from posting a Send on a queue pair that is its own peer to the receive's
/// completion.
pub(crate) fn doorbell_to_cqe() -> Both {
    both(ours::doorbell_to_cqe)
}

/// MiB/s of messages of 1 MiB.
pub(crate) fn bandwidth() -> Both {
    both(|device| ours::taken("ib_write_bw", "-s 1048576 -n 2000", device, 3))
}

/// Millions of messages of 64 bytes per second.
pub(crate) fn messages() -> Both {
    both(|device| ours::taken("ib_send_bw", "-s 64 -n 500000", device, 4))
}

/// Millions of Writes of 64 bytes per second by the device's own interface: with shadow doorbells,
/// and with a kick for each Write.
pub(crate) fn ringing() -> Both {
    let rate = |ringing| {
        let device = Served::start();
        let config = Config {
            device: Device::VfioUser(PathBuf::from(device.device().trim_start_matches("vfio-user:"))),
            ..Config::default()
        };
        let bus = urnic_bus::open(&config, &GidTable::default(), &urnic_bus::Shared::default())
            .map_err(|errno| format!("cannot open {}: {errno}", config.device))?;
        Ok(writes_per_second(&bus, ringing, 200_000)? / 1e6)
    };
    (tried(|| rate(Ringing::Shadow)), tried(|| rate(Ringing::Each)))
}
