//! Shared receive queues.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_driver::{Driver, Reason, Refusal};
use urnic_presence::ChannelSender;
use urnic_presence::fork::CreationProcess;
use urnic_process::queue_lock::Lock;
use urnic_rdma_core::*;

use super::faulted;
use super::pd::{DomainMembership, Pd, Resource, Rings};
use super::receive_queue::{ReceiveQueue, ReceiveShape};
use super::reported::{Acknowledgements, Reported};
use urnic_sys::Plain;

use crate::from_c::{Given, Out, SharedWithC, ToFree, objects, pointers};
use crate::strict::{self, SharedCheck, WithheldMemory};

/// A shared receive queue: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Srq {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<verbs_srq>,
    /// Checked before any lock is taken.
    pub(super) created_in: CreationProcess,
    pub(super) driver: &'static Driver,
    pub(super) device: Arc<urnic_driver::Srq>,
    pub(super) receives: Lock<ReceiveQueue>,
    async_channel: Arc<ChannelSender>,
    pub(super) asynchronous: Reported,
    /// The check of the option `strict`, and memory for withheld bytes, which is dropped before the
    /// membership.
    check: Option<Arc<SharedCheck>>,
    _withheld: Option<WithheldMemory>,
    _rings: Rings,
    _membership: DomainMembership,
}

objects! { Srq: ibv_srq; }

pointers! {
    ibv_srq_init_attr_ex { pd: Pd, if IBV_SRQ_INIT_ATTR_PD; }
}

impl Srq {
    /// Creates a shared receive queue, and writes its actual capacities to `attr`. A limit in
    /// `attr` is ignored (`ibv_create_srq(3)`).
    fn make(pd: &Pd, attr: &mut ibv_srq_attr, srq_context: *mut c_void) -> Result<Box<Srq>, Refusal> {
        let context = pd.context();
        faulted::call(context.driver, "create_srq")?;
        let place = Box::<Srq>::new_uninit();
        let membership = pd.admit()?;
        let rings = pd.rings(Resource::SharedReceives);
        let cookie = place.as_ptr().addr() as u64;
        let device = context.driver.create_srq(
            &context.device,
            &membership.domain().device,
            attr.max_wr,
            attr.max_sge,
            cookie,
            &rings,
        )?;
        (attr.max_wr, attr.max_sge) = (device.max_wr(), device.max_sge());
        let shape = ReceiveShape {
            slots: device.max_wr(),
            max_sge: device.max_sge(),
            entries: device.entries(),
            log_stride: device.log_stride(),
        };
        let ring = NonNull::new(device.ring().as_ptr()).ok_or(Errno::NOMEM)?;
        // SAFETY: ring and record exist as long as `device`, which the new queue keeps as long as
        // the value.
        let receives = unsafe { ReceiveQueue::new(ring, device.record(), shape, None) };
        let domain = membership.domain();
        let withheld = strict::current().and_then(|_| WithheldMemory::new(domain));
        let arena = withheld.as_ref().map(WithheldMemory::arena);
        let check =
            strict::current().map(|strict| SharedCheck::new(strict, device.id, domain.device.id, arena));
        let check = check.map(Arc::new);
        let mut abi = verbs_srq::zeroes();
        abi.srq.context = context.public();
        abi.srq.srq_context = srq_context;
        abi.srq.pd = pd.public();
        abi.srq.handle = device.id;
        abi.srq_type = IBV_SRQT_BASIC;
        // No event comes before a limit is armed, so no code has read this field yet.
        Ok(Box::write(
            place,
            Srq {
                abi: SharedWithC::new(abi),
                created_in: CreationProcess::current(),
                driver: context.driver,
                device,
                receives: Lock::new(receives.checked(check.clone())),
                async_channel: context.async_channel.clone(),
                asynchronous: Reported::default(),
                check,
                _withheld: withheld,
                _rings: rings,
                _membership: membership,
            },
        ))
    }

    /// The check of the option `strict`.
    pub(super) fn check(&self) -> Option<Arc<SharedCheck>> {
        self.check.clone()
    }

    /// Destroys the queue. Waits until the program acknowledged its events.
    fn destroy(&self) -> Result<(), Refusal> {
        self.device.destroy()?;
        if let Some(check) = &self.check {
            check.emptied();
        }
        self.receives.outlast_holders();
        let public = self.abi.get().cast::<ibv_srq>();
        self.asynchronous.purge(&self.async_channel, public.addr() as u64);
        // SAFETY: the fields belong to this queue: zeroes are an initialised mutex and condition
        // variable.
        unsafe {
            Acknowledgements {
                mutex: &raw mut (*public).mutex,
                cond: &raw mut (*public).cond,
                counts: [(&raw const (*public).events_completed, &self.asynchronous)],
            }
            .wait();
        }
        Ok(())
    }
}

/// `ibv_create_srq(3)`: EINVAL beyond the device's limits.
pub(super) fn create_srq(pd: &Pd, mut attr: Given<'_, ibv_srq_init_attr>) -> Result<Box<Srq>, Refusal> {
    let srq_context = attr.srq_context;
    Srq::make(pd, &mut attr.attr, srq_context)
}

/// `ibv_create_srq_ex(3)`: EOPNOTSUPP for any type but basic queues.
pub(super) fn create_srq_ex(mut attr: Given<'_, ibv_srq_init_attr_ex>) -> Result<Box<Srq>, Refusal> {
    let given = |bit: u32| attr.comp_mask & bit != 0;
    if attr.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) != 0
        || given(IBV_SRQ_INIT_ATTR_TYPE) && attr.srq_type != IBV_SRQT_BASIC
    {
        return Err(Errno::OPNOTSUPP.into());
    }
    let pd = attr.pd().ok_or(Reason::Null("pd").invalid())?;
    let srq_context = attr.srq_context;
    Srq::make(pd, &mut attr.attr, srq_context)
}

/// `ibv_modify_srq(3)`: arms the limit. Changing the size fails with EOPNOTSUPP: the device does
/// not report support for it.
pub(super) fn modify_srq(srq: &Srq, attr: Option<&ibv_srq_attr>, mask: c_int) -> Result<(), Refusal> {
    let mask = mask as u32;
    let unknown = mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT);
    if unknown != 0 {
        let (argument, bits) = ("srq_attr_mask", unknown.into());
        return Err(Reason::Bits { argument, bits }.invalid());
    }
    if mask & IBV_SRQ_MAX_WR != 0 {
        return Err(Errno::OPNOTSUPP.into());
    }
    if mask & IBV_SRQ_LIMIT != 0 {
        srq.device.arm_limit(attr.ok_or(Errno::INVAL)?.srq_limit)?;
    }
    Ok(())
}

/// `ibv_query_srq(3)`.
pub(super) fn query_srq(srq: &Srq, mut attr: Out<'_, ibv_srq_attr>) -> Result<(), Errno> {
    attr.set(ibv_srq_attr {
        max_wr: srq.device.max_wr(),
        max_sge: srq.device.max_sge(),
        srq_limit: srq.device.limit(),
    });
    Ok(())
}

/// `ibv_destroy_srq(3)`: EBUSY while a queue pair uses it.
pub(super) fn destroy_srq(srq: ToFree<Srq>) -> Result<(), Refusal> {
    srq.destroy()?;
    srq.free();
    Ok(())
}
