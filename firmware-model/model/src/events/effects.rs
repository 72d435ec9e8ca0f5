//! Work that a queue pair requests of the rest of the device, done after its lock was dropped.

use super::queue::EventQueue;
use super::requests::Requests;
use crate::time::Nanos;
use std::collections::VecDeque;
use std::sync::Arc;
use urnic_device::event::{Event, EventKind, QpFault};

/// Events, notifications and further work gathered under a lock, raised after it is dropped. Most
/// runs have none: so this is one list, which then costs next to nothing.
#[derive(Debug, Default)]
pub struct Effects(Vec<Effect>);

/// One of them.
#[derive(Debug)]
pub(crate) enum Effect {
    /// The driver is notified of a completion queue's completion, by this queue.
    Notification(Arc<EventQueue>, u32),
    /// A completion queue is checked then.
    Cq(Nanos, u32),
    /// A stream in streaming mode goes on then.
    Stream(Nanos, u32),
    /// An asynchronous event.
    Event(Event),
    /// An object is run next.
    Next(Object),
}

/// Objects that the device runs next, in this order. A run may add others: the thread that runs
/// them takes them from here one after the other, so that a chain of objects does not become a
/// chain of calls.
pub(crate) type Next = VecDeque<Object>;

/// An object that the device runs next.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Object {
    /// A completion queue overflowed: its event, and the error state for all its queue pairs.
    Overflowed(u32),
    /// A queue pair, and the requests to it.
    Qp(u32, Requests),
    /// A stream in streaming mode, whose command is complete.
    Stream(u32),
    /// A listener, whose command is complete.
    Listener(u32),
}

impl Effects {
    /// Raises an asynchronous event.
    pub fn event(&mut self, event: Event) {
        self.0.push(Effect::Event(event));
    }

    /// Raises [`EventKind::QpError`]; `terminate` is the control word of a Terminate sent or
    /// received, 0 = none.
    pub fn qp_error(&mut self, qid: u32, fault: QpFault, terminate: u32) {
        self.event(
            Event::new(EventKind::QpError, qid)
                .with_code(fault as u16)
                .with_data(terminate.into()),
        );
    }

    /// Whether there is nothing to do.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Makes requests to a queue pair after a command is complete.
    pub(crate) fn kick(&mut self, qid: u32, requests: Requests) {
        self.0.push(Effect::Next(Object::Qp(qid, requests)));
    }

    /// Continues a stream in streaming mode after a command is complete.
    pub(crate) fn check_stream(&mut self, sid: u32) {
        self.0.push(Effect::Next(Object::Stream(sid)));
    }

    /// Continues a stream in streaming mode at `due`.
    pub(crate) fn check_stream_at(&mut self, due: Nanos, sid: u32) {
        self.0.push(Effect::Stream(due, sid));
    }

    /// Takes connections once a command is complete.
    pub(crate) fn open_listener(&mut self, lid: u32) {
        self.0.push(Effect::Next(Object::Listener(lid)));
    }

    /// Notifies the driver of an armed completion queue's completion.
    pub(crate) fn notify(&mut self, queue: &Arc<EventQueue>, cqid: u32) {
        self.0.push(Effect::Notification(queue.clone(), cqid));
    }

    /// Checks a completion queue's waiting notification at `due`.
    pub(crate) fn check_cq(&mut self, due: Nanos, cqid: u32) {
        self.0.push(Effect::Cq(due, cqid));
    }

    /// A completion queue overflowed: its event, and the error state for all its queue pairs.
    pub(crate) fn overflow(&mut self, cqid: u32) {
        self.0.push(Effect::Next(Object::Overflowed(cqid)));
    }

    /// All of them, in the order in which they were gathered.
    pub(crate) fn into_list(self) -> Vec<Effect> {
        self.0
    }
}
