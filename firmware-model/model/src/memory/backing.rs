//! The places of the bytes of regions.

use crate::host::{HostMemory, Mapping, RemoteWord, Unreachable};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why an atomic operation was not performed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WordError {
    /// The word is not 64-bit aligned in memory (RFC 7306 §5.1), or in a region without memory.
    #[error("not at a multiple of eight in memory")]
    Misaligned,
    /// The memory is not there any more.
    #[error("the memory is unmapped")]
    Unreachable,
}

impl From<Unreachable> for WordError {
    fn from(Unreachable: Unreachable) -> WordError {
        WordError::Unreachable
    }
}

/// The places of the bytes of a region.
#[derive(Debug)]
pub enum Backing {
    /// In one extent.
    Contiguous {
        /// The bytes.
        mapping: Mapping,
        /// IOVA of the first one.
        iova: u64,
    },
    /// In pages of `1 << log_page` bytes, of which the first `skip` bytes are not part of the
    /// region.
    Pages {
        /// log2 of the page size.
        log_page: u32,
        /// Bytes of the first page before the region.
        skip: u64,
        /// The pages, in order.
        pages: Box<[Mapping]>,
        /// The IOVAs of the pages.
        iovas: Box<[u64]>,
        /// The room that the list takes.
        room: PageReservation,
    },
    /// Reached by copies only.
    Remote(Remote),
    /// No memory: zeroes are read, and writes are discarded.
    Null,
}

/// The address of memory that peers on this host may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In this process.
    Here(u64),
    /// In the [host's process](crate::host::RemoteMemory::process).
    AtHost(u64),
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
    /// The `len` bytes at `iova` of the host's remote memory; `None` if there is no such memory.
    pub fn new(host: &Arc<dyn HostMemory>, iova: u64, len: u64) -> Option<Remote> {
        host.remote()?.covers(iova, len).then(|| Remote {
            host: host.clone(),
            iova,
        })
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        let remote = self.host.remote().ok_or(Unreachable)?;
        remote.read(self.iova.wrapping_add(at), into)
    }

    pub(super) fn write(&self, at: u64, from: &[u8]) -> Result<(), Unreachable> {
        let remote = self.host.remote().ok_or(Unreachable)?;
        remote.write(self.iova.wrapping_add(at), from)
    }

    /// Replaces an aligned word. Other operations of the device do not interleave; where the
    /// replacement is two copies, the host's own instructions may.
    pub(super) fn update_word(&self, at: u64, update: impl Fn(u64) -> u64) -> Result<u64, WordError> {
        if !self.iova.wrapping_add(at).is_multiple_of(8) {
            return Err(WordError::Misaligned);
        }
        let remote = self.host.remote().ok_or(Unreachable)?;
        let lock = match remote.word(self.iova.wrapping_add(at))? {
            RemoteWord::InPlace(word) => return Ok(word.update(update)?),
            RemoteWord::Copied(lock) => lock,
        };
        let _whole = lock.lock();
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        let old = u64::from_ne_bytes(bytes);
        self.write(at, &update(old).to_ne_bytes())?;
        Ok(old)
    }
}

impl Backing {
    /// The place of the `len` bytes from `at` on for local peers: one extent of this process, or of
    /// the host's.
    pub(super) fn place(&self, at: u64, len: u64) -> Option<Place> {
        match self {
            Backing::Contiguous { mapping, .. } => {
                Some(Place::Here((mapping.address() as u64).wrapping_add(at)))
            }
            Backing::Remote(remote) => {
                let memory = remote.host.remote()?;
                let address = memory.in_process(remote.iova.wrapping_add(at), len)?;
                Some(Place::AtHost(address))
            }
            Backing::Pages { .. } | Backing::Null => None,
        }
    }

    /// The address of the first byte among the `len` from `at` on that cannot be read; where all
    /// can, or the memory has no place here, that of the first one.
    #[cold]
    pub(super) fn first_missing(&self, at: u64, len: u64) -> u64 {
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

    /// The offset of the byte at `address` of this process in a region of `len` bytes that begins
    /// here.
    pub(super) fn place_of(&self, address: usize, len: u64) -> Option<u64> {
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

    /// Whether bytes of a region of `len` bytes that lies here are among the `unmapped_len` bytes
    /// at `iova`.
    pub(super) fn touches(&self, len: u64, iova: u64, unmapped_len: u64) -> bool {
        let overlap = |start: u64, len: u64| {
            len > 0
                && unmapped_len > 0
                && start <= iova.saturating_add(unmapped_len - 1)
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

// Room for page lists. A list takes three times as much memory in the device as in a driver, and
// more if many of its entries name one page.

/// Adds `more` to a number of things in use, unless that would make it exceed `limit`. Returns
/// whether it did.
pub fn reserve(used: &AtomicUsize, more: usize, limit: usize) -> bool {
    let mut before = used.load(Ordering::Relaxed);
    while let Some(after) = before.checked_add(more).filter(|after| *after <= limit) {
        match used.compare_exchange_weak(before, after, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => before = now,
        }
    }
    false
}

/// The number of pages that the lists of all regions may have.
#[derive(Debug)]
pub struct PageRoom {
    used: AtomicUsize,
    limit: usize,
}

/// Room of a page list; given back when this is dropped.
#[derive(Debug)]
pub struct PageReservation {
    room: Arc<PageRoom>,
    pages: usize,
}

impl PageRoom {
    /// Room for this number of pages.
    pub fn new(pages: usize) -> Arc<PageRoom> {
        Arc::new(PageRoom {
            used: AtomicUsize::new(0),
            limit: pages,
        })
    }

    /// Takes room for a list of `pages` pages, if that much is free.
    pub fn take(self: &Arc<Self>, pages: usize) -> Option<PageReservation> {
        reserve(&self.used, pages, self.limit).then(|| PageReservation {
            room: self.clone(),
            pages,
        })
    }
}

impl Drop for PageReservation {
    fn drop(&mut self) {
        self.room.used.fetch_sub(self.pages, Ordering::Relaxed);
    }
}
