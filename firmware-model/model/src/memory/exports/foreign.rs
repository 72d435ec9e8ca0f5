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

/// The entry that was accessed last, as it was: what is read of it in a certain state stays true
/// as long as it has that state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastEntry {
    /// Whose access to what it permits.
    key: (u32, (u64, u32), Need),
    state: u64,
    base: u64,
    len: u64,
    address: u64,
    is_at_host: bool,
    slot: u32,
}

impl LastEntry {
    /// The place of an access in the process that has the memory.
    #[inline]
    fn place(&self, offset: u64, len: u64) -> Option<u64> {
        let from_base = offset.wrapping_sub(self.base);
        let is_inside = offset >= self.base && from_base <= self.len && len <= self.len - from_base;
        is_inside.then(|| self.address.wrapping_add(from_base))
    }
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
    /// left to the owner of the table, who knows the reason. `last` is the connection's own.
    #[inline(always)]
    pub(crate) fn check(
        &self,
        last: &mut Option<LastEntry>,
        stag: u32,
        by: (u64, u32),
        offset: u64,
        len: u64,
        need: Need,
    ) -> Option<Permitted<'_>> {
        let key = (stag, by, need);
        let is_last = |last: &&LastEntry| last.key == key && self.state(last.slot) == last.state;
        let entry = match last.as_ref().filter(is_last) {
            Some(entry) => *entry,
            None => *last.insert(self.find(stag, by, need)?),
        };
        let address = entry.place(offset, len)?;
        Some(Permitted {
            // What was read belongs together if the state is still the same at the access.
            condition: Condition {
                word: self.word(entry.slot, STATE),
                value: entry.state,
            },
            address,
            is_at_host: entry.is_at_host,
            slot: entry.slot,
        })
    }

    /// The entry of an STag, if a connection with this permit may access it.
    #[inline(never)]
    fn find(&self, stag: u32, (permit, qid): (u64, u32), need: Need) -> Option<LastEntry> {
        let right = match need {
            Need::RemoteRead => Access::REMOTE_READ,
            Need::RemoteWrite => Access::REMOTE_WRITE,
            Need::RemoteAtomic => Access::REMOTE_ATOMIC,
            Need::LocalWrite => Access::LOCAL_WRITE,
            Need::LocalRead => return None,
        };
        let slot = self.slot(stag);
        if slot >= self.slots {
            return None;
        }
        let state = self.state(slot);
        let read = |offset| self.word(slot, offset).load(Ordering::Relaxed);
        let (stag_pd, qid_access) = (read(STAG_PD), read(QID_ACCESS));
        let (only, access) = ((qid_access >> 32) as u32, qid_access as u32);
        let rights = Access::from_bits_truncate(access & permit as u32);
        let permitted = state & 1 == 1
            && stag_pd == pair(stag, (permit >> 32) as u32)
            && (only == 0 || only == qid)
            && rights.contains(right);
        permitted.then(|| LastEntry {
            key: (stag, (permit, qid), need),
            state,
            base: read(BASE),
            len: read(LEN),
            address: read(ADDRESS),
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

    /// The state of an entry.
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
