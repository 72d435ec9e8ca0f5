//! How far processes come with a device, for `urnic run --require`: each appends lines to a file
//! that a variable names.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::Errno;
use rustix::process::getpid;

use crate::file_length;

/// The variable with the [`Place`] of the file.
pub const VARIABLE: &str = "URNIC_USAGE";

static FILE: OnceLock<Place> = OnceLock::new();
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
    /// UCX's transports were loaded at one of these steps. UCX 1.13 opens an iWARP device and
    /// leaves it; later versions do not open it.
    HasUcx,
    /// It has a queue pair that can send. UCX makes queue pairs only to see whether it can.
    ReadyToSend,
}

impl Step {
    /// The line in the file.
    pub fn line(self) -> &'static str {
        match self {
            Step::Searched => "searched\n",
            Step::Opened => "opened\n",
            Step::HasUcx => "has UCX\n",
            Step::ReadyToSend => "ready to send\n",
        }
    }

    /// Whether the text of the file has this step.
    pub fn is_in(self, text: &str) -> bool {
        text.lines().any(|line| line == self.line().trim_end())
    }
}

/// A file of a running process, by a name that another file has later, and what tells the two
/// apart. Its text is `DEVICE:INODE:NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    device: u64,
    inode: u64,
    name: String,
}

impl Place {
    fn of(text: &str) -> Option<Place> {
        let mut parts = text.splitn(3, ':');
        Some(Place {
            device: parts.next()?.parse().ok()?,
            inode: parts.next()?.parse().ok()?,
            name: parts.next()?.to_owned(),
        })
    }
}

/// The value of the variable for a file that this process keeps open.
///
/// # Errors
/// Those of fstat(2).
pub fn variable(file: &impl AsFd) -> Result<String, Errno> {
    let file = file.as_fd();
    let stat = fstat(file)?;
    let (pid, fd) = (getpid().as_raw_pid(), file.as_raw_fd());
    Ok(format!("{}:{}:/proc/{pid}/fd/{fd}", stat.st_dev, stat.st_ino))
}

/// Reads the variable. Without it, [`reached`] does nothing.
pub fn start() {
    if let Some(place) = std::env::var(VARIABLE).ok().and_then(|text| Place::of(&text)) {
        let _ = FILE.set(place);
    }
}

/// Writes a step, at its first time. Best effort.
pub fn reached(step: Step) {
    let Some(place) = FILE.get() else { return };
    let bit = 1 << step as u8;
    if WRITTEN.fetch_or(bit, Ordering::Relaxed) & bit == 0
        && let Err(errno) = append(place, step.line().as_bytes())
    {
        tracing::warn!(
            "`urnic run --require` does not see this process: {}: {errno}",
            place.name
        );
    }
}

/// Writes the steps that this text of another such file has, as of processes that an inner
/// `urnic run --require` has run.
pub fn pass_on(text: &str) {
    start();
    let all = [Step::Searched, Step::Opened, Step::HasUcx, Step::ReadyToSend];
    all.into_iter().filter(|step| step.is_in(text)).for_each(reached);
}

/// Appends a line to the file.
///
/// # Errors
/// `ESTALE` if the name is that of another file by now; those of open(2) and write(2).
fn append(place: &Place, line: &[u8]) -> Result<(), Errno> {
    // Opened only as a place: to open another file might have an effect.
    let found = open(place.name.as_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&found)?;
    if (stat.st_dev, stat.st_ino) != (place.device, place.inode) {
        return Err(Errno::STALE);
    }
    file_length::permits(stat.st_size.cast_unsigned() + line.len() as u64)?;
    let again = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(again, flags, Mode::empty())?;
    rustix::io::write(&file, line).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_found_by_its_whole_line() {
        let text = Step::Searched.line().to_owned() + Step::HasUcx.line();
        assert!(Step::Searched.is_in(&text) && Step::HasUcx.is_in(&text));
        assert!(!Step::Opened.is_in(&text) && !Step::ReadyToSend.is_in(&text));
    }

    #[test]
    fn a_file_that_has_the_name_later_is_not_written() {
        let memory = || rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (ours, other) = (memory(), memory());
        let place = Place::of(&variable(&ours).unwrap()).unwrap();
        append(&place, b"one\n").unwrap();
        append(&place, b"two\n").unwrap();
        assert_eq!(fstat(&ours).unwrap().st_size, 8);
        let later = Place {
            name: Place::of(&variable(&other).unwrap()).unwrap().name,
            ..place
        };
        assert_eq!(append(&later, b"three\n"), Err(Errno::STALE));
        assert_eq!(fstat(&other).unwrap().st_size, 0);
        assert_eq!(Place::of("/proc/1/fd/3"), None);
    }
}
