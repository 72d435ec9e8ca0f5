//! libibverbs and librdmacm with owners for what they make. What is unsafe about a device is here,
//! but for the promise that memory stays ([`Link::post`]).

mod cm;
mod device;
mod link;

pub(crate) use cm::{Channel, Event, Id};
pub(crate) use device::{Device, Region, Window};
pub(crate) use link::{Batch, Completion, Element, Failure, Link, Work};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

/// What failed, if that is told by -1 and errno.
fn done(result: i32) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// What failed, if the result is an errno.
fn told(result: i32) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(result))
    }
}

fn made<T>(object: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(object).ok_or_else(io::Error::last_os_error)
}

/// Reads of `fd` do not block.
fn without_waiting(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}
