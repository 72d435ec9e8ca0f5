//! The driver's side of the rings that it shares with a device. The provider has the sides of
//! programs' queues; the driver has those of its own queues ([`OwnRing`]).

mod completion_ring;
mod ring;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use rustix::io::Errno;
use urnic_device::record::CqRecord;

use crate::dma::{DmaMemory, DmaPool, Record};

pub use completion_ring::CompletionRing;
pub use ring::Ring;

/// A side with its ring and record.
pub(crate) struct OwnRing<S> {
    side: S,
    ring: DmaMemory,
    record: DmaMemory,
}

impl<R: Record> OwnRing<Ring<R>> {
    /// A ring of `len` zeroed bytes, a power of two, and its record.
    ///
    /// # Errors
    /// `ENOMEM`: no memory is left.
    pub(crate) fn new(pool: &Arc<DmaPool>, len: usize) -> Result<Self, Errno> {
        let (ring, record) = (pool.allocate(len)?, pool.allocate(size_of::<R>())?);
        // SAFETY: the memory has as many bytes, at a multiple of a block. It and the record are
        // given to this value alone, which keeps both.
        let side = unsafe { Ring::new(ring.start(), ring.len(), record.record()) };
        Ok(OwnRing { side, ring, record })
    }
}

impl OwnRing<CompletionRing> {
    /// A zeroed ring of `1 << log_size` completions, and its record.
    ///
    /// # Errors
    /// `ENOMEM`: no memory is left.
    pub(crate) fn completions(pool: &Arc<DmaPool>, log_size: u32) -> Result<Self, Errno> {
        let ring = pool.allocate(urnic_device::cqe::CQE_LEN << log_size)?;
        let record = pool.allocate(size_of::<CqRecord>())?;
        // SAFETY: the memory has as many entries. It and the record are given to this value alone,
        // which keeps both.
        let side = unsafe { CompletionRing::new(ring.as_ptr(), record.record(), log_size)? };
        Ok(OwnRing { side, ring, record })
    }
}

impl<S> OwnRing<S> {
    /// The device's address of the ring.
    pub(crate) fn iova(&self) -> u64 {
        self.ring.iova()
    }

    /// The device's address of the record.
    pub(crate) fn record_iova(&self) -> u64 {
        self.record.iova()
    }
}

impl<S> Deref for OwnRing<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.side
    }
}

impl<S> DerefMut for OwnRing<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.side
    }
}
