//! Queue pairs: creating, modifying, querying, destroying; multicast groups. Posting is in
//! [`post`](super::post).

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_config::Identity;
use urnic_device::command::features;
use urnic_device::vocabulary::{QpKind, QpState};
use urnic_driver::{Attributes, Driver, QpAttr, QpCaps, QpInit, QpMask, Reason, Refusal};
use urnic_presence::ChannelSender;
use urnic_presence::fork::CreationProcess;
use urnic_process::queue_lock::Lock;
use urnic_rdma_core::*;

use super::ah::address_vector;
use super::cq::Cq;
use super::faulted;
use super::gated_sends::Sends;
use super::ledger::Ledger;
use super::pd::{DomainMembership, Pd, Resource, Rings};
use super::receive_queue::{ReceiveQueue, ReceiveShape};
use super::reported::{Acknowledgements, Reported};
use super::send_queue::{SendQueue, SendRules, SendShape};
use super::srq::Srq;
use urnic_sys::Plain;

use crate::from_c::{Copied, Given, Out, SharedWithC, ToFree, objects, pointers};
use crate::probes;
use crate::strict::{self, PairCheck, WithheldMemory};
use crate::trace::{self, PairTrace};

/// A queue pair: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Qp {
    /// Must be first: libibverbs' pointer is also the provider's.
    pub(super) abi: SharedWithC<verbs_qp>,
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
    /// Memory for bytes that the option `strict` withholds. Dropped before the membership.
    _withheld: Option<WithheldMemory>,
    _rings: Rings,
    membership: DomainMembership,
}

objects! { Qp: ibv_qp, ibv_qp_ex; }

pointers! {
    ibv_qp_init_attr {
        send_cq: Cq;
        recv_cq: Cq;
        srq: Srq;
    }
    ibv_qp_init_attr_ex {
        send_cq: Cq;
        recv_cq: Cq;
        srq: Srq;
        pd: Pd, if IBV_QP_INIT_ATTR_PD;
    }
}

/// The objects to which a new queue pair belongs.
pub(super) struct Parents<'a> {
    pub(super) pd: &'a Pd,
    pub(super) send_cq: Option<&'a Cq>,
    pub(super) recv_cq: Option<&'a Cq>,
    pub(super) srq: Option<&'a Srq>,
}

impl Qp {
    /// Creates a queue pair, and writes its actual capacities to `attr.cap`.
    pub(super) fn make(parents: &Parents<'_>, attr: &mut ibv_qp_init_attr) -> Result<Box<Qp>, Refusal> {
        let &Parents { pd, srq, .. } = parents;
        faulted::call(pd.context().driver, "create_qp")?;
        let send_cq = parents.send_cq.ok_or(Reason::Null("send_cq").invalid())?;
        let recv_cq = parents.recv_cq.ok_or(Reason::Null("recv_cq").invalid())?;
        let context = pd.context();
        let limits = context.driver.attributes();
        let kind = kind_of(attr.qp_type, context.driver.identity(), limits)?;
        let place = Box::<Qp>::new_uninit();
        let membership = pd.admit()?;
        let rings = pd.rings(Resource::QueuePair);
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
        let withheld = check.as_ref().and_then(|_| WithheldMemory::new(domain));
        let check = check.map(|(strict, (send, receive))| {
            let arena = withheld.as_ref().map(WithheldMemory::arena);
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

        let abi = public_part(pd, attr, &device);
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
                _withheld: withheld,
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

    /// libibverbs' pointer to the queue pair.
    fn public(&self) -> *mut ibv_qp {
        self.abi.get().cast()
    }

    fn modify(&self, attr: &ibv_qp_attr, mask: c_int) -> Result<(), Refusal> {
        faulted::call(&self.membership.domain().driver, "modify_qp")?;
        let argument = "attr_mask";
        let bits = u64::from(mask as u32 & !QpMask::all().bits());
        let unknown = Reason::Bits { argument, bits }.with(Errno::OPNOTSUPP);
        let mask = QpMask::from_bits(mask as u32).ok_or(unknown)?;
        let attr = device_attr(attr);
        self.device.modify(&attr, mask).map_err(|refusal| {
            let to = QpState::from_raw(attr.state).filter(|_| mask.contains(QpMask::STATE));
            Refusal { to, ..refusal }
        })?;
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
            self.sends.cqs().iter().for_each(|cq| cq.purge(self.device.qid));
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
        self.sends.cqs().iter().for_each(|cq| cq.detach(self.device.qid));
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
fn kind_of(qp_type: ibv_qp_type, identity: Identity, limits: &Attributes) -> Result<QpKind, Refusal> {
    let only_roce = |kind| Err(Reason::OnlyRoce(kind).with(Errno::OPNOTSUPP));
    let has = |feature| identity.is_roce() && limits.features & feature != 0;
    match qp_type {
        IBV_QPT_RC => Ok(QpKind::ReliableConnected),
        IBV_QPT_UC if has(features::UNRELIABLE) => Ok(QpKind::UnreliableConnected),
        IBV_QPT_UD if has(features::DATAGRAMS) => Ok(QpKind::UnreliableDatagram),
        IBV_QPT_UD if !identity.is_roce() => only_roce("UD"),
        IBV_QPT_UC if !identity.is_roce() => only_roce("UC"),
        IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV
        | IBV_QPT_DRIVER => Err(Errno::OPNOTSUPP.into()),
        _ => Err(Reason::Invalid {
            argument: "qp_type",
            given: qp_type.into(),
            valid: "the device has IBV_QPT_RC, 2, UC, 3, and UD, 4",
        }
        .invalid()),
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
    let record = device.record();
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
fn public_part(pd: &Pd, attr: &ibv_qp_init_attr, device: &urnic_driver::Qp) -> verbs_qp {
    let mut abi = verbs_qp::zeroes();
    // SAFETY: both variants of the union begin with these fields.
    let public = unsafe { &mut *abi.qp.qp };
    public.context = pd.context().public();
    public.qp_context = attr.qp_context;
    public.pd = pd.public();
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
pub(super) fn create_qp(pd: &Pd, mut attr: Given<'_, ibv_qp_init_attr>) -> Result<Box<Qp>, Refusal> {
    let parents = Parents {
        pd,
        send_cq: attr.send_cq(),
        recv_cq: attr.recv_cq(),
        srq: attr.srq(),
    };
    Qp::make(&parents, &mut attr)
}

/// `ibv_modify_qp(3)`.
pub(super) fn modify_qp(qp: &Qp, attr: &ibv_qp_attr, mask: c_int) -> Result<(), Refusal> {
    qp.modify(attr, mask)
}

/// `ibv_query_qp(3)`: writes all attributes.
pub(super) fn query_qp(
    qp: &Qp,
    mut attr: Out<'_, ibv_qp_attr>,
    mut init_attr: Out<'_, ibv_qp_init_attr>,
) -> Result<(), Errno> {
    let caps = qp.caps();
    attr.set(ibv_attr(&qp.device.query()?, caps));
    let public = qp.public();
    // SAFETY: these fields of the live queue pair are set before the program gets it.
    let init = unsafe {
        ibv_qp_init_attr {
            qp_context: (*public).qp_context,
            send_cq: (*public).send_cq,
            recv_cq: (*public).recv_cq,
            srq: (*public).srq,
            cap: ibv_caps(caps),
            qp_type: (*public).qp_type,
            sq_sig_all: qp.signal_all.into(),
        }
    };
    init_attr.set(init);
    Ok(())
}

/// `ibv_destroy_qp(3)`.
pub(super) fn destroy_qp(qp: ToFree<Qp>) -> Result<(), Refusal> {
    qp.destroy()?;
    qp.free();
    Ok(())
}

/// `ibv_attach_mcast(3)`: EINVAL for a queue pair of another kind than UD.
pub(super) fn attach_mcast(qp: &Qp, gid: Option<Copied<ibv_gid>>) -> Result<(), Refusal> {
    qp.device
        .attach_multicast(&gid.ok_or(Reason::Null("gid").invalid())?.0.raw)
}

/// `ibv_detach_mcast(3)`: EINVAL for a group that is not attached.
pub(super) fn detach_mcast(qp: &Qp, gid: Option<Copied<ibv_gid>>) -> Result<(), Refusal> {
    qp.device
        .detach_multicast(&gid.ok_or(Reason::Null("gid").invalid())?.0.raw)
}

/// The capacities of a queue pair. A queue pair with a shared receive queue has no receive
/// capacities of its own (`ibv_create_qp(3)`).
fn own_caps(caps: QpCaps, shares: bool) -> QpCaps {
    if shares {
        QpCaps {
            max_recv_wr: 0,
            max_recv_sge: 0,
            ..caps
        }
    } else {
        caps
    }
}

fn caps(cap: &ibv_qp_cap) -> QpCaps {
    QpCaps {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline: cap.max_inline_data,
    }
}

fn ibv_caps(caps: QpCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: caps.max_send_wr,
        max_recv_wr: caps.max_recv_wr,
        max_send_sge: caps.max_send_sge,
        max_recv_sge: caps.max_recv_sge,
        max_inline_data: caps.max_inline,
    }
}

fn device_attr(attr: &ibv_qp_attr) -> QpAttr {
    let ah = &attr.ah_attr;
    QpAttr {
        state: attr.qp_state,
        cur_state: attr.cur_qp_state,
        path_mtu: attr.path_mtu,
        // Fields of 24 bits.
        rq_psn: attr.rq_psn & 0xff_ffff,
        sq_psn: attr.sq_psn & 0xff_ffff,
        dest_qpn: attr.dest_qp_num & 0xff_ffff,
        qkey: attr.qkey,
        access: attr.qp_access_flags,
        pkey_index: attr.pkey_index,
        port: attr.port_num,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        max_rd_atomic: attr.max_rd_atomic,
        // A field of 5 bits: adapters take no more of a larger value, and DLSlime sets 32.
        min_rnr_timer: attr.min_rnr_timer & 0x1f,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        av: address_vector(ah),
    }
}

fn ibv_attr(attr: &QpAttr, caps: QpCaps) -> ibv_qp_attr {
    let av = &attr.av;
    ibv_qp_attr {
        qp_state: attr.state,
        cur_qp_state: attr.cur_state,
        path_mtu: attr.path_mtu,
        path_mig_state: IBV_MIG_MIGRATED,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qpn,
        qkey: attr.qkey,
        qp_access_flags: attr.access,
        cap: ibv_caps(caps),
        ah_attr: ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: av.dgid },
                flow_label: av.flow_label,
                sgid_index: av.sgid_index,
                hop_limit: av.hop_limit,
                traffic_class: av.traffic_class,
            },
            dlid: av.dlid,
            sl: av.sl,
            src_path_bits: av.src_path_bits,
            static_rate: av.static_rate,
            is_global: av.is_global.into(),
            port_num: av.port,
        },
        pkey_index: attr.pkey_index,
        sq_draining: (attr.state == QpState::Sqd as u32).into(),
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        ..ibv_qp_attr::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rnr_timer_has_five_bits() {
        for (set, taken) in [(0x1f, 0x1f), (0x20, 0), (0x2c, 12)] {
            let attr = device_attr(&ibv_qp_attr {
                min_rnr_timer: set,
                ..ibv_qp_attr::default()
            });
            assert_eq!(attr.min_rnr_timer, taken, "{set}");
        }
    }

    #[test]
    fn attributes_come_back_from_a_query_as_they_were_set() {
        let mut set = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            cur_qp_state: IBV_QPS_RTS,
            path_mtu: IBV_MTU_2048,
            path_mig_state: IBV_MIG_MIGRATED,
            rq_psn: 1,
            sq_psn: 2,
            dest_qp_num: 3,
            qp_access_flags: IBV_ACCESS_REMOTE_READ,
            cap: ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 5,
                max_send_sge: 6,
                max_recv_sge: 7,
                max_inline_data: 8,
            },
            max_rd_atomic: 9,
            max_dest_rd_atomic: 10,
            min_rnr_timer: 11,
            port_num: 1,
            timeout: 12,
            retry_cnt: 13,
            rnr_retry: 14,
            ..ibv_qp_attr::default()
        };
        set.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: [7; 16] },
                flow_label: 1,
                sgid_index: 2,
                hop_limit: 3,
                traffic_class: 4,
            },
            dlid: 5,
            sl: 6,
            src_path_bits: 7,
            static_rate: 8,
            is_global: 1,
            port_num: 1,
        };
        assert_eq!(ibv_attr(&device_attr(&set), caps(&set.cap)), set);
    }
}
