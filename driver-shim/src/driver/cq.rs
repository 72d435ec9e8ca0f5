//! Completion queues.

use std::fmt;
use std::sync::{Arc, PoisonError};

use rustix::io::Errno;
use urnic_verbs_api::device::command::{CreateCq, Opcode, QueueHandle};
use urnic_verbs_api::device::cqe::CQE_LEN;
use urnic_verbs_api::device::doorbell::{Doorbell, Kind};
use urnic_verbs_api::device::record::CqRecord;

use super::dma::DmaMemory;
use super::{Context, Driver};

/// A completion queue. It starts with consumer index 0 and phase 1.
pub struct Cq {
    driver: Arc<Driver>,
    /// Device number.
    pub id: u32,
    uar: u32,
    doorbell: u32,
    ring: DmaMemory,
    record: DmaMemory,
    log_size: u32,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cq({}, {} entries)", self.id, self.entries())
    }
}

impl Driver {
    /// Makes a completion queue of at least `entries` entries, whose notifications come on completion vector `vector` with `cookie`.
    ///
    /// # Errors
    /// `EINVAL` for no entries, more than the device takes, or a vector it does not have; `ENOMEM`; `EIO` in a forked child.
    pub fn create_cq(
        self: &Arc<Self>,
        context: &Context,
        entries: u32,
        vector: u32,
        cookie: u64,
    ) -> Result<Arc<Cq>, Errno> {
        self.alive()?;
        let eq = self.notifications.get(vector as usize).ok_or(Errno::INVAL)?;
        if entries == 0 || entries > self.attributes.max_cqe {
            return Err(Errno::INVAL);
        }
        let target = self.target(context.id, cookie)?;
        let log_size = entries.next_power_of_two().ilog2();
        let ring = self.pool.allocate(CQE_LEN << log_size)?;
        let record = self.pool.allocate(size_of::<CqRecord>())?;
        let arguments = CreateCq {
            ring: ring.iova().into(),
            record: record.iova().into(),
            log_size: log_size.into(),
            eq: eq.id.into(),
            uar: context.uar.into(),
            reserved: 0.into(),
        };
        let handle: QueueHandle = self.commands.call(Opcode::CreateCq, &arguments)?;
        let cq = Arc::new(Cq {
            driver: self.clone(),
            id: handle.id.get(),
            uar: context.uar,
            doorbell: handle.doorbell.get(),
            ring,
            record,
            log_size,
        });
        self.cqs
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(cq.id, (cq.clone(), target));
        Ok(cq)
    }
}

impl Cq {
    /// Its ring of 64-byte entries.
    #[inline]
    pub fn ring(&self) -> &DmaMemory {
        &self.ring
    }

    /// Entries of the ring: a power of two.
    #[inline]
    pub fn entries(&self) -> u32 {
        1 << self.log_size
    }

    /// log2 of the entries.
    #[inline]
    pub fn log_size(&self) -> u32 {
        self.log_size
    }

    /// Its consumer index.
    #[inline]
    pub fn record(&self) -> &CqRecord {
        self.record.record()
    }

    /// Asks for one notification: of the next completion behind `consumer`, or of the next solicited or failed one.
    #[inline]
    pub fn arm(&self, consumer: u32, solicited_only: bool) {
        if self.driver.commands.is_lost() {
            return self.driver.arm_without_device(self.id, consumer);
        }
        let kind = if solicited_only {
            Kind::ArmSolicited
        } else {
            Kind::Arm
        };
        let value = Doorbell {
            kind,
            queue: self.id,
            index: consumer,
        }
        .encode();
        self.driver.bus.doorbell(self.uar, self.doorbell, value);
    }

    /// To be called, with no lock of the queue held, by a poll that found the queue empty: the device works on the caller's thread.
    #[inline]
    pub fn progress(&self) {
        self.driver.bus.progress();
    }

    /// Whether posted work waits for [`Cq::progress`], so that even a poll that found something should call it.
    #[inline]
    pub fn has_gathered(&self) -> bool {
        self.driver.bus.has_gathered()
    }

    /// Ends it. Afterwards no notification comes any more.
    ///
    /// # Errors
    /// `EBUSY` while a queue pair uses it; `EIO` in a forked child.
    pub fn destroy(&self) -> Result<(), Errno> {
        self.driver.here()?;
        self.driver.commands.destroy(Opcode::DestroyCq, self.id)?;
        // Waits for a notification that is being delivered.
        self.driver
            .cqs
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.id);
        Ok(())
    }
}
