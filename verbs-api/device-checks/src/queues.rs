//! The driver side of regions, completion queues and queue pairs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use urnic_device::command::{
    Command, Count, CreateCq, CreateMr, CreateQp, Handle, ModifyQp, Opcode, QpStatus, QueueHandle, ResizeCq,
    modify,
};
use urnic_device::cqe::{CQE_LEN, Cqe};
use urnic_device::doorbell::Kind;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{self, BLOCK_LEN, SendHeader, Sge};
use urnic_testkit::{CompletionQueue, ReceiveQueue, SendQueue, request};
use zerocopy::IntoBytes;

use crate::memory::Memory;
use crate::outcome::{Outcome, ensure};
use crate::rig::Rig;

/// log2 of the blocks of a send queue, and of the entries of a receive queue.
pub(crate) const LOG_QUEUE: u32 = 6;
const LOG_STRIDE: u32 = 6;
/// The label of the queue pairs in completions.
pub(crate) const LABEL: u32 = 0x00be_ef01;

pub(crate) const ALL_RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// Registered memory, with tagged offsets that differ from its addresses.
pub(crate) struct Region {
    pub(crate) memory: Rc<Memory>,
    pub(crate) stag: u32,
    pub(crate) base: u64,
}

impl Region {
    pub(crate) fn new(rig: &Rig, pd: u32, len: usize, access: Access) -> Outcome<Region> {
        let memory = rig.memory(len)?;
        let base = 0x0123_4567_8000;
        let arguments = CreateMr {
            base: base.into(),
            len: (len as u64).into(),
            dma: memory.iova().into(),
            pd: pd.into(),
            access: access.bits().into(),
            ..CreateMr::default()
        };
        let stag = rig.create(Opcode::CreateMr, &arguments)?;
        Ok(Region { memory, stag, base })
    }

    pub(crate) fn sge(&self, at: u64, len: u32) -> Sge {
        Sge {
            offset: (self.base + at).into(),
            len: len.into(),
            stag: self.stag.into(),
        }
    }
}

/// A completion queue.
pub(crate) struct Cq {
    pub(crate) id: u32,
    slot: u32,
    queue: RefCell<CompletionQueue<Rc<Memory>>>,
}

impl Cq {
    pub(crate) fn new(rig: &Rig, log_size: u32) -> Outcome<Cq> {
        Cq::with_event_queue(rig, log_size, rig.notices.id)
    }

    /// Creates a completion queue that notifies through the event queue `eq`; 0 = none.
    pub(crate) fn with_event_queue(rig: &Rig, log_size: u32, eq: u32) -> Outcome<Cq> {
        Cq::with(rig, log_size, |arguments| arguments.eq = eq.into())
    }

    /// Creates a completion queue of which `change` changes the arguments.
    pub(crate) fn with(rig: &Rig, log_size: u32, change: impl FnOnce(&mut CreateCq)) -> Outcome<Cq> {
        let (mut arguments, ring, record) = Cq::arguments(rig, log_size)?;
        change(&mut arguments);
        let handle: QueueHandle = rig.command(Opcode::CreateCq, &arguments)?.result();
        Ok(Cq {
            id: handle.id.get(),
            slot: handle.doorbell.get(),
            queue: RefCell::new(CompletionQueue::new(ring, record, log_size)),
        })
    }

    /// Valid arguments, with the memory that they name.
    pub(crate) fn arguments(rig: &Rig, log_size: u32) -> Outcome<(CreateCq, Rc<Memory>, Rc<Memory>)> {
        let (ring, record) = (rig.memory(CQE_LEN << log_size)?, rig.memory(64)?);
        let arguments = CreateCq {
            ring: ring.iova().into(),
            record: record.iova().into(),
            log_size: log_size.into(),
            eq: rig.notices.id.into(),
            uar: rig.uar.into(),
            ..CreateCq::default()
        };
        Ok((arguments, ring, record))
    }

    /// The current ring of the queue; a resize replaces it.
    pub(crate) fn ring(&self) -> Rc<Memory> {
        self.queue.borrow().ring().clone()
    }

    /// The next completion, if the device has written it.
    pub(crate) fn poll(&self) -> Option<Cqe> {
        self.queue.borrow_mut().poll()
    }

    /// Waits for the next completion.
    pub(crate) fn next(&self, rig: &Rig) -> Outcome<Cqe> {
        rig.wait(&format!("a completion in queue {:#x}", self.id), || self.poll())
    }

    /// Waits for the next completion, which must have this cookie and status.
    pub(crate) fn expect(&self, rig: &Rig, cookie: u64, status: WcStatus) -> Outcome<Cqe> {
        let cqe = self.next(rig)?;
        let seen = WcStatus::from_raw(cqe.status);
        ensure!(
            cqe.cookie.get() == cookie && seen == Some(status),
            "instead of request {cookie:#x} with {status:?}, request {:#x} completed with {seen:?} ({}), Terminate {:#x}",
            cqe.cookie.get(),
            cqe.status,
            cqe.vendor_error.get()
        );
        Ok(cqe)
    }

    /// Arms the queue for completions after the newest one that was consumed.
    pub(crate) fn arm(&self, rig: &Rig, kind: Kind) {
        self.arm_at(rig, kind, self.consumer());
    }

    /// Arms the queue for completions from that index on.
    pub(crate) fn arm_at(&self, rig: &Rig, kind: Kind, index: u32) {
        rig.ring(kind, self.id, self.slot, index);
    }

    pub(crate) fn consumer(&self) -> u32 {
        self.queue.borrow().index()
    }

    /// Number of completions in the ring that were not consumed.
    pub(crate) fn there(&self) -> u32 {
        self.queue.borrow().written()
    }

    /// Moves the queue to a new ring of 2^`log_size` entries.
    pub(crate) fn resize(&self, rig: &Rig, log_size: u32) -> Outcome<Count> {
        let ring = rig.memory(CQE_LEN << log_size)?;
        let arguments = ResizeCq {
            ring: ring.iova().into(),
            cq: self.id.into(),
            log_size: log_size.into(),
        };
        let count = rig.command(Opcode::ResizeCq, &arguments)?.result();
        self.queue.borrow_mut().move_to(ring, log_size);
        Ok(count)
    }
}

/// A queue pair with its completion queues.
pub(crate) struct Qp {
    pub(crate) id: u32,
    slot: u32,
    sends: RefCell<SendQueue<Rc<Memory>>>,
    receives: RefCell<ReceiveQueue<Rc<Memory>>>,
    pub(crate) send_cq: Rc<Cq>,
    pub(crate) recv_cq: Rc<Cq>,
    /// Number of doorbells rung.
    pub(crate) rings: Cell<u32>,
}

impl Qp {
    pub(crate) fn new(rig: &Rig, pd: u32, send_cq: &Rc<Cq>, recv_cq: &Rc<Cq>) -> Outcome<Qp> {
        let (arguments, memory) = Qp::arguments(rig, pd, send_cq, recv_cq)?;
        Qp::with(rig, &arguments, memory, send_cq, recv_cq)
    }

    pub(crate) fn with(
        rig: &Rig,
        arguments: &CreateQp,
        [sq, rq, record]: [Rc<Memory>; 3],
        send_cq: &Rc<Cq>,
        recv_cq: &Rc<Cq>,
    ) -> Outcome<Qp> {
        let handle: QueueHandle = rig.command(Opcode::CreateQp, arguments)?.result();
        Ok(Qp {
            id: handle.id.get(),
            slot: handle.doorbell.get(),
            sends: RefCell::new(SendQueue::new(sq, record.clone(), LOG_QUEUE)),
            receives: RefCell::new(ReceiveQueue::new(rq, record, LOG_QUEUE, LOG_STRIDE)),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            rings: Cell::new(0),
        })
    }

    /// Valid arguments, with the memory that they name: send queue, receive queue, record.
    pub(crate) fn arguments(
        rig: &Rig,
        pd: u32,
        send_cq: &Cq,
        recv_cq: &Cq,
    ) -> Outcome<(CreateQp, [Rc<Memory>; 3])> {
        let memory = [
            rig.memory(BLOCK_LEN << LOG_QUEUE)?,
            rig.memory(1 << (LOG_QUEUE + LOG_STRIDE))?,
            rig.memory(128)?,
        ];
        let [sq, rq, record] = &memory;
        let arguments = CreateQp {
            sq_ring: sq.iova().into(),
            rq_ring: rq.iova().into(),
            record: record.iova().into(),
            pd: pd.into(),
            send_cq: send_cq.id.into(),
            recv_cq: recv_cq.id.into(),
            uar: rig.uar.into(),
            label: LABEL.into(),
            sq_log_size: LOG_QUEUE.into(),
            rq_log_size: LOG_QUEUE.into(),
            rq_log_stride: LOG_STRIDE.into(),
            ..CreateQp::default()
        };
        Ok((arguments, memory))
    }

    /// The command that moves the queue pair to a state, with all remote rights.
    pub(crate) fn change(&self, state: QpState) -> Command {
        let arguments = ModifyQp {
            qp: self.id.into(),
            mask: (modify::STATE | modify::ACCESS).into(),
            state: (state as u32).into(),
            access: ALL_RIGHTS.bits().into(),
            ..ModifyQp::default()
        };
        Command::new(Opcode::ModifyQp, &arguments)
    }

    pub(crate) fn modify(&self, rig: &Rig, state: QpState) -> Outcome {
        rig.run(self.change(state)).map(drop)
    }

    /// Moves the queue pair from Reset to RTS.
    pub(crate) fn ready(&self, rig: &Rig) -> Outcome {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            self.modify(rig, state)?;
        }
        Ok(())
    }

    pub(crate) fn status(&self, rig: &Rig) -> Outcome<QpStatus> {
        let handle = Handle { id: self.id.into() };
        Ok(rig.command(Opcode::QueryQp, &handle)?.result())
    }

    /// Waits until the queue pair is in the error state.
    pub(crate) fn fails(&self, rig: &Rig) -> Outcome {
        let mut last = u32::MAX;
        let failed = rig.wait("a queue pair to fail", || match self.status(rig) {
            Ok(status) => {
                last = status.state.get();
                (last == QpState::Err as u32).then_some(Ok(()))
            }
            Err(failure) => Some(Err(failure)),
        });
        ensure!(
            failed.is_ok(),
            "queue pair {:#x} should have failed, and is in state {last}",
            self.id
        );
        failed?
    }

    /// Checks that the queue pair is in that state.
    pub(crate) fn is_in(&self, rig: &Rig, state: QpState) -> Outcome {
        let seen = self.status(rig)?.state.get();
        ensure!(
            seen == state as u32,
            "queue pair {:#x} is in state {seen}, not {} ({state:?})",
            self.id,
            state as u32
        );
        Ok(())
    }

    /// Rings because the device requested it by its event index.
    fn ring(&self, rig: &Rig, kind: Kind, index: u32) {
        self.rings.set(self.rings.get() + 1);
        rig.ring(kind, self.id, self.slot, index);
    }

    /// Rings for the send queue, whether the device requested it or not.
    pub(crate) fn ring_sends(&self, rig: &Rig) {
        let producer = self.sends.borrow().producer();
        rig.ring(Kind::Send, self.id, self.slot, producer);
    }

    /// Rings in the slot of this queue pair for a number that no queue pair has.
    pub(crate) fn ring_for_another(&self, rig: &Rig) {
        rig.ring(Kind::Send, self.id ^ 0x80_0000, self.slot, 0);
    }

    pub(crate) fn receive(&self, rig: &Rig, cookie: u64, sges: &[Sge]) {
        let mut receives = self.receives.borrow_mut();
        if receives.post(cookie, sges) {
            self.ring(rig, Kind::Receive, receives.producer());
        }
    }

    /// Posts a signalled Send.
    pub(crate) fn send(&self, rig: &Rig, cookie: u64, sges: &[Sge]) {
        self.post(
            rig,
            request(wqe::Opcode::Send, cookie),
            sges.as_bytes(),
            sges.len(),
        );
    }

    /// Posts a signalled operation on the peer's memory.
    pub(crate) fn remote(&self, rig: &Rig, opcode: wqe::Opcode, cookie: u64, local: &[Sge], there: Sge) {
        let header = SendHeader {
            remote_offset: there.offset,
            stag: there.stag,
            ..request(opcode, cookie)
        };
        self.post(rig, header, local.as_bytes(), local.len());
    }

    /// Posts a request with any operands, of which `sges` are elements.
    pub(crate) fn post(&self, rig: &Rig, header: SendHeader, operands: &[u8], sges: usize) {
        let (entry, blocks) = SendQueue::<Rc<Memory>>::entry(header, operands, sges);
        self.post_raw(rig, &entry, blocks);
    }

    /// Posts any bytes as an entry of `blocks` blocks.
    pub(crate) fn post_raw(&self, rig: &Rig, entry: &[u8], blocks: u32) {
        self.sends.borrow().write(entry);
        self.claim(rig, blocks);
    }

    /// Publishes `blocks` blocks with any contents.
    pub(crate) fn claim(&self, rig: &Rig, blocks: u32) {
        let mut sends = self.sends.borrow_mut();
        if sends.publish(blocks) {
            self.ring(rig, Kind::Send, sends.producer());
        }
    }

    /// Number of free blocks.
    pub(crate) fn room(&self) -> u32 {
        self.sends.borrow().room()
    }

    /// The consumer index of the send queue, and the producer index that it must reach.
    pub(crate) fn given_back(&self) -> (u32, u32) {
        let sends = self.sends.borrow();
        (sends.consumer(), sends.producer())
    }
}
