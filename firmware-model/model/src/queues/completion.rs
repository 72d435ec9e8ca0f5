//! The device's side of a completion queue: a leaf in the lock order.

use crate::events::{Effects, EventQueue};
use crate::host::{Mapping, Record};
use crate::probes;
use crate::time::{Nanos, Now};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use urnic_device::cqe::{CONTENT, CQE_LEN, Cqe, CqeFlags, PHASE};
use urnic_device::record::CqRecord;
use urnic_device::vocabulary::WcStatus;
use urnic_sync::{Mutex, MutexGuard};
use zerocopy::IntoBytes;

/// Largest distance that [`State::solicited`] lags the producer index, so that the former never
/// seems to be ahead.
const LONG_AGO: u32 = 1 << 30;

/// The queue had no room: the queue pair that pushed must go to the error state (row SEC-05). The
/// device handles the other queue pairs that use the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the completion queue overflowed")]
pub struct Overflow;

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    /// Number of the queue.
    pub id: u32,
    pub(crate) uar: u32,
    /// Queue pairs that use it.
    pairs: Mutex<BTreeSet<u32>>,
    events: Option<Arc<EventQueue>>,
    /// The driver reads the timestamps.
    pub(crate) timed: bool,
    record: Record<CqRecord>,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Armed {
    No,
    /// For a solicited or failed completion.
    Solicited,
    /// For any.
    Any,
}

#[derive(Debug)]
struct State {
    ring: Mapping,
    log_size: u32,
    /// The index of slot 0 at phase 1: the consumer index at the last resize.
    base: u32,
    producer: u32,
    /// The consumer index when it was last read.
    consumer: u32,
    /// Index after the last solicited or failed completion, or [`LONG_AGO`] before the producer
    /// index.
    solicited: u32,
    armed: Armed,
    /// Completions that a notification waits for, and the longest time that it waits; `None` = no
    /// waiting.
    moderation: Option<(u32, Duration)>,
    /// Completions that a waiting notification would report, and the latest time of that
    /// notification.
    withheld: Option<(u32, Nanos)>,
    /// The time of the next check of this queue, for a withheld notification or one that came
    /// early.
    timer: Option<Nanos>,
    overflowed: bool,
}

impl State {
    fn size(&self) -> u32 {
        1 << self.log_size
    }

    /// Byte offset of an index's entry, and its phase.
    fn place(&self, index: u32) -> (usize, u32) {
        let n = index.wrapping_sub(self.base);
        let slot = n & (self.size() - 1);
        (slot as usize * CQE_LEN, !(n >> self.log_size) & 1)
    }

    #[inline]
    fn write(&self, index: u32, cqe: &Cqe) {
        let (at, phase) = self.place(index);
        if let Some(content) = cqe.as_bytes().first_chunk::<CONTENT>() {
            self.ring.write(at, content);
        }
        self.ring.word(at + PHASE).store(phase.to_le(), Ordering::Release);
    }

    /// Makes an entry of `cqe`; `false` if there is no room.
    #[inline]
    fn push(&mut self, cqe: &Cqe, record: &CqRecord) -> bool {
        if self.producer.wrapping_sub(self.consumer) >= self.size() {
            self.consumer = record.consumer.load(Ordering::Acquire);
            if self.producer.wrapping_sub(self.consumer) >= self.size() {
                self.overflowed = true;
                return false;
            }
        }
        self.write(self.producer, cqe);
        self.producer = self.producer.wrapping_add(1);
        true
    }
}

impl CompletionQueue {
    /// `ring` holds `1 << log_size` entries, zeroed.
    pub(crate) fn new(
        id: u32,
        uar: u32,
        ring: Mapping,
        record: Record<CqRecord>,
        log_size: u32,
        events: Option<Arc<EventQueue>>,
        timed: bool,
    ) -> CompletionQueue {
        let state = State {
            ring,
            log_size,
            base: 0,
            producer: 0,
            consumer: 0,
            solicited: 0,
            armed: Armed::No,
            moderation: None,
            withheld: None,
            timer: None,
            overflowed: false,
        };
        CompletionQueue {
            id,
            uar,
            pairs: Mutex::default(),
            events,
            timed,
            record,
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Makes entries of `cqes`, in order (phases are filled in here). An armed queue
    /// notifies of any, or of those that are solicited; failures count as solicited (VRB-C-05).
    pub fn push(&self, cqes: &[Cqe], now: &Now<'_>, effects: &mut Effects) -> Result<(), Overflow> {
        let mut state = self.lock();
        for cqe in cqes {
            if state.overflowed {
                return Err(Overflow);
            }
            if !state.push(cqe, &self.record) {
                effects.overflow(self.id);
                return Err(Overflow);
            }
            probes::complete(cqe.label.get(), cqe.status, cqe.byte_len.get());
            let solicited = CqeFlags::from_bits_retain(cqe.flags).contains(CqeFlags::SOLICITED)
                || cqe.status != WcStatus::Success as u8;
            if solicited || state.producer.wrapping_sub(state.solicited) > LONG_AGO {
                let age = if solicited { 0 } else { LONG_AGO };
                state.solicited = state.producer.wrapping_sub(age);
            }
            if state.armed == Armed::Any || (state.armed == Armed::Solicited && solicited) {
                let failed = cqe.status != WcStatus::Success as u8;
                if failed || !self.withholds(&mut state, now, effects) {
                    self.notify(&mut state, effects);
                }
            }
        }
        Ok(())
    }

    /// Requests a notification of the next completion after `consumer` that matches; one that is
    /// there already notifies at once. A request for any completion is not weakened by a later one
    /// for solicited ones.
    pub(crate) fn arm(&self, consumer: u32, solicited_only: bool, effects: &mut Effects) {
        let mut state = self.lock();
        let newest = if solicited_only {
            state.solicited
        } else {
            state.producer
        };
        // The driver may have taken any number of completions since it rang.
        if newest.wrapping_sub(consumer).cast_signed() > 0 {
            self.notify(&mut state, effects);
        } else {
            let wanted = if solicited_only {
                Armed::Solicited
            } else {
                Armed::Any
            };
            state.armed = state.armed.max(wanted);
        }
    }

    /// Whether the notification of one more completion waits for others.
    fn withholds(&self, state: &mut State, now: &Now<'_>, effects: &mut Effects) -> bool {
        let Some((count, period)) = state.moderation else {
            return false;
        };
        let (before, due) = state.withheld.unwrap_or_else(|| (0, now.get() + period));
        self.set_timer(due, state, effects);
        state.withheld = Some((before + 1, due));
        before + 1 < count
    }

    /// Makes notifications wait until there are `count` completions to report, but no longer than
    /// `period`. A notification that waits now is raised.
    pub(crate) fn moderate(&self, count: u32, period: Duration, effects: &mut Effects) {
        let mut state = self.lock();
        state.moderation = (count > 1 && !period.is_zero()).then_some((count, period));
        if state.withheld.is_some() {
            self.notify(&mut state, effects);
        }
    }

    /// Notifies if a notification has waited long enough.
    pub(crate) fn timer_expired(&self, now: Nanos, effects: &mut Effects) {
        let mut state = self.lock();
        // There is one timer, which has run out.
        state.timer = None;
        match state.withheld {
            Some((_, due)) if due <= now => self.notify(&mut state, effects),
            Some((_, due)) => self.set_timer(due, &mut state, effects),
            None => {}
        }
    }

    /// Makes the device check this queue by `due`. One timer at a time suffices for any number of
    /// notifications.
    fn set_timer(&self, due: Nanos, state: &mut State, effects: &mut Effects) {
        if state.timer.is_none_or(|timer| due < timer) {
            state.timer = Some(due);
            effects.check_cq(due, self.id);
        }
    }

    fn notify(&self, state: &mut State, effects: &mut Effects) {
        (state.armed, state.withheld) = (Armed::No, None);
        if let Some(events) = &self.events {
            effects.notify(events, self.id);
        }
    }

    /// Moves to a new ring; entries not consumed yet come along, in its first slots. Returns how
    /// many, or `None` if they do not fit.
    pub(crate) fn resize(&self, ring: Mapping, log_size: u32) -> Option<u32> {
        let mut state = self.lock();
        let consumer = self.record.consumer.load(Ordering::Acquire);
        let carried = state.producer.wrapping_sub(consumer);
        if carried > 1 << log_size || carried > state.size() {
            return None;
        }
        let old: Vec<Cqe> = (0..carried)
            .map(|i| state.ring.read(state.place(consumer.wrapping_add(i)).0))
            .collect();
        (state.ring, state.log_size, state.base) = (ring, log_size, consumer);
        state.consumer = consumer;
        for (index, cqe) in (0..carried).zip(&old) {
            state.write(consumer.wrapping_add(index), cqe);
        }
        Some(carried)
    }

    /// The host's consumer index: it moves when the program takes completions.
    #[inline]
    pub(crate) fn consumer(&self) -> u32 {
        self.record.consumer.load(Ordering::Relaxed)
    }

    /// The queue is destroyed: its ring is not touched any more.
    pub(crate) fn close(&self) {
        self.lock().overflowed = true;
    }

    /// A queue pair is going to use it.
    pub(crate) fn enter(&self, qid: u32) {
        self.pairs.lock().insert(qid);
    }

    /// A queue pair uses it no more.
    pub(crate) fn leave(&self, qid: u32) {
        self.pairs.lock().remove(&qid);
    }

    /// The queue pairs that use it.
    pub(crate) fn pairs(&self) -> Vec<u32> {
        let pairs = self.pairs.lock();
        pairs.iter().copied().collect()
    }

    /// Whether a queue pair uses it.
    pub(crate) fn is_used(&self) -> bool {
        !self.pairs.lock().is_empty()
    }

    /// The event queue that it notifies through.
    pub(crate) fn events(&self) -> Option<&Arc<EventQueue>> {
        self.events.as_ref()
    }
}
