//! Shared receive queues.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use urnic_device::command::{CreateSrq, ModifySrq, Opcode, QueueHandle};
use urnic_device::doorbell::Kind;
use urnic_device::record::QueueRecord;
use urnic_device::wqe::{MAX_SGE, RecvHeader, Sge};

use super::{DoorbellWrite, Driver, Srq};
use crate::dma::{DmaMemory, RingPlacement};
use crate::objects::{Context, Pd};
use crate::refusal::{Reason, Refusal, at_most, used_by};

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Srq({}, {} entries)", self.id, self.entries)
    }
}

impl Driver {
    /// Creates a shared receive queue for at least `max_wr` requests of `max_sge` elements. Its
    /// events carry `cookie`.
    ///
    /// # Errors
    /// `EINVAL` for zero requests, or beyond the device's limits; `ENOMEM` if no memory is left;
    /// `EIO` in a forked child.
    pub fn create_srq(
        self: &Arc<Self>,
        context: &Context,
        pd: &Pd,
        max_wr: u32,
        max_sge: u32,
        cookie: u64,
        rings: &dyn RingPlacement,
    ) -> Result<Arc<Srq>, Refusal> {
        self.check_usable()?;
        let most_sge = self.attributes.max_sge.min(MAX_SGE as u32);
        if max_wr == 0 {
            return Err(Reason::Rule("max_wr is 0").invalid());
        }
        at_most("max_wr", max_wr.into(), self.attributes.max_srq_wr.into())?;
        at_most("max_sge", max_sge.into(), most_sge.into())?;
        let target = self.objects.contexts.target(context, cookie)?;
        let entries = max_wr.next_power_of_two();
        let elements = max_sge.max(1) as usize * size_of::<Sge>();
        let stride = (size_of::<RecvHeader>() + elements).next_power_of_two();
        let room = ((stride - size_of::<RecvHeader>()) / size_of::<Sge>()) as u32;
        let ring = self.pool().ring(entries as usize * stride, rings)?;
        let record = self.pool().allocate(size_of::<QueueRecord>())?;
        let arguments = CreateSrq {
            ring: ring.iova().into(),
            record: record.iova().into(),
            pd: pd.id.into(),
            log_size: entries.ilog2().into(),
            log_stride: stride.ilog2().into(),
            uar: context.uar().into(),
        };
        let handle: QueueHandle = self.commands.call(Opcode::CreateSrq, &arguments)?;
        let srq = Arc::new(Srq {
            driver: self.clone(),
            id: handle.id.get(),
            uar: context.uar(),
            doorbell: handle.doorbell.get(),
            ring,
            record,
            entries,
            log_stride: stride.ilog2(),
            max_wr: entries.min(self.attributes.max_srq_wr),
            max_sge: room.min(most_sge),
            limit: AtomicU32::new(0),
        });
        self.objects.srqs.insert(srq.id, srq.clone(), target);
        Ok(srq)
    }
}

impl Srq {
    /// The queue's ring.
    #[inline]
    pub fn ring(&self) -> &DmaMemory {
        &self.ring
    }

    /// Entries of the ring: a power of two.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// log2 of the bytes of an entry.
    #[inline]
    pub fn log_stride(&self) -> u32 {
        self.log_stride
    }

    /// Requests that may be posted.
    pub fn max_wr(&self) -> u32 {
        self.max_wr
    }

    /// Elements of a request.
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// The queue's indices: the receive half.
    #[inline]
    pub fn record(&self) -> &QueueRecord {
        self.record.record()
    }

    /// The doorbell for receives whose index was published.
    #[inline]
    pub fn receive_doorbell(&self, producer: u32) -> DoorbellWrite {
        DoorbellWrite::new((self.uar, self.doorbell), Kind::SharedReceive, self.id, producer)
    }

    /// The armed limit; 0 if none is armed, or if its event came.
    pub fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Arms an event for the moment when fewer than `limit` requests are left; 0 disarms it.
    ///
    /// # Errors
    /// `EINVAL` for more requests than the queue has room for; `EIO` in a forked child.
    pub fn arm_limit(&self, limit: u32) -> Result<(), Refusal> {
        self.driver.check_usable()?;
        if limit > self.max_wr {
            return Err(Reason::Exceeds {
                argument: "srq_limit",
                given: limit.into(),
                limit: "max_wr",
                most: self.max_wr.into(),
            }
            .invalid());
        }
        // Stored before the command: the event may come before the command completes.
        self.limit.store(limit, Ordering::Relaxed);
        let arguments = ModifySrq {
            srq: self.id.into(),
            limit: limit.into(),
        };
        self.driver.commands.run(Opcode::ModifySrq, &arguments)?;
        Ok(())
    }

    /// Records that the event of the limit came.
    pub(crate) fn disarmed(&self) {
        self.limit.store(0, Ordering::Relaxed);
    }

    /// Destroys the shared receive queue. Afterwards it has no events any more.
    ///
    /// # Errors
    /// `EBUSY` while a queue pair uses the shared receive queue; `EIO` in a forked child.
    pub fn destroy(&self) -> Result<(), Refusal> {
        self.driver.check_process()?;
        let used = |errno| used_by("queue pairs", errno);
        let destroyed = self.driver.commands.destroy(Opcode::DestroySrq, self.id);
        destroyed.map_err(used)?;
        let unused = self.driver.refuse_if_used(|qp| qp.srq() == Some(self.id));
        unused.map_err(used)?;
        // Waits for an event that is being delivered.
        self.driver.objects.srqs.remove(self.id);
        Ok(())
    }
}
