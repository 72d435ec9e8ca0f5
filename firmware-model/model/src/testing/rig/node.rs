//! A queue pair with its queues and memory.

use super::host::{Anywhere, Block, Region};
use super::queues::{Cq, Receives, Shape, Work};
use crate::counters::{Counter, Counters};
use crate::events::{Effect, Effects};
use crate::host::Record;
use crate::llp::buffers::BufferPool;
use crate::memory::{Backing, DomainUse, MemoryTable, PageRoom, Recent, Registration};
use crate::queues::{ReceiveSource, SendQueue};
use crate::rdmap::{Attachment, Engine, NoStream};
use crate::stream::Stream;
use crate::time::{Nanos, Now};
use crate::transport::{Env, Identity, Moved, QpChange, QpQueues, RxOutcome, TxOutcome};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use urnic_device::cqe::Cqe;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::record::QueueRecord;
use urnic_device::vocabulary::{Access, QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{BLOCK_LEN, Sge};
use urnic_testkit::Memory;

/// The memory has the expected contents.
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Page size of regions.
const PAGE: usize = 4096;

/// A queue pair with its queues and memory.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) identity: Identity,
    pub(crate) engine: Engine,
    pub(crate) stream: Box<dyn Stream>,
    pub(crate) memory: Arc<MemoryTable>,
    pub(crate) pd: u32,
    pub(crate) counters: Counters,
    pub(crate) events: Vec<Event>,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    pub(crate) receives: Receives,
    pub(crate) tx: TxOutcome,
    pub(crate) rx: RxOutcome,
    buffers: BufferPool,
    clock: Arc<AtomicU64>,
    sends: urnic_testkit::SendQueue<Rc<Block>>,
    /// The regions, which exist as long as the engine may use them.
    blocks: RefCell<Vec<Rc<Block>>>,
}

pub(crate) fn table() -> (Arc<MemoryTable>, u32) {
    let memory = MemoryTable::new(1000, 1000, 100, [1, 2, 3, 4, 5]);
    let pd = memory.domains().allocate().unwrap();
    (Arc::new(memory), pd)
}

impl Node {
    pub(crate) fn new(shape: &Shape, memory: Arc<MemoryTable>, pd: u32, clock: &Arc<AtomicU64>) -> Node {
        assert!(memory.domains().enter(pd, DomainUse::QueuePair));
        let record = Rc::new(Block::new(size_of::<QueueRecord>()));
        let sq = Rc::new(Block::new(BLOCK_LEN << shape.sq_log));
        let device = Arc::new(Record::new(&Anywhere, record.iova()).unwrap());
        let queue = SendQueue::new(sq.mapping(BLOCK_LEN << shape.sq_log), device, shape.sq_log);
        let (receives, own) = Receives::with_record(shape.rq_log, record.clone());
        let send_cq = Cq::new(1, shape.cq_log);
        let recv_cq = Cq::new(2, shape.cq_log);
        let identity = Identity {
            qid: shape.qid,
            label: 0x1234,
            pd,
            extensions: shape.extensions,
            infiniband: shape.infiniband,
            unreliable: shape.unreliable,
            last_first: false,
        };
        let queues = QpQueues {
            sq: queue,
            send_cq: send_cq.queue.clone(),
            rq: match &shape.shared {
                Some(shared) => ReceiveSource::Shared(shared.clone()),
                None => ReceiveSource::Own(own),
            },
            recv_cq: recv_cq.queue.clone(),
        };
        let mut engine = Engine::new(queues, identity.unreliable);
        let buffers = BufferPool::default();
        let counters = Counters::default();
        let mut effects = Effects::default();
        let mut env = Env {
            qp: &identity,
            memory: &memory,
            recent: Recent::default(),
            now: Now::at(Nanos(0)),
            buffers: &buffers,
            counters: &counters,
            effects: &mut effects,
            moved: Moved::default(),
            stopped: &RUNNING,
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
            identity,
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
            sends: urnic_testkit::SendQueue::new(sq, record, shape.sq_log),
            blocks: RefCell::default(),
        }
    }

    pub(crate) fn region(&self, len: usize, access: Access) -> Region {
        self.region_in(self.pd, len, access)
    }

    /// Regions of more than a page are page lists, which begin inside of their first page.
    pub(crate) fn region_in(&self, pd: u32, len: usize, access: Access) -> Region {
        let skip = if len > PAGE { 64 } else { 0 };
        self.region_after_gap(skip, pd, len, access)
    }

    /// A page list that begins `skip` bytes after the front of its first page, unless that is 0.
    fn region_after_gap(&self, skip: usize, pd: u32, len: usize, access: Access) -> Region {
        let block = Rc::new(Block::new(skip + len));
        self.blocks.borrow_mut().push(block.clone());
        let all = block.mapping(skip + len);
        let backing = match skip {
            0 => Backing::Contiguous {
                mapping: all,
                iova: block.iova(),
            },
            _ => Backing::Pages {
                log_page: PAGE.ilog2(),
                skip: skip as u64,
                pages: (0..skip + len)
                    .step_by(PAGE)
                    .map(|at| all.part(at, PAGE.min(skip + len - at)))
                    .collect(),
                iovas: (0..skip + len)
                    .step_by(PAGE)
                    .map(|at| block.iova() + at as u64)
                    .collect(),
                room: PageRoom::new(0).take(0).unwrap(),
            },
        };
        let base = block.iova() + skip as u64;
        let registration = Registration {
            pd,
            base,
            len: len as u64,
            access,
            backing: Arc::new(backing),
        };
        let stag = self.memory.register(registration).unwrap();
        Region {
            stag,
            base,
            len,
            skip,
            block,
        }
    }

    /// A region with these contents that everybody may use.
    pub(crate) fn filled(&self, bytes: &[u8]) -> Region {
        let region = self.region(bytes.len(), everything());
        region.write(0, bytes);
        region
    }

    /// Runs `f` with the engine and its surroundings.
    pub(crate) fn with<R>(&mut self, f: impl FnOnce(&mut Engine, &mut Env<'_>, &mut dyn Stream) -> R) -> R {
        let mut effects = Effects::default();
        let mut env = Env {
            qp: &self.identity,
            memory: &self.memory,
            recent: Recent::default(),
            now: Now::at(Nanos(self.clock.load(Ordering::Relaxed))),
            buffers: &self.buffers,
            counters: &self.counters,
            effects: &mut effects,
            moved: Moved::default(),
            stopped: &RUNNING,
        };
        let result = f(&mut self.engine, &mut env, &mut *self.stream);
        let events = effects.into_list().into_iter().filter_map(|effect| match effect {
            Effect::Event(event) => Some(event),
            _ => None,
        });
        self.events.extend(events);
        result
    }

    pub(crate) fn attach(&mut self, attachment: &Attachment, stream: impl Stream + 'static) {
        self.stream = Box::new(stream);
        self.with(|engine, env, stream| engine.attach(attachment, None, env, stream))
            .unwrap();
    }

    pub(crate) fn modify(&mut self, change: QpChange) {
        self.with(|engine, env, stream| engine.modify(&change, env, stream))
            .unwrap();
    }

    pub(crate) fn set_state(&mut self, state: QpState) {
        self.modify(QpChange {
            state: Some(state),
            ..QpChange::default()
        });
    }

    pub(crate) fn post(&mut self, work: &Work) {
        self.post_raw(&work.bytes());
    }

    /// Posts blocks as they are.
    pub(crate) fn post_raw(&mut self, blocks: &[u8]) {
        self.sends.write(blocks);
        let _doorbell = self.sends.publish(blocks.len().div_ceil(BLOCK_LEN) as u32);
    }

    /// Blocks of the send queue that the device has not given back.
    pub(crate) fn sq_outstanding(&self) -> u32 {
        self.sends.producer().wrapping_sub(self.sends.consumer())
    }

    pub(crate) fn sq_room(&self) -> u32 {
        self.sends.room()
    }

    pub(crate) fn post_recv(&mut self, cookie: u64, sges: &[Sge]) {
        self.receives.post(cookie, sges);
    }

    /// Runs the engine until it waits; returns whether it did anything.
    pub(crate) fn pump(&mut self) -> bool {
        let before = self.activity();
        if self
            .deadline()
            .is_some_and(|at| at.0 <= self.clock.load(Ordering::Relaxed))
        {
            self.with(|engine, env, stream| engine.tick(env, stream));
        }
        let received = self.counters.value(Counter::RxBytes);
        self.rx = self.with(|engine, env, stream| engine.receive(env, stream));
        if self.engine.owes_confirmation() {
            let idle = self.counters.value(Counter::RxBytes) == received;
            self.engine.confirm_alone(idle, false);
        }
        self.tx = self.with(|engine, env, stream| engine.transmit(env, stream));
        self.with(|engine, env, stream| engine.watch_peer(env, stream));
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

    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.engine.deadline()
    }

    /// Takes all completions of sends: cookie and status.
    pub(crate) fn sent(&mut self) -> Vec<(u64, WcStatus)> {
        std::iter::from_fn(|| self.send_cq.poll())
            .map(|cqe| (cqe.cookie.get(), status(&cqe)))
            .collect()
    }

    /// Takes all completions of receives: cookie, status, length.
    pub(crate) fn received(&mut self) -> Vec<(u64, WcStatus, u32)> {
        std::iter::from_fn(|| self.recv_cq.poll())
            .map(|cqe| (cqe.cookie.get(), status(&cqe), cqe.byte_len.get()))
            .collect()
    }

    /// Faults that were raised as events, with the Terminate's control word.
    pub(crate) fn faults(&self) -> Vec<(QpFault, u32)> {
        let faults = self.events.iter().filter(|e| e.kind == EventKind::QpError as u8);
        faults
            .map(|e| (QpFault::from_raw(e.code.get()).unwrap(), e.data.get() as u32))
            .collect()
    }

    pub(crate) fn has_event(&self, kind: EventKind) -> bool {
        self.events.iter().any(|e| e.kind == kind as u8)
    }

    pub(crate) fn count(&self, counter: Counter) -> u64 {
        self.counters.value(counter)
    }
}

pub(crate) fn everything() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::MW_BIND
}

pub(crate) fn status(cqe: &Cqe) -> WcStatus {
    WcStatus::from_raw(cqe.status).unwrap()
}

pub(crate) fn opcode(cqe: &Cqe) -> WcOpcode {
    WcOpcode::from_raw(cqe.opcode).unwrap()
}
