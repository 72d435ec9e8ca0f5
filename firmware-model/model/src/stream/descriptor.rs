//! The device's file descriptors, and the list that a forked child closes them by.

use crate::memory::reserve;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

/// Programs that use `select` count on small numbers for their own descriptors, so ours start here.
const HIGH: RawFd = 512;
const CLOSED: i32 = -1;

/// Informed of each file descriptor when the device has opened it, and again right before the
/// device closes it. For a device inside a program that closes numbers which it did not open.
/// Async-signal-safe.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorWatch {
    /// The device has opened it.
    pub opened: fn(RawFd),
    /// The device is about to close it.
    pub closing: fn(RawFd),
}

impl PartialEq for DescriptorWatch {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.opened, other.opened) && std::ptr::fn_addr_eq(self.closing, other.closing)
    }
}

impl Eq for DescriptorWatch {}

/// All descriptors of a device.
///
/// A child process that inherits them must close them without taking any lock, since the lock's
/// holder may not exist there. So the list is an array of atomics, and this list, not the
/// [`Descriptor`], decides whether the device must still close a number.
#[derive(Debug)]
pub(crate) struct Descriptors {
    slots: Box<[AtomicI32]>,
    /// Slots that are used or promised.
    taken: AtomicUsize,
    full: AtomicBool,
    watch: Option<DescriptorWatch>,
}

/// A reserved slot.
#[derive(Debug)]
pub(crate) struct Room(Arc<Descriptors>);

/// A descriptor of the device.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: RawFd,
    slot: usize,
    room: Room,
}

impl Descriptors {
    /// A list with room for this number of descriptors.
    pub(crate) fn new(limit: usize, watch: Option<DescriptorWatch>) -> Arc<Descriptors> {
        let slots = (0..limit).map(|_| AtomicI32::new(CLOSED)).collect();
        Arc::new(Descriptors {
            slots,
            taken: AtomicUsize::new(0),
            full: AtomicBool::new(false),
            watch,
        })
    }

    /// Reserves room for one more descriptor before the kernel is requested to make it: a
    /// connection that cannot be kept is better left with the kernel.
    ///
    /// # Errors
    ///
    /// `EMFILE`: the device has the maximum number of descriptors.
    pub(crate) fn room(self: &Arc<Descriptors>) -> Result<Room, Errno> {
        if reserve(&self.taken, 1, self.slots.len()) {
            return Ok(Room(self.clone()));
        }
        if !self.full.swap(true, Ordering::Relaxed) {
            tracing::warn!("all {} descriptors of the device are in use", self.slots.len());
        }
        Err(Errno::MFILE)
    }

    /// Takes a descriptor in.
    pub(crate) fn adopt(self: &Arc<Descriptors>, fd: OwnedFd) -> Result<Descriptor, Errno> {
        Ok(self.room()?.adopt(fd))
    }

    /// The numbers of the descriptors.
    #[cfg(test)]
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        let numbers = self.slots.iter().map(|fd| fd.load(Ordering::Relaxed));
        numbers.filter(|fd| *fd != CLOSED).collect()
    }

    /// In a forked child: closes all descriptors. Async-signal-safe. A later use of a
    /// [`Descriptor`] may reach a descriptor of another owner.
    pub(crate) fn close_all(&self) {
        for slot in &self.slots {
            // fork(2) copies the descriptors before the memory: a descriptor that another thread
            // opened in between is listed, but not open here.
            let fd = slot.load(Ordering::Acquire);
            if urnic_sys::descriptors::is_open(fd) {
                self.close(slot);
            } else {
                slot.store(CLOSED, Ordering::Relaxed);
            }
        }
    }

    fn close(&self, slot: &AtomicI32) {
        let fd = slot.swap(CLOSED, Ordering::AcqRel);
        if fd >= 0 {
            if let Some(watch) = self.watch {
                (watch.closing)(fd);
            }
            // SAFETY: the number was in the list, so it belongs to the device and is open. Taking
            // it out of the list made sure that only this call closes it.
            unsafe { rustix::io::close(fd) };
        }
    }
}

impl Room {
    /// Takes a descriptor in and moves it to a high number if there is one.
    pub(crate) fn adopt(self, fd: OwnedFd) -> Descriptor {
        let fd = if fd.as_raw_fd() < HIGH {
            // Where the limit is too low, or all high numbers are taken, the descriptor keeps its
            // number.
            rustix::io::fcntl_dupfd_cloexec(&fd, HIGH).unwrap_or(fd)
        } else {
            fd
        };
        let number = fd.as_raw_fd();
        let slots = &self.0.slots;
        // Numbers are dense, so the slot of that rank is nearly always free; and some slot is free,
        // because room was reserved.
        let mut slot = usize::try_from(number).unwrap_or(0) % slots.len();
        while slots[slot]
            .compare_exchange(CLOSED, number, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            slot = (slot + 1) % slots.len();
        }
        if let Some(watch) = self.0.watch {
            (watch.opened)(number);
        }
        Descriptor {
            slot,
            fd: fd.into_raw_fd(),
            room: self,
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open until `self` is dropped, but in a forked child after `close_all`, where the
        // device refuses all work.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let list = &self.room.0;
        list.close(&list.slots[self.slot]);
    }
}
