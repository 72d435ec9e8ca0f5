//! The descriptors on which the thread of a PCI function sleeps.

use std::os::fd::BorrowedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::pci::PciFunction;
use super::uapi;
use urnic_process::fds::InternalFd;

/// The descriptors on which the thread sleeps.
pub(super) struct Sources {
    /// Wakes the thread for the end of the bus or the loss of the device.
    pub(super) wake: InternalFd,
    /// An error that the bus could not correct.
    pub(super) error: Option<InternalFd>,
    /// The kernel requests the function: it is unplugged or unbound.
    pub(super) request: Option<InternalFd>,
    pub(super) vectors: Vec<InternalFd>,
}

impl Sources {
    /// Makes eventfds for the interrupts of the function, and connects them.
    ///
    /// # Errors
    /// `EMFILE` if no fd is left; the kernel's errors.
    pub(super) fn new(function: &PciFunction) -> Result<Sources, Errno> {
        let fresh = || InternalFd::of_device(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let count = function.vectors().min(uapi::MAX_VECTORS as u32);
        let vectors = (0..count).map(|_| fresh()).collect::<Result<Vec<_>, _>>()?;
        let fds: Vec<BorrowedFd<'_>> = vectors.iter().filter_map(InternalFd::get).collect();
        function.raise(uapi::MSIX, &fds)?;
        let single = |index| -> Result<Option<InternalFd>, Errno> {
            if !function.has_irq(index) {
                return Ok(None);
            }
            let fd = fresh()?;
            function.raise(index, &[fd.get().ok_or(Errno::IO)?])?;
            Ok(Some(fd))
        };
        Ok(Sources {
            wake: fresh()?,
            error: single(uapi::ERR)?,
            request: single(uapi::REQ)?,
            vectors,
        })
    }

    /// Wakes the thread, which then checks the state of the bus.
    pub(super) fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }
}
