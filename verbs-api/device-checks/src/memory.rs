//! Memory that the suite shares with the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use urnic_device::bus::{Bus, QueueMemory};
use zerocopy::FromBytes;

use crate::outcome::{Failure, Outcome};

/// Alignment and granularity of a bus's allocations.
const PAGE: usize = 4096;

/// Some pages, freed when dropped. The device must not use them after that.
pub(crate) struct Memory {
    bus: Arc<dyn Bus>,
    at: QueueMemory,
    len: usize,
}

impl Memory {
    /// Allocates at least `len` zeroed bytes.
    pub(crate) fn new(bus: &Arc<dyn Bus>, len: usize) -> Outcome<Memory> {
        let len = len.max(1).next_multiple_of(PAGE);
        let at = bus
            .allocate(len)
            .map_err(|errno| Failure::Failed(format!("no {len} bytes of memory for the device: {errno}")))?;
        Ok(Memory {
            bus: bus.clone(),
            at,
            len,
        })
    }

    /// IOVA of the first byte.
    pub(crate) fn iova(&self) -> u64 {
        self.at.iova
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The byte at an offset. Device and driver may access it at the same time.
    fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < self.len, "a check accesses bytes beyond its memory");
        // SAFETY: inside the allocation, which lives as long as `self`; all references to it are
        // atomic.
        unsafe { AtomicU8::from_ptr(self.at.ptr.as_ptr().add(at)) }
    }

    /// The aligned 32-bit word at an offset.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(
            at.is_multiple_of(4) && at + 4 <= self.len,
            "a check accesses bytes beyond its memory"
        );
        // SAFETY: inside the allocation, which begins at a page and lives as long as `self`; the
        // offset is a multiple of 4, and all references to the allocation are atomic.
        unsafe { AtomicU32::from_ptr(self.at.ptr.as_ptr().add(at).cast()) }
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        for (index, byte) in bytes.iter().enumerate() {
            self.byte(at + index).store(*byte, Ordering::Relaxed);
        }
    }

    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        (at..at + len)
            .map(|at| self.byte(at).load(Ordering::Relaxed))
            .collect()
    }

    /// The structure at an offset.
    pub(crate) fn load<T: FromBytes>(&self, at: usize) -> T {
        T::read_from_bytes(&self.read(at, size_of::<T>())).expect("as many bytes as it has")
    }
}

impl urnic_testkit::Memory for Memory {
    fn iova(&self) -> u64 {
        self.iova()
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        self.word(at)
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.write(at, bytes);
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        self.read(at, len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by this bus with this length, and freed only here.
        unsafe { self.bus.free(self.at, self.len) };
    }
}
