//! The end of a process by a signal, after a last task.

use super::Done;
use nix::sys::signal::{SigSet, Signal, raise};

/// The signals that ask a process to end.
const SIGNALS: [Signal; 3] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM];

/// Signals that wait until [`after`](Self::after) handles them.
pub(crate) struct Ending(SigSet);

impl Ending {
    /// Blocks the signals in this thread and in those that it will start. Signals that the process
    /// ignores stay ignored.
    pub(crate) fn block() -> Done<Self> {
        let ignored = ignored();
        let signals = SIGNALS
            .into_iter()
            .filter(|signal| ignored >> (*signal as i32 - 1) & 1 == 0);
        let signals: SigSet = signals.collect();
        signals.thread_block().map_err(|errno| errno.to_string())?;
        Ok(Self(signals))
    }

    /// Starts a thread that waits for one of the signals, executes `task`, and lets the signal end
    /// the process.
    pub(crate) fn after(self, task: impl FnOnce() + Send + 'static) -> Done<()> {
        let wait = move || {
            let Ok(signal) = self.0.wait() else { return };
            task();
            // The signal has its default action.
            let _ = self.0.thread_unblock();
            let _ = raise(signal);
            // The first process of a PID namespace does not end by a signal.
            std::process::exit(128 + signal as i32);
        };
        let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(wait);
        thread.map(drop).map_err(|error| error.to_string())
    }
}

/// The signals that this process ignores, as bits from signal 1 on (proc_pid_status(5)). A shell
/// ignores SIGINT for programs in the background, and nohup ignores SIGHUP.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or_default()
}
