//! Receives, Reads and atomics whose bytes are withheld: the device places them in memory of this
//! module, and they are copied to the program's memory when it polls the completion, which is as
//! late as the rules permit. So a program that looks earlier finds old bytes, and its writes there
//! are detected.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use urnic_sync::Mutex;

use urnic_device::command::features;
use urnic_device::vocabulary::Access;

use super::memory;
use super::watched_pages::{self, Watched};
use crate::file::domain::Domain;
use urnic_sys::Pages;

/// Address space for the withheld bytes of a queue. Only pages with arrived bytes take memory.
const ARENA: usize = 64 << 20;
/// The memory of each request begins at a multiple of this.
const ALIGNMENT: usize = 64;

/// Most deliveries that are remembered.
const MOST_DELIVERIES: usize = 4096;

/// Recent deliveries of all queue pairs: receives may share memory, and bytes that one delivers are
/// not a change by the program of another.
static DELIVERIES: Mutex<Deliveries> = Mutex::new(Deliveries {
    number: 0,
    ranges: VecDeque::new(),
});

#[derive(Debug)]
struct Deliveries {
    /// The number of deliveries so far.
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

/// The memory of a queue, mapped and registered.
pub(crate) struct WithheldMemory {
    /// `None` only while it is dropped.
    mapping: Option<Pages>,
    addr: usize,
    device: urnic_driver::Mr,
    domain: Arc<Domain>,
}

impl WithheldMemory {
    /// Memory in this domain. `None` if there is none, or the device is in another process: that
    /// would reserve all of it.
    pub(crate) fn new(domain: &Arc<Domain>) -> Option<WithheldMemory> {
        if domain.driver.attributes().features & features::ON_DEMAND == 0 {
            return None;
        }
        let mapping = Pages::zeroed(ARENA).ok()?;
        let addr = mapping.start().as_ptr().cast();
        // On demand: a page is allocated when bytes arrive, not all pages at once.
        let access = Access::LOCAL_WRITE | Access::ON_DEMAND;
        let device = domain
            .driver
            .register(&domain.device, addr, ARENA, addr.addr() as u64, access)
            .ok()?;
        Some(WithheldMemory {
            addr: addr.addr(),
            mapping: Some(mapping),
            device,
            domain: domain.clone(),
        })
    }

    /// The address and the key.
    pub(crate) fn arena(&self) -> (usize, u32) {
        (self.addr, self.device.stag)
    }
}

impl Drop for WithheldMemory {
    fn drop(&mut self) {
        if self.domain.driver.deregister(&self.device).is_err() {
            // Memory that the device may still use stays.
            std::mem::forget(self.mapping.take());
        }
    }
}

/// The places in the memory of a queue.
#[derive(Debug)]
pub(super) struct Arena {
    base: usize,
    key: u32,
    /// Lengths of the withheld requests, by offset.
    taken: BTreeMap<usize, usize>,
    /// There is little room before this offset.
    full_until: usize,
}

/// A request whose bytes are withheld.
#[derive(Debug)]
pub(super) struct Withheld {
    /// The address at which the device places its bytes.
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
            taken: BTreeMap::new(),
            full_until: 0,
        }
    }

    /// The first offset, from `offset` on, with `len` free bytes.
    fn room_from(&self, offset: usize, len: usize) -> Option<usize> {
        let before = self.taken.range(..=offset).next_back();
        let mut at = before.map_or(offset, |(start, taken)| offset.max(start + taken));
        for (start, taken) in self.taken.range(at..) {
            if start - at >= len {
                return Some(at);
            }
            at = start + taken;
        }
        (len <= ARENA - at).then_some(at)
    }

    /// An offset with `len` free bytes, near the front, so that little memory is touched.
    fn room(&self, len: usize) -> Option<usize> {
        let behind = self.room_from(self.full_until, len);
        behind.or_else(|| self.room_from(0, len))
    }

    /// Withholds the bytes of a request for these pieces of the program's memory; `watched` tells
    /// for each whether its pages may be made inaccessible until then. `None`: the arena has no
    /// room.
    pub(super) fn withhold(&mut self, request: Watched, pieces: &[(usize, usize, bool)]) -> Option<Withheld> {
        let len: usize = pieces.iter().map(|(_, len, _)| len).sum();
        if len == 0 {
            return None;
        }
        let taken = len.checked_next_multiple_of(ALIGNMENT)?;
        let at = self.room(taken)?;
        self.taken.insert(at, taken);
        self.full_until = at + taken;
        let piece = |&(addr, len, watched): &(usize, usize, bool)| Piece {
            addr,
            len,
            hash: memory::hash(addr, len),
            watch: watched
                .then(|| watched_pages::close(addr, len, request))
                .flatten(),
        };
        Some(Withheld {
            addr: self.base + at,
            key: self.key,
            len,
            pieces: pieces.iter().map(piece).collect(),
            posted_at: DELIVERIES.lock().number,
        })
    }

    /// Frees the memory of a request that is complete.
    pub(super) fn release(&mut self, withheld: &Withheld) {
        let at = withheld.addr - self.base;
        self.taken.remove(&at);
        self.full_until = self.full_until.min(at);
    }
}

impl Withheld {
    /// Makes the program's memory accessible again, and copies the first `len` bytes to it. Returns
    /// the first piece that the program changed before.
    pub(super) fn deliver(&self, len: usize) -> Option<(usize, usize)> {
        self.open();
        let is_changed = |piece: &&Piece| {
            let now = memory::hash(piece.addr, piece.len);
            piece.hash.zip(now).is_some_and(|(before, now)| before != now)
                && !DELIVERIES.lock().reached(self.posted_at, piece.addr, piece.len)
        };
        let changed = self
            .pieces
            .iter()
            .find(is_changed)
            .map(|piece| (piece.addr, piece.len));
        let mut done = 0;
        for piece in &self.pieces {
            let part = len.saturating_sub(done).min(piece.len);
            // The same memory may also be the payload of an outstanding Send or Write.
            watched_pages::open_within(piece.addr, part, true);
            memory::copy(self.addr + done, piece.addr, part);
            DELIVERIES.lock().add(piece.addr, part);
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
    use urnic_device::vocabulary::WcOpcode;

    const RECEIVE: Watched = Watched {
        wr_id: 1,
        opcode: WcOpcode::Recv,
    };

    #[test]
    fn bytes_arrive_in_the_pieces_when_they_are_delivered() {
        let place = [1u8, 2, 3, 4, 5, 6, 7, 8];
        let mut arena = Arena::new(place.as_ptr().addr(), 9);
        let (one, other) = ([0u8; 3], [0u8; 4]);
        let pieces = [(one.as_ptr().addr(), 3, false), (other.as_ptr().addr(), 4, false)];
        let withheld = arena.withhold(RECEIVE, &pieces).unwrap();
        assert_eq!(
            (withheld.key, withheld.len, withheld.addr),
            (9, 7, place.as_ptr().addr())
        );
        assert_eq!(withheld.deliver(5), None);
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
    fn writes_of_the_program_before_the_poll_are_detected() {
        let place = [0u8; 64];
        let mut arena = Arena::new(place.as_ptr().addr(), 9);
        let mut bytes = [0u8; 16];
        let addr = bytes.as_ptr().addr();
        let withheld = arena.withhold(RECEIVE, &[(addr, 16, false)]).unwrap();
        std::hint::black_box(&mut bytes)[3] = 1;
        assert_eq!(withheld.deliver(16), Some((addr, 16)));
    }

    #[test]
    fn bytes_of_another_receive_are_no_change_by_the_program() {
        let place = [5u8; 128];
        let mut arena = Arena::new(place.as_ptr().addr(), 9);
        let shared = [0u8; 64];
        let pieces = [(shared.as_ptr().addr(), 64, false)];
        let withheld: Vec<Withheld> = (0..2)
            .map(|_| arena.withhold(RECEIVE, &pieces).unwrap())
            .collect();
        assert_eq!(withheld[0].deliver(64), None);
        assert_eq!(withheld[1].deliver(64), None);
    }

    #[test]
    fn room_is_used_again_in_any_order_and_in_front() {
        let mut arena = Arena::new(0, 9);
        // There is no memory at these addresses: the test is only about offsets.
        let withhold = |arena: &mut Arena, len| arena.withhold(RECEIVE, &[(64, len, false)]);
        let at = |withheld: &Option<Withheld>| withheld.as_ref().map(|withheld| withheld.addr);
        let first = withhold(&mut arena, ARENA / 2);
        let second = withhold(&mut arena, ARENA / 2);
        assert_eq!((at(&first), at(&second)), (Some(0), Some(ARENA / 2)));
        assert_eq!(at(&withhold(&mut arena, 1)), None, "full");
        arena.release(&first.unwrap());
        let quarter = withhold(&mut arena, ARENA / 4);
        assert_eq!(at(&quarter), Some(0));
        assert_eq!(at(&withhold(&mut arena, ARENA / 2)), None);
        let next = withhold(&mut arena, ARENA / 4);
        assert_eq!(at(&next), Some(ARENA / 4));
        arena.release(&second.unwrap());
        arena.release(&quarter.unwrap());
        let half = withhold(&mut arena, ARENA / 2);
        assert_eq!(at(&half), Some(ARENA / 2));
        let one = withhold(&mut arena, 1);
        assert_eq!(at(&one), Some(0));
        for withheld in [next, half, one].into_iter().flatten() {
            arena.release(&withheld);
        }
        let mut before = None;
        for _ in 0..100 {
            let withheld = withhold(&mut arena, 100);
            assert!(at(&withheld).unwrap() <= 2 * 128, "{withheld:?}");
            if let Some(before) = std::mem::replace(&mut before, withheld) {
                arena.release(&before);
            }
        }
        arena.release(&before.unwrap());
        assert_eq!(at(&withhold(&mut arena, ARENA)), Some(0));
        assert_eq!(
            (
                at(&withhold(&mut arena, 0)),
                at(&withhold(&mut arena, usize::MAX))
            ),
            (None, None)
        );
    }
}
