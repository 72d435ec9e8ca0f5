//! The lock of a work or completion queue: one word, one atomic instruction to lock and one to
//! unlock while no thread waits.
//!
//! Two interfaces of libibverbs hold the lock across calls (`ibv_wr_start` … `ibv_wr_complete`,
//! `ibv_start_poll` … `ibv_end_poll`), which guards of std do not support: see [`Held::keep`]. The
//! lock waits by raw futex calls, so that it is no cancellation point.

use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::hint;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// The lock is held, and a thread may sleep.
const AWAITED: u32 = 2;

/// The number of checks before a waiter sleeps. A holder needs some hundred nanoseconds.
const SPINS: u32 = 100;

/// A value behind a lock.
pub(crate) struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed through `Held` only, of which at most one exists at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Lock<T> {
        Lock {
            word: AtomicU32::new(FREE),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits until no other thread holds the lock.
    #[inline]
    pub(crate) fn hold(&self) -> Held<'_, T> {
        if self
            .word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            self.wait();
        }
        Held { lock: self }
    }

    /// Takes the lock if no other thread holds it.
    pub(crate) fn try_hold(&self) -> Option<Held<'_, T>> {
        self.word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
            .then(|| Held { lock: self })
    }

    /// Resumes the possession that [`Held::keep`] left.
    ///
    /// # Safety
    /// The lock was kept, by this thread or with a hand-over to it, and not resumed since.
    #[inline]
    pub(crate) unsafe fn resume(&self) -> Held<'_, T> {
        Held { lock: self }
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..SPINS {
            if self.word.load(Ordering::Relaxed) == FREE
                && self
                    .word
                    .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
            hint::spin_loop();
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            // An error means that the word changed or a signal arrived: the loop checks the word
            // again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, AWAITED, None);
        }
    }
}

/// Possession of a [`Lock`]; dropping it releases the lock.
pub(crate) struct Held<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Held<'_, T> {
    /// Keeps the lock held after this scope, until [`Lock::resume`].
    #[inline]
    pub(crate) fn keep(self) {
        mem::forget(self);
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this value holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this value holds the lock.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.lock.word.swap(FREE, Ordering::Release) == AWAITED {
            let _ = futex::wake(&self.lock.word, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn increments_of_many_threads_are_all_counted() {
        let lock = Arc::new(Lock::new(0u64));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = lock.clone();
                thread::spawn(move || (0..50_000).for_each(|_| *lock.hold() += 1))
            })
            .collect();
        for t in threads {
            t.join().unwrap();
        }
        assert_eq!(*lock.hold(), 200_000);
    }

    #[test]
    fn try_hold_takes_a_free_lock_only() {
        let lock = Lock::new(1);
        {
            let mut held = lock.try_hold().unwrap();
            *held = 2;
            assert!(lock.try_hold().is_none());
        }
        assert_eq!(*lock.try_hold().unwrap(), 2);
    }

    #[test]
    fn a_kept_lock_excludes_others_until_resumed() {
        let lock = Arc::new(Lock::new(1));
        lock.hold().keep();
        let other = {
            let lock = lock.clone();
            thread::spawn(move || *lock.hold())
        };
        // Wait until the other thread sleeps on the word, then release the lock.
        while lock.word.load(Ordering::Relaxed) != AWAITED {
            thread::yield_now();
        }
        // SAFETY: this thread kept the lock above.
        let mut held = unsafe { lock.resume() };
        *held = 2;
        drop(held);
        assert_eq!(other.join().unwrap(), 2);
    }
}
