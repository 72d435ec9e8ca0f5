//! The driver's own thread.

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::clock::now;
use crate::driver::Driver;
use urnic_process::failure;
use urnic_process::interrupt_context;
use urnic_process::signals;
use urnic_process::threads;

/// Starts the thread, with all signals blocked, since signals belong to the program.
pub(crate) fn start(driver: Arc<Driver>) -> Result<(), Errno> {
    let thread = std::thread::Builder::new()
        .name("urnic-driver".to_owned())
        .stack_size(256 << 10);
    let started = signals::blocked(|| threads::start(thread, move || driver.run_event_loop()));
    let started = started.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN));
    failure::named("clone3", started).map(drop)
}

impl Driver {
    fn run_event_loop(&self) {
        tracing::debug!("driver thread started");
        let mut loss = None;
        while !self.event_loop.is_stopped() {
            self.handle_events();
            self.event_loop.set_awake();
            let deadline = interrupt_context::deferred(|| {
                let planned = self.carry_out_plan();
                let flushing = self
                    .commands
                    .is_lost()
                    .then(|| self.flush_lost_device(loss.get_or_insert_with(|| self.begin_flush())))
                    .flatten();
                [planned, flushing, self.native_tick(), self.cm_tick()]
                    .into_iter()
                    .flatten()
                    .min()
            });
            // From here on, earlier deadlines wake the thread.
            self.event_loop.sleep_until(deadline);
            self.handle_events_if_due();
            let timeout = deadline.map(|at| at.saturating_sub(now())).map(|left| Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            });
            let Some(wake) = self.event_loop.wake_fd().get() else {
                break;
            };
            let stat_socket = self
                .stat_socket
                .get()
                .and_then(|stat_socket| Some((stat_socket, stat_socket.fd()?)));
            let mut sources = vec![PollFd::new(&wake, PollFlags::IN)];
            sources.extend(stat_socket.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
            let _ = poll(&mut sources, timeout.as_ref());
            let mut count = [0; 8];
            let _ = rustix::io::read(wake, &mut count);
            if let Some((stat_socket, _)) = stat_socket {
                stat_socket.answer(
                    || self.snapshot(),
                    |faults, clear| self.change_faults(faults, clear),
                );
            }
        }
        self.bus.shutdown();
        self.event_loop.end();
        tracing::debug!("driver thread ended");
    }
}
