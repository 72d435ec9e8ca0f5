//! The driver's side of a receive queue: a ring of entries of equal length shared with the device
//! ([`wqe`](urnic_device::wqe)). As in a [send queue](super::send_queue), a slot is free again when
//! its completion was polled. In a shared receive queue, whose completions go to several completion
//! queues, a slot is free again when the device has taken its entry.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::record::{self, QueueRecord};
use urnic_device::vocabulary::WcOpcode;
use urnic_device::wqe::{BLOCK_LEN, RecvHeader, Sge};
use urnic_rdma_core::{ibv_recv_wr, ibv_sge};
use zerocopy::Unalign;

use super::ledger::Ledger;
use crate::from_c::{Out, Request, Requests};
use crate::guard::contained;
use crate::probes;
use crate::strict::{self, Element, SharedCheck};
use urnic_driver::rings::Ring;
use urnic_driver::{Reason, Refusal};

/// A queue has no room for a request.
pub(super) const FULL: &str = "the queue is full: as many requests are outstanding as it has room for";

/// Why a request is not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotPosted {
    pub(crate) errno: Errno,
    /// To be reported when the queue is released.
    pub(crate) refusal: Option<Refusal>,
}

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
    ring: Ring<QueueRecord>,
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

impl ReceiveQueue {
    /// Creates a queue on a zeroed ring and record.
    ///
    /// # Safety
    /// `ring` has `shape.entries` entries, and at least one block; ring and record outlive the
    /// queue, and only the queue writes the ring and the record's receive producer.
    pub(crate) unsafe fn new(
        ring: NonNull<u8>,
        record: &QueueRecord,
        shape: ReceiveShape,
        ledger: Option<Arc<Ledger>>,
    ) -> ReceiveQueue {
        let len = ((shape.entries as usize) << shape.log_stride).max(BLOCK_LEN);
        ReceiveQueue {
            // SAFETY: the caller promises a ring of this length, and its record.
            ring: unsafe { Ring::new(ring, len, record) },
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
    #[inline]
    fn post(&mut self, wr: Request<'_, ibv_recv_wr>) -> Result<(), Errno> {
        if self.written.wrapping_sub(self.settled) >= self.shape.slots {
            self.settled = self.freed();
            if self.written.wrapping_sub(self.settled) >= self.shape.slots {
                return Err(Errno::NOMEM);
            }
        }
        let mut list = wr.elements(self.shape.max_sge).ok_or(Errno::INVAL)?;
        let is_observed = self.ledger.as_ref().is_some_and(|ledger| ledger.is_observed());
        let (name, held) = match is_observed || self.check.is_some() {
            true => self.show(wr.wr_id, list),
            false => (wr.wr_id, None),
        };
        if let Some(held) = &held {
            list = std::slice::from_ref(held);
        }
        let slot = (self.written & (self.shape.entries - 1)) as usize;
        let mut at = slot << self.shape.log_stride;
        self.ring.put(at, RecvHeader::new(name, list.len() as u16));
        at += size_of::<RecvHeader>();
        for sge in list.iter().map(Unalign::get) {
            let element = Sge {
                offset: sge.addr.into(),
                len: sge.length.into(),
                stag: sge.lkey.into(),
            };
            self.ring.put(at, element);
            at += size_of::<Sge>();
        }
        self.written = self.written.wrapping_add(1);
        probes::post_recv(self.ledger.as_ref().map_or(0, |ledger| ledger.qpn()), wr.wr_id);
        Ok(())
    }

    /// Shows a request to what looks at the requests. Returns what the device is to call it, and
    /// the element to post in the place of the program's, if there is one.
    #[cold]
    fn show(&self, wr_id: u64, list: &[Unalign<ibv_sge>]) -> (u64, Option<Unalign<ibv_sge>>) {
        let elements: Vec<Element> = list
            .iter()
            .map(Unalign::get)
            .map(|sge| Element {
                key: sge.lkey,
                offset: sge.addr,
                len: sge.length,
            })
            .collect();
        let (mut name, mut held) = (wr_id, None);
        let request = strict::Request {
            slot: self.written,
            wr_id,
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
                trace.receive_posted(wr_id, bytes);
            }
        });
        let held = held.map(|held| ibv_sge {
            addr: held.offset,
            length: held.len,
            lkey: held.key,
        });
        (name, held.map(Unalign::new))
    }

    /// Writes a list of work requests, and publishes those before the first that cannot be taken,
    /// to which `bad` then leads. Returns the producer index to ring with, if the device requests a
    /// ring, and why it is not the whole list.
    pub(crate) fn post_list(
        &mut self,
        mut requests: Requests<'_, ibv_recv_wr>,
        bad: Option<Out<'_, *mut ibv_recv_wr>>,
    ) -> (Option<u32>, Result<(), NotPosted>) {
        let mut result = Ok(());
        while let Some(wr) = requests.take() {
            if let Err(errno) = self.post(wr) {
                let refusal = self.refused(errno, requests.last_count());
                result = Err(NotPosted { errno, refusal });
                requests.refused_at(bad);
                break;
            }
        }
        (self.publish(), result)
    }

    /// Tells the option `strict` why a request of that many elements is refused; without it,
    /// returns the refusal.
    #[cold]
    fn refused(&self, errno: Errno, elements: c_int) -> Option<Refusal> {
        let (verb, limit) = match self.ledger {
            Some(_) => ("post_recv", "max_recv_sge"),
            None => ("post_srq_recv", "max_sge"),
        };
        let reason = Reason::Exceeds {
            argument: "num_sge",
            given: (elements as u32).into(),
            limit,
            most: self.shape.max_sge.into(),
        };
        let check = self.ledger.as_ref().and_then(|ledger| ledger.check());
        let mut refusal = None;
        contained(|| match (errno, check) {
            (Errno::NOMEM, Some(check)) => check.refused(FULL, false),
            (Errno::NOMEM, None) => {}
            (_, Some(check)) => check.refused(&format!("ibv_{verb}: {}", reason.with(errno)), false),
            (_, None) => refusal = Some(reason.with(errno)),
        });
        refusal
    }

    /// The number of slots that were freed.
    fn freed(&self) -> u32 {
        match &self.ledger {
            Some(ledger) => ledger.receives_settled(),
            None => self.ring.record().rq_consumer.load(Ordering::Acquire),
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
        let record = self.ring.record();
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
