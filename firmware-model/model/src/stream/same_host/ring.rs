//! A ring of bytes in shared memory, for one direction of a connection.
//!
//! The sender writes bytes after `tail` and publishes the new tail; the receiver copies bytes out
//! from `head` on and publishes the new head. Both positions count all bytes since the beginning.
//! The ring starts small, because many connections carry little, and grows while it is empty: the
//! sender then stores the new length before it publishes a tail, so the receiver reads the length
//! that belongs to the bytes.
//!
//! A short message is in the ring, and also in an inline copy in the cache line of the tail: a
//! receiver that polls the tail gets both by one transfer between the processors.
//!
//! The other process may be hostile: whatever it writes, positions and length are checked before
//! use, and bytes are copied once and then checked.

use super::layout::Direction;
use super::layout::{FIRST_RINGS, INLINE_COPY_MAX, RING_WORDS, RINGS, RingWords};
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
/// Bits of [`RingWords::inline_id`] for the number of bytes. The others have the low bits of the
/// position.
const COUNT_BITS: u32 = 6;
const _: () = assert!(INLINE_COPY_MAX < 1 << COUNT_BITS && MOST < 1 << (32 - COUNT_BITS));

/// The place of a ring in the memory of its connection.
#[derive(Debug)]
struct Place {
    words: SharedWords<RingWords>,
    /// Offset of the inline copy.
    inline_copy: usize,
    first_bytes: usize,
    bytes: usize,
}

impl Place {
    fn new(memory: &Arc<SharedMemory>, direction: Direction) -> Place {
        let at = RING_WORDS.of(direction);
        Place {
            words: memory.words(at),
            inline_copy: at + offset_of!(RingWords, inline_copy),
            first_bytes: FIRST_RINGS.of(direction),
            bytes: RINGS.of(direction),
        }
    }

    /// The first `count` bytes of the inline copy.
    fn inline_copy(&self, count: usize) -> Mapping {
        self.words.memory().part(self.inline_copy, count)
    }

    /// The value of [`RingWords::inline_id`] for `count` bytes from `position` on. It is unique
    /// among the bytes that are in the ring at a time.
    fn inline_id(position: u64, count: usize) -> u32 {
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

/// The other process wrote an impossible value.
fn broken() -> StreamError {
    StreamError::Closed(Errno::PROTO)
}

/// The sender's end.
#[derive(Debug)]
pub(super) struct RingSender {
    place: Place,
    tail: u64,
    /// The head when it was last read.
    head: u64,
    length: usize,
    /// The length from the next time on at which the ring is empty.
    next_length: usize,
}

impl RingSender {
    pub(super) fn new(memory: Arc<SharedMemory>, direction: Direction) -> RingSender {
        RingSender {
            place: Place::new(&memory, direction),
            tail: 0,
            head: 0,
            length: FIRST,
            next_length: FIRST,
        }
    }

    /// Like [`new`](Self::new), with the longest ring from the beginning.
    pub(super) fn at_full_length(memory: Arc<SharedMemory>, direction: Direction) -> RingSender {
        RingSender {
            length: MOST,
            next_length: MOST,
            ..RingSender::new(memory, direction)
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

    /// Takes bytes from `pieces` in order, while there is room; returns their number.
    ///
    /// # Errors
    /// `WouldBlock`: there is no room. Whenever there was no room for all bytes, the receiver
    /// notifies this end when there is more.
    pub(super) fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let wanted = pieces.iter().map(Piece::len).sum();
        let mut room = self.room(wanted)?;
        if room < wanted {
            // Also if some bytes find room: the caller then waits for the receiver's notification.
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
                    // As a system call does: bytes that were taken before the fault count.
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
        self.write_inline_copy(start, room);
        self.show(tail);
        Ok(room)
    }

    /// Also puts a short message into the inline copy.
    #[inline]
    fn write_inline_copy(&self, start: u64, count: usize) {
        if count > INLINE_COPY_MAX {
            return;
        }
        let from = self.place.extent(start, self.length, count);
        if from.len() == count {
            let mut bytes = [0; INLINE_COPY_MAX];
            from.copy_out(0, &mut bytes[..count]);
            handshakes::begin_inline_copy(&self.place.words.inline_id, Place::inline_id(start, count));
            self.place.inline_copy(count).copy_in(0, &bytes[..count]);
        }
    }

    /// Bytes before this position belong to the receiver.
    #[inline]
    fn show(&mut self, tail: u64) {
        self.tail = tail;
        self.place.words.tail.store(tail, Ordering::Release);
    }

    /// Whether there is enough room for a sender that found none.
    pub(super) fn has_room(&mut self) -> bool {
        let worth = RING_PART.min(self.length / 2);
        // Impossible values are reported when bytes are offered.
        self.room(worth).map_or(true, |room| room == worth)
    }

    /// Takes all bytes of `pieces`, or none if there is no room for all.
    ///
    /// # Errors
    /// The receiver wrote an impossible value.
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
    /// The receiver wrote an impossible value.
    pub(super) fn is_drained(&mut self) -> Result<bool, StreamError> {
        // With a ring that is full, the room is read anew.
        self.room(self.length + 1)?;
        Ok(self.tail == self.head)
    }

    /// Marks the end: no byte follows those that were sent.
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
pub(super) struct RingReceiver {
    place: Place,
    head: u64,
    /// The tail when it was last read.
    tail: u64,
    length: usize,
}

impl RingReceiver {
    pub(super) fn new(memory: Arc<SharedMemory>, direction: Direction) -> RingReceiver {
        RingReceiver {
            place: Place::new(&memory, direction),
            head: 0,
            tail: 0,
            length: FIRST,
        }
    }

    /// The number of contiguous bytes in the ring.
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

    /// Whether the sender has marked the end and all bytes are received.
    pub(super) fn is_ended(&mut self) -> bool {
        // The sender sets the mark after its last tail.
        self.is_finished() && self.is_empty()
    }

    /// Whether no byte has arrived. The caller must check again after it has seen that the sender
    /// has ended.
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

    /// Fills `into` in order with arrived bytes; returns their number, and whether the sender waits
    /// for the room.
    ///
    /// # Errors
    /// `WouldBlock`: nothing has arrived.
    pub(super) fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<(usize, bool), StreamError> {
        self.available()?;
        let mut received = 0;
        for piece in into {
            let mut at = 0;
            while at < piece.len() {
                // More bytes may have arrived during the copy.
                let Ok(available) = self.available() else {
                    return Ok((received, self.publish()));
                };
                let most = available.min(piece.len() - at).min(RING_PART);
                if self.take_inline_copy(available, most, &mut piece.rest(at)) {
                    (at, received) = (at + most, received + most);
                    continue;
                }
                let from = self.place.extent(self.head, self.length, most);
                if from.try_copy_to(&mut piece.rest(at)).is_err() {
                    // As a system call does: bytes that were received before the fault count.
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
        if !self.take_inline_copy(available, available, &mut PieceMut::of(into)) {
            let from = self.place.extent(self.head, self.length, available);
            if from.len() < available {
                return None;
            }
            from.copy_out(0, into);
            self.head = self.tail;
        }
        Some((available, self.publish()))
    }

    /// Takes all `available` bytes from the inline copy, if it has them and they fit into the
    /// `most` that are requested.
    #[inline]
    fn take_inline_copy(&mut self, available: usize, most: usize, into: &mut PieceMut<'_>) -> bool {
        if available > most.min(INLINE_COPY_MAX) {
            return false;
        }
        let value = Place::inline_id(self.head, available);
        let from = self.place.inline_copy(available);
        let copy = || from.try_copy_to(into).ok();
        let taken = handshakes::read_inline_copy(&self.place.words.inline_id, value, copy).is_some();
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
