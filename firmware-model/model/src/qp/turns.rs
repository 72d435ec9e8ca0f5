//! Work that one thread at a time does, and for which no thread waits.
//!
//! A thread that needs something done records a request and tries the lock. If another thread holds
//! the lock, the request is enough: the holder checks for requests again after it released the
//! lock. Hence no post and no arrival is lost, and no thread ever sleeps because of another's work.
//! The work for others is bounded: after [`ROUNDS`] the caller must handle what is left.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};
use std::sync::{PoisonError, TryLockError};

/// Pieces of work that a thread does in one go: its own, and what was requested meanwhile.
const ROUNDS: u32 = 2;

/// State that threads take turns at, and what they are requested to do with it.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    /// Request bits set by threads that found the lock taken, and by threads about to try it.
    requests: AtomicU32,
    state: Mutex<T>,
}

impl<T> Turns<T> {
    pub(crate) fn new(state: T) -> Turns<T> {
        Turns {
            requests: AtomicU32::new(0),
            state: Mutex::new(state),
        }
    }

    /// Has `requests` done: by `work` on this thread, with all that others requested meanwhile, or
    /// by the thread that holds the lock. `after` runs after each piece of work, with the lock
    /// dropped, on the result of `work`. Returns whether a request is left: the caller must then
    /// make sure that `ask` is called again, if only with no request.
    #[must_use]
    pub(crate) fn ask<R>(
        &self,
        requests: u32,
        mut work: impl FnMut(&mut T, u32) -> R,
        mut after: impl FnMut(R),
    ) -> bool {
        self.requests.fetch_or(requests, Ordering::AcqRel);
        for _ in 0..ROUNDS {
            // The request is set before the attempt, and the lock is released before the last
            // check: with a full fence between the two steps on either side, one side detects the
            // other.
            fence(Ordering::SeqCst);
            let mut state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return false,
            };
            let requests = self.requests.swap(0, Ordering::AcqRel);
            let done = work(&mut state, requests);
            drop(state);
            after(done);
            fence(Ordering::SeqCst);
            if self.requests.load(Ordering::Acquire) == 0 {
                return false;
            }
        }
        true
    }

    /// Takes the lock, and waits for the present holder. Requests of other threads remain
    /// meanwhile: call [`ask`](Turns::ask) with no request afterwards.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// An atomic, because loom changes threads at those: in the middle of the work, too.
    type Done = AtomicU32;

    fn ask(turns: &Turns<Done>, bit: u32) {
        let mut bit = bit;
        while turns.ask(
            bit,
            |done, requests| done.fetch_or(requests, Ordering::Relaxed),
            drop,
        ) {
            bit = 0;
        }
    }

    fn turns() -> Arc<Turns<Done>> {
        Arc::new(Turns::new(Done::new(0)))
    }

    fn done(turns: &Turns<Done>) -> u32 {
        turns.lock().load(Ordering::Relaxed)
    }

    /// Each request is carried out, whichever thread holds the lock.
    #[test]
    fn no_request_is_lost() {
        loom::model(|| {
            let turns = turns();
            let other = turns.clone();
            let other = thread::spawn(move || ask(&other, 1));
            ask(&turns, 2);
            other.join().unwrap();
            assert_eq!(done(&turns), 3);
        });
    }

    /// A command takes the lock in the ordinary way, and checks for requests itself.
    #[test]
    fn no_request_during_a_command_is_lost() {
        loom::model(|| {
            let turns = turns();
            let other = turns.clone();
            let other = thread::spawn(move || ask(&other, 1));
            turns.lock().fetch_or(4, Ordering::Relaxed);
            ask(&turns, 0);
            other.join().unwrap();
            assert_eq!(done(&turns), 5);
        });
    }
}
