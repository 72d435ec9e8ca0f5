//! What a plan of faults lets happen to the device. The provider asks for it while it holds locks
//! of queues, so the driver's thread does it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use urnic_cm::qp_attr::{QpAttr, QpMask};
use urnic_device::vocabulary::QpState;
use urnic_faults::DeviceFault;

use crate::clock::now;
use crate::driver::Driver;
use crate::objects::{AsyncEvent, Planned};
use urnic_process::lock::lock;

impl Driver {
    /// Moves a queue pair, by its device number, to the error state soon.
    pub fn fail_later(&self, qid: u32) {
        self.plan(Planned::Error(qid));
    }

    /// Reports that a completion queue overflowed, soon, and moves its queue pairs to the error
    /// state; all by their device numbers.
    pub fn overflow_later(&self, cq: u32, pairs: Vec<u32>) {
        self.plan(Planned::CqOverflow(cq, pairs));
    }

    /// Carries out a fault of the device that struck. The device stops at once; changes of its port
    /// are reported soon.
    pub fn strike(&self, fault: DeviceFault) {
        match fault {
            // The plan knows for how long.
            DeviceFault::PortDown(_) => self.plan(Planned::PortDown),
            DeviceFault::GidChange => self.plan(Planned::GidChange),
            DeviceFault::Fatal(time) => self.stop(time),
        }
    }

    /// Whether the port is down by a plan of faults.
    pub fn port_is_down(&self) -> bool {
        urnic_faults::is_on() && urnic_faults::plan().port_down_for(self.name()).is_some()
    }

    /// Stops the device, as if it had failed. The program cannot open it again for this time.
    fn stop(&self, time: Duration) {
        *lock(&self.returns_at) = Some(now() + time);
        self.device_lost();
    }

    /// Whether a device that a plan of faults stopped has not returned yet.
    pub(crate) fn is_away(&self) -> bool {
        lock(&self.returns_at).is_some_and(|at| now() < at)
    }

    fn plan(&self, planned: Planned) {
        lock(&self.planned).push(planned);
        self.event_loop.wake();
    }

    /// Does what is due. Returns the time of the next call if nothing is planned before.
    pub(crate) fn carry_out_plan(&self) -> Option<Duration> {
        if !urnic_faults::is_on() {
            return None;
        }
        let (due, next) = urnic_faults::plan().due(self.name());
        for fault in due {
            self.strike(fault);
        }
        for planned in std::mem::take(&mut *lock(&self.planned)) {
            match planned {
                Planned::Error(qid) => self.fail_by_plan(qid),
                Planned::CqOverflow(cq, pairs) => {
                    self.cqs.deliver(cq, AsyncEvent::CqErr);
                    for qid in pairs {
                        self.fail_by_plan(qid);
                        self.qps.deliver(qid, AsyncEvent::QpFatal);
                    }
                }
                Planned::PortDown => {
                    self.port_reported_down.store(true, Ordering::Relaxed);
                    self.contexts.deliver_to_all(AsyncEvent::PortErr);
                }
                Planned::GidChange => self.contexts.deliver_to_all(AsyncEvent::GidChange),
            }
        }
        let left = [next, self.report_port_up()].into_iter().flatten().min();
        left.map(|left| now() + left)
    }

    /// Reports that the port is up again, if it is; returns for how long it is still down.
    fn report_port_up(&self) -> Option<Duration> {
        if !self.port_reported_down.load(Ordering::Relaxed) {
            return None;
        }
        let left = urnic_faults::plan().port_down_for(self.name());
        if left.is_none() {
            self.port_reported_down.store(false, Ordering::Relaxed);
            self.contexts.deliver_to_all(AsyncEvent::PortActive);
        }
        left
    }

    /// Changes the plan of this process at the request of another of this user: clears its faults
    /// if `clear` is set, and adds those of `faults`. Returns all faults.
    ///
    /// # Errors
    /// A message that says what is wrong with the specification; the plan is as before then.
    pub(crate) fn change_faults(&self, faults: &str, clear: bool) -> Result<Vec<String>, String> {
        let plan = urnic_faults::plan();
        if clear || !faults.is_empty() {
            plan.change(faults, clear)?;
        }
        if clear {
            tracing::warn!("the faults were cleared");
        }
        if !faults.is_empty() {
            tracing::warn!("faults were added: {faults}");
            // A fault may be due on any device of the process.
            for driver in self.rdma_cm.drivers() {
                driver.event_loop.wake();
            }
        }
        Ok(plan.list())
    }

    fn fail_by_plan(&self, qid: u32) {
        let error = QpAttr {
            state: QpState::Err as u32,
            ..QpAttr::default()
        };
        if let Some(qp) = self.qp(qid)
            && let Err(errno) = qp.modify(&error, QpMask::STATE)
        {
            tracing::debug!("{qp:?}: cannot fail by the plan: {errno}");
        }
    }
}
