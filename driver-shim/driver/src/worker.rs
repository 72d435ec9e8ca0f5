//! The driver's own thread, and what the events of the device mean to verbs.

use std::sync::Arc;
use std::time::Duration;
use urnic_model::threads;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, TryLockError};
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::QpState;
use urnic_wire::rdmap::TerminateError;

use super::qp::Qp;
use super::{AsyncEvent, Driver};
use urnic_process::failure;
use urnic_process::fds::InternalFd;
use urnic_process::interrupt_context::{self, Place};
use urnic_process::lock::lock;
use urnic_process::signals;

/// Looks at the queue of events in one go, before what is left is the driver's thread's.
const ROUNDS: u32 = 8;
/// [`Driver::asleep_until`] while the thread works out until when it may sleep.
pub(super) const AWAKE: u64 = 0;

/// What the thread sleeps on.
pub(super) fn wake_fd() -> Result<InternalFd, Errno> {
    InternalFd::of_device(failure::named(
        "eventfd2",
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK),
    )?)
}

/// `CLOCK_MONOTONIC`: the time of everything in the driver.
pub(super) fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}

/// Starts the thread, with all signals blocked: they are the program's.
pub(super) fn start(driver: Arc<Driver>) -> Result<(), Errno> {
    let thread = std::thread::Builder::new()
        .name("urnic-driver".to_owned())
        .stack_size(256 << 10);
    let started = signals::blocked(|| threads::start(thread, move || driver.serve()));
    let started = started.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN));
    failure::named("clone3", started).map(drop)
}

impl Driver {
    /// An interrupt: completions are told at once, everything else where nothing is held.
    pub(super) fn interrupt(&self, vector: u32) {
        match (vector as usize)
            .checked_sub(1)
            .and_then(|v| self.notifications.get(v))
        {
            Some(queue) => queue.drain(|event| self.notify(event)),
            None => match interrupt_context::here() {
                Place::AtRest => self.attend(),
                Place::Within => self.events_due.store(true, Ordering::SeqCst),
                Place::Anywhere => self.wake(),
            },
        }
    }

    /// Whether some may be there to be handled.
    pub(super) fn has_events(&self) -> bool {
        self.events_due.load(Ordering::SeqCst)
    }

    /// Handles them, if so.
    pub(super) fn attend_if_due(&self) {
        if self.has_events() {
            self.attend();
        }
    }

    /// Handles asynchronous events, oldest first: on this thread, or on the one that is at it. To be called with nothing held.
    pub(super) fn attend(&self) {
        self.events_due.store(true, Ordering::SeqCst);
        for _ in 0..ROUNDS {
            // Whoever is at it looks again after letting go.
            let turn = match self.events_turn.try_lock() {
                Ok(turn) => turn,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            if self.events_due.swap(false, Ordering::SeqCst) {
                let mut events = Vec::new();
                self.async_events.drain(|event| events.push(event));
                // Commands raise events too: those come in the next round.
                interrupt_context::within(|| events.into_iter().for_each(|event| self.handle(event)));
            }
            drop(turn);
            if !self.events_due.load(Ordering::SeqCst) {
                return;
            }
        }
        self.wake();
    }

    pub(super) fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            // Full means that a wake-up is pending.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }

    /// Something is due at `at`, which was not known before.
    pub(super) fn wake_by(&self, at: Duration) {
        let until = self.asleep_until.load(Ordering::SeqCst);
        if until == AWAKE || (at.as_nanos() as u64) < until {
            self.wake();
        }
    }

    /// The device is gone, or stopped for good: the thread sees to what that means.
    pub(super) fn lose(&self) {
        if self.commands.lose() {
            self.wake();
        }
    }

    fn notify(&self, event: Event) {
        let cqs = self.cqs.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, target)) = cqs.get(&event.object.get()) {
            target.events.completion(target.cookie);
        }
    }

    fn serve(&self) {
        tracing::debug!("driver thread started");
        let mut loss = None;
        while !self.stopped.load(Ordering::Acquire) {
            self.attend();
            self.asleep_until.store(AWAKE, Ordering::SeqCst);
            let deadline = interrupt_context::within(|| {
                let flushing = self
                    .commands
                    .is_lost()
                    .then(|| self.replace_device(loss.get_or_insert_with(|| self.take_over())))
                    .flatten();
                [flushing, self.native_tick(), self.cm_tick()]
                    .into_iter()
                    .flatten()
                    .min()
            });
            let until = deadline.map_or(u64::MAX, |at| at.as_nanos() as u64);
            self.asleep_until.store(until, Ordering::SeqCst);
            if self.has_events() {
                // What is due earlier than that wakes.
                self.attend();
            }
            let timeout = deadline.map(|at| at.saturating_sub(now())).map(|left| Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            });
            let Some(wake) = self.wake.get() else { break };
            let stat_socket = self
                .stat_socket
                .get()
                .and_then(|stat_socket| Some((stat_socket, stat_socket.fd()?)));
            let mut sources = vec![PollFd::new(&wake, PollFlags::IN)];
            sources.extend(stat_socket.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
            let _ = poll(&mut sources, timeout.as_ref());
            let mut count = [0; 8];
            let _ = rustix::io::read(wake, &mut count);
            if let Some((stat_socket, _)) = stat_socket {
                stat_socket.answer(|| self.snapshot());
            }
        }
        self.bus.shutdown();
        *lock(&self.ended.0) = true;
        self.ended.1.notify_all();
        tracing::debug!("driver thread ended");
    }

    fn handle(&self, event: Event) {
        let object = event.object.get();
        match EventKind::from_raw(event.kind) {
            Some(EventKind::QpError) => {
                if let Some(qp) = self.qp(object) {
                    self.qp_failed(&qp, QpFault::from_raw(event.code.get()), event.data.get() as u32);
                }
            }
            Some(EventKind::CqError) => {
                let cqs = self.cqs.read().unwrap_or_else(PoisonError::into_inner);
                if let Some((_, target)) = cqs.get(&object) {
                    target.events.async_event(AsyncEvent::CqErr, target.cookie);
                }
            }
            Some(EventKind::LastWqe) => self.tell(object, AsyncEvent::QpLastWqe),
            Some(EventKind::PortChange) => self.tell_all(AsyncEvent::GidChange),
            Some(EventKind::Fatal) => self.lose(),
            Some(EventKind::SrqLimit) => {
                let srqs = self.srqs.read().unwrap_or_else(PoisonError::into_inner);
                if let Some((srq, target)) = srqs.get(&object) {
                    srq.disarmed();
                    target.events.async_event(AsyncEvent::SrqLimit, target.cookie);
                }
            }
            // Completions have queues of their own.
            Some(EventKind::Completion) => {}
            Some(EventKind::Closed) => self.cm_lost(object, Errno::CONNRESET),
            // Programs are not told that the peer stopped talking: an orderly end is the connection manager's business.
            Some(EventKind::PeerClosed) => tracing::debug!("qid {object}: the peer is done"),
            Some(
                kind @ (EventKind::FirstFpdu
                | EventKind::StreamConnected
                | EventKind::StreamAccepted
                | EventKind::StreamReceived
                | EventKind::StreamClosed),
            ) => {
                if !self.cm_event(kind, &event) {
                    self.native_event(kind, &event);
                }
            }
            None => tracing::warn!("unknown event {event:?}"),
        }
    }

    /// A queue pair went to the error state by itself.
    fn qp_failed(&self, qp: &Qp, fault: Option<QpFault>, terminate: u32) {
        {
            let _changes = lock(&qp.attr);
            // The program may have moved it on since.
            if qp.device_state() != Ok(QpState::Err) {
                return;
            }
            self.native_retire(qp.qpn, false);
            qp.reach(QpState::Err);
        }
        tracing::debug!("{qp:?}: failed: {}", reason(fault, terminate));
        qp.open_gate();
        self.cm_lost(qp.qid, Errno::CONNRESET);
        if let Some(event) = async_event(fault, terminate) {
            self.tell(qp.qid, event);
        }
    }

    fn tell(&self, qid: u32, event: AsyncEvent) {
        let qps = self.qps.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, target)) = qps.get(&qid) {
            target.events.async_event(event, target.cookie);
        }
    }

    pub(super) fn tell_all(&self, event: AsyncEvent) {
        let contexts = self.contexts.read().unwrap_or_else(PoisonError::into_inner);
        contexts.values().for_each(|events| events.async_event(event, 0));
    }
}

/// Why a queue pair failed, for the log: the fault, and the control word of `QpError` with the words for its codes.
fn reason(fault: Option<QpFault>, control: u32) -> String {
    let fault = fault.map_or_else(|| "unknown fault".to_owned(), |fault| format!("{fault:?}"));
    let [first, code, ..] = control.to_be_bytes();
    match TerminateError::from_codes(first >> 4, first & 0xf, code) {
        Some(_) if control == 0 => fault,
        Some(error) => format!("{fault}, {control:#010x}: {error}"),
        None => format!("{fault}, {control:#010x}"),
    }
}

/// What an InfiniBand program is told. It hears of its own failed requests by their completions and of a lost peer by its next one, so
/// only what the *peer* did wrong, and what no completion tells, is an event.
fn async_event(fault: Option<QpFault>, terminate: u32) -> Option<AsyncEvent> {
    match fault? {
        QpFault::Requested | QpFault::TerminateReceived | QpFault::StreamLost | QpFault::LocalWork => None,
        QpFault::CqOverflow => Some(AsyncEvent::QpFatal),
        // Layer and error type of RFC 5040 §4.8: RDMAP remote protection and DDP tagged buffer errors are about memory.
        QpFault::TerminateSent => Some(match terminate >> 24 {
            0x01 | 0x11 => AsyncEvent::QpAccessErr,
            0x02 | 0x12 => AsyncEvent::QpReqErr,
            _ => AsyncEvent::QpFatal,
        }),
    }
}
