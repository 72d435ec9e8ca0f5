//! What stands around an engine in tests: host memory, queues as a driver sees them, and the other end of the wire.

use crate::buffers::BufferPool;
use crate::counters::{Counter, Counters};
use crate::effects::Effects;
use crate::env::Env;
use crate::host::{HostMemory, Mapping, Piece, PieceMut, Record};
use crate::memory::{Backing, DomainUse, MemoryTable, Registration};
use crate::queues::{CompletionQueue, ReceiveQueue, ReceiveSource, SendQueue, SharedReceiveQueue};
use crate::rdmap::{Attachment, Engine, NoStream, QpChange, QpParams, Rtr, RxOutcome, TxOutcome};
use crate::stream::sim::{Conditions, SimStream, Wire, pair};
use crate::stream::{Stream, StreamError};
use crate::time::Nanos;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use urnic_verbs_api::device::cqe::{CQE_LEN, Cqe, PHASE};
use urnic_verbs_api::device::event::{Event, EventKind, QpFault};
use urnic_verbs_api::device::record::{CqRecord, QueueRecord};
use urnic_verbs_api::device::wqe::{
    AtomicOperands, BLOCK_LEN, BindOperands, MAX_SGE, OPERANDS, Opcode, RecvHeader, SendFlags, SendHeader,
    Sge, blocks,
};
use urnic_verbs_api::vocabulary::{Access, QpState, WcOpcode, WcStatus};
use urnic_wire::mpa::fpdu::{self, CrcMode};
use zerocopy::{FromBytes, IntoBytes};

/// Memory that stays in place, 64-byte aligned, and is reached only by raw copies.
#[derive(Debug)]
pub(super) struct Block {
    ptr: NonNull<Line>,
    lines: usize,
}

#[repr(align(64))]
#[derive(Debug, Clone, Copy)]
struct Line(#[expect(dead_code, reason = "reached by address")] [u8; 64]);

impl Block {
    pub(super) fn new(len: usize) -> Block {
        let lines = vec![Line([0; 64]); len.div_ceil(64).max(1)].into_boxed_slice();
        let count = lines.len();
        let ptr = NonNull::new(Box::into_raw(lines).cast()).unwrap();
        Block { ptr, lines: count }
    }

    pub(super) fn iova(&self) -> u64 {
        self.ptr.as_ptr().expose_provenance() as u64
    }

    pub(super) fn mapping(&self, len: usize) -> Mapping {
        assert!(len <= self.lines * 64);
        Mapping::new(&Anywhere, self.iova(), len, 1).unwrap()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let slice = std::ptr::slice_from_raw_parts_mut(self.ptr.as_ptr(), self.lines);
        // SAFETY: made by `Box::into_raw` in `new`; whoever maps it lives in the same `Node`.
        drop(unsafe { Box::from_raw(slice) });
    }
}

/// Addresses are pointers.
struct Anywhere;

// SAFETY: tests name only blocks that outlive the engines that use them.
unsafe impl HostMemory for Anywhere {
    fn reach(&self, iova: u64, _: usize) -> Option<NonNull<u8>> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(iova as usize))
    }
}

/// A registered region.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) stag: u32,
    pub(super) base: u64,
    pub(super) len: usize,
    block: Arc<Block>,
}

impl Region {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.block.mapping(self.len).copy_out(0, &mut bytes);
        bytes
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        self.block.mapping(self.len).copy_in(at, bytes);
    }

    /// All of it, or part.
    pub(super) fn sge(&self, at: usize, len: usize) -> Sge {
        sge(self.base + at as u64, len, self.stag)
    }
}

pub(super) fn sge(offset: u64, len: usize, stag: u32) -> Sge {
    Sge {
        offset: offset.into(),
        len: (len as u32).into(),
        stag: stag.into(),
    }
}

/// A completion queue from the program's side.
#[derive(Debug)]
pub(super) struct Cq {
    ring: Block,
    record: Block,
    log_size: u32,
    consumer: u32,
    pub(super) queue: Arc<CompletionQueue>,
}

impl Cq {
    fn new(id: u32, log_size: u32) -> Cq {
        let ring = Block::new(CQE_LEN << log_size);
        let record = Block::new(size_of::<CqRecord>());
        let device = Record::new(&Anywhere, record.iova()).unwrap();
        let queue = CompletionQueue::new(id, 0, ring.mapping(CQE_LEN << log_size), device, log_size, None);
        Cq {
            ring,
            record,
            log_size,
            consumer: 0,
            queue: Arc::new(queue),
        }
    }

    pub(super) fn poll(&mut self) -> Option<Cqe> {
        let at = (self.consumer & ((1 << self.log_size) - 1)) as usize * CQE_LEN;
        let phase = !(self.consumer >> self.log_size) & 1;
        let ring = self.ring.mapping(CQE_LEN << self.log_size);
        if ring.word(at + PHASE).load(Ordering::Acquire) & 1 != phase {
            return None;
        }
        let cqe = ring.read(at);
        self.consumer = self.consumer.wrapping_add(1);
        self.record
            .mapping(64)
            .word(0)
            .store(self.consumer, Ordering::Release);
        Some(cqe)
    }
}

/// A work request of a test.
#[derive(Debug, Clone)]
pub(super) struct Work {
    header: SendHeader,
    sges: Vec<Sge>,
    inline: Option<Vec<u8>>,
    operands: Vec<u8>,
}

impl Work {
    pub(super) fn new(opcode: Opcode, cookie: u64) -> Work {
        let header = SendHeader {
            opcode: opcode as u8,
            flags: SendFlags::SIGNALED.bits(),
            cookie: cookie.into(),
            ..SendHeader::default()
        };
        Work {
            header,
            sges: Vec::new(),
            inline: None,
            operands: Vec::new(),
        }
    }

    pub(super) fn send(cookie: u64) -> Work {
        Work::new(Opcode::Send, cookie)
    }

    pub(super) fn write(cookie: u64, stag: u32, to: u64) -> Work {
        Work::new(Opcode::Write, cookie).to(stag, to)
    }

    pub(super) fn read(cookie: u64, stag: u32, to: u64) -> Work {
        Work::new(Opcode::Read, cookie).to(stag, to)
    }

    pub(super) fn to(mut self, stag: u32, to: u64) -> Work {
        self.header.stag = stag.into();
        self.header.remote_offset = to.into();
        self
    }

    pub(super) fn flags(mut self, flags: SendFlags) -> Work {
        self.header.flags |= flags.bits();
        self
    }

    pub(super) fn unsignaled(mut self) -> Work {
        self.header.flags &= !SendFlags::SIGNALED.bits();
        self
    }

    pub(super) fn sge(mut self, sge: Sge) -> Work {
        self.sges.push(sge);
        self
    }

    pub(super) fn inline(mut self, bytes: &[u8]) -> Work {
        self.inline = Some(bytes.to_vec());
        self.flags(SendFlags::INLINE)
    }

    pub(super) fn immediate(mut self, immediate: [u8; 4]) -> Work {
        self.header.immediate = immediate;
        self
    }

    pub(super) fn atomic(mut self, compare_add: u64, swap: u64) -> Work {
        let operands = AtomicOperands {
            compare_add: compare_add.into(),
            swap: swap.into(),
        };
        self.operands = operands.as_bytes().to_vec();
        self
    }

    pub(super) fn bind(mut self, operands: BindOperands) -> Work {
        self.operands = operands.as_bytes().to_vec();
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut operands = self.operands.clone();
        operands.extend_from_slice(self.sges.as_bytes());
        operands.extend_from_slice(self.inline.as_deref().unwrap_or_default());
        let mut header = self.header;
        header.num_sge = self.sges.len() as u8;
        header.inline_len = self.inline.as_ref().map_or(0, |i| i.len() as u32).into();
        header.blocks = blocks(operands.len()) as u8;
        let mut bytes = header.as_bytes().to_vec();
        assert_eq!(bytes.len(), OPERANDS);
        bytes.extend_from_slice(&operands);
        bytes.resize(usize::from(header.blocks) * BLOCK_LEN, 0);
        bytes
    }
}

/// How a queue pair of a test is made.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub(super) qid: u32,
    pub(super) sq_log: u32,
    pub(super) rq_log: u32,
    pub(super) cq_log: u32,
    pub(super) access: Access,
    pub(super) extensions: bool,
    pub(super) shared: Option<Arc<SharedReceiveQueue>>,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            qid: 7,
            sq_log: 8,
            rq_log: 8,
            cq_log: 9,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
            extensions: true,
            shared: None,
        }
    }
}

const RQ_STRIDE_LOG: u32 = 10;

/// A receive queue from the driver's side.
#[derive(Debug)]
pub(super) struct Receives {
    ring: Block,
    record: Arc<Block>,
    log_size: u32,
    producer: u32,
}

impl Receives {
    pub(super) fn new(log_size: u32) -> (Receives, ReceiveQueue) {
        let record = Arc::new(Block::new(size_of::<QueueRecord>()));
        Receives::with_record(log_size, record)
    }

    fn with_record(log_size: u32, record: Arc<Block>) -> (Receives, ReceiveQueue) {
        let ring = Block::new(1 << (log_size + RQ_STRIDE_LOG));
        let device = Arc::new(Record::new(&Anywhere, record.iova()).unwrap());
        let mapping = ring.mapping(1 << (log_size + RQ_STRIDE_LOG));
        let queue = ReceiveQueue::new(mapping, device, log_size, RQ_STRIDE_LOG);
        (
            Receives {
                ring,
                record,
                log_size,
                producer: 0,
            },
            queue,
        )
    }

    pub(super) fn post(&mut self, cookie: u64, sges: &[Sge]) {
        let at = ((self.producer & ((1 << self.log_size) - 1)) as usize) << RQ_STRIDE_LOG;
        let ring = self.ring.mapping(1 << (self.log_size + RQ_STRIDE_LOG));
        ring.write(at, &RecvHeader::new(cookie, sges.len() as u16));
        ring.copy_in(at + size_of::<RecvHeader>(), sges.as_bytes());
        self.producer = self.producer.wrapping_add(1);
        self.record
            .mapping(128)
            .word(4)
            .store(self.producer, Ordering::Release);
    }

    /// Posts one whose header claims more elements than there can be.
    pub(super) fn post_malformed(&mut self, cookie: u64) {
        let at = ((self.producer & ((1 << self.log_size) - 1)) as usize) << RQ_STRIDE_LOG;
        let ring = self.ring.mapping(1 << (self.log_size + RQ_STRIDE_LOG));
        ring.write(at, &RecvHeader::new(cookie, MAX_SGE as u16 + 1));
        self.producer = self.producer.wrapping_add(1);
        self.record
            .mapping(128)
            .word(4)
            .store(self.producer, Ordering::Release);
    }
}

/// A queue pair with all it needs.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) engine: Engine,
    pub(super) stream: Box<dyn Stream>,
    pub(super) memory: Arc<MemoryTable>,
    pub(super) pd: u32,
    pub(super) counters: Counters,
    pub(super) events: Vec<Event>,
    pub(super) send_cq: Cq,
    pub(super) recv_cq: Cq,
    pub(super) receives: Receives,
    pub(super) tx: TxOutcome,
    pub(super) rx: RxOutcome,
    buffers: BufferPool,
    clock: Arc<AtomicU64>,
    sq: Block,
    sq_log: u32,
    sq_producer: u32,
    record: Arc<Block>,
    /// Regions live as long as the engine may use them.
    blocks: RefCell<Vec<Arc<Block>>>,
}

pub(super) fn table() -> (Arc<MemoryTable>, u32) {
    let memory = MemoryTable::new(1000, 1000, 100, [1, 2, 3, 4, 5]);
    let pd = memory.domains().allocate().unwrap();
    (Arc::new(memory), pd)
}

impl Node {
    pub(super) fn new(shape: &Shape, memory: Arc<MemoryTable>, pd: u32, clock: &Arc<AtomicU64>) -> Node {
        assert!(memory.domains().enter(pd, DomainUse::QueuePair));
        let record = Arc::new(Block::new(size_of::<QueueRecord>()));
        let sq = Block::new(BLOCK_LEN << shape.sq_log);
        let device = Arc::new(Record::new(&Anywhere, record.iova()).unwrap());
        let queue = SendQueue::new(sq.mapping(BLOCK_LEN << shape.sq_log), device, shape.sq_log);
        let (receives, own) = Receives::with_record(shape.rq_log, record.clone());
        let send_cq = Cq::new(1, shape.cq_log);
        let recv_cq = Cq::new(2, shape.cq_log);
        let mut engine = Engine::new(QpParams {
            qid: shape.qid,
            label: 0x1234,
            pd,
            sq: queue,
            send_cq: send_cq.queue.clone(),
            rq: match &shape.shared {
                Some(shared) => ReceiveSource::Shared(shared.clone()),
                None => ReceiveSource::Own(own),
            },
            recv_cq: recv_cq.queue.clone(),
            extensions: shape.extensions,
        });
        let buffers = BufferPool::default();
        let counters = Counters::default();
        let mut effects = Effects::default();
        let mut env = Env {
            memory: &memory,
            now: Nanos(0),
            buffers: &buffers,
            counters: &counters,
            effects: &mut effects,
        };
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change = QpChange {
                state: Some(state),
                access: Some(shape.access),
                ..QpChange::default()
            };
            engine.modify(&change, &mut env, &mut NoStream).unwrap();
        }
        Node {
            engine,
            stream: Box::new(NoStream),
            memory,
            pd,
            counters,
            events: Vec::new(),
            send_cq,
            recv_cq,
            receives,
            tx: TxOutcome::Idle,
            rx: RxOutcome::Drained,
            buffers,
            clock: clock.clone(),
            sq,
            sq_log: shape.sq_log,
            sq_producer: 0,
            record,
            blocks: RefCell::default(),
        }
    }

    pub(super) fn region(&self, len: usize, access: Access) -> Region {
        self.region_in(self.pd, len, access)
    }

    pub(super) fn region_in(&self, pd: u32, len: usize, access: Access) -> Region {
        let block = Arc::new(Block::new(len));
        self.blocks.borrow_mut().push(block.clone());
        let base = block.iova();
        let backing = Arc::new(Backing::Contiguous(block.mapping(len)));
        let registration = Registration {
            pd,
            base,
            len: len as u64,
            access,
            backing,
        };
        let stag = self.memory.register(registration).unwrap();
        Region {
            stag,
            base,
            len,
            block,
        }
    }

    /// A region with these contents that everybody may use.
    pub(super) fn filled(&self, bytes: &[u8]) -> Region {
        let region = self.region(bytes.len(), everything());
        region.write(0, bytes);
        region
    }

    /// Runs `f` with the engine and its surroundings.
    pub(super) fn with<R>(&mut self, f: impl FnOnce(&mut Engine, &mut Env<'_>, &mut dyn Stream) -> R) -> R {
        let mut effects = Effects::default();
        let mut env = Env {
            memory: &self.memory,
            now: Nanos(self.clock.load(Ordering::Relaxed)),
            buffers: &self.buffers,
            counters: &self.counters,
            effects: &mut effects,
        };
        let result = f(&mut self.engine, &mut env, &mut *self.stream);
        self.events.append(&mut effects.events);
        result
    }

    pub(super) fn attach(&mut self, attachment: &Attachment, stream: impl Stream + 'static) {
        self.stream = Box::new(stream);
        self.with(|engine, env, stream| engine.attach(attachment, env, stream))
            .unwrap();
    }

    pub(super) fn modify(&mut self, change: QpChange) {
        self.with(|engine, env, stream| engine.modify(&change, env, stream))
            .unwrap();
    }

    pub(super) fn set_state(&mut self, state: QpState) {
        self.modify(QpChange {
            state: Some(state),
            ..QpChange::default()
        });
    }

    pub(super) fn post(&mut self, work: &Work) {
        self.post_raw(&work.bytes());
    }

    /// Posts blocks as they are.
    pub(super) fn post_raw(&mut self, blocks: &[u8]) {
        let ring = self.sq.mapping(BLOCK_LEN << self.sq_log);
        for block in blocks.chunks(BLOCK_LEN) {
            let at = (self.sq_producer & ((1 << self.sq_log) - 1)) as usize * BLOCK_LEN;
            ring.copy_in(at, block);
            self.sq_producer = self.sq_producer.wrapping_add(1);
        }
        self.record
            .mapping(128)
            .word(0)
            .store(self.sq_producer, Ordering::Release);
    }

    /// Blocks of the send queue that the device has not given back.
    pub(super) fn sq_outstanding(&self) -> u32 {
        let consumer = self.record.mapping(128).word(64).load(Ordering::Acquire);
        self.sq_producer.wrapping_sub(consumer)
    }

    pub(super) fn sq_room(&self) -> u32 {
        (1 << self.sq_log) - self.sq_outstanding()
    }

    pub(super) fn post_recv(&mut self, cookie: u64, sges: &[Sge]) {
        self.receives.post(cookie, sges);
    }

    /// Lets the engine do what it can now; whether anything came of it.
    pub(super) fn pump(&mut self) -> bool {
        let before = self.activity();
        if self
            .deadline()
            .is_some_and(|at| at.0 <= self.clock.load(Ordering::Relaxed))
        {
            self.with(|engine, env, stream| engine.tick(env, stream));
        }
        self.rx = self.with(|engine, env, stream| engine.receive(env, stream));
        self.tx = self.with(|engine, env, stream| engine.transmit(env, stream));
        before != self.activity()
    }

    fn activity(&self) -> (u64, u64, usize, u32, bool) {
        let bytes = self.counters.value(Counter::RxBytes) + self.counters.value(Counter::RxFpdus);
        let sent = self.counters.value(Counter::TxBytes) + self.counters.value(Counter::TxFpdus);
        (
            bytes,
            sent,
            self.events.len(),
            self.sq_outstanding(),
            self.engine.is_attached(),
        )
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.engine.deadline()
    }

    /// Takes all completions of sends: cookie and status.
    pub(super) fn sent(&mut self) -> Vec<(u64, WcStatus)> {
        std::iter::from_fn(|| self.send_cq.poll())
            .map(|cqe| (cqe.cookie.get(), status(&cqe)))
            .collect()
    }

    /// Takes all completions of receives: cookie, status, length.
    pub(super) fn received(&mut self) -> Vec<(u64, WcStatus, u32)> {
        std::iter::from_fn(|| self.recv_cq.poll())
            .map(|cqe| (cqe.cookie.get(), status(&cqe), cqe.byte_len.get()))
            .collect()
    }

    /// Faults that were raised as events, with the Terminate's control word.
    pub(super) fn faults(&self) -> Vec<(QpFault, u32)> {
        let faults = self.events.iter().filter(|e| e.kind == EventKind::QpError as u8);
        faults
            .map(|e| (QpFault::from_raw(e.code.get()).unwrap(), e.data.get() as u32))
            .collect()
    }

    pub(super) fn has_event(&self, kind: EventKind) -> bool {
        self.events.iter().any(|e| e.kind == kind as u8)
    }

    pub(super) fn count(&self, counter: Counter) -> u64 {
        self.counters.value(counter)
    }
}

pub(super) fn everything() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::MW_BIND
}

pub(super) fn status(cqe: &Cqe) -> WcStatus {
    WcStatus::from_raw(cqe.status).unwrap()
}

pub(super) fn opcode(cqe: &Cqe) -> WcOpcode {
    WcOpcode::from_raw(cqe.opcode).unwrap()
}

/// What most connections of tests agree on.
pub(super) fn agreed(initiator: bool) -> Attachment {
    Attachment {
        initiator,
        crc: true,
        markers_tx: false,
        markers_rx: false,
        stall_on_empty_rq: false,
        peer_may_close: false,
        ord: 16,
        ird: 16,
        first_msn: 1,
        rtr_send: None,
        rtr_expect: None,
        fin_grace: Duration::from_secs(2),
        terminate: 0,
    }
}

/// What native connections agree on: no Terminate for an empty receive queue, either side may close.
pub(super) fn native(initiator: bool) -> Attachment {
    Attachment {
        stall_on_empty_rq: true,
        peer_may_close: true,
        rtr_send: initiator.then_some(Rtr::Write),
        rtr_expect: (!initiator).then_some(Rtr::Write),
        ..agreed(initiator)
    }
}

/// Two engines on one wire. `a` is the initiator.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) a: Node,
    pub(super) b: Node,
    pub(super) wire: Wire,
    pub(super) clock: Arc<AtomicU64>,
}

impl Pair {
    pub(super) fn new() -> Pair {
        Pair::with(
            &Shape::default(),
            Conditions::default(),
            agreed(true),
            agreed(false),
        )
    }

    pub(super) fn with(shape: &Shape, conditions: Conditions, a: Attachment, b: Attachment) -> Pair {
        let clock = Arc::new(AtomicU64::new(0));
        let (left, right, wire) = pair(conditions, &clock);
        let node = |attachment, stream| {
            let (memory, pd) = table();
            let mut node = Node::new(shape, memory, pd, &clock);
            node.attach(attachment, stream);
            node
        };
        let (a, b) = (node(&a, left), node(&b, right));
        Pair { a, b, wire, clock }
    }

    /// Lets both do what they can, time included, until nothing is left to do at all.
    pub(super) fn run(&mut self) {
        for _ in 0..1_000_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the engines never come to rest");
    }

    /// Runs without letting any timer of an engine run out.
    pub(super) fn run_now(&mut self) {
        for _ in 0..1_000_000 {
            if self.a.pump() | self.b.pump() {
                continue;
            }
            match self.wire.next_arrival() {
                Some(at) => self.clock.store(at.0, Ordering::Relaxed),
                None => return,
            }
        }
        panic!("the engines never come to rest");
    }

    pub(super) fn step(&mut self) -> bool {
        if self.a.pump() | self.b.pump() {
            return true;
        }
        let next = [self.wire.next_arrival(), self.a.deadline(), self.b.deadline()];
        match next.into_iter().flatten().min() {
            Some(at) => {
                self.clock.fetch_max(at.0, Ordering::Relaxed);
                true
            }
            None => false,
        }
    }

    pub(super) fn advance(&mut self, duration: Duration) {
        self.clock
            .fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The first message of the initiator, which opens the responder's fence: a zero-length Write.
    pub(super) fn open_fence(&mut self) {
        self.a.post(&Work::write(u64::MAX, 1, 0).unsignaled());
        self.run_now();
    }
}

/// An engine with a test at the other end of its wire.
#[derive(Debug)]
pub(super) struct Scripted {
    pub(super) node: Node,
    pub(super) wire: Wire,
    peer: SimStream,
    clock: Arc<AtomicU64>,
    heard: Vec<u8>,
    pub(super) finished: bool,
}

impl Scripted {
    pub(super) fn new() -> Scripted {
        Scripted::with(&Shape::default(), agreed(true))
    }

    /// The engine is the initiator if the attachment says so.
    pub(super) fn with(shape: &Shape, attachment: Attachment) -> Scripted {
        let (memory, pd) = table();
        Scripted::on(shape, attachment, memory, pd)
    }

    /// An engine that shares memory with others.
    pub(super) fn on(shape: &Shape, attachment: Attachment, memory: Arc<MemoryTable>, pd: u32) -> Scripted {
        let clock = Arc::new(AtomicU64::new(0));
        let conditions = Conditions {
            latency: Duration::ZERO,
            mss: 1460,
            ..Conditions::default()
        };
        let (ours, peer, wire) = pair(conditions, &clock);
        let mut node = Node::new(shape, memory, pd, &clock);
        node.attach(&attachment, ours);
        Scripted {
            node,
            wire,
            peer,
            clock,
            heard: Vec::new(),
            finished: false,
        }
    }

    /// The peer sends these bytes, and the engine does what it can.
    pub(super) fn say(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = self
                .peer
                .send(&[Piece::of(rest)])
                .expect("the connection is there");
            rest = &rest[n..];
            self.run();
        }
    }

    /// The peer sends these bytes and does not listen: the engine does what it can.
    pub(super) fn say_unheard(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = self
                .peer
                .send(&[Piece::of(rest)])
                .expect("the connection is there");
            rest = &rest[n..];
            while self.node.pump() {}
        }
    }

    /// The peer sends an FPDU with this ULPDU.
    pub(super) fn say_ulpdu(&mut self, ulpdu: &[u8]) {
        self.say(&fpdu_of(ulpdu));
    }

    /// The peer sends FIN.
    pub(super) fn fin(&mut self) {
        self.peer.finish();
        self.run();
    }

    /// The peer sends RST.
    pub(super) fn rst(&mut self) {
        self.peer.reset();
        self.run();
    }

    /// Lets the engine do what it can now, and hears what it says.
    pub(super) fn run(&mut self) {
        loop {
            while self.node.pump() {}
            let mut buffer = [0; 65536];
            match self.peer.receive(&mut [PieceMut::of(&mut buffer)]) {
                Ok(0) => {
                    self.finished = true;
                    return;
                }
                Ok(n) => self.heard.extend_from_slice(&buffer[..n]),
                Err(StreamError::WouldBlock | StreamError::Closed(_) | StreamError::Fault) => return,
            }
        }
    }

    pub(super) fn advance(&mut self, duration: Duration) {
        self.clock
            .fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
        self.run();
    }

    /// Takes what the engine has said since the last time.
    pub(super) fn heard(&mut self) -> Vec<u8> {
        self.run();
        std::mem::take(&mut self.heard)
    }

    /// Takes it as ULPDUs; CRCs must be right.
    pub(super) fn heard_ulpdus(&mut self) -> Vec<Vec<u8>> {
        let bytes = self.heard();
        let mut rest = &bytes[..];
        let mut ulpdus = Vec::new();
        while !rest.is_empty() {
            let (ulpdu, behind) = fpdu::parse(rest, CrcMode::On).expect("whole FPDUs with good CRCs");
            ulpdus.push(ulpdu.to_vec());
            rest = behind;
        }
        ulpdus
    }

    /// The payload of the Terminate that the engine must have sent, as its only FPDU, before its FIN.
    pub(super) fn terminate(&mut self) -> Vec<u8> {
        let ulpdus = self.heard_ulpdus();
        assert_eq!(ulpdus.len(), 1, "exactly a Terminate: {ulpdus:02x?}");
        assert!(self.finished, "FIN follows the Terminate");
        assert_eq!(self.node.engine.state(), QpState::Err);
        let header = hex("41 47 00000000 00000002 00000001 00000000");
        assert_eq!(ulpdus[0][..18], header[..], "header of a Terminate");
        ulpdus[0][18..].to_vec()
    }
}

/// The FPDU that carries a ULPDU, with CRC and without markers.
pub(super) fn fpdu_of(ulpdu: &[u8]) -> Vec<u8> {
    let mut buffer = vec![0; fpdu::fpdu_len(ulpdu.len())];
    fpdu::emit(ulpdu, CrcMode::On, &mut buffer);
    buffer
}

/// Bytes in hexadecimal, spaces ignored.
pub(super) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// A vector of the conformance tables.
pub(super) fn vector(name: &str) -> Vec<u8> {
    static VECTORS: &str = include_str!("../../../../wire/tests/vectors.json");
    let all: serde_json::Value = serde_json::from_str(VECTORS).unwrap();
    hex(all[name].as_str().unwrap_or_else(|| panic!("no vector {name}")))
}

/// A segment of a Send (RFC 5041 §4.3): control octets, MSN, MO, payload.
pub(super) fn send_segment(last: bool, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    untagged(if last { 0x41 } else { 0x01 }, 0x43, 0, 0, msn, mo, payload)
}

pub(super) fn untagged(ddp: u8, rdmap: u8, word: u32, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![ddp, rdmap];
    for field in [word, qn, msn, mo] {
        ulpdu.extend_from_slice(&field.to_be_bytes());
    }
    ulpdu.extend_from_slice(payload);
    ulpdu
}

pub(super) fn tagged(ddp: u8, rdmap: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![ddp, rdmap];
    ulpdu.extend_from_slice(&stag.to_be_bytes());
    ulpdu.extend_from_slice(&to.to_be_bytes());
    ulpdu.extend_from_slice(payload);
    ulpdu
}

/// A segment of a Write that is its last.
pub(super) fn write_segment(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    tagged(0xc1, 0x40, stag, to, payload)
}

/// The header of a Read Request, behind its DDP header.
pub(super) fn read_request(msn: u32, sink: (u32, u64), size: u32, source: (u32, u64)) -> Vec<u8> {
    let mut header = sink.0.to_be_bytes().to_vec();
    header.extend_from_slice(&sink.1.to_be_bytes());
    header.extend_from_slice(&size.to_be_bytes());
    header.extend_from_slice(&source.0.to_be_bytes());
    header.extend_from_slice(&source.1.to_be_bytes());
    untagged(0x41, 0x41, 0, 1, msn, 0, &header)
}

/// Bytes that differ from their neighbours.
pub(super) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8)) as u8).collect()
}

/// Reads a value at the front of bytes.
pub(super) fn be32(bytes: &[u8]) -> u32 {
    zerocopy::byteorder::big_endian::U32::read_from_prefix(bytes)
        .unwrap()
        .0
        .get()
}
