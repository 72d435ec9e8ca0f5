//! Queue pairs: making, changing, asking, destroying. Posting is in [`post`](super::post).

use std::ffi::c_int;
use std::mem;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use urnic_device::command::features;
use urnic_device::vocabulary::QpState;
use urnic_driver::{AddressVector, Completed, Poster, QpAttr, QpCaps, QpInit, QpMask};
use urnic_presence::ChannelSender;
use urnic_presence::fork::Birthplace;
use urnic_rdma_core::*;

use super::building::Building;
use super::cq::Cq;
use super::foreign::Foreign;
use super::ledger::Ledger;
use super::lock::{Held, Lock};
use super::parent_domain::{Resource, Rings};
use super::pd::{Pd, Tenancy};
use super::receive_queue::{ReceiveQueue, ReceiveShape};
use super::reported::{Acknowledgements, Reported};
use super::send_queue::{SendQueue, SendRules, SendShape};
use super::srq::Srq;
use crate::guard::{pointer, status};

/// A queue pair as libibverbs knows it, and what is ours behind it.
#[repr(C)]
pub(crate) struct Qp {
    /// Must be first: libibverbs' pointer is ours.
    abi: Foreign<verbs_qp>,
    /// Looked at before any lock.
    pub(super) birthplace: Birthplace,
    pub(super) device: Arc<urnic_driver::Qp>,
    pub(super) sends: Arc<Sends>,
    pub(super) receives: Lock<ReceiveQueue>,
    ledger: Arc<Ledger>,
    async_channel: Arc<ChannelSender>,
    pub(super) asynchronous: Reported,
    signal_all: bool,
    _rings: Rings,
    _tenancy: Tenancy,
}

/// The send queue: shared with the driver, which lets out what waits at the gate. The driver never waits for its lock: a program
/// may keep that as long as it likes, between `ibv_wr_start` and `ibv_wr_complete`.
pub(super) struct Sends {
    pub(super) side: Lock<SendSide>,
    /// Whether something was left behind the closed gate. Of no meaning once that is open.
    waiting: AtomicBool,
    device: Weak<urnic_driver::Qp>,
    ledger: Arc<Ledger>,
    cqs: Destinations,
}

/// The completion queues of a queue pair.
struct Destinations([NonNull<Cq>; 2]);

// SAFETY: shared references to `Cq` may be used on any thread.
unsafe impl Send for Destinations {}
// SAFETY: as above.
unsafe impl Sync for Destinations {}

/// What the send queue's lock is for.
pub(super) struct SendSide {
    pub(super) queue: SendQueue,
    pub(super) building: Building,
}

impl Poster for Sends {
    fn gate_opened(&self) {
        if let Some(device) = self.device.upgrade()
            && let Some(index) = self.publish_unless_held()
        {
            device.ring_sends(index);
        }
    }

    fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    fn completed(&self) -> Option<Completed> {
        let qid = self.device.upgrade()?.qid;
        // SAFETY: a completion queue outlives its queue pairs (EBUSY), and the driver forgets us, and waits for a call that is under way,
        // before a queue pair is gone.
        let [sends, receives] = self.cqs.0.map(|cq| unsafe { cq.as_ref() });
        Some(Completed {
            sends: sends.sends_completed(qid, &self.ledger)?,
            receives: receives.receives_completed(qid, &self.ledger)?,
        })
    }
}

impl Sends {
    /// Lets go of the send queue, and lets the device see what was written if the gate is open. Returns the index to ring with.
    #[inline]
    pub(super) fn let_go(&self, device: &urnic_driver::Qp, mut side: Held<'_, SendSide>) -> Option<u32> {
        if device.gate_is_open() {
            return side.queue.publish();
        }
        self.leave_behind(device, side)
    }

    #[cold]
    fn leave_behind(&self, device: &urnic_driver::Qp, side: Held<'_, SendSide>) -> Option<u32> {
        self.waiting.store(side.queue.is_waiting(), Ordering::Relaxed);
        drop(side);
        // Who opened the gate since we looked may have found the queue held.
        fence(Ordering::SeqCst);
        if device.gate_is_open() {
            self.publish_unless_held()
        } else {
            None
        }
    }

    /// Behind an open gate. Who holds the queue looks at the gate when letting go of it ([`let_go`](Self::let_go)): of the two,
    /// separated by fences, one sees what the other did.
    fn publish_unless_held(&self) -> Option<u32> {
        fence(Ordering::SeqCst);
        self.side.try_hold()?.queue.publish()
    }
}

impl Qp {
    /// The queue pair behind libibverbs' pointer.
    ///
    /// # Safety
    /// `qp` came from [`create_qp`] or [`create_qp_ex`](super::qp_ex::create_qp_ex) and was not destroyed.
    #[inline]
    pub(super) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: as promised; `abi` is the first field.
        unsafe { &*qp.cast::<Qp>() }
    }

    /// Makes one, and says in `attr.cap` what it really holds.
    ///
    /// # Safety
    /// `pd` is a live domain, and the queues in `attr` are null or live ones.
    pub(super) unsafe fn make(pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> Result<Box<Qp>, Errno> {
        match attr.qp_type {
            IBV_QPT_RC => {}
            IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV
            | IBV_QPT_DRIVER => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::INVAL),
        }
        if attr.send_cq.is_null() || attr.recv_cq.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: as promised.
        let (pd_, send_cq, recv_cq) = unsafe { (Pd::of(pd), Cq::of(attr.send_cq), Cq::of(attr.recv_cq)) };
        // SAFETY: as promised.
        let srq = (!attr.srq.is_null()).then(|| unsafe { Srq::of(attr.srq) });
        let context = pd_.context();
        let limits = context.driver.attributes();
        let place = Box::<Qp>::new_uninit();
        let tenancy = pd_.admit()?;
        let rings = pd_.rings(Resource::QueuePair);
        let device = context.driver.create_qp(&QpInit {
            context: &context.device,
            pd: &tenancy.domain().device,
            send_cq: &send_cq.device,
            recv_cq: &recv_cq.device,
            srq: srq.map(|srq| &*srq.device),
            caps: own_caps(caps(&attr.cap), srq.is_some()),
            cookie: place.as_ptr().addr() as u64,
            rings: &rings,
        })?;
        let granted = own_caps(device.caps(), srq.is_some());
        let ledger = Arc::new(Ledger::new(granted.max_send_wr));
        let signal_all = attr.sq_sig_all != 0;
        let rules = SendRules {
            signal_all,
            max_sge_read: limits.max_sge_rd,
            atomics: limits.features & features::ATOMICS != 0,
            immediate: limits.features & features::IMMEDIATE != 0,
            windows: limits.features & features::WINDOWS != 0,
        };
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
        // SAFETY: rings and record are there for as long as `device`, which lives as long as `Qp`; `Sends`, which may outlive it,
        // touches them only with `device` in hand.
        let sends = unsafe { SendQueue::new(sq, record, shape, rules, ledger.clone()) };
        // SAFETY: as above.
        let receives = unsafe { ReceiveQueue::new(rq, record, receive_shape, Some(ledger.clone())) };
        let sends = Arc::new(Sends {
            side: Lock::new(SendSide {
                queue: sends,
                building: Building::default(),
            }),
            waiting: AtomicBool::new(false),
            device: Arc::downgrade(&device),
            ledger: ledger.clone(),
            cqs: Destinations([NonNull::from(send_cq), NonNull::from(recv_cq)]),
        });
        device.set_poster(sends.clone());
        send_cq.attach(device.qid, &ledger);
        recv_cq.attach(device.qid, &ledger);
        attr.cap = ibv_caps(granted);

        // SAFETY: all zeroes are null pointers, no functions, and an unlocked mutex.
        let mut abi: verbs_qp = unsafe { mem::zeroed() };
        // SAFETY: both variants of the union begin with these fields.
        let public = unsafe { &mut *abi.qp.qp };
        public.context = pd_.ibv_context();
        public.qp_context = attr.qp_context;
        public.pd = pd;
        public.send_cq = attr.send_cq;
        public.recv_cq = attr.recv_cq;
        public.srq = attr.srq;
        public.handle = device.qid;
        public.qp_num = device.qpn;
        public.state = IBV_QPS_RESET;
        public.qp_type = attr.qp_type;
        // No event comes before the queue pair leaves Reset, so nobody looked at the place yet.
        Ok(Box::write(
            place,
            Qp {
                abi: Foreign::new(abi),
                birthplace: Birthplace::here(),
                device,
                sends,
                receives: Lock::new(receives),
                ledger,
                async_channel: context.async_channel.clone(),
                asynchronous: Reported::default(),
                signal_all,
                _rings: rings,
                _tenancy: tenancy,
            },
        ))
    }

    /// What it holds.
    fn caps(&self) -> QpCaps {
        own_caps(self.device.caps(), self.shares_receives())
    }

    /// Whether receives are posted to a shared queue.
    pub(super) fn shares_receives(&self) -> bool {
        self.device.shares_receives()
    }

    /// libibverbs' part of the queue pair.
    pub(super) fn abi(&self) -> *mut verbs_qp {
        self.abi.get()
    }

    fn public(&self) -> *mut ibv_qp {
        self.abi.get().cast()
    }

    /// Where it completes to.
    fn cqs(&self) -> [&Cq; 2] {
        // SAFETY: set when it was made; a completion queue outlives its queue pairs (EBUSY).
        unsafe { [Cq::of((*self.public()).send_cq), Cq::of((*self.public()).recv_cq)] }
    }

    fn modify(&self, attr: &ibv_qp_attr, mask: c_int) -> Result<(), Errno> {
        let mask = QpMask::from_bits(mask as u32).ok_or(Errno::INVAL)?;
        let attr = device_attr(attr);
        self.device.modify(&attr, mask)?;
        if mask.contains(QpMask::STATE) && attr.state == QpState::Reset as u32 {
            // What completed before must not be polled, and settled, after this.
            self.cqs().iter().for_each(|cq| cq.purge(self.device.qid));
            let sends = self.sends.side.hold().queue.discard();
            self.sends.waiting.store(false, Ordering::Relaxed);
            let receives = self.receives.hold().discard();
            self.ledger.settle_all(sends, receives);
        }
        Ok(())
    }

    /// Ends it. Waits until the program acknowledged its events.
    fn destroy(&self) -> Result<(), Errno> {
        self.device.destroy()?;
        self.cqs().iter().for_each(|cq| cq.detach(self.device.qid));
        self.asynchronous
            .purge(&self.async_channel, self.public().addr() as u64);
        // SAFETY: the fields of this very queue pair: zeroes are an initialised mutex and condition variable.
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

/// What counts of the capacities of a queue pair that may share its receive queue: then it has none of its own (`ibv_create_qp(3)`).
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
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qpn: attr.dest_qp_num,
        access: attr.qp_access_flags,
        pkey_index: attr.pkey_index,
        port: attr.port_num,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        max_rd_atomic: attr.max_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        av: AddressVector {
            is_global: ah.is_global != 0,
            dgid: ah.grh.dgid.raw,
            sgid_index: ah.grh.sgid_index,
            flow_label: ah.grh.flow_label,
            hop_limit: ah.grh.hop_limit,
            traffic_class: ah.grh.traffic_class,
            dlid: ah.dlid,
            sl: ah.sl,
            src_path_bits: ah.src_path_bits,
            static_rate: ah.static_rate,
            port: ah.port_num,
        },
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

/// `ibv_create_qp(3)`: EOPNOTSUPP for all but reliable connections, EINVAL beyond the device's limits.
pub(super) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: libibverbs gives a live domain, and the program its attributes.
    pointer(|| unsafe { Qp::make(pd, &mut *attr) }).cast()
}

/// `ibv_modify_qp(3)`.
pub(super) unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: a live queue pair, and the program's attributes.
    status(|| unsafe { Qp::of(qp).modify(&*attr, mask) })
}

/// `ibv_query_qp(3)`: all attributes, whatever the mask says.
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
        // SAFETY: the program's structures, and our own.
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
        // SAFETY: from `Box::into_raw`, and nobody has it any more.
        drop(unsafe { Box::from_raw(qp.cast::<Qp>()) });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
