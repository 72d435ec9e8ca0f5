//! The driver's side of a send queue: a ring of 64-byte blocks shared with the device
//! ([`wqe`](urnic_device::wqe)).
//!
//! A slot is free again when its completion, or that of a later work request, was *polled*: the
//! rule of RNICs. Programs rely on this rule when they post until ENOMEM and size their completion
//! queue after the send queue. So the ring has space for as many entries of maximum length as there
//! are slots, and the driver never reads the progress of the device.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::io::Errno;
use urnic_device::record::{self, QueueRecord};
use urnic_device::wqe::{
    AtomicOperands, BLOCK_LEN, BindOperands, DatagramAddress, OPERANDS, Opcode, SendFlags, SendHeader, Sge,
    blocks,
};
use urnic_rdma_core::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, ibv_mw_bind_info,
    ibv_send_wr, ibv_sge,
};
use zerocopy::Unalign;

use super::ah::Ah;
use super::ledger::Ledger;
pub(crate) use super::send_entry::{Entry, SendRules, SendShape};
use super::unaligned::elements;
use crate::guard::contained;
use crate::probes;

mod check;

/// The maximum message length: 2 GiB.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The queue, for the holder of its lock.
pub(crate) struct SendQueue {
    ring: NonNull<u8>,
    record: NonNull<QueueRecord>,
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

// SAFETY: the pointers lead to the rings of the queue pair, which live as long as the queue and
// have no other writer.
unsafe impl Send for SendQueue {}

/// The operands of an operation.
enum Operands {
    /// Data to send, from memory or inline.
    Data,
    /// The destination of read data.
    Sink,
    /// Two operands, and the destination of the old value.
    Atomic,
    /// A memory window.
    Bind,
    /// The STag only.
    Invalidate,
}

impl SendQueue {
    /// Creates a queue on a zeroed ring and record.
    ///
    /// # Safety
    /// `ring` has `shape.blocks` blocks and `record` is a queue record; both outlive the queue, and
    /// only the queue writes the ring and the record's send producer.
    pub(crate) unsafe fn new(
        ring: NonNull<u8>,
        record: NonNull<QueueRecord>,
        shape: SendShape,
        rules: SendRules,
        ledger: Arc<Ledger>,
    ) -> SendQueue {
        SendQueue {
            ring,
            record,
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
    ///
    /// # Safety
    /// `wr` has the fields that its opcode requires; its element list and, if inline, its data can
    /// be read.
    #[inline]
    pub(crate) unsafe fn post(&mut self, wr: &ibv_send_wr) -> Result<(), Errno> {
        let (opcode, operands) = match wr.opcode {
            IBV_WR_SEND => (Opcode::Send, Operands::Data),
            IBV_WR_RDMA_WRITE => (Opcode::Write, Operands::Data),
            IBV_WR_RDMA_READ => (Opcode::Read, Operands::Sink),
            IBV_WR_SEND_WITH_IMM => (Opcode::SendImm, Operands::Data),
            IBV_WR_RDMA_WRITE_WITH_IMM => (Opcode::WriteImm, Operands::Data),
            IBV_WR_SEND_WITH_INV => (Opcode::SendInv, Operands::Data),
            IBV_WR_ATOMIC_CMP_AND_SWP => (Opcode::CompareSwap, Operands::Atomic),
            IBV_WR_ATOMIC_FETCH_AND_ADD => (Opcode::FetchAdd, Operands::Atomic),
            IBV_WR_LOCAL_INV => (Opcode::LocalInv, Operands::Invalidate),
            IBV_WR_BIND_MW => (Opcode::BindMw, Operands::Bind),
            _ => return Err(Errno::INVAL),
        };
        let mut entry = self.begin(opcode, wr.send_flags, wr.wr_id)?;
        match opcode {
            Opcode::Send | Opcode::SendImm if self.rules.is_datagrams() => {
                entry.header.immediate = wr.imm_data.to_ne_bytes();
                // SAFETY: the requests of a queue pair for datagrams fill `ud`.
                let ud = unsafe { wr.wr.ud };
                if ud.ah.is_null() {
                    return Err(Errno::INVAL);
                }
                // SAFETY: the program's address handle, which is live.
                let destination = unsafe { &Ah::of(ud.ah).destination };
                self.put_address(&entry, destination.address(ud.remote_qpn, ud.remote_qkey));
            }
            Opcode::SendImm => entry.header.immediate = wr.imm_data.to_ne_bytes(),
            Opcode::SendInv | Opcode::LocalInv => entry.header.stag = wr.imm_data.into(),
            Opcode::Write | Opcode::WriteImm | Opcode::Read => {
                // SAFETY: these opcodes fill `rdma`.
                let rdma = unsafe { wr.wr.rdma };
                entry.set_remote(rdma.rkey, rdma.remote_addr);
                entry.header.immediate = wr.imm_data.to_ne_bytes();
            }
            _ => {}
        }

        // A negative count becomes a large one.
        let count = wr.num_sge as u32;
        if count > self.shape.max_sge {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's list has `count` elements.
        let list = unsafe { elements(wr.sg_list, count as usize) };
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        match operands {
            Operands::Data if inline => {
                for sge in list.iter().map(Unalign::get) {
                    // SAFETY: the caller's data can be read, and is read immediately.
                    unsafe { self.put_inline(&mut entry, sge.addr as *const u8, sge.length as usize)? };
                }
            }
            _ if inline => return Err(Errno::INVAL),
            Operands::Data => self.put_list(&mut entry, list)?,
            Operands::Sink if count > self.rules.max_sge_read => return Err(Errno::INVAL),
            Operands::Sink => self.put_list(&mut entry, list)?,
            Operands::Atomic if count != 1 => return Err(Errno::INVAL),
            Operands::Atomic => {
                // SAFETY: these opcodes fill `atomic`.
                let atomic = unsafe { wr.wr.atomic };
                entry.set_remote(atomic.rkey, atomic.remote_addr);
                self.put_atomic(&mut entry, atomic.compare_add, atomic.swap);
                self.put_list(&mut entry, list)?;
            }
            Operands::Bind => {
                // SAFETY: this opcode fills `bind_mw`, whose region, if any, is live.
                unsafe { self.put_bind(&mut entry, wr.extra.bind_mw.rkey, &wr.extra.bind_mw.bind_info) };
            }
            Operands::Invalidate => {}
        }
        self.commit(&mut entry);
        Ok(())
    }

    /// Begins an entry for an operation, with a work request's flags. The caller adds operands and
    /// [commits](Self::commit) the entry.
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
        } && self.rules.has_opcode(opcode);
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
            let at = (self.block_offset() + OPERANDS) & (self.ring_len() - 1);
            // SAFETY: the second half of the first block of an unpublished entry.
            unsafe {
                self.ring
                    .as_ptr()
                    .add(at)
                    .cast::<DatagramAddress>()
                    .write_unaligned(address)
            };
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
    ///
    /// # Safety
    /// `data` has `len` readable bytes.
    pub(crate) unsafe fn set_inline(
        &mut self,
        entry: &mut Entry,
        data: *const u8,
        len: usize,
    ) -> Result<(), Errno> {
        match entry.opcode() {
            Some(
                Opcode::Read | Opcode::CompareSwap | Opcode::FetchAdd | Opcode::LocalInv | Opcode::BindMw,
            )
            | None => Err(Errno::INVAL),
            // SAFETY: the caller promises `len` readable bytes at `data`.
            Some(_) => unsafe { self.put_inline(entry, data, len) },
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

    /// Appends data to the entry's inline operands.
    ///
    /// # Safety
    /// `data` has `len` readable bytes.
    #[inline]
    unsafe fn put_inline(&mut self, entry: &mut Entry, data: *const u8, len: usize) -> Result<(), Errno> {
        let end = entry.operand_len.saturating_add(len);
        if end - entry.prefix > self.shape.max_inline as usize {
            return Err(Errno::INVAL);
        }
        let at = self.offset(entry);
        let first = len.min(self.ring_len() - at);
        // SAFETY: `at` + `first` is within the ring, and the rest is shorter than an entry, so it
        // is shorter than the part before `at`. The device reads neither part before they are
        // published.
        unsafe {
            ptr::copy_nonoverlapping(data, self.ring.as_ptr().add(at), first);
            if first < len {
                ptr::copy_nonoverlapping(data.add(first), self.ring.as_ptr(), len - first);
            }
        }
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
    ///
    /// # Safety
    /// `info.mr` is null or a region.
    #[inline]
    pub(crate) unsafe fn put_bind(&mut self, entry: &mut Entry, new_stag: u32, info: &ibv_mw_bind_info) {
        let mut bind = BindOperands::default();
        bind.offset = info.addr.into();
        bind.len = info.length.into();
        // SAFETY: the caller promises that `info.mr` is null or a region.
        bind.mr_stag = unsafe { info.mr.as_ref() }.map_or(0, |mr| mr.lkey).into();
        bind.access = info.mw_access_flags.into();
        bind.new_stag = new_stag.into();
        self.put(entry, bind);
    }

    /// Appends an operand whose length divides the length of a block, so it does not wrap.
    #[inline]
    fn put<T>(&mut self, entry: &mut Entry, operand: T) {
        const { assert!(BLOCK_LEN.is_multiple_of(size_of::<T>())) };
        let at = self.offset(entry);
        // SAFETY: `at` is within the ring and a multiple of the operand's length (the operands of
        // an atomic or bind start an entry, elements follow elements or 16 bytes), so the whole
        // operand is within the ring. The device does not read it yet.
        unsafe { self.ring.as_ptr().add(at).cast::<T>().write_unaligned(operand) };
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
        let at = self.block_offset();
        // SAFETY: a header fits in the block at `at`, which is within the ring and not published to
        // the device yet.
        unsafe {
            self.ring
                .as_ptr()
                .add(at)
                .cast::<SendHeader>()
                .write_unaligned(entry.header)
        };
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
        // SAFETY: the record outlives the queue, and is only accessed atomically.
        let record = unsafe { self.record.as_ref() };
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

    #[inline]
    fn ring_len(&self) -> usize {
        self.shape.blocks as usize * BLOCK_LEN
    }

    /// The position of the next entry's header, in bytes.
    #[inline]
    fn block_offset(&self) -> usize {
        (self.written as usize * BLOCK_LEN) & (self.ring_len() - 1)
    }

    /// The position of the entry's next operand, in bytes.
    #[inline]
    fn offset(&self, entry: &Entry) -> usize {
        (self.block_offset() + OPERANDS + entry.operand_len) & (self.ring_len() - 1)
    }
}
