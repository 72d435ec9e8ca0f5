//! Processes that may have no number here: the kernel reports 0 for a process outside this one's
//! PID namespace, as in a container or under `unshare --pid`. A `Pid` of rustix cannot be 0, and
//! its functions of the same names make one without a check.

use std::ffi::{c_int, c_long};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::process::Pid;

use crate::errno;

/// The session of a process, or of this one, named by the process that leads it: getsid(2). `None`:
/// a process outside this PID namespace.
///
/// # Errors
/// `ESRCH`: there is no such process.
pub fn session(process: Option<Pid>) -> Result<Option<Pid>, Errno> {
    // SAFETY: the call takes any number, and touches no memory.
    number(unsafe { libc::syscall(libc::SYS_getsid, Pid::as_raw(process)) })
}

/// The process group of a process, or of this one, named by the process that led it first:
/// getpgid(2). `None`: a process outside this PID namespace.
///
/// # Errors
/// `ESRCH`: there is no such process.
pub fn group(process: Option<Pid>) -> Result<Option<Pid>, Errno> {
    // SAFETY: the call takes any number, and touches no memory.
    number(unsafe { libc::syscall(libc::SYS_getpgid, Pid::as_raw(process)) })
}

fn number(result: c_long) -> Result<Option<Pid>, Errno> {
    match c_int::try_from(result) {
        Ok(-1) | Err(_) => Err(errno::last()),
        Ok(number) => Ok(Pid::from_raw(number)),
    }
}

/// The process at the other end of a unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The effective user, as of connect(2) or listen(2); `u32::MAX` for a socket that has no peer.
    pub user: u32,
    /// The process, as of then. It may have ended, and passed the socket to another one. `None`: it
    /// is outside this PID namespace.
    pub process: Option<Pid>,
}

/// `SO_PEERCRED`: the process that connected, or that listens, at the other end of a unix socket.
///
/// # Errors
/// Those of getsockopt(2).
pub fn peer(socket: BorrowedFd<'_>) -> Result<Peer, Errno> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both are live, `len` is the size of the structure, and any bytes are one.
    let done = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            &raw mut credentials,
            &raw mut len,
        )
    };
    if done != 0 {
        return Err(errno::last());
    }
    Ok(Peer {
        user: credentials.uid,
        process: Pid::from_raw(credentials.pid.max(0)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{geteuid, getpid};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (end, _other) = UnixStream::pair().expect("a pair");
        let expected = Peer {
            user: geteuid().as_raw(),
            process: Some(getpid()),
        };
        assert_eq!(peer(end.as_fd()), Ok(expected));
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert_eq!(peer(file.as_fd()), Err(Errno::NOTSOCK));
    }

    #[test]
    fn own_session_and_group_are_those_of_the_process_by_its_number() {
        assert_eq!(session(None), session(Some(getpid())));
        assert_eq!(group(None), group(Some(getpid())));
        // No process has the largest number.
        assert_eq!(session(Pid::from_raw(i32::MAX)), Err(Errno::SRCH));
        assert_eq!(group(Pid::from_raw(i32::MAX)), Err(Errno::SRCH));
    }
}
