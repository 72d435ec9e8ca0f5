//! The driver's side of a completion queue's ring ([`cqe`](urnic_device::cqe)).

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::cqe::{CONTENT, CQE_LEN, Cqe, PHASE};
use urnic_device::record::CqRecord;
use zerocopy::little_endian::U32;

use super::ring::Ring;

/// In a completion's `qid`: its queue pair was destroyed, skip it. Valid numbers have 24 bits.
const DESTROYED: u32 = u32::MAX;

/// The ring, for the holder of the queue's lock.
#[derive(Debug)]
pub struct CompletionRing {
    ring: Ring<CqRecord>,
    log_size: u32,
    /// Index of the completion in the ring's first slot on the first pass.
    base: u32,
    /// Completions taken, modulo 2^32.
    consumer: u32,
}

impl CompletionRing {
    /// Creates the driver's side of a zeroed ring and record.
    ///
    /// # Errors
    /// `ENOMEM` for a ring without memory.
    ///
    /// # Safety
    /// `ring` has `1 << log_size` entries, less than 2^31; ring and record outlive the value, and
    /// only the value moves the record's consumer index.
    pub unsafe fn new(ring: *mut u8, record: &CqRecord, log_size: u32) -> Result<CompletionRing, Errno> {
        let ring = NonNull::new(ring).ok_or(Errno::NOMEM)?;
        Ok(CompletionRing {
            // SAFETY: the caller promises a ring of this many entries, and its record.
            ring: unsafe { Ring::new(ring, CQE_LEN << log_size, record) },
            log_size,
            base: 0,
            consumer: 0,
        })
    }

    /// Continues with another ring, to which the device moved the completions that are not taken.
    ///
    /// # Errors
    /// `ENOMEM` for a ring without memory.
    ///
    /// # Safety
    /// The conditions of [`CompletionRing::new`], for the new ring.
    pub unsafe fn move_to(&mut self, ring: *mut u8, log_size: u32) -> Result<(), Errno> {
        let ring = NonNull::new(ring).ok_or(Errno::NOMEM)?;
        // SAFETY: the caller promises a ring of this many entries.
        unsafe { self.ring.move_to(ring, CQE_LEN << log_size) };
        (self.log_size, self.base) = (log_size, self.consumer);
        Ok(())
    }

    /// The position of the entry with this index.
    #[inline]
    fn place(&self, index: u32) -> usize {
        index.wrapping_sub(self.base) as usize * CQE_LEN
    }

    /// Whether the device has filled the entry with this index. It then belongs to the driver,
    /// until that publishes a consumer index behind it.
    #[inline]
    fn is_filled(&self, index: u32) -> bool {
        let pass = index.wrapping_sub(self.base) >> self.log_size & 1;
        // Acquire: data that the device wrote before the phase is read after it.
        let phase = self.ring.word(self.place(index) + PHASE).load(Ordering::Acquire);
        u32::from_le(phase) & 1 != pass
    }

    /// Whether there is a completion; entries of destroyed queue pairs are dropped first.
    #[inline]
    pub fn has_front(&mut self) -> bool {
        while self.is_filled(self.consumer) {
            let place = self.place(self.consumer) + offset_of!(Cqe, qid);
            if self.ring.read::<U32>(place).get() != DESTROYED {
                return true;
            }
            self.advance();
        }
        false
    }

    /// The oldest completion, after [`has_front`](Self::has_front).
    #[inline(always)]
    pub fn front(&self) -> Cqe {
        // Without the phase: that was the last that the device wrote, and a load of it together
        // with what is before waits until both are in the cache.
        self.ring.read_part(self.place(self.consumer), CONTENT)
    }

    /// Takes the oldest completion.
    #[inline]
    pub fn advance(&mut self) {
        self.consumer = self.consumer.wrapping_add(1);
    }

    /// Returns the taken entries to the device.
    #[inline]
    pub fn publish(&self) {
        self.ring
            .record()
            .consumer
            .store(self.consumer, Ordering::Release);
    }

    /// Index of the oldest completion that is not taken.
    #[inline]
    pub fn consumer(&self) -> u32 {
        self.consumer
    }

    /// Index behind the newest completion in the ring, taken or not.
    pub fn newest(&self) -> u32 {
        let places = (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i));
        let filled = places.take_while(|&index| self.is_filled(index)).count();
        self.consumer.wrapping_add(filled as u32)
    }

    /// The completions of a queue pair that are in the ring and not taken, oldest first.
    pub fn waiting(&self, qid: u32) -> impl Iterator<Item = Cqe> {
        let places = (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i));
        places
            .take_while(|&index| self.is_filled(index))
            .map(|index| self.ring.read::<Cqe>(self.place(index)))
            .filter(move |cqe| cqe.qid.get() == qid)
    }

    /// Drops all completions of a queue pair that makes no further completions.
    pub fn purge(&mut self, qid: u32) {
        for index in (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i)) {
            if !self.is_filled(index) {
                break;
            }
            let place = self.place(index) + offset_of!(Cqe, qid);
            if self.ring.read::<U32>(place).get() == qid {
                self.ring.put(place, U32::from(DESTROYED));
            }
        }
    }
}
