//! What a plan of faults lets happen to the device. The provider asks for it while it holds locks
//! of queues, so the driver's thread does it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use urnic_sync::Mutex;

use crate::events::now;

/// The faults that wait for the driver's thread, and those that are not over.
#[derive(Default)]
pub(crate) struct PlannedFaults {
    waiting: Mutex<Vec<Planned>>,
    /// The program was told that the port is down, and not yet that it is up again.
    port_reported_down: AtomicBool,
    /// The end of the time for which a device that a plan of faults stopped cannot be opened.
    returns_at: Mutex<Option<Duration>>,
}

/// What a plan of faults lets happen.
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

    /// Sets whether the program was told last that the port is down.
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

    /// Whether the device is still kept away.
    pub(crate) fn is_away(&self) -> bool {
        self.returns_at.lock().is_some_and(|at| now() < at)
    }
}
