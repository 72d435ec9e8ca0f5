//! The driver's side of a receive queue: a ring of entries of equal length shared with the device
//! ([`wqe`](urnic_device::wqe)). As in a [send queue](super::send_queue), a slot is free again when
//! its completion was polled. In a shared receive queue, whose completions go to several completion
//! queues, a slot is free again when the device has taken its entry.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::record::{self, QueueRecord};
use urnic_device::vocabulary::WcOpcode;
use urnic_device::wqe::{RecvHeader, Sge};
use urnic_rdma_core::{ibv_recv_wr, ibv_sge};
use zerocopy::Unalign;

use super::ledger::Ledger;
use super::unaligned::{elements, structure};
use crate::guard::contained;
use crate::probes;
use crate::strict::{Element, Request, SharedCheck};

const HEADER_LEN: usize = size_of::<RecvHeader>();

/// The size of a receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReceiveShape {
    /// Maximum number of outstanding work requests.
    pub(crate) slots: u32,
    /// Maximum number of scatter/gather elements of a work request.
    pub(crate) max_sge: u32,
    /// The number of entries in the ring: a power of two, and not less than `slots`.
    pub(crate) entries: u32,
    /// log2 of the bytes of an entry, which has space for `max_sge` elements.
    pub(crate) log_stride: u32,
}

/// The queue, for the holder of its lock.
pub(crate) struct ReceiveQueue {
    ring: NonNull<u8>,
    record: NonNull<QueueRecord>,
    /// `None`: a shared queue.
    ledger: Option<Arc<Ledger>>,
    /// The check of a shared queue.
    check: Option<Arc<SharedCheck>>,
    shape: ReceiveShape,
    /// The number of entries written, which is also the number of the next slot.
    written: u32,
    /// The number of entries published to the device.
    published: u32,
    /// Slots before this one are free, according to the last read of the ledger or record.
    settled: u32,
}

// SAFETY: the pointers lead to the rings of the queue pair, which live as long as the queue and
// have no other writer.
unsafe impl Send for ReceiveQueue {}

impl ReceiveQueue {
    /// Creates a queue on a zeroed ring and record.
    ///
    /// # Safety
    /// `ring` has `shape.entries` entries and `record` is a queue record; both outlive the queue,
    /// and only the queue writes the ring and the record's receive producer.
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
            check: None,
            shape,
            written: 0,
            published: 0,
            settled: 0,
        }
    }

    /// The queue, which is shared, with the check of the option `strict`.
    pub(crate) fn checked(self, check: Option<Arc<SharedCheck>>) -> ReceiveQueue {
        ReceiveQueue { check, ..self }
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
        // A negative count becomes a large one.
        let count = wr.num_sge as u32;
        if count > self.shape.max_sge {
            return Err(Errno::INVAL);
        }
        let is_observed = self.ledger.as_ref().is_some_and(|ledger| ledger.is_observed());
        let (name, held) = match is_observed || self.check.is_some() {
            // SAFETY: the caller promises a list that can be read.
            true => unsafe { self.show(wr) },
            false => (wr.wr_id, None),
        };
        let slot = (self.written & (self.shape.entries - 1)) as usize;
        // SAFETY: a slot's entry is within the ring, has space for the header and `max_sge`
        // elements and is not published to the device yet.
        unsafe {
            let entry = self.ring.as_ptr().add(slot << self.shape.log_stride);
            entry
                .cast::<RecvHeader>()
                .write_unaligned(RecvHeader::new(name, held.map_or(count, |_| 1) as u16));
            let list = entry.add(HEADER_LEN).cast::<Sge>();
            let theirs = elements(wr.sg_list, count as usize).iter().map(Unalign::get);
            let held_count = if held.is_some() { 0 } else { count as usize };
            for (i, sge) in held.into_iter().chain(theirs.take(held_count)).enumerate() {
                list.add(i).write_unaligned(Sge {
                    offset: sge.addr.into(),
                    len: sge.length.into(),
                    stag: sge.lkey.into(),
                });
            }
        }
        self.written = self.written.wrapping_add(1);
        probes::post_recv(self.ledger.as_ref().map_or(0, |ledger| ledger.qpn()), wr.wr_id);
        Ok(())
    }

    /// Shows a request to what looks at the requests. Returns what the device is to call it, and
    /// the element to post in the place of the program's, if there is one.
    ///
    /// # Safety
    /// The request's element list can be read.
    #[cold]
    unsafe fn show(&self, wr: &ibv_recv_wr) -> (u64, Option<ibv_sge>) {
        // SAFETY: the caller promises a list of this length.
        let list = unsafe { elements(wr.sg_list, wr.num_sge as usize) };
        let elements: Vec<Element> = list
            .iter()
            .map(Unalign::get)
            .map(|sge| Element {
                key: sge.lkey,
                offset: sge.addr,
                len: sge.length,
            })
            .collect();
        let (mut name, mut held) = (wr.wr_id, None);
        let request = Request {
            slot: self.written,
            wr_id: wr.wr_id,
            opcode: WcOpcode::Recv,
            signalled: true,
            elements: &elements,
        };
        contained(|| {
            if let Some(check) = &self.check {
                (name, held) = check.receive_posted(&request);
            }
            let Some(ledger) = &self.ledger else { return };
            if let Some(check) = ledger.check() {
                held = check.receive_posted(&request);
            }
            if let Some(trace) = ledger.trace() {
                let bytes = elements.iter().map(|element| u64::from(element.len)).sum();
                trace.receive_posted(wr.wr_id, bytes);
            }
        });
        let held = held.map(|held| ibv_sge {
            addr: held.offset,
            length: held.len,
            lkey: held.key,
        });
        (name, held)
    }

    /// Writes a list of work requests, and publishes those before the first that cannot be taken,
    /// to which `bad_wr` then points. Returns the producer index to ring with, if the device
    /// requests a ring, and 0 or an errno.
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

    /// The number of slots that were freed.
    fn freed(&self) -> u32 {
        match &self.ledger {
            Some(ledger) => ledger.receives_settled(),
            // SAFETY: the record outlives the queue, and is only accessed atomically.
            None => unsafe { self.record.as_ref() }
                .rq_consumer
                .load(Ordering::Acquire),
        }
    }

    /// Publishes the written entries to the device. Returns the producer index to ring with, if the
    /// device requests a ring.
    #[inline]
    pub(crate) fn publish(&mut self) -> Option<u32> {
        let old = self.published;
        if old == self.written {
            return None;
        }
        self.published = self.written;
        // SAFETY: the record outlives the queue, and is only accessed atomically.
        let record = unsafe { self.record.as_ref() };
        record::publish(&record.rq_producer, &record.rq_event, old, self.written).then_some(self.written)
    }

    /// The queue was emptied (RESET): posted requests do not complete any more. Indices continue.
    /// Returns the number of slots taken so far.
    pub(crate) fn discard(&mut self) -> u32 {
        self.written = self.published;
        self.settled = self.written;
        self.written
    }
}
