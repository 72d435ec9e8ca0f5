//! Registered memory: protection domains, STags, and the checks that guard every access (RFC 5041 §7.1, §8; RFC 5042).

mod domains;
mod loans;
mod permutation;
mod room;
mod table;
#[cfg(test)]
mod tests;
mod window;

pub use domains::{DomainUse, Domains};
pub(crate) use loans::{Borrower, EntryId, Loan, Pin};
pub use room::{Lease, PageRoom};
pub use table::{BindError, InvalidateBy, InvalidateError, MemoryTable, Registration, TableError};
pub use window::Window;

use crate::host::{HostMemory, Mapping, RemoteWord, Unreachable};
use std::sync::{Arc, PoisonError};

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
    /// No such STag, or it is not valid: DDP 1/00, RDMAP 0/1/00.
    #[error("invalid Stag")]
    InvalidStag,
    /// The STag belongs to another protection domain or stream: DDP 1/02, RDMAP 0/1/03.
    #[error("Stag not associated with this stream")]
    NotAssociated,
    /// Offset and length wrap 64 bits: DDP 1/03, RDMAP 0/1/04.
    #[error("tagged offset wraps")]
    Wrap,
    /// Outside of the registered range: DDP 1/01, RDMAP 0/1/01.
    #[error("outside of the registered range")]
    Bounds,
    /// The STag does not allow that: RDMAP 0/1/02.
    #[error("access right missing")]
    AccessRights,
}

/// Why an atomic operation was not performed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WordError {
    /// The word is not 64-bit aligned in memory (RFC 7306 §5.1), or in a region without memory.
    #[error("not at a multiple of eight in memory")]
    Misaligned,
    /// The memory is not there any more.
    #[error("the memory is not there any more")]
    Gone,
}

impl From<Unreachable> for WordError {
    fn from(Unreachable: Unreachable) -> WordError {
        WordError::Gone
    }
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

    /// Replaces an aligned word. Other operations of the device do not come in between; where it is two copies, the host's own
    /// instructions may.
    fn update_word(&self, at: u64, update: impl Fn(u64) -> u64) -> Result<u64, WordError> {
        if !self.iova.wrapping_add(at).is_multiple_of(8) {
            return Err(WordError::Misaligned);
        }
        let remote = self.host.remote().ok_or(Unreachable)?;
        let lock = match remote.word(self.iova.wrapping_add(at))? {
            RemoteWord::InPlace(word) => return Ok(word.update(update)?),
            RemoteWord::Copied(lock) => lock,
        };
        let _whole = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        let old = u64::from_ne_bytes(bytes);
        self.write(at, &update(old).to_ne_bytes())?;
        Ok(old)
    }
}

impl Backing {
    /// The address of the first byte among the `len` from `at` on that cannot be read; where all can, or the memory has no place here, that of the first one.
    #[cold]
    fn first_missing(&self, at: u64, len: u64) -> u64 {
        match self {
            Backing::Contiguous { mapping, .. } => {
                let part = mapping.part(at as usize, len as usize);
                part.first_missing().unwrap_or(part.address()) as u64
            }
            Backing::Remote(remote) => remote.iova.wrapping_add(at),
            Backing::Pages {
                log_page,
                skip,
                iovas,
                ..
            } => {
                let place = skip + at;
                let page = iovas.get((place >> log_page) as usize);
                page.map_or(0, |iova| iova.wrapping_add(place & ((1 << log_page) - 1)))
            }
            Backing::Null => 0,
        }
    }

    /// Where in a region of `len` bytes that lies here the byte at `address` of this process is.
    fn place_of(&self, address: usize, len: u64) -> Option<u64> {
        let within = |mapping: &Mapping| {
            let offset = address.checked_sub(mapping.address())?;
            (offset < mapping.len()).then_some(offset as u64)
        };
        let place = match self {
            Backing::Contiguous { mapping, .. } => within(mapping),
            Backing::Pages {
                log_page,
                skip,
                pages,
                ..
            } => {
                let mut places = (0..).zip(pages.iter());
                places.find_map(|(n, page)| ((n << log_page) + within(page)?).checked_sub(*skip))
            }
            Backing::Remote(_) | Backing::Null => None,
        };
        place.filter(|place| *place < len)
    }

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
