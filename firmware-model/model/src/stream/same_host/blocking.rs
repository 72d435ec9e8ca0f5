//! Calls that may block because of another process run on threads that no other thread waits for.
//!
//! close(2) of a descriptor that another process made may block: a TCP socket that lingers, a file
//! of a file system in user space. When a unix socket is closed, the kernel also closes the
//! descriptors in it that were never received. Reading another process's memory may wait for the
//! file system that backs its pages. So the device's own threads make none of these calls.

use crate::sys;
use crate::sys::thread_start::ThreadStart;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::Builder;
use std::time::Duration;
use urnic_sync::{Condvar, Mutex, MutexGuard};

/// Most jobs that wait for a thread. While there are so many, the device accepts no further local
/// peer.
const MOST: usize = 64;
/// Most threads: a job that blocks occupies one.
const THREADS: usize = 4;
/// A thread without a job ends after this time.
const IDLE: Duration = Duration::from_secs(1);
/// The longest wait for an answer, which takes microseconds where nothing blocks.
const PATIENCE: Duration = Duration::from_secs(1);
const STACK: usize = 64 << 10;
/// Most threads of devices that have ended that may still block. With so many, a new device of this
/// process has no local peers.
const MOST_LEFT: usize = 64;

/// Threads of devices that have ended.
static LEFT: AtomicUsize = AtomicUsize::new(0);

type Job = Box<dyn FnOnce() + Send>;

/// Starts threads when there is something to do, which end when there is nothing more, and at once
/// when the device ends.
#[derive(Debug)]
pub(super) struct BlockingWork {
    start: ThreadStart,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// A job has come.
    called: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Threads without a job.
    idle: usize,
    /// The device has ended.
    ended: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({} jobs, {} threads)", self.jobs.len(), self.threads)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Runs the jobs that wait, and those that arrive while it runs.
    fn serve(&self) {
        let mut queue = self.lock();
        loop {
            while let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job();
                queue = self.lock();
            }
            if queue.ended {
                LEFT.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            queue.idle += 1;
            let (woken, timeout) = self.called.wait_timeout(queue, IDLE);
            queue = woken;
            queue.idle -= 1;
            if timeout.timed_out() && queue.jobs.is_empty() && !queue.ended {
                queue.threads -= 1;
                return;
            }
        }
    }
}

impl BlockingWork {
    /// # Errors
    /// `EAGAIN`: too many threads of earlier devices still block.
    pub(super) fn new(start: ThreadStart) -> Result<BlockingWork, Errno> {
        if LEFT.load(Ordering::Relaxed) >= MOST_LEFT {
            return Err(Errno::AGAIN);
        }
        let shared = Arc::default();
        Ok(BlockingWork { start, shared })
    }

    /// Whether so much waits that the device is to accept nothing more from others.
    pub(super) fn is_full(&self) -> bool {
        self.shared.lock().jobs.len() >= MOST
    }

    /// Has `owner` dropped by another thread.
    pub(super) fn close(&self, owner: impl Send + 'static) {
        self.give(Box::new(move || drop(owner)));
    }

    /// Runs `find` on another thread, and returns its result if it comes soon.
    pub(super) fn ask<T: Send + 'static>(&self, find: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let queue = self.shared.lock();
        let all_block = queue.threads == THREADS && queue.idle == 0 && !queue.jobs.is_empty();
        drop(queue);
        if all_block {
            return None;
        }
        let (found, answer) = sync_channel(1);
        self.give(Box::new(move || {
            let _ = found.send(find());
        }));
        answer.recv_timeout(PATIENCE).ok()
    }

    fn give(&self, job: Job) {
        let mut queue = self.shared.lock();
        queue.jobs.push_back(job);
        if queue.idle >= queue.jobs.len() {
            self.shared.called.notify_one();
            return;
        }
        if queue.threads == THREADS {
            return;
        }
        queue.threads += 1;
        drop(queue);
        let of_thread = self.shared.clone();
        let builder = Builder::new().name("urnic-blocking".to_owned()).stack_size(STACK);
        let run = Box::new(move || of_thread.serve());
        if let Err(error) = sys::with_signals_blocked(|| (self.start.0)(builder, run)) {
            tracing::debug!(%error, "no thread for calls that may block");
            // The next job tries it again.
            self.shared.lock().threads -= 1;
        }
    }
}

impl Drop for BlockingWork {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.ended = true;
        LEFT.fetch_add(queue.threads, Ordering::Relaxed);
        self.shared.called.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::mock::wait_for;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Whether jobs may continue, and how many ran on the thread that submitted them.
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
            if std::thread::current().name() != Some("urnic-blocking") {
                self.0.misplaced.fetch_add(1, Ordering::Relaxed);
                return;
            }
            let open = self.0.open.lock();
            drop(self.0.opened.wait_while(open, |open| !*open));
        }
    }

    #[test]
    fn shm_22_a_thread_that_submits_a_close_does_not_wait() {
        let blocking = BlockingWork::new(ThreadStart::default()).unwrap();
        let gate = Arc::new(Gate::default());
        for _ in 0..MOST + THREADS {
            blocking.close(Blocks(gate.clone()));
        }
        assert!(blocking.is_full());
        assert_eq!(blocking.ask(|| 1), None, "all threads are busy");
        *gate.open.lock() = true;
        gate.opened.notify_all();
        wait_for("the last close", || (Arc::strong_count(&gate) == 1).then_some(()));
        assert_eq!(gate.misplaced.load(Ordering::Relaxed), 0);
        wait_for("an answer", || blocking.ask(|| 1));
        assert!(!blocking.is_full());
    }

    #[test]
    fn shm_22_a_question_that_blocks_stops_no_other() {
        let blocking = BlockingWork::new(ThreadStart::default()).unwrap();
        let gate = Arc::new(Gate::default());
        let blocks = Blocks(gate.clone());
        assert_eq!(blocking.ask(move || drop(blocks)), None);
        assert_eq!(blocking.ask(|| 2), Some(2));
        *gate.open.lock() = true;
        gate.opened.notify_all();
        wait_for("its end", || (Arc::strong_count(&gate) == 1).then_some(()));
    }

    #[test]
    fn shm_22_the_threads_of_an_ended_device_end_when_nothing_blocks_them() {
        let blocking = BlockingWork::new(ThreadStart::default()).unwrap();
        let shared = blocking.shared.clone();
        let gate = Arc::new(Gate::default());
        blocking.close(Blocks(gate.clone()));
        assert_eq!(blocking.ask(|| 1), Some(1));
        drop(blocking);
        wait_for("the idle thread's end", || {
            (Arc::strong_count(&shared) == 2).then_some(())
        });
        assert!(LEFT.load(Ordering::Relaxed) >= 1, "one thread blocks");
        *gate.open.lock() = true;
        gate.opened.notify_all();
        wait_for("the other thread's end", || {
            (Arc::strong_count(&shared) == 1).then_some(())
        });
    }
}
