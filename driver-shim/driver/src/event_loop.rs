//! The event loop: selects the thread that handles asynchronous events, and the time until which
//! the driver's thread sleeps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, TryLockError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use urnic_process::failure;
use urnic_process::fds::InternalFd;
use urnic_process::lock::lock;

/// The number of rounds of events that one call handles before it leaves the rest to the driver's
/// thread.
const ROUNDS: u32 = 8;
/// The value of [`EventLoop::asleep_until`] while the driver's thread computes its deadline.
const AWAKE: u64 = 0;

pub(crate) struct EventLoop {
    /// Held while events are handled.
    handling: Mutex<()>,
    /// There may be events to handle.
    due: AtomicBool,
    /// Wakes the driver's thread.
    wake: InternalFd,
    /// The time until which the driver's thread sleeps, in nanoseconds of its clock, or [`AWAKE`].
    asleep_until: AtomicU64,
    stopped: AtomicBool,
    /// The driver's thread delivered the data of completed requests, and ended.
    ended: (Mutex<bool>, Condvar),
}

impl EventLoop {
    /// # Errors
    /// `EMFILE` or `ENFILE` if no fd is left, `ENOMEM` if no memory is left.
    pub(crate) fn new() -> Result<EventLoop, Errno> {
        let wake = InternalFd::of_device(failure::named(
            "eventfd2",
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK),
        )?)?;
        Ok(EventLoop {
            handling: Mutex::default(),
            due: AtomicBool::new(false),
            wake,
            asleep_until: AtomicU64::new(AWAKE),
            stopped: AtomicBool::new(false),
            ended: Default::default(),
        })
    }

    /// Whether there may be events to handle.
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::SeqCst)
    }

    /// Marks an event for the next call of [`EventLoop::handle_events`].
    pub(crate) fn set_due(&self) {
        self.due.store(true, Ordering::SeqCst);
    }

    /// Handles asynchronous events, oldest first: on this thread by `handle_all`, or on the thread
    /// that already handles events. To be called with no lock held.
    pub(crate) fn handle_events(&self, handle_all: impl Fn()) {
        self.set_due();
        for _ in 0..ROUNDS {
            // The thread that handles events checks `due` after it unlocks.
            let handling = match self.handling.try_lock() {
                Ok(handling) => handling,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            if self.due.swap(false, Ordering::SeqCst) {
                handle_all();
            }
            drop(handling);
            if !self.is_due() {
                return;
            }
        }
        self.wake();
    }

    /// The descriptor that wakes the driver's thread; `None` in a forked child.
    pub(crate) fn wake_fd(&self) -> &InternalFd {
        &self.wake
    }

    /// Wakes the driver's thread.
    pub(crate) fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            // A full counter means that a wake-up is pending.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }

    /// Wakes the driver's thread if it would sleep beyond `at`.
    fn wake_by(&self, at: Duration) {
        let until = self.asleep_until.load(Ordering::SeqCst);
        if until == AWAKE || (at.as_nanos() as u64) < until {
            self.wake();
        }
    }

    /// As [`EventLoop::wake_by`], if a deadline of an engine became earlier.
    pub(crate) fn wake_if_earlier(&self, before: Option<Duration>, after: Option<Duration>) {
        if let Some(after) = after
            && before.is_none_or(|before| after < before)
        {
            self.wake_by(after);
        }
    }

    /// Marks that the driver's thread is awake and computes its deadline.
    pub(crate) fn set_awake(&self) {
        self.asleep_until.store(AWAKE, Ordering::SeqCst);
    }

    /// Marks that the driver's thread sleeps until `deadline`, or without end.
    pub(crate) fn sleep_until(&self, deadline: Option<Duration>) {
        let until = deadline.map_or(u64::MAX, |at| at.as_nanos() as u64);
        self.asleep_until.store(until, Ordering::SeqCst);
    }

    /// Requests the end of the driver's thread. Returns whether this is the first call.
    pub(crate) fn stop(&self) -> bool {
        !self.stopped.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Marks that the driver's thread has ended.
    pub(crate) fn end(&self) {
        *lock(&self.ended.0) = true;
        self.ended.1.notify_all();
    }

    /// Waits until the driver's thread has ended, but no longer than `timeout`.
    pub(crate) fn wait_for_end(&self, timeout: Duration) {
        let (ended, changed) = &self.ended;
        let ended = lock(ended);
        drop(changed.wait_timeout_while(ended, timeout, |ended| !*ended));
    }
}
