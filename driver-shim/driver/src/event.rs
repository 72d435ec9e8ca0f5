//! Event queues: rings that the device fills. The thread that handles the interrupt empties the
//! ring, under a lock.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::command::{CreateEq, Handle, Opcode};
use urnic_device::event::{EVENT_LEN, Event, PHASE};
use urnic_device::record::{CqRecord, EqRecord};

use super::command::CommandQueue;
use super::dma::{DmaMemory, DmaPool};
use urnic_process::lock::lock;

/// An event queue.
pub(crate) struct EventQueue {
    /// Device number of the queue.
    pub(crate) id: u32,
    ring: DmaMemory,
    record: DmaMemory,
    log_size: u32,
    consumer: Mutex<u32>,
}

impl EventQueue {
    /// Creates a queue with at least `entries` entries on `vector`.
    ///
    /// # Errors
    /// The errors of the command; `ENOMEM` if no memory is left.
    pub(crate) fn create(
        commands: &CommandQueue,
        pool: &std::sync::Arc<DmaPool>,
        entries: u32,
        vector: u32,
    ) -> Result<EventQueue, Errno> {
        let log_size = entries.max(2).next_power_of_two().ilog2();
        let ring = pool.allocate(EVENT_LEN << log_size)?;
        let record = pool.allocate(size_of::<EqRecord>())?;
        let arguments = CreateEq {
            ring: ring.iova().into(),
            record: record.iova().into(),
            log_size: log_size.into(),
            vector: vector.into(),
        };
        let handle: Handle = commands.call(Opcode::CreateEq, &arguments)?;
        Ok(EventQueue {
            id: handle.id.get(),
            ring,
            record,
            log_size,
            consumer: Mutex::new(0),
        })
    }

    /// Takes all events, oldest first, and passes each to `take`.
    ///
    /// Events that arrive meanwhile are taken too, or the interrupt that follows them finds the
    /// lock free. `take` must not call this function.
    pub(crate) fn drain(&self, mut take: impl FnMut(Event)) {
        let mut consumer = lock(&self.consumer);
        let record: &CqRecord = self.record.record();
        loop {
            let at = *consumer;
            let slot = (at & ((1 << self.log_size) - 1)) as usize * EVENT_LEN;
            let phase = 1 ^ (at >> self.log_size & 1);
            if self.ring.word(slot + PHASE).load(Ordering::Acquire) & 1 != phase {
                return;
            }
            let event: Event = self.ring.read(slot);
            *consumer = at.wrapping_add(1);
            record.consumer.store(*consumer, Ordering::Release);
            take(event);
        }
    }
}
