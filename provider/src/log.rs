//! The log: lines on standard error, filtered by the option `log`. Each line has the time and the
//! process id.
//!
//! The first search for devices starts the log, so that a program without such a search has no
//! cost. Each line is written by one raw write(2): libc's is a cancellation point, and is
//! interposed.

use std::cell::Cell;
use std::{fmt, io};

use rustix::io::Errno;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use urnic_config::log_filter;
use urnic_process::error_log;
use urnic_process::failure;

thread_local! {
    /// The number of lines of level error that this thread has logged.
    static ERRORS: Cell<u32> = const { Cell::new(0) };
}

/// Runs `action`. If it fails and logged no error, an error line names `what` and the reason.
pub(crate) fn complaining<T>(what: &str, action: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let before = (ERRORS.get(), error_log::count());
    action().inspect_err(|errno| {
        if (ERRORS.get(), error_log::count()) == before {
            error_log::log_once(format!("{what}: {}", failure::explained(*errno)));
        }
    })
}

struct StandardError;

impl MakeWriter<'_> for StandardError {
    type Writer = StandardError;

    fn make_writer(&self) -> StandardError {
        StandardError
    }

    fn make_writer_for(&self, metadata: &Metadata<'_>) -> StandardError {
        if *metadata.level() == Level::ERROR {
            ERRORS.set(ERRORS.get().wrapping_add(1));
        }
        StandardError
    }
}

impl io::Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // SAFETY: the program's standard error, which is only written to, and may be closed.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
        Ok(rustix::io::write(fd, line)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The beginning of a line: the time, and the process id, which changes after a fork.
struct Stamp;

impl FormatTime for Stamp {
    fn format_time(&self, w: &mut Writer<'_>) -> fmt::Result {
        SystemTime.format_time(w)?;
        write!(w, " pid {}", rustix::process::getpid())
    }
}

/// Starts the log with the option `log`. Call it once.
pub(crate) fn start(filter: &str) {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::builder().parse_lossy(log_filter(filter)))
        .with_timer(Stamp)
        .with_writer(StandardError)
        .with_ansi(false)
        .finish();
    // The call fails only if there is a subscriber already, which is then used.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
