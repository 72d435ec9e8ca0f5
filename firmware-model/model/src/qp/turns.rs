//! Work that one thread at a time does, and that nobody waits for.
//!
//! Whoever wants something done leaves word and tries the lock. If somebody else is at it, the word
//! is enough: the holder looks again after letting go. Hence no post and no arrival is lost, and no
//! thread ever sleeps on another's work. Nor does one work for another for ever: after [`ROUNDS`]
//! what is left is the caller's to see to.

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
    /// Bits left by those who found the lock taken, and by those about to try it.
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
    /// dropped, on what `work` returned. Returns whether a request is left: the caller must see to
    /// it that `ask` is called again, if only with no request.
    #[must_use]
    pub(crate) fn ask<R>(
        &self,
        requests: u32,
        mut work: impl FnMut(&mut T, u32) -> R,
        mut after: impl FnMut(R),
    ) -> bool {
        self.requests.fetch_or(requests, Ordering::AcqRel);
        for _ in 0..ROUNDS {
            // Asking comes before the attempt, and letting go before the last look: with a full
            // fence between the two on either side, one of them sees the other.
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

    /// Takes the lock, waiting for whoever is at it. What others ask for meanwhile is left:
    /// [`ask`](Turns::ask) for nothing afterwards.
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

    /// Whatever is requested is done, whoever holds the lock when.
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

    /// A command takes the lock in the ordinary way, and looks after itself.
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
