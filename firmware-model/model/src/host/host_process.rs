//! A process whose memory the device uses, and which peers on this host may reach as well.

use super::process_memory;
use crate::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use urnic_sys::processes;

/// One certain process, alive or ended; never another process with its number.
#[derive(Debug)]
pub struct HostProcess {
    number: Pid,
    /// While this pidfd reports that the process lives, no other process has its number.
    life: OwnedFd,
}

impl HostProcess {
    /// # Errors
    /// There is no such process, or the system does not permit this one to access its memory.
    pub fn open(number: Pid) -> Result<HostProcess, Errno> {
        Self::of_pidfd(pidfd_open(number, PidfdFlags::empty())?)
    }

    /// The process that has the other end of a connected unix socket.
    ///
    /// # Errors
    /// The process has ended, or the system does not permit this one to access its memory.
    pub fn of_peer(socket: BorrowedFd<'_>) -> Result<HostProcess, Errno> {
        match sys::peer_pidfd(socket) {
            Ok(life) => Self::of_pidfd(life),
            // Before Linux 6.5 the kernel reports only a number, which may mean another process
            // after the peer has ended. While the socket is connected the peer has not ended,
            // unless it passed the socket to another process.
            Err(Errno::NOPROTOOPT) => {
                let peer = processes::peer(socket)?;
                let process = Self::open(peer.process.ok_or(Errno::SRCH)?)?;
                let mut polled = [PollFd::new(&socket, PollFlags::empty())];
                poll(&mut polled, Some(&Timespec::default()))?;
                let is_connected = !polled[0].revents().contains(PollFlags::HUP);
                is_connected.then_some(process).ok_or(Errno::SRCH)
            }
            Err(errno) => Err(errno),
        }
    }

    fn of_pidfd(life: OwnedFd) -> Result<HostProcess, Errno> {
        let number = number_of(life.as_fd()).ok_or(Errno::SRCH)?;
        let process = HostProcess { number, life };
        may_be_accessed(number)?;
        process.lives().then_some(process).ok_or(Errno::SRCH)
    }

    /// The process number.
    pub fn number(&self) -> Pid {
        self.number
    }

    /// Whether the process has not ended.
    pub fn lives(&self) -> bool {
        lives(self.life.as_fd())
    }

    /// The pidfd of the process.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.life.as_fd()
    }
}

/// Checks that the system permits this process to access the memory of another (ptrace(2), "Ptrace
/// access mode checking"; seccomp(2)).
///
/// # Errors
/// That of process_vm_readv(2), if it is not permitted.
pub(crate) fn may_be_accessed(number: Pid) -> Result<(), Errno> {
    // Nothing is mapped at 0.
    match process_memory::read(number, 0, &mut [0]) {
        Err(Errno::FAULT) => Ok(()),
        Err(errno) => Err(errno),
        Ok(_) => Err(Errno::PERM),
    }
}

/// Shows that this process may access the memory of `process`, to another that may, too: a hash of
/// `challenge` and of the 16 bytes that the kernel made at random for the process (AT_RANDOM,
/// getauxval(3)). Nobody else knows these, nor can choose where they are. `None`: it may not.
pub(crate) fn proof_of_access(process: Pid, challenge: &[u8]) -> Option<u64> {
    const AT_RANDOM: u64 = 25;
    /// Bytes of a longer list than any kernel makes.
    const LIST: u64 = 4096;
    let list = std::fs::File::open(format!("/proc/{}/auxv", process.as_raw_nonzero())).ok()?;
    let mut bytes = Vec::new();
    list.take(LIST).read_to_end(&mut bytes).ok()?;
    let (entries, _) = bytes.as_chunks::<16>();
    let entry = entries
        .iter()
        .find(|entry| entry[..8] == AT_RANDOM.to_ne_bytes())?;
    let address = u64::from_ne_bytes(*entry.last_chunk()?);
    let mut random = [0u8; 16];
    let read = process_memory::read(process, address, &mut random);
    let mut hasher = DefaultHasher::new();
    hasher.write(&random);
    hasher.write(challenge);
    (read == Ok(random.len())).then(|| hasher.finish())
}

/// The number of the process of a pidfd, if it lives.
pub(crate) fn number_of(life: BorrowedFd<'_>) -> Option<Pid> {
    // proc_pid_fdinfo(5); -1: the process has ended, 0: it is in another pid namespace.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpid;

    #[test]
    fn shm_24_access_is_proved_by_what_only_the_process_has() {
        let own = proof_of_access(getpid(), b"one");
        assert!(own.is_some());
        assert_eq!(own, proof_of_access(getpid(), b"one"));
        assert_ne!(own, proof_of_access(getpid(), b"other"));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let of_child = crate::testing::mock::wait_for("the child's program", || {
            proof_of_access(Pid::from_child(&child), b"one").filter(|proof| Some(*proof) != own)
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert_ne!(Some(of_child), own);
        assert_eq!(proof_of_access(Pid::from_raw(i32::MAX).unwrap(), b"one"), None);
    }

    #[test]
    fn a_process_at_the_other_end_of_a_socket_is_found() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(HostProcess::of_peer(near.as_fd()).unwrap().number(), getpid());
        drop(far);
        // This process lives, whether or not the kernel has pidfds of peers.
        let after = HostProcess::of_peer(near.as_fd());
        assert!(after.is_ok() || sys::peer_pidfd(near.as_fd()).is_err());
    }
}
