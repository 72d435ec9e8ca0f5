//! Checks that the device in this process conforms to its datasheet, and that a device that does
//! not is detected.

use std::sync::Arc;

use urnic_config::Config;
use urnic_device::bus::{Bus, Mapping, QueueMemory, SignalHandler};
use urnic_device::registers;
use urnic_device_checks::Summary;
use urnic_device_checks::rate::{Ringing, writes_per_second};
use urnic_process::gids::GidTable;

fn inproc() -> Arc<dyn Bus> {
    urnic_bus::open(
        &Config::default(),
        &GidTable::of_host(),
        &urnic_bus::Shared::default(),
    )
    .expect("a device")
}

fn run(bus: &Arc<dyn Bus>, part: &str) -> (Summary, String) {
    let mut out = Vec::new();
    let summary = urnic_device_checks::run(bus, part, &mut out).expect("memory takes what is written");
    (summary, String::from_utf8_lossy(&out).into_owned())
}

#[test]
fn the_device_in_this_process_conforms() {
    let (summary, out) = run(&inproc(), "");
    assert_eq!((summary.failed, summary.not_here), (0, 0), "{out}");
    assert!(summary.passed > 70, "{out}");
    assert_eq!(summary.passed, urnic_device_checks::names().count(), "{out}");
}

/// A device one of whose registers is wrong.
struct Wrong {
    inner: Arc<dyn Bus>,
    register: u32,
    xor: u32,
}

impl Bus for Wrong {
    fn read32(&self, offset: u32) -> u32 {
        let value = self.inner.read32(offset);
        if offset == self.register {
            value ^ self.xor
        } else {
            value
        }
    }

    fn write32(&self, offset: u32, value: u32) {
        self.inner.write32(offset, value);
    }

    fn doorbell(&self, uar: u32, offset: u32, value: u64) {
        self.inner.doorbell(uar, offset, value);
    }

    fn progress(&self, queue_pair: u32) {
        self.inner.progress(queue_pair);
    }

    fn has_gathered(&self) -> bool {
        self.inner.has_gathered()
    }

    fn allocate(&self, len: usize) -> Result<QueueMemory, rustix::io::Errno> {
        self.inner.allocate(len)
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        // SAFETY: the caller guarantees what `free` requires.
        unsafe { self.inner.free(memory, len) };
    }

    fn map(&self, ptr: *mut u8, len: usize, write: bool) -> Result<Mapping, rustix::io::Errno> {
        self.inner.map(ptr, len, write)
    }

    fn unmap(&self, mapping: &Mapping, len: usize) {
        self.inner.unmap(mapping, len);
    }

    fn signals(&self, handler: SignalHandler) {
        self.inner.signals(handler);
    }

    fn memory(&self) -> &'static str {
        self.inner.memory()
    }

    fn shutdown(&self) {
        self.inner.shutdown();
    }

    fn abandon_in_child(&self) {
        self.inner.abandon_in_child();
    }
}

#[test]
fn a_nonconforming_device_fails_the_checks() {
    for (register, xor, failing) in [
        (0x100, 1, &["unlisted_registers_read_zero"][..]),
        (
            registers::CMD_VECTOR,
            4,
            &["registers_hold_what_is_written", "reset_returns_the_registers"],
        ),
    ] {
        let inner = inproc();
        let bus: Arc<dyn Bus> = Arc::new(Wrong { inner, register, xor });
        let (summary, out) = run(&bus, "registers::");
        assert_eq!(summary.failed, failing.len(), "{out}");
        for name in failing {
            let line = out.lines().find(|line| line.contains(name)).unwrap_or_default();
            assert!(line.starts_with("FAILED"), "{out}");
        }
    }
    // An object that is no such device passes no check.
    let inner = inproc();
    let bus: Arc<dyn Bus> = Arc::new(Wrong {
        inner,
        register: registers::MAGIC,
        xor: 1,
    });
    let (summary, out) = run(&bus, "");
    assert_eq!(summary.passed, 0, "{out}");
}

#[test]
fn both_kinds_of_doorbell_start_requests() {
    for ringing in [Ringing::Shadow, Ringing::Each] {
        let rate = writes_per_second(&inproc(), ringing, 2000);
        assert!(
            rate.as_ref().is_ok_and(|rate| *rate > 0.0),
            "{ringing:?}: {rate:?}"
        );
    }
}
