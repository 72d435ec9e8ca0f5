//! The parts of SCTP packets (RFC 9260 §3) that must be seen before an association has them: the
//! common header, the first chunk, and the parameters of INIT and INIT ACK.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |          Source Port          |        Destination Port       |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                        Verification Tag                       |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                           CRC32C                              |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |   Chunk Type  |  Chunk Flags  |          Chunk Length         |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |     INIT, INIT ACK: Initiate Tag, window, streams, TSN        |
//! |     (16 bytes), then parameters                               |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use crate::crc::crc32c_of;

/// Bytes of the common header.
pub const HEADER_LEN: usize = 12;
/// Bytes of a chunk's type, flags and length, and of a parameter's type and length.
pub const CHUNK_HEADER_LEN: usize = 4;
/// Bytes of an INIT or INIT ACK before its parameters, without the chunk's header.
pub const INIT_LEN: usize = 16;
/// Where the checksum is.
const CHECKSUM: core::ops::Range<usize> = 8..12;

/// Types of chunks (RFC 9260 §3.2).
pub mod chunk_type {
    /// DATA.
    pub const DATA: u8 = 0;
    /// INIT.
    pub const INIT: u8 = 1;
    /// INIT ACK.
    pub const INIT_ACK: u8 = 2;
    /// ABORT.
    pub const ABORT: u8 = 6;
    /// SHUTDOWN.
    pub const SHUTDOWN: u8 = 7;
    /// SHUTDOWN ACK.
    pub const SHUTDOWN_ACK: u8 = 8;
    /// COOKIE ECHO.
    pub const COOKIE_ECHO: u8 = 10;
    /// SHUTDOWN COMPLETE.
    pub const SHUTDOWN_COMPLETE: u8 = 14;
}

/// The type of the State Cookie parameter (RFC 9260 §3.3.3.1).
pub const STATE_COOKIE: u16 = 7;

/// A packet that is no SCTP packet. It is dropped (RFC 9260 §6.8, §8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Shorter than a common header and a chunk's header.
    #[error("an SCTP packet of {0} bytes has no chunk")]
    Truncated(usize),
    /// The checksum is wrong.
    #[error("the checksum of an SCTP packet is 0x{found:08x}, computed 0x{computed:08x}")]
    Checksum {
        /// Computed from the bytes.
        computed: u32,
        /// In the packet.
        found: u32,
    },
    /// A chunk is longer than the rest of the packet, or shorter than its header.
    #[error("a chunk of an SCTP packet has length {0}")]
    ChunkLength(usize),
}

/// A chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// Its type.
    pub kind: u8,
    /// Its flags.
    pub flags: u8,
    /// Its value, without the padding.
    pub value: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// Parses the chunk at the front of `bytes`; returns it and the bytes after it.
    fn split(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), PacketError> {
        let truncated = PacketError::Truncated(bytes.len());
        let &[kind, flags, l0, l1] = bytes.first_chunk().ok_or(truncated)?;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        let value = bytes
            .get(CHUNK_HEADER_LEN..len)
            .ok_or(PacketError::ChunkLength(len))?;
        // The last chunk may lack its padding.
        let rest = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Ok((Self { kind, flags, value }, rest))
    }

    /// What a DATA chunk says of its message; `None` for another chunk, or one that is too short.
    pub fn data(&self) -> Option<Data> {
        let &[_, _, _, _, s0, s1, _, _, p0, p1, p2, p3, ..] = self.value.first_chunk::<12>()?;
        (self.kind == chunk_type::DATA).then_some(Data {
            stream: u16::from_be_bytes([s0, s1]),
            ppid: u32::from_be_bytes([p0, p1, p2, p3]),
            unordered: self.flags & UNORDERED != 0,
            whole: self.flags & WHOLE == WHOLE,
        })
    }
}

/// The U flag of a DATA chunk.
const UNORDERED: u8 = 4;
/// The B and E flags of a DATA chunk: it has the first and the last byte of its message.
const WHOLE: u8 = 3;

/// What a DATA chunk says of its message (RFC 9260 §3.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// The Stream Identifier.
    pub stream: u16,
    /// The Payload Protocol Identifier.
    pub ppid: u32,
    /// The message may be delivered before earlier ones.
    pub unordered: bool,
    /// The message is not fragmented.
    pub whole: bool,
}

/// The beginning of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The sender's SCTP port.
    pub source: u16,
    /// The receiver's SCTP port.
    pub destination: u16,
    /// The Verification Tag; 0 in a packet with an INIT.
    pub tag: u32,
    /// The type of the first chunk.
    pub chunk_type: u8,
    /// The value of the first chunk, without its padding.
    pub value: &'a [u8],
    /// All chunks.
    chunks: &'a [u8],
}

impl<'a> Packet<'a> {
    /// The Verification Tag of a packet of which perhaps only the beginning is there.
    pub fn tag_of(packet: &[u8]) -> Option<u32> {
        let tag = packet.get(4..)?.first_chunk()?;
        Some(u32::from_be_bytes(*tag))
    }

    /// Parses the common header and the first chunk, and checks the checksum of the whole.
    ///
    /// # Errors
    /// Any [`PacketError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let truncated = PacketError::Truncated(bytes.len());
        let (header, rest) = bytes.split_first_chunk::<HEADER_LEN>().ok_or(truncated)?;
        let [s0, s1, d0, d1, t0, t1, t2, t3, c0, c1, c2, c3] = *header;
        let (computed, found) = (checksum(bytes), u32::from_le_bytes([c0, c1, c2, c3]));
        if computed != found {
            return Err(PacketError::Checksum { computed, found });
        }
        let (first, _) = Chunk::split(rest).map_err(|error| match error {
            PacketError::Truncated(_) => truncated,
            other => other,
        })?;
        Ok(Self {
            source: u16::from_be_bytes([s0, s1]),
            destination: u16::from_be_bytes([d0, d1]),
            tag: u32::from_be_bytes([t0, t1, t2, t3]),
            chunk_type: first.kind,
            value: first.value,
            chunks: rest,
        })
    }

    /// All chunks, up to one that does not fit.
    pub fn chunks(&self) -> impl Iterator<Item = Result<Chunk<'a>, PacketError>> {
        let mut rest = self.chunks;
        core::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let split = Chunk::split(rest);
            rest = split.map_or(&[], |(_, after)| after);
            Some(split.map(|(chunk, _)| chunk))
        })
    }

    /// The Initiate Tag and the parameters of an INIT or INIT ACK; `None` for another chunk, or one
    /// that is too short.
    pub fn init(&self) -> Option<(u32, &'a [u8])> {
        let is_init = matches!(self.chunk_type, chunk_type::INIT | chunk_type::INIT_ACK);
        let (fixed, parameters) = self.value.split_first_chunk::<INIT_LEN>()?;
        let tag = fixed.first_chunk()?;
        is_init.then_some((u32::from_be_bytes(*tag), parameters))
    }
}

/// The parameters in these bytes, each with its type and its value. A parameter that does not fit
/// ends them.
pub fn parameters(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    core::iter::from_fn(move || {
        let &[t0, t1, l0, l1] = bytes.first_chunk()?;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        let value = bytes.get(CHUNK_HEADER_LEN..len)?;
        // Parameters are padded to four bytes; the last one may lack its padding.
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_be_bytes([t0, t1]), value))
    })
}

/// Writes the checksum of a packet whose other bytes are complete. Does nothing to bytes that are
/// shorter than a common header.
pub fn seal(packet: &mut [u8]) {
    let sum = checksum(packet);
    if let Some(place) = packet.get_mut(CHECKSUM) {
        place.copy_from_slice(&sum.to_le_bytes());
    }
}

/// The CRC32C of a packet with zeros in place of its checksum (RFC 9260 §6.8, appendix A).
fn checksum(packet: &[u8]) -> u32 {
    let (Some(before), Some(after)) = (packet.get(..CHECKSUM.start), packet.get(CHECKSUM.end..)) else {
        return 0;
    };
    crc32c_of(&[before, &[0; 4], after])
}
