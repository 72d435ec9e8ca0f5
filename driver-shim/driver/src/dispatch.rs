//! Handling of the device's events: notifications, asynchronous events of verbs, and connections.

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
                Context::InterruptThread => self.handle_events(),
                Context::Deferred => self.event_loop.set_due(),
                Context::Call => self.event_loop.wake(),
            },
        }
    }

    /// Handles asynchronous events if some may be pending.
    pub(crate) fn handle_events_if_due(&self) {
        if self.event_loop.is_due() {
            self.handle_events();
        }
    }

    /// Handles asynchronous events, as
    /// [`EventLoop::handle_events`](crate::event_loop::EventLoop::handle_events).
    pub(crate) fn handle_events(&self) {
        self.event_loop.handle_events(|| {
            let mut events = Vec::new();
            self.async_events.drain(|event| events.push(event));
            // Commands also cause events, which the next round handles.
            interrupt_context::deferred(|| events.into_iter().for_each(|event| self.handle(event)));
            self.receive_messages();
        });
    }

    /// Records that the device was removed or stopped permanently. The driver's thread then flushes
    /// the queues in place of the device.
    pub(crate) fn device_lost(&self) {
        if self.commands.mark_lost() {
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
            Some(EventKind::Fatal) => self.device_lost(),
            Some(EventKind::SrqLimit) => {
                self.srqs.with(object, |srq, target| {
                    srq.disarmed();
                    target.events.async_event(AsyncEvent::SrqLimit, target.cookie);
                });
            }
            // Completions have separate event queues.
            Some(EventKind::Completion) => {}
            Some(EventKind::Closed) => {
                self.native_lost(object);
                self.cm_lost(object, Errno::CONNRESET);
            }
            // Verbs have no event for an orderly end; the connection manager handles it.
            Some(EventKind::PeerClosed) => {
                tracing::debug!("qid {object}: the peer closed its direction of the stream")
            }
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
            Some(EventKind::DatagramRefused) => {
                let errno = Errno::from_raw_os_error(event.code.get().into());
                self.message_refused(object, event.data.get() as u32, errno);
            }
            None => tracing::warn!("unknown event {event:?}"),
        }
    }

    /// Handles a queue pair that the device moved to the error state.
    fn qp_failed(&self, qp: &Qp, fault: Option<QpFault>, terminate: u32) {
        {
            let _changes = lock(&qp.attr);
            // The program may have changed the state since. In Sqe, the Terminate waits for room in
            // the stream.
            if !matches!(qp.device_state(), Ok(QpState::Err | QpState::Sqe)) {
                return;
            }
            self.native_retire(qp.qpn, false);
            qp.set_last_state(QpState::Err);
        }
        tracing::debug!("{qp:?}: failed: {}", reason(fault, terminate));
        qp.open_gate();
        self.cm_lost(qp.qid, Errno::CONNRESET);
        if let Some(event) = async_event(fault, terminate) {
            self.qps.deliver(qp.qid, event);
        }
    }
}

/// The reason of the failure of a queue pair, for the log: the fault, and the control word of
/// `QpError` with the names of its codes.
fn reason(fault: Option<QpFault>, control: u32) -> String {
    let fault = fault.map_or_else(|| "unknown fault".to_owned(), |fault| format!("{fault:?}"));
    match TerminateError::of_control(control) {
        Some(_) if control == 0 => fault,
        Some(error) => format!("{fault}, {control:#010x}: {error}"),
        None => format!("{fault}, {control:#010x}"),
    }
}

/// The asynchronous event for a fault, as on InfiniBand: only errors of the *peer*, which no
/// completion reports, cause an event. Completions report failed requests of the program and a lost
/// peer.
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
