//! Queue pairs: their rings, the calls for posting, and their changes of state.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use urnic_device::command::{CreateQp, Handle, ModifyQp, Opcode, QpStatus, QueueHandle, create_qp, modify};
use urnic_device::doorbell::Kind;
use urnic_device::record::QueueRecord;
use urnic_device::vocabulary::{Access, QpKind, QpState};
use urnic_device::wqe::{self, BLOCK_LEN, DatagramAddress, MAX_INLINE, MAX_SGE, RecvHeader, Sge};

use super::{Cq, DoorbellWrite, Driver, Qp, Srq};
use crate::command::ack_timeout_ms;
use crate::dma::{DmaMemory, RingPlacement};
use crate::gate::{Gate, Poster};
use crate::objects::{Context, Pd};
use crate::refusal::{MAX_INLINE as INLINE_LIMIT, Reason, Refusal, at_most};
use crate::transition::{self, Rules};
use urnic_cm::native::Peer;
use urnic_cm::qp_attr::{MANAGER_QPN, QpAttr, QpCaps, QpMask};
use urnic_cm::timeouts::{RETRIES, retry_time};
use urnic_process::activity::Activity;
use urnic_process::usage::{self, Step};

/// The processor time within which a thread that changes a queue pair to RTR changes it to RTS, if
/// that is its next step.
const MOVES_ON: Duration = Duration::from_millis(1);

/// The parameters of a new queue pair.
#[derive(Clone, Copy)]
pub struct QpInit<'a> {
    /// The service of the queue pair.
    pub kind: QpKind,
    /// The context of the queue pair.
    pub context: &'a Context,
    /// The protection domain of the queue pair.
    pub pd: &'a Pd,
    /// The completion queue of the sends.
    pub send_cq: &'a Cq,
    /// The completion queue of the receives.
    pub recv_cq: &'a Cq,
    /// The shared receive queue; `None` gives the queue pair a receive queue of its own.
    pub srq: Option<&'a Srq>,
    /// The minimum capacities.
    pub caps: QpCaps,
    /// The cookie that asynchronous events of the queue pair carry.
    pub cookie: u64,
    /// The placement of the rings.
    pub rings: &'a dyn RingPlacement,
    /// The largest path MTU of the port, in bytes: the longest payload of a packet.
    pub max_datagram: u32,
    /// A queue pair of kind UD does not receive what it sent to a group itself.
    pub blocks_own_multicast: bool,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qp(qpn {:#08x}, qid {})", self.qpn, self.qid)
    }
}

/// Sizes of a queue pair's rings.
struct RingSizes {
    caps: QpCaps,
    sq_log_size: u32,
    rq_log_size: u32,
    rq_log_stride: u32,
}

impl RingSizes {
    fn of(caps: QpCaps, kind: QpKind, driver: &Driver) -> Result<RingSizes, Refusal> {
        let limits = driver.attributes();
        // Operands in front of the list: the address of a datagram.
        let prefix = match kind {
            QpKind::UnreliableDatagram => size_of::<DatagramAddress>(),
            _ => 0,
        };
        let max_sge = limits.max_sge.min(MAX_SGE as u32);
        let max_inline = limits.max_inline.min((MAX_INLINE - prefix) as u32);
        for (argument, given, most) in [
            ("max_send_wr", caps.max_send_wr, limits.max_qp_wr),
            ("max_recv_wr", caps.max_recv_wr, limits.max_qp_wr),
            ("max_send_sge", caps.max_send_sge, max_sge),
            ("max_recv_sge", caps.max_recv_sge, max_sge),
            (INLINE_LIMIT, caps.max_inline, max_inline),
        ] {
            at_most(argument, given.into(), most.into())?;
        }
        let sges = |n: u32| n.max(1) as usize * size_of::<Sge>();
        let blocks = wqe::blocks(prefix + sges(caps.max_send_sge).max(caps.max_inline as usize));
        let sq_blocks = (caps.max_send_wr.max(1) as usize * blocks).next_power_of_two();
        let rq_entries = caps.max_recv_wr.max(1).next_power_of_two();
        let rq_stride = (size_of::<RecvHeader>() + sges(caps.max_recv_sge)).next_power_of_two();
        let operands = blocks * BLOCK_LEN - wqe::OPERANDS - prefix;
        let fit = |granted: usize, limit: u32| u32::try_from(granted).unwrap_or(u32::MAX).min(limit);
        let caps = QpCaps {
            max_send_wr: fit(sq_blocks / blocks, limits.max_qp_wr),
            max_recv_wr: rq_entries.min(limits.max_qp_wr),
            max_send_sge: fit(operands / size_of::<Sge>(), max_sge),
            max_recv_sge: fit((rq_stride - size_of::<RecvHeader>()) / size_of::<Sge>(), max_sge),
            max_inline: fit(operands, max_inline),
        };
        Ok(RingSizes {
            caps,
            sq_log_size: sq_blocks.ilog2(),
            rq_log_size: rq_entries.ilog2(),
            rq_log_stride: rq_stride.ilog2(),
        })
    }
}

impl Driver {
    /// Creates a queue pair in the Reset state, its gate closed.
    ///
    /// # Errors
    /// `EINVAL` beyond the device's limits; `ENOMEM` if no memory is left; the errors of listening,
    /// for the first queue pair and every 257th; `EIO` in a forked child.
    pub fn create_qp(self: &Arc<Self>, init: &QpInit<'_>) -> Result<Arc<Qp>, Refusal> {
        self.check_usable()?;
        let sizes = RingSizes::of(init.caps, init.kind, self)?;
        let target = self.objects.contexts.target(init.context, init.cookie)?;
        let sq = self.pool().ring(BLOCK_LEN << sizes.sq_log_size, init.rings)?;
        let rq_len = 1 << (sizes.rq_log_size + sizes.rq_log_stride);
        let rq = self.pool().ring(rq_len, init.rings)?;
        let record = self.pool().allocate(size_of::<QueueRecord>())?;
        let number = self.number_for(init.kind)?;
        let arguments = CreateQp {
            sq_ring: sq.iova().into(),
            rq_ring: rq.iova().into(),
            record: record.iova().into(),
            pd: init.pd.id.into(),
            send_cq: init.send_cq.id.into(),
            recv_cq: init.recv_cq.id.into(),
            srq: init.srq.map_or(0, |srq| srq.id).into(),
            uar: init.context.uar().into(),
            label: number.qpn.into(),
            sq_log_size: sizes.sq_log_size.into(),
            rq_log_size: sizes.rq_log_size.into(),
            rq_log_stride: sizes.rq_log_stride.into(),
            kind: (init.kind as u32).into(),
            datagrams: number.port.into(),
            rules: self.rules(init).into(),
            max_datagram: init.max_datagram.into(),
            member: 0.into(),
        };
        let handle: QueueHandle = self
            .commands
            .call(Opcode::CreateQp, &arguments)
            .inspect_err(|_| self.give_number_back(&number))
            .map_err(Refusal::of_roce_port)?;
        let qp = Arc::new(Qp {
            driver: self.clone(),
            qid: handle.id.get(),
            qpn: number.qpn,
            kind: init.kind,
            has_path: AtomicBool::new(false),
            number_is_port: number.port != 0,
            max_mtu: init.max_datagram,
            pd: init.pd.id,
            uar: init.context.uar(),
            doorbell: handle.doorbell.get(),
            cqs: (init.send_cq.id, init.recv_cq.id),
            caps: sizes.caps,
            sq,
            rq,
            record,
            sq_blocks: 1 << sizes.sq_log_size,
            rq_entries: 1 << sizes.rq_log_size,
            rq_log_stride: sizes.rq_log_stride,
            srq: init.srq.map(|srq| srq.id),
            gate: Gate::default(),
            managed: AtomicBool::new(false),
            ack_timeout: AtomicU8::new(0),
            awaits_stream: AtomicBool::new(false),
            at_rtr: Mutex::default(),
            last_state: AtomicU8::new(QpState::Reset as u8),
            attr: Mutex::default(),
        });
        self.insert_qp(&qp, target);
        if init.kind == QpKind::UnreliableDatagram {
            // Datagrams need no connection.
            qp.gate.open();
        }
        tracing::debug!("{qp:?}: created, {:?}", qp.caps);
        Ok(qp)
    }

    /// The rules of a new queue pair ([`create_qp`]): on a RoCE NIC, those of the InfiniBand
    /// Architecture Specification.
    fn rules(&self, init: &QpInit<'_>) -> u32 {
        let is_roce_port = init.kind == QpKind::UnreliableDatagram && self.has_roce_datagrams();
        let rules = [
            (self.identity().is_roce(), create_qp::INFINIBAND),
            (init.blocks_own_multicast, create_qp::BLOCK_OWN_MULTICAST),
            (is_roce_port, create_qp::ROCE),
        ];
        let given = rules.into_iter().filter(|(given, _)| *given);
        given.fold(0, |rules, (_, rule)| rules | rule)
    }
}

impl Qp {
    /// The capacities, which may exceed the requested ones.
    pub fn caps(&self) -> QpCaps {
        self.caps
    }

    /// The send queue's memory.
    #[inline]
    pub fn sq(&self) -> &DmaMemory {
        &self.sq
    }

    /// Blocks of 64 bytes in the send queue: a power of two.
    #[inline]
    pub fn sq_blocks(&self) -> u32 {
        self.sq_blocks
    }

    /// The receive queue's memory.
    #[inline]
    pub fn rq(&self) -> &DmaMemory {
        &self.rq
    }

    /// Entries in the receive queue: a power of two.
    #[inline]
    pub fn rq_entries(&self) -> u32 {
        self.rq_entries
    }

    /// log2 of the bytes of a receive queue entry.
    #[inline]
    pub fn rq_log_stride(&self) -> u32 {
        self.rq_log_stride
    }

    /// Whether the receives come from a shared receive queue.
    pub fn shares_receives(&self) -> bool {
        self.srq.is_some()
    }

    /// The queue pair's indices. They are not reset in the Reset state, in which the device
    /// consumes posted requests without completions.
    #[inline]
    pub fn record(&self) -> &QueueRecord {
        self.record.record()
    }

    /// Whether posted sends may be published.
    #[inline]
    pub fn gate_is_open(&self) -> bool {
        self.gate.is_open()
    }

    /// The state that was last requested and reached. A later failure of the queue pair is not
    /// considered. For the checks of posting.
    #[inline]
    pub fn last_state(&self) -> QpState {
        QpState::from_raw(self.last_state.load(Ordering::Relaxed).into()).unwrap_or(QpState::Reset)
    }

    /// Whether receives may be posted: on a RoCE NIC not in RESET.
    #[inline]
    pub fn takes_receives(&self) -> bool {
        self.last_state() != QpState::Reset || !self.driver.identity().is_roce()
    }

    /// The doorbell for sends whose index was published.
    #[inline]
    pub fn send_doorbell(&self, producer: u32) -> DoorbellWrite {
        DoorbellWrite::new((self.uar, self.doorbell), Kind::Send, self.qid, producer)
    }

    /// The doorbell for receives whose index was published.
    #[inline]
    pub fn receive_doorbell(&self, producer: u32) -> DoorbellWrite {
        DoorbellWrite::new((self.uar, self.doorbell), Kind::Receive, self.qid, producer)
    }

    /// Number of the protection domain.
    pub(crate) fn pd(&self) -> u32 {
        self.pd
    }

    /// Device numbers of the completion queues of sends and receives.
    pub(crate) fn cqs(&self) -> (u32, u32) {
        self.cqs
    }

    /// Device number of the shared receive queue, if the queue pair uses one.
    pub(crate) fn srq(&self) -> Option<u32> {
        self.srq
    }

    /// Sets the poster. To be called before the first [`Qp::modify`].
    pub fn set_poster(&self, poster: Arc<dyn Poster>) {
        self.gate.set_poster(poster);
    }

    /// The gate in front of the send queue.
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Locks the attributes: the state does not change while they are locked.
    pub(crate) fn lock_attributes(&self) -> MutexGuard<'_, QpAttr> {
        self.attr.lock()
    }

    /// Records that this thread brought the queue pair to RTR.
    pub(crate) fn note_rtr(&self) {
        *self.at_rtr.lock() = Some(Activity::here());
    }

    /// Whether the thread that brought the queue pair to RTR seems to be doing something else.
    pub(crate) fn has_moved_on(&self) -> bool {
        // The lock is held during a change.
        self.attr.try_lock().is_some()
            && self
                .at_rtr
                .lock()
                .is_some_and(|activity| activity.has_moved_on(MOVES_ON))
    }

    pub(crate) fn set_last_state(&self, state: QpState) {
        self.last_state.store(state as u8, Ordering::Relaxed);
        if state == QpState::Rts {
            usage::reached(Step::ReadyToSend);
        }
    }

    /// Records that the connection manager attached the queue pair to a stream.
    pub(crate) fn set_managed(&self, ack_timeout: u8) {
        self.ack_timeout.store(ack_timeout, Ordering::Relaxed);
        self.managed.store(true, Ordering::Release);
        self.set_last_state(QpState::Rts);
    }

    pub(crate) fn clear_managed(&self) {
        self.managed.store(false, Ordering::Release);
    }

    pub(crate) fn is_managed(&self) -> bool {
        self.managed.load(Ordering::Acquire)
    }

    /// Whether the queue pair has a path of RoCE v2, and no stream.
    fn has_path(&self) -> bool {
        self.has_path.load(Ordering::Acquire)
    }

    /// Whether the queue pair waits for a stream of the connection manager.
    pub(crate) fn awaits_stream(&self) -> bool {
        self.awaits_stream.load(Ordering::Acquire)
    }

    pub(crate) fn set_awaits_stream(&self, awaits: bool) {
        self.awaits_stream.store(awaits, Ordering::Release);
    }

    /// The Local ACK Timeout that the connection manager of an RNIC gave the queue pair.
    pub(crate) fn ack_timeout(&self) -> u8 {
        self.ack_timeout.load(Ordering::Relaxed)
    }

    /// The driver of the device.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }
}

impl Qp {
    /// Changes state or attributes, as `ibv_modify_qp(3)` does. The change to RTR names the peer
    /// and does not wait for it: the connection is made in the background.
    ///
    /// # Errors
    /// `EINVAL` for a transition that does not exist, attributes missing, superfluous or out of
    /// range, or an address that names no peer; of a RoCE NIC, the errors of
    /// [`reachability::check`](urnic_process::reachability::check); `EIO` in a forked child; the
    /// errors of the device.
    pub fn modify(&self, attr: &QpAttr, mask: QpMask) -> Result<(), Refusal> {
        self.driver.check_usable()?;
        let roce = self.driver.identity().is_roce();
        // As drivers of RNICs do; the others check that the state has a transition to itself.
        if mask.is_empty() && !roce {
            return Ok(());
        }
        if mask.contains(QpMask::AV) && attr.dest_qpn != MANAGER_QPN {
            self.driver.check_reachable(&attr.av)?;
        }
        let mut set = self.attr.lock();
        let from = match self.device_state()? {
            QpState::Rts if self.gate.is_draining() => QpState::Sqd,
            state => state,
        };
        // rdma_disconnect(3) of an RNIC makes this change first, also if the peer disconnected
        // earlier.
        let disconnects = !roce && mask == QpMask::STATE && attr.state == QpState::Sqd as u32;
        if disconnects && from != QpState::Rts && self.is_managed() {
            return Ok(());
        }
        let limits = self.driver.attributes();
        let rules = Rules {
            identity: self.driver.identity(),
            kind: self.kind,
            ord: limits.max_ord,
        };
        let mask = self.own_attributes(from, attr, mask);
        let to = transition::check(&rules, from, attr, mask)?;
        let mut new = *set;
        new.take(attr, mask);
        let most = u8::try_from(limits.max_ird).unwrap_or(u8::MAX);
        new.max_dest_rd_atomic = new.max_dest_rd_atomic.min(most);
        let peer = self.name_peer((from, to), &new, mask)?;
        if roce && (from, to) == (QpState::Rts, QpState::Sqd) {
            // Requests that are published are sent; later ones wait for the gate.
            self.gate.drain();
            *set = new;
            return Ok(());
        }
        if matches!(to, QpState::Reset | QpState::Err) || (to == QpState::Sqd && !roce) {
            self.driver.native_retire(self.qpn, to == QpState::Reset);
        }
        // This call precedes the change in the device. A connection that is attached at the same
        // time, before or after this call, gets this number of Reads. If the call followed the
        // change, a connection attached without Reads would reset the number to zero.
        if (from, to) == (QpState::Rtr, QpState::Rts) && self.connects_natively() {
            self.driver.native_reached_rts(self, &new);
        }
        match self.change(to, &new, mask) {
            // The peer disconnected in between.
            Err(_) if disconnects && self.is_managed() => return Ok(()),
            changed => changed?,
        }
        *set = if to == QpState::Reset {
            QpAttr::default()
        } else {
            new
        };
        tracing::debug!("{self:?}: {from:?} to {to:?}");
        if to == QpState::Sqd && roce {
            return Ok(());
        }
        self.set_last_state(to);
        self.gate.end_draining();
        self.reached(from, to, peer, &new, mask);
        Ok(())
    }

    /// Does what a change of state needs before it: names the peer to the device, or returns the
    /// one to connect to.
    fn name_peer(
        &self,
        (from, to): (QpState, QpState),
        new: &QpAttr,
        mask: QpMask,
    ) -> Result<Option<Peer>, Refusal> {
        let roce = self.driver.identity().is_roce();
        Ok(match (from, to) {
            _ if self.kind == QpKind::UnreliableDatagram => None,
            (QpState::Init, QpState::Rtr) if mask.contains(QpMask::AV) && self.is_for_roce(new) => {
                self.connect_path(new)?;
                self.has_path.store(true, Ordering::Release);
                None
            }
            (QpState::Init, QpState::Rtr) if self.has_path() => {
                let rule =
                    "an attempt has given the queue pair the wire of RoCE v2, which it has until it is reset";
                return Err(Reason::Rule(rule).invalid());
            }
            (QpState::Rtr, QpState::Rts) if self.has_path() => {
                self.start_path(new)?;
                None
            }
            (QpState::Init, QpState::Rtr) if roce && new.dest_qpn == MANAGER_QPN => {
                self.set_awaits_stream(true);
                None
            }
            (QpState::Init, QpState::Rtr) if mask.contains(QpMask::AV) => {
                let peer = self.driver.local_host.peer(&new.av, new.dest_qpn, self.qpn);
                Some(peer.map_err(unreachable)?)
            }
            _ => None,
        })
    }

    /// The attributes to use of those that the program names: if it has them from the connection
    /// manager of a RoCE NIC, those of the queue pair's kind.
    fn own_attributes(&self, from: QpState, attr: &QpAttr, mask: QpMask) -> QpMask {
        let by_manager = match from {
            QpState::Init => mask.contains(QpMask::DEST_QPN) && attr.dest_qpn == MANAGER_QPN,
            _ => self.awaits_stream(),
        };
        match by_manager && self.driver.identity().is_roce() {
            true => transition::of_manager(self.kind, mask),
            false => mask,
        }
    }

    /// Applies a change of state that the device made to the connection and to the gate.
    fn reached(&self, from: QpState, to: QpState, peer: Option<Peer>, new: &QpAttr, mask: QpMask) {
        match to {
            QpState::Reset => {
                self.set_awaits_stream(false);
                self.has_path.store(false, Ordering::Release);
                self.driver.cm_lost(self.qid, Errno::CONNRESET);
                self.clear_managed();
                self.gate.close();
                if self.kind == QpKind::UnreliableDatagram {
                    self.gate.open();
                }
            }
            // When the gate opens, the device flushes the requests that were posted after it.
            QpState::Err | QpState::Sqd => self.gate.open(),
            QpState::Rtr => self.driver.native_reached_rtr(self, peer, new),
            // There is no connection to wait for.
            QpState::Rts if self.has_path() => self.gate.open(),
            QpState::Rts if from == QpState::Rts => self.driver.native_rnr(self, new, mask),
            QpState::Init | QpState::Rts | QpState::Sqe => {}
        }
    }

    /// The queue pair's attributes as they were set, with the state that the device reports.
    ///
    /// # Errors
    /// `EIO` in a forked child or on a lost device.
    pub fn query(&self) -> Result<QpAttr, Errno> {
        self.driver.check_usable()?;
        let set = self.attr.lock();
        let status = self.status()?;
        let state = match QpState::from_raw(status.state.get()).ok_or(Errno::IO)? {
            // An RNIC's idle state covers both: receives may be posted right after creation
            // (conformance §8, table of states).
            QpState::Reset if !self.driver.identity().is_roce() => QpState::Init,
            QpState::Rts if self.gate.is_draining() => QpState::Sqd,
            state => state,
        } as u32;
        let mut attr = QpAttr {
            state,
            cur_state: state,
            ..*set
        };
        if self.is_managed() {
            // Only the connection manager sets these.
            let depth = |n: u32| u8::try_from(n).unwrap_or(u8::MAX);
            attr.max_rd_atomic = depth(status.ord.get());
            attr.max_dest_rd_atomic = depth(status.ird.get());
            if !self.driver.identity().is_roce() {
                (attr.timeout, attr.retry_cnt) = (self.ack_timeout(), RETRIES);
            }
        }
        Ok(attr)
    }

    /// Destroys the queue pair: the connection, then the device's object. Data that its completed
    /// sends put on the stream still arrives. Afterwards no thread calls the queue pair's
    /// [`Poster`] or reports its events.
    ///
    /// # Errors
    /// `EIO` in a forked child; the errors of the device.
    pub fn destroy(&self) -> Result<(), Errno> {
        self.driver.check_process()?;
        let _changes = self.attr.lock();
        self.driver.native_retire(self.qpn, false);
        self.driver.commands.destroy(Opcode::DestroyQp, self.qid)?;
        // The device has closed the port of any other.
        if !self.number_is_port {
            self.driver.native_remove(self.qpn);
        }
        self.driver.remove_qp(self);
        self.driver.cm_lost(self.qid, Errno::CONNRESET);
        self.gate.remove_poster();
        tracing::debug!("{self:?}: destroyed");
        Ok(())
    }

    /// The queue pair's state in the device.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn status(&self) -> Result<QpStatus, Errno> {
        self.driver
            .commands
            .call(Opcode::QueryQp, &Handle { id: self.qid.into() })
    }

    pub(crate) fn device_state(&self) -> Result<QpState, Errno> {
        QpState::from_raw(self.status()?.state.get()).ok_or(Errno::IO)
    }

    /// Whether the queue pair connects to the peer that its program named.
    fn connects_natively(&self) -> bool {
        self.kind != QpKind::UnreliableDatagram && !self.has_path() && !self.awaits_stream()
    }

    fn change(&self, to: QpState, new: &QpAttr, mask: QpMask) -> Result<(), Errno> {
        // The device closes a stream in SQD.
        let mask = match to {
            QpState::Sqd if self.driver.identity().is_roce() => mask - QpMask::STATE,
            _ => mask,
        };
        let flags = [
            (QpMask::STATE, modify::STATE),
            (QpMask::ACCESS_FLAGS, modify::ACCESS),
            (QpMask::MAX_DEST_RD_ATOMIC, modify::IRD),
            (QpMask::MAX_QP_RD_ATOMIC, modify::ORD),
            (QpMask::QKEY, modify::QKEY),
            (QpMask::TIMEOUT, modify::ACK_TIMEOUT),
            (QpMask::RETRY_CNT, modify::ACK_TIMEOUT),
        ];
        let bits = flags
            .iter()
            .filter(|(bit, _)| mask.contains(*bit))
            .fold(0, |bits, (_, flag)| bits | flag);
        if bits == 0 {
            return Ok(());
        }
        let arguments = ModifyQp {
            qp: self.qid.into(),
            mask: bits.into(),
            state: (to as u32).into(),
            access: (new.access & Access::all().bits()).into(),
            ird: u32::from(new.max_dest_rd_atomic).into(),
            ord: u32::from(new.max_rd_atomic).into(),
            rnr_timeout_ms: 0.into(),
            qkey: new.qkey.into(),
            ack_timeout_ms: ack_timeout_ms(retry_time(new.timeout, new.retry_cnt)).into(),
            reserved: 0.into(),
        };
        self.driver.commands.run(Opcode::ModifyQp, &arguments)
    }
}

/// The refusal of a peer's address; or another error.
fn unreachable(errno: Errno) -> Refusal {
    match errno {
        Errno::INVAL => Reason::Rule(
            "no peer is at ah_attr and dest_qp_num: see is_global, grh.sgid_index, grh.dgid, dlid",
        )
        .with(errno),
        Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::TIMEDOUT => {
            Reason::Rule("no route leads to ah_attr.grh.dgid").with(errno)
        }
        errno => errno.into(),
    }
}
