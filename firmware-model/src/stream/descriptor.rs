//! The device's file descriptors, and the list that a forked child closes them by.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Programs that use `select` count on small numbers for their own descriptors, so ours start here.
const HIGH: RawFd = 512;
/// Where `select` ends; below, there is nothing to be gained.
const SELECT_LIMIT: u64 = 1024;
const CLOSED: i32 = -1;

/// All descriptors of a device.
///
/// A child process that inherits them must close them without taking any lock, since the lock's holder may not
/// exist there. So the list is an array of atomics, and it, not the [`Descriptor`], says whether a number is
/// still ours to close.
#[derive(Debug)]
pub(crate) struct Descriptors(Box<[AtomicI32]>);

/// A descriptor of the device.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: RawFd,
    slot: usize,
    list: Arc<Descriptors>,
}

impl Descriptors {
    /// A list with room for so many.
    pub(crate) fn new(limit: usize) -> Arc<Descriptors> {
        Arc::new(Descriptors((0..limit).map(|_| AtomicI32::new(CLOSED)).collect()))
    }

    /// Takes a descriptor in and moves it to a high number if there is one.
    pub(crate) fn adopt(self: &Arc<Descriptors>, fd: OwnedFd) -> Result<Descriptor, Errno> {
        let roomy = getrlimit(Resource::Nofile)
            .current
            .is_none_or(|limit| limit > SELECT_LIMIT);
        let fd = if roomy && fd.as_raw_fd() < HIGH {
            rustix::io::fcntl_dupfd_cloexec(&fd, HIGH).unwrap_or(fd)
        } else {
            fd
        };
        let number = fd.as_raw_fd();
        // Numbers are dense, so the slot of that rank is nearly always free.
        let start = usize::try_from(number).unwrap_or(0) % self.0.len().max(1);
        let slot = (start..self.0.len()).chain(0..start).find(|i| {
            self.0[*i]
                .compare_exchange(CLOSED, number, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        });
        Ok(Descriptor {
            slot: slot.ok_or(Errno::MFILE)?,
            fd: fd.into_raw_fd(),
            list: self.clone(),
        })
    }

    /// Closes all of them. Async-signal-safe; what uses a [`Descriptor`] afterwards may hit somebody else's.
    pub(crate) fn close_all(&self) {
        for slot in &self.0 {
            close(slot.swap(CLOSED, Ordering::AcqRel));
        }
    }
}

fn close(fd: RawFd) {
    if fd >= 0 {
        // SAFETY: the number was in the list, so it is ours and open; taking it out made this the one close.
        unsafe { rustix::io::close(fd) };
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open until `self` is dropped, but in a forked child after `close_all`, where the device refuses
        // all work.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        close(self.list.0[self.slot].swap(CLOSED, Ordering::AcqRel));
    }
}
