//! Fields that share a word or a byte with others. A value that is wider than its field loses its
//! upper bits.

use zerocopy::byteorder::big_endian::U32;

/// A word with a field of 24 bits, and a byte after it.
pub(super) fn word24(value: u32, byte: u8) -> U32 {
    U32::new(value << 8 | u32::from(byte))
}

/// The field of 24 bits of such a word.
pub(super) fn upper24(word: U32) -> u32 {
    word.get() >> 8
}

/// The byte of such a word.
pub(super) fn lower8(word: U32) -> u8 {
    word.get() as u8
}

/// The `width` bits of `byte` that have `below` bits below them.
pub(super) fn bits(byte: u8, below: u32, width: u32) -> u8 {
    byte >> below & mask(width)
}

/// A byte with `value` in the `width` bits that have `below` bits below them.
pub(super) fn placed(value: u8, below: u32, width: u32) -> u8 {
    (value & mask(width)) << below
}

fn mask(width: u32) -> u8 {
    ((1u16 << width) - 1) as u8
}
