//! Queue pairs: their rings, the gate in front of the send queue, and the calls for posting.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::command::{CreateQp, Opcode, QueueHandle};
use urnic_device::doorbell::Kind;
use urnic_device::record::{QueueRecord, publish};
use urnic_device::vocabulary::{QpKind, QpState};
use urnic_device::wqe::{self, BLOCK_LEN, DatagramAddress, MAX_INLINE, MAX_SGE, RecvHeader, Sge};

use crate::dma::{DmaMemory, RingPlacement};
use crate::doorbell_write::DoorbellWrite;
use crate::driver::{Cq, Driver, GateState, Qp, Srq};
use crate::objects::{Context, Pd};
use crate::poster::{Completed, Poster};
use urnic_cm::qp_attr::QpCaps;
use urnic_process::lock::lock;

/// The processor time in which a thread that changes a queue pair to RTR would change it to RTS, if
/// that is what it does next.
const GOES_ON: Duration = Duration::from_millis(1);

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
    fn of(caps: QpCaps, kind: QpKind, driver: &Driver) -> Result<RingSizes, Errno> {
        let limits = driver.attributes();
        // Operands in front of the list: the address of a datagram.
        let prefix = match kind {
            QpKind::UnreliableDatagram => size_of::<DatagramAddress>(),
            _ => 0,
        };
        let max_sge = limits.max_sge.min(MAX_SGE as u32);
        let max_inline = limits.max_inline.min((MAX_INLINE - prefix) as u32);
        if caps.max_send_wr > limits.max_qp_wr
            || caps.max_recv_wr > limits.max_qp_wr
            || caps.max_send_sge > max_sge
            || caps.max_recv_sge > max_sge
            || caps.max_inline > max_inline
        {
            return Err(Errno::INVAL);
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
    pub fn create_qp(self: &Arc<Self>, init: &QpInit<'_>) -> Result<Arc<Qp>, Errno> {
        self.check_usable()?;
        let sizes = RingSizes::of(init.caps, init.kind, self)?;
        let target = self.contexts.target(init.context.id, init.cookie)?;
        let sq = self.pool.ring(BLOCK_LEN << sizes.sq_log_size, init.rings)?;
        let rq_len = 1 << (sizes.rq_log_size + sizes.rq_log_stride);
        let rq = self.pool.ring(rq_len, init.rings)?;
        let record = self.pool.allocate(size_of::<QueueRecord>())?;
        let number = self.number_for(init.kind)?;
        let arguments = CreateQp {
            sq_ring: sq.iova().into(),
            rq_ring: rq.iova().into(),
            record: record.iova().into(),
            pd: init.pd.id.into(),
            send_cq: init.send_cq.id.into(),
            recv_cq: init.recv_cq.id.into(),
            srq: init.srq.map_or(0, |srq| srq.id).into(),
            uar: init.context.pages.own().into(),
            label: number.qpn.into(),
            sq_log_size: sizes.sq_log_size.into(),
            rq_log_size: sizes.rq_log_size.into(),
            rq_log_stride: sizes.rq_log_stride.into(),
            kind: (init.kind as u32).into(),
            datagrams: number.port.into(),
            reserved: 0.into(),
        };
        let handle: QueueHandle = self
            .commands
            .call(Opcode::CreateQp, &arguments)
            .inspect_err(|_| self.give_number_back(&number))?;
        let qp = Arc::new(Qp {
            driver: self.clone(),
            qid: handle.id.get(),
            qpn: number.qpn,
            kind: init.kind,
            uar: init.context.pages.own(),
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
            gate: AtomicBool::new(false),
            gate_state: Mutex::default(),
            managed: AtomicBool::new(false),
            ack_timeout: AtomicU8::new(0),
            awaits_stream: AtomicBool::new(false),
            at_rtr: Mutex::default(),
            last_state: AtomicU8::new(QpState::Reset as u8),
            attr: Mutex::default(),
            poster: Mutex::default(),
        });
        self.insert_qp(&qp, target);
        if init.kind == QpKind::UnreliableDatagram {
            // Datagrams need no connection.
            qp.open_gate();
        }
        tracing::debug!("{qp:?}: created, {:?}", qp.caps);
        Ok(qp)
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
        self.gate.load(Ordering::Acquire)
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

    /// Publishes the send queue's producer index, in blocks, and rings if the device requests it.
    /// The gate must be open.
    #[inline]
    pub fn publish_sends(&self, old: u32, new: u32) {
        let record = self.record();
        if publish(&record.sq_producer, &record.sq_event, old, new) {
            self.driver.ring(self.send_doorbell(new));
        }
    }

    /// Publishes the receive queue's producer index, and rings if the device requests it.
    #[inline]
    pub fn publish_receives(&self, old: u32, new: u32) {
        let record = self.record();
        if publish(&record.rq_producer, &record.rq_event, old, new) {
            self.driver.ring(self.receive_doorbell(new));
        }
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

    /// Device numbers of the completion queues of sends and receives.
    pub(crate) fn cqs(&self) -> (u32, u32) {
        self.cqs
    }

    /// Device number of the shared receive queue, if the queue pair uses one.
    pub(crate) fn srq(&self) -> Option<u32> {
        self.srq
    }

    /// The requests that have a completion; `None` if that cannot be determined at the moment.
    pub(crate) fn completed(&self) -> Option<Completed> {
        lock(&self.poster).as_ref()?.completed()
    }

    /// Sets the poster. To be called before the first [`Qp::modify`].
    pub fn set_poster(&self, poster: Arc<dyn Poster>) {
        *lock(&self.poster) = Some(poster);
    }

    /// Opens the gate, unless the send queue drains, and makes the poster publish the entries
    /// behind it.
    pub(crate) fn open_gate(&self) {
        self.set_gate(|state| state.connected = true);
    }

    fn set_gate(&self, change: impl FnOnce(&mut GateState)) {
        let opened = {
            let mut state = lock(&self.gate_state);
            change(&mut state);
            let open = state.connected && !state.draining;
            !self.gate.swap(open, Ordering::AcqRel) && open
        };
        if opened && let Some(poster) = &*lock(&self.poster) {
            poster.gate_opened();
        }
    }

    /// Leaves requests that are not published yet behind the gate: state SQD of a RoCE NIC.
    pub(crate) fn drain(&self) {
        self.set_gate(|state| state.draining = true);
    }

    /// Ends [`drain`](Self::drain).
    pub(crate) fn end_draining(&self) {
        self.set_gate(|state| state.draining = false);
    }

    /// Whether the send queue drains.
    pub(crate) fn is_draining(&self) -> bool {
        lock(&self.gate_state).draining
    }

    /// Since when work requests wait behind the gate; `None`: none does.
    pub(crate) fn waiting_since(&self) -> Option<Duration> {
        if self.gate_is_open() {
            return None;
        }
        lock(&self.poster).as_ref()?.waiting_since()
    }

    /// Whether the thread that brought the queue pair to RTR has gone on to something else, as far
    /// as can be seen.
    pub(crate) fn has_gone_on(&self) -> bool {
        // The lock is held during a change.
        self.attr.try_lock().is_ok()
            && lock(&self.at_rtr).is_some_and(|activity| activity.has_gone_on(GOES_ON))
    }

    /// Removes the poster, and waits for a call to it that is in progress.
    pub(crate) fn remove_poster(&self) {
        *lock(&self.poster) = None;
    }

    pub(crate) fn set_last_state(&self, state: QpState) {
        self.last_state.store(state as u8, Ordering::Relaxed);
    }

    pub(crate) fn close_gate(&self) {
        self.set_gate(|state| *state = GateState::default());
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
