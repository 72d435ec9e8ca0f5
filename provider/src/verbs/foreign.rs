//! What an object of ours shares with libibverbs.

use std::cell::UnsafeCell;

/// Part of an object that libibverbs and the program write too.
pub(crate) struct Foreign<T>(UnsafeCell<T>);

// SAFETY: reached by raw pointer only; which thread may touch which field is the contract of
// libibverbs.
unsafe impl<T> Sync for Foreign<T> {}
// SAFETY: reached by raw pointer only; which thread may touch which field is the contract of
// libibverbs.
unsafe impl<T> Send for Foreign<T> {}

impl<T> Foreign<T> {
    pub(crate) fn new(value: T) -> Foreign<T> {
        Foreign(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0.get()
    }
}
