//! The log: lines on standard error, filtered by the option `log`. Each line has the time and the
//! process id.
//!
//! The first search for devices starts the log, so that a program without such a search has no
//! cost. Each line is written by one raw write(2): libc's is a cancellation point, and is
//! interposed.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::{fmt, io};
use urnic_sync::Mutex;

use rustix::io::Errno;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use urnic_config::log_filter;
use urnic_process::error_log;
use urnic_process::failure;

use crate::trace;

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

/// The warnings and errors for the report at exit; `None` without a report.
static WARNINGS: Mutex<Option<Vec<String>>> = Mutex::new(None);

/// Most warnings that are stored.
const MOST_WARNINGS: usize = 1000;

/// Keeps warnings and errors from now on.
pub(crate) fn keep_warnings() {
    *WARNINGS.lock() = Some(Vec::new());
}

/// The warnings and errors so far.
pub(crate) fn warnings() -> Vec<String> {
    let kept = WARNINGS.lock();
    kept.clone().unwrap_or_default()
}

struct StandardError {
    is_warning: bool,
}

impl MakeWriter<'_> for StandardError {
    type Writer = StandardError;

    fn make_writer(&self) -> StandardError {
        StandardError { is_warning: false }
    }

    fn make_writer_for(&self, metadata: &Metadata<'_>) -> StandardError {
        if *metadata.level() == Level::ERROR {
            ERRORS.set(ERRORS.get().wrapping_add(1));
        }
        StandardError {
            is_warning: *metadata.level() <= Level::WARN,
        }
    }
}

impl io::Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // In a forked child a thread of the parent may have held the lock.
        if self.is_warning
            && let Some(mut kept) = WARNINGS.try_lock()
            && let Some(kept) = kept.as_mut()
            && kept.len() < MOST_WARNINGS
        {
            kept.push(String::from_utf8_lossy(line).trim_end().to_owned());
        }
        if let Some(trace) = trace::trace() {
            trace.note(trace::Instant::Log(String::from_utf8_lossy(line).trim_end()));
        }
        Ok(rustix::io::write(standard_error(), line)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The program's standard error.
pub(crate) fn standard_error() -> BorrowedFd<'static> {
    // SAFETY: it is only written to, which is an error if it is closed.
    unsafe { BorrowedFd::borrow_raw(2) }
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
    // The option was checked.
    let filter: Targets = log_filter(filter).parse().unwrap_or_default();
    let levels = filter
        .iter()
        .map(|(_, level)| level)
        .chain(filter.default_level());
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(levels.max().unwrap_or(LevelFilter::ERROR))
        .with_timer(Stamp)
        .with_writer(StandardError { is_warning: false })
        .with_ansi(false)
        .finish()
        .with(filter);
    // The call fails only if there is a subscriber already, which is then used.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
