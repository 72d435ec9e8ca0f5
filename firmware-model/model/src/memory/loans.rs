//! Pieces of registered memory that streams have not taken yet, and that no
//! [`Window`](super::Window) or [`Pin`] guards any more.
//!
//! Large payload is sent from where it is. While a sender frames and sends it pins the entries of
//! the STags, so a revocation waits for it, one call of the stream at the longest. What the stream
//! does not take then stays for an unbounded time, as long as the peer likes: the sender lends
//! these pieces out here before it lets go of the pins. A revocation has every borrower give back
//! the pieces of its entry: the bytes are copied. So when a revocation returns, nothing reads the
//! memory any more, and a slow peer does not delay a revocation.

use super::entry::{Entry, EntryId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Keeps a revocation of an entry waiting. To be held for a short time only, as a
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
pub(crate) trait Borrower: Send + Sync {
    /// Copies the pieces of an entry, and no longer refers to the memory. The caller may hold a
    /// queue pair's lock: an implementation takes none.
    fn give_back(&self, entry: EntryId);
}

/// All borrowers of a table.
#[derive(Default)]
pub(crate) struct Loans {
    count: AtomicUsize,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    last: u64,
    borrowers: HashMap<u64, Arc<dyn Borrower>>,
}

/// A borrower's place on the list, until this is dropped.
pub(crate) struct Loan {
    loans: Arc<Loans>,
    number: u64,
}

impl Loans {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a borrower, which must still hold pins for its pieces.
    pub(super) fn enter(self: &Arc<Self>, borrower: Arc<dyn Borrower>) -> Loan {
        let mut list = self.lock();
        list.last += 1;
        let number = list.last;
        list.borrowers.insert(number, borrower);
        self.count.store(list.borrowers.len(), Ordering::SeqCst);
        Loan {
            loans: self.clone(),
            number,
        }
    }

    /// Has all borrowers give back the pieces of an entry that cannot be pinned any more.
    pub(super) fn give_back(&self, entry: EntryId) {
        // A sender enters before it drops its pin, and the caller has seen the last pin go.
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let borrowers: Vec<_> = self.lock().borrowers.values().cloned().collect();
        borrowers.iter().for_each(|borrower| borrower.give_back(entry));
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut list = self.loans.lock();
        list.borrowers.remove(&self.number);
        self.loans.count.store(list.borrowers.len(), Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Loans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loans({:?})", self.count)
    }
}

impl std::fmt::Debug for Loan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loan({})", self.number)
    }
}
