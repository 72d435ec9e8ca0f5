//! The layout of the memory of a connection.

use crate::host::SharedRecord;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A part of the memory for each of the two directions, side by side.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    start: usize,
    /// The length of one, in bytes.
    pub(super) len: usize,
}

impl Area {
    const fn next(self, len: usize) -> Area {
        Area {
            start: self.start + 2 * self.len,
            len,
        }
    }

    /// The offset of the part for one direction.
    pub(super) const fn of(self, direction: Direction) -> usize {
        match direction {
            Direction::FromInitiator => self.start,
            Direction::FromResponder => self.start + self.len,
        }
    }
}

/// Most bytes of the inline copy in the tail's cache line: an FPDU of a Send of 16 bytes.
pub(super) const INLINE_COPY_MAX: usize = 40;

/// The words of a ring: the sender's and the receiver's are in separate cache lines.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct RingWords {
    /// Sender: bytes before this position belong to the receiver.
    pub(super) tail: AtomicU64,
    /// Sender: the length of the ring.
    pub(super) length: AtomicU32,
    /// Sender: set when nothing follows the tail.
    pub(super) ended: AtomicU32,
    /// Sender: set when it has given up the connection.
    pub(super) gone: AtomicU32,
    /// Sender: identifies the bytes of the inline copy.
    pub(super) inline_id: AtomicU32,
    /// Sender: the inline copy of the newest bytes.
    pub(super) inline_copy: [AtomicU64; INLINE_COPY_MAX / 8],
    /// Receiver: bytes before this position may be overwritten.
    pub(super) head: AtomicU64,
    receiver_reserved: [u64; 7],
    /// Set while the sender waits for room.
    pub(super) wanted: AtomicU32,
    reserved: [u32; 31],
}

// SAFETY: atomics, and padding.
unsafe impl SharedRecord for RingWords {}

/// The words that an end writes, for the other end to read.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct EndWords {
    /// The position up to which this end has processed the other's bytes.
    pub(super) processed: AtomicU64,
    processed_reserved: [u64; 15],
    /// The hazard flag: set while this end accesses the other's memory.
    pub(super) hazard: AtomicU64,
    /// Bytes that the end has written to the other's memory.
    pub(super) written: AtomicU64,
    /// Bytes that it has read from there.
    pub(super) read: AtomicU64,
    hazard_reserved: [u64; 5],
    /// The accesses that the other end may make to this end's memory.
    pub(super) permit: AtomicU64,
    /// The number of the end's queue pair.
    pub(super) qid: AtomicU64,
    receive_reserved: u32,
    /// The end's receive queue, if the other may fill the receives that are posted there: the
    /// number of the first receive that a message takes,
    pub(super) first_receive: AtomicU32,
    /// where the entries are in the process of the end's device,
    pub(super) receives: AtomicU64,
    /// where the number of the next entry is that is posted,
    pub(super) receive_producer: AtomicU64,
    /// and the logarithms of the entries' number and size.
    pub(super) log_receives: AtomicU32,
    pub(super) log_receive_size: AtomicU32,
    /// Set while nothing at this end waits for `processed` of the other.
    pub(super) unawaited: AtomicU32,
    reserved: [u32; 3],
}

// SAFETY: atomics, and padding.
unsafe impl SharedRecord for EndWords {}

/// The words of a ring ([`RingWords`]).
pub(super) const RING_WORDS: Area = Area {
    start: 0,
    len: size_of::<RingWords>(),
};
/// The bytes of a ring that has not grown.
pub(super) const FIRST_RINGS: Area = RING_WORDS.next(1024);
/// The words of an end apart from its ring ([`EndWords`]), for the direction from it.
pub(super) const END_WORDS: Area = FIRST_RINGS.next(size_of::<EndWords>());
/// The bytes of a ring that has grown. All before, which every connection uses, is one page.
pub(super) const RINGS: Area = Area {
    start: 4096,
    len: 512 << 10,
};
/// Bytes of shared memory for a connection.
pub(super) const MEMORY: usize = RINGS.next(0).start;

const _: () = assert!(END_WORDS.next(0).start <= RINGS.start);
// Two processes with different builds of this must agree.
const _: () = assert!(RING_WORDS.len == 256 && END_WORDS.len == 256);

// The two directions of a connection in memory.

/// A direction of a connection: from the end that connected, or from the end that listened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    FromInitiator,
    FromResponder,
}

impl Direction {
    pub(super) fn other(self) -> Direction {
        match self {
            Direction::FromInitiator => Direction::FromResponder,
            Direction::FromResponder => Direction::FromInitiator,
        }
    }
}
