//! The device in this process conforms to its own datasheet.

use urnic_driver_shim::bus;
use urnic_driver_shim::config::Device;
use urnic_driver_shim::presence::GidTable;

#[test]
fn the_device_in_this_process_conforms() {
    let bus = bus::open(&Device::Inproc, &GidTable::of_host()).expect("a device");
    let mut out = Vec::new();
    let summary = urnic_conformance::run(&bus, "", &mut out).expect("memory takes what is written");
    let out = String::from_utf8_lossy(&out);
    assert_eq!((summary.failed, summary.not_here), (0, 0), "{out}");
    assert_eq!(summary.passed, urnic_conformance::names().count(), "{out}");
}
