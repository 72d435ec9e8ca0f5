//! Queues from the driver's side.

use super::host::{Anywhere, Block};
use crate::host::Record;
use crate::queues::{CompletionQueue, ReceiveQueue, SharedReceiveQueue};
use std::rc::Rc;
use std::sync::Arc;
use urnic_device::cqe::{CQE_LEN, Cqe};
use urnic_device::record::{CqRecord, QueueRecord};
use urnic_device::vocabulary::Access;
use urnic_device::wqe::{
    AtomicOperands, BLOCK_LEN, BindOperands, MAX_SGE, Opcode, SendFlags, SendHeader, Sge,
};
use urnic_testkit::{self as testkit, Memory, request};
use zerocopy::IntoBytes;

/// A completion queue: the device's side and the driver's.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) queue: Arc<CompletionQueue>,
    driver: testkit::CompletionQueue<Block>,
}

impl Cq {
    pub(super) fn new(id: u32, log_size: u32) -> Cq {
        let ring = Block::new(CQE_LEN << log_size);
        let record = Block::new(size_of::<CqRecord>());
        let device = Record::new(&Anywhere, record.iova()).unwrap();
        let queue = CompletionQueue::new(
            id,
            0,
            ring.mapping(CQE_LEN << log_size),
            device,
            log_size,
            None,
            true,
        );
        Cq {
            queue: Arc::new(queue),
            driver: testkit::CompletionQueue::new(ring, record, log_size),
        }
    }

    pub(crate) fn poll(&mut self) -> Option<Cqe> {
        self.driver.poll()
    }
}

/// A work request of a test.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    header: SendHeader,
    sges: Vec<Sge>,
    inline: Option<Vec<u8>>,
    operands: Vec<u8>,
}

impl Work {
    pub(crate) fn new(opcode: Opcode, cookie: u64) -> Work {
        Work {
            header: request(opcode, cookie),
            sges: Vec::new(),
            inline: None,
            operands: Vec::new(),
        }
    }

    pub(crate) fn send(cookie: u64) -> Work {
        Work::new(Opcode::Send, cookie)
    }

    pub(crate) fn write(cookie: u64, stag: u32, to: u64) -> Work {
        Work::new(Opcode::Write, cookie).to(stag, to)
    }

    pub(crate) fn read(cookie: u64, stag: u32, to: u64) -> Work {
        Work::new(Opcode::Read, cookie).to(stag, to)
    }

    pub(crate) fn to(mut self, stag: u32, to: u64) -> Work {
        self.header.stag = stag.into();
        self.header.remote_offset = to.into();
        self
    }

    pub(crate) fn flags(mut self, flags: SendFlags) -> Work {
        self.header.flags |= flags.bits();
        self
    }

    pub(crate) fn unsignaled(mut self) -> Work {
        self.header.flags &= !SendFlags::SIGNALED.bits();
        self
    }

    pub(crate) fn sge(mut self, sge: Sge) -> Work {
        self.sges.push(sge);
        self
    }

    pub(crate) fn inline(mut self, bytes: &[u8]) -> Work {
        self.inline = Some(bytes.to_vec());
        self.flags(SendFlags::INLINE)
    }

    pub(crate) fn immediate(mut self, immediate: [u8; 4]) -> Work {
        self.header.immediate = immediate;
        self
    }

    pub(crate) fn atomic(mut self, compare_add: u64, swap: u64) -> Work {
        let operands = AtomicOperands {
            compare_add: compare_add.into(),
            swap: swap.into(),
        };
        self.operands = operands.as_bytes().to_vec();
        self
    }

    pub(crate) fn bind(mut self, operands: BindOperands) -> Work {
        self.operands = operands.as_bytes().to_vec();
        self
    }

    /// The request's blocks.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut operands = self.operands.clone();
        operands.extend_from_slice(self.sges.as_bytes());
        operands.extend_from_slice(self.inline.as_deref().unwrap_or_default());
        let mut header = self.header;
        header.inline_len = self.inline.as_ref().map_or(0, |i| i.len() as u32).into();
        let sges = self.sges.len();
        let (mut bytes, blocks) = testkit::SendQueue::<Block>::entry(header, &operands, sges);
        bytes.resize(blocks as usize * BLOCK_LEN, 0);
        bytes
    }
}

/// The parameters of a test's queue pair.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) qid: u32,
    pub(crate) sq_log: u32,
    pub(crate) rq_log: u32,
    pub(crate) cq_log: u32,
    pub(crate) access: Access,
    pub(crate) extensions: bool,
    pub(crate) shared: Option<Arc<SharedReceiveQueue>>,
    pub(crate) infiniband: bool,
    /// Kind UC.
    pub(crate) unreliable: bool,
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
            infiniband: false,
            unreliable: false,
        }
    }
}

const RQ_STRIDE_LOG: u32 = 10;

/// A receive queue from the driver's side.
#[derive(Debug)]
pub(crate) struct Receives(testkit::ReceiveQueue<Rc<Block>>);

impl Receives {
    pub(crate) fn new(log_size: u32) -> (Receives, ReceiveQueue) {
        let record = Rc::new(Block::new(size_of::<QueueRecord>()));
        Receives::with_record(log_size, record)
    }

    pub(super) fn with_record(log_size: u32, record: Rc<Block>) -> (Receives, ReceiveQueue) {
        let ring = Rc::new(Block::new(1 << (log_size + RQ_STRIDE_LOG)));
        let device = Arc::new(Record::new(&Anywhere, record.iova()).unwrap());
        let mapping = ring.mapping(1 << (log_size + RQ_STRIDE_LOG));
        let queue = ReceiveQueue::new(mapping, device, log_size, RQ_STRIDE_LOG);
        let driver = testkit::ReceiveQueue::new(ring, record, log_size, RQ_STRIDE_LOG);
        (Receives(driver), queue)
    }

    /// Posts a receive. The test runs the engine itself, so no doorbell is needed.
    pub(crate) fn post(&mut self, cookie: u64, sges: &[Sge]) {
        let _doorbell = self.0.post(cookie, sges);
    }

    /// Posts an entry with more elements than are possible.
    pub(crate) fn post_malformed(&mut self, cookie: u64) {
        self.post(cookie, &[Sge::default(); MAX_SGE + 1]);
    }
}
