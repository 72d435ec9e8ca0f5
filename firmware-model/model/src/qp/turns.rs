//! Work that one thread at a time does, and for which no thread waits.
//!
//! A thread that needs work done tries the lock. If another thread has the lock, the first thread
//! records a request and tries again. If the lock is still taken, the request is enough: the thread
//! with the lock checks for requests after it releases the lock. Hence no post and no arrival is
//! lost, and no thread ever sleeps because of another thread's work. The work for other threads is
//! bounded: after [`ROUNDS`] the caller must handle the remaining requests.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};
use std::sync::{PoisonError, TryLockError};

/// Pieces of work that a thread does in one call: its own, and those that were requested during it.
const ROUNDS: u32 = 2;

/// State that one thread at a time uses, and the requests of the other threads.
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

    /// Has `requests` carried out: by `work` on this thread, with all requests that other threads
    /// record during it, or by the thread that has the lock. `after` runs after each piece of work,
    /// with the lock dropped, on the result of `work`. Returns whether a request is left: the
    /// caller must then make sure that `ask` is called again, if only with no request.
    #[must_use]
    #[inline]
    pub(crate) fn ask<R>(
        &self,
        requests: u32,
        mut work: impl FnMut(&mut T, u32) -> R,
        mut after: impl FnMut(R),
    ) -> bool {
        // A thread that gets the lock at once need not record its own requests.
        let mut own = requests;
        let mut recorded = requests == 0;
        let mut rounds = 0;
        loop {
            let mut state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if recorded => return false,
                Err(TryLockError::WouldBlock) => {
                    self.requests.fetch_or(own, Ordering::AcqRel);
                    (own, recorded) = (0, true);
                    // The request is set before the attempt, and the lock is released before the
                    // last check: with a full fence between the two steps on either side, one side
                    // detects the other.
                    fence(Ordering::SeqCst);
                    continue;
                }
            };
            let mut requests = std::mem::take(&mut own);
            recorded = true;
            if self.requests.load(Ordering::Relaxed) != 0 {
                requests |= self.requests.swap(0, Ordering::AcqRel);
            }
            let done = work(&mut state, requests);
            drop(state);
            after(done);
            fence(Ordering::SeqCst);
            rounds += 1;
            if self.requests.load(Ordering::Acquire) == 0 {
                return false;
            }
            if rounds == ROUNDS {
                return true;
            }
        }
    }

    /// Takes the lock, and waits for the thread that has it. Requests that other threads record
    /// during this remain: call [`ask`](Turns::ask) with no request afterwards.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn requests_during_the_work_are_done_by_the_same_thread_once() {
        let turns = Turns::new(Vec::new());
        let ask_in_vain =
            |requests| assert!(!turns.ask(requests, |_, _| unreachable!("the lock is taken"), |()| ()));
        let left = turns.ask(
            1,
            |done, requests| {
                done.push(requests);
                ask_in_vain(2);
                ask_in_vain(4);
            },
            |()| (),
        );
        assert!(left, "the second piece of work left requests as well");
        assert_eq!(*turns.lock(), [1, 6]);
        assert!(!turns.ask(0, |done, requests| done.push(requests), |()| ()));
        assert_eq!(*turns.lock(), [1, 6, 6]);
    }

    #[test]
    fn requests_outlast_a_command() {
        let turns = Turns::new(Vec::new());
        let command = turns.lock();
        assert!(!turns.ask(8, |_, _| unreachable!("the lock is taken"), |()| ()));
        drop(command);
        assert!(!turns.ask(1, |done, requests| done.push(requests), |()| ()));
        assert_eq!(*turns.lock(), [9]);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// An atomic, because loom switches threads at atomics, also within the work.
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

    /// Each request is carried out, by any of the threads.
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

    /// A command takes the lock with [`Turns::lock`] and checks for requests itself.
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
