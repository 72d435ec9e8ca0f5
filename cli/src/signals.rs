//! The signals that end a command which runs until then.

use std::os::fd::OwnedFd;

use urnic_sys::signals::Signals;

/// A descriptor that is readable after SIGINT or SIGTERM.
pub(crate) fn as_descriptor() -> std::io::Result<OwnedFd> {
    let ends = Signals::of(&[libc::SIGINT, libc::SIGTERM]);
    ends.block();
    Ok(ends.descriptor()?)
}
