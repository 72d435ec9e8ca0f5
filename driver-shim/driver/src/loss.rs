//! Handling of a lost device: its process was killed, the function was removed, or the device
//! stopped and only a reset helps.
//!
//! Rings and records are in memory of this process, so the driver continues where the device
//! stopped: queue pairs are in the error state, and each request without a completion is flushed,
//! once and in order, as are requests that the program posts later. The driver's thread does this,
//! and never waits for the program: while the program holds the lock of a queue, or a completion
//! queue is full, the driver retries later.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::cqe::{Cqe, PHASE};
use urnic_device::record::sleep_at;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{BLOCK_LEN, MAX_BLOCKS, Opcode, RecvHeader, SendFlags, SendHeader};
use zerocopy::IntoBytes;

use crate::driver::{Cq, Driver, Qp};
use crate::events::now;
use crate::gate::Completed;
use crate::objects::AsyncEvent;

/// The time until the driver retries a flush that the program prevented.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The state of the queues of a lost device, which the driver flushes in its place.
#[derive(Default)]
pub(crate) struct LostDevice {
    pairs: HashMap<u32, QpFlush>,
    queues: HashMap<u32, CqFlush>,
}

/// The progress of flushing a queue pair.
struct QpFlush {
    /// Block of the oldest send without a completion.
    send: u32,
    /// Index of the oldest receive without a completion.
    receive: u32,
}

/// The state of a completion queue.
struct CqFlush {
    cq: Arc<Cq>,
    /// Index of the next completion.
    producer: u32,
    /// The next completion must notify.
    armed: bool,
    /// A completion was added, and its notification is due.
    notify_due: bool,
}

/// The completion queue has no room until the program takes completions.
struct Full;

impl Driver {
    /// Handles the loss of the device for all objects. Called once; afterwards the driver calls
    /// [`Driver::flush_lost_device`] repeatedly.
    pub(crate) fn begin_flush(&self) -> LostDevice {
        tracing::error!(
            "the device is lost: its queue pairs are in the error state, and its objects can only be destroyed"
        );
        // A device that only stopped must release the memory before the driver uses it.
        self.commands().reset();
        self.objects().contexts().deliver_to_all(AsyncEvent::DeviceFatal);
        for qp in self.pairs() {
            {
                let _changes = qp.lock_attributes();
                self.native_retire(qp.qpn, false);
                qp.set_last_state(QpState::Err);
            }
            qp.gate().open();
            self.cm_lost(qp.qid, Errno::CONNRESET);
        }
        self.cm_lost_device();
        let mut loss = LostDevice::default();
        self.update_objects(&mut loss);
        // A thread that waits for a notification may have armed the queue.
        loss.queues.values_mut().for_each(|queue| queue.armed = true);
        self.flush_lost_device(&mut loss);
        for queue in loss.queues.values_mut().filter(|queue| queue.armed) {
            queue.notify_due = true;
        }
        self.notify_queues(&mut loss);
        loss
    }

    /// Flushes posted requests, and notifies armed queues. Returns the time of the next call if no
    /// doorbell rings before.
    pub(crate) fn flush_lost_device(&self, loss: &mut LostDevice) -> Option<Duration> {
        self.update_objects(loss);
        let mut retry = false;
        for qp in self.pairs() {
            retry |= loss.flush(&qp).is_none();
        }
        let armed = self.objects().take_armed();
        for (cqid, consumer) in armed {
            if let Some(queue) = loss.queues.get_mut(&cqid) {
                queue.armed = true;
                queue.notify_due |= queue.producer.wrapping_sub(consumer).cast_signed() > 0;
            }
        }
        self.notify_queues(loss);
        retry.then(|| now() + RETRY_INTERVAL)
    }

    fn pairs(&self) -> Vec<Arc<Qp>> {
        self.objects().qps().all().into_iter().map(|(_, qp)| qp).collect()
    }

    /// Adds new completion queues and removes destroyed objects.
    fn update_objects(&self, loss: &mut LostDevice) {
        let cqs: HashMap<_, _> = self.objects().cqs().all().into_iter().collect();
        loss.queues.retain(|cqid, _| cqs.contains_key(cqid));
        for (cqid, cq) in cqs {
            loss.queues.entry(cqid).or_insert_with(|| CqFlush {
                producer: newest(&cq),
                cq,
                armed: false,
                notify_due: false,
            });
        }
        let qps: HashSet<_> = self
            .objects()
            .qps()
            .all()
            .into_iter()
            .map(|(qid, _)| qid)
            .collect();
        loss.pairs.retain(|qid, _| qps.contains(qid));
    }

    fn notify_queues(&self, loss: &mut LostDevice) {
        for (cqid, queue) in &mut loss.queues {
            if std::mem::take(&mut queue.notify_due) && std::mem::take(&mut queue.armed) {
                self.objects()
                    .cqs()
                    .with(*cqid, |_, target| target.events.completion(target.cookie));
            }
        }
    }

    /// Refuses to destroy an object that a queue pair still `uses`, as the device would.
    ///
    /// # Errors
    /// `EBUSY` if a queue pair uses the object.
    pub(crate) fn refuse_if_used(&self, uses: impl Fn(&Qp) -> bool) -> Result<(), Errno> {
        if self.commands().is_lost() && self.pairs().iter().any(|qp| uses(qp)) {
            return Err(Errno::BUSY);
        }
        Ok(())
    }

    /// Records that a completion queue of a lost device was armed.
    pub(crate) fn arm_without_device(&self, cqid: u32, consumer: u32) {
        self.objects().arm(cqid, consumer);
        self.event_loop().wake();
    }
}

impl LostDevice {
    /// Flushes one queue pair; `None` if the program prevents a part of it at the moment.
    fn flush(&mut self, qp: &Qp) -> Option<()> {
        let pair = match self.pairs.entry(qp.qid) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                new.insert(QpFlush::of(qp, qp.gate().completed()?))
            }
        };
        let record = qp.record();
        let (send_cq, recv_cq) = qp.cqs();
        loop {
            let mut more = false;
            if let Some(queue) = self.queues.get_mut(&send_cq) {
                pair.flush_sends(qp, queue).ok()?;
                more |= sleep_at(&record.sq_producer, &record.sq_event, pair.send) != pair.send;
            }
            if let Some(queue) = self.queues.get_mut(&recv_cq) {
                pair.flush_receives(qp, queue).ok()?;
                more |= sleep_at(&record.rq_producer, &record.rq_event, pair.receive) != pair.receive;
            }
            if !more {
                return Some(());
            }
        }
    }
}

impl QpFlush {
    /// The index at which the device stopped, derived from the requests that have a completion.
    fn of(qp: &Qp, completed: Completed) -> QpFlush {
        QpFlush {
            send: first_send(qp, completed.sends),
            // A shared queue is not flushed.
            receive: if qp.shares_receives() {
                0
            } else {
                completed.receives
            },
        }
    }

    fn flush_sends(&mut self, qp: &Qp, queue: &mut CqFlush) -> Result<(), Full> {
        let record = qp.record();
        let end = record.sq_producer.load(Ordering::Acquire);
        while self.send != end {
            let header = send_at(qp, self.send);
            let retired = record
                .sq_consumer
                .load(Ordering::Relaxed)
                .wrapping_sub(self.send)
                .cast_signed()
                > 0;
            // An unsignalled request that the device finished is complete. The completion of a
            // signalled one was not written: its status is unknown.
            let is_complete = retired && header.flags & SendFlags::SIGNALED.bits() == 0;
            if !is_complete {
                let opcode = Opcode::from_raw(header.opcode).map_or(WcOpcode::Send, Opcode::completion);
                queue.push(qp, header.cookie.get(), opcode)?;
            }
            // The provider writes no other numbers; a ring with another number has no entries left.
            self.send = match u32::from(header.blocks) {
                blocks @ 1.. if blocks <= end.wrapping_sub(self.send) => self.send.wrapping_add(blocks),
                _ => end,
            };
            if !retired {
                record.sq_consumer.store(self.send, Ordering::Release);
            }
        }
        Ok(())
    }

    fn flush_receives(&mut self, qp: &Qp, queue: &mut CqFlush) -> Result<(), Full> {
        let record = qp.record();
        let end = record.rq_producer.load(Ordering::Acquire);
        // A receive completes after the device took it, so no more receives are complete than are
        // posted.
        while end.wrapping_sub(self.receive).cast_signed() > 0 {
            let slot = (self.receive & (qp.rq_entries() - 1)) as usize;
            let header: RecvHeader = qp.rq().read(slot << qp.rq_log_stride());
            queue.push(qp, header.cookie.get(), WcOpcode::Recv)?;
            self.receive = self.receive.wrapping_add(1);
            record.rq_consumer.store(self.receive, Ordering::Release);
        }
        Ok(())
    }
}

fn send_at(qp: &Qp, block: u32) -> SendHeader {
    qp.sq().read((block & (qp.sq_blocks() - 1)) as usize * BLOCK_LEN)
}

/// Block of the send in slot `slot`, the oldest without a completion; entries carry their slots as
/// cookies. The device frees blocks before it writes the completion, so the block may lie before
/// the consumer index. It has not been overwritten: the program has not seen its completion. It may
/// also lie beyond the consumer index: if the device lost the memory page by page, its completions
/// may have arrived and its indices not.
fn first_send(qp: &Qp, slot: u32) -> u32 {
    let record = qp.record();
    let consumer = record.sq_consumer.load(Ordering::Acquire);
    let producer = record.sq_producer.load(Ordering::Acquire);
    let slot_at = |block| send_at(qp, block).cookie.get() as u32;
    if let Some(block) = send_from(qp, slot, consumer, producer) {
        return block;
    }
    // Operands may have the form of an entry. A real entry starts a chain of entries with
    // consecutive slots that ends at the consumer index.
    let leads_to_consumer = |start: u32| {
        let (mut at, mut due) = (start, slot);
        while at != consumer {
            let header = send_at(qp, at);
            let blocks = u32::from(header.blocks);
            let fits = (1..=MAX_BLOCKS as u32).contains(&blocks) && blocks <= consumer.wrapping_sub(at);
            if !fits || header.cookie.get() != u64::from(due) {
                return false;
            }
            at = at.wrapping_add(blocks);
            due = due.wrapping_add(1);
        }
        true
    };
    (1..=qp.sq_blocks())
        .map(|back| consumer.wrapping_sub(back))
        .find(|start| slot_at(*start) == slot && leads_to_consumer(*start))
        .unwrap_or(consumer)
}

/// Block of the send in slot `slot`, if that is among the entries from `block` to `end` or the next
/// after them. Entries start at these two.
fn send_from(qp: &Qp, slot: u32, mut block: u32, end: u32) -> Option<u32> {
    let mut is_next = false;
    while block != end {
        let header = send_at(qp, block);
        let at = header.cookie.get() as u32;
        let blocks = u32::from(header.blocks);
        if at == slot {
            return Some(block);
        }
        if !(1..=end.wrapping_sub(block)).contains(&blocks) {
            return None;
        }
        block = block.wrapping_add(blocks);
        is_next = at.wrapping_add(1) == slot;
    }
    is_next.then_some(end)
}

/// Index after the newest completion in the ring.
fn newest(cq: &Cq) -> u32 {
    let consumer = cq.record().consumer.load(Ordering::Acquire);
    let ring = cq.lock_ring();
    let is_filled = |index: &u32| {
        let (at, phase) = ring.place(*index);
        u32::from_le(ring.memory().word(at + PHASE).load(Ordering::Acquire)) & 1 == phase
    };
    let indices = (0..ring.entries()).map(|i| consumer.wrapping_add(i));
    consumer.wrapping_add(indices.take_while(is_filled).count() as u32)
}

impl CqFlush {
    /// Adds the completion of a flushed request.
    fn push(&mut self, qp: &Qp, cookie: u64, opcode: WcOpcode) -> Result<(), Full> {
        let consumer = self.cq.record().consumer.load(Ordering::Acquire);
        let ring = self.cq.lock_ring();
        if self.producer.wrapping_sub(consumer) >= ring.entries() {
            return Err(Full);
        }
        let mut cqe = Cqe::new(cookie, qp.qpn, qp.qid, opcode, WcStatus::WrFlushErr);
        cqe.timestamp = (now().as_nanos() as u64).into();
        let (at, phase) = ring.place(self.producer);
        if let Some(before_phase) = cqe.as_bytes().get(..PHASE) {
            ring.memory().copy_in(at, before_phase);
        }
        ring.memory()
            .word(at + PHASE)
            .store(phase.to_le(), Ordering::Release);
        drop(ring);
        self.producer = self.producer.wrapping_add(1);
        self.notify_due = true;
        Ok(())
    }
}
