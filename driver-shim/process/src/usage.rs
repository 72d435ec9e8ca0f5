//! How far processes come with a device, for `urnic run --require`: each appends lines to a file
//! that a variable names.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::Errno;

use crate::file_length;

/// The variable with the name of the file.
pub const VARIABLE: &str = "URNIC_USAGE";

static FILE: OnceLock<PathBuf> = OnceLock::new();
/// The steps that this process, or the process that forked it, has written, as bits.
static WRITTEN: AtomicU8 = AtomicU8::new(0);

/// A step of a process on its way to using a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// It searched for RDMA devices.
    Searched,
    /// It opened one of ours.
    Opened,
    /// It opened one of ours for UCX.
    OpenedByUcx,
    /// It has a queue pair that can send. UCX makes queue pairs only to see whether it can.
    ReadyToSend,
}

impl Step {
    /// The line in the file.
    pub fn line(self) -> &'static str {
        match self {
            Step::Searched => "searched\n",
            Step::Opened => "opened\n",
            Step::OpenedByUcx => "opened by UCX\n",
            Step::ReadyToSend => "ready to send\n",
        }
    }

    /// Whether the text of the file has this step.
    pub fn is_in(self, text: &str) -> bool {
        text.lines().any(|line| line == self.line().trim_end())
    }
}

/// Reads the variable. Without it, [`reached`] does nothing.
pub fn start() {
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        let _ = FILE.set(path.into());
    }
}

/// Writes a step, at its first time. Best effort.
pub fn reached(step: Step) {
    let Some(path) = FILE.get() else { return };
    let bit = 1 << step as u8;
    if WRITTEN.fetch_or(bit, Ordering::Relaxed) & bit == 0
        && let Err(errno) = append(path, step.line().as_bytes())
    {
        tracing::debug!("{}: {errno}", path.display());
    }
}

/// Appends a line to the file, which exists.
fn append(path: &PathBuf, line: &[u8]) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::empty())?;
    file_length::permits(fstat(&file)?.st_size.cast_unsigned() + line.len() as u64)?;
    rustix::io::write(&file, line).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_found_by_its_whole_line() {
        let text = Step::Searched.line().to_owned() + Step::OpenedByUcx.line();
        assert!(Step::Searched.is_in(&text) && Step::OpenedByUcx.is_in(&text));
        assert!(!Step::Opened.is_in(&text) && !Step::ReadyToSend.is_in(&text));
    }
}
