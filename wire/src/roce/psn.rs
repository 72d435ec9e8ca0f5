//! Packet sequence numbers (§9.7.1 of the InfiniBand Architecture Specification).

use core::fmt;

const BITS: u32 = 24;
const MASK: u32 = (1 << BITS) - 1;

/// A packet sequence number: 24 bits, whose successor of the last one is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// The largest number.
    pub const MAX: Self = Self(MASK);

    /// The low 24 bits of a number.
    #[inline]
    pub const fn new(number: u32) -> Self {
        Self(number & MASK)
    }

    /// The number, less than 2^24.
    #[inline]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The number of the packet that follows this one after `packets` packets.
    #[inline]
    #[must_use]
    pub const fn after(self, packets: u32) -> Self {
        Self::new(self.0.wrapping_add(packets))
    }

    /// How many packets this number comes after `other`, negative when it comes before: the nearer
    /// of both ways, from -2^23 to 2^23 - 1.
    #[inline]
    pub const fn since(self, other: Self) -> i32 {
        const UNUSED: u32 = 32 - BITS;
        ((self.0.wrapping_sub(other.0) << UNUSED) as i32) >> UNUSED
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
