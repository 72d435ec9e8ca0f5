//! Locks that a panic does not close.
//!
//! These are the locks of the standard library without poisoning: what they protect is valid
//! between any two statements of a holder, so a panic of one holder is no reason for the next one
//! to fail.
//!
//! Besides, [`Published`] is for values that threads read without a lock.

mod published;

pub use published::Published;

use std::fmt;
use std::sync::{self, PoisonError, TryLockError};
use std::time::Duration;

pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult};

/// Mutual exclusion: [`std::sync::Mutex`] without poisoning.
#[derive(Default)]
pub struct Mutex<T: ?Sized>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// An unlocked mutex with this value.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(sync::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock and takes it.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock; `None`: another thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The value, which no other thread can hold.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One writer or several readers: [`std::sync::RwLock`] without poisoning.
#[derive(Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// An unlocked lock with this value.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits until no thread writes.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other thread reads or writes.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value, which no other thread can hold.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Waiting for a change of what a mutex protects: [`std::sync::Condvar`] without poisoning.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// Without waiting threads.
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    /// Wakes a thread that waits.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Gives the lock up until a thread wakes this one, or without a reason.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the lock up while `condition` holds.
    pub fn wait_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let waited = self.0.wait_while(guard, condition);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the lock up until a thread wakes this one, or for this time.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> (MutexGuard<'a, T>, WaitTimeoutResult) {
        let waited = self.0.wait_timeout(guard, time);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the lock up while `condition` holds, for this time at most.
    pub fn wait_timeout_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> (MutexGuard<'a, T>, WaitTimeoutResult) {
        let waited = self.0.wait_timeout_while(guard, time, condition);
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn panic_with<G>(hold: impl FnOnce() -> G + Send) {
        let panicked = thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _held = hold();
                    panic!("on purpose");
                })
                .join()
        });
        assert!(panicked.is_err());
    }

    #[test]
    fn a_mutex_is_usable_after_a_panic_of_its_holder() {
        let mut mutex = Mutex::new(1);
        panic_with(|| mutex.lock());
        assert_eq!(*mutex.lock(), 1);
        assert_eq!(mutex.try_lock().as_deref(), Some(&1));
        assert_eq!(*mutex.get_mut(), 1);
        let held = mutex.lock();
        assert!(mutex.try_lock().is_none());
        drop(held);
    }

    #[test]
    fn a_lock_of_readers_is_usable_after_a_panic_of_a_writer() {
        let mut lock = RwLock::new(1);
        panic_with(|| lock.write());
        *lock.write() += 1;
        assert_eq!(*lock.read(), 2);
        assert_eq!(*lock.get_mut(), 2);
    }

    #[test]
    fn a_wait_ends_after_a_panic_of_a_holder() {
        let (mutex, changed) = (Mutex::new(false), Condvar::new());
        panic_with(|| mutex.lock());
        let (is_set, waited) = changed.wait_timeout(mutex.lock(), Duration::ZERO);
        assert!(!*is_set && waited.timed_out());
        drop(is_set);
        thread::scope(|scope| {
            scope.spawn(|| {
                *mutex.lock() = true;
                changed.notify_all();
            });
            assert!(*changed.wait_while(mutex.lock(), |is_set| !*is_set));
        });
    }
}
