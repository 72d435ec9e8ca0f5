//! Closes what other processes passed, on a thread that nobody waits for.
//!
//! close(2) of a descriptor that another process made may block: a TCP socket that lingers, a file
//! of a file system in user space. The kernel also closes what was passed and never received, when
//! the unix socket is closed that it was sent to. So the device's own threads close neither
//! descriptors of unknown kinds, nor unix sockets with unread messages.

use crate::config::ThreadStart;
use crate::sys;
use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

/// As many sockets and descriptors may wait to be closed before the device meets no further
/// process: the last message may add as many descriptors as one message has.
const MOST: usize = 64;
const STACK: usize = 64 << 10;

/// A descriptor, or what owns one.
type Owner = Box<dyn Send>;

/// Starts a thread when there is something to close, which ends when there is nothing more.
#[derive(Debug)]
pub(super) struct Closer {
    start: ThreadStart,
    queue: Arc<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Owner>,
    /// A thread closes them, or is about to.
    is_served: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({} waiting)", self.waiting.len())
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes what waits, and what comes meanwhile.
fn serve(queue: &Mutex<Queue>) {
    loop {
        let mut locked = lock(queue);
        let Some(next) = locked.waiting.pop_front() else {
            locked.is_served = false;
            return;
        };
        drop(locked);
        drop(next);
    }
}

impl Closer {
    pub(super) fn new(start: ThreadStart) -> Closer {
        let queue = Arc::default();
        Closer { start, queue }
    }

    /// Whether so much waits to be closed that the device is to accept nothing more from others.
    pub(super) fn is_full(&self) -> bool {
        lock(&self.queue).waiting.len() >= MOST
    }

    /// Has `owner` dropped by another thread.
    pub(super) fn close(&self, owner: Owner) {
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(owner);
        if mem::replace(&mut queue.is_served, true) {
            return;
        }
        drop(queue);
        let of_thread = self.queue.clone();
        let builder = Builder::new().name("urnic-closer".to_owned()).stack_size(STACK);
        let run = Box::new(move || serve(&of_thread));
        if let Err(error) = sys::with_signals_blocked(|| (self.start.0)(builder, run)) {
            tracing::debug!(%error, "no thread to close descriptors of other processes");
            // It is tried again with the next one.
            lock(&self.queue).is_served = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::wait_for;
    use std::sync::Condvar;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Whether closing may go on, and how many were closed by another thread than the closer's.
    #[derive(Default)]
    struct Gate {
        open: Mutex<bool>,
        opened: Condvar,
        misplaced: AtomicUsize,
    }

    /// Its close waits at the gate.
    struct Blocks(Arc<Gate>);

    impl Drop for Blocks {
        fn drop(&mut self) {
            if std::thread::current().name() != Some("urnic-closer") {
                self.0.misplaced.fetch_add(1, Ordering::Relaxed);
                return;
            }
            let open = self.0.open.lock().unwrap();
            drop(self.0.opened.wait_while(open, |open| !*open).unwrap());
        }
    }

    #[test]
    fn shm_22_whoever_gives_something_to_close_does_not_wait() {
        let closer = Closer::new(ThreadStart::default());
        let gate = Arc::new(Gate::default());
        for _ in 0..=MOST {
            closer.close(Box::new(Blocks(gate.clone())));
        }
        wait_for("a full queue", || closer.is_full().then_some(()));
        *gate.open.lock().unwrap() = true;
        gate.opened.notify_all();
        wait_for("the last close", || (Arc::strong_count(&gate) == 1).then_some(()));
        assert_eq!(gate.misplaced.load(Ordering::Relaxed), 0);
        wait_for("the end of the thread", || {
            (!lock(&closer.queue).is_served).then_some(())
        });
        // A new thread serves the next.
        closer.close(Box::new(Blocks(gate.clone())));
        wait_for("one more close", || (Arc::strong_count(&gate) == 1).then_some(()));
        assert!(!closer.is_full());
    }
}
