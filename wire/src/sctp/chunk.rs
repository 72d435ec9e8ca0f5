//! The DDP Stream Sequence Number (RFC 5043 §5.2.1), which precedes all user data, and the Payload
//! Protocol Identifiers (§5.2).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |            DDP-SSN            |  DDP Segment, or the Function |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+  Code and its Private Data    |
//! |                              ...                              |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use core::fmt;

/// Bytes of the DDP-SSN.
pub const SSN_LEN: usize = 2;

/// Most chunks of one stream that may be on their way at once, so that the DDP-SSN tells their
/// order (RFC 5043 §10).
pub const MAX_IN_FLIGHT: u16 = 0x7fff;

/// The shortest maximum of a DDP Segment that a lower layer may report: a session control message
/// with 512 bytes of private data must fit (RFC 5043 §9).
pub const MIN_MULPDU: u16 = 516;

/// The contents of a DATA chunk, by its Payload Protocol Identifier (RFC 5043 §5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// A DDP Segment Chunk.
    Segment,
    /// A DDP Stream Session Control message.
    SessionControl,
}

impl Contents {
    /// The contents with this identifier. `None`: a DDP stream does not have such chunks.
    pub const fn of(ppid: u32) -> Option<Self> {
        match ppid {
            16 => Some(Self::Segment),
            17 => Some(Self::SessionControl),
            _ => None,
        }
    }

    /// The Payload Protocol Identifier.
    pub const fn ppid(self) -> u32 {
        match self {
            Self::Segment => 16,
            Self::SessionControl => 17,
        }
    }
}

/// A DDP-SSN: the number of a chunk in the order in which its sender submitted them. The first of a
/// session is 0 (RFC 5043 §6.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ssn(pub u16);

impl Ssn {
    /// Takes the DDP-SSN off the user data of a chunk. `None`: the data is shorter.
    pub fn split(data: &[u8]) -> Option<(Self, &[u8])> {
        let (number, rest) = data.split_first_chunk()?;
        Some((Self(u16::from_be_bytes(*number)), rest))
    }

    /// The bytes of the number.
    pub const fn to_bytes(self) -> [u8; SSN_LEN] {
        self.0.to_be_bytes()
    }

    /// The number after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// How many chunks come after that of `self` up to that of `later`; `None` if `later` is the
    /// earlier one. Right for chunks of which fewer than [`MAX_IN_FLIGHT`] are on their way.
    pub const fn until(self, later: Self) -> Option<u16> {
        let distance = later.0.wrapping_sub(self.0);
        if distance <= MAX_IN_FLIGHT {
            Some(distance)
        } else {
            None
        }
    }
}

impl fmt::Display for Ssn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ssn {}", self.0)
    }
}
