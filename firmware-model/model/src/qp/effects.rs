//! Work that a queue pair requests of the rest of the device, done after its lock was dropped.

use crate::qp::requests::Requests;
use crate::queues::event::EventQueue;
use crate::time::Nanos;
use std::collections::VecDeque;
use std::sync::Arc;
use urnic_device::event::{Event, EventKind, QpFault};

/// Events, notifications and further work gathered under a lock, raised after it is dropped.
#[derive(Debug, Default)]
pub struct Effects {
    pub(crate) notifications: Vec<(Arc<EventQueue>, u32)>,
    pub(crate) due: Vec<(Nanos, u32)>,
    pub(crate) late: Vec<(Nanos, u32)>,
    pub(crate) events: Vec<Event>,
    pub(crate) next: Next,
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
        self.events.push(event);
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
    pub fn is_empty(&self) -> bool {
        self.notifications.is_empty()
            && self.due.is_empty()
            && self.late.is_empty()
            && self.events.is_empty()
            && self.next.is_empty()
    }

    /// Makes requests to a queue pair after a command is complete.
    pub(crate) fn kick(&mut self, qid: u32, requests: Requests) {
        self.next.push_back(Object::Qp(qid, requests));
    }

    /// Continues a stream in streaming mode after a command is complete.
    pub(crate) fn check_stream(&mut self, sid: u32) {
        self.next.push_back(Object::Stream(sid));
    }

    /// Continues a stream in streaming mode at `due`.
    pub(crate) fn check_stream_at(&mut self, due: Nanos, sid: u32) {
        self.late.push((due, sid));
    }

    /// Takes connections once a command is complete.
    pub(crate) fn open_listener(&mut self, lid: u32) {
        self.next.push_back(Object::Listener(lid));
    }

    /// Notifies the driver of an armed completion queue's completion.
    pub(crate) fn notify(&mut self, queue: &Arc<EventQueue>, cqid: u32) {
        self.notifications.push((queue.clone(), cqid));
    }

    /// Checks a completion queue's waiting notification at `due`.
    pub(crate) fn check_cq(&mut self, due: Nanos, cqid: u32) {
        self.due.push((due, cqid));
    }

    /// A completion queue overflowed: its event, and the error state for all its queue pairs.
    pub(crate) fn overflow(&mut self, cqid: u32) {
        self.next.push_back(Object::Overflowed(cqid));
    }
}
