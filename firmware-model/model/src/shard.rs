//! A small number for each thread, so that threads keep to their own cache lines.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of shards; further threads share them.
pub(crate) const SHARDS: usize = 8;

/// The calling thread's number.
#[inline]
pub(crate) fn home_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static HOME: Cell<usize> = const { Cell::new(usize::MAX) });
    HOME.with(|home| {
        if home.get() == usize::MAX {
            home.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        home.get()
    })
}
