//! Queue pairs: creating, modifying, querying, destroying. Posting is in [`post`](super::post).

use std::ffi::c_int;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_config::Identity;
use urnic_device::command::features;
use urnic_device::vocabulary::{QpKind, QpState};
use urnic_driver::{Attributes, Driver, QpCaps, QpInit, QpMask};
use urnic_presence::ChannelSender;
use urnic_presence::fork::CreationProcess;
use urnic_process::queue_lock::Lock;
use urnic_rdma_core::*;

use super::cq::Cq;
use super::faulted;
use super::gated_sends::Sends;
use super::held_memory::HeldMemory;
use super::ledger::Ledger;
use super::parent_domain::{Resource, Rings};
use super::pd::{DomainMembership, Pd};
use super::qp_attr::{caps, device_attr, ibv_attr, ibv_caps, own_caps};
use super::receive_queue::{ReceiveQueue, ReceiveShape};
use super::reported::{Acknowledgements, Reported};
use super::send_queue::{SendQueue, SendRules, SendShape};
use super::shared_with_c::SharedWithC;
use super::srq::Srq;
use crate::guard::{pointer, status};
use crate::probes;
use crate::strict::{self, PairCheck};
use crate::trace::{self, PairTrace};

/// A queue pair: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Qp {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: SharedWithC<verbs_qp>,
    /// Checked before any lock is taken.
    pub(super) created_in: CreationProcess,
    pub(super) driver: &'static Driver,
    pub(super) device: Arc<urnic_driver::Qp>,
    pub(super) sends: Arc<Sends>,
    pub(super) receives: Lock<ReceiveQueue>,
    pub(super) ledger: Arc<Ledger>,
    async_channel: Arc<ChannelSender>,
    pub(super) asynchronous: Reported,
    signal_all: bool,
    /// Memory for what the option `strict` holds back. Dropped before the membership.
    _held: Option<HeldMemory>,
    _rings: Rings,
    membership: DomainMembership,
}

impl Qp {
    /// The queue pair behind libibverbs' pointer.
    ///
    /// # Safety
    /// `qp` came from [`create_qp`] or [`create_qp_ex`](super::qp_ex::create_qp_ex) and was not
    /// destroyed.
    #[inline]
    pub(super) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: the caller promises a queue pair of this provider, and `abi` is the first field.
        unsafe { &*qp.cast::<Qp>() }
    }

    /// Creates a queue pair, and writes its actual capacities to `attr.cap`.
    ///
    /// # Safety
    /// `pd` is a live domain, and the queues in `attr` are null or live.
    pub(super) unsafe fn make(pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> Result<Box<Qp>, Errno> {
        // SAFETY: the caller promises a live domain.
        faulted::call(unsafe { Pd::of(pd) }.context().driver, "create_qp")?;
        if attr.send_cq.is_null() || attr.recv_cq.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller promises a live domain and live queues.
        let (pd_, send_cq, recv_cq) = unsafe { (Pd::of(pd), Cq::of(attr.send_cq), Cq::of(attr.recv_cq)) };
        // SAFETY: the caller promises that the queue is live, if there is one.
        let srq = (!attr.srq.is_null()).then(|| unsafe { Srq::of(attr.srq) });
        let context = pd_.context();
        let limits = context.driver.attributes();
        let kind = kind_of(attr.qp_type, context.driver.identity(), limits)?;
        let place = Box::<Qp>::new_uninit();
        let membership = pd_.admit()?;
        let rings = pd_.rings(Resource::QueuePair);
        let device = context.driver.create_qp(&QpInit {
            kind,
            context: &context.device,
            pd: &membership.domain().device,
            send_cq: &send_cq.device,
            recv_cq: &recv_cq.device,
            srq: srq.map(|srq| &*srq.device),
            caps: own_caps(caps(&attr.cap), srq.is_some()),
            cookie: place.as_ptr().addr() as u64,
            rings: &rings,
        })?;
        let granted = own_caps(device.caps(), srq.is_some());
        let check = strict::current().zip(send_cq.check.clone().zip(recv_cq.check.clone()));
        let domain = membership.domain();
        let held = check.as_ref().and_then(|_| HeldMemory::new(domain));
        let check = check.map(|(strict, (send, receive))| {
            let arena = held.as_ref().map(HeldMemory::arena);
            let shared = srq.and_then(Srq::check);
            PairCheck::new(
                strict,
                device.qpn,
                domain.device.id,
                [send, receive],
                shared,
                arena,
            )
        });
        let traced = trace::trace().map(|trace| PairTrace::new(trace, device.qpn));
        let ledger = Arc::new(Ledger::new(device.qpn, granted.max_send_wr).observed(check, traced));
        let signal_all = attr.sq_sig_all != 0;
        let (send_queue, receives) = queues(&device, granted, send_rules(limits, kind, signal_all), &ledger)?;
        let sends = Sends::new(&device, send_queue, ledger.clone(), [send_cq, recv_cq]);
        device.set_poster(sends.clone());
        send_cq.attach(device.qid, &ledger);
        recv_cq.attach(device.qid, &ledger);
        attr.cap = ibv_caps(granted);

        let abi = public_part(pd, attr, pd_.ibv_context(), &device);
        // No event comes before the queue pair leaves Reset, so no code has read this field yet.
        Ok(Box::write(
            place,
            Qp {
                abi: SharedWithC::new(abi),
                created_in: CreationProcess::current(),
                driver: context.driver,
                device,
                sends,
                receives: Lock::new(receives),
                ledger,
                async_channel: context.async_channel.clone(),
                asynchronous: Reported::default(),
                signal_all,
                _held: held,
                _rings: rings,
                membership,
            },
        ))
    }

    /// The capacities of the queue pair.
    fn caps(&self) -> QpCaps {
        own_caps(self.device.caps(), self.shares_receives())
    }

    /// Whether receives are posted to a shared queue.
    pub(super) fn shares_receives(&self) -> bool {
        self.device.shares_receives()
    }

    /// The part of the queue pair that belongs to libibverbs.
    pub(super) fn abi(&self) -> *mut verbs_qp {
        self.abi.get()
    }

    fn public(&self) -> *mut ibv_qp {
        self.abi.get().cast()
    }

    /// The completion queues of sends and receives.
    fn cqs(&self) -> [&Cq; 2] {
        // SAFETY: both were set at creation; a completion queue outlives its queue pairs (EBUSY).
        unsafe { [Cq::of((*self.public()).send_cq), Cq::of((*self.public()).recv_cq)] }
    }

    fn modify(&self, attr: &ibv_qp_attr, mask: c_int) -> Result<(), Errno> {
        faulted::call(&self.membership.domain().driver, "modify_qp")?;
        let mask = QpMask::from_bits(mask as u32).ok_or(Errno::INVAL)?;
        let attr = device_attr(attr);
        self.device.modify(&attr, mask)?;
        if mask.contains(QpMask::STATE) {
            probes::qp_state(self.device.qpn, attr.state);
        }
        if let Some(trace) = trace::trace()
            && mask.contains(QpMask::STATE)
        {
            let state = QpState::from_raw(attr.state);
            let state = state.map_or("?", QpState::verbs_name);
            trace.note(trace::Instant::State(self.device.qpn, state));
        }
        if mask.contains(QpMask::STATE) && attr.state == QpState::Reset as u32 {
            // Earlier completions must not be polled, and settled, after this.
            self.cqs().iter().for_each(|cq| cq.purge(self.device.qid));
            let sends = self.sends.discard();
            let receives = self.receives.hold().discard();
            self.ledger.settle_all(sends, receives);
        }
        Ok(())
    }

    /// Destroys the queue pair. Waits for calls that still post, one of which may have posted the
    /// request whose completion the program took as the signal to destroy, and until the program
    /// acknowledged the events.
    fn destroy(&self) -> Result<(), Errno> {
        self.device.destroy()?;
        self.sends.outlast_posts();
        self.receives.outlast_holders();
        self.cqs().iter().for_each(|cq| cq.detach(self.device.qid));
        self.ledger.emptied();
        self.asynchronous
            .purge(&self.async_channel, self.public().addr() as u64);
        // SAFETY: the fields belong to this queue pair: zeroes are an initialised mutex and
        // condition variable.
        unsafe {
            let public = self.public();
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

/// The service of a queue pair of this type. Only a RoCE NIC has unreliable ones: programs expect
/// none of an RNIC.
///
/// # Errors
/// `EOPNOTSUPP` for a type that the device does not have, `EINVAL` for an unknown one.
fn kind_of(qp_type: ibv_qp_type, identity: Identity, limits: &Attributes) -> Result<QpKind, Errno> {
    let has = |feature| identity.is_roce() && limits.features & feature != 0;
    match qp_type {
        IBV_QPT_RC => Ok(QpKind::ReliableConnected),
        IBV_QPT_UC if has(features::UNRELIABLE) => Ok(QpKind::UnreliableConnected),
        IBV_QPT_UD if has(features::DATAGRAMS) => Ok(QpKind::UnreliableDatagram),
        IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV
        | IBV_QPT_DRIVER => Err(Errno::OPNOTSUPP),
        _ => Err(Errno::INVAL),
    }
}

/// The rules of a send queue on a device with these limits.
fn send_rules(limits: &Attributes, kind: QpKind, signal_all: bool) -> SendRules {
    SendRules {
        kind,
        signal_all,
        max_sge_read: limits.max_sge_rd,
        atomics: limits.features & features::ATOMICS != 0,
        immediate: limits.features & features::IMMEDIATE != 0,
        windows: limits.features & features::WINDOWS != 0,
    }
}

/// The queues of a queue pair, in the device's rings.
///
/// # Errors
/// `ENOMEM` for a ring without memory.
fn queues(
    device: &urnic_driver::Qp,
    granted: QpCaps,
    rules: SendRules,
    ledger: &Arc<Ledger>,
) -> Result<(SendQueue, ReceiveQueue), Errno> {
    let shape = SendShape {
        slots: granted.max_send_wr,
        max_sge: granted.max_send_sge,
        max_inline: granted.max_inline,
        blocks: device.sq_blocks(),
    };
    let receive_shape = ReceiveShape {
        slots: granted.max_recv_wr,
        max_sge: granted.max_recv_sge,
        entries: device.rq_entries(),
        log_stride: device.rq_log_stride(),
    };
    let record = NonNull::from(device.record());
    let sq = NonNull::new(device.sq().as_ptr()).ok_or(Errno::NOMEM)?;
    let rq = NonNull::new(device.rq().as_ptr()).ok_or(Errno::NOMEM)?;
    // SAFETY: ring and record live as long as `device`, which lives as long as `Qp`; `Sends`, which
    // may outlive `Qp`, accesses them only while it holds `device`.
    let sends = unsafe { SendQueue::new(sq, record, shape, rules, ledger.clone()) };
    // SAFETY: ring and record live as long as `device`, which lives as long as `Qp`, which has the
    // receive queue.
    let receives = unsafe { ReceiveQueue::new(rq, record, receive_shape, Some(ledger.clone())) };
    Ok((sends, receives))
}

/// The part of a new queue pair that belongs to libibverbs.
fn public_part(
    pd: *mut ibv_pd,
    attr: &ibv_qp_init_attr,
    context: *mut ibv_context,
    device: &urnic_driver::Qp,
) -> verbs_qp {
    // SAFETY: all zeroes are null pointers, no functions, and an unlocked mutex.
    let mut abi: verbs_qp = unsafe { mem::zeroed() };
    // SAFETY: both variants of the union begin with these fields.
    let public = unsafe { &mut *abi.qp.qp };
    public.context = context;
    public.qp_context = attr.qp_context;
    public.pd = pd;
    public.send_cq = attr.send_cq;
    public.recv_cq = attr.recv_cq;
    public.srq = attr.srq;
    public.handle = device.qid;
    public.qp_num = device.qpn;
    public.state = IBV_QPS_RESET;
    public.qp_type = attr.qp_type;
    abi
}

/// `ibv_create_qp(3)`: EOPNOTSUPP for a type that the device does not have, EINVAL beyond the
/// device's limits.
pub(super) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: libibverbs gives a live domain, and the program its attributes.
    pointer(|| unsafe { Qp::make(pd, &mut *attr) }).cast()
}

/// `ibv_modify_qp(3)`.
pub(super) unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: a live queue pair, and the program's attributes.
    status(|| unsafe { Qp::of(qp).modify(&*attr, mask) })
}

/// `ibv_query_qp(3)`: writes all attributes; the mask is ignored.
pub(super) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    status(|| {
        // SAFETY: a live queue pair.
        let this = unsafe { Qp::of(qp) };
        let caps = this.caps();
        let answer = ibv_attr(&this.device.query()?, caps);
        // SAFETY: the program's structures, and this queue pair's.
        unsafe {
            attr.write(answer);
            init_attr.write(ibv_qp_init_attr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap: ibv_caps(caps),
                qp_type: (*qp).qp_type,
                sq_sig_all: this.signal_all.into(),
            });
        }
        Ok(())
    })
}

/// `ibv_destroy_qp(3)`.
pub(super) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    status(|| {
        // SAFETY: a live queue pair.
        unsafe { Qp::of(qp) }.destroy()?;
        // SAFETY: from `Box::into_raw`, and no other reference is left.
        drop(unsafe { Box::from_raw(qp.cast::<Qp>()) });
        Ok(())
    })
}
