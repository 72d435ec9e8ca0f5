//! Descriptors of libibverbs and librdmacm, which block by default.

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::io;
use std::os::fd::BorrowedFd;

/// Makes reads of `fd` fail with EAGAIN where they would block.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}
