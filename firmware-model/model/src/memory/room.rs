//! Room for page lists, which cost the device three times what they cost a driver, and more if many
//! of its entries name one page.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of pages that the lists of all regions may still have.
#[derive(Debug)]
pub struct PageRoom(AtomicUsize);

/// Room that a page list takes up until this is dropped.
#[derive(Debug)]
pub struct PageReservation {
    room: Arc<PageRoom>,
    pages: usize,
}

impl PageRoom {
    /// Room for this number of pages.
    pub fn new(pages: usize) -> Arc<PageRoom> {
        Arc::new(PageRoom(AtomicUsize::new(pages)))
    }

    /// Takes room for a list of `pages` pages, if that much is free.
    pub fn take(self: &Arc<Self>, pages: usize) -> Option<PageReservation> {
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            left.checked_sub(pages)
        });
        taken.ok().map(|_| PageReservation {
            room: self.clone(),
            pages,
        })
    }
}

impl Drop for PageReservation {
    fn drop(&mut self) {
        self.room.0.fetch_add(self.pages, Ordering::Relaxed);
    }
}
