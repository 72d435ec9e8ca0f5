//! The meaning of the device's events for verbs and connections.

use rustix::io::Errno;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::QpState;
use urnic_wire::rdmap::TerminateError;

use crate::driver::{Driver, Qp};
use crate::objects::AsyncEvent;
use crate::stream_router::StreamEvent;
use urnic_process::interrupt_context::{self, Context};
use urnic_process::lock::lock;

impl Driver {
    /// Handles an interrupt. Notifies completions at once; handles all other events where no lock
    /// is held.
    pub(crate) fn interrupt(&self, vector: u32) {
        match (vector as usize)
            .checked_sub(1)
            .and_then(|v| self.notifications.get(v))
        {
            Some(queue) => queue.drain(|event| self.notify(event)),
            None => match interrupt_context::current() {
                Context::InterruptThread => self.attend(),
                Context::Deferred => self.event_loop.set_due(),
                Context::Call => self.event_loop.wake(),
            },
        }
    }

    /// Handles asynchronous events if some may be pending.
    pub(crate) fn attend_if_due(&self) {
        if self.event_loop.is_due() {
            self.attend();
        }
    }

    /// Handles asynchronous events, as [`EventLoop::attend`](crate::event_loop::EventLoop::attend).
    pub(crate) fn attend(&self) {
        self.event_loop.attend(|| {
            let mut events = Vec::new();
            self.async_events.drain(|event| events.push(event));
            // Commands raise events too: the next round handles those.
            interrupt_context::deferred(|| events.into_iter().for_each(|event| self.handle(event)));
        });
    }

    /// Handles a device that is gone or stopped permanently: the driver's thread takes over its
    /// work.
    pub(crate) fn lose(&self) {
        if self.commands.lose() {
            self.event_loop.wake();
        }
    }

    fn notify(&self, event: Event) {
        self.cqs.with(event.object.get(), |_, target| {
            target.events.completion(target.cookie);
        });
    }

    fn handle(&self, event: Event) {
        let object = event.object.get();
        match EventKind::from_raw(event.kind) {
            Some(EventKind::QpError) => {
                if let Some(qp) = self.qp(object) {
                    self.qp_failed(&qp, QpFault::from_raw(event.code.get()), event.data.get() as u32);
                }
            }
            Some(EventKind::CqError) => self.cqs.deliver(object, AsyncEvent::CqErr),
            Some(EventKind::LastWqe) => self.qps.deliver(object, AsyncEvent::QpLastWqe),
            Some(EventKind::PortChange) => self.contexts.deliver_to_all(AsyncEvent::GidChange),
            Some(EventKind::Fatal) => self.lose(),
            Some(EventKind::SrqLimit) => {
                self.srqs.with(object, |srq, target| {
                    srq.disarmed();
                    target.events.async_event(AsyncEvent::SrqLimit, target.cookie);
                });
            }
            // Completions have queues of their own.
            Some(EventKind::Completion) => {}
            Some(EventKind::Closed) => self.cm_lost(object, Errno::CONNRESET),
            // Verbs have no event for it: the connection manager handles an orderly end.
            Some(EventKind::PeerClosed) => tracing::debug!("qid {object}: the peer sends no more"),
            Some(
                kind @ (EventKind::FirstFpdu
                | EventKind::StreamConnected
                | EventKind::StreamAccepted
                | EventKind::StreamReceived
                | EventKind::StreamClosed),
            ) => {
                if let Some(event) = StreamEvent::of(kind, &event) {
                    self.route(event);
                }
            }
            None => tracing::warn!("unknown event {event:?}"),
        }
    }

    /// Handles a queue pair that the device moved to the error state.
    fn qp_failed(&self, qp: &Qp, fault: Option<QpFault>, terminate: u32) {
        {
            let _changes = lock(&qp.attr);
            // The program may have changed the state since.
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
            self.qps.deliver(qp.qid, event);
        }
    }
}

/// The reason why a queue pair failed, for the log: the fault, and the control word of `QpError`
/// with the words for its codes.
fn reason(fault: Option<QpFault>, control: u32) -> String {
    let fault = fault.map_or_else(|| "unknown fault".to_owned(), |fault| format!("{fault:?}"));
    let [first, code, ..] = control.to_be_bytes();
    match TerminateError::from_codes(first >> 4, first & 0xf, code) {
        Some(_) if control == 0 => fault,
        Some(error) => format!("{fault}, {control:#010x}: {error}"),
        None => format!("{fault}, {control:#010x}"),
    }
}

/// The event that an InfiniBand program gets. The completions show the program's own failed
/// requests, and the next completion shows a lost peer. So only errors of the *peer*, which no
/// completion shows, make an event.
fn async_event(fault: Option<QpFault>, terminate: u32) -> Option<AsyncEvent> {
    match fault? {
        QpFault::Requested | QpFault::TerminateReceived | QpFault::StreamLost | QpFault::LocalWork => None,
        QpFault::CqOverflow => Some(AsyncEvent::QpFatal),
        // Layer and error type of RFC 5040 §4.8: RDMAP remote protection and DDP tagged buffer
        // errors concern memory.
        QpFault::TerminateSent => Some(match terminate >> 24 {
            0x01 | 0x11 => AsyncEvent::QpAccessErr,
            0x02 | 0x12 => AsyncEvent::QpReqErr,
            _ => AsyncEvent::QpFatal,
        }),
    }
}
