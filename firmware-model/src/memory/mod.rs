//! Registered memory: protection domains, Stags, and the checks that guard every access (RFC 5041 §7.1, §8; RFC 5042).

mod domains;
mod permutation;
mod room;
mod table;
#[cfg(test)]
mod tests;
mod window;

pub use domains::{DomainUse, Domains};
pub use room::{Lease, PageRoom};
pub use table::{BindError, InvalidateBy, InvalidateError, MemoryTable, Registration, TableError};
pub use window::Window;

use crate::host::{HostMemory, Mapping, Unreachable};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, PoisonError};

/// What an access needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The device gathers from here for its own program.
    LocalRead,
    /// The device places receives, Read Responses or atomic results of its own program here.
    LocalWrite,
    /// A peer reads.
    RemoteRead,
    /// A peer writes.
    RemoteWrite,
    /// A peer runs an atomic operation.
    RemoteAtomic,
}

/// Why an access is refused, in the order of the checks (RFC 5041 §7.1, RFC 5040 §7.2; rows DDP-V-01 … 04, 14, RDM-M-03).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No such Stag, or it is not valid: DDP 1/00, RDMAP 0/1/00.
    #[error("invalid Stag")]
    InvalidStag,
    /// The Stag belongs to another protection domain or stream: DDP 1/02, RDMAP 0/1/03.
    #[error("Stag not associated with this stream")]
    NotAssociated,
    /// Offset and length wrap 64 bits: DDP 1/03, RDMAP 0/1/04.
    #[error("tagged offset wraps")]
    Wrap,
    /// Outside of the registered range: DDP 1/01, RDMAP 0/1/01.
    #[error("outside of the registered range")]
    Bounds,
    /// The Stag does not allow that: RDMAP 0/1/02.
    #[error("access right missing")]
    AccessRights,
}

/// Where the bytes of a region are.
#[derive(Debug)]
pub enum Backing {
    /// In one stretch.
    Contiguous {
        /// The bytes.
        mapping: Mapping,
        /// IOVA of the first one.
        iova: u64,
    },
    /// In pages of `1 << log_page` bytes, of which the first `skip` bytes are not part of the region.
    Pages {
        /// log2 of the page size.
        log_page: u32,
        /// Bytes of the first page before the region.
        skip: u64,
        /// The pages, in order.
        pages: Box<[Mapping]>,
        /// Their IOVAs.
        iovas: Box<[u64]>,
        /// What the list takes up.
        room: Lease,
    },
    /// Reached by copies only.
    Remote(Remote),
    /// Nowhere: zeroes are read, and what is written is dropped.
    Null,
}

/// A region that is reached by copies only: in another process, or on demand.
pub struct Remote {
    host: Arc<dyn HostMemory>,
    iova: u64,
    /// Held by atomic operations where they are two copies.
    whole: Mutex<()>,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({:#x})", self.iova)
    }
}

impl Remote {
    /// The `len` bytes at `iova` of the host's remote memory; `None` if there are none such.
    pub fn new(host: &Arc<dyn HostMemory>, iova: u64, len: u64) -> Option<Remote> {
        host.remote()?.covers(iova, len).then(|| Remote {
            host: host.clone(),
            iova,
            whole: Mutex::default(),
        })
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        let remote = self.host.remote().ok_or(Unreachable)?;
        remote.read(self.iova.wrapping_add(at), into)
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Unreachable> {
        let remote = self.host.remote().ok_or(Unreachable)?;
        remote.write(self.iova.wrapping_add(at), from)
    }

    /// Replaces an aligned word. Whole towards other operations of the device on this region; where it is two copies, the host's own
    /// instructions may come in between.
    fn update_word(&self, at: u64, update: impl Fn(u64) -> u64) -> Option<u64> {
        if !self.iova.wrapping_add(at).is_multiple_of(8) {
            return None;
        }
        if let Some(word) = self.host.remote()?.word(self.iova.wrapping_add(at)) {
            let updated = |word: &AtomicU64| word.fetch_update(AcqRel, Acquire, |old| Some(update(old)));
            return word.ok().map(|word| updated(word).unwrap_or_else(|old| old));
        }
        let _whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; 8];
        self.read(at, &mut bytes).ok()?;
        let old = u64::from_ne_bytes(bytes);
        self.write(at, &update(old).to_ne_bytes()).ok()?;
        Some(old)
    }
}

impl Backing {
    /// Whether bytes of a region of `len` bytes that lies here are among the `gone` ones at `iova`.
    fn touches(&self, len: u64, iova: u64, gone: u64) -> bool {
        let overlap = |start: u64, len: u64| {
            len > 0
                && gone > 0
                && start <= iova.saturating_add(gone - 1)
                && iova <= start.saturating_add(len - 1)
        };
        match self {
            Backing::Contiguous { iova: start, .. } | Backing::Remote(Remote { iova: start, .. }) => {
                overlap(*start, len)
            }
            Backing::Null => false,
            Backing::Pages { log_page, iovas, .. } => {
                iovas.iter().any(|start| overlap(*start, 1 << log_page))
            }
        }
    }
}
