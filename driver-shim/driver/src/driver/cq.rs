//! Completion queues.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use urnic_device::command::{Count, CreateCq, ModerateCq, Opcode, QueueHandle, ResizeCq, cq, features};
use urnic_device::cqe::CQE_LEN;
use urnic_device::doorbell::Kind;
use urnic_device::record::CqRecord;

use super::{Cq, DoorbellWrite, Driver, Qp, Ring};
use crate::dma::{DmaMemory, RingPlacement};
use crate::objects::Context;
use crate::refusal::{Reason, Refusal, at_most, used_by};

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cq({}, {} entries)", self.id, self.entries())
    }
}

impl Driver {
    /// Creates a completion queue of at least `entries` entries. Its notifications are delivered
    /// on completion vector `vector` with `cookie`. Without `timed`, its entries may have no
    /// timestamps.
    ///
    /// # Errors
    /// `EINVAL` for zero entries, more than the device supports, or a vector that does not exist;
    /// `ENOMEM` if no memory is left; `EIO` in a forked child.
    pub fn create_cq(
        self: &Arc<Self>,
        context: &Context,
        entries: u32,
        vector: u32,
        cookie: u64,
        timed: bool,
        rings: &dyn RingPlacement,
    ) -> Result<Arc<Cq>, Refusal> {
        self.check_usable()?;
        let eq = self.event_queues.notifications(vector as usize);
        let eq = eq.ok_or(
            Reason::Invalid {
                argument: "comp_vector",
                given: vector.into(),
                valid: "it must be less than num_comp_vectors",
            }
            .invalid(),
        )?;
        check_entries(entries, self.attributes.max_cqe)?;
        let target = self.objects.contexts.target(context, cookie)?;
        let log_size = entries.next_power_of_two().ilog2();
        let ring = self.pool().ring(CQE_LEN << log_size, rings)?;
        let record = self.pool().allocate(size_of::<CqRecord>())?;
        let slot = context.cq_slot(&self.commands)?;
        let arguments = CreateCq {
            ring: ring.iova().into(),
            record: record.iova().into(),
            log_size: log_size.into(),
            eq: eq.id.into(),
            uar: slot.uar().into(),
            flags: if timed { 0 } else { cq::UNTIMED }.into(),
        };
        let handle: QueueHandle = self.commands.call(Opcode::CreateCq, &arguments)?;
        let cq = Arc::new(Cq {
            driver: self.clone(),
            id: handle.id.get(),
            slot,
            doorbell: handle.doorbell.get(),
            ring: Mutex::new(Ring {
                memory: ring,
                log_size,
                base: 0,
            }),
            record,
        });
        self.objects.cqs.insert(cq.id, cq.clone(), target);
        Ok(cq)
    }
}

/// Checks the number of entries of a completion queue.
fn check_entries(entries: u32, most: u32) -> Result<(), Refusal> {
    if entries == 0 {
        return Err(Reason::Rule("cqe is 0").invalid());
    }
    at_most("cqe", entries.into(), most.into())
}

/// A new ring for [`Cq::resize`].
pub struct NewRing {
    memory: DmaMemory,
    log_size: u32,
}

impl Cq {
    /// The first byte of the ring of 64-byte entries. The ring is valid until the queue is resized
    /// or destroyed.
    pub fn ring(&self) -> *mut u8 {
        self.ring.lock().memory.as_ptr()
    }

    /// Entries of the ring: a power of two.
    pub fn entries(&self) -> u32 {
        1 << self.log_size()
    }

    /// log2 of the entries.
    pub fn log_size(&self) -> u32 {
        self.ring.lock().log_size
    }

    /// Locks the ring against a resize.
    pub(crate) fn lock_ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock()
    }

    /// Creates a ring of at least `entries` entries for [`resize`](Self::resize). May call the
    /// program's allocator.
    ///
    /// # Errors
    /// `EINVAL` for zero entries, or more than the device supports; `ENOMEM` if no memory is left;
    /// `EIO` in a forked child.
    pub fn new_ring(&self, entries: u32, rings: &dyn RingPlacement) -> Result<NewRing, Refusal> {
        self.driver.check_usable()?;
        check_entries(entries, self.driver.attributes.max_cqe)?;
        let log_size = entries.next_power_of_two().ilog2();
        let memory = self.driver.pool().ring(CQE_LEN << log_size, rings)?;
        Ok(NewRing { memory, log_size })
    }

    /// Moves the completion queue to `ring`. Returns the first byte of the ring, and log2 of its
    /// entries. The caller takes no completions during the call; afterwards the completion with the
    /// present consumer index is in the ring's first slot, with phase 1.
    ///
    /// # Errors
    /// `EINVAL` if more completions wait than the ring has entries; `EIO` in a forked child.
    pub fn resize(&self, ring: NewRing) -> Result<(*mut u8, u32), Errno> {
        self.driver.check_usable()?;
        let NewRing { memory, log_size } = ring;
        let arguments = ResizeCq {
            ring: memory.iova().into(),
            cq: self.id.into(),
            log_size: log_size.into(),
        };
        let mut ring = self.ring.lock();
        self.driver
            .commands
            .call::<_, Count>(Opcode::ResizeCq, &arguments)?;
        let base = self.record().consumer.load(Ordering::Acquire);
        *ring = Ring {
            memory,
            log_size,
            base,
        };
        Ok((ring.memory.as_ptr(), log_size))
    }

    /// Delays notifications until `count` completions wait, but no longer than `period`
    /// microseconds; with 0, there is no delay.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the device does not support moderation; `EIO` in a forked child.
    pub fn moderate(&self, count: u16, period: u16) -> Result<(), Errno> {
        self.driver.check_usable()?;
        if self.driver.attributes.features & features::MODERATION == 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let arguments = ModerateCq {
            cq: self.id.into(),
            count: u32::from(count).into(),
            period: u32::from(period).into(),
            reserved: 0.into(),
        };
        self.driver.commands.run(Opcode::ModerateCq, &arguments)
    }

    /// The queue's consumer index.
    #[inline]
    pub fn record(&self) -> &CqRecord {
        self.record.record()
    }

    /// The doorbell that requests one notification: of the next completion after `consumer`, or of
    /// the next solicited or failed one. On a lost device this requests it, and returns `None`.
    #[inline]
    pub fn arm_doorbell(&self, consumer: u32, solicited_only: bool) -> Option<DoorbellWrite> {
        if self.driver.commands.is_lost() {
            self.driver.arm_without_device(self.id, consumer);
            return None;
        }
        let kind = if solicited_only {
            Kind::ArmSolicited
        } else {
            Kind::Arm
        };
        let at = (self.slot.uar(), self.doorbell);
        Some(DoorbellWrite::new(at, kind, self.id, consumer))
    }

    /// Runs the device on the calling thread. Called, with no lock of the queue held, by a poll
    /// that found the queue empty; `queue_pair` is the device's number of the queue pair that
    /// completed a request in it last, or 0.
    #[inline]
    pub fn progress(&self, queue_pair: u32) {
        self.driver.bus().progress(queue_pair);
    }

    /// Whether posted work waits for [`Cq::progress`]: then a poll calls it even if the poll found
    /// completions.
    #[inline]
    pub fn has_gathered(&self) -> bool {
        self.driver.bus().has_gathered()
    }

    /// Destroys the completion queue. Afterwards no notification of it is delivered.
    ///
    /// # Errors
    /// `EBUSY` while a queue pair uses the completion queue; `EIO` in a forked child.
    pub fn destroy(&self) -> Result<(), Refusal> {
        self.driver.check_process()?;
        let used = |errno| used_by("queue pairs", errno);
        let destroyed = self.driver.commands.destroy(Opcode::DestroyCq, self.id);
        destroyed.map_err(used)?;
        let uses = |qp: &Qp| qp.cqs().0 == self.id || qp.cqs().1 == self.id;
        self.driver.refuse_if_used(uses).map_err(used)?;
        // Waits for a notification that is being delivered.
        self.driver.objects.cqs.remove(self.id);
        Ok(())
    }
}
