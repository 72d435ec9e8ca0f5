//! The part of an object that the provider shares with libibverbs.

use std::cell::UnsafeCell;

/// A part of an object that libibverbs and the program also write.
pub(crate) struct SharedWithC<T>(UnsafeCell<T>);

// SAFETY: the value is accessed by raw pointer only; the contract of libibverbs determines which
// thread may access which field.
unsafe impl<T> Sync for SharedWithC<T> {}
// SAFETY: the value is accessed by raw pointer only; the contract of libibverbs determines which
// thread may access which field.
unsafe impl<T> Send for SharedWithC<T> {}

impl<T> SharedWithC<T> {
    pub(crate) fn new(value: T) -> SharedWithC<T> {
        SharedWithC(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0.get()
    }
}
