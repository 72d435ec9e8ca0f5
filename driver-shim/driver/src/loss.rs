//! Handling of a lost device: its process was killed, the function was removed, or the device
//! stopped and only a reset helps.
//!
//! Rings and records are in our memory, so the driver continues where the device stopped: queue
//! pairs are in error, and each request without a completion is flushed, once and in order, and so
//! is what the program posts later. All of it happens on the driver's thread, which never waits for
//! the program: when the program holds a queue or has left no room in it, the driver retries later.

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

use crate::clock::now;
use crate::driver::{Cq, Driver, Qp};
use crate::objects::AsyncEvent;
use crate::poster::Completed;
use urnic_process::lock::lock;

/// Time until the driver retries what the program prevented.
const AGAIN: Duration = Duration::from_millis(5);

/// The state of the driver's work in place of the device.
#[derive(Default)]
pub(crate) struct Loss {
    pairs: HashMap<u32, Pair>,
    queues: HashMap<u32, Queue>,
}

/// The progress of flushing a queue pair.
struct Pair {
    /// Block of the oldest send without a completion.
    send: u32,
    /// Index of the oldest receive without a completion.
    receive: u32,
}

/// A completion queue.
struct Queue {
    cq: Arc<Cq>,
    /// Index of the next completion.
    producer: u32,
    /// The next completion must notify.
    armed: bool,
    /// A completion was added that must notify.
    news: bool,
}

/// The program must take completions first.
struct Full;

impl Driver {
    /// Handles the loss of the device for all objects. Called once; afterwards the driver calls
    /// [`Driver::replace_device`] repeatedly.
    pub(crate) fn take_over(&self) -> Loss {
        tracing::error!("the device is lost: its queue pairs are in error, and nothing but destroying works");
        // A device that only stopped must release the memory before the driver uses it.
        self.commands.reset();
        self.contexts.deliver_to_all(AsyncEvent::DeviceFatal);
        for qp in self.pairs() {
            {
                let _changes = lock(&qp.attr);
                self.native_retire(qp.qpn, false);
                qp.reach(QpState::Err);
            }
            qp.open_gate();
            self.cm_lost(qp.qid, Errno::CONNRESET);
        }
        self.cm_lost_device();
        let mut loss = Loss::default();
        self.adopt(&mut loss);
        // A thread that waits for a notification may have armed the queue.
        loss.queues.values_mut().for_each(|queue| queue.armed = true);
        self.replace_device(&mut loss);
        for queue in loss.queues.values_mut().filter(|queue| queue.armed) {
            queue.news = true;
        }
        self.notify_news(&mut loss);
        loss
    }

    /// Flushes what is posted, and notifies armed queues. Returns the time of the next call, for
    /// the case that no doorbell rings before.
    pub(crate) fn replace_device(&self, loss: &mut Loss) -> Option<Duration> {
        self.adopt(loss);
        let mut again = false;
        for qp in self.pairs() {
            again |= loss.flush(&qp).is_none();
        }
        let armed = std::mem::take(&mut *lock(&self.armed));
        for (cqid, consumer) in armed {
            if let Some(queue) = loss.queues.get_mut(&cqid) {
                queue.armed = true;
                queue.news |= queue.producer.wrapping_sub(consumer).cast_signed() > 0;
            }
        }
        self.notify_news(loss);
        again.then(|| now() + AGAIN)
    }

    fn pairs(&self) -> Vec<Arc<Qp>> {
        self.qps.all().into_iter().map(|(_, qp)| qp).collect()
    }

    /// Adds new completion queues and removes destroyed objects.
    fn adopt(&self, loss: &mut Loss) {
        let cqs: HashMap<_, _> = self.cqs.all().into_iter().collect();
        loss.queues.retain(|cqid, _| cqs.contains_key(cqid));
        for (cqid, cq) in cqs {
            loss.queues.entry(cqid).or_insert_with(|| Queue {
                producer: newest(&cq),
                cq,
                armed: false,
                news: false,
            });
        }
        let qps: HashSet<_> = self.qps.all().into_iter().map(|(qid, _)| qid).collect();
        loss.pairs.retain(|qid, _| qps.contains(qid));
    }

    fn notify_news(&self, loss: &mut Loss) {
        for (cqid, queue) in &mut loss.queues {
            if std::mem::take(&mut queue.news) && std::mem::take(&mut queue.armed) {
                self.cqs
                    .with(*cqid, |_, target| target.events.completion(target.cookie));
            }
        }
    }

    /// Refuses to destroy an object that a queue pair still `uses`, as the device would.
    ///
    /// # Errors
    /// `EBUSY` if a queue pair uses the object.
    pub(crate) fn refuse_if_used(&self, uses: impl Fn(&Qp) -> bool) -> Result<(), Errno> {
        if self.commands.is_lost() && self.pairs().iter().any(|qp| uses(qp)) {
            return Err(Errno::BUSY);
        }
        Ok(())
    }

    /// Records that a completion queue of a lost device was armed.
    pub(crate) fn arm_without_device(&self, cqid: u32, consumer: u32) {
        lock(&self.armed).push((cqid, consumer));
        self.event_loop.wake();
    }
}

impl Loss {
    /// Flushes one queue pair; `None` if the program prevents a part of it at the moment.
    fn flush(&mut self, qp: &Qp) -> Option<()> {
        let pair = match self.pairs.entry(qp.qid) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => new.insert(Pair::of(qp, qp.completed()?)),
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

impl Pair {
    /// The index at which the device stopped, derived from the requests that have a completion.
    fn of(qp: &Qp, completed: Completed) -> Pair {
        Pair {
            send: first_send(qp, completed.sends),
            // A shared queue is not flushed.
            receive: if qp.shares_receives() {
                0
            } else {
                completed.receives
            },
        }
    }

    fn flush_sends(&mut self, qp: &Qp, queue: &mut Queue) -> Result<(), Full> {
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
            let silent = retired && header.flags & SendFlags::SIGNALED.bits() == 0;
            if !silent {
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

    fn flush_receives(&mut self, qp: &Qp, queue: &mut Queue) -> Result<(), Full> {
        let record = qp.record();
        let end = record.rq_producer.load(Ordering::Acquire);
        // The completion of each receive comes after the receive was taken: no more are complete
        // than are posted.
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
/// the consumer index. It has not been overwritten: the program has not seen its completion.
fn first_send(qp: &Qp, slot: u32) -> u32 {
    let record = qp.record();
    let consumer = record.sq_consumer.load(Ordering::Acquire);
    let slot_at = |block| send_at(qp, block).cookie.get() as u32;
    if consumer != record.sq_producer.load(Ordering::Acquire) && slot_at(consumer) == slot {
        return consumer;
    }
    // Operands may look like an entry: from a real entry, the chain leads, entry by entry and slot
    // by slot, to the consumer index.
    let leads_here = |start: u32| {
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
        .find(|start| slot_at(*start) == slot && leads_here(*start))
        .unwrap_or(consumer)
}

/// Index behind the newest completion in the ring.
fn newest(cq: &Cq) -> u32 {
    let consumer = cq.record().consumer.load(Ordering::Acquire);
    let ring = cq.steady_ring();
    let is_filled = |index: &u32| {
        let (at, phase) = ring.place(*index);
        u32::from_le(ring.memory.word(at + PHASE).load(Ordering::Acquire)) & 1 == phase
    };
    let indices = (0..ring.entries()).map(|i| consumer.wrapping_add(i));
    consumer.wrapping_add(indices.take_while(is_filled).count() as u32)
}

impl Queue {
    /// Adds the completion of a flushed request.
    fn push(&mut self, qp: &Qp, cookie: u64, opcode: WcOpcode) -> Result<(), Full> {
        let consumer = self.cq.record().consumer.load(Ordering::Acquire);
        let ring = self.cq.steady_ring();
        if self.producer.wrapping_sub(consumer) >= ring.entries() {
            return Err(Full);
        }
        let mut cqe = Cqe::new(cookie, qp.qpn, qp.qid, opcode, WcStatus::WrFlushErr);
        cqe.timestamp = (now().as_nanos() as u64).into();
        let (at, phase) = ring.place(self.producer);
        if let Some(before_phase) = cqe.as_bytes().get(..PHASE) {
            ring.memory.copy_in(at, before_phase);
        }
        ring.memory
            .word(at + PHASE)
            .store(phase.to_le(), Ordering::Release);
        drop(ring);
        self.producer = self.producer.wrapping_add(1);
        self.news = true;
        Ok(())
    }
}
