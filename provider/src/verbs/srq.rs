//! Shared receive queues.

use std::ffi::c_int;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_driver::Driver;
use urnic_presence::ChannelSender;
use urnic_presence::fork::CreationProcess;
use urnic_process::queue_lock::Lock;
use urnic_rdma_core::*;

use super::faulted;
use super::held_memory::HeldMemory;
use super::parent_domain::{Resource, Rings};
use super::pd::{DomainMembership, Pd};
use super::receive_queue::{ReceiveQueue, ReceiveShape};
use super::refusal::refuse;
use super::reported::{Acknowledgements, Reported};
use super::shared_with_c::SharedWithC;
use crate::guard::{contained, pointer, status};
use crate::strict::{self, SharedCheck};

/// A shared receive queue: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Srq {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<verbs_srq>,
    /// Checked before any lock is taken.
    created_in: CreationProcess,
    driver: &'static Driver,
    pub(super) device: Arc<urnic_driver::Srq>,
    receives: Lock<ReceiveQueue>,
    async_channel: Arc<ChannelSender>,
    pub(super) asynchronous: Reported,
    /// The check of the option `strict`, and memory for what it holds back, which is dropped before
    /// the membership.
    check: Option<Arc<SharedCheck>>,
    _held: Option<HeldMemory>,
    _rings: Rings,
    _membership: DomainMembership,
}

impl Srq {
    /// The queue behind libibverbs' pointer.
    ///
    /// # Safety
    /// `srq` came from [`create_srq`] or [`create_srq_ex`] and was not destroyed.
    pub(super) unsafe fn of<'a>(srq: *mut ibv_srq) -> &'a Srq {
        // SAFETY: the caller promises a queue of this provider, and `abi` is the first field.
        unsafe { &*srq.cast::<Srq>() }
    }

    /// Creates a shared receive queue, and writes its actual capacities to `attr`. A limit in
    /// `attr` is ignored (`ibv_create_srq(3)`).
    ///
    /// # Safety
    /// `pd` is a live domain.
    unsafe fn make(pd: *mut ibv_pd, attr: &mut ibv_srq_attr) -> Result<Box<Srq>, Errno> {
        // SAFETY: the caller promises a live domain.
        let pd_ = unsafe { Pd::of(pd) };
        let context = pd_.context();
        faulted::call(context.driver, "create_srq")?;
        let place = Box::<Srq>::new_uninit();
        let membership = pd_.admit()?;
        let rings = pd_.rings(Resource::SharedReceives);
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
        let receives = unsafe { ReceiveQueue::new(ring, NonNull::from(device.record()), shape, None) };
        let domain = membership.domain();
        let held = strict::current().and_then(|_| HeldMemory::new(domain));
        let arena = held.as_ref().map(HeldMemory::arena);
        let check =
            strict::current().map(|strict| SharedCheck::new(strict, device.id, domain.device.id, arena));
        let check = check.map(Arc::new);
        // SAFETY: all zeroes are null pointers, and an unlocked mutex.
        let mut abi: verbs_srq = unsafe { mem::zeroed() };
        abi.srq.context = pd_.ibv_context();
        abi.srq.pd = pd;
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
                _held: held,
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
    fn destroy(&self) -> Result<(), Errno> {
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
pub(super) unsafe extern "C" fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    pointer(|| {
        // SAFETY: the program's attributes.
        let attr = unsafe { &mut *attr };
        // SAFETY: libibverbs gives a live domain.
        let srq = unsafe { Srq::make(pd, &mut attr.attr)? };
        // SAFETY: no other code has the queue yet.
        unsafe { (*srq.abi.get()).srq.srq_context = attr.srq_context };
        Ok(srq)
    })
    .cast()
}

/// `ibv_create_srq_ex(3)`: EOPNOTSUPP for any type but basic queues.
pub(super) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    pointer(|| {
        // SAFETY: the program's attributes.
        let attr = unsafe { &mut *attr };
        let given = |bit: u32| attr.comp_mask & bit != 0;
        if attr.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) != 0
            || given(IBV_SRQ_INIT_ATTR_TYPE) && attr.srq_type != IBV_SRQT_BASIC
        {
            return Err(Errno::OPNOTSUPP);
        }
        if !given(IBV_SRQ_INIT_ATTR_PD) || attr.pd.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the program's domain.
        let srq = unsafe { Srq::make(attr.pd, &mut attr.attr)? };
        // SAFETY: no other code has the queue yet.
        unsafe { (*srq.abi.get()).srq.srq_context = attr.srq_context };
        Ok(srq)
    })
    .cast()
}

/// `ibv_modify_srq(3)`: arms the limit. Changing the size fails with EOPNOTSUPP: the device does
/// not report support for it.
pub(super) unsafe extern "C" fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    status(|| {
        let mask = mask as u32;
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Errno::INVAL);
        }
        if mask & IBV_SRQ_MAX_WR != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if mask & IBV_SRQ_LIMIT != 0 {
            // SAFETY: a live queue, and the program's attributes.
            unsafe { Srq::of(srq).device.arm_limit((*attr).srq_limit)? };
        }
        Ok(())
    })
}

/// `ibv_query_srq(3)`.
pub(super) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    status(|| {
        // SAFETY: a live queue.
        let device = unsafe { &Srq::of(srq).device };
        let answer = ibv_srq_attr {
            max_wr: device.max_wr(),
            max_sge: device.max_sge(),
            srq_limit: device.limit(),
        };
        // SAFETY: the program's structure.
        unsafe { attr.write(answer) };
        Ok(())
    })
}

/// `ibv_destroy_srq(3)`: EBUSY while a queue pair uses it.
pub(super) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    status(|| {
        // SAFETY: a live queue.
        unsafe { Srq::of(srq) }.destroy()?;
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(srq.cast::<Srq>()) });
        Ok(())
    })
}

/// `ibv_post_srq_recv(3)`: EINVAL for too many elements, ENOMEM when the queue is full, EIO in a
/// forked child.
pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a live queue.
    let srq = unsafe { Srq::of(srq) };
    if !srq.created_in.is_current() {
        // SAFETY: the program's variable.
        return unsafe { refuse(wr, bad_wr, Errno::IO) };
    }
    let driver = srq.driver;
    // As in `post`: after the lock is released, nothing of the queue is used.
    let (doorbell, result) = {
        let mut receives = srq.receives.hold();
        // SAFETY: the program's list.
        let (index, result) = unsafe { receives.post_list(wr, bad_wr) };
        (index.map(|index| srq.device.receive_doorbell(index)), result)
    };
    if let Some(doorbell) = doorbell {
        contained(|| driver.ring(doorbell));
    }
    result
}
