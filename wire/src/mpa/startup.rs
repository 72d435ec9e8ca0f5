//! The start-up frames: MPA Request and Reply of revisions 1 (RFC 5044 §7.1.1) and 2 (RFC 6581 §6,
//! §9), and the RTR frame that was proposed in 2007 and never standardised.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |            Key (16 bytes): "MPA ID Req Frame",               |
//! |            "MPA ID Rep Frame" or "MPA ID RtR Frame"           |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |M|C|R|S|  Res  |      Rev      |           PD_Length           |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |A|B|            IRD            |C|D|            ORD            |   if S and Rev ≥ 2
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                     Private Data of the ULP                   |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! A host reads [`HEADER_LEN`] bytes, parses a [`StartupHeader`], reads the number of bytes in
//! `private_data_len`, and passes both to [`StartupFrame::from_parts`]. It reads no byte after the
//! frame.

use core::fmt;
use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes before the private data.
pub const HEADER_LEN: usize = 20;

/// Bytes of the enhanced word (RFC 6581 §9).
pub const WORD_LEN: usize = 4;

/// Maximum PD_Length, the enhanced word included (RFC 5044 §7.1.1, RFC 6581 §9).
pub const MAX_PRIVATE_DATA: usize = 512;

/// Length in bytes of the longest frame.
pub const MAX_FRAME_LEN: usize = HEADER_LEN + MAX_PRIVATE_DATA;

/// Value of IRD or ORD: do not negotiate this value; the ULP determines it (RFC 6581 §9.1).
pub const NO_NEGOTIATION: u16 = 0x3fff;

/// Maximum IRD or ORD that can be negotiated.
pub const MAX_DEPTH: u16 = NO_NEGOTIATION - 1;

const KEY_LEN: usize = 16;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    key: [u8; KEY_LEN],
    flags: u8,
    revision: u8,
    pd_length: U16,
}

mod flag {
    pub(super) const M: u8 = 0x80;
    pub(super) const C: u8 = 0x40;
    pub(super) const R: u8 = 0x20;
    pub(super) const S: u8 = 0x10;
}

mod word {
    pub(super) const A: u32 = 0x8000_0000;
    pub(super) const B: u32 = 0x4000_0000;
    pub(super) const C: u32 = 0x0000_8000;
    pub(super) const D: u32 = 0x0000_4000;
    pub(super) const DEPTH: u32 = 0x3fff;
    pub(super) const IRD_SHIFT: u32 = 16;
}

/// A fault of a start-up frame. Each fault requires that the TCP connection is closed (RFC 5044
/// §7.1.2, error code 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartupError {
    /// The bytes end before the end of the frame.
    #[error("MPA start-up frame of {needed} bytes ends after {have}")]
    Truncated {
        /// The length of the frame in bytes; that of the header until it is known.
        needed: usize,
        /// Number of bytes present.
        have: usize,
    },
    /// The key is not one of the three.
    #[error("not an MPA start-up frame: key is \"{}\"", .0.escape_ascii())]
    Key([u8; KEY_LEN]),
    /// A valid frame of the wrong kind: two initiators, two responders, or another frame instead of
    /// an agreed RTR frame.
    #[error("MPA {found} frame where a {expected} frame was due")]
    Kind {
        /// Kind that the start-up rules require.
        expected: FrameKind,
        /// Kind of the received frame.
        found: FrameKind,
    },
    /// A revision that this end does not support.
    #[error("MPA revision {0} is not supported")]
    Revision(u8),
    /// PD_Length exceeds [`MAX_PRIVATE_DATA`].
    #[error("MPA private data of {0} bytes exceeds {MAX_PRIVATE_DATA}")]
    PrivateData(usize),
    /// S is set in a revision 2 frame, but PD_Length has no room for the enhanced word.
    #[error("enhanced MPA frame has {0} bytes of private data, too few for its IRD/ORD word")]
    NoWord(usize),
}

/// The two spellings of the RTR frame's key: the hexadecimal bytes and the text of the proposal
/// disagree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RtrKey {
    /// `RtR`, as in the proposal's bytes; sent by default.
    #[default]
    Hex,
    /// `Rtr`, as in the proposal's text.
    Text,
}

/// The kind of a start-up frame, which its key determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// Initiator to responder, first.
    Request,
    /// Responder to initiator: accept or reject.
    Reply,
    /// Initiator to responder after an accepting Reply, only where both set S in revision 1 frames.
    Rtr(RtrKey),
}

impl FrameKind {
    const fn key(self) -> &'static [u8; KEY_LEN] {
        match self {
            Self::Request => b"MPA ID Req Frame",
            Self::Reply => b"MPA ID Rep Frame",
            Self::Rtr(RtrKey::Hex) => b"MPA ID RtR Frame",
            Self::Rtr(RtrKey::Text) => b"MPA ID Rtr Frame",
        }
    }

    const ALL: [Self; 4] = [
        Self::Request,
        Self::Reply,
        Self::Rtr(RtrKey::Hex),
        Self::Rtr(RtrKey::Text),
    ];

    fn from_key(key: &[u8; KEY_LEN]) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.key() == key)
    }

    /// Whether `bytes`, the first of a stream, can be the beginning of a frame: its key is not
    /// complete, or it is one of the keys.
    pub fn may_begin(bytes: &[u8]) -> bool {
        let key = bytes.get(..KEY_LEN).unwrap_or(bytes);
        Self::ALL.iter().any(|kind| kind.key().starts_with(key))
    }

    /// Whether two kinds are equal, apart from the spelling of an RTR frame's key.
    fn is_like(self, other: Self) -> bool {
        matches!((self, other), (Self::Rtr(_), Self::Rtr(_))) || self == other
    }
}

impl fmt::Display for FrameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Request => "Request",
            Self::Reply => "Reply",
            Self::Rtr(_) => "RTR",
        })
    }
}

/// The flag byte. Reserved bits are sent as zero and ignored on receipt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StartupFlags {
    /// M: the sender of this frame requires markers in the stream that it receives.
    pub markers: bool,
    /// C: the sender requests CRCs; a request of one end binds both ends.
    pub crc: bool,
    /// R: in a Reply, the connection is rejected. It has no meaning in a Request.
    pub reject: bool,
    /// S: in revision 2, the enhanced word precedes the private data (RFC 6581 §6). In revision 1
    /// only the 2007 proposal defines S, as "RTR frame follows".
    pub enhanced: bool,
}

impl StartupFlags {
    const fn parse(byte: u8) -> Self {
        Self {
            markers: byte & flag::M != 0,
            crc: byte & flag::C != 0,
            reject: byte & flag::R != 0,
            enhanced: byte & flag::S != 0,
        }
    }

    const fn byte(self) -> u8 {
        (if self.markers { flag::M } else { 0 })
            | (if self.crc { flag::C } else { 0 })
            | (if self.reject { flag::R } else { 0 })
            | (if self.enhanced { flag::S } else { 0 })
    }
}

/// The first [`HEADER_LEN`] bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartupHeader {
    /// Kind of the frame.
    pub kind: FrameKind,
    /// Flags of the frame.
    pub flags: StartupFlags,
    /// Rev, as received; see [`Self::require`].
    pub revision: u8,
    /// PD_Length: number of bytes that follow, at most [`MAX_PRIVATE_DATA`].
    pub private_data_len: usize,
}

impl StartupHeader {
    /// Parses the fixed part of a frame.
    ///
    /// # Errors
    /// [`StartupError::Key`] if the key is unknown, [`StartupError::PrivateData`] if PD_Length
    /// exceeds [`MAX_PRIVATE_DATA`].
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Self, StartupError> {
        let layout: &Layout = zerocopy::transmute_ref!(bytes);
        let kind = FrameKind::from_key(&layout.key).ok_or(StartupError::Key(layout.key))?;
        let private_data_len = usize::from(layout.pd_length.get());
        if private_data_len > MAX_PRIVATE_DATA {
            return Err(StartupError::PrivateData(private_data_len));
        }
        Ok(Self {
            kind,
            flags: StartupFlags::parse(layout.flags),
            revision: layout.revision,
            private_data_len,
        })
    }

    /// Requires a frame of `kind` (with either spelling of an RTR key) whose revision is one of
    /// `revisions`.
    ///
    /// # Errors
    /// [`StartupError::Kind`] if the frame has another kind, [`StartupError::Revision`] if it has
    /// another revision.
    pub fn require(
        self,
        kind: FrameKind,
        revisions: core::ops::RangeInclusive<u8>,
    ) -> Result<Self, StartupError> {
        if !self.kind.is_like(kind) {
            return Err(StartupError::Kind {
                expected: kind,
                found: self.kind,
            });
        }
        if !revisions.contains(&self.revision) {
            return Err(StartupError::Revision(self.revision));
        }
        Ok(self)
    }

    /// Whether the private data begins with the enhanced word. S in a revision 1 frame is a
    /// reserved bit.
    pub const fn has_word(&self) -> bool {
        self.flags.enhanced && self.revision >= 2 && !matches!(self.kind, FrameKind::Rtr(_))
    }
}

/// The word at the start of the private data of an enhanced frame (RFC 6581 §9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EnhancedWord {
    /// A: peer-to-peer, the initiator sends an RTR message first. If false, the RTR bits have no
    /// meaning.
    pub peer_to_peer: bool,
    /// B: a zero-length Send may be the RTR.
    pub rtr_send: bool,
    /// C: a zero-length RDMA Write may be the RTR.
    pub rtr_write: bool,
    /// D: a zero-length RDMA Read may be the RTR.
    pub rtr_read: bool,
    /// Inbound RDMA Reads that the sender of the frame can hold, or [`NO_NEGOTIATION`].
    pub ird: u16,
    /// Outbound RDMA Reads that the sender of the frame requests, or [`NO_NEGOTIATION`].
    pub ord: u16,
}

impl EnhancedWord {
    /// Parses the word.
    pub fn parse(bytes: [u8; WORD_LEN]) -> Self {
        let bits = u32::from_be_bytes(bytes);
        Self {
            peer_to_peer: bits & word::A != 0,
            rtr_send: bits & word::B != 0,
            rtr_write: bits & word::C != 0,
            rtr_read: bits & word::D != 0,
            ird: (bits >> word::IRD_SHIFT & word::DEPTH) as u16,
            ord: (bits & word::DEPTH) as u16,
        }
    }

    /// The bytes of the word. An IRD or ORD that does not fit 14 bits is sent as [`MAX_DEPTH`].
    pub fn to_bytes(self) -> [u8; WORD_LEN] {
        let depth = |n: u16| u32::from(if n > NO_NEGOTIATION { MAX_DEPTH } else { n });
        let bit = |set, mask| if set { mask } else { 0 };
        let bits = bit(self.peer_to_peer, word::A)
            | bit(self.rtr_send, word::B)
            | bit(self.rtr_write, word::C)
            | bit(self.rtr_read, word::D)
            | depth(self.ird) << word::IRD_SHIFT
            | depth(self.ord);
        U32::new(bits).to_bytes()
    }
}

impl fmt::Display for EnhancedWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.peer_to_peer { "p2p" } else { "client/server" })?;
        for (name, depth) in [("ird", self.ird), ("ord", self.ord)] {
            match depth {
                NO_NEGOTIATION => write!(f, " {name} any")?,
                depth => write!(f, " {name} {depth}")?,
            }
        }
        let rtr = [
            (self.rtr_send, "send"),
            (self.rtr_write, "write"),
            (self.rtr_read, "read"),
        ];
        let mut separator = " rtr ";
        for (_, name) in rtr.iter().filter(|(set, _)| *set) {
            write!(f, "{separator}{name}")?;
            separator = "|";
        }
        Ok(())
    }
}

/// A whole start-up frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartupFrame<'a> {
    /// Kind of the frame.
    pub kind: FrameKind,
    /// Flags of the frame. [`Self::emit`] sets S if there is a word.
    pub flags: StartupFlags,
    /// Rev.
    pub revision: u8,
    /// The IRD/ORD word of an enhanced frame.
    pub word: Option<EnhancedWord>,
    /// The private data of the ULP, without the word.
    pub private_data: &'a [u8],
}

impl<'a> StartupFrame<'a> {
    /// Joins a header and the `private_data_len` bytes that followed it.
    ///
    /// # Errors
    /// [`StartupError::Truncated`] if the number of bytes differs from the header's PD_Length;
    /// [`StartupError::NoWord`] if S is set in a revision 2 frame and the bytes have no room for
    /// the enhanced word.
    pub fn from_parts(header: StartupHeader, private_data: &'a [u8]) -> Result<Self, StartupError> {
        let StartupHeader {
            kind,
            flags,
            revision,
            private_data_len,
        } = header;
        if private_data.len() != private_data_len {
            let (needed, have) = (HEADER_LEN + private_data_len, HEADER_LEN + private_data.len());
            return Err(StartupError::Truncated { needed, have });
        }
        let (word, private_data) = if header.has_word() {
            let (word, ulp) = private_data
                .split_first_chunk()
                .ok_or(StartupError::NoWord(private_data_len))?;
            (Some(EnhancedWord::parse(*word)), ulp)
        } else {
            (None, private_data)
        };
        Ok(Self {
            kind,
            flags,
            revision,
            word,
            private_data,
        })
    }

    /// Parses the frame at the front of `bytes`; returns it and the bytes after it.
    ///
    /// # Errors
    /// Any [`StartupError`] except `Kind` and `Revision`.
    pub fn parse(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), StartupError> {
        let have = bytes.len();
        let too_short = |needed| StartupError::Truncated { needed, have };
        let (header, rest) = bytes.split_first_chunk().ok_or(too_short(HEADER_LEN))?;
        let header = StartupHeader::parse(header)?;
        let (private_data, rest) = rest
            .split_at_checked(header.private_data_len)
            .ok_or(too_short(HEADER_LEN + header.private_data_len))?;
        Ok((Self::from_parts(header, private_data)?, rest))
    }

    /// Length of the frame in bytes.
    pub const fn buffer_len(&self) -> usize {
        HEADER_LEN + self.private_data_len()
    }

    /// The PD_Length of the frame.
    const fn private_data_len(&self) -> usize {
        self.private_data.len() + if self.word.is_some() { WORD_LEN } else { 0 }
    }

    /// Writes the frame to the front of `buffer`; returns the bytes written.
    ///
    /// # Errors
    /// [`StartupError::PrivateData`] if word and private data exceed [`MAX_PRIVATE_DATA`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`]; [`MAX_FRAME_LEN`] bytes are always enough.
    pub fn emit(&self, buffer: &mut [u8]) -> Result<usize, StartupError> {
        let pd_length = self.private_data_len();
        if pd_length > MAX_PRIVATE_DATA {
            return Err(StartupError::PrivateData(pd_length));
        }
        let flags = StartupFlags {
            enhanced: self.flags.enhanced || self.word.is_some(),
            ..self.flags
        };
        let layout = Layout {
            key: *self.kind.key(),
            flags: flags.byte(),
            revision: self.revision,
            pd_length: U16::new(pd_length as u16),
        };
        let (header, rest) = buffer[..self.buffer_len()].split_at_mut(HEADER_LEN);
        header.copy_from_slice(layout.as_bytes());
        let (word, ulp) = rest.split_at_mut(pd_length - self.private_data.len());
        if let Some(value) = self.word {
            word.copy_from_slice(&value.to_bytes());
        }
        ulp.copy_from_slice(self.private_data);
        Ok(self.buffer_len())
    }
}

impl fmt::Display for StartupFrame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MPA {} rev {} flags [", self.kind, self.revision)?;
        let StartupFlags {
            markers,
            crc,
            reject,
            enhanced,
        } = self.flags;
        for (set, name) in [(markers, "M"), (crc, "C"), (reject, "R"), (enhanced, "S")] {
            f.write_str(if set { name } else { "" })?;
        }
        f.write_str("]")?;
        if let Some(word) = self.word {
            write!(f, " {word}")?;
        }
        write!(f, " private data {}", self.private_data.len())
    }
}
