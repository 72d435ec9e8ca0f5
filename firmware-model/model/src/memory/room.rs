//! Room for page lists, which cost the device three times what they cost a driver, and more if many
//! of its entries name one page.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Room that a page list takes up until this is dropped.
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
