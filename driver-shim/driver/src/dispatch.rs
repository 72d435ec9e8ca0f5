//! Handling of the device's events: notifications, asynchronous events of verbs, and the events of
//! streams, each of which goes to the connection engine that owns the stream, the listener or the
//! queue pair.

use rustix::io::Errno;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::QpState;
use urnic_wire::rdmap::TerminateError;

use crate::driver::{Driver, Qp};
use crate::manager::{Buffers, Slot};
use crate::objects::AsyncEvent;
use urnic_cm::carrier::StreamOwner;
use urnic_process::interrupt_context::{self, Context};

impl Driver {
    /// Handles an interrupt. Notifies completions at once; handles all other events where no lock
    /// is held.
    pub(crate) fn interrupt(&self, vector: u32) {
        match (vector as usize)
            .checked_sub(1)
            .and_then(|v| self.event_queues().notifications(v))
        {
            Some(queue) => queue.drain(|event| self.notify(event)),
            None => match interrupt_context::current() {
                Context::InterruptThread => self.handle_events(),
                Context::Deferred => self.event_loop().set_due(),
                Context::Call => self.event_loop().wake(),
            },
        }
    }

    /// Handles asynchronous events if some may be pending.
    pub(crate) fn handle_events_if_due(&self) {
        if self.event_loop().is_due() {
            self.handle_events();
        }
    }

    /// Handles asynchronous events, as
    /// [`EventLoop::handle_events`](crate::events::EventLoop::handle_events).
    pub(crate) fn handle_events(&self) {
        self.event_loop().handle_events(|| {
            let mut events = Vec::new();
            self.event_queues()
                .asynchronous()
                .drain(|event| events.push(event));
            // Commands also cause events, which the next round handles.
            interrupt_context::deferred(|| events.into_iter().for_each(|event| self.handle(event)));
            self.receive_messages();
        });
    }

    /// Records that the device was removed or stopped permanently. The driver's thread then flushes
    /// the queues in place of the device.
    pub(crate) fn device_lost(&self) {
        if self.commands().mark_lost() {
            self.event_loop().wake();
        }
    }

    fn notify(&self, event: Event) {
        self.objects().cqs().with(event.object.get(), |_, target| {
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
            Some(EventKind::CqError) => self.objects().cqs().deliver(object, AsyncEvent::CqErr),
            Some(EventKind::LastWqe) => self.objects().qps().deliver(object, AsyncEvent::QpLastWqe),
            Some(EventKind::PortChange) => self.objects().contexts().deliver_to_all(AsyncEvent::GidChange),
            Some(EventKind::Fatal) => self.device_lost(),
            Some(EventKind::SrqLimit) => {
                self.objects().srqs().with(object, |srq, target| {
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
            let _changes = qp.lock_attributes();
            // The program may have changed the state since. In Sqe, the Terminate waits for room in
            // the stream.
            if !matches!(qp.device_state(), Ok(QpState::Err | QpState::Sqe)) {
                return;
            }
            self.native_retire(qp.qpn, false);
            qp.set_last_state(QpState::Err);
        }
        tracing::debug!("{qp:?}: failed: {}", reason(fault, terminate));
        qp.gate().open();
        self.cm_lost(qp.qid, Errno::CONNRESET);
        if let Some(event) = async_event(fault, terminate) {
            self.objects().qps().deliver(qp.qid, event);
        }
    }

    /// Passes an event to the owner of its stream. Native connections own all streams that the
    /// connection manager does not own.
    fn route(&self, event: StreamEvent) {
        let Ok(managed) = event.in_slot(self.connections().slot()) else {
            tracing::error!("the device gave a number beyond its interface: {event:?}");
            return;
        };
        let found = self
            .connections()
            .manager()
            .take(self.connections().slot(), |engine, buffers, known| {
                let managed = managed.at(known);
                let is_its = managed.belongs_to(engine);
                is_its.then(|| (managed, event.take_bytes(buffers)))
            });
        let (managed, bytes) = match found {
            Some((managed, bytes)) => (Some(managed), bytes),
            None => (None, event.take_bytes(self.connections().native().parts().1)),
        };
        let Some(bytes) = bytes else { return };
        let bytes = bytes.as_deref().map_err(|errno| *errno);
        match managed {
            Some(managed) => self.with_rdma_cm(|engine, world| managed.deliver(engine, world, bytes)),
            None => self.with_native(|engine, world| event.deliver(engine, world, bytes)),
        }
    }
}

/// An event of a stream, a listener or a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamEvent {
    /// A queue pair received its first FPDU.
    FirstFpdu { qid: u32 },
    /// A listener accepted a stream.
    Accepted { lid: u32, sid: u32 },
    /// A connection was made, or failed.
    Connected { sid: u32, outcome: Result<(), Errno> },
    /// A receive completed with `len` bytes, or failed.
    Received { sid: u32, len: Result<usize, Errno> },
    /// A stream ended.
    Closed { sid: u32 },
}

impl StreamEvent {
    /// The event of a device; `None` if it is not about streams.
    fn of(kind: EventKind, event: &Event) -> Option<StreamEvent> {
        let (object, data) = (event.object.get(), event.data.get());
        let outcome = match event.code.get() {
            0 => Ok(()),
            code => Err(Errno::from_raw_os_error(code.into())),
        };
        Some(match kind {
            EventKind::FirstFpdu => StreamEvent::FirstFpdu { qid: object },
            EventKind::StreamAccepted => StreamEvent::Accepted {
                lid: object,
                sid: data as u32,
            },
            EventKind::StreamConnected => StreamEvent::Connected { sid: object, outcome },
            EventKind::StreamReceived => StreamEvent::Received {
                sid: object,
                len: outcome.map(|()| data as usize),
            },
            EventKind::StreamClosed => StreamEvent::Closed { sid: object },
            _ => return None,
        })
    }

    /// Replaces the device's number of the object by the process's number: the device is in this
    /// slot.
    ///
    /// # Errors
    /// `EIO` if the device gave a number with too many bits.
    fn in_slot(self, slot: Slot) -> Result<StreamEvent, Errno> {
        Ok(match self {
            StreamEvent::FirstFpdu { qid } => StreamEvent::FirstFpdu {
                qid: slot.number(qid)?,
            },
            StreamEvent::Accepted { lid, sid } => StreamEvent::Accepted {
                lid: slot.number(lid)?,
                sid: slot.number(sid)?,
            },
            StreamEvent::Connected { sid, outcome } => StreamEvent::Connected {
                sid: slot.number(sid)?,
                outcome,
            },
            StreamEvent::Received { sid, len } => StreamEvent::Received {
                sid: slot.number(sid)?,
                len,
            },
            StreamEvent::Closed { sid } => StreamEvent::Closed {
                sid: slot.number(sid)?,
            },
        })
    }

    /// The same event, with the listener's number in the engine.
    fn at(self, known: impl Fn(u32) -> u32) -> StreamEvent {
        match self {
            StreamEvent::Accepted { lid, sid } => StreamEvent::Accepted { lid: known(lid), sid },
            event => event,
        }
    }

    /// Whether `engine` owns the stream, the listener or the queue pair.
    fn belongs_to<W>(self, engine: &impl StreamOwner<W>) -> bool {
        match self {
            StreamEvent::FirstFpdu { qid } => engine.has_queue_pair(qid),
            StreamEvent::Accepted { lid, .. } => engine.has_listener(lid),
            StreamEvent::Connected { sid, .. }
            | StreamEvent::Received { sid, .. }
            | StreamEvent::Closed { sid } => engine.has_stream(sid),
        }
    }

    /// Passes the event to `engine`, with the bytes of a receive.
    fn deliver<W>(self, engine: &mut impl StreamOwner<W>, world: &mut W, bytes: Result<&[u8], Errno>) {
        match self {
            StreamEvent::FirstFpdu { qid } => engine.first_fpdu(world, qid),
            StreamEvent::Accepted { lid, sid } => engine.arrived(world, lid, sid),
            StreamEvent::Connected { sid, outcome } => engine.connected(world, sid, outcome),
            StreamEvent::Received { sid, .. } => engine.received(world, sid, bytes),
            StreamEvent::Closed { sid } => engine.closed(world, sid),
        }
    }

    /// Takes the bytes of a receive out of its buffer; `None` if the stream was closed meanwhile.
    fn take_bytes(self, buffers: &mut Buffers) -> Option<Result<Vec<u8>, Errno>> {
        let StreamEvent::Received { sid, len } = self else {
            return Some(Ok(Vec::new()));
        };
        let buffer = buffers.remove(&sid)?;
        Some(len.map(|len| {
            let mut bytes = vec![0; len.min(buffer.len())];
            buffer.copy_out(0, &mut bytes);
            bytes
        }))
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
