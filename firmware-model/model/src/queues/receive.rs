//! The device's side of receive queues, one queue pair's own or shared.

use super::bad_wqe::BadWqe;
use crate::events::Effects;
use crate::host::{Mapping, Record};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use urnic_device::event::{Event, EventKind};
use urnic_device::record::{self, QueueRecord};
use urnic_device::wqe::{MAX_SGE, RecvHeader, Sge};
use urnic_sync::{Mutex, MutexGuard};

/// A posted receive, copied out of its ring.
#[derive(Debug, Clone)]
pub struct RecvWqe {
    /// Returned in the completion.
    pub cookie: u64,
    len: usize,
    sges: [Sge; MAX_SGE],
}

impl Default for RecvWqe {
    fn default() -> RecvWqe {
        RecvWqe {
            cookie: 0,
            len: 0,
            sges: [Sge::default(); MAX_SGE],
        }
    }
}

impl RecvWqe {
    /// The scatter list of the entry.
    pub fn sges(&self) -> &[Sge] {
        &self.sges[..self.len]
    }

    /// Bytes that its first element has room for.
    pub fn first_room(&self) -> u32 {
        self.sges().first().map_or(0, |sge| sge.len.get())
    }

    /// Bytes it has room for.
    pub fn room(&self) -> u64 {
        self.sges().iter().map(|s| u64::from(s.len.get())).sum()
    }
}

/// The address of a receive queue in the device's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReceivePlace {
    /// The address of its entries, `1 << log_size` of `1 << log_stride` bytes.
    pub(crate) entries: u64,
    /// The address of the producer index.
    pub(crate) producer: u64,
    pub(crate) log_size: u32,
    pub(crate) log_stride: u32,
    /// The number of the next receive to be taken.
    pub(crate) next: u32,
}

/// A receive queue as the device sees it.
#[derive(Debug)]
pub struct ReceiveQueue {
    ring: Mapping,
    record: Arc<Record<QueueRecord>>,
    mask: u32,
    log_stride: u32,
    producer: u32,
    next: u32,
}

impl ReceiveQueue {
    /// `ring` holds `1 << log_size` entries of `1 << log_stride` bytes.
    pub(crate) fn new(
        ring: Mapping,
        record: Arc<Record<QueueRecord>>,
        log_size: u32,
        log_stride: u32,
    ) -> ReceiveQueue {
        debug_assert_eq!(ring.len(), 1 << (log_size + log_stride));
        ReceiveQueue {
            ring,
            record,
            mask: (1 << log_size) - 1,
            log_stride,
            producer: 0,
            next: 0,
        }
    }

    /// The same queue, for the engine that takes the place of this one's.
    fn same(&self) -> ReceiveQueue {
        ReceiveQueue {
            record: self.record.clone(),
            ..*self
        }
    }

    /// A new queue on the same ring: posted entries are dropped, and the indices continue.
    fn anew(&self) -> ReceiveQueue {
        let at = self.record.rq_producer.load(Ordering::Acquire);
        self.record.rq_consumer.store(at, Ordering::Release);
        ReceiveQueue {
            record: self.record.clone(),
            producer: at,
            next: at,
            ..*self
        }
    }

    /// Takes the next posted receive into `into`; `None` if none is posted. A malformed one is
    /// taken, too.
    #[inline(always)]
    pub fn take(&mut self, into: &mut RecvWqe) -> Option<Result<(), BadWqe>> {
        if self.producer == self.next {
            self.producer = self.record.rq_producer.load(Ordering::Acquire);
            if self.producer == self.next {
                return None;
            }
        }
        let at = ((self.next & self.mask) as usize) << self.log_stride;
        let header: RecvHeader = self.ring.read(at);
        into.cookie = header.cookie.get();
        let sges = usize::from(header.num_sge.get());
        let fits = size_of::<RecvHeader>() + sges * size_of::<Sge>() <= 1 << self.log_stride;
        let counted = self.producer.wrapping_sub(self.next) <= self.mask + 1;
        let well = sges <= MAX_SGE && fits && counted;
        into.len = if well { sges } else { 0 };
        for (n, sge) in into.sges[..into.len].iter_mut().enumerate() {
            *sge = self
                .ring
                .read(at + size_of::<RecvHeader>() + n * size_of::<Sge>());
        }
        self.next = if counted {
            self.next.wrapping_add(1)
        } else {
            self.producer
        };
        self.record.rq_consumer.store(self.next, Ordering::Release);
        Some(if well {
            Ok(())
        } else {
            Err(BadWqe { cookie: into.cookie })
        })
    }

    /// The address of the queue, for a peer that fills receives itself.
    pub(crate) fn place(&self) -> ReceivePlace {
        ReceivePlace {
            entries: self.ring.address() as u64,
            producer: std::ptr::from_ref(&self.record.rq_producer).addr() as u64,
            log_size: self.mask.count_ones(),
            log_stride: self.log_stride,
            next: self.next,
        }
    }

    /// Receives posted and not taken.
    pub fn posted(&self) -> u32 {
        self.record
            .rq_producer
            .load(Ordering::Acquire)
            .wrapping_sub(self.next)
    }

    /// Requests a ring at the next post; returns whether something was posted meanwhile.
    fn ring_at_next(&self) -> bool {
        let record = &self.record;
        record::sleep_at(&record.rq_producer, &record.rq_event, self.next) != self.next
    }

    /// Requests no ring (except one in 2^32 posts, which does no harm).
    fn ring_never(&self) {
        self.record
            .rq_event
            .store(self.next.wrapping_sub(1), Ordering::Relaxed);
    }
}

/// A receive queue that several queue pairs take from, in the order their messages arrive
/// (VRB-S-01).
#[derive(Debug)]
pub struct SharedReceiveQueue {
    /// Number of the queue.
    pub id: u32,
    /// Protection domain of the queue; the buffers are checked against it.
    pub pd: u32,
    pub(crate) uar: u32,
    /// Queue pairs that take from it.
    pub(crate) users: AtomicU32,
    state: Mutex<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: ReceiveQueue,
    limit: u32,
    stalled: bool,
}

impl SharedReceiveQueue {
    pub(crate) fn new(id: u32, pd: u32, uar: u32, queue: ReceiveQueue) -> SharedReceiveQueue {
        queue.ring_never();
        let state = Shared {
            queue,
            limit: 0,
            stalled: false,
        };
        SharedReceiveQueue {
            id,
            pd,
            uar,
            users: AtomicU32::new(0),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.state.lock()
    }

    fn take(&self, into: &mut RecvWqe, effects: &mut Effects) -> Option<Result<(), BadWqe>> {
        let mut shared = self.lock();
        let taken = shared.queue.take(into);
        if taken.is_some() {
            self.note_limit(&mut shared, effects);
        }
        taken
    }

    /// Raises the limit event once per arming.
    fn note_limit(&self, shared: &mut Shared, effects: &mut Effects) {
        if shared.limit > 0 && shared.queue.posted() < shared.limit {
            shared.limit = 0;
            effects.event(Event::new(EventKind::SrqLimit, self.id));
        }
    }

    /// Arms the limit event; 0 disarms it.
    pub(crate) fn arm_limit(&self, limit: u32, effects: &mut Effects) {
        let mut shared = self.lock();
        shared.limit = limit;
        self.note_limit(&mut shared, effects);
    }

    /// Whether a stream waits for buffers at present; the call resets it.
    pub(crate) fn take_stalled(&self) -> bool {
        let mut shared = self.lock();
        let stalled = std::mem::take(&mut shared.stalled);
        if stalled {
            shared.queue.ring_never();
        }
        stalled
    }
}

/// The source of a queue pair's receives.
#[derive(Debug)]
pub enum ReceiveSource {
    /// The queue pair's own queue.
    Own(ReceiveQueue),
    /// A queue that the queue pair shares.
    Shared(Arc<SharedReceiveQueue>),
}

impl ReceiveSource {
    /// Takes the next posted receive into `into`; `None` if none is posted. A malformed one is
    /// taken, too.
    #[inline]
    pub fn take(&mut self, into: &mut RecvWqe, effects: &mut Effects) -> Option<Result<(), BadWqe>> {
        match self {
            ReceiveSource::Own(queue) => queue.take(into),
            ReceiveSource::Shared(queue) => queue.take(into, effects),
        }
    }

    /// The address of the queue, if it is not shared.
    pub(crate) fn place(&self) -> Option<ReceivePlace> {
        match self {
            ReceiveSource::Own(queue) => Some(queue.place()),
            ReceiveSource::Shared(_) => None,
        }
    }

    /// Receives taken so far, modulo 2^32.
    pub(crate) fn taken(&self) -> u32 {
        match self {
            ReceiveSource::Own(queue) => queue.next,
            ReceiveSource::Shared(queue) => queue.lock().queue.next,
        }
    }

    /// The same source, for the engine that takes the place of this one's.
    pub(crate) fn same(&self) -> ReceiveSource {
        match self {
            ReceiveSource::Own(queue) => ReceiveSource::Own(queue.same()),
            ReceiveSource::Shared(queue) => ReceiveSource::Shared(queue.clone()),
        }
    }

    /// A new source for a queue pair after a reset. Receives that are posted to its own queue are
    /// dropped.
    pub(crate) fn anew(&self) -> ReceiveSource {
        match self {
            ReceiveSource::Own(queue) => ReceiveSource::Own(queue.anew()),
            ReceiveSource::Shared(queue) => ReceiveSource::Shared(queue.clone()),
        }
    }

    /// Domain that the buffers are checked against: that of the shared queue, else `own`.
    pub fn pd(&self, own: u32) -> u32 {
        match self {
            ReceiveSource::Own(_) => own,
            ReceiveSource::Shared(queue) => queue.pd,
        }
    }

    /// Requests a ring at the next post, because a stream or a queue in error waits for it; returns
    /// whether something was posted meanwhile.
    pub(crate) fn ring_at_next(&mut self) -> bool {
        match self {
            ReceiveSource::Own(queue) => queue.ring_at_next(),
            ReceiveSource::Shared(queue) => {
                let mut shared = queue.lock();
                shared.stalled = true;
                shared.queue.ring_at_next()
            }
        }
    }

    /// Requests a ring at the next post, for a queue in error; returns how many posted receives
    /// were not taken. A shared queue is not flushed.
    pub(crate) fn ring_for_flush(&mut self) -> u32 {
        match self {
            ReceiveSource::Own(queue) => {
                queue.ring_at_next();
                queue.posted()
            }
            ReceiveSource::Shared(_) => 0,
        }
    }

    /// Requests no ring any more. (A shared queue requests rings as long as one of its queue pairs
    /// needs them.)
    pub(crate) fn ring_never(&mut self) {
        if let ReceiveSource::Own(queue) = self {
            queue.ring_never();
        }
    }
}
