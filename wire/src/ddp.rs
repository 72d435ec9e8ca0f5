//! DDP segments (RFC 5041 §4).
//!
//! ```text
//! tagged     T|L|Rsvd(4)|DV(2)  RsvdULP(8)   STag(32)  TO(64)                     14 bytes
//! untagged   T|L|Rsvd(4)|DV(2)  RsvdULP(40)  QN(32)    MSN(32)   MO(32)           18 bytes
//! ```
//!
//! RsvdULP belongs to the upper layer; DDP carries it uninterpreted.

use core::fmt;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a tagged header (RFC 5041 §4.2).
pub const TAGGED_LEN: usize = 14;

/// Bytes of an untagged header (RFC 5041 §4.3).
pub const UNTAGGED_LEN: usize = 18;

/// DV: the version of DDP that RFC 5041 §4.1 defines.
pub const VERSION: u8 = 1;

mod control {
    pub(super) const TAGGED: u8 = 0x80;
    pub(super) const LAST: u8 = 0x40;
    pub(super) const VERSION: u8 = 0x03;
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct TaggedLayout {
    control: u8,
    rsvd_ulp: u8,
    stag: U32,
    to: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct UntaggedLayout {
    control: u8,
    rsvd_ulp: u8,
    rsvd_ulp_word: U32,
    qn: U32,
    msn: U32,
    mo: U32,
}

const _: () = assert!(size_of::<TaggedLayout>() == TAGGED_LEN && size_of::<UntaggedLayout>() == UNTAGGED_LEN);

/// Why a ULPDU is not a DDP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The ULPDU is shorter than the header that its T bit requires. RFC 5041 has no code for this
    /// error; see the conversion to [`TerminateError`](crate::rdmap::TerminateError).
    #[error("DDP segment of {have} bytes is shorter than its header of {needed}")]
    Truncated {
        /// Bytes of the header, or 1 if even the control byte is missing.
        needed: usize,
        /// Bytes of the ULPDU.
        have: usize,
    },
    /// DV is not [`VERSION`]. Tagged and untagged segments have different codes for it (RFC 5041
    /// §7.2).
    #[error("DDP version {version} in {} segment", if *.tagged { "a tagged" } else { "an untagged" })]
    Version {
        /// The T bit.
        tagged: bool,
        /// DV as sent.
        version: u8,
    },
}

/// The header of a tagged segment: the payload is placed at `to` of the buffer that `stag` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedHeader {
    /// L: the message ends with this segment.
    pub last: bool,
    /// RsvdULP: RDMAP's control byte.
    pub rsvd_ulp: u8,
    /// Steering tag.
    pub stag: u32,
    /// Tagged offset of the payload's first byte.
    pub to: u64,
}

impl TaggedHeader {
    /// Writes the header to the front of `buffer`; returns [`TAGGED_LEN`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`TAGGED_LEN`].
    #[inline]
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let layout = TaggedLayout {
            control: control::TAGGED | control_byte(self.last),
            rsvd_ulp: self.rsvd_ulp,
            stag: U32::new(self.stag),
            to: U64::new(self.to),
        };
        buffer[..TAGGED_LEN].copy_from_slice(layout.as_bytes());
        TAGGED_LEN
    }
}

/// The header of an untagged segment: the payload is placed at `mo` of the buffer for message `msn`
/// on queue `qn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UntaggedHeader {
    /// L: the message ends with this segment.
    pub last: bool,
    /// RsvdULP, first byte: RDMAP's control byte.
    pub rsvd_ulp: u8,
    /// RsvdULP, the other four bytes: RDMAP's Invalidate STag.
    pub rsvd_ulp_word: u32,
    /// Queue number.
    pub qn: u32,
    /// Message sequence number, from 1 on each queue, wrapping.
    pub msn: u32,
    /// Offset of the payload's first byte in the message.
    pub mo: u32,
}

impl UntaggedHeader {
    /// Writes the header to the front of `buffer`; returns [`UNTAGGED_LEN`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`UNTAGGED_LEN`].
    #[inline]
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let layout = UntaggedLayout {
            control: control_byte(self.last),
            rsvd_ulp: self.rsvd_ulp,
            rsvd_ulp_word: U32::new(self.rsvd_ulp_word),
            qn: U32::new(self.qn),
            msn: U32::new(self.msn),
            mo: U32::new(self.mo),
        };
        buffer[..UNTAGGED_LEN].copy_from_slice(layout.as_bytes());
        UNTAGGED_LEN
    }
}

#[inline]
const fn control_byte(last: bool) -> u8 {
    VERSION | if last { control::LAST } else { 0 }
}

/// Bytes of the header that begins with `control`, by its T bit.
#[inline]
pub const fn header_len(control: u8) -> usize {
    if control & control::TAGGED != 0 {
        TAGGED_LEN
    } else {
        UNTAGGED_LEN
    }
}

/// Whether the message ends with the segment that begins with this control byte.
#[inline]
pub const fn is_last(control: u8) -> bool {
    control & control::LAST != 0
}

/// A header of either kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// A header with T = 1.
    Tagged(TaggedHeader),
    /// A header with T = 0.
    Untagged(UntaggedHeader),
}

impl Header {
    /// Splits a ULPDU into header and payload. Ignores the four reserved control bits (RFC 5041
    /// §4.1).
    ///
    /// # Errors
    /// [`Error::Truncated`] if the ULPDU is shorter than its header, otherwise [`Error::Version`]
    /// if DV is not [`VERSION`].
    #[inline]
    pub fn parse(ulpdu: &[u8]) -> Result<(Self, &[u8]), Error> {
        let &[first, ..] = ulpdu else {
            return Err(Error::Truncated { needed: 1, have: 0 });
        };
        let tagged = first & control::TAGGED != 0;
        let version = first & control::VERSION;
        let last = is_last(first);
        let truncated = Error::Truncated {
            needed: header_len(first),
            have: ulpdu.len(),
        };
        if tagged {
            let (layout, payload) = TaggedLayout::ref_from_prefix(ulpdu).map_err(|_| truncated)?;
            if version != VERSION {
                return Err(Error::Version { tagged, version });
            }
            let TaggedLayout {
                rsvd_ulp, stag, to, ..
            } = layout;
            let header = TaggedHeader {
                last,
                rsvd_ulp: *rsvd_ulp,
                stag: stag.get(),
                to: to.get(),
            };
            Ok((Self::Tagged(header), payload))
        } else {
            let (layout, payload) = UntaggedLayout::ref_from_prefix(ulpdu).map_err(|_| truncated)?;
            if version != VERSION {
                return Err(Error::Version { tagged, version });
            }
            let header = UntaggedHeader {
                last,
                rsvd_ulp: layout.rsvd_ulp,
                rsvd_ulp_word: layout.rsvd_ulp_word.get(),
                qn: layout.qn.get(),
                msn: layout.msn.get(),
                mo: layout.mo.get(),
            };
            Ok((Self::Untagged(header), payload))
        }
    }

    /// Writes the header to the front of `buffer`; returns the bytes written.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`].
    #[inline]
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        match self {
            Self::Tagged(header) => header.emit(buffer),
            Self::Untagged(header) => header.emit(buffer),
        }
    }

    /// Length of the header in bytes.
    #[inline]
    pub const fn buffer_len(&self) -> usize {
        match self {
            Self::Tagged(_) => TAGGED_LEN,
            Self::Untagged(_) => UNTAGGED_LEN,
        }
    }

    /// L: the message ends with this segment.
    #[inline]
    pub const fn last(&self) -> bool {
        match self {
            Self::Tagged(header) => header.last,
            Self::Untagged(header) => header.last,
        }
    }

    /// The first byte of RsvdULP: RDMAP's control byte.
    #[inline]
    pub const fn rsvd_ulp(&self) -> u8 {
        match self {
            Self::Tagged(header) => header.rsvd_ulp,
            Self::Untagged(header) => header.rsvd_ulp,
        }
    }
}

impl fmt::Display for TaggedHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stag 0x{:08x} to 0x{:x}", self.stag, self.to)?;
        f.write_str(if self.last { " last" } else { "" })
    }
}

impl fmt::Display for UntaggedHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qn {} msn {} mo {}", self.qn, self.msn, self.mo)?;
        f.write_str(if self.last { " last" } else { "" })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tagged(header) => header.fmt(f),
            Self::Untagged(header) => header.fmt(f),
        }
    }
}
