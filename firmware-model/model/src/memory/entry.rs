//! The objects that STags refer to, the rights that accesses need, and registrations.

use super::backing::Backing;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use urnic_device::vocabulary::Access;
use urnic_device::wqe::Sge;

/// An object that an STag referred to earlier; never used again.
pub(crate) type EntryId = u64;

/// The object that an STag refers to. A new entry replaces it on every change.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: EntryId,
    pub(super) stag: u32,
    pub(super) pd: u32,
    /// The only queue pair that may use it (type 2 windows); `None` = all of the domain.
    pub(super) qid: Option<u32>,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) is_window: bool,
    pub(super) backing: Arc<Backing>,
    /// The position of `base` in the backing.
    pub(super) start: u64,
    /// Whether the log reported that the memory is inaccessible.
    pub(super) reported: AtomicBool,
}

impl Entry {
    /// The entry of a registered region.
    pub(super) fn of_region(id: EntryId, stag: u32, registration: &Registration) -> Entry {
        Entry {
            id,
            stag,
            pd: registration.pd,
            qid: None,
            base: registration.base,
            len: registration.len,
            access: registration.access,
            is_window: false,
            backing: registration.backing.clone(),
            start: 0,
            reported: AtomicBool::new(false),
        }
    }

    /// Reports in the log, once, that an access to the `len` bytes at `at` of the backing failed.
    #[cold]
    pub(super) fn report(&self, at: u64, len: u64) {
        if self.reported.swap(true, Ordering::Relaxed) {
            return;
        }
        let kind = if self.is_window { "memory window" } else { "region" };
        let address = self.backing.first_missing(at, len);
        tracing::error!(
            "{kind} {:#010x}: the program's memory at {address:#x} was unmapped, protected or truncated before \
             the {kind} was deregistered; the request fails, and its connection ends",
            self.stag
        );
    }
}

// The right that an access needs, and the reason of a refusal.

/// The right that an access needs.
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

impl Need {
    /// The right, by its name in verbs without `IBV_ACCESS_`. To read for its own program the
    /// device needs none.
    pub(crate) fn right(self) -> (Access, &'static str) {
        match self {
            Need::LocalRead => (Access::empty(), "no right"),
            Need::LocalWrite => (Access::LOCAL_WRITE, "LOCAL_WRITE"),
            Need::RemoteRead => (Access::REMOTE_READ, "REMOTE_READ"),
            Need::RemoteWrite => (Access::REMOTE_WRITE, "REMOTE_WRITE"),
            Need::RemoteAtomic => (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
        }
    }

    /// Whether the device accesses the memory of its own program.
    pub(super) fn is_local(self) -> bool {
        matches!(self, Need::LocalRead | Need::LocalWrite)
    }
}

/// The queue pair that accesses memory, or whose peer does, and its protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accessor {
    /// The number of the domain.
    pub pd: u32,
    /// The number of the queue pair.
    pub qid: u32,
}

/// An access to registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryAccess {
    /// The STag of the region or window.
    pub stag: u32,
    /// The tagged offset, or the address, of the first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The kind of access.
    pub need: Need,
}

impl MemoryAccess {
    /// To all of an element of a work request.
    #[inline]
    pub(crate) fn of_element(sge: &Sge, need: Need) -> MemoryAccess {
        MemoryAccess {
            stag: sge.stag.get(),
            offset: sge.offset.get(),
            len: sge.len.get().into(),
            need,
        }
    }

    /// How far from `base` the access begins, in a registered range of `len` bytes.
    ///
    /// # Errors
    /// The access is not inside.
    #[inline(always)]
    pub(super) fn inside(&self, base: u64, len: u64) -> Result<u64, Violation> {
        if self.offset.checked_add(self.len.saturating_sub(1)).is_none() {
            return Err(Violation::Wrap);
        }
        let from_base = self.offset.wrapping_sub(base);
        let is_inside = self.offset >= base && from_base <= len && self.len <= len - from_base;
        is_inside.then_some(from_base).ok_or(Violation::Bounds)
    }
}

/// Why an access is refused, in the order of the checks (RFC 5041 §7.1, RFC 5040 §7.2; rows
/// DDP-V-01 … 04, 14, RDM-M-03).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No such STag, or it is not valid: DDP 1/00, RDMAP 0/1/00.
    #[error("invalid STag")]
    InvalidStag,
    /// The STag belongs to another protection domain or stream: DDP 1/02, RDMAP 0/1/03.
    #[error("STag not associated with this stream")]
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

// Registrations, and why a table refuses to change one.

/// The parameters of a registration.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Protection domain.
    pub pd: u32,
    /// First tagged offset.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// Rights.
    pub access: Access,
    /// The memory.
    pub backing: Arc<Backing>,
}

/// Why the table was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// No such region or window.
    #[error("no such region or window")]
    UnknownStag,
    /// No such protection domain.
    #[error("no such protection domain")]
    UnknownDomain,
    /// Too many.
    #[error("no room for more regions or windows")]
    Full,
    /// Windows are bound to the region (VRB-M-03).
    #[error("windows are bound to the region")]
    Bound,
    /// The range wraps 64 bits.
    #[error("the range wraps 64 bits")]
    Wrap,
}

/// Why a window was not bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// No such window, or not one of this stream.
    #[error("no such window")]
    UnknownWindow,
    /// A type 2 window must be unbound first.
    #[error("the window is bound already")]
    AlreadyBound,
    /// The region is not valid, or not one of this domain.
    #[error("no such region")]
    UnknownRegion,
    /// The range is not inside the region.
    #[error("outside of the region")]
    Bounds,
    /// The region does not allow that.
    #[error("the region does not allow it")]
    AccessRights,
}

/// The origin of an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidateBy {
    /// A work request of the program.
    Local,
    /// A peer's Send with Invalidate.
    Peer,
}

/// What may be invalidated through a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalidable {
    /// Regions and windows of its domain (RFC 5040 §8.1.1).
    All,
    /// Windows of type 2 that are bound to it
    /// ([`INFINIBAND`](urnic_device::command::create_qp::INFINIBAND)).
    OwnWindows,
}

/// Why a STag was not invalidated (RDM-S-04).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidateError {
    /// No such STag, or not valid: 0/2/09.
    #[error("invalid STag")]
    InvalidStag,
    /// The STag belongs to another protection domain or stream: 0/1/09.
    #[error("STag not associated with this stream")]
    NotAssociated,
    /// Other streams use it too (RFC 5040 §8.1.1(7)): 0/2/09.
    #[error("other streams share the STag")]
    Shared,
    /// Windows are bound to it (VRB-M-03): 0/2/09.
    #[error("windows are bound to the region")]
    Bound,
    /// It is no window that is bound to the queue pair, as [`Invalidable::OwnWindows`] requires:
    /// 0/2/09.
    #[error("not a memory window of type 2")]
    NotInvalidable,
}
