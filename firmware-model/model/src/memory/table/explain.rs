//! Why an access is refused, in words, and the memory that was perhaps meant.

use super::{CHUNK, MemoryTable};
use crate::memory::entry::Entry;
use crate::memory::violation::{Need, Violation};
use urnic_device::vocabulary::Access;

/// Most slots that are looked at for the nearest memory: a peer can cause this search.
const SEARCHED: usize = 1 << 16;

/// An access that is refused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) stag: u32,
    pub(crate) pd: u32,
    pub(crate) qid: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) need: Need,
}

impl Need {
    /// The right by its name in verbs, without `IBV_ACCESS_`.
    pub(crate) fn right(self) -> (Access, &'static str) {
        match self {
            Need::LocalRead => (Access::empty(), "no right"),
            Need::LocalWrite => (Access::LOCAL_WRITE, "LOCAL_WRITE"),
            Need::RemoteRead => (Access::REMOTE_READ, "REMOTE_READ"),
            Need::RemoteWrite => (Access::REMOTE_WRITE, "REMOTE_WRITE"),
            Need::RemoteAtomic => (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
        }
    }
}

impl Asked {
    fn is_local(&self) -> bool {
        matches!(self.need, Need::LocalRead | Need::LocalWrite)
    }

    /// How many of the bytes, or of those between, the entry does not cover.
    fn distance(&self, entry: &Entry) -> u64 {
        let before = entry.base.saturating_sub(self.offset);
        let end = self.offset.saturating_add(self.len);
        let behind = end.saturating_sub(entry.base.saturating_add(entry.len));
        before.max(behind)
    }

    fn lacks_right(&self, entry: &Entry) -> bool {
        !entry.access.contains(self.need.right().0)
    }

    /// Whether the queue pair may use the entry for such an access.
    fn may_use(&self, entry: &Entry) -> bool {
        let is_own = entry.pd == self.pd && entry.qid.is_none_or(|only| only == self.qid);
        is_own && !(entry.is_window && self.is_local())
    }

    fn describe(&self, entry: &Entry) -> String {
        let Entry { stag, base, len, .. } = entry;
        let right = match (self.need, self.lacks_right(entry)) {
            (Need::LocalRead, _) => String::new(),
            (_, false) => format!(" with {}", self.need.right().1),
            (_, true) => format!(" without {}", self.need.right().1),
        };
        format!("{stag:#010x} covers {base:#x}+{len}{right}")
    }
}

impl MemoryTable {
    /// Why the access is refused, and what comes nearest to it in the protection domain.
    #[cold]
    pub(crate) fn explain(&self, asked: &Asked) -> String {
        let reason = self.reason(asked);
        let nearest = self.nearest(asked, |entry| entry.stag != asked.stag && asked.may_use(entry));
        match nearest {
            Some(nearest) => format!("{reason}; nearest valid {nearest}"),
            None => reason,
        }
    }

    fn reason(&self, asked: &Asked) -> String {
        let Asked {
            stag,
            pd,
            qid,
            offset,
            len,
            need,
        } = *asked;
        let Err(violation) = self.check(stag, pd, qid, offset, len, need) else {
            return "the memory is unmapped, protected or truncated".to_owned();
        };
        let guard = self.cell(self.slot(stag)).map(|cell| cell.load());
        let entry = guard.as_ref().and_then(|guard| guard.as_ref());
        match (violation, entry) {
            (Violation::InvalidStag, Some(entry)) => {
                let keys = [stag, entry.stag].map(|stag| stag & 0xff);
                format!("wrong key {:#04x}, this memory has {:#04x}", keys[0], keys[1])
            }
            (Violation::InvalidStag, None) => "no such STag".to_owned(),
            (Violation::NotAssociated, Some(entry)) if entry.pd == pd => {
                "the memory window is bound to another queue pair".to_owned()
            }
            (Violation::NotAssociated, _) => "the STag is of another protection domain".to_owned(),
            (Violation::Bounds | Violation::AccessRights, Some(entry)) => {
                format!("{violation}: {}", asked.describe(entry))
            }
            (violation, _) => violation.to_string(),
        }
    }

    /// The valid entry that covers most of what was asked for, in words.
    fn nearest(&self, asked: &Asked, is_fit: impl Fn(&Entry) -> bool) -> Option<String> {
        let chunks = self.chunks.iter().take(SEARCHED / CHUNK);
        let entries = chunks.filter_map(|chunk| chunk.get()).flatten();
        let guards = entries.map(|cell| cell.load());
        let fits = guards.filter(|guard| guard.as_ref().is_some_and(|entry| is_fit(entry)));
        let nearest = fits.min_by_key(|guard| {
            let rank = |entry: &Entry| (asked.distance(entry), asked.lacks_right(entry));
            guard.as_ref().map(|entry| rank(entry))
        });
        Some(asked.describe(nearest?.as_ref()?))
    }
}
