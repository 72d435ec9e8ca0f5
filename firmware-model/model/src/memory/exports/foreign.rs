//! The table of another process on this host.

use super::layout::{
    ADDRESS, BASE, ENTRY, HEADER, KEYS, LEN, OF_DEVICE, PROCESS, PROOF, QID_ACCESS, STAG_PD, STATE, pair,
    table_len,
};
use crate::handshakes;
use crate::host::SharedMemory;
use crate::host::revocable::Condition;
use crate::memory::permutation::{DOMAIN, Permutation};
use crate::memory::violation::Need;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use urnic_device::vocabulary::Access;

/// Another process's table, as a peer reads it.
#[derive(Debug)]
pub(crate) struct ForeignTable {
    memory: SharedMemory,
    slots: u32,
    permutation: Permutation,
}

/// An access that the other process's table permits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permitted<'a> {
    /// The entry has not changed since.
    pub(crate) condition: Condition<'a>,
    /// Where the bytes are in the other process.
    pub(crate) address: u64,
    /// That is the process of the device's host, not the device's.
    pub(crate) is_at_host: bool,
    /// The entry's number.
    pub(crate) slot: u32,
}

impl ForeignTable {
    /// # Errors
    /// It is not a table with this number of entries.
    pub(crate) fn open(file: BorrowedFd<'_>, slots: u32) -> Result<ForeignTable, Errno> {
        if slots > DOMAIN {
            return Err(Errno::INVAL);
        }
        let memory = SharedMemory::open_to_read(file, table_len(slots))?;
        let keys = [0, 1, 2, 3].map(|n| memory.word64(KEYS + 8 * n).load(Ordering::Relaxed));
        Ok(ForeignTable {
            memory,
            slots,
            permutation: Permutation::of_keys(keys),
        })
    }

    /// The number that only readers of the table know, and its place in the table.
    pub(crate) fn proof(&self) -> (u64, usize) {
        (self.memory.word64(PROOF).load(Ordering::Relaxed), PROOF)
    }

    /// Checks an access of `len` bytes at tagged offset `offset` by a connection with this permit,
    /// as [`MemoryTable::check`](super::MemoryTable::check) does. What is not permitted here is
    /// left to the owner of the table, who knows the reason.
    #[inline]
    pub(crate) fn check(
        &self,
        stag: u32,
        (permit, qid): (u64, u32),
        offset: u64,
        len: u64,
        need: Need,
    ) -> Option<Permitted<'_>> {
        let right = match need {
            Need::RemoteRead => Access::REMOTE_READ,
            Need::RemoteWrite => Access::REMOTE_WRITE,
            Need::RemoteAtomic => Access::REMOTE_ATOMIC,
            Need::LocalRead | Need::LocalWrite => return None,
        };
        let slot = self.slot(stag);
        if slot >= self.slots {
            return None;
        }
        let word = |offset| self.word(slot, offset);
        let state = word(STATE).load(Ordering::Acquire);
        let read = |offset| word(offset).load(Ordering::Relaxed);
        let (stag_pd, qid_access) = (read(STAG_PD), read(QID_ACCESS));
        let (only, access) = ((qid_access >> 32) as u32, qid_access as u32);
        let rights = Access::from_bits_truncate(access & permit as u32);
        let (base, entry_len) = (read(BASE), read(LEN));
        let from_base = offset.wrapping_sub(base);
        let permitted = state & 1 == 1
            && stag_pd == pair(stag, (permit >> 32) as u32)
            && (only == 0 || only == qid)
            && rights.contains(right)
            && offset >= base
            && from_base <= entry_len
            && len <= entry_len - from_base;
        permitted.then(|| Permitted {
            // What was read belongs together if the state is still the same at the access.
            condition: Condition {
                word: word(STATE),
                value: state,
            },
            address: read(ADDRESS).wrapping_add(from_base),
            is_at_host: read(PROCESS) != OF_DEVICE,
            slot,
        })
    }

    /// The number of an STag's entry.
    #[inline]
    pub(crate) fn slot(&self, stag: u32) -> u32 {
        self.permutation.backward(stag >> 8)
    }

    #[inline]
    fn word(&self, slot: u32, offset: usize) -> &AtomicU64 {
        self.memory.word64(HEADER + slot as usize * ENTRY + offset)
    }

    /// The state of an entry that was permitted once.
    #[inline]
    pub(crate) fn state(&self, slot: u32) -> u64 {
        self.word(slot, STATE).load(Ordering::Acquire)
    }

    /// Where the memory of such an entry is in the other process, and its length, if they are of
    /// the state that the entry has before and afterwards.
    pub(crate) fn extent(&self, slot: u32) -> (u64, u64) {
        let read = |offset| self.word(slot, offset).load(Ordering::Acquire);
        (read(ADDRESS), read(LEN))
    }
}

/// The word in which this process says that a thread of its accesses memory of a peer.
#[derive(Debug)]
pub(crate) struct OwnGuard<'a>(&'a AtomicU64);

impl<'a> OwnGuard<'a> {
    /// `turn` differs from the one before.
    #[inline]
    pub(crate) fn set(word: &'a AtomicU64, turn: u32, thread: u32) -> OwnGuard<'a> {
        handshakes::set_guard(word, pair(turn, thread));
        OwnGuard(word)
    }
}

impl Drop for OwnGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        handshakes::clear_guard(self.0);
    }
}
