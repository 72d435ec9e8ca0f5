//! A ring of bytes in shared memory, for one direction of a connection.
//!
//! The sender writes bytes after `tail` and publishes the new tail; the receiver copies bytes out
//! from `head` on and publishes the new head. Both positions count all bytes since the beginning.
//! The ring starts small, because many connections carry little, and grows while it is empty: the
//! sender then stores the new length before it publishes a tail, so the receiver reads the length
//! that belongs to the bytes.
//!
//! A short message is in the ring, and beside its tail as well, in the same cache line: a receiver
//! that waits for the tail has both by one message between the processors.
//!
//! The other process may be hostile: whatever it writes, positions and length are checked before
//! use, and bytes are copied once and then checked.

use super::layout::Direction;
use super::layout::{FIRST_RINGS, MOST_BESIDE, RING_WORDS, RINGS, RingWords};
use crate::handshakes;
use crate::host::{Mapping, Piece, PieceMut, SharedMemory, SharedWords};
use crate::stream::StreamError;
use crate::tuning::RING_PART;
use rustix::io::Errno;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Length of a ring at first, when it has grown, and at most, in bytes.
const FIRST: usize = FIRST_RINGS.len;
const GROWN: usize = 4 << 10;
const MOST: usize = RINGS.len;
/// Bits of [`RingWords::repeated`] for the number of bytes. The others have the low bits of the
/// position.
const COUNT_BITS: u32 = 6;
const _: () = assert!(MOST_BESIDE < 1 << COUNT_BITS && MOST < 1 << (32 - COUNT_BITS));

/// The place of a ring in the memory of its connection.
#[derive(Debug)]
struct Place {
    words: SharedWords<RingWords>,
    /// Where the bytes beside the tail are.
    beside: usize,
    first_bytes: usize,
    bytes: usize,
}

impl Place {
    fn new(memory: &Arc<SharedMemory>, direction: Direction) -> Place {
        let at = RING_WORDS.of(direction);
        Place {
            words: memory.words(at),
            beside: at + offset_of!(RingWords, beside),
            first_bytes: FIRST_RINGS.of(direction),
            bytes: RINGS.of(direction),
        }
    }

    /// The first `count` bytes beside the tail.
    fn beside(&self, count: usize) -> Mapping {
        self.words.memory().part(self.beside, count)
    }

    /// What [`RingWords::repeated`] has for `count` bytes from `position` on. No other bytes
    /// that are between the two ends at a time have it.
    fn repetition(position: u64, count: usize) -> u32 {
        (position as u32) << COUNT_BITS | count as u32
    }

    /// The bytes from `position` on, at most `most`, up to the end of the ring.
    #[inline]
    fn extent(&self, position: u64, length: usize, most: usize) -> Mapping {
        let at = position as usize & (length - 1);
        let bytes = if length == FIRST {
            self.first_bytes
        } else {
            self.bytes
        };
        self.words.memory().part(bytes + at, most.min(length - at))
    }
}

/// What the other process wrote cannot be.
fn broken() -> StreamError {
    StreamError::Closed(Errno::PROTO)
}

/// The sender's end.
#[derive(Debug)]
pub(super) struct Sender {
    place: Place,
    tail: u64,
    /// The head as of the last look.
    head: u64,
    length: usize,
    /// The length from the next time on at which the ring is empty.
    next_length: usize,
}

impl Sender {
    pub(super) fn new(memory: Arc<SharedMemory>, direction: Direction) -> Sender {
        Sender {
            place: Place::new(&memory, direction),
            tail: 0,
            head: 0,
            length: FIRST,
            next_length: FIRST,
        }
    }

    /// As [`new`](Self::new), with the longest ring from the beginning.
    pub(super) fn at_full_length(memory: Arc<SharedMemory>, direction: Direction) -> Sender {
        Sender {
            length: MOST,
            next_length: MOST,
            ..Sender::new(memory, direction)
        }
    }

    /// Room for `wanted` bytes, or less.
    fn room(&mut self, wanted: usize) -> Result<usize, StreamError> {
        let used = self.tail.wrapping_sub(self.head) as usize;
        if self.length - used >= wanted {
            return Ok(wanted);
        }
        let head = self.place.words.head.load(Ordering::Acquire);
        let used = self.tail.wrapping_sub(head);
        if used > self.length as u64 {
            return Err(broken());
        }
        self.head = head;
        if used == 0 {
            let length = match wanted {
                0..=FIRST => FIRST,
                _ => wanted.clamp(GROWN, MOST).next_power_of_two(),
            };
            self.length = length.max(self.next_length);
        }
        Ok(wanted.min(self.length - used as usize))
    }

    /// Takes bytes from `pieces` in order, as far as there is room; returns how many.
    ///
    /// # Errors
    /// `WouldBlock`: there is no room. Whenever there was not room for all, the receiver says when
    /// there is more.
    pub(super) fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let wanted = pieces.iter().map(Piece::len).sum();
        let mut room = self.room(wanted)?;
        if room < wanted {
            // Also if some bytes find room: the caller then waits until it is told that there is
            // more.
            self.next_length = (2 * self.length).clamp(GROWN, MOST);
            handshakes::want_room(&self.place.words.wanted);
            room = self.room(wanted)?;
            if room == wanted {
                self.place.words.wanted.store(0, Ordering::Relaxed);
            } else if room == 0 {
                return Err(StreamError::WouldBlock);
            }
        }
        self.place
            .words
            .length
            .store(self.length as u32, Ordering::Relaxed);
        let start = self.tail;
        let mut tail = start;
        let mut left = room;
        for piece in pieces {
            let mut piece = piece.first(left);
            left -= piece.len();
            while !piece.is_empty() {
                let into = self.place.extent(tail, self.length, piece.len().min(RING_PART));
                if into.try_fill_from(&piece).is_err() {
                    // As a system call: what was taken before is taken.
                    return match self.tail.wrapping_sub(start) as usize {
                        0 => Err(StreamError::Fault),
                        taken => Ok(taken),
                    };
                }
                tail += into.len() as u64;
                piece = piece.skip(into.len());
                if tail.wrapping_sub(self.tail) >= RING_PART as u64 {
                    self.show(tail);
                }
            }
            if left == 0 {
                break;
            }
        }
        self.repeat(start, room);
        self.show(tail);
        Ok(room)
    }

    /// Puts a short message beside the tail, too.
    #[inline]
    fn repeat(&self, start: u64, count: usize) {
        if count > MOST_BESIDE {
            return;
        }
        let from = self.place.extent(start, self.length, count);
        if from.len() == count {
            let mut bytes = [0; MOST_BESIDE];
            from.copy_out(0, &mut bytes[..count]);
            handshakes::begin_to_repeat(&self.place.words.repeated, Place::repetition(start, count));
            self.place.beside(count).copy_in(0, &bytes[..count]);
        }
    }

    /// What is before this position is the receiver's.
    #[inline]
    fn show(&mut self, tail: u64) {
        self.tail = tail;
        self.place.words.tail.store(tail, Ordering::Release);
    }

    /// Whether there is room that is worth it for a sender that found none.
    pub(super) fn has_room(&mut self) -> bool {
        let worth = RING_PART.min(self.length / 2);
        // What cannot be is reported when bytes are offered.
        self.room(worth).map_or(true, |room| room == worth)
    }

    /// Takes all bytes of `pieces`, or none if there is no room for all.
    ///
    /// # Errors
    /// What the receiver wrote cannot be.
    pub(super) fn send_whole(&mut self, pieces: &[Piece<'_>]) -> Result<bool, StreamError> {
        let wanted = pieces.iter().map(Piece::len).sum();
        if self.room(wanted)? < wanted {
            return Ok(false);
        }
        self.send(pieces).map(|_| true)
    }

    /// Whether the receiver has taken everything.
    ///
    /// # Errors
    /// What the receiver wrote cannot be.
    pub(super) fn is_drained(&mut self) -> Result<bool, StreamError> {
        // With a ring that is full, the room is read anew.
        self.room(self.length + 1)?;
        Ok(self.tail == self.head)
    }

    /// Nothing follows what was sent.
    pub(super) fn end(&self) {
        self.place.words.ended.store(1, Ordering::Release);
    }

    /// This end does not have the connection any more.
    pub(super) fn leave(&self) {
        self.place.words.gone.store(1, Ordering::Release);
    }
}

/// The receiver's end.
#[derive(Debug)]
pub(super) struct Receiver {
    place: Place,
    head: u64,
    /// The tail as of the last look.
    tail: u64,
    length: usize,
}

impl Receiver {
    pub(super) fn new(memory: Arc<SharedMemory>, direction: Direction) -> Receiver {
        Receiver {
            place: Place::new(&memory, direction),
            head: 0,
            tail: 0,
            length: FIRST,
        }
    }

    /// How many bytes there are, side by side.
    ///
    /// # Errors
    /// `WouldBlock`: none at present.
    #[inline]
    pub(super) fn available(&mut self) -> Result<usize, StreamError> {
        if self.tail == self.head {
            let tail = self.place.words.tail.load(Ordering::Acquire);
            if tail == self.head {
                return Err(StreamError::WouldBlock);
            }
            let length = self.length_up_to(tail)?;
            (self.tail, self.length) = (tail, length);
        }
        Ok(self.tail.wrapping_sub(self.head) as usize)
    }

    /// The ring's length, with bytes up to `tail` in it.
    #[inline]
    fn length_up_to(&self, tail: u64) -> Result<usize, StreamError> {
        let length = self.place.words.length.load(Ordering::Relaxed) as usize;
        let fits = length.is_power_of_two() && (FIRST..=MOST).contains(&length);
        match fits && tail.wrapping_sub(self.head) <= length as u64 {
            true => Ok(length),
            false => Err(broken()),
        }
    }

    /// Whether the sender sends no more.
    pub(super) fn is_finished(&self) -> bool {
        self.place.words.ended.load(Ordering::Acquire) != 0
    }

    /// Whether nothing follows what has been received.
    pub(super) fn is_ended(&mut self) -> bool {
        // The sender sets the mark after its last tail.
        self.is_finished() && self.is_empty()
    }

    /// Whether nothing has arrived. To be asked again after the sender was seen to be gone.
    pub(super) fn is_empty(&mut self) -> bool {
        self.available() == Err(StreamError::WouldBlock)
    }

    /// Whether the sender of a direction does not have the memory any more.
    pub(super) fn is_marked_left(memory: &SharedMemory, direction: Direction) -> bool {
        memory
            .word(RING_WORDS.of(direction) + offset_of!(RingWords, gone))
            .load(Ordering::Acquire)
            != 0
    }

    /// Whether the other end does not have the connection any more.
    pub(super) fn is_left(&self) -> bool {
        self.place.words.gone.load(Ordering::Acquire) != 0
    }

    /// Fills `into` in order with what has arrived; returns how many bytes, and whether the sender
    /// waits for that.
    ///
    /// # Errors
    /// `WouldBlock`: nothing has arrived.
    pub(super) fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<(usize, bool), StreamError> {
        self.available()?;
        let mut received = 0;
        for piece in into {
            let mut at = 0;
            while at < piece.len() {
                // More may have come while the last bytes were copied.
                let Ok(available) = self.available() else {
                    return Ok((received, self.publish()));
                };
                let most = available.min(piece.len() - at).min(RING_PART);
                if self.take_beside(available, most, &mut piece.rest(at)) {
                    (at, received) = (at + most, received + most);
                    continue;
                }
                let from = self.place.extent(self.head, self.length, most);
                if from.try_copy_to(&mut piece.rest(at)).is_err() {
                    // As a system call: what was received before is received.
                    return match received {
                        0 => Err(StreamError::Fault),
                        _ => Ok((received, self.publish())),
                    };
                }
                self.head += from.len() as u64;
                (at, received) = (at + from.len(), received + from.len());
                if from.len() == RING_PART {
                    self.place.words.head.store(self.head, Ordering::Release);
                }
            }
        }
        Ok((received, self.publish()))
    }

    /// Takes all that has arrived, if `into` has room for it, and it is in one piece; returns how
    /// many bytes, and whether the sender waits for that.
    #[inline]
    pub(super) fn receive_short(&mut self, into: &mut [u8]) -> Option<(usize, bool)> {
        let available = self.available().ok()?;
        let into = into.get_mut(..available)?;
        if !self.take_beside(available, available, &mut PieceMut::of(into)) {
            let from = self.place.extent(self.head, self.length, available);
            if from.len() < available {
                return None;
            }
            from.copy_out(0, into);
            self.head = self.tail;
        }
        Some((available, self.publish()))
    }

    /// Takes all `available` bytes from beside the tail, if they are there, and all fit into the
    /// `most` that are requested.
    #[inline]
    fn take_beside(&mut self, available: usize, most: usize, into: &mut PieceMut<'_>) -> bool {
        if available > most.min(MOST_BESIDE) {
            return false;
        }
        let value = Place::repetition(self.head, available);
        let from = self.place.beside(available);
        let copy = || from.try_copy_to(into).ok();
        let taken = handshakes::copy_repeated(&self.place.words.repeated, value, copy).is_some();
        if taken {
            self.head = self.tail;
        }
        taken
    }

    /// Gives room back; returns whether the sender waits for it.
    #[inline]
    fn publish(&mut self) -> bool {
        let RingWords { head, wanted, .. } = &*self.place.words;
        handshakes::give_room(head, self.head, wanted, || {
            // A sender that waits is woken when half of the ring is free, not for every byte.
            self.tail.wrapping_sub(self.head) as usize <= self.length / 2
        })
    }
}

#[cfg(test)]
mod tests;
