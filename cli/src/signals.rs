//! The signals that end a command which runs until then.

use std::os::fd::{FromRawFd, OwnedFd};

/// A descriptor that is readable after SIGINT or SIGTERM.
pub(crate) fn as_descriptor() -> std::io::Result<OwnedFd> {
    // SAFETY: `mask` is initialised by `sigemptyset` before use, and lives through the calls; a new
    // descriptor has no other owner.
    unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut mask);
        libc::sigaddset(&mut mask, libc::SIGINT);
        libc::sigaddset(&mut mask, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &mask, std::ptr::null_mut());
        match libc::signalfd(-1, &mask, libc::SFD_CLOEXEC) {
            -1 => Err(std::io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}
