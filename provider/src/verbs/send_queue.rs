//! The driver's side of a send queue: a ring of 64-byte blocks shared with the device
//! ([`wqe`](urnic_device::wqe)).
//!
//! A slot is free again when its completion, or that of a later work request, was *polled*: the
//! rule of RNICs. Programs rely on this rule when they post until ENOMEM and size their completion
//! queue after the send queue. So the ring has space for as many entries of maximum length as there
//! are slots, and the driver never reads the progress of the device.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::record::{self, QueueRecord};
use urnic_device::vocabulary::QpKind;
use urnic_device::wqe::{
    AtomicOperands, BLOCK_LEN, BindOperands, DatagramAddress, OPERANDS, Opcode, SendFlags, SendHeader, Sge,
    blocks,
};
use urnic_rdma_core::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, ibv_send_wr, ibv_sge,
};
use zerocopy::{IntoBytes, Unalign};

use super::ah::Ah;
use super::ledger::Ledger;
use crate::from_c::{Bind, Data, Operands, Request};
use crate::guard::contained;
use crate::probes;
use crate::strict::{self, Element};
use urnic_driver::Reason;
use urnic_driver::rings::Ring;

/// The maximum message length: 2 GiB.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The size of a send queue. The ring holds as many entries of maximum length as there are slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendShape {
    /// Maximum number of outstanding work requests.
    pub(crate) slots: u32,
    /// Maximum number of scatter/gather elements of a work request.
    pub(crate) max_sge: u32,
    /// Maximum number of inline bytes of a work request.
    pub(crate) max_inline: u32,
    /// The number of blocks in the ring, a power of two.
    pub(crate) blocks: u32,
}

/// Further limits on posting, from the device and from the creation of the queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendRules {
    /// The service of the queue pair.
    pub(crate) kind: QpKind,
    /// Every work request makes a completion (`sq_sig_all`).
    pub(crate) signal_all: bool,
    /// Maximum number of elements of an RDMA Read.
    pub(crate) max_sge_read: u32,
    /// The device supports atomics.
    pub(crate) atomics: bool,
    /// The device supports immediate data.
    pub(crate) immediate: bool,
    /// The device supports memory windows.
    pub(crate) windows: bool,
}

impl SendRules {
    #[inline]
    pub(super) fn is_datagrams(&self) -> bool {
        self.kind == QpKind::UnreliableDatagram
    }
}

/// The queue, for the holder of its lock.
pub(crate) struct SendQueue {
    ring: Ring<QueueRecord>,
    ledger: Arc<Ledger>,
    rules: SendRules,
    shape: SendShape,
    /// The number of blocks written.
    written: u32,
    /// The number of blocks published to the device.
    published: u32,
    /// The number of slots taken.
    posted: u32,
    /// Slots before this one are free, according to the last read of the ledger.
    settled: u32,
}

/// An incomplete entry: its header, and the current length of its operands.
#[derive(Clone, Copy, Default)]
pub(crate) struct Entry {
    pub(crate) header: SendHeader,
    pub(super) operand_len: usize,
    /// Bytes of operands in front of the list or the data: the address of a datagram.
    pub(super) prefix: usize,
    pub(super) wr_id: u64,
}

impl Entry {
    pub(super) fn opcode(&self) -> Option<Opcode> {
        Opcode::from_raw(self.header.opcode)
    }

    /// Sets the peer's memory that the operation accesses.
    pub(crate) fn set_remote(&mut self, stag: u32, offset: u64) {
        self.header.stag = stag.into();
        self.header.remote_offset = offset.into();
    }

    /// Removes elements and inline data.
    pub(crate) fn clear_data(&mut self) {
        self.operand_len = self.prefix;
        self.operand_len += match self.opcode() {
            Some(Opcode::CompareSwap | Opcode::FetchAdd) => size_of::<AtomicOperands>(),
            Some(Opcode::BindMw) => size_of::<BindOperands>(),
            _ => 0,
        };
        self.header.num_sge = 0;
        self.header.inline_len = 0.into();
        self.header.flags &= !SendFlags::INLINE.bits();
    }
}

impl SendQueue {
    /// Creates a queue on a zeroed ring and record.
    ///
    /// # Safety
    /// `ring` has `shape.blocks` blocks; ring and record outlive the queue, and only the queue
    /// writes the ring and the record's send producer.
    pub(crate) unsafe fn new(
        ring: NonNull<u8>,
        record: &QueueRecord,
        shape: SendShape,
        rules: SendRules,
        ledger: Arc<Ledger>,
    ) -> SendQueue {
        SendQueue {
            // SAFETY: the caller promises a ring of this many blocks, and its record.
            ring: unsafe { Ring::new(ring, shape.blocks as usize * BLOCK_LEN, record) },
            ledger,
            rules,
            shape,
            written: 0,
            published: 0,
            posted: 0,
            settled: 0,
        }
    }

    /// Writes a work request behind the others. The device does not see it before
    /// [`publish`](Self::publish).
    ///
    /// Errors: NOMEM when all slots are taken, INVAL for an invalid request.
    #[inline(always)]
    pub(crate) fn post(&mut self, wr: Request<'_, ibv_send_wr>) -> Result<(), Errno> {
        let (opcode, operands) = wr.operation().ok_or(Errno::INVAL)?;
        let mut entry = self.begin(opcode, wr.send_flags, wr.wr_id)?;
        match opcode {
            Opcode::Send | Opcode::SendImm if self.rules.is_datagrams() => {
                entry.header.immediate = wr.imm_data.to_ne_bytes();
                // SAFETY: this is a queue pair for datagrams.
                let (handle, qpn, qkey) = unsafe { wr.peer::<Ah>() }.ok_or(Errno::INVAL)?;
                self.put_address(&entry, handle.destination.address(qpn, qkey));
            }
            Opcode::SendImm => entry.header.immediate = wr.imm_data.to_ne_bytes(),
            Opcode::SendInv | Opcode::LocalInv => entry.header.stag = wr.imm_data.into(),
            _ => {}
        }
        let list = wr.elements(self.shape.max_sge).ok_or(Errno::INVAL)?;
        let is_data = !matches!(opcode, Opcode::Read);
        match operands {
            Operands::Message | Operands::Rdma(_) if wr.is_inline() && is_data => {
                wr.inline_data(self.shape.max_sge)
                    .try_for_each(|piece| self.put_inline(&mut entry, piece))?;
            }
            _ if wr.is_inline() => return Err(Errno::INVAL),
            Operands::Message => self.put_list(&mut entry, list)?,
            Operands::Rdma(_) if !is_data && list.len() > self.rules.max_sge_read as usize => {
                return Err(Errno::INVAL);
            }
            Operands::Rdma(_) => self.put_list(&mut entry, list)?,
            Operands::Atomic(_) if list.len() != 1 => return Err(Errno::INVAL),
            Operands::Atomic(atomic) => {
                entry.set_remote(atomic.rkey, atomic.remote_addr);
                self.put_atomic(&mut entry, atomic.compare_add, atomic.swap);
                self.put_list(&mut entry, list)?;
            }
            Operands::Bind(present, key, bind) => {
                self.put_bind(&mut entry, key, bind);
                // Not all providers do that, but irdma's does, and programs rely on it.
                present.store(key, Ordering::Relaxed);
            }
            Operands::Invalidate => {}
        }
        if let Operands::Rdma(rdma) = operands {
            entry.set_remote(rdma.rkey, rdma.remote_addr);
            entry.header.immediate = wr.imm_data.to_ne_bytes();
        }
        self.commit(&mut entry);
        Ok(())
    }

    /// Begins an entry for an operation, with a work request's flags. The caller adds operands and
    /// [commits](Self::commit) the entry. The device fails an operation that the service of the
    /// queue pair does not have.
    ///
    /// Errors: NOMEM when all slots are taken, INVAL for invalid flags and operations.
    #[inline]
    pub(crate) fn begin(&mut self, opcode: Opcode, flags: u32, wr_id: u64) -> Result<Entry, Errno> {
        if !self.has_slot() {
            return Err(Errno::NOMEM);
        }
        let known = match opcode {
            Opcode::SendImm | Opcode::WriteImm => self.rules.immediate,
            Opcode::CompareSwap | Opcode::FetchAdd => self.rules.atomics,
            Opcode::BindMw => self.rules.windows,
            _ => true,
        };
        let flags = self.flags(flags)?;
        if !known {
            return Err(Errno::INVAL);
        }
        let header = SendHeader {
            opcode: opcode as u8,
            flags,
            ..SendHeader::default()
        };
        let prefix = match self.rules.is_datagrams() {
            true => size_of::<DatagramAddress>(),
            false => 0,
        };
        Ok(Entry {
            header,
            operand_len: prefix,
            prefix,
            wr_id,
        })
    }

    /// Sets the destination of a datagram.
    #[inline]
    pub(crate) fn put_address(&mut self, entry: &Entry, address: DatagramAddress) {
        if entry.prefix == size_of::<DatagramAddress>() {
            self.ring.put(self.block_offset() + OPERANDS, address);
        }
    }

    /// Whether one more work request fits.
    #[inline]
    fn has_slot(&mut self) -> bool {
        if self.posted.wrapping_sub(self.settled) < self.shape.slots {
            return true;
        }
        self.settled = self.ledger.sends_settled();
        self.posted.wrapping_sub(self.settled) < self.shape.slots
    }

    /// The device's flags for those of a work request.
    #[inline]
    fn flags(&self, flags: u32) -> Result<u8, Errno> {
        let mut ours = SendFlags::empty();
        ours.set(
            SendFlags::SIGNALED,
            self.rules.signal_all || flags & IBV_SEND_SIGNALED != 0,
        );
        ours.set(SendFlags::SOLICITED, flags & IBV_SEND_SOLICITED != 0);
        ours.set(SendFlags::FENCE, flags & IBV_SEND_FENCE != 0);
        ours.set(SendFlags::INLINE, flags & IBV_SEND_INLINE != 0);
        const KNOWN: u32 = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_FENCE | IBV_SEND_INLINE;
        if flags & !KNOWN != 0 {
            return Err(Errno::INVAL);
        }
        Ok(ours.bits())
    }

    /// Sets inline data, as [`put_inline`](Self::put_inline) does, after a check that the entry's
    /// operation supports inline data.
    pub(crate) fn set_inline(&mut self, entry: &mut Entry, data: Data<'_>) -> Result<(), Errno> {
        match entry.opcode() {
            Some(
                Opcode::Read | Opcode::CompareSwap | Opcode::FetchAdd | Opcode::LocalInv | Opcode::BindMw,
            )
            | None => Err(Errno::INVAL),
            Some(_) => self.put_inline(entry, data),
        }
    }

    /// Sets a list, as [`put_list`](Self::put_list) does, after a check against the entry's
    /// operation.
    pub(crate) fn set_list(&mut self, entry: &mut Entry, list: &[Unalign<ibv_sge>]) -> Result<(), Errno> {
        let (least, most) = match entry.opcode() {
            Some(Opcode::LocalInv | Opcode::BindMw) | None => return Err(Errno::INVAL),
            Some(Opcode::CompareSwap | Opcode::FetchAdd) => (1, 1),
            Some(Opcode::Read) => (0, self.rules.max_sge_read.min(self.shape.max_sge)),
            Some(_) => (0, self.shape.max_sge),
        };
        if !(least..=most as usize).contains(&list.len()) {
            return Err(Errno::INVAL);
        }
        self.put_list(entry, list)
    }

    /// Appends data to the entry's inline operands. An entry of most bytes is shorter than the
    /// ring.
    #[inline]
    fn put_inline(&mut self, entry: &mut Entry, data: Data<'_>) -> Result<(), Errno> {
        let end = entry.operand_len.saturating_add(data.len());
        if end - entry.prefix > self.shape.max_inline as usize {
            return Err(Errno::INVAL);
        }
        self.ring.copy_in(self.offset(entry), data.bytes());
        entry.operand_len = end;
        entry.header.inline_len = ((end - entry.prefix) as u32).into();
        entry.header.flags |= SendFlags::INLINE.bits();
        Ok(())
    }

    /// Appends elements to the entry's operands.
    #[inline]
    fn put_list(&mut self, entry: &mut Entry, list: &[Unalign<ibv_sge>]) -> Result<(), Errno> {
        let mut total = 0u64;
        for sge in list.iter().map(Unalign::get) {
            self.put(
                entry,
                Sge {
                    offset: sge.addr.into(),
                    len: sge.length.into(),
                    stag: sge.lkey.into(),
                },
            );
            total += u64::from(sge.length);
        }
        entry.header.num_sge = list.len() as u8;
        if total > MAX_MESSAGE.into() {
            return Err(Errno::INVAL);
        }
        Ok(())
    }

    /// Appends the operands of an atomic.
    #[inline]
    pub(crate) fn put_atomic(&mut self, entry: &mut Entry, compare_add: u64, swap: u64) {
        self.put(
            entry,
            AtomicOperands {
                compare_add: compare_add.into(),
                swap: swap.into(),
            },
        );
    }

    /// Appends the operands of a bind.
    #[inline]
    pub(crate) fn put_bind(&mut self, entry: &mut Entry, new_stag: u32, memory: Bind) {
        let mut bind = BindOperands::default();
        bind.offset = memory.addr.into();
        bind.len = memory.length.into();
        bind.mr_stag = memory.lkey.into();
        bind.access = memory.access.into();
        bind.new_stag = new_stag.into();
        self.put(entry, bind);
    }

    /// Appends an operand, which does not wrap: the operands of an atomic or bind start an entry,
    /// elements follow elements or 16 bytes.
    #[inline]
    fn put<T: IntoBytes>(&mut self, entry: &mut Entry, operand: T) {
        self.ring.put(self.offset(entry), operand);
        entry.operand_len += size_of::<T>();
    }

    /// Ends an entry: writes the header before the operands and takes a slot.
    #[inline]
    pub(crate) fn commit(&mut self, entry: &mut Entry) {
        if self.ledger.is_observed() {
            self.show(entry);
        }
        let blocks = blocks(entry.operand_len);
        entry.header.blocks = blocks as u8;
        entry.header.cookie = u64::from(self.posted).into();
        self.ring.put(self.block_offset(), entry.header);
        self.ledger.enter_send(self.posted, entry.wr_id);
        probes::post_send(self.ledger.qpn(), entry.wr_id, entry.header.opcode);
        self.posted = self.posted.wrapping_add(1);
        self.written = self.written.wrapping_add(blocks as u32);
    }

    /// Publishes the written entries to the device. Returns the producer index to ring with, if the
    /// device requests a ring.
    #[inline]
    pub(crate) fn publish(&mut self) -> Option<u32> {
        let old = self.published;
        if old == self.written {
            return None;
        }
        self.published = self.written;
        if let Some(trace) = self.ledger.trace() {
            contained(|| trace.sends_published());
        }
        let record = self.ring.record();
        record::publish(&record.sq_producer, &record.sq_event, old, self.written).then_some(self.written)
    }

    /// Whether written entries are not published.
    pub(crate) fn is_waiting(&self) -> bool {
        self.published != self.written
    }

    /// The mark for [`rewind`](Self::rewind).
    pub(crate) fn mark(&self) -> (u32, u32) {
        (self.written, self.posted)
    }

    /// Removes entries that were written after the mark and not published.
    pub(crate) fn rewind(&mut self, (written, posted): (u32, u32)) {
        self.written = written;
        self.posted = posted;
        if let Some(check) = self.ledger.check() {
            check.sends_taken_back(posted);
        }
        if let Some(trace) = self.ledger.trace() {
            trace.sends_taken_back(posted);
        }
    }

    /// The queue was emptied (RESET): published entries do not complete any more, and unpublished
    /// entries are never published. Indices continue. Returns the number of slots taken so far.
    pub(crate) fn discard(&mut self) -> u32 {
        self.written = self.published;
        self.settled = self.posted;
        self.posted
    }

    /// The position of the next entry's header.
    #[inline]
    fn block_offset(&self) -> usize {
        self.written as usize * BLOCK_LEN
    }

    /// The position of the entry's next operand.
    #[inline]
    fn offset(&self, entry: &Entry) -> usize {
        self.block_offset() + OPERANDS + entry.operand_len
    }

    /// Passes an entry to the observers of requests (`strict`, `trace`). `strict` may redirect the
    /// bytes that a Read fetches.
    #[cold]
    fn show(&mut self, entry: &mut Entry) {
        let Some(opcode) = entry.opcode() else { return };
        let lists = match opcode {
            Opcode::LocalInv | Opcode::BindMw => 0,
            _ => usize::from(entry.header.num_sge),
        };
        // The elements are the last operands.
        let first = entry.operand_len.saturating_sub(lists * size_of::<Sge>());
        let elements: Vec<Element> = (0..lists)
            .map(|number| {
                let at = self.block_offset() + OPERANDS + first + number * size_of::<Sge>();
                let sge: Sge = self.ring.read(at);
                Element {
                    key: sge.stag.get(),
                    offset: sge.offset.get(),
                    len: sge.len.get(),
                }
            })
            .collect();
        let mut held = None;
        contained(|| {
            let (slot, wr_id, opcode) = (self.posted, entry.wr_id, opcode.completion());
            if let Some(check) = self.ledger.check() {
                held = check.send_posted(&strict::Request {
                    slot,
                    wr_id,
                    opcode,
                    signalled: entry.header.flags & SendFlags::SIGNALED.bits() != 0,
                    elements: &elements,
                });
            }
            if let Some(trace) = self.ledger.trace() {
                let bytes = elements.iter().map(|element| u64::from(element.len)).sum::<u64>();
                let inline = u64::from(entry.header.inline_len.get());
                trace.send_posted(slot, wr_id, opcode, bytes + inline);
            }
        });
        if let Some(Element { key, offset, len }) = held {
            entry.clear_data();
            entry.header.num_sge = 1;
            self.put(
                entry,
                Sge {
                    offset: offset.into(),
                    len: len.into(),
                    stag: key.into(),
                },
            );
        }
    }

    /// Why [`post`](Self::post) refuses a request although the queue has room.
    #[cold]
    pub(super) fn why_refused(&self, wr: Request<'_, ibv_send_wr>) -> Reason {
        let elements = wr.num_sge as u32;
        let exceeds = |argument, given, limit, most: u32| Reason::Exceeds {
            argument,
            given,
            limit,
            most: most.into(),
        };
        let operation = wr.operation().map(|(opcode, _)| opcode);
        let known = operation.is_some();
        if known && elements > self.shape.max_sge {
            return exceeds("num_sge", elements.into(), "max_send_sge", self.shape.max_sge);
        }
        if operation == Some(Opcode::Read) && elements > self.rules.max_sge_read {
            return exceeds("num_sge", elements.into(), "max_sge_rd", self.rules.max_sge_read);
        }
        let inline = wr.inline_data(self.shape.max_sge);
        let inline = inline.fold(0u64, |sum, piece| sum + piece.len() as u64);
        if known && inline > self.shape.max_inline.into() {
            let argument = "bytes with IBV_SEND_INLINE:";
            return exceeds(argument, inline, "max_inline_data", self.shape.max_inline);
        }
        Reason::NoSuchRequest {
            opcode: wr.opcode,
            flags: wr.send_flags,
            elements,
        }
    }
}
