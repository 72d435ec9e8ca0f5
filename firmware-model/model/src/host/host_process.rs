//! A process whose memory the device uses, and which peers on this host may reach as well.

use super::process_memory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process that lives, or has ended: no other takes its place.
#[derive(Debug)]
pub struct HostProcess {
    number: Pid,
    /// While this pidfd reports that the process lives, no other process has its number.
    life: OwnedFd,
}

impl HostProcess {
    /// # Errors
    /// There is no such process, or the system does not let this one access its memory.
    pub fn open(number: Pid) -> Result<HostProcess, Errno> {
        let life = pidfd_open(number, PidfdFlags::empty())?;
        let process = HostProcess { number, life };
        may_be_accessed(number)?;
        process.lives().then_some(process).ok_or(Errno::SRCH)
    }

    /// Its number.
    pub fn number(&self) -> Pid {
        self.number
    }

    /// Whether it has not ended.
    pub fn lives(&self) -> bool {
        lives(self.life.as_fd())
    }

    /// Its pidfd.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.life.as_fd()
    }
}

/// Whether the system lets this process access the memory of another (ptrace(2), "Ptrace access
/// mode checking"; seccomp(2)).
///
/// # Errors
/// It does not.
pub(crate) fn may_be_accessed(number: Pid) -> Result<(), Errno> {
    // Nothing is mapped at 0.
    match process_memory::read(number, 0, &mut [0]) {
        Err(Errno::FAULT) => Ok(()),
        Err(errno) => Err(errno),
        Ok(_) => Err(Errno::PERM),
    }
}

/// The number of the process of a pidfd, if it lives.
pub(crate) fn number_of(life: BorrowedFd<'_>) -> Option<Pid> {
    // proc_pid_fdinfo(5); -1: it has ended, 0: it is in another pid namespace.
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", life.as_raw_fd())).ok()?;
    let number = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    number
        .trim()
        .parse()
        .ok()
        .filter(|n| *n > 0)
        .and_then(Pid::from_raw)
}

/// Whether the process of a pidfd has not ended.
pub(crate) fn lives(life: BorrowedFd<'_>) -> bool {
    let at_once = Timespec::default();
    poll(&mut [PollFd::new(&life, PollFlags::IN)], Some(&at_once)) == Ok(0)
}
