//! The objects that STags refer to.

use super::backing::Backing;
use super::registration::Registration;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use urnic_device::vocabulary::Access;

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
