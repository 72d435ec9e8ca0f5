//! A checked range of registered memory, held for one access.

use super::backing::{Backing, Remote, WordError};
use super::borrows::Pin;
use super::entry::{Entry, EntryId};
use crate::host::{Mapping, PieceMut, Unreachable};
use arc_swap::Guard;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// The entry of a slot of the table when it was looked up. A revocation of the STag waits for it.
pub(super) type Found = Guard<Option<Arc<Entry>>>;

/// The entry of the last access, so that the next access to the same STag need not look it up: a
/// lookup takes longer than the copy of a short message. A revocation waits for this, too. So it is
/// [forgotten](Recent::forget) after some accesses, before an access that takes long, and before
/// this thread revokes an STag.
#[derive(Default)]
pub struct Recent(Cell<Option<Found>>);

impl Recent {
    /// A revocation does not wait any more.
    #[inline]
    pub(crate) fn forget(&self) {
        drop(self.0.take());
    }

    /// The entry, if it was found for exactly this STag.
    #[inline]
    pub(super) fn take(&self, stag: u32) -> Option<Found> {
        let is_of = |found: &Found| found.as_ref().is_some_and(|entry| entry.stag == stag);
        self.0.take().filter(is_of)
    }
}

impl fmt::Debug for Recent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recent").finish_non_exhaustive()
    }
}

/// A checked range of registered memory. Revocation of its STag waits until it is dropped: hold it
/// for one FPDU, or one copy, not longer, and never while invalidating a STag.
pub struct Window<'t> {
    /// Never `None`; the option is that of the slot.
    entry: Found,
    start: u64,
    len: u64,
    table: PhantomData<&'t ()>,
}

impl<'t> Window<'t> {
    /// `start` and `len` were checked against the entry.
    pub(super) fn new(entry: Found, start: u64, len: u64) -> Window<'t> {
        Window {
            entry,
            start,
            len,
            table: PhantomData,
        }
    }

    /// The object that the STag of the window refers to.
    #[inline]
    pub(crate) fn entry(&self) -> Option<EntryId> {
        self.entry.as_ref().map(|entry| entry.id)
    }

    /// The access is over, and the next one may be to the same STag.
    #[inline]
    pub(crate) fn keep(self, recent: &Recent) {
        recent.0.set(Some(self.entry));
    }

    /// Makes a pin, for which a revocation waits after the window was dropped.
    #[inline]
    pub(crate) fn pin(&self) -> Option<Pin> {
        self.entry.as_ref().cloned().map(Pin::new)
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it holds no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes from `at` on, if the region lies in one extent.
    #[inline]
    fn extent(&self, at: u64, len: u64) -> Option<Mapping> {
        match self.entry.as_ref()?.backing.as_ref() {
            Backing::Contiguous { mapping, .. } if at <= self.len && len <= self.len - at => {
                Some(mapping.part((self.start + at) as usize, len as usize))
            }
            _ => None,
        }
    }

    /// The region, if it is reached by copies only: then there are no pieces, and nothing to visit.
    #[inline]
    fn remote(&self) -> Option<&Remote> {
        match self.entry.as_ref()?.backing.as_ref() {
            Backing::Remote(remote) => Some(remote),
            _ => None,
        }
    }

    /// Whether every access is a copy: [`pieces`](Self::pieces),
    /// [`pieces_mut`](Self::pieces_mut) and [`visit`](Self::visit) are not for such a window.
    #[inline]
    pub fn is_unmapped(&self) -> bool {
        let backing = self.entry.as_ref().map(|entry| entry.backing.as_ref());
        matches!(backing, Some(Backing::Remote(_) | Backing::Null))
    }

    fn is_null(&self) -> bool {
        matches!(
            self.entry.as_ref().map(|entry| entry.backing.as_ref()),
            Some(Backing::Null)
        )
    }

    /// The extents of this process's memory where the bytes from `at` on are: one, or one per
    /// page.
    pub(crate) fn extents(&self, at: u64, len: u64) -> Extents<'_> {
        assert!(at <= self.len && len <= self.len - at, "a window is not left");
        debug_assert!(!self.is_unmapped());
        Extents {
            backing: self.entry.as_ref().map(|e| e.backing.as_ref()),
            at: self.start + at,
            left: len,
        }
    }

    /// Copies bytes out from `at` on; they must lie inside.
    ///
    /// # Errors
    /// The memory is inaccessible; the log reports it.
    #[inline]
    pub fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        let copied = match self.extent(at, into.len() as u64) {
            Some(extent) => extent.try_copy_out(0, into),
            None => self.copy_out_of_many(at, into),
        };
        copied.inspect_err(|Unreachable| self.report(at, into.len() as u64))
    }

    #[cold]
    fn copy_out_of_many(&self, at: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        if let Some(remote) = self.remote() {
            return remote.read(self.start + at, into);
        }
        if self.is_null() {
            into.fill(0);
            return Ok(());
        }
        let mut rest = into;
        for extent in self.extents(at, rest.len() as u64) {
            let (head, tail) = rest.split_at_mut(extent.len());
            extent.try_copy_out(0, head)?;
            rest = tail;
        }
        Ok(())
    }

    /// Copies bytes in from `at` on; they must lie inside.
    ///
    /// # Errors
    /// The memory is inaccessible or cannot be written; the log reports it.
    #[inline]
    pub fn copy_in(&self, at: u64, from: &[u8]) -> Result<(), Unreachable> {
        let copied = match self.extent(at, from.len() as u64) {
            Some(extent) => extent.try_copy_in(0, from),
            None => self.copy_in_to_many(at, from),
        };
        copied.inspect_err(|Unreachable| self.report(at, from.len() as u64))
    }

    #[cold]
    fn copy_in_to_many(&self, at: u64, from: &[u8]) -> Result<(), Unreachable> {
        if let Some(remote) = self.remote() {
            return remote.write(self.start + at, from);
        }
        if self.is_null() {
            return Ok(());
        }
        let mut rest = from;
        for extent in self.extents(at, rest.len() as u64) {
            let (head, tail) = rest.split_at(extent.len());
            extent.try_copy_in(0, head)?;
            rest = tail;
        }
        Ok(())
    }

    /// Checks whether the bytes from `at` on can be read at present.
    ///
    /// # Errors
    /// The memory is inaccessible; the log reports it.
    #[inline]
    pub fn probe(&self, at: u64, len: u64) -> Result<(), Unreachable> {
        self.extents(at, len)
            .try_for_each(|extent| extent.try_probe())
            .inspect_err(|Unreachable| self.report(at, len))
    }

    /// The bytes from `at` on as pieces to receive into.
    pub(crate) fn pieces_mut(&self, at: u64, len: u64) -> impl Iterator<Item = PieceMut<'_>> {
        self.extents(at, len).map(|extent| {
            // SAFETY: a revocation of the registration waits until the window is dropped, which the
            // piece borrows.
            unsafe { extent.piece_mut() }
        })
    }

    /// Replaces the 64-bit word at `at` (in the machine's byte order) by the result of `update` in
    /// one atomic step and returns the old word.
    ///
    /// # Errors
    /// The operation is not performed where the word is not 64-bit aligned in memory (RFC 7306
    /// §5.1), or is inaccessible; in the latter case the log reports it.
    pub fn update_word(&self, at: u64, update: impl Fn(u64) -> u64) -> Result<u64, WordError> {
        let updated = if let Some(remote) = self.remote() {
            remote.update_word(self.start + at, update)
        } else if self.is_null() {
            return Err(WordError::Misaligned);
        } else {
            let extent = self.extents(at, 8).next().ok_or(WordError::Misaligned)?;
            let word = extent.aligned_word64(0).ok_or(WordError::Misaligned)?;
            word.update(update).map_err(WordError::from)
        };
        if updated == Err(WordError::Unreachable) {
            self.report(at, 8);
        }
        updated
    }

    /// Reports in the log that an access to the `len` bytes from `at` on failed: once for each
    /// region or memory window.
    #[cold]
    pub fn report(&self, at: u64, len: u64) {
        if let Some(entry) = self.entry.as_ref() {
            entry.report(self.start + at, len);
        }
    }
}

/// The extents of memory after a range, in order.
pub(crate) struct Extents<'a> {
    backing: Option<&'a Backing>,
    at: u64,
    left: u64,
}

impl Iterator for Extents<'_> {
    type Item = Mapping;

    #[inline]
    fn next(&mut self) -> Option<Mapping> {
        if self.left == 0 {
            return None;
        }
        let extent = match self.backing? {
            Backing::Contiguous { mapping, .. } => mapping.part(self.at as usize, self.left as usize),
            Backing::Remote(_) | Backing::Null => return None,
            Backing::Pages {
                log_page,
                skip,
                pages,
                ..
            } => {
                let place = skip + self.at;
                let page = pages.get((place >> log_page) as usize)?;
                let offset = place & ((1 << log_page) - 1);
                let len = self.left.min((1 << log_page) - offset);
                page.part(offset as usize, len as usize)
            }
        };
        self.at += extent.len() as u64;
        self.left -= extent.len() as u64;
        Some(extent)
    }
}
