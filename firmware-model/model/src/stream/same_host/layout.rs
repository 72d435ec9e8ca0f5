//! What is where in the memory of a connection.

use super::direction::Direction;

/// A part of the memory for each of the two directions, side by side.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    start: usize,
    /// The length of one, in bytes.
    pub(super) len: usize,
}

impl Area {
    const fn behind(self, len: usize) -> Area {
        Area {
            start: self.start + 2 * self.len,
            len,
        }
    }

    /// Where the part of a direction begins.
    pub(super) const fn of(self, direction: Direction) -> usize {
        match direction {
            Direction::FromInitiator => self.start,
            Direction::FromResponder => self.start + self.len,
        }
    }
}

/// The words of a ring.
pub(super) const RING_WORDS: Area = Area { start: 0, len: 256 };
/// The bytes of a ring that has not grown.
pub(super) const FIRST_RINGS: Area = RING_WORDS.behind(1024);
/// The words that an end writes beside the ring, for the direction from it.
pub(super) const END_WORDS: Area = FIRST_RINGS.behind(256);
/// The bytes of a ring that has grown. All before, which every connection uses, is one page.
pub(super) const RINGS: Area = Area {
    start: 4096,
    len: 512 << 10,
};
/// Bytes of shared memory for a connection.
pub(super) const MEMORY: usize = RINGS.behind(0).start;

const _: () = assert!(END_WORDS.behind(0).start <= RINGS.start);
