//! The requests of an object of the device to others, and its reports to the driver: the
//! [`Effects`] of work under a lock, the [`Requests`] to queue pairs, and the [`EventQueue`]s that
//! the driver reads.

#![forbid(unsafe_code)]

use crate::host::{Mapping, Record};
use crate::time::Nanos;
use bitflags::bitflags;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use urnic_device::event::{EVENT_LEN, Event, EventKind, PHASE, QpFault};
use urnic_device::record::EqRecord;
use urnic_sync::Mutex;
use zerocopy::IntoBytes;

// Work that a queue pair requests of the rest of the device, done after its lock was dropped.

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

    /// All effects, in the order in which they were gathered.
    pub(crate) fn into_list(self) -> Vec<Effect> {
        self.0
    }
}

// Why a queue pair is run.

bitflags! {
    /// Requests to a queue pair.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct Requests: u32 {
        /// The driver rang for the send queue.
        const SEND = 1;
        /// The stream may have bytes, or receives were posted.
        const RECEIVE = 1 << 1;
        /// The stream may take bytes again.
        const WRITABLE = 1 << 2;
        /// The peer's side of the stream has ended: read to the end.
        const HANG_UP = 1 << 3;
        /// Send what was gathered.
        const FLUSH = 1 << 4;
        /// A timer expired.
        const TIMER = 1 << 5;
        /// A completion queue overflowed.
        const CQ_LOST = 1 << 6;
        /// Continue to send; the driver did not ring.
        const RESUME = 1 << 7;
        /// The command that attached a stream is complete.
        const ATTACHED = 1 << 8;
        /// The peer, a queue pair of this device, has processed more of what was sent.
        const PEER_PROGRESS = 1 << 9;
        /// Confirm the peer's messages, unless a message has done so.
        const CONFIRM = 1 << 11;
        /// Check again whether something was requested.
        const AGAIN = 1 << 10;
    }
}

// The device's side of an event queue.

/// An event queue. Its lock is a leaf, as a completion queue's.
#[derive(Debug)]
pub struct EventQueue {
    /// Number of the queue.
    pub id: u32,
    pub(crate) vector: u32,
    /// Completion queues that notify through it.
    pub(crate) users: AtomicU32,
    record: Record<EqRecord>,
    log_size: u32,
    /// Events that wait for room.
    waiting: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ring: Mapping,
    producer: u32,
    closed: bool,
    /// Events that found no room. Of notifications there is one for each completion queue at most;
    /// how many others there may be is the business of the commands that cause them
    /// (`Core::has_room_for_events`).
    backlog: VecDeque<Event>,
    /// Completion queues with a notification among them.
    notified: HashSet<u32>,
}

impl State {
    /// Writes an event to the ring, if there is room.
    fn put(&mut self, event: &Event, record: &EqRecord, log_size: u32) -> bool {
        let room = 1u32 << log_size;
        let consumer = record.consumer.load(Ordering::Acquire);
        if self.producer.wrapping_sub(consumer) >= room {
            return false;
        }
        let at = (self.producer & (room - 1)) as usize * EVENT_LEN;
        let phase = !(self.producer >> log_size) & 1;
        self.ring.copy_in(at, &event.as_bytes()[..PHASE]);
        self.ring.word(at + PHASE).store(phase.to_le(), Ordering::Release);
        self.producer = self.producer.wrapping_add(1);
        true
    }

    /// Keeps an event until there is room.
    fn keep(&mut self, event: Event) {
        // Two notifications of one queue carry no more information than one.
        let again = is_notification(&event) && !self.notified.insert(event.object.get());
        // Peers determine the number of these events.
        let is_lossy = event.kind == EventKind::DatagramRefused as u8;
        if !again && !is_lossy {
            self.backlog.push_back(event);
        }
    }
}

fn is_notification(event: &Event) -> bool {
    event.kind == EventKind::Completion as u8
}

impl EventQueue {
    pub(crate) fn new(
        id: u32,
        vector: u32,
        ring: Mapping,
        record: Record<EqRecord>,
        log_size: u32,
    ) -> EventQueue {
        let state = State {
            ring,
            producer: 0,
            closed: false,
            backlog: VecDeque::new(),
            notified: HashSet::new(),
        };
        EventQueue {
            id,
            vector,
            users: AtomicU32::new(0),
            record,
            log_size,
            waiting: AtomicUsize::new(0),
            state: Mutex::new(state),
        }
    }

    /// Posts events in order; returns whether the queue's vector is to be raised. An empty list
    /// posts those that wait.
    pub(crate) fn post(&self, events: impl IntoIterator<Item = Event>) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.closed {
            return false;
        }
        let mut posted = false;
        while let Some(event) = state.backlog.front().copied() {
            if !state.put(&event, &self.record, self.log_size) {
                break;
            }
            state.backlog.pop_front();
            if is_notification(&event) {
                state.notified.remove(&event.object.get());
            }
            posted = true;
        }
        for event in events {
            if state.backlog.is_empty() && state.put(&event, &self.record, self.log_size) {
                posted = true;
            } else {
                state.keep(event);
            }
        }
        self.waiting.store(state.backlog.len(), Ordering::Relaxed);
        posted
    }

    /// The queue is destroyed: its ring is not touched any more.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.backlog.clear();
        state.notified.clear();
        self.waiting.store(0, Ordering::Relaxed);
    }

    /// The number of events that wait for room.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}
