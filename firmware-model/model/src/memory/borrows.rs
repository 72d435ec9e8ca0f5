//! Pieces of registered memory that streams have not taken yet, and that no
//! [`Window`](super::Window) or [`Pin`] protects any more.
//!
//! Large payload is sent from its place. While a sender frames and sends, it pins the entries of
//! the STags, so a revocation waits for it, one call of the stream at the longest. Bytes that the
//! stream does not take then wait for an unbounded time, which the peer determines: the sender
//! registers these pieces here as borrowed before it drops the pins. A revocation makes every
//! holder release the pieces of its entry: the bytes are copied. So when a revocation returns,
//! nothing reads the memory any more, and a slow peer does not delay a revocation.

use super::entry::{Entry, EntryId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use urnic_sync::{Mutex, MutexGuard};

/// Makes a revocation of an entry wait. Hold it for a short time only, like a
/// [`Window`](super::Window).
#[derive(Debug)]
pub(crate) struct Pin(Arc<Entry>);

impl Pin {
    pub(super) fn new(entry: Arc<Entry>) -> Pin {
        Pin(entry)
    }

    pub(crate) fn entry(&self) -> EntryId {
        self.0.id
    }
}

/// An owner of pieces of registered memory that are still to be sent.
pub(crate) trait BorrowHolder: Send + Sync {
    /// Copies the pieces of an entry, and no longer refers to the memory. The caller may hold a
    /// queue pair's lock: an implementation takes none.
    fn release(&self, entry: EntryId);
}

/// The holders of borrowed pieces of a table.
#[derive(Default)]
pub(crate) struct Borrows {
    count: AtomicUsize,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    last: u64,
    holders: HashMap<u64, Arc<dyn BorrowHolder>>,
}

/// The registration of a holder; dropping it removes the holder.
pub(crate) struct Borrow {
    borrows: Arc<Borrows>,
    number: u64,
}

impl Borrows {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock()
    }

    /// Registers a holder, which must still hold pins for its pieces.
    pub(super) fn enter(self: &Arc<Self>, holder: Arc<dyn BorrowHolder>) -> Borrow {
        let mut list = self.lock();
        list.last += 1;
        let number = list.last;
        list.holders.insert(number, holder);
        self.count.store(list.holders.len(), Ordering::SeqCst);
        Borrow {
            borrows: self.clone(),
            number,
        }
    }

    /// Makes all holders release the pieces of an entry that cannot be pinned any more.
    pub(super) fn release(&self, entry: EntryId) {
        // A sender registers before it drops its pin, and the caller has seen the last pin go.
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let holders: Vec<_> = self.lock().holders.values().cloned().collect();
        holders.iter().for_each(|holder| holder.release(entry));
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

impl Drop for Borrow {
    fn drop(&mut self) {
        let mut list = self.borrows.lock();
        list.holders.remove(&self.number);
        self.borrows.count.store(list.holders.len(), Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Borrows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Borrows({:?})", self.count)
    }
}

impl std::fmt::Debug for Borrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Borrow({})", self.number)
    }
}
