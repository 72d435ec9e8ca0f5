//! The send queue, seen from the device.

use super::bad_wqe::BadWqe;
use crate::host::{Mapping, Record};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use urnic_device::record::{self, QueueRecord};
use urnic_device::wqe::{
    AtomicOperands, BLOCK_LEN, BindOperands, DatagramAddress, MAX_BLOCKS, MAX_SGE, OPERANDS, Opcode,
    SendFlags, SendHeader, Sge, blocks,
};
use zerocopy::FromBytes;

/// A send queue as the device sees it: the read position, and the entries that the driver may
/// overwrite.
///
/// Entries pass two marks: [`advance`](SendQueue::advance) takes one for execution,
/// [`retire`](SendQueue::retire) gives its blocks back once it is complete. Until then its operands
/// can be read through its [`SendWqe`].
#[derive(Debug)]
pub struct SendQueue {
    ring: Mapping,
    record: Arc<Record<QueueRecord>>,
    mask: u32,
    producer: u32,
    next: u32,
    retired: u32,
    taken: u32,
    /// Bytes of operands in front of the list or the data of an entry: the address of a datagram.
    prefix: usize,
    /// No entry that is posted from now on is taken.
    is_closed: bool,
}

/// The fixed part of an entry; its operands stay in the ring.
#[derive(Debug, Clone, Copy)]
pub struct SendWqe {
    /// The operation.
    pub opcode: Opcode,
    /// The flags of the entry.
    pub flags: SendFlags,
    /// Scatter/gather elements.
    pub num_sge: u8,
    /// Blocks, for [`SendQueue::advance`] and [`SendQueue::retire`].
    pub blocks: u8,
    /// Bytes of inline data.
    pub inline_len: u32,
    /// Returned in the completion.
    pub cookie: u64,
    /// The peer's tagged offset.
    pub remote_offset: u64,
    /// The peer's STag, or the STag to invalidate.
    pub stag: u32,
    /// Immediate data in wire order.
    pub immediate: [u8; 4],
    index: u32,
}

impl SendQueue {
    /// `ring` has `1 << log_size` blocks.
    pub(crate) fn new(ring: Mapping, record: Arc<Record<QueueRecord>>, log_size: u32) -> SendQueue {
        debug_assert_eq!(ring.len(), BLOCK_LEN << log_size);
        SendQueue {
            ring,
            record,
            mask: (1 << log_size) - 1,
            producer: 0,
            next: 0,
            retired: 0,
            taken: 0,
            prefix: 0,
            is_closed: false,
        }
    }

    /// The queue of a queue pair of kind UD: entries have a [`DatagramAddress`].
    pub(crate) fn of_datagrams(self) -> SendQueue {
        SendQueue {
            prefix: size_of::<DatagramAddress>(),
            ..self
        }
    }

    /// The same queue, for the engine that takes the place of this one's.
    pub(crate) fn same(&self) -> SendQueue {
        SendQueue {
            record: self.record.clone(),
            ..*self
        }
    }

    /// A new queue on the same ring: posted entries are dropped, and the indices continue.
    pub(crate) fn anew(&self) -> SendQueue {
        let at = self.record.sq_producer.load(Ordering::Acquire);
        self.record.sq_consumer.store(at, Ordering::Release);
        self.record.sq_event.store(at, Ordering::Release);
        SendQueue {
            record: self.record.clone(),
            producer: at,
            next: at,
            retired: at,
            taken: 0,
            is_closed: false,
            ..*self
        }
    }

    /// The next entry, if one is posted. It stays the next until [`advance`](SendQueue::advance).
    // An entry that is returned through memory and copied again costs more than its fields.
    #[inline(always)]
    pub fn peek(&mut self) -> Option<Result<SendWqe, BadWqe>> {
        if self.producer == self.next {
            self.read_producer();
            if self.producer == self.next {
                return None;
            }
        }
        Some(self.parse(self.next))
    }

    /// The entry after `wqe`, which was not taken yet, if that entry is posted and well-formed.
    #[inline]
    pub fn next_after(&mut self, wqe: &SendWqe) -> Option<SendWqe> {
        match self.is_last(wqe) {
            true => None,
            false => self.parse(wqe.index.wrapping_add(wqe.blocks.into())).ok(),
        }
    }

    /// Whether no entry is posted after `wqe`, which was not taken yet.
    #[inline]
    pub fn is_last(&mut self, wqe: &SendWqe) -> bool {
        let index = wqe.index.wrapping_add(wqe.blocks.into());
        if self.producer == index {
            self.read_producer();
        }
        self.producer == index
    }

    #[inline(always)]
    fn read_producer(&mut self) {
        if !self.is_closed {
            self.producer = self.record.sq_producer.load(Ordering::Acquire);
        }
    }

    /// Hides the entries that are posted from now on, until [`reopen`](SendQueue::reopen).
    pub(crate) fn close(&mut self) {
        self.read_producer();
        self.is_closed = true;
    }

    /// Shows all entries again.
    pub(crate) fn reopen(&mut self) {
        self.is_closed = false;
    }

    #[inline(always)]
    fn parse(&self, index: u32) -> Result<SendWqe, BadWqe> {
        let header: SendHeader = self.ring.read(self.offset(index));
        let bad = BadWqe {
            cookie: header.cookie.get(),
        };
        let posted = self.producer.wrapping_sub(index);
        // A driver that claims more blocks than the ring has is out of step.
        if self.producer.wrapping_sub(self.retired) > self.mask + 1 {
            return Err(bad);
        }
        let opcode = Opcode::from_raw(header.opcode).ok_or(bad)?;
        let wqe = SendWqe {
            opcode,
            flags: SendFlags::from_bits_truncate(header.flags),
            num_sge: header.num_sge,
            blocks: header.blocks,
            inline_len: header.inline_len.get(),
            cookie: header.cookie.get(),
            remote_offset: header.remote_offset.get(),
            stag: header.stag.get(),
            immediate: header.immediate,
            index,
        };
        let blocks_needed = match wqe.operand_len() {
            Some(len) => blocks(self.prefix + len),
            None => return Err(bad),
        };
        let taken = usize::from(wqe.blocks);
        if taken < blocks_needed || taken > MAX_BLOCKS || taken as u32 > posted {
            return Err(bad);
        }
        Ok(wqe)
    }

    /// Takes the entry that [`peek`](SendQueue::peek) returned.
    #[inline]
    pub fn advance(&mut self, blocks: u8) {
        self.next = self.next.wrapping_add(blocks.into());
        self.taken = self.taken.wrapping_add(1);
    }

    /// Entries taken so far, modulo 2^32.
    pub(crate) fn taken(&self) -> u32 {
        self.taken
    }

    /// Whether entries that were taken and not released occupy half of the ring.
    #[inline]
    pub(crate) fn is_half_used(&self) -> bool {
        self.next.wrapping_sub(self.retired) > self.mask / 2
    }

    /// Gives an entry's blocks back to the driver, in the order of [`advance`](SendQueue::advance).
    #[inline]
    pub fn retire(&mut self, blocks: u8) {
        self.retired = self.retired.wrapping_add(blocks.into());
        self.record.sq_consumer.store(self.retired, Ordering::Release);
    }

    /// Takes and releases all entries after a malformed one, whose boundaries are unknown.
    pub fn discard(&mut self) {
        self.producer = self.record.sq_producer.load(Ordering::Acquire);
        self.next = self.producer;
        self.retired = self.producer;
        self.record.sq_consumer.store(self.retired, Ordering::Release);
    }

    /// Whether entries are posted that were not taken.
    pub fn has_posted(&self) -> bool {
        let producer = match self.is_closed {
            true => self.producer,
            false => self.record.sq_producer.load(Ordering::Acquire),
        };
        producer != self.next
    }

    /// Requests a doorbell when the producer index passes the taken entries by `blocks`; 0 = at the
    /// next post. For 0, returns whether an entry is posted that was not taken: the driver possibly
    /// does not ring for that entry.
    pub(crate) fn ring_after(&mut self, blocks: u32) -> bool {
        let record = &self.record;
        let at = self.next.wrapping_add(blocks);
        let posted = record::sleep_at(&record.sq_producer, &record.sq_event, at);
        blocks == 0 && posted != self.next
    }

    /// Requests a ring when `blocks` more blocks are posted than now. The driver may not ring for
    /// blocks that it posts at this moment, so the caller must also continue without a ring.
    pub(crate) fn ring_after_more(&mut self, blocks: u32) {
        let record = &self.record;
        let posted = record.sq_producer.load(Ordering::Relaxed);
        record::sleep_at(&record.sq_producer, &record.sq_event, posted.wrapping_add(blocks));
    }

    /// Element `n` of an entry's list; the empty one if there is none.
    #[inline(always)]
    pub fn sge(&self, wqe: &SendWqe, n: usize) -> Sge {
        let first = match wqe.opcode {
            Opcode::CompareSwap | Opcode::FetchAdd => size_of::<AtomicOperands>(),
            _ => 0,
        };
        if n >= usize::from(wqe.num_sge) {
            return Sge::default();
        }
        self.operand(wqe, self.prefix + first + n * size_of::<Sge>())
    }

    /// Element `n` of an entry's list, if there is one.
    #[inline]
    pub fn element(&self, wqe: &SendWqe, n: usize) -> Option<Sge> {
        (n < usize::from(wqe.num_sge)).then(|| self.sge(wqe, n))
    }

    /// Copies an entry's inline data out, from `at` on; both ends must lie inside.
    pub fn inline(&self, wqe: &SendWqe, at: usize, into: &mut [u8]) {
        assert!(at + into.len() <= wqe.inline_len as usize);
        self.operand_bytes(wqe, self.prefix + at, into);
    }

    /// The destination of a datagram.
    pub fn address(&self, wqe: &SendWqe) -> DatagramAddress {
        self.operand(wqe, 0)
    }

    /// The operands of an atomic.
    pub fn atomic(&self, wqe: &SendWqe) -> AtomicOperands {
        self.operand(wqe, 0)
    }

    /// The operands of a window bind.
    pub fn bind(&self, wqe: &SendWqe) -> BindOperands {
        self.operand(wqe, 0)
    }

    /// A structure among the operands. Its size divides a block and its position is a multiple of
    /// its size, so it does not wrap around the ring's end.
    #[inline]
    fn operand<T: FromBytes>(&self, wqe: &SendWqe, at: usize) -> T {
        const { assert!(OPERANDS.is_multiple_of(size_of::<T>())) };
        self.ring.read(self.operand_offset(wqe, at))
    }

    #[inline]
    fn operand_offset(&self, wqe: &SendWqe, at: usize) -> usize {
        (self.offset(wqe.index) + OPERANDS + at) & (self.ring.len() - 1)
    }

    /// Copies from an entry, which may wrap around the ring's end.
    fn operand_bytes(&self, wqe: &SendWqe, at: usize, into: &mut [u8]) {
        let start = self.operand_offset(wqe, at);
        let (head, tail) = into.split_at_mut(into.len().min(self.ring.len() - start));
        self.ring.copy_out(start, head);
        if !tail.is_empty() {
            self.ring.copy_out(0, tail);
        }
    }

    #[inline]
    fn offset(&self, index: u32) -> usize {
        (index & self.mask) as usize * BLOCK_LEN
    }
}

impl SendWqe {
    /// Bytes of operands; `None` if the entry contradicts itself.
    fn operand_len(&self) -> Option<usize> {
        let sges = usize::from(self.num_sge);
        let inline = self.flags.contains(SendFlags::INLINE);
        if sges > MAX_SGE || (inline && sges > 0) || (!inline && self.inline_len > 0) {
            return None;
        }
        Some(match self.opcode {
            Opcode::Read | Opcode::ReadInv if inline => return None,
            // The Read invalidates the STag of its only element.
            Opcode::ReadInv if sges != 1 => return None,
            Opcode::CompareSwap | Opcode::FetchAdd => {
                if inline || sges != 1 {
                    return None;
                }
                size_of::<AtomicOperands>() + size_of::<Sge>()
            }
            Opcode::LocalInv => 0,
            Opcode::BindMw => size_of::<BindOperands>(),
            _ if inline => usize::try_from(self.inline_len).ok()?,
            _ => sges * size_of::<Sge>(),
        })
    }
}
