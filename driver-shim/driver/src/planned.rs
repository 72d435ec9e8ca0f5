//! Planned faults of the device. The provider requests them while it holds locks of queues, so the
//! driver's thread carries them out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use urnic_sync::Mutex;

use crate::events::now;

/// The faults that wait for the driver's thread, and those that are not over.
#[derive(Default)]
pub(crate) struct PlannedFaults {
    waiting: Mutex<Vec<Planned>>,
    /// The program has the event that the port is down, and not yet the event that it is up again.
    port_reported_down: AtomicBool,
    /// The end of the time for which a device that a plan of faults stopped cannot be opened.
    returns_at: Mutex<Option<Duration>>,
}

/// A planned fault of the device.
#[derive(Debug, Clone)]
pub(crate) enum Planned {
    /// This queue pair fails.
    Error(u32),
    /// This completion queue overflows, and with it these queue pairs fail.
    CqOverflow(u32, Vec<u32>),
    /// The port is down.
    PortDown,
    /// The addresses of the port seem to change.
    GidChange,
}

impl PlannedFaults {
    pub(crate) fn push(&self, planned: Planned) {
        self.waiting.lock().push(planned);
    }

    pub(crate) fn take(&self) -> Vec<Planned> {
        std::mem::take(&mut *self.waiting.lock())
    }

    /// Sets whether the program's last event of the port was that it is down.
    pub(crate) fn set_port_reported_down(&self, down: bool) {
        self.port_reported_down.store(down, Ordering::Relaxed);
    }

    pub(crate) fn is_port_reported_down(&self) -> bool {
        self.port_reported_down.load(Ordering::Relaxed)
    }

    /// Keeps the device away for this time.
    pub(crate) fn keep_away(&self, time: Duration) {
        *self.returns_at.lock() = Some(now() + time);
    }

    /// Whether the device still cannot be opened.
    pub(crate) fn is_away(&self) -> bool {
        self.returns_at.lock().is_some_and(|at| now() < at)
    }
}
