//! The driver's side of a completion queue's ring ([`cqe`](urnic_device::cqe)), and what a
//! completion looks like to the program.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use urnic_device::cqe::{Cqe, CqeFlags, PHASE};
use urnic_device::record::CqRecord;
use urnic_rdma_core::{IBV_WC_WITH_IMM, IBV_WC_WITH_INV, ibv_wc};

/// In a completion's `qid`: its queue pair is gone, skip it. Real numbers have 24 bits.
const GONE: u32 = u32::MAX;

/// The ring, as who holds the queue's lock sees it.
pub(crate) struct CompletionRing {
    ring: NonNull<Cqe>,
    record: NonNull<CqRecord>,
    log_size: u32,
    /// Index of the completion in the ring's first slot on the first pass.
    base: u32,
    /// Completions taken, modulo 2^32.
    consumer: u32,
}

// SAFETY: the pointers lead to the ring and record of the queue, which nobody else consumes and
// which live as long as it.
unsafe impl Send for CompletionRing {}

impl CompletionRing {
    /// Over a zeroed ring and record.
    ///
    /// # Safety
    /// `ring` has `1 << log_size` entries, less than 2^31 of them; both outlive the value, and only
    /// it moves the record's consumer index.
    pub(crate) unsafe fn new(ring: NonNull<Cqe>, record: NonNull<CqRecord>, log_size: u32) -> CompletionRing {
        CompletionRing {
            ring,
            record,
            log_size,
            base: 0,
            consumer: 0,
        }
    }

    /// Goes on with another ring, to which the device moved the completions that are not taken.
    ///
    /// # Safety
    /// As of [`CompletionRing::new`], for the new ring.
    pub(crate) unsafe fn move_to(&mut self, ring: NonNull<Cqe>, log_size: u32) {
        (self.ring, self.log_size, self.base) = (ring, log_size, self.consumer);
    }

    /// The entry with that index.
    #[inline]
    fn entry(&self, index: u32) -> *mut Cqe {
        let slot = index.wrapping_sub(self.base) & ((1 << self.log_size) - 1);
        // SAFETY: a slot is within the ring.
        unsafe { self.ring.as_ptr().add(slot as usize) }
    }

    /// Whether the device has filled the entry with that index.
    #[inline]
    fn is_filled(&self, index: u32) -> bool {
        let pass = index.wrapping_sub(self.base) >> self.log_size & 1;
        // SAFETY: the phase word of an entry is aligned, and both sides access it atomically.
        let phase = unsafe { AtomicU32::from_ptr(self.entry(index).byte_add(PHASE).cast()) };
        // Acquire: what the device wrote before the phase is read after it.
        u32::from_le(phase.load(Ordering::Acquire)) & 1 != pass
    }

    /// The oldest completion, if there is any; entries whose queue pair is gone are dropped on the
    /// way.
    #[inline]
    pub(crate) fn front(&mut self) -> Option<Cqe> {
        while self.is_filled(self.consumer) {
            // SAFETY: the entry is ours until we publish a consumer index behind it.
            let cqe = unsafe { ptr::read(self.entry(self.consumer)) };
            if cqe.qid.get() != GONE {
                return Some(cqe);
            }
            self.advance();
        }
        None
    }

    /// Takes the oldest completion.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.consumer = self.consumer.wrapping_add(1);
    }

    /// Gives the entries taken back to the device.
    #[inline]
    pub(crate) fn publish(&self) {
        // SAFETY: the record outlives us, and is only accessed atomically.
        let record = unsafe { self.record.as_ref() };
        record.consumer.store(self.consumer, Ordering::Release);
    }

    /// Index of the oldest completion not taken.
    #[inline]
    pub(crate) fn consumer(&self) -> u32 {
        self.consumer
    }

    /// Index behind the newest completion that is there, taken or not.
    pub(crate) fn newest(&self) -> u32 {
        let places = (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i));
        let filled = places.take_while(|&index| self.is_filled(index)).count();
        self.consumer.wrapping_add(filled as u32)
    }

    /// The completions of a queue pair that are there and not taken, oldest first.
    pub(crate) fn waiting(&self, qid: u32) -> impl Iterator<Item = Cqe> {
        let places = (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i));
        places
            .take_while(|&index| self.is_filled(index))
            // SAFETY: the entry is ours until we publish a consumer index behind it.
            .map(|index| unsafe { ptr::read(self.entry(index)) })
            .filter(move |cqe| cqe.qid.get() == qid)
    }

    /// Drops all completions of a queue pair that makes no more.
    pub(crate) fn purge(&mut self, qid: u32) {
        for index in (0..1u32 << self.log_size).map(|i| self.consumer.wrapping_add(i)) {
            if !self.is_filled(index) {
                break;
            }
            let entry = self.entry(index);
            // SAFETY: the entry is ours until we publish a consumer index behind it.
            unsafe {
                if (*entry).qid.get() == qid {
                    (*entry).qid = GONE.into();
                }
            }
        }
    }
}

/// The completion as `ibv_poll_cq` gives it; `wr_id` is that of its work request.
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
        src_qp: 0,
        wc_flags: flags(cqe),
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    }
}

/// `wc_flags` of a completion.
#[inline]
pub(crate) fn flags(cqe: &Cqe) -> u32 {
    let mut flags = 0;
    if cqe.flags & CqeFlags::WITH_IMM.bits() != 0 {
        flags |= IBV_WC_WITH_IMM;
    }
    if cqe.flags & CqeFlags::WITH_INV.bits() != 0 {
        flags |= IBV_WC_WITH_INV;
    }
    flags
}

/// `imm_data` of a completion: in network order as it came, or the invalidated STag as a number.
#[inline]
pub(crate) fn extra(cqe: &Cqe) -> u32 {
    u32::from_ne_bytes(cqe.extra)
}

/// Whether it completes a receive.
#[inline]
pub(crate) fn is_receive(cqe: &Cqe) -> bool {
    cqe.opcode & 0x80 != 0
}
