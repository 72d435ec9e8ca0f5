//! Rings that the device fills: completions and events, found by their phase.

use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use urnic_device::cqe::{self, Cqe};
use urnic_device::event::{self, Event};
use zerocopy::FromBytes;

use crate::memory::Memory;

/// An entry of a ring that the device fills.
pub trait Entry: FromBytes {
    /// The offset of the word with the phase bit.
    const PHASE: usize;
}

impl Entry for Cqe {
    const PHASE: usize = cqe::PHASE;
}

impl Entry for Event {
    const PHASE: usize = event::PHASE;
}

/// The driver's side of a completion queue.
pub type CompletionQueue<M> = Consumer<M, Cqe>;

/// The driver's side of an event queue.
pub type EventQueue<M> = Consumer<M, Event>;

/// The driver's side of a ring that the device fills.
#[derive(Debug)]
pub struct Consumer<M, E> {
    ring: M,
    /// The first word is the consumer index.
    record: M,
    log_size: u32,
    index: u32,
    /// The consumer index at the last change of rings.
    base: u32,
    entry: PhantomData<fn() -> E>,
}

impl<M: Memory, E: Entry> Consumer<M, E> {
    /// An empty ring of `1 << log_size` entries, with its record.
    pub fn new(ring: M, record: M, log_size: u32) -> Self {
        Consumer {
            ring,
            record,
            log_size,
            index: 0,
            base: 0,
            entry: PhantomData,
        }
    }

    /// The ring's memory.
    pub fn ring(&self) -> &M {
        &self.ring
    }

    /// The record's memory.
    pub fn record(&self) -> &M {
        &self.record
    }

    /// log2 of the number of entries.
    pub fn log_size(&self) -> u32 {
        self.log_size
    }

    /// The consumer index.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The next entry, if the device has written it. The entry stays in the ring.
    pub fn peek(&self) -> Option<E> {
        self.is_written(0).then(|| self.ring.load(self.place(0).0))
    }

    /// Returns the next entry, if the device has written it, and frees the slot for the device.
    pub fn poll(&mut self) -> Option<E> {
        let entry = self.advance()?;
        self.record.word(0).store(self.index, Ordering::Release);
        Some(entry)
    }

    /// Returns the next entry, if the device has written it. The slot stays in use: the record is
    /// not written.
    pub fn advance(&mut self) -> Option<E> {
        let entry = self.peek()?;
        self.index = self.index.wrapping_add(1);
        Some(entry)
    }

    /// The number of entries in the ring that were not taken.
    pub fn written(&self) -> u32 {
        let ahead = 0..1 << self.log_size;
        ahead.take_while(|ahead| self.is_written(*ahead)).count() as u32
    }

    /// Continues in another ring, to which the device has moved the entries that were not taken.
    pub fn move_to(&mut self, ring: M, log_size: u32) {
        (self.ring, self.log_size, self.base) = (ring, log_size, self.index);
    }

    /// The offset of the entry `ahead` entries after the next one, and the phase that it has once
    /// it is written.
    fn place(&self, ahead: u32) -> (usize, u32) {
        let at = self.index.wrapping_sub(self.base).wrapping_add(ahead);
        let slot = (at & ((1 << self.log_size) - 1)) as usize;
        (slot * size_of::<E>(), !(at >> self.log_size) & 1)
    }

    fn is_written(&self, ahead: u32) -> bool {
        let (at, phase) = self.place(ahead);
        self.ring.word(at + E::PHASE).load(Ordering::Acquire) & 1 == phase
    }
}
