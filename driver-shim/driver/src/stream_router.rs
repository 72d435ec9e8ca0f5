//! The router of stream events: each event goes to the connection engine that owns the stream, the
//! listener or the queue pair.

use rustix::io::Errno;
use urnic_device::event::{Event, EventKind};

use crate::driver::Driver;
use crate::manager::Buffers;
use crate::manager::number::Slot;
use urnic_cm::carrier::StreamOwner;
use urnic_process::lock::lock;

/// An event of a stream, a listener or a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamEvent {
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
    pub(crate) fn of(kind: EventKind, event: &Event) -> Option<StreamEvent> {
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

    /// The same event, with the process's number of the object: the device is in this slot.
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

impl Driver {
    /// Passes an event to the owner of its stream. Native connections own all streams that the
    /// connection manager does not own.
    pub(crate) fn route(&self, event: StreamEvent) {
        let Ok(managed) = event.in_slot(self.slot) else {
            tracing::error!("the device gave a number beyond its interface: {event:?}");
            return;
        };
        let found = self.rdma_cm.take(self.slot, |engine, buffers, known| {
            let managed = managed.at(known);
            let is_its = managed.belongs_to(engine);
            is_its.then(|| (managed, event.take_bytes(buffers)))
        });
        let (managed, bytes) = match found {
            Some((managed, bytes)) => (Some(managed), bytes),
            None => (
                None,
                event.take_bytes(&mut lock(&self.connections.native).buffers),
            ),
        };
        let Some(bytes) = bytes else { return };
        let bytes = bytes.as_deref().map_err(|errno| *errno);
        match managed {
            Some(managed) => self.with_rdma_cm(|engine, world| managed.deliver(engine, world, bytes)),
            None => self.with_native(|engine, world| event.deliver(engine, world, bytes)),
        }
    }
}
