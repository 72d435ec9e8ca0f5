//! Rings that the driver fills: the two queues of a queue pair.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use urnic_device::record::{QueueRecord, must_ring};
use urnic_device::wqe::{self, BLOCK_LEN, RecvHeader, SendFlags, SendHeader, Sge};
use zerocopy::IntoBytes;

use crate::memory::Memory;

/// A signalled request without operands.
pub fn request(opcode: wqe::Opcode, cookie: u64) -> SendHeader {
    SendHeader {
        opcode: opcode as u8,
        flags: SendFlags::SIGNALED.bits(),
        cookie: cookie.into(),
        ..SendHeader::default()
    }
}

/// Publishes a producer index; returns whether the device requires a doorbell.
/// `urnic_device::record` has a function for it, too, but on loom's atomics under loom.
fn publish(producer: &AtomicU32, event: &AtomicU32, old: u32, new: u32) -> bool {
    producer.store(new, Ordering::Release);
    fence(Ordering::SeqCst);
    must_ring(event.load(Ordering::Relaxed), new, old)
}

/// The driver's side of a send queue.
#[derive(Debug)]
pub struct SendQueue<M> {
    ring: M,
    record: M,
    log_blocks: u32,
    producer: u32,
}

impl<M: Memory> SendQueue<M> {
    /// An empty ring of `1 << log_blocks` blocks, with the queue pair's record.
    pub fn new(ring: M, record: M, log_blocks: u32) -> Self {
        SendQueue {
            ring,
            record,
            log_blocks,
            producer: 0,
        }
    }

    /// The producer index, in blocks.
    pub fn producer(&self) -> u32 {
        self.producer
    }

    /// The device's consumer index, in blocks.
    pub fn consumer(&self) -> u32 {
        let word = self.record.word(offset_of!(QueueRecord, sq_consumer));
        word.load(Ordering::Acquire)
    }

    /// The number of free blocks.
    pub fn room(&self) -> u32 {
        (1 << self.log_blocks) - self.producer.wrapping_sub(self.consumer())
    }

    /// The bytes of a request with these operands, of which `sges` are elements, and the number of
    /// its blocks.
    pub fn entry(mut header: SendHeader, operands: &[u8], sges: usize) -> (Vec<u8>, u32) {
        header.num_sge = sges as u8;
        header.blocks = wqe::blocks(operands.len()) as u8;
        ([header.as_bytes(), operands].concat(), header.blocks.into())
    }

    /// Writes bytes after the producer index, block by block.
    pub fn write(&self, entry: &[u8]) {
        for (index, block) in (self.producer..).zip(entry.chunks(BLOCK_LEN)) {
            let slot = index & ((1 << self.log_blocks) - 1);
            self.ring.write(slot as usize * BLOCK_LEN, block);
        }
    }

    /// Moves the producer index, without publishing it.
    pub fn advance(&mut self, blocks: u32) {
        self.producer = self.producer.wrapping_add(blocks);
    }

    /// Publishes the producer index, for any event index.
    pub fn store(&self) {
        let word = self.record.word(offset_of!(QueueRecord, sq_producer));
        word.store(self.producer, Ordering::Release);
    }

    /// Moves the producer index and publishes it; returns whether the device requires a doorbell.
    #[must_use]
    pub fn publish(&mut self, blocks: u32) -> bool {
        let old = self.producer;
        self.advance(blocks);
        let producer = self.record.word(offset_of!(QueueRecord, sq_producer));
        let event = self.record.word(offset_of!(QueueRecord, sq_event));
        publish(producer, event, old, self.producer)
    }
}

/// The driver's side of a receive queue.
#[derive(Debug)]
pub struct ReceiveQueue<M> {
    ring: M,
    record: M,
    log_entries: u32,
    log_stride: u32,
    producer: u32,
}

impl<M: Memory> ReceiveQueue<M> {
    /// An empty ring of `1 << log_entries` entries of `1 << log_stride` bytes, with the record of
    /// its queue pair.
    pub fn new(ring: M, record: M, log_entries: u32, log_stride: u32) -> Self {
        ReceiveQueue {
            ring,
            record,
            log_entries,
            log_stride,
            producer: 0,
        }
    }

    /// The producer index, in entries.
    pub fn producer(&self) -> u32 {
        self.producer
    }

    /// Writes a receive and moves the producer index, without publishing it.
    pub fn put(&mut self, cookie: u64, sges: &[Sge]) {
        let slot = self.producer & ((1 << self.log_entries) - 1);
        let at = (slot << self.log_stride) as usize;
        let header = RecvHeader::new(cookie, sges.len() as u16);
        self.ring.write(at, header.as_bytes());
        self.ring.write(at + size_of::<RecvHeader>(), sges.as_bytes());
        self.producer = self.producer.wrapping_add(1);
    }

    /// Posts a receive; returns whether the device requires a doorbell.
    #[must_use]
    pub fn post(&mut self, cookie: u64, sges: &[Sge]) -> bool {
        let old = self.producer;
        self.put(cookie, sges);
        let producer = self.record.word(offset_of!(QueueRecord, rq_producer));
        let event = self.record.word(offset_of!(QueueRecord, rq_event));
        publish(producer, event, old, self.producer)
    }
}
