//! What an engine needs from the rest of the device for one run.

use crate::counters::Counters;
use crate::events::Effects;
use crate::llp::buffers::BufferPool;
use crate::memory::{MemoryTable, Recent};
use crate::time::Now;
use std::sync::atomic::{AtomicBool, Ordering};

/// The surroundings of one run of a queue pair's engine.
#[derive(Debug)]
pub struct Env<'a> {
    /// Registered memory.
    pub memory: &'a MemoryTable,
    /// What the last short messages accessed there.
    pub recent: Recent,
    /// The time of this run.
    pub now: Now<'a>,
    /// Receive buffers.
    pub buffers: &'a BufferPool,
    /// The queue pair's own counters.
    pub counters: &'a Counters,
    /// What to do after the queue pair's lock is dropped.
    pub effects: &'a mut Effects,
    /// Set when the host's memory has wrong contents
    /// ([`HostMemory::stopped`](crate::host::HostMemory::stopped)).
    pub stopped: &'a AtomicBool,
}

impl<'a> Env<'a> {
    /// Registered memory, of which this thread is about to revoke some: it must not wait for
    /// itself.
    #[inline]
    pub(crate) fn memory_to_revoke(&self) -> &'a MemoryTable {
        self.recent.forget();
        self.memory
    }

    /// Whether all work must stop: checked before each segment.
    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}
