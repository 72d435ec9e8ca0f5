//! The driver's side of regions, completion queues and queue pairs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use urnic_device::command::{
    Command, Count, CreateCq, CreateMr, CreateQp, Handle, ModifyQp, Opcode, QpStatus, QueueHandle, ResizeCq,
    modify,
};
use urnic_device::cqe::{self, CQE_LEN, Cqe};
use urnic_device::doorbell::Kind;
use urnic_device::record::must_ring;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{self, BLOCK_LEN, RecvHeader, SendFlags, SendHeader, Sge};
use zerocopy::IntoBytes;

use crate::memory::Memory;
use crate::outcome::{Outcome, ensure};
use crate::rig::Rig;

/// log2 of the blocks of a send queue, and of the entries of a receive queue.
pub(crate) const LOG_QUEUE: u32 = 6;
const LOG_STRIDE: u32 = 6;
/// What the queue pairs are called in completions.
pub(crate) const LABEL: u32 = 0x00be_ef01;

/// Offsets in a queue record.
mod field {
    use std::mem::offset_of;
    use urnic_device::record::QueueRecord;

    pub(super) const SQ_PRODUCER: usize = offset_of!(QueueRecord, sq_producer);
    pub(super) const RQ_PRODUCER: usize = offset_of!(QueueRecord, rq_producer);
    pub(super) const SQ_CONSUMER: usize = offset_of!(QueueRecord, sq_consumer);
    pub(super) const SQ_EVENT: usize = offset_of!(QueueRecord, sq_event);
    pub(super) const RQ_EVENT: usize = offset_of!(QueueRecord, rq_event);
}

pub(crate) const ALL_RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// Registered memory, with tagged offsets that are no addresses.
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
    ring: RefCell<Rc<Memory>>,
    record: Rc<Memory>,
    log_size: Cell<u32>,
    consumer: Cell<u32>,
    /// The consumer index at the last change of rings.
    base: Cell<u32>,
}

impl Cq {
    pub(crate) fn new(rig: &Rig, log_size: u32) -> Outcome<Cq> {
        Cq::noting(rig, log_size, rig.notices.id)
    }

    /// One that notifies through this event queue; 0 = none.
    pub(crate) fn noting(rig: &Rig, log_size: u32, eq: u32) -> Outcome<Cq> {
        let (mut arguments, ring, record) = Cq::arguments(rig, log_size)?;
        arguments.eq = eq.into();
        let handle: QueueHandle = rig.command(Opcode::CreateCq, &arguments)?.result();
        Ok(Cq {
            id: handle.id.get(),
            slot: handle.doorbell.get(),
            ring: RefCell::new(ring),
            record,
            log_size: Cell::new(log_size),
            consumer: Cell::new(0),
            base: Cell::new(0),
        })
    }

    /// Good arguments, with the memory that they name.
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

    /// Where the ring has the entry that lies so far behind the consumer index, and the phase that
    /// it has once it is there.
    fn place(&self, ahead: u32) -> (usize, u32) {
        let at = self
            .consumer
            .get()
            .wrapping_sub(self.base.get())
            .wrapping_add(ahead);
        let log_size = self.log_size.get();
        let slot = (at & ((1 << log_size) - 1)) as usize;
        (slot * CQE_LEN, !(at >> log_size) & 1)
    }

    /// The ring that it is in now.
    pub(crate) fn ring(&self) -> Rc<Memory> {
        self.ring.borrow().clone()
    }

    /// The next completion, if it is there.
    pub(crate) fn poll(&self) -> Option<Cqe> {
        let (begin, phase) = self.place(0);
        let ring = self.ring.borrow();
        if ring.word(begin + cqe::PHASE).load(Ordering::Acquire) & 1 != phase {
            return None;
        }
        let entry = ring.load(begin);
        let next = self.consumer.get().wrapping_add(1);
        self.consumer.set(next);
        self.record.word(0).store(next, Ordering::Release);
        Some(entry)
    }

    /// Waits for the next completion.
    pub(crate) fn next(&self, rig: &Rig) -> Outcome<Cqe> {
        rig.wait(&format!("a completion in queue {:#x}", self.id), || self.poll())
    }

    /// Waits for the next completion, which must be this one.
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

    /// Arms it behind the newest completion that was taken.
    pub(crate) fn arm(&self, rig: &Rig, kind: Kind) {
        self.arm_at(rig, kind, self.consumer.get());
    }

    /// Arms it behind the completion before that index.
    pub(crate) fn arm_at(&self, rig: &Rig, kind: Kind, index: u32) {
        rig.ring(kind, self.id, self.slot, index);
    }

    pub(crate) fn consumer(&self) -> u32 {
        self.consumer.get()
    }

    /// Completions in the ring that were not taken.
    pub(crate) fn there(&self) -> u32 {
        let is_there = |n: &u32| {
            let (at, phase) = self.place(*n);
            self.ring.borrow().word(at + cqe::PHASE).load(Ordering::Acquire) & 1 == phase
        };
        (0..1 << self.log_size.get()).take_while(is_there).count() as u32
    }

    /// Moves it to a new ring of so many entries.
    pub(crate) fn resize(&self, rig: &Rig, log_size: u32) -> Outcome<Count> {
        let ring = rig.memory(CQE_LEN << log_size)?;
        let arguments = ResizeCq {
            ring: ring.iova().into(),
            cq: self.id.into(),
            log_size: log_size.into(),
        };
        let count = rig.command(Opcode::ResizeCq, &arguments)?.result();
        self.ring.replace(ring);
        self.log_size.set(log_size);
        self.base.set(self.consumer.get());
        Ok(count)
    }
}

/// A queue pair with its completion queues.
pub(crate) struct Qp {
    pub(crate) id: u32,
    slot: u32,
    sq: Rc<Memory>,
    rq: Rc<Memory>,
    record: Rc<Memory>,
    pub(crate) send_cq: Rc<Cq>,
    pub(crate) recv_cq: Rc<Cq>,
    sq_producer: Cell<u32>,
    rq_producer: Cell<u32>,
    /// Doorbells rung.
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
            sq,
            rq,
            record,
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            sq_producer: Cell::new(0),
            rq_producer: Cell::new(0),
            rings: Cell::new(0),
        })
    }

    /// Good arguments, with the memory that they name: send queue, receive queue, record.
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

    /// The command that brings it to a state, with all remote rights.
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

    /// Brings it from Reset to RTS.
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

    /// Waits until it is in the error state.
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

    /// Fails unless it is in that state.
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

    /// Publishes a producer index as the shadow doorbell rule has it, and rings only if that says
    /// so.
    fn publish(&self, rig: &Rig, [producer, event]: [usize; 2], old: u32, new: u32, kind: Kind) {
        self.record.word(producer).store(new, Ordering::Release);
        fence(Ordering::SeqCst);
        if must_ring(self.record.word(event).load(Ordering::Relaxed), new, old) {
            self.rings.set(self.rings.get() + 1);
            rig.ring(kind, self.id, self.slot, new);
        }
    }

    /// Rings for the send queue, asked for or not.
    pub(crate) fn ring_sends(&self, rig: &Rig) {
        rig.ring(Kind::Send, self.id, self.slot, self.sq_producer.get());
    }

    pub(crate) fn receive(&self, rig: &Rig, cookie: u64, sges: &[Sge]) {
        let old = self.rq_producer.get();
        let at = ((old & ((1 << LOG_QUEUE) - 1)) << LOG_STRIDE) as usize;
        self.rq
            .write(at, RecvHeader::new(cookie, sges.len() as u16).as_bytes());
        self.rq.write(at + size_of::<RecvHeader>(), sges.as_bytes());
        self.rq_producer.set(old.wrapping_add(1));
        self.publish(
            rig,
            [field::RQ_PRODUCER, field::RQ_EVENT],
            old,
            old.wrapping_add(1),
            Kind::Receive,
        );
    }

    /// A signalled Send.
    pub(crate) fn send(&self, rig: &Rig, cookie: u64, sges: &[Sge]) {
        self.post(
            rig,
            request(wqe::Opcode::Send, cookie),
            sges.as_bytes(),
            sges.len(),
        );
    }

    /// A signalled operation on the peer's memory.
    pub(crate) fn remote(&self, rig: &Rig, opcode: wqe::Opcode, cookie: u64, local: &[Sge], there: Sge) {
        let header = SendHeader {
            remote_offset: there.offset,
            stag: there.stag,
            ..request(opcode, cookie)
        };
        self.post(rig, header, local.as_bytes(), local.len());
    }

    /// A request with any operands, of which `sges` are elements.
    pub(crate) fn post(&self, rig: &Rig, mut header: SendHeader, operands: &[u8], sges: usize) {
        header.num_sge = sges as u8;
        header.blocks = wqe::blocks(operands.len()) as u8;
        let entry = [header.as_bytes(), operands].concat();
        self.post_raw(rig, &entry, header.blocks.into());
    }

    /// Any bytes as an entry of so many blocks.
    pub(crate) fn post_raw(&self, rig: &Rig, entry: &[u8], blocks: u32) {
        let old = self.sq_producer.get();
        for (index, block) in (old..).zip(entry.chunks(BLOCK_LEN)) {
            let at = (index & ((1 << LOG_QUEUE) - 1)) as usize * BLOCK_LEN;
            self.sq.write(at, block);
        }
        self.claim(rig, blocks);
    }

    /// Publishes so many blocks, whatever is in them.
    pub(crate) fn claim(&self, rig: &Rig, blocks: u32) {
        let old = self.sq_producer.get();
        let new = old.wrapping_add(blocks);
        self.sq_producer.set(new);
        self.publish(rig, [field::SQ_PRODUCER, field::SQ_EVENT], old, new, Kind::Send);
    }

    /// Blocks that are free.
    pub(crate) fn room(&self) -> u32 {
        let consumer = self.record.word(field::SQ_CONSUMER).load(Ordering::Acquire);
        (1 << LOG_QUEUE) - self.sq_producer.get().wrapping_sub(consumer)
    }

    /// Indices that the device must give back.
    pub(crate) fn given_back(&self) -> (u32, u32) {
        (
            self.record.word(field::SQ_CONSUMER).load(Ordering::Acquire),
            self.sq_producer.get(),
        )
    }
}

/// A signalled request without operands.
pub(crate) fn request(opcode: wqe::Opcode, cookie: u64) -> SendHeader {
    SendHeader {
        opcode: opcode as u8,
        flags: SendFlags::SIGNALED.bits(),
        cookie: cookie.into(),
        ..SendHeader::default()
    }
}
