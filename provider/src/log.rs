//! The log: lines on standard error, filtered by the option `log`. Each line has the time and the
//! process id.
//!
//! The first search for devices starts the log, so that a program without such a search has no
//! cost. Each line is written by one raw write(2): libc's is a cancellation point, and is
//! interposed.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use urnic_sync::Mutex;

use rustix::io::{Errno, retry_on_intr};
use tracing::Level;
use urnic_process::log::{Log, LogFilter};
use urnic_process::{error_log, failure};

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

/// Writes a line to standard error, and notes it for the report and the trace.
fn write(level: Level, line: &str) {
    if level == Level::ERROR {
        ERRORS.set(ERRORS.get().wrapping_add(1));
    }
    // In a forked child a thread of the parent may have held the lock.
    if level <= Level::WARN
        && let Some(mut kept) = WARNINGS.try_lock()
        && let Some(kept) = kept.as_mut()
        && kept.len() < MOST_WARNINGS
    {
        kept.push(line.trim_end().to_owned());
    }
    if let Some(trace) = trace::trace() {
        trace.note(trace::Instant::Log(line.trim_end()));
    }
    // A log that cannot be written is no reason to fail.
    let mut rest = line.as_bytes();
    while !rest.is_empty()
        && let Ok(written @ 1..) = retry_on_intr(|| rustix::io::write(standard_error(), rest))
    {
        rest = &rest[written..];
    }
}

/// The program's standard error.
pub(crate) fn standard_error() -> BorrowedFd<'static> {
    // SAFETY: it is only written to, which is an error if it is closed.
    unsafe { BorrowedFd::borrow_raw(2) }
}

/// Starts the log with the option `log`. Call it once.
pub(crate) fn start(filter: &str) {
    // The option was checked.
    let Some(filter) = LogFilter::parse(filter) else {
        return;
    };
    let log = Log {
        filter,
        // It changes after a fork.
        stamp: || format!(" pid {}", rustix::process::getpid()),
        write,
    };
    // The call fails only if there is a subscriber already, which is then used.
    let _ = tracing::subscriber::set_global_default(log);
}
