//! Descriptors that clients pass.
//!
//! A client may pass any descriptor: files of a file system that it serves itself, sockets, pipes.
//! Calls on those can wait forever, and closing them can, too. The kind of a descriptor is
//! therefore determined as soon as it arrives, without a call to its file system. A descriptor that
//! is neither memory nor an eventfd is closed and used for nothing else. Only the threads of the
//! session that received a descriptor close it, and the server interrupts them when their client
//! has gone ([`interruption`](super::interruption)).

use rustix::fs::{fcntl_get_seals, readlink};
use std::os::fd::{AsRawFd, OwnedFd};

/// A descriptor, sorted by kind.
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
    /// Determines the kind of a descriptor. Closes a descriptor that is neither memory nor an
    /// eventfd.
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

/// Whether a file is memory: of tmpfs or hugetlbfs, opened by name or by memfd_create(2). Only such
/// files have seals, and the kernel returns the seals without a call to the file system (statfs(2)
/// would call it).
pub(crate) fn is_memory(file: &OwnedFd) -> bool {
    fcntl_get_seals(file).is_ok()
}

/// Whether a descriptor is an eventfd. The name has no slash, so no path in a file system can have
/// it.
pub(crate) fn is_eventfd(fd: &OwnedFd) -> bool {
    let name = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    name.is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]")
}
