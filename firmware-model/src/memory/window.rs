//! A checked range of registered memory, held for one access.

use super::table::Entry;
use super::{Backing, Remote};
use crate::host::{Mapping, Piece, PieceMut, Unreachable};
use arc_swap::Guard;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A checked range of registered memory. Revocation of its Stag waits until it is dropped: hold it for one FPDU, not
/// longer, and never while invalidating a Stag.
pub struct Window<'t> {
    /// Never `None`; the option is that of the slot.
    entry: Guard<Option<Arc<Entry>>>,
    start: u64,
    len: u64,
    table: PhantomData<&'t ()>,
}

impl<'t> Window<'t> {
    /// `start` and `len` were checked against the entry.
    pub(super) fn new(entry: Guard<Option<Arc<Entry>>>, start: u64, len: u64) -> Window<'t> {
        Window {
            entry,
            start,
            len,
            table: PhantomData,
        }
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

    /// The bytes from `at` on, if the region lies in one stretch.
    #[inline]
    fn stretch(&self, at: u64, len: u64) -> Option<Mapping> {
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
    pub fn is_elsewhere(&self) -> bool {
        let backing = self.entry.as_ref().map(|entry| entry.backing.as_ref());
        matches!(backing, Some(Backing::Remote(_) | Backing::Null))
    }

    fn is_null(&self) -> bool {
        matches!(
            self.entry.as_ref().map(|entry| entry.backing.as_ref()),
            Some(Backing::Null)
        )
    }

    fn stretches(&self, at: u64, len: u64) -> Stretches<'_> {
        assert!(at <= self.len && len <= self.len - at, "a window is not left");
        debug_assert!(!self.is_elsewhere());
        Stretches {
            backing: self.entry.as_ref().map(|e| e.backing.as_ref()),
            at: self.start + at,
            left: len,
        }
    }

    /// Copies bytes out from `at` on; they must lie inside.
    ///
    /// # Errors
    /// The memory is remote, and gone.
    #[inline]
    pub fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        if let Some(stretch) = self.stretch(at, into.len() as u64) {
            stretch.copy_out(0, into);
            return Ok(());
        }
        self.copy_out_of_many(at, into)
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
        for stretch in self.stretches(at, rest.len() as u64) {
            let (head, tail) = rest.split_at_mut(stretch.len());
            stretch.copy_out(0, head);
            rest = tail;
        }
        Ok(())
    }

    /// Copies bytes in from `at` on; they must lie inside.
    ///
    /// # Errors
    /// The memory is remote, and gone.
    #[inline]
    pub fn copy_in(&self, at: u64, from: &[u8]) -> Result<(), Unreachable> {
        if let Some(stretch) = self.stretch(at, from.len() as u64) {
            stretch.copy_in(0, from);
            return Ok(());
        }
        self.copy_in_to_many(at, from)
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
        for stretch in self.stretches(at, rest.len() as u64) {
            let (head, tail) = rest.split_at(stretch.len());
            stretch.copy_in(0, head);
            rest = tail;
        }
        Ok(())
    }

    /// Runs `visit` over the bytes from `at` on, in order, for a checksum. Their owner may change them meanwhile.
    pub fn visit(&self, at: u64, len: u64, mut visit: impl FnMut(&[u8])) {
        for stretch in self.stretches(at, len) {
            stretch.visit(&mut visit);
        }
    }

    /// The bytes from `at` on as pieces to send: one, or one per page.
    pub fn pieces(&self, at: u64, len: u64) -> impl Iterator<Item = Piece> + '_ {
        self.stretches(at, len).map(|s| s.piece())
    }

    /// The bytes from `at` on as pieces to receive into.
    pub fn pieces_mut(&self, at: u64, len: u64) -> impl Iterator<Item = PieceMut> + '_ {
        self.stretches(at, len).map(|s| s.piece_mut())
    }

    /// Replaces the 64-bit word at `at` (in the machine's byte order) by `update` of it in one atomic step and
    /// returns the old one; `None` if it is not 64-bit aligned in memory (RFC 7306 §5.1: not performed then), or gone.
    pub fn update_word(&self, at: u64, update: impl Fn(u64) -> u64) -> Option<u64> {
        if let Some(remote) = self.remote() {
            return remote.update_word(self.start + at, update);
        }
        if self.is_null() {
            return None;
        }
        let stretch = self.stretches(at, 8).next()?;
        let word = stretch.aligned_word64(0)?;
        Some(
            word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(update(old)))
                .unwrap_or_else(|old| old),
        )
    }
}

/// The stretches of memory behind a range, in order.
struct Stretches<'a> {
    backing: Option<&'a Backing>,
    at: u64,
    left: u64,
}

impl Iterator for Stretches<'_> {
    type Item = Mapping;

    #[inline]
    fn next(&mut self) -> Option<Mapping> {
        if self.left == 0 {
            return None;
        }
        let stretch = match self.backing? {
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
        self.at += stretch.len() as u64;
        self.left -= stretch.len() as u64;
        Some(stretch)
    }
}
