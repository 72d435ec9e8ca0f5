//! The driver's own thread: events, timers, the requests of other processes, and planned faults.

use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use urnic_cm::qp_attr::{QpAttr, QpMask};
use urnic_device::vocabulary::QpState;
use urnic_faults::DeviceFault;

use crate::driver::Driver;
use crate::events::now;
use crate::objects::AsyncEvent;
use crate::planned::Planned;
use urnic_process::failure;
use urnic_process::interrupt_context;
use urnic_process::signals;
use urnic_process::threads;

impl Driver {
    /// Starts the thread, with all signals blocked, since signals belong to the program.
    pub(crate) fn start_thread(self: Arc<Self>) -> Result<(), Errno> {
        let thread = std::thread::Builder::new()
            .name("urnic-driver".to_owned())
            .stack_size(256 << 10);
        let started = signals::blocked(|| threads::start(thread, move || self.run_event_loop()));
        let started = started.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN));
        failure::named("clone3", started).map(drop)
    }

    fn run_event_loop(&self) {
        tracing::debug!("driver thread started");
        let mut loss = None;
        while !self.event_loop().is_stopped() {
            self.handle_events();
            self.event_loop().set_awake();
            let deadline = interrupt_context::deferred(|| {
                let planned = self.carry_out_plan();
                let flushing = self
                    .commands()
                    .is_lost()
                    .then(|| self.flush_lost_device(loss.get_or_insert_with(|| self.begin_flush())))
                    .flatten();
                let native = self.with_native(|engine, world| engine.tick(world));
                let rdma_cm = self.with_rdma_cm(|engine, world| engine.tick(world));
                [planned, flushing, native, rdma_cm].into_iter().flatten().min()
            });
            // From here on, earlier deadlines wake the thread.
            self.event_loop().sleep_until(deadline);
            self.handle_events_if_due();
            let timeout = deadline.map(|at| at.saturating_sub(now())).map(|left| Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            });
            let Some(wake) = self.event_loop().wake_fd().get() else {
                break;
            };
            let stat_socket = self
                .stat_socket()
                .and_then(|stat_socket| Some((stat_socket, stat_socket.fd()?)));
            let mut sources = vec![PollFd::new(&wake, PollFlags::IN)];
            sources.extend(stat_socket.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
            let _ = poll(&mut sources, timeout.as_ref());
            let mut count = [0; 8];
            let _ = rustix::io::read(wake, &mut count);
            if let Some((stat_socket, _)) = stat_socket {
                stat_socket.answer(
                    || self.snapshot(),
                    || self.resources(),
                    |faults, clear| self.change_faults(faults, clear),
                );
            }
        }
        interrupt_context::deferred(|| self.cm_end());
        self.bus().shutdown();
        self.event_loop().end();
        tracing::debug!("driver thread ended");
    }
}

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
        self.planned().keep_away(time);
        self.device_lost();
    }

    /// Whether a device that a plan of faults stopped has not returned yet.
    pub(crate) fn is_away(&self) -> bool {
        self.planned().is_away()
    }

    fn plan(&self, planned: Planned) {
        self.planned().push(planned);
        self.event_loop().wake();
    }

    /// Carries out planned faults that are due. Returns the time of the next call.
    pub(crate) fn carry_out_plan(&self) -> Option<Duration> {
        if !urnic_faults::is_on() {
            return None;
        }
        let (due, next) = urnic_faults::plan().due(self.name());
        for fault in due {
            self.strike(fault);
        }
        for planned in self.planned().take() {
            match planned {
                Planned::Error(qid) => self.fail_by_plan(qid),
                Planned::CqOverflow(cq, pairs) => {
                    self.objects().cqs().deliver(cq, AsyncEvent::CqErr);
                    for qid in pairs {
                        self.fail_by_plan(qid);
                        self.objects().qps().deliver(qid, AsyncEvent::QpFatal);
                    }
                }
                Planned::PortDown => {
                    self.planned().set_port_reported_down(true);
                    self.objects().contexts().deliver_to_all(AsyncEvent::PortErr);
                }
                Planned::GidChange => self.objects().contexts().deliver_to_all(AsyncEvent::GidChange),
            }
        }
        let left = [next, self.report_port_up()].into_iter().flatten().min();
        left.map(|left| now() + left)
    }

    /// Reports that the port is up again, if it is; returns for how long it is still down.
    fn report_port_up(&self) -> Option<Duration> {
        if !self.planned().is_port_reported_down() {
            return None;
        }
        let left = urnic_faults::plan().port_down_for(self.name());
        if left.is_none() {
            self.planned().set_port_reported_down(false);
            self.objects().contexts().deliver_to_all(AsyncEvent::PortActive);
        }
        left
    }

    /// Changes the plan of this process at the request of another of this user: clears its faults
    /// if `clear` is set, and adds those of `faults`. Returns all faults.
    ///
    /// # Errors
    /// A message about the error in the specification; then the plan is unchanged.
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
            for driver in self.connections().manager().drivers() {
                driver.event_loop().wake();
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
