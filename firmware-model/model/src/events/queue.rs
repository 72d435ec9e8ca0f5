//! The device's side of an event queue.

use crate::host::{Mapping, Record};
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use urnic_device::event::{EVENT_LEN, Event, EventKind, PHASE};
use urnic_device::record::EqRecord;
use zerocopy::IntoBytes;

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
        // As many may come as the peers wish.
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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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
