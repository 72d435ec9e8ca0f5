//! The device in another process (`urnic serve`) against the one in the program's own, one right after the other.

use std::path::PathBuf;

use urnic_conformance::rate::{Ringing, writes_per_second};
use urnic_driver_shim::bus;
use urnic_driver_shim::config::{Config, Device};
use urnic_driver_shim::presence::GidTable;
use urnic_tests::served::Served;

use crate::ours;

/// Ours and theirs: served, and in the process.
pub(crate) type Both = (Option<f64>, Option<f64>);

fn both(measurement: impl Fn(Option<&str>) -> Option<f64>) -> Both {
    let served = {
        let device = Served::start();
        measurement(Some(&device.device()))
    };
    (served, measurement(None))
}

/// Microseconds from posting a Send on a queue pair that is its own peer to the receive's completion.
pub(crate) fn doorbell_to_cqe() -> Both {
    both(ours::doorbell_to_cqe)
}

/// MiB/s of messages of 1 MiB.
pub(crate) fn bandwidth() -> Both {
    both(|device| ours::bandwidth("ib_write_bw", 1 << 20, 2000, device))
}

/// Millions of messages of 64 bytes per second.
pub(crate) fn messages() -> Both {
    both(|device| ours::messages("ib_send_bw", 64, 500_000, device))
}

/// Millions of Writes of 64 bytes per second by the device's own interface: with shadow doorbells, and with a kick for each.
pub(crate) fn ringing() -> Both {
    let device = Served::start();
    let config = Config {
        device: Device::VfioUser(PathBuf::from(device.device().trim_start_matches("vfio-user:"))),
        ..Config::default()
    };
    let rate = |ringing| {
        let bus = bus::open(&config, &GidTable::default()).ok()?;
        let rate = writes_per_second(&bus, ringing, 200_000).map_err(|reason| eprintln!("ringing: {reason}"));
        Some(rate.ok()? / 1e6)
    };
    (rate(Ringing::Shadow), rate(Ringing::Each))
}
