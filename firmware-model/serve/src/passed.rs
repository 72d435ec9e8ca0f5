//! Descriptors that clients pass.
//!
//! A client may pass anything: files of a file system that it serves itself, sockets, pipes. Calls
//! on those can wait for ever, and closing can, too. So what a descriptor is is found out without
//! asking its file system, at once when it comes, and nothing is ever done with one that is neither
//! memory nor an eventfd but to close it. Only the threads of the session that was given a
//! descriptor close it, and the server interrupts them when their client has gone
//! ([`interruption`](super::interruption)).

use rustix::fs::{fcntl_get_seals, readlink};
use std::os::fd::{AsRawFd, OwnedFd};

/// A descriptor, sorted.
#[derive(Debug)]
pub(crate) enum Passed {
    /// Memory that can be mapped: its pages stay unless the client truncates the file.
    Memory(OwnedFd),
    /// An eventfd.
    Eventfd(OwnedFd),
    /// Anything else.
    Other,
}

impl Passed {
    /// Finds out what a descriptor is. Closes it if it is of no use.
    pub(crate) fn new(fd: OwnedFd) -> Passed {
        if is_memory(&fd) {
            Passed::Memory(fd)
        } else if is_eventfd(&fd) {
            Passed::Eventfd(fd)
        } else {
            Passed::Other
        }
    }
}

/// Whether a file is memory: of tmpfs or hugetlbfs, by name or by memfd_create(2). The kernel
/// answers for the seals that only these have, by the kind of the file, without its file system
/// (statfs(2) would ask that).
pub(crate) fn is_memory(file: &OwnedFd) -> bool {
    fcntl_get_seals(file).is_ok()
}

/// Whether a descriptor is an eventfd. No path in any file system gives such a name, which has no
/// slash.
pub(crate) fn is_eventfd(fd: &OwnedFd) -> bool {
    let name = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    name.is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]")
}
