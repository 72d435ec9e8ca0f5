//! Values that live until the process ends, at places that all threads read without a lock.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A place for a value that is never freed: a later value replaces it, and references to the
/// earlier one stay valid. Reading is one load, also in a signal handler and in a forked child.
#[derive(Debug)]
pub struct Published<T: 'static>(AtomicPtr<T>);

impl<T: Sync> Published<T> {
    /// A place without a value.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Published<T> {
        Published(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value, if there is one.
    #[inline]
    pub fn get(&self) -> Option<&'static T> {
        Self::referenced(self.0.load(Ordering::Acquire))
    }

    /// The value; `make` makes it if there is none. Of threads that make one at the same time, one
    /// succeeds, and all get its value.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &'static T {
        if let Some(value) = self.get() {
            return value;
        }
        let made = Box::into_raw(Box::new(make()));
        let none = ptr::null_mut();
        let set = self
            .0
            .compare_exchange(none, made, Ordering::AcqRel, Ordering::Acquire);
        match set.err().and_then(Self::referenced) {
            Some(theirs) => {
                // SAFETY: `made` came from a box just now, and was not shared.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
            // SAFETY: `made` came from a box, which nothing frees from now on.
            None => unsafe { &*made },
        }
    }

    /// Replaces the value; returns the new one.
    pub fn set(&self, value: T) -> &'static T {
        let value = Box::leak(Box::new(value));
        self.refer_to(value);
        value
    }

    /// Replaces the value by one that is never freed.
    pub fn refer_to(&self, value: &'static T) {
        self.0.store(ptr::from_ref(value).cast_mut(), Ordering::Release);
    }

    /// Sets the value if there is none, to one that is never freed. Whether it did.
    pub fn claim_for(&self, value: &'static T) -> bool {
        let value = ptr::from_ref(value).cast_mut();
        let none = ptr::null_mut();
        self.0
            .compare_exchange(none, value, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Removes the value; returns it.
    pub fn take(&self) -> Option<&'static T> {
        Self::referenced(self.0.swap(ptr::null_mut(), Ordering::AcqRel))
    }

    #[inline]
    fn referenced(place: *mut T) -> Option<&'static T> {
        // SAFETY: only this type writes the pointer: it is null, or leads to a value that is never
        // freed, and to which there are only shared references. `T: Sync`.
        unsafe { place.as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_replaced_value_stays_valid() {
        let place = Published::new();
        assert_eq!(place.get(), None);
        let first = place.set(String::from("first"));
        let second = place.set(String::from("second"));
        assert_eq!((first.as_str(), second.as_str()), ("first", "second"));
        assert!(place.get().is_some_and(|now| ptr::eq(now, second)));
        assert!(!place.claim_for(first));
        place.take();
        assert!(place.claim_for(second));
        place.refer_to(first);
        assert!(place.take().is_some_and(|taken| ptr::eq(taken, first)));
        assert_eq!(place.get(), None);
    }

    #[test]
    fn threads_that_make_a_value_get_the_same_one() {
        let place = Published::new();
        let make = || ptr::from_ref(place.get_or_init(|| 1_u64)).addr();
        let all: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        assert!(all.iter().all(|one| *one == all[0]), "{all:x?}");
    }
}
