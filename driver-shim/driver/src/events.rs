//! Events: the queues that the device fills, which thread handles them, and when the driver's
//! thread wakes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use urnic_sync::{Condvar, Mutex};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use urnic_device::command::{CreateEq, Handle, Opcode};
use urnic_device::event::{EVENT_LEN, Event, PHASE};
use urnic_device::record::{CqRecord, EqRecord};

use crate::attributes::Attributes;
use crate::command::CommandQueue;
use crate::dma::{DmaMemory, DmaPool};
use urnic_process::failure;
use urnic_process::fds::InternalFd;

/// Entries of the queue of asynchronous events.
const ASYNC_EVENTS: u32 = 4096;

/// `CLOCK_MONOTONIC`: the time of everything in the driver.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}

/// An event queue: a ring that the device fills. The thread that handles the interrupt empties the
/// ring, under a lock.
pub(crate) struct EventQueue {
    /// Device number of the queue.
    pub(crate) id: u32,
    ring: DmaMemory,
    record: DmaMemory,
    log_size: u32,
    consumer: Mutex<u32>,
}

impl EventQueue {
    /// Creates a queue with at least `entries` entries on `vector`.
    ///
    /// # Errors
    /// The errors of the command; `ENOMEM` if no memory is left.
    pub(crate) fn create(
        commands: &CommandQueue,
        pool: &Arc<DmaPool>,
        entries: u32,
        vector: u32,
    ) -> Result<EventQueue, Errno> {
        let log_size = entries.max(2).next_power_of_two().ilog2();
        let ring = pool.allocate(EVENT_LEN << log_size)?;
        let record = pool.allocate(size_of::<EqRecord>())?;
        let arguments = CreateEq {
            ring: ring.iova().into(),
            record: record.iova().into(),
            log_size: log_size.into(),
            vector: vector.into(),
        };
        let handle: Handle = commands.call(Opcode::CreateEq, &arguments)?;
        Ok(EventQueue {
            id: handle.id.get(),
            ring,
            record,
            log_size,
            consumer: Mutex::new(0),
        })
    }

    /// Takes all events, oldest first, and passes each to `take`.
    ///
    /// Events that arrive during the call are taken too, or the interrupt that follows them finds
    /// the lock free. `take` must not call this function.
    pub(crate) fn drain(&self, mut take: impl FnMut(Event)) {
        let mut consumer = self.consumer.lock();
        let record: &CqRecord = self.record.record();
        loop {
            let at = *consumer;
            let slot = (at & ((1 << self.log_size) - 1)) as usize * EVENT_LEN;
            let phase = 1 ^ (at >> self.log_size & 1);
            if self.ring.word(slot + PHASE).load(Ordering::Acquire) & 1 != phase {
                return;
            }
            let event: Event = self.ring.read(slot);
            *consumer = at.wrapping_add(1);
            record.consumer.store(*consumer, Ordering::Release);
            take(event);
        }
    }
}

/// The event queues of a device.
pub(crate) struct EventQueues {
    /// Asynchronous events of all objects: device queue 0.
    asynchronous: EventQueue,
    /// Completion notifications, one queue per vector.
    notifications: Vec<EventQueue>,
}

impl EventQueues {
    /// # Errors
    /// Those of [`EventQueue::create`].
    pub(crate) fn create(commands: &CommandQueue, attributes: &Attributes) -> Result<EventQueues, Errno> {
        let create = |entries, vector| EventQueue::create(commands, commands.pool(), entries, vector);
        let asynchronous = create(ASYNC_EVENTS, 0)?;
        // A notification needs an armed queue and disarms it: as many entries as queues never
        // overflow.
        let notifications = (0..attributes.completion_vectors)
            .map(|vector| create(attributes.max_cq, vector + 1))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(EventQueues {
            asynchronous,
            notifications,
        })
    }

    /// Asynchronous events of all objects.
    pub(crate) fn asynchronous(&self) -> &EventQueue {
        &self.asynchronous
    }

    /// The notifications of a completion vector.
    pub(crate) fn notifications(&self, vector: usize) -> Option<&EventQueue> {
        self.notifications.get(vector)
    }
}

/// The number of rounds of events that one call handles; the driver's thread handles further
/// events.
const ROUNDS: u32 = 8;
/// The value of [`EventLoop::asleep_until`] while the driver's thread computes its deadline.
const AWAKE: u64 = 0;

/// Selects the thread that handles asynchronous events, and the time until which the driver's
/// thread sleeps.
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
    poll: AdaptivePoll,
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
            poll: AdaptivePoll::default(),
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
    /// that already handles events. Call this with no lock held.
    pub(crate) fn handle_events(&self, handle_all: impl Fn()) {
        self.set_due();
        for _ in 0..ROUNDS {
            // The thread that handles events checks `due` after it unlocks.
            let Some(handling) = self.handling.try_lock() else {
                return;
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

    /// Calls `wait` with the time for which a thread that waits for an event of the connection
    /// manager runs the device itself; `wait` returns whether an event arrived. Returns `false`
    /// without a call if the time is zero.
    pub(crate) fn poll(&self, wait: impl FnOnce(Duration) -> bool) -> bool {
        self.poll.wait(wait)
    }

    /// Whether the next wait will probably poll, and see an event. True once for each wait that
    /// did: a program may also go on without a wait.
    pub(crate) fn expects_poll(&self) -> bool {
        self.poll.useful.swap(false, Ordering::Relaxed)
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

    /// Like [`EventLoop::wake_by`], if a deadline of an engine became earlier.
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
        *self.ended.0.lock() = true;
        self.ended.1.notify_all();
    }

    /// Waits until the driver's thread has ended, but no longer than `timeout`.
    pub(crate) fn wait_for_end(&self, timeout: Duration) {
        let (ended, changed) = &self.ended;
        let ended = ended.lock();
        drop(changed.wait_timeout_while(ended, timeout, |ended| !*ended));
    }
}

/// Longest poll. An answer over a local network rarely takes longer, even on a busy machine.
const LONGEST: Duration = Duration::from_micros(500);
/// The number of consecutive polls without an event, each half as long as the previous one, after
/// which threads sleep at once.
const FAILURES: u32 = 4;
/// While threads sleep at once, one of this many waits polls.
const RETRY_EVERY: u32 = 16;

/// Adaptive polling: how long a thread that waits for an event of the connection manager runs the
/// device itself. Counts the waits since the last one whose poll saw an event.
#[derive(Debug, Default)]
struct AdaptivePoll {
    failures: AtomicU32,
    /// The last poll saw an event.
    useful: AtomicBool,
}

impl AdaptivePoll {
    /// Calls `wait` with the time to poll for; `wait` returns whether an event arrived. Returns
    /// `false` without a call if the time is zero.
    fn wait(&self, wait: impl FnOnce(Duration) -> bool) -> bool {
        let time = self.time();
        let has_event = !time.is_zero() && wait(time);
        // Approximate: concurrent threads may lose each other's counts.
        let failures = if has_event {
            0
        } else {
            self.failures.load(Ordering::Relaxed).wrapping_add(1)
        };
        self.failures.store(failures, Ordering::Relaxed);
        self.useful.store(has_event, Ordering::Relaxed);
        has_event
    }

    fn time(&self) -> Duration {
        let failures = self.failures.load(Ordering::Relaxed);
        match failures.checked_sub(FAILURES) {
            None => LONGEST / (1 << failures),
            Some(more) if more % RETRY_EVERY == RETRY_EVERY - 1 => LONGEST,
            Some(_) => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_without_an_event_back_off_and_are_retried() {
        let poll = AdaptivePoll::default();
        let mut waits = Vec::new();
        for nth in 0..FAILURES + 2 * RETRY_EVERY {
            let has_event = poll.wait(|time| {
                waits.push((nth, time));
                false
            });
            assert!(!has_event);
        }
        let [first, second, .., last] = waits[..] else {
            panic!("{waits:?}")
        };
        assert_eq!(
            [first, second, last],
            [(0, LONGEST), (1, LONGEST / 2), (35, LONGEST)]
        );
        assert_eq!(
            waits.iter().map(|wait| wait.0).collect::<Vec<_>>(),
            [0, 1, 2, 3, 19, 35]
        );
        let successful = AdaptivePoll::default();
        successful.wait(|_| false);
        assert!(successful.wait(|_| true));
        assert!(successful.wait(|time| time == LONGEST));
    }
}
