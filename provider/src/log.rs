//! The log: lines on standard error, chosen by the option `log`.
//!
//! Started with the first look for devices, so that a program that never looks for one pays nothing. Lines go out by one raw
//! write(2) each: libc's is a cancellation point, and ours to interpose.

use std::io;

use tracing_subscriber::EnvFilter;

struct StandardError;

impl io::Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // SAFETY: whatever the program has as standard error; only written to.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
        Ok(rustix::io::write(fd, line)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the log with a filter in `tracing`'s syntax. To be called once.
pub(crate) fn start(filter: &str) {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::builder().parse_lossy(filter))
        .with_writer(|| StandardError)
        .with_ansi(false)
        .finish();
    // It fails only when there is one already: then that one is as good.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
