//! Receives whose bytes are held back: the device places them in memory of this module, and they
//! come to the program's memory when it polls the completion, which is as late as the rules permit.
//! So a program that looks before finds old bytes, and what it writes there is noticed.

use std::collections::VecDeque;
use std::sync::Mutex;

use urnic_process::lock::lock;

use super::memory;
use super::watched_pages;

/// Address space for the receives of a queue pair. It takes memory only where something arrived.
pub(crate) const ARENA: usize = 64 << 20;
/// Receives begin at multiples of this.
const ALIGNMENT: usize = 64;

/// Most deliveries that are remembered.
const MOST_DELIVERIES: usize = 4096;

/// What was delivered lately, from all queue pairs: receives may share memory, and what one brings
/// is not the program's change of another.
static DELIVERIES: Mutex<Deliveries> = Mutex::new(Deliveries {
    number: 0,
    ranges: VecDeque::new(),
});

#[derive(Debug)]
struct Deliveries {
    /// How many there were.
    number: u64,
    /// Address and length of the newest.
    ranges: VecDeque<(usize, usize)>,
}

impl Deliveries {
    fn add(&mut self, addr: usize, len: usize) {
        self.number += 1;
        self.ranges.push_back((addr, len));
        if self.ranges.len() > MOST_DELIVERIES {
            self.ranges.pop_front();
        }
    }

    /// Whether bytes between `addr` and `addr + len` may have been delivered since there were
    /// `number`.
    fn reached(&self, number: u64, addr: usize, len: usize) -> bool {
        let since = self.number - number;
        since > self.ranges.len() as u64
            || self
                .ranges
                .iter()
                .rev()
                .take(since as usize)
                .any(|&(start, size)| start < addr.saturating_add(len) && addr < start.saturating_add(size))
    }
}

/// The memory of a queue pair, in the order of its receives.
#[derive(Debug)]
pub(super) struct Arena {
    base: usize,
    key: u32,
    /// Offset and length of the receives that are held back, oldest first.
    taken: VecDeque<(usize, usize)>,
}

/// A receive that is held back.
#[derive(Debug)]
pub(super) struct Held {
    /// Where the device places it.
    pub(super) addr: usize,
    pub(super) key: u32,
    pub(super) len: usize,
    /// The program's memory.
    pieces: Vec<Piece>,
    /// The number of deliveries before this was posted.
    posted_at: u64,
}

#[derive(Debug)]
struct Piece {
    addr: usize,
    len: usize,
    hash: Option<u64>,
    /// The number of the closed pages.
    watch: Option<usize>,
}

impl Arena {
    /// An arena at this address of [`ARENA`] bytes, which the device knows by this key.
    pub(super) fn new(base: usize, key: u32) -> Arena {
        Arena {
            base,
            key,
            taken: VecDeque::new(),
        }
    }

    /// Where `len` bytes are free: as far in front as possible, so that little memory is touched.
    fn room(&self, len: usize) -> Option<usize> {
        let (Some(&(oldest, _)), Some(&(newest, newest_len))) = (self.taken.front(), self.taken.back())
        else {
            return (len <= ARENA).then_some(0);
        };
        let end = newest + newest_len;
        if newest < oldest {
            return (end + len <= oldest).then_some(end);
        }
        match len <= oldest {
            true => Some(0),
            false => (end + len <= ARENA).then_some(end),
        }
    }

    /// Holds a receive back into these pieces of the program's memory; `watched` tells for each
    /// whether its pages may be closed meanwhile. `None`: the arena has no room.
    pub(super) fn hold(&mut self, wr_id: u64, pieces: &[(usize, usize, bool)]) -> Option<Held> {
        let len: usize = pieces.iter().map(|(_, len, _)| len).sum();
        if len == 0 {
            return None;
        }
        let taken = len.checked_next_multiple_of(ALIGNMENT)?;
        let at = self.room(taken)?;
        self.taken.push_back((at, taken));
        let piece = |&(addr, len, watched): &(usize, usize, bool)| Piece {
            addr,
            len,
            hash: memory::hash(addr, len),
            watch: watched.then(|| watched_pages::close(addr, len, wr_id)).flatten(),
        };
        Some(Held {
            addr: self.base + at,
            key: self.key,
            len,
            pieces: pieces.iter().map(piece).collect(),
            posted_at: lock(&DELIVERIES).number,
        })
    }

    /// The oldest receive that was held back is complete.
    pub(super) fn release(&mut self) {
        self.taken.pop_front();
    }

    /// Nothing is held back any more.
    pub(super) fn clear(&mut self) {
        self.taken.clear();
    }
}

impl Held {
    /// Lets the program at its memory again, and gives it the first `len` bytes. Returns the first
    /// piece that it changed meanwhile.
    pub(super) fn deliver(&self, len: usize) -> Option<(usize, usize)> {
        self.open();
        let is_changed = |piece: &&Piece| {
            let now = memory::hash(piece.addr, piece.len);
            piece.hash.zip(now).is_some_and(|(before, now)| before != now)
                && !lock(&DELIVERIES).reached(self.posted_at, piece.addr, piece.len)
        };
        let changed = self
            .pieces
            .iter()
            .find(is_changed)
            .map(|piece| (piece.addr, piece.len));
        let mut done = 0;
        for piece in &self.pieces {
            let part = len.saturating_sub(done).min(piece.len);
            memory::copy(self.addr + done, piece.addr, part);
            lock(&DELIVERIES).add(piece.addr, part);
            done += part;
        }
        changed
    }

    /// Lets the program at its memory again.
    pub(super) fn open(&self) {
        for watch in self.pieces.iter().filter_map(|piece| piece.watch) {
            watched_pages::open(watch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_in_the_pieces_when_they_are_delivered() {
        let place = [1u8, 2, 3, 4, 5, 6, 7, 8];
        let mut arena = Arena::new(place.as_ptr().addr(), 9);
        let (one, other) = ([0u8; 3], [0u8; 4]);
        let pieces = [(one.as_ptr().addr(), 3, false), (other.as_ptr().addr(), 4, false)];
        let held = arena.hold(1, &pieces).unwrap();
        assert_eq!((held.key, held.len, held.addr), (9, 7, place.as_ptr().addr()));
        assert_eq!(held.deliver(5), None);
        // SAFETY: our own arrays, which another part of this process has written.
        let now = unsafe {
            (
                (&raw const one).read_volatile(),
                (&raw const other).read_volatile(),
            )
        };
        assert_eq!(now, ([1, 2, 3], [4, 5, 0, 0]));
    }

    #[test]
    fn what_the_program_writes_meanwhile_is_noticed() {
        let place = [0u8; 64];
        let mut arena = Arena::new(place.as_ptr().addr(), 9);
        let mut bytes = [0u8; 16];
        let addr = bytes.as_ptr().addr();
        let held = arena.hold(1, &[(addr, 16, false)]).unwrap();
        std::hint::black_box(&mut bytes)[3] = 1;
        assert_eq!(held.deliver(16), Some((addr, 16)));
    }

    #[test]
    fn what_another_receive_brings_is_no_change_by_the_program() {
        let place = [5u8; 128];
        let mut arena = Arena::new(place.as_ptr().addr(), 9);
        let shared = [0u8; 64];
        let pieces = [(shared.as_ptr().addr(), 64, false)];
        let held: Vec<Held> = (0..2).map(|_| arena.hold(1, &pieces).unwrap()).collect();
        assert_eq!(held[0].deliver(64), None);
        assert_eq!(held[1].deliver(64), None);
    }

    #[test]
    fn room_is_used_again_in_order_and_in_front() {
        let mut arena = Arena::new(0, 9);
        // Nothing is at these addresses: only the room counts.
        let hold = |arena: &mut Arena, len| arena.hold(1, &[(64, len, false)]).map(|held| held.addr);
        assert_eq!(hold(&mut arena, ARENA / 2), Some(0));
        assert_eq!(hold(&mut arena, ARENA / 2), Some(ARENA / 2));
        assert_eq!(hold(&mut arena, 1), None, "full");
        arena.release();
        assert_eq!(hold(&mut arena, ARENA / 4), Some(0));
        assert_eq!(hold(&mut arena, ARENA / 2), None);
        assert_eq!(hold(&mut arena, ARENA / 4), Some(ARENA / 4));
        arena.clear();
        for _ in 0..100 {
            let at = hold(&mut arena, 100).unwrap();
            assert!(at <= 2 * 128, "{at}");
            if arena.taken.len() > 1 {
                arena.release();
            }
        }
        arena.clear();
        assert_eq!((hold(&mut arena, ARENA), hold(&mut arena, 0)), (Some(0), None));
        assert_eq!(hold(&mut arena, usize::MAX), None);
    }
}
