//! The device's side of an event queue.

use crate::host::{Mapping, Record};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use urnic_verbs_api::device::event::{EVENT_LEN, Event, PHASE};
use urnic_verbs_api::device::record::EqRecord;
use zerocopy::IntoBytes;

/// An event queue. Its lock is a leaf, as a completion queue's.
#[derive(Debug)]
pub struct EventQueue {
    /// Its number.
    pub id: u32,
    pub(crate) vector: u32,
    /// Completion queues that notify through it.
    pub(crate) users: AtomicU32,
    record: Record<EqRecord>,
    log_size: u32,
    /// Whether events wait for room.
    waiting: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ring: Mapping,
    producer: u32,
    closed: bool,
    /// Events that found no room. Every one stems from an object that has at most a few, so there is an end to them.
    backlog: VecDeque<Event>,
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
        };
        EventQueue {
            id,
            vector,
            users: AtomicU32::new(0),
            record,
            log_size,
            waiting: AtomicBool::new(false),
            state: Mutex::new(state),
        }
    }

    /// Posts events in order; returns whether the queue's vector is to be raised. An empty list posts those that wait.
    pub(crate) fn post(&self, events: impl IntoIterator<Item = Event>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        if state.closed {
            return false;
        }
        state.backlog.extend(events);
        let mut posted = false;
        while let Some(event) = state.backlog.front() {
            let room = 1u32 << self.log_size;
            let consumer = self.record.consumer.load(Ordering::Acquire);
            if state.producer.wrapping_sub(consumer) >= room {
                break;
            }
            let at = (state.producer & (room - 1)) as usize * EVENT_LEN;
            let phase = !(state.producer >> self.log_size) & 1;
            state.ring.copy_in(at, &event.as_bytes()[..PHASE]);
            state
                .ring
                .word(at + PHASE)
                .store(phase.to_le(), Ordering::Release);
            state.producer = state.producer.wrapping_add(1);
            state.backlog.pop_front();
            posted = true;
        }
        self.waiting.store(!state.backlog.is_empty(), Ordering::Relaxed);
        posted
    }

    /// The queue is destroyed: its ring is not touched any more.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        state.backlog.clear();
        self.waiting.store(false, Ordering::Relaxed);
    }

    /// Whether events wait for room.
    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }
}
