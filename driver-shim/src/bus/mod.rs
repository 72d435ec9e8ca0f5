//! How the driver reaches a device: registers, doorbells, DMA, interrupts. Nothing above knows which device it is.

#[cfg(test)]
pub(crate) mod fake;
pub mod inproc;

use std::sync::Arc;

use rustix::io::Errno;

/// Called with the vector that the device raised: from any thread, with no lock of the device held.
pub type InterruptHandler = Arc<dyn Fn(u32) + Send + Sync>;

/// A device as a PCI function shows itself (`urnic_verbs_api::device`).
///
/// In a forked child the device belongs to the parent: after [`Bus::abandon_in_child`] reads answer 0, and writes, doorbells and
/// polls do nothing.
pub trait Bus: Send + Sync {
    /// Reads a register of BAR 0.
    fn read32(&self, offset: u32) -> u32;

    /// Writes a register of BAR 0.
    fn write32(&self, offset: u32, value: u32);

    /// Writes a 64-bit register of BAR 0, low half first.
    fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }

    /// Rings a doorbell: stores `value` at `offset` of doorbell page `uar`. A device in the same process does the work before
    /// this returns.
    fn doorbell(&self, uar: u32, offset: u32, value: u64);

    /// Lets the device use the thread of a poller that found its queue empty: it receives, and sends what it had gathered.
    fn progress(&self);

    /// Whether posted work waits in the device for the next poll. One relaxed load.
    fn has_gathered(&self) -> bool;

    /// Makes memory reachable for the device; returns the IOVA of its first byte.
    ///
    /// The memory must stay mapped until [`Bus::unmap`], and a device may read and write it at any time until then.
    ///
    /// # Errors
    /// `ENOMEM` if there is no room left in the device's address space.
    fn map(&self, ptr: *mut u8, len: usize) -> Result<u64, Errno>;

    /// Takes such memory away from the device again.
    fn unmap(&self, iova: u64, len: usize);

    /// Sets who is called when a vector is raised. Interrupts raised before are lost: called once, before the device is enabled.
    fn interrupts(&self, handler: InterruptHandler);

    /// The process is about to end: what completed still arrives. Takes a bounded time.
    fn shutdown(&self);

    /// In a child after fork: lets go of what was inherited, without touching the device. Async-signal-safe.
    fn abandon_in_child(&self);
}
