//! The lock of a work or completion queue: one atomic instruction to lock, and a store and a full
//! fence to unlock, while no thread waits. Whoever publishes work under the lock needs that fence
//! as well.
//!
//! Two interfaces of libibverbs hold the lock across calls (`ibv_wr_start` … `ibv_wr_complete`,
//! `ibv_start_poll` … `ibv_end_poll`), which guards of std do not support: see [`Held::keep`]. The
//! lock waits by raw futex calls, so that it is no cancellation point.

use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::hint;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering, fence};

const FREE: u32 = 0;
const HELD: u32 = 1;

/// The number of checks before a waiter sleeps. A holder needs some hundred nanoseconds.
const SPINS: u32 = 100;

/// A value behind a lock.
pub(crate) struct Lock<T> {
    word: AtomicU32,
    /// Threads that sleep, or are about to.
    waiters: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed through `Held` only, of which at most one exists at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Lock<T> {
        Lock {
            word: AtomicU32::new(FREE),
            waiters: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits until no other thread holds the lock.
    #[inline]
    pub(crate) fn hold(&self) -> Held<'_, T> {
        if !self.take() {
            self.wait();
        }
        Held { lock: self }
    }

    /// Takes the lock if no other thread holds it.
    pub(crate) fn try_hold(&self) -> Option<Held<'_, T>> {
        self.take().then(|| Held { lock: self })
    }

    #[inline]
    fn take(&self) -> bool {
        self.word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
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
            if self.word.load(Ordering::Relaxed) == FREE && self.take() {
                return;
            }
            hint::spin_loop();
        }
        self.waiters.fetch_add(1, Ordering::Relaxed);
        // A holder that releases the lock from here on sees the number, or is seen to have done so.
        fence(Ordering::SeqCst);
        while !self.take() {
            // An error means that the word changed or a signal arrived: the loop checks the word
            // again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, HELD, None);
        }
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Possession of a [`Lock`]; dropping it releases the lock, and is a full fence.
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
        self.lock.word.store(FREE, Ordering::Release);
        fence(Ordering::SeqCst);
        // The lock is still there: nobody destroys its queue before this call has returned.
        if self.lock.waiters.load(Ordering::Relaxed) != 0 {
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

    /// Holders that hold it long, so that others sleep.
    #[test]
    fn threads_that_sleep_are_woken() {
        let lock = Arc::new(Lock::new(0));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = lock.clone();
                thread::spawn(move || {
                    for _ in 0..200 {
                        let mut held = lock.hold();
                        thread::yield_now();
                        *held += 1;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(*lock.hold(), 800);
        assert_eq!(lock.waiters.load(Ordering::Relaxed), 0);
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
        // Wait until the other thread sleeps, or is about to, then release the lock.
        while lock.waiters.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        // SAFETY: this thread kept the lock above.
        let mut held = unsafe { lock.resume() };
        *held = 2;
        drop(held);
        assert_eq!(other.join().unwrap(), 2);
    }
}
