//! How a driver reaches a device: registers, doorbells, shared memory, interrupts.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

/// What a bus tells of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// The device raised this vector.
    Interrupt(u32),
    /// The device is gone and does not come back: its process ended, or somebody pulled it out.
    /// Told once.
    Lost,
}

/// Called with what happened: from any thread, with no lock of the device or bus held.
pub type SignalHandler = Arc<dyn Fn(Signal) + Send + Sync>;

/// Memory that host and device share, for queues, records and buffers of commands.
#[derive(Debug, Clone, Copy)]
pub struct QueueMemory {
    /// Its first byte, at a multiple of 4096.
    pub ptr: NonNull<u8>,
    /// Where the device sees that byte.
    pub iova: u64,
}

// SAFETY: addresses. Who allocated the memory decides who accesses it.
unsafe impl Send for QueueMemory {}

/// How the device sees memory of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapping {
    /// In one piece, from this IOVA on.
    Contiguous(u64),
    /// In pages that lie anywhere, as when there is no IOMMU.
    Pages {
        /// IOVA of each page.
        pages: Vec<u64>,
        /// log2 of the bytes of a page.
        log_page: u32,
        /// Where in the first page the memory begins.
        offset: u64,
    },
}

/// A device as a PCI function shows itself (this crate).
///
/// A device that is lost reads as all ones; what is written to it goes nowhere.
///
/// In a forked child the device belongs to the parent: after [`Bus::abandon_in_child`] reads answer
/// 0, and writes, doorbells and polls do nothing.
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

    /// Rings a doorbell: stores `value` at `offset` of doorbell page `uar`. A device in the same
    /// process does the work before this returns.
    fn doorbell(&self, uar: u32, offset: u32, value: u64);

    /// Tells the bus the device's feature bits (`crate::command::features`), before the first
    /// doorbell.
    fn features(&self, _features: u32) {}

    /// Lets the device use the thread of a poller that found its queue empty: it receives, and
    /// sends what it had gathered.
    fn progress(&self);

    /// The calling thread waits until `done`, for `patience` at the longest, and a device that can
    /// use it looks at all its streams meanwhile. `told` becomes readable when others have done it.
    /// Returns whether it is done; at once if the device runs elsewhere.
    fn lend(&self, _patience: Duration, _told: BorrowedFd<'_>, _done: &mut dyn FnMut() -> bool) -> bool {
        false
    }

    /// Whether posted work waits in the device for the next poll. One relaxed load.
    fn has_gathered(&self) -> bool;

    /// Makes `len` zeroed bytes of memory for queues: a multiple of 4096, contiguous for the
    /// device. They cost nothing until touched.
    ///
    /// # Errors
    /// `ENOMEM`; `EIO` if the device is lost.
    fn allocate(&self, len: usize) -> Result<QueueMemory, Errno>;

    /// Whether queues may be in memory of the program's own; otherwise in such from
    /// [`Bus::allocate`] only.
    fn adopts(&self) -> bool {
        false
    }

    /// Takes memory of the program's own, at a multiple of 4096, for a queue; `None` if the device
    /// does not take such.
    ///
    /// # Safety
    /// The queue's bytes are there, and nobody else's, until the queue was destroyed, or its making
    /// failed.
    unsafe fn adopt(&self, _ptr: NonNull<u8>) -> Option<QueueMemory> {
        None
    }

    /// Gives such memory back. Nobody uses it any more, the device neither.
    ///
    /// # Safety
    /// `memory` came from [`Bus::allocate`] with this `len`, and is given back once.
    unsafe fn free(&self, memory: QueueMemory, len: usize);

    /// Makes memory of the program reachable for the device, which writes it only if `write`.
    ///
    /// The memory must stay mapped until [`Bus::unmap`], and a device may access it at any time
    /// until then. Ranges may overlap, and a range may be mapped several times.
    ///
    /// # Errors
    /// `ENOMEM` if there is no room left in the device's address space, or the process may lock no
    /// more memory; `EIO` if the device is lost.
    fn map(&self, ptr: *mut u8, len: usize, write: bool) -> Result<Mapping, Errno>;

    /// Takes such memory away from the device again.
    fn unmap(&self, mapping: &Mapping, len: usize);

    /// Sets who is told of interrupts and of the device's loss. What happened before is not told:
    /// called once, before the device is enabled.
    fn signals(&self, handler: SignalHandler);

    /// How the device reaches memory that the program registers, in a few words for `urnic info`.
    fn memory(&self) -> &'static str;

    /// The process is about to end: what completed still arrives. Takes a bounded time.
    fn shutdown(&self);

    /// In a child after fork: lets go of what was inherited, without touching the device.
    /// Async-signal-safe.
    fn abandon_in_child(&self);
}
