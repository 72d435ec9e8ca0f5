//! The driver's side of a completion queue's ring ([`cqe`](urnic_device::cqe)), and the conversion
//! of a completion for the program.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::cqe::{CONTENT, CQE_LEN, Cqe, CqeFlags, PHASE};
use urnic_device::record::CqRecord;
use urnic_rdma_core::{IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_WITH_INV, ibv_wc};
use zerocopy::little_endian::U32;

use super::ring::Ring;

/// In a completion's `qid`: its queue pair was destroyed, skip it. Valid numbers have 24 bits.
const DESTROYED: u32 = u32::MAX;

/// The ring, for the holder of the queue's lock.
pub(crate) struct CompletionRing {
    ring: Ring<CqRecord>,
    log_size: u32,
    /// Index of the completion in the ring's first slot on the first pass.
    base: u32,
    /// Completions taken, modulo 2^32.
    consumer: u32,
}

impl CompletionRing {
    /// Creates the driver's side of a zeroed ring and record.
    ///
    /// # Errors
    /// `ENOMEM` for a ring without memory.
    ///
    /// # Safety
    /// `ring` has `1 << log_size` entries, less than 2^31; ring and record outlive the value, and
    /// only the value moves the record's consumer index.
    pub(crate) unsafe fn new(
        ring: *mut u8,
        record: &CqRecord,
        log_size: u32,
    ) -> Result<CompletionRing, Errno> {
        let ring = NonNull::new(ring).ok_or(Errno::NOMEM)?;
        Ok(CompletionRing {
            // SAFETY: the caller promises a ring of this many entries, and its record.
            ring: unsafe { Ring::new(ring, CQE_LEN << log_size, record) },
            log_size,
            base: 0,
            consumer: 0,
        })
    }

    /// Continues with another ring, to which the device moved the completions that are not taken.
    ///
    /// # Errors
    /// `ENOMEM` for a ring without memory.
    ///
    /// # Safety
    /// The conditions of [`CompletionRing::new`], for the new ring.
    pub(crate) unsafe fn move_to(&mut self, ring: *mut u8, log_size: u32) -> Result<(), Errno> {
        let ring = NonNull::new(ring).ok_or(Errno::NOMEM)?;
        // SAFETY: the caller promises a ring of this many entries.
        unsafe { self.ring.move_to(ring, CQE_LEN << log_size) };
        (self.log_size, self.base) = (log_size, self.consumer);
        Ok(())
    }

    /// The position of the entry with this index.
    #[inline]
    fn place(&self, index: u32) -> usize {
        index.wrapping_sub(self.base) as usize * CQE_LEN
    }

    /// Whether the device has filled the entry with this index. It then belongs to the driver,
    /// until that publishes a consumer index behind it.
    #[inline]
    fn is_filled(&self, index: u32) -> bool {
        let pass = index.wrapping_sub(self.base) >> self.log_size & 1;
        // Acquire: data that the device wrote before the phase is read after it.
        let phase = self.ring.word(self.place(index) + PHASE).load(Ordering::Acquire);
        u32::from_le(phase) & 1 != pass
    }

    /// Whether there is a completion; entries of destroyed queue pairs are dropped first.
    #[inline]
    pub(crate) fn has_front(&mut self) -> bool {
        while self.is_filled(self.consumer) {
            let place = self.place(self.consumer) + offset_of!(Cqe, qid);
            if self.ring.read::<U32>(place).get() != DESTROYED {
                return true;
            }
            self.advance();
        }
        false
    }

    /// The oldest completion, after [`has_front`](Self::has_front).
    #[inline(always)]
    pub(crate) fn front(&self) -> Cqe {
        // Without the phase: that was the last that the device wrote, and a load of it together
        // with what is before waits until both are in the cache.
        self.ring.read_part(self.place(self.consumer), CONTENT)
    }

    /// Takes the oldest completion.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.consumer = self.consumer.wrapping_add(1);
    }

    /// Returns the taken entries to the device.
    #[inline]
    pub(crate) fn publish(&self) {
        self.ring
            .record()
            .consumer
            .store(self.consumer, Ordering::Release);
    }

    /// Index of the oldest completion that is not taken.
    #[inline]
    pub(crate) fn consumer(&self) -> u32 {
        self.consumer
    }

    /// Index behind the newest completion in the ring, taken or not.
    pub(crate) fn newest(&self) -> u32 {
        let places = (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i));
        let filled = places.take_while(|&index| self.is_filled(index)).count();
        self.consumer.wrapping_add(filled as u32)
    }

    /// The completions of a queue pair that are in the ring and not taken, oldest first.
    pub(crate) fn waiting(&self, qid: u32) -> impl Iterator<Item = Cqe> {
        let places = (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i));
        places
            .take_while(|&index| self.is_filled(index))
            .map(|index| self.ring.read::<Cqe>(self.place(index)))
            .filter(move |cqe| cqe.qid.get() == qid)
    }

    /// Drops all completions of a queue pair that makes no further completions.
    pub(crate) fn purge(&mut self, qid: u32) {
        for index in (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i)) {
            if !self.is_filled(index) {
                break;
            }
            let place = self.place(index) + offset_of!(Cqe, qid);
            if self.ring.read::<U32>(place).get() == qid {
                self.ring.put(place, U32::from(DESTROYED));
            }
        }
    }
}

/// The completion as `ibv_poll_cq` returns it; `wr_id` is the id of its work request.
#[inline]
pub(crate) fn work_completion(cqe: &Cqe, wr_id: u64) -> ibv_wc {
    ibv_wc {
        wr_id,
        status: cqe.status.into(),
        opcode: cqe.opcode.into(),
        vendor_err: cqe.vendor_error.get(),
        byte_len: cqe.byte_len.get(),
        imm_data: extra(cqe),
        qp_num: cqe.label.get(),
        src_qp: cqe.source_qpn.get(),
        wc_flags: flags(cqe),
        pkey_index: 0,
        slid: 0,
        sl: service_level(cqe),
        dlid_path_bits: 0,
    }
}

/// The `sl` of a completion: for a datagram the kind of its header, as Mellanox's adapters give it
/// (1: IPv6, 2: IPv4). UCX finds the destination address of the header by it.
#[inline]
pub(crate) fn service_level(cqe: &Cqe) -> u8 {
    let has = |flag: CqeFlags| cqe.flags & flag.bits() != 0;
    match (has(CqeFlags::DATAGRAM), has(CqeFlags::IPV6)) {
        (false, _) => 0,
        (true, true) => 1,
        (true, false) => 2,
    }
}

/// The `wc_flags` of a completion.
#[inline]
pub(crate) fn flags(cqe: &Cqe) -> u32 {
    let mut flags = 0;
    if cqe.flags & CqeFlags::WITH_IMM.bits() != 0 {
        flags |= IBV_WC_WITH_IMM;
    }
    if cqe.flags & CqeFlags::WITH_INV.bits() != 0 {
        flags |= IBV_WC_WITH_INV;
    }
    if cqe.flags & CqeFlags::DATAGRAM.bits() != 0 {
        flags |= IBV_WC_GRH;
    }
    flags
}

/// The `imm_data` of a completion: in network order as received, or the invalidated STag as a
/// number.
#[inline]
pub(crate) fn extra(cqe: &Cqe) -> u32 {
    u32::from_ne_bytes(cqe.extra)
}

/// Whether the completion belongs to a receive.
#[inline]
pub(crate) fn is_receive(cqe: &Cqe) -> bool {
    cqe.opcode & 0x80 != 0
}
