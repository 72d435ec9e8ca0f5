//! The lock of a work or completion queue: one atomic instruction to lock, and a plain store to
//! unlock, while no thread waits. (An exchange in place of the store costs 5 to 9 % of the rate of
//! small messages.)
//!
//! The instruction that unlocks is the last access of a holder to the lock. So a thread that
//! destroys the queue takes the lock first ([`Lock::outlast_holders`]), and may free it then.
//!
//! If a holder finds that no thread waits, and stores, it misses a thread that begins to wait
//! between the two. Such a thread checks the lock again after [`LONGEST_SLEEP`].
//!
//! Two interfaces of libibverbs hold the lock across calls (`ibv_wr_start` … `ibv_wr_complete`,
//! `ibv_start_poll` … `ibv_end_poll`), which guards of std do not support: see [`Held::keep`]. The
//! lock waits by raw futex calls, so that it is no cancellation point.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
use std::cell::UnsafeCell;
use std::hint;
use std::mem;
use std::ops::{Deref, DerefMut};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

use word::Word;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and threads may sleep until it is free.
const AWAITED: u32 = 2;

/// The longest sleep of a thread that waits, if the holder did not see it.
#[cfg(not(loom))]
const LONGEST_SLEEP: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// The number of checks before a waiter sleeps. A holder needs some hundred nanoseconds.
const SPINS: u32 = if cfg!(loom) { 0 } else { 100 };

/// The word of a lock, for which threads can sleep.
#[cfg(not(loom))]
mod word {
    use rustix::thread::futex;
    use std::ops::Deref;
    use std::sync::atomic::AtomicU32;

    #[derive(Debug)]
    pub(super) struct Word(AtomicU32);

    impl Word {
        pub(super) const fn new(value: u32) -> Word {
            Word(AtomicU32::new(value))
        }

        /// Sleeps if the word has this value, for a moment. May return early: the value then
        /// changed, or a signal arrived.
        pub(super) fn sleep(&self, value: u32) {
            let longest = Some(&super::LONGEST_SLEEP);
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, value, longest);
        }

        /// Wakes a thread that sleeps. The word may have been freed: for a private futex the kernel
        /// only compares addresses, and a thread that sleeps for another word at this address
        /// checks its word again.
        pub(super) fn wake(&self) {
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
        }
    }

    impl Deref for Word {
        type Target = AtomicU32;
        #[inline]
        fn deref(&self) -> &AtomicU32 {
            &self.0
        }
    }
}

/// The futex calls for loom: check and sleep are one step under a lock, as in the kernel.
#[cfg(loom)]
mod word {
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};
    use std::ops::Deref;

    #[derive(Debug)]
    pub(super) struct Word(AtomicU32, Mutex<()>, Condvar);

    impl Word {
        pub(super) fn new(value: u32) -> Word {
            Word(AtomicU32::new(value), Mutex::new(()), Condvar::new())
        }

        pub(super) fn sleep(&self, value: u32) {
            let kernel = self.1.lock().unwrap();
            if self.load(Ordering::Relaxed) == value {
                drop(self.2.wait(kernel));
            }
        }

        pub(super) fn wake(&self) {
            let _kernel = self.1.lock().unwrap();
            self.2.notify_one();
        }
    }

    impl Deref for Word {
        type Target = AtomicU32;
        fn deref(&self) -> &AtomicU32 {
            &self.0
        }
    }
}

/// A value that one thread at a time accesses.
#[derive(Debug)]
pub struct Lock<T> {
    word: Word,
    /// The holder keeps the lock from one call of the program to another.
    kept: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed through `Held` only, of which at most one exists at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// A lock that no thread holds.
    pub fn new(value: T) -> Lock<T> {
        Lock {
            word: Word::new(FREE),
            kept: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits until no other thread holds the lock.
    #[inline]
    pub fn hold(&self) -> Held<'_, T> {
        if !self.take() {
            self.wait();
        }
        Held { lock: self }
    }

    /// Takes the lock if no other thread holds it.
    pub fn try_hold(&self) -> Option<Held<'_, T>> {
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
    pub unsafe fn resume(&self) -> Held<'_, T> {
        self.kept.store(false, Ordering::Relaxed);
        Held { lock: self }
    }

    /// Waits until no call holds the lock any more. The lock may be freed then, if no new call
    /// begins. This does not wait for a thread that keeps the lock between calls.
    pub fn outlast_holders(&self) {
        if !self.kept.load(Ordering::Relaxed) {
            drop(self.hold());
        }
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..SPINS {
            if self.word.load(Ordering::Relaxed) == FREE && self.take() {
                return;
            }
            hint::spin_loop();
        }
        // Other threads may sleep as well, so the word says so while this thread holds the lock.
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            self.word.sleep(AWAITED);
        }
    }
}

/// Possession of a [`Lock`]; dropping it releases the lock.
#[derive(Debug)]
pub struct Held<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Held<'_, T> {
    /// Keeps the lock held after this scope, until [`Lock::resume`].
    #[inline]
    pub fn keep(self) {
        self.lock.kept.store(true, Ordering::Relaxed);
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
        let word = &self.lock.word;
        // Loom has no time-outs, so it uses the exchange alone.
        if !cfg!(loom) && word.load(Ordering::Relaxed) == HELD {
            word.store(FREE, Ordering::Release);
        } else if word.swap(FREE, Ordering::Release) == AWAITED {
            word.wake();
        }
    }
}

#[cfg(all(test, not(loom)))]
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
        await_a_waiter(&lock);
        // SAFETY: this thread kept the lock above.
        let mut held = unsafe { lock.resume() };
        *held = 2;
        drop(held);
        assert_eq!(other.join().unwrap(), 2);
    }

    fn await_a_waiter<T>(lock: &Lock<T>) {
        while lock.word.load(Ordering::Relaxed) != AWAITED {
            thread::yield_now();
        }
    }

    #[test]
    fn holders_are_outlasted_and_keepers_are_not_waited_for() {
        let lock = Arc::new(Lock::new(1));
        let held = lock.hold();
        let other = {
            let lock = lock.clone();
            thread::spawn(move || {
                lock.outlast_holders();
                // SAFETY: the test reads what the holder wrote, and no thread holds the lock.
                unsafe { *lock.value.get() }
            })
        };
        await_a_waiter(&lock);
        assert!(!other.is_finished());
        let mut held = held;
        *held = 2;
        drop(held);
        assert_eq!(other.join().unwrap(), 2);
        lock.hold().keep();
        lock.outlast_holders();
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn no_thread_sleeps_for_ever() {
        loom::model(|| {
            let lock = Arc::new(Lock::new(0));
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let lock = lock.clone();
                    thread::spawn(move || *lock.hold() += 1)
                })
                .collect();
            *lock.hold() += 1;
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!(*lock.hold(), 3);
        });
    }

    /// A holder sets the flag last, as a poster publishes. The thread that sees it outlasts it.
    #[test]
    fn the_lock_is_free_when_its_holders_are_outlasted() {
        loom::model(|| {
            let shared = Arc::new((Lock::new(0), AtomicBool::new(false)));
            let other = shared.clone();
            let other = thread::spawn(move || {
                let mut held = other.0.hold();
                *held = 1;
                other.1.store(true, Ordering::Release);
            });
            if shared.1.load(Ordering::Acquire) {
                shared.0.outlast_holders();
                assert_eq!(shared.0.word.load(Ordering::Relaxed), FREE);
            }
            other.join().unwrap();
        });
    }
}
