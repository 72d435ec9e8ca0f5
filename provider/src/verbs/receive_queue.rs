//! The driver's side of a receive queue: a ring of entries of equal length shared with the device
//! ([`wqe`](urnic_device::wqe)). As in a [send queue](super::send_queue), a slot is free again when
//! its completion was polled; in a shared receive queue, whose completions go many ways, when the
//! device has taken it.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::record::{self, QueueRecord};
use urnic_device::wqe::{RecvHeader, Sge};
use urnic_rdma_core::ibv_recv_wr;
use zerocopy::Unalign;

use super::ledger::Ledger;
use super::unaligned::{elements, structure};

const HEADER_LEN: usize = size_of::<RecvHeader>();

/// How large a receive queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReceiveShape {
    /// Work requests it takes.
    pub(crate) slots: u32,
    /// Scatter/gather elements of one.
    pub(crate) max_sge: u32,
    /// Entries of the ring: a power of two, and not less than `slots`.
    pub(crate) entries: u32,
    /// log2 of the bytes of an entry, which has room for `max_sge` elements.
    pub(crate) log_stride: u32,
}

/// The queue, as who holds its lock sees it.
pub(crate) struct ReceiveQueue {
    ring: NonNull<u8>,
    record: NonNull<QueueRecord>,
    /// `None`: a shared queue.
    ledger: Option<Arc<Ledger>>,
    shape: ReceiveShape,
    /// Entries written: the number of the next slot too.
    written: u32,
    /// Entries that the device may see.
    published: u32,
    /// Slots that are free again, as far as we know.
    settled: u32,
}

// SAFETY: the pointers lead to the rings of the queue pair, which nobody else writes and which live
// as long as it.
unsafe impl Send for ReceiveQueue {}

impl ReceiveQueue {
    /// A queue over a zeroed ring and record.
    ///
    /// # Safety
    /// `ring` has `shape.entries` entries and `record` is a queue record; both outlive the queue,
    /// and only it writes the ring and the record's receive producer.
    pub(crate) unsafe fn new(
        ring: NonNull<u8>,
        record: NonNull<QueueRecord>,
        shape: ReceiveShape,
        ledger: Option<Arc<Ledger>>,
    ) -> ReceiveQueue {
        ReceiveQueue {
            ring,
            record,
            ledger,
            shape,
            written: 0,
            published: 0,
            settled: 0,
        }
    }

    /// Writes a work request behind the others. The device does not see it before
    /// [`publish`](Self::publish).
    ///
    /// Errors: NOMEM when all slots are taken, INVAL for too many elements.
    ///
    /// # Safety
    /// The request's element list can be read.
    #[inline]
    pub(crate) unsafe fn post(&mut self, wr: &ibv_recv_wr) -> Result<(), Errno> {
        if self.written.wrapping_sub(self.settled) >= self.shape.slots {
            self.settled = self.freed();
            if self.written.wrapping_sub(self.settled) >= self.shape.slots {
                return Err(Errno::NOMEM);
            }
        }
        // A negative count is a large one.
        let count = wr.num_sge as u32;
        if count > self.shape.max_sge {
            return Err(Errno::INVAL);
        }
        let slot = (self.written & (self.shape.entries - 1)) as usize;
        // SAFETY: a slot's entry is within the ring, has room for the header and `max_sge` elements
        // and is not the device's yet.
        unsafe {
            let entry = self.ring.as_ptr().add(slot << self.shape.log_stride);
            entry
                .cast::<RecvHeader>()
                .write_unaligned(RecvHeader::new(wr.wr_id, count as u16));
            let list = entry.add(HEADER_LEN).cast::<Sge>();
            for (i, sge) in elements(wr.sg_list, count as usize)
                .iter()
                .map(Unalign::get)
                .enumerate()
            {
                list.add(i).write_unaligned(Sge {
                    offset: sge.addr.into(),
                    len: sge.length.into(),
                    stag: sge.lkey.into(),
                });
            }
        }
        self.written = self.written.wrapping_add(1);
        Ok(())
    }

    /// Writes a list of work requests, and lets the device see those before the first that cannot
    /// be taken, to which `bad_wr` then points. Returns the producer index to ring with, if the
    /// device wants a ring, and 0 or an errno.
    ///
    /// # Safety
    /// `wr` is a list as `ibv_post_recv(3)` takes it; `bad_wr` is null or can be written.
    pub(crate) unsafe fn post_list(
        &mut self,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> (Option<u32>, c_int) {
        let mut next = wr;
        let mut copy = MaybeUninit::uninit();
        let mut result = 0;
        // SAFETY: the program's list, which ends with null.
        while let Some(wr) = unsafe { structure(next, &mut copy) } {
            // SAFETY: as the program filled it.
            if let Err(errno) = unsafe { self.post(wr) } {
                result = errno.raw_os_error();
                if !bad_wr.is_null() {
                    // SAFETY: the program's variable.
                    unsafe { bad_wr.write_unaligned(next) };
                }
                break;
            }
            next = wr.next;
        }
        (self.publish(), result)
    }

    /// Slots that are free again.
    fn freed(&self) -> u32 {
        match &self.ledger {
            Some(ledger) => ledger.receives_settled(),
            // SAFETY: the record outlives us, and is only accessed atomically.
            None => unsafe { self.record.as_ref() }
                .rq_consumer
                .load(Ordering::Acquire),
        }
    }

    /// Lets the device see what was written. Returns the producer index to ring with, if it wants a
    /// ring.
    #[inline]
    pub(crate) fn publish(&mut self) -> Option<u32> {
        let old = self.published;
        if old == self.written {
            return None;
        }
        self.published = self.written;
        // SAFETY: the record outlives us, and is only accessed atomically.
        let record = unsafe { self.record.as_ref() };
        record::publish(&record.rq_producer, &record.rq_event, old, self.written).then_some(self.written)
    }

    /// The queue was emptied (RESET): what was posted does not complete any more. Indices go on.
    /// Returns the slots taken so far.
    pub(crate) fn discard(&mut self) -> u32 {
        self.written = self.published;
        self.settled = self.written;
        self.written
    }
}
