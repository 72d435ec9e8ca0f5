//! The guarantees of a device's host about its memory.

use super::fault;
use super::fault::Unreachable;
use super::host_process::HostProcess;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use urnic_sync::Mutex;

/// Bytes of a page, or of the smallest one where there are several sizes.
pub(super) const PAGE: usize = 4096;

/// The device's access to host memory.
///
/// # Safety
///
/// A pointer that [`reach`](HostMemory::reach) returns must be readable and writable for the `len`
/// requested bytes until every object of the device that was created over that range is destroyed.
/// A region alone may lie over memory that its program unmaps, protects or truncates, if
/// [`fault::install`](crate::host::fault) was called. An implementation for a guest that
/// may unmap memory at any time puts other pages in its place instead of leaving a hole.
pub unsafe trait HostMemory: Send + Sync {
    /// The place of the `len` bytes at `iova`; `None` if one of them cannot be reached, or they are
    /// not in one extent here.
    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>>;

    /// Memory without an address in this process, if the host has such memory.
    fn remote(&self) -> Option<&dyn RemoteMemory> {
        None
    }

    /// Set while memory that the device uses has wrong contents. The device then sends, receives
    /// and executes nothing: the owner of the memory stops the device soon.
    fn stopped(&self) -> &'static AtomicBool {
        static NEVER: AtomicBool = AtomicBool::new(false);
        &NEVER
    }

    /// Whether remote memory may be registered before it exists, and appear and disappear later:
    /// regions on demand.
    fn on_demand(&self) -> bool {
        false
    }
}

/// Host memory that is reached by copies only: that of another process, or pages of this process
/// that appear and disappear. Regions may lie there; rings, records and command buffers may not.
pub trait RemoteMemory: Send + Sync {
    /// Whether all `len` bytes at `iova` are mapped.
    fn covers(&self, iova: u64, len: u64) -> bool;

    /// Copies bytes out.
    ///
    /// # Errors
    /// The bytes are inaccessible, or their owner has ended; the content of `into` is then
    /// undefined.
    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Unreachable>;

    /// Copies bytes in.
    ///
    /// # Errors
    /// The bytes are inaccessible, or their owner has ended; some may have been written.
    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Unreachable>;

    /// The process that has this memory, if peers on this host may reach it there.
    fn process(&self) -> Option<&Arc<HostProcess>> {
        None
    }

    /// The address of the `len` bytes at `iova` in that process, if the device may read and write
    /// them.
    fn in_process(&self, iova: u64, len: u64) -> Option<u64> {
        let _ = (iova, len);
        None
    }

    /// The access of atomic operations to the 64-bit word at `iova`, a multiple of 8.
    ///
    /// # Errors
    /// The word is inaccessible, or cannot be written.
    fn word(&self, iova: u64) -> Result<RemoteWord<'_>, Unreachable>;
}

/// The access of atomic operations to a word of remote memory.
#[derive(Debug)]
pub enum RemoteWord<'a> {
    /// In place, in one step.
    InPlace(Word64),
    /// Access by two copies. The lock is the same for all memory of the host, so that operations
    /// through different regions over the same word exclude each other, too (RFC 7306 §5.3).
    Copied(&'a Mutex<()>),
}

// Words that atomic operations change.

/// An aligned 64-bit word of registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Word64(*mut u64);

impl Word64 {
    /// A word at `word`; `None` if the pointer is not aligned.
    pub(super) fn new(word: *mut u64) -> Option<Word64> {
        word.is_aligned().then_some(Word64(word))
    }

    /// Replaces the word by the result of `update` in one atomic step and returns the old value.
    /// `update` may run more than once.
    ///
    /// # Errors
    /// The word is inaccessible, or cannot be written.
    #[inline]
    pub fn update(self, update: impl Fn(u64) -> u64) -> Result<u64, Unreachable> {
        // SAFETY: aligned by `new`; registered memory is the program's.
        unsafe { fault::update(self.0, update) }
    }
}
