//! The check of an access.

use super::MemoryTable;
use crate::memory::violation::{Need, Violation};
use crate::memory::window::{Recent, Window};
use urnic_device::vocabulary::Access;

impl MemoryTable {
    /// Checks an access of `len` bytes at tagged offset `offset` by queue pair `qid` of domain
    /// `pd`. The first violation in the order of [`Violation`] wins. Zero-length accesses are the
    /// caller's: DDP and verbs leave them unchecked (DDP-S-04, VRB-M-07).
    // A window that is returned in memory, and moved on, costs more than the check.
    #[inline(always)]
    pub fn check(
        &self,
        stag: u32,
        pd: u32,
        qid: u32,
        offset: u64,
        len: u64,
        need: Need,
    ) -> Result<Window<'_>, Violation> {
        self.check_again(&Recent::default(), stag, (pd, qid), offset, len, need)
    }

    /// As [`check`](Self::check), for one of several accesses that are mostly to one STag.
    #[inline(always)]
    pub(crate) fn check_again(
        &self,
        recent: &Recent,
        stag: u32,
        (pd, qid): (u32, u32),
        offset: u64,
        len: u64,
        need: Need,
    ) -> Result<Window<'_>, Violation> {
        let find = || Some(self.cell(self.slot(stag))?.load());
        let guard = recent.take(stag).or_else(find).ok_or(Violation::InvalidStag)?;
        let entry = guard
            .as_ref()
            .filter(|e| e.stag == stag)
            .ok_or(Violation::InvalidStag)?;
        if entry.pd != pd || entry.qid.is_some_and(|only| only != qid) {
            return Err(Violation::NotAssociated);
        }
        if offset.checked_add(len.saturating_sub(1)).is_none() {
            return Err(Violation::Wrap);
        }
        let from_base = offset.wrapping_sub(entry.base);
        if offset < entry.base || from_base > entry.len || len > entry.len - from_base {
            return Err(Violation::Bounds);
        }
        let allowed = match need {
            Need::LocalRead => !entry.is_window,
            Need::LocalWrite => !entry.is_window && entry.access.contains(Access::LOCAL_WRITE),
            Need::RemoteRead => entry.access.contains(Access::REMOTE_READ),
            Need::RemoteWrite => entry.access.contains(Access::REMOTE_WRITE),
            Need::RemoteAtomic => entry.access.contains(Access::REMOTE_ATOMIC),
        };
        if !allowed {
            return Err(Violation::AccessRights);
        }
        let start = entry.start + from_base;
        Ok(Window::new(guard, start, len))
    }
}
