//! A ring of bytes in shared memory, for one direction of a connection.
//!
//! The sender writes bytes behind `tail` and publishes the new tail; the receiver copies bytes out
//! from `head` on and publishes the new head. Both positions count all bytes since the beginning.
//! The ring starts small, because many connections carry little, and grows while it is empty: the
//! sender then stores the new length before it publishes a tail, so the receiver reads the length
//! that belongs to the bytes.
//!
//! The other process may be hostile: whatever it writes, positions and length are checked before
//! use, and bytes are copied once and then checked.

use super::direction::Direction;
use crate::handshakes;
use crate::host::{Mapping, Piece, PieceMut, SharedMemory, Unreachable};
use crate::stream::StreamError;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Length of a ring at first, and at most, in bytes.
const FIRST: usize = 4 << 10;
const MOST: usize = 256 << 10;
/// Where things are in the memory of a connection: the words of each direction (those of the sender
/// and of the receiver in cache lines of their own), then the bytes.
const WORDS: usize = 256;
const TAIL: usize = 0;
const LENGTH: usize = 8;
const ENDED: usize = 12;
const GONE: usize = 16;
const HEAD: usize = 64;
const WANTED: usize = 128;
const BYTES: usize = 4096;
/// Bytes of shared memory for a connection.
pub(super) const MEMORY: usize = BYTES + 2 * MOST;

/// The place of a ring in the memory of its connection.
#[derive(Debug)]
struct Place {
    memory: Arc<SharedMemory>,
    words: usize,
    bytes: usize,
}

impl Place {
    fn new(memory: Arc<SharedMemory>, direction: Direction) -> Place {
        let at = usize::from(direction == Direction::FromResponder);
        Place {
            memory,
            words: at * WORDS,
            bytes: BYTES + at * MOST,
        }
    }

    fn tail(&self) -> &AtomicU64 {
        self.memory.word64(self.words + TAIL)
    }

    fn head(&self) -> &AtomicU64 {
        self.memory.word64(self.words + HEAD)
    }

    fn length(&self) -> &AtomicU32 {
        self.memory.word(self.words + LENGTH)
    }

    /// Set when nothing follows the tail.
    fn ended(&self) -> &AtomicU32 {
        self.memory.word(self.words + ENDED)
    }

    /// Set when the sender does not have the connection any more.
    fn gone(&self) -> &AtomicU32 {
        self.memory.word(self.words + GONE)
    }

    /// Set while the sender waits for room.
    fn wanted(&self) -> &AtomicU32 {
        self.memory.word(self.words + WANTED)
    }

    /// The bytes from `position` on, at most `most`, up to the end of the ring.
    #[inline]
    fn extent(&self, position: u64, length: usize, most: usize) -> Mapping {
        let at = position as usize & (length - 1);
        self.memory.part(self.bytes + at, most.min(length - at))
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
            place: Place::new(memory, direction),
            tail: 0,
            head: 0,
            length: FIRST,
            next_length: FIRST,
        }
    }

    /// Room for `wanted` bytes, or less.
    fn room(&mut self, wanted: usize) -> Result<usize, StreamError> {
        let used = self.tail.wrapping_sub(self.head) as usize;
        if self.length - used >= wanted {
            return Ok(wanted);
        }
        self.head = self.place.head().load(Ordering::Acquire);
        let used = self.tail.wrapping_sub(self.head);
        if used > self.length as u64 {
            return Err(broken());
        }
        if used == 0 {
            let length = wanted.clamp(FIRST, MOST).next_power_of_two();
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
            self.next_length = (2 * self.length).min(MOST);
            handshakes::want_room(self.place.wanted());
            room = self.room(wanted)?;
            if room == wanted {
                self.place.wanted().store(0, Ordering::Relaxed);
            } else if room == 0 {
                return Err(StreamError::WouldBlock);
            }
        }
        let mut tail = self.tail;
        let mut left = room;
        for piece in pieces {
            let mut piece = piece.first(left);
            left -= piece.len();
            while !piece.is_empty() {
                let into = self.place.extent(tail, self.length, piece.len());
                // Nothing is published yet: what was copied before is as if it had not been.
                into.try_fill_from(&piece)
                    .map_err(|Unreachable| StreamError::Fault)?;
                tail += into.len() as u64;
                piece = piece.skip(into.len());
            }
            if left == 0 {
                break;
            }
        }
        self.tail = tail;
        self.place.length().store(self.length as u32, Ordering::Relaxed);
        self.place.tail().store(tail, Ordering::Release);
        Ok(room)
    }

    /// Nothing follows what was sent.
    pub(super) fn end(&self) {
        self.place.ended().store(1, Ordering::Release);
    }

    /// This end does not have the connection any more.
    pub(super) fn leave(&self) {
        self.place.gone().store(1, Ordering::Release);
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
            place: Place::new(memory, direction),
            head: 0,
            tail: 0,
            length: FIRST,
        }
    }

    /// How many bytes there are.
    ///
    /// # Errors
    /// `WouldBlock`: none at present.
    #[inline]
    pub(super) fn available(&mut self) -> Result<usize, StreamError> {
        if self.tail == self.head {
            let tail = self.place.tail().load(Ordering::Acquire);
            if tail == self.head {
                return Err(StreamError::WouldBlock);
            }
            let length = self.place.length().load(Ordering::Relaxed) as usize;
            let fits = length.is_power_of_two() && (FIRST..=MOST).contains(&length);
            if !fits || tail.wrapping_sub(self.head) > length as u64 {
                return Err(broken());
            }
            (self.tail, self.length) = (tail, length);
        }
        Ok(self.tail.wrapping_sub(self.head) as usize)
    }

    /// Whether the sender sends no more.
    pub(super) fn is_finished(&self) -> bool {
        self.place.ended().load(Ordering::Acquire) != 0
    }

    /// Whether nothing follows what has been received.
    pub(super) fn is_ended(&mut self) -> bool {
        // The sender sets the mark behind its last tail.
        self.is_finished() && self.is_empty()
    }

    /// Whether nothing has arrived. To be asked again after the sender was seen to be gone.
    pub(super) fn is_empty(&mut self) -> bool {
        self.available() == Err(StreamError::WouldBlock)
    }

    /// Whether the other end does not have the connection any more.
    pub(super) fn is_left(&self) -> bool {
        self.place.gone().load(Ordering::Acquire) != 0
    }

    /// Fills `into` in order with what has arrived; returns how many bytes, and whether the sender
    /// waits for the room.
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
                let from = self
                    .place
                    .extent(self.head, self.length, available.min(piece.len() - at));
                if from.try_copy_to(&mut piece.rest(at)).is_err() {
                    // As a system call: what was received before is received.
                    return match received {
                        0 => Err(StreamError::Fault),
                        _ => Ok((received, self.publish())),
                    };
                }
                self.head += from.len() as u64;
                (at, received) = (at + from.len(), received + from.len());
            }
        }
        Ok((received, self.publish()))
    }

    /// Gives room back; returns whether the sender waits for it.
    #[inline]
    fn publish(&mut self) -> bool {
        let (head, wanted) = (self.place.head(), self.place.wanted());
        handshakes::give_room(head, self.head, wanted, || {
            // A sender that waits is woken when half of the ring is free, not for every byte.
            self.tail.wrapping_sub(self.head) as usize <= self.length / 2
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn ends() -> (Arc<SharedMemory>, Sender, Receiver) {
        let memory = Arc::new(SharedMemory::create("ring", MEMORY).unwrap().0);
        let direction = Direction::FromResponder;
        let (sender, receiver) = (
            Sender::new(memory.clone(), direction),
            Receiver::new(memory.clone(), direction),
        );
        (memory, sender, receiver)
    }

    #[derive(Debug, Clone)]
    enum Step {
        Send(Vec<usize>),
        Receive(Vec<usize>),
    }

    fn step() -> impl Strategy<Value = Step> {
        let sizes = || prop::collection::vec(prop_oneof![0..200usize, 0..9000usize, 0..600_000usize], 1..4);
        prop_oneof![sizes().prop_map(Step::Send), sizes().prop_map(Step::Receive)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// However the bytes are cut, they arrive in order, and a sender that found no room is told
        /// when there is.
        #[test]
        fn shm_02_bytes_arrive_in_order(steps in prop::collection::vec(step(), 1..60)) {
            let (_, mut sender, mut receiver) = ends();
            let mut under_way = VecDeque::new();
            let mut next = 0u8;
            let mut waits = false;
            for step in steps {
                match step {
                    Step::Send(sizes) => {
                        let mut fill = |len| (0..len).map(|_| { next = next.wrapping_mul(5).wrapping_add(3); next }).collect();
                        let bytes: Vec<Vec<u8>> = sizes.into_iter().map(&mut fill).collect();
                        let pieces: Vec<_> = bytes.iter().map(|b| Piece::of(b)).collect();
                        let all = bytes.concat();
                        let sent = match sender.send(&pieces) {
                            Ok(sent) => sent,
                            Err(error) => { prop_assert_eq!(error, StreamError::WouldBlock); 0 }
                        };
                        prop_assert!(sent > 0 || all.is_empty() || !under_way.is_empty());
                        waits |= sent < all.len();
                        next = all.get(..sent).and_then(|s| s.last().copied()).unwrap_or(next);
                        if sent < all.len() {
                            // The next send continues behind what was taken.
                            next = under_way.back().copied().filter(|_| sent == 0).unwrap_or(next);
                        }
                        under_way.extend(&all[..sent]);
                    }
                    Step::Receive(sizes) => {
                        let mut into: Vec<Vec<u8>> = sizes.into_iter().map(|n| vec![0; n]).collect();
                        let room: usize = into.iter().map(Vec::len).sum();
                        let mut pieces: Vec<_> = into.iter_mut().map(|b| PieceMut::of(b)).collect();
                        let received = receiver.receive(&mut pieces);
                        drop(pieces);
                        match received {
                            Ok((received, told)) => {
                                prop_assert_eq!(received, room.min(under_way.len()));
                                let expected: Vec<u8> = under_way.drain(..received).collect();
                                prop_assert_eq!(&into.concat()[..received], &expected[..]);
                                prop_assert!(told || !waits || !under_way.is_empty());
                                waits &= !told;
                            }
                            Err(error) => {
                                prop_assert_eq!(error, StreamError::WouldBlock);
                                prop_assert!(under_way.is_empty());
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn two_threads_pass_many_bytes() {
        let (_, mut sender, mut receiver) = ends();
        const TOTAL: usize = 50 << 20;
        let sending = std::thread::spawn(move || {
            let mut sent = 0;
            while sent < TOTAL {
                let len = (sent % 70_001 + 1).min(TOTAL - sent);
                let bytes: Vec<u8> = (sent..sent + len).map(|n| (n % 251) as u8).collect();
                let mut at = 0;
                while at < len {
                    match sender.send(&[Piece::of(&bytes[at..])]) {
                        Ok(n) => at += n,
                        Err(StreamError::WouldBlock) => std::thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                }
                sent += len;
            }
            sender.end();
        });
        let mut received = 0;
        let mut into = vec![0; 33_333];
        while !receiver.is_ended() {
            match receiver.receive(&mut [PieceMut::of(&mut into)]) {
                Ok((n, _)) => {
                    let right = |(at, byte): (usize, &u8)| *byte == ((received + at) % 251) as u8;
                    assert!(into[..n].iter().enumerate().all(right), "behind {received}");
                    received += n;
                }
                Err(StreamError::WouldBlock) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(received, TOTAL);
        sending.join().unwrap();
    }

    #[test]
    fn a_ring_grows_when_it_was_too_small_and_no_further() {
        let (memory, mut sender, mut receiver) = ends();
        let length = || memory.word(WORDS + LENGTH).load(Ordering::Relaxed) as usize;
        let bytes = vec![1; 2 * MOST];
        sender.send(&[Piece::of(&bytes[..100])]).unwrap();
        assert_eq!(length(), FIRST, "small messages need no more");
        for _ in 0..20 {
            while receiver.receive(&mut [PieceMut::of(&mut vec![0; MOST])]).is_ok() {}
            sender.send(&[Piece::of(&bytes)]).unwrap();
        }
        assert_eq!(length(), MOST);
        // Many small messages that find no room make it grow, too.
        let (memory, mut sender, mut receiver) = ends();
        for _ in 0..20 {
            while receiver.receive(&mut [PieceMut::of(&mut vec![0; MOST])]).is_ok() {}
            while sender.send(&[Piece::of(&bytes[..64])]) == Ok(64) {}
        }
        assert_eq!(memory.word(WORDS + LENGTH).load(Ordering::Relaxed) as usize, MOST);
    }

    /// Whatever a hostile peer writes into the words, an end reports a broken connection or carries
    /// on, and reads and writes nothing outside the ring.
    #[test]
    fn shm_07_words_that_cannot_be_end_the_connection() {
        let bad_lengths = [0, 1, 4095, 3 * 4096, 2 * MOST as u32, u32::MAX];
        for length in bad_lengths {
            let (memory, mut sender, mut receiver) = ends();
            sender.send(&[Piece::of(b"good")]).unwrap();
            memory.word(WORDS + LENGTH).store(length, Ordering::Relaxed);
            let received = receiver.receive(&mut [PieceMut::of(&mut [0; 8])]);
            assert_eq!(received.err(), Some(broken()), "length {length}");
        }
        for tail in [FIRST as u64 + 1, u64::MAX, 1 << 63] {
            let (memory, mut sender, mut receiver) = ends();
            sender.send(&[Piece::of(b"good")]).unwrap();
            memory.word64(WORDS + TAIL).store(tail, Ordering::Relaxed);
            let received = receiver.receive(&mut [PieceMut::of(&mut [0; 8])]);
            assert_eq!(received.err(), Some(broken()), "tail {tail}");
        }
        for head in [5, u64::MAX - FIRST as u64, 1 << 63] {
            let (memory, mut sender, _) = ends();
            sender.send(&[Piece::of(b"good")]).unwrap();
            memory.word64(WORDS + HEAD).store(head, Ordering::Relaxed);
            let sent = sender.send(&[Piece::of(&[0; FIRST])]);
            assert_eq!(sent.err(), Some(broken()), "head {head}");
        }
    }

    #[test]
    fn inaccessible_memory_is_a_fault_and_sends_nothing() {
        crate::host::fault::install();
        let (_, mut sender, mut receiver) = ends();
        let gone = SharedMemory::create("gone", 4096).unwrap().0;
        // A piece that refers to memory which is unmapped before it is used.
        let piece = gone.piece();
        let pieces = [Piece::of(b"before"), unsafe_gone(piece)];
        drop(gone);
        assert_eq!(sender.send(&pieces), Err(StreamError::Fault));
        assert!(receiver.is_empty());
        sender.send(&[Piece::of(b"behind")]).unwrap();
        let mut into = [0; 6];
        receiver.receive(&mut [PieceMut::of(&mut into)]).unwrap();
        assert_eq!(&into, b"behind");
    }

    /// The piece for a life of its own, as a registration gives it out.
    fn unsafe_gone(piece: Piece<'_>) -> Piece<'static> {
        // SAFETY: a piece is an address and a length; the memory is only read by guarded copies.
        unsafe { std::mem::transmute::<Piece<'_>, Piece<'static>>(piece) }
    }
}
