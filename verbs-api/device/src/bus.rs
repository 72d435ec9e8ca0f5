//! The bus: how a driver accesses a device, by registers, doorbells, shared memory and interrupts.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

/// An event of the device that a bus reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// The device raised this vector.
    Interrupt(u32),
    /// The device is lost for good: its process ended, or it was removed. Reported
    /// once.
    Lost,
}

/// A handler of signals. The bus calls it from any thread, with no lock of the device or bus held.
pub type SignalHandler = Arc<dyn Fn(Signal) + Send + Sync>;

/// Memory that host and device share, for queues, records and buffers of commands.
#[derive(Debug, Clone, Copy)]
pub struct QueueMemory {
    /// Pointer to the first byte, at a multiple of 4096.
    pub ptr: NonNull<u8>,
    /// IOVA of the first byte.
    pub iova: u64,
}

// SAFETY: an address and an IOVA; the owner of the memory coordinates all access to it.
unsafe impl Send for QueueMemory {}

/// The IOVAs at which the device sees memory of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapping {
    /// One piece, from this IOVA on.
    Contiguous(u64),
    /// Pages at unrelated IOVAs, as when there is no IOMMU.
    Pages {
        /// IOVA of each page.
        pages: Vec<u64>,
        /// log2 of the bytes of a page.
        log_page: u32,
        /// Offset of the memory in the first page, in bytes.
        offset: u64,
    },
}

/// The driver's access to a device with the interface of this crate.
///
/// Registers of a lost device read as all ones; writes to them have no effect.
///
/// In a forked child the device belongs to the parent: after [`Bus::abandon_in_child`] reads return
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

    /// Informs the bus of the device's feature bits (`crate::command::features`), before the first
    /// doorbell.
    fn features(&self, _features: u32) {}

    /// Lends the device the thread of a poller that found its queue empty: the device receives, and
    /// sends the data that it had gathered. `queue_pair` is the one that completed something in
    /// that queue last, or 0: most likely the poller waits for that one.
    fn progress(&self, queue_pair: u32);

    /// Waits until `done` returns true, for at most `timeout`. A device that can use the calling
    /// thread serves all its streams meanwhile. `readiness` becomes readable when another thread
    /// has met the condition. Returns whether the condition is met; returns at once if the device
    /// runs in another process.
    fn lend(&self, _timeout: Duration, _readiness: BorrowedFd<'_>, _done: &mut dyn FnMut() -> bool) -> bool {
        false
    }

    /// The calling thread is about to wait by [`Bus::lend`]: what arrives in a moment is left to
    /// it.
    fn will_lend(&self) {}

    /// Whether posted work waits in the device for the next poll. Costs one relaxed load.
    fn has_gathered(&self) -> bool;

    /// Allocates `len` zeroed bytes of memory for queues: a multiple of 4096, contiguous for the
    /// device. The memory costs nothing until it is accessed.
    ///
    /// # Errors
    /// `ENOMEM` if there is no memory; `EIO` if the device is lost.
    fn allocate(&self, len: usize) -> Result<QueueMemory, Errno>;

    /// Whether queues may be in the program's own memory. Otherwise they must be in memory from
    /// [`Bus::allocate`].
    fn adopts(&self) -> bool {
        false
    }

    /// Adopts the program's own memory, at a multiple of 4096, for a queue; `None` if the device
    /// supports only memory from [`Bus::allocate`].
    ///
    /// # Safety
    /// The queue's bytes stay allocated, and only the queue uses them, until the queue is destroyed
    /// or its creation fails.
    unsafe fn adopt(&self, _ptr: NonNull<u8>) -> Option<QueueMemory> {
        None
    }

    /// Frees memory from [`Bus::allocate`]. Neither the program nor the device may use it
    /// afterwards.
    ///
    /// # Safety
    /// `memory` came from [`Bus::allocate`] with this `len`, and is freed once.
    unsafe fn free(&self, memory: QueueMemory, len: usize);

    /// Makes memory of the program accessible to the device, which writes it only if `write`.
    ///
    /// The memory must stay mapped until [`Bus::unmap`], and a device may access it at any time
    /// until then. Ranges may overlap, and a range may be mapped several times.
    ///
    /// # Errors
    /// `ENOMEM` if the device's address space is full, or the process may lock no more memory;
    /// `EIO` if the device is lost.
    fn map(&self, ptr: *mut u8, len: usize, write: bool) -> Result<Mapping, Errno>;

    /// Ends the device's access to memory that [`Bus::map`] mapped.
    fn unmap(&self, mapping: &Mapping, len: usize);

    /// Sets the handler of interrupts and of the device's loss. Earlier signals are not repeated,
    /// so the driver calls this once, before it enables the device.
    fn signals(&self, handler: SignalHandler);

    /// A short description for `urnic info` of how the device accesses memory that the program
    /// registers.
    fn memory(&self) -> &'static str;

    /// Prepares the device for the end of the process: data that has completed still arrives. Takes
    /// a bounded time.
    fn shutdown(&self);

    /// In a child after fork: releases the inherited resources without access to the device.
    /// Async-signal-safe.
    fn abandon_in_child(&self);
}
