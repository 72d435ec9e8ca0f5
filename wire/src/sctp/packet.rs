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
    /// INIT.
    pub const INIT: u8 = 1;
    /// INIT ACK.
    pub const INIT_ACK: u8 = 2;
    /// ABORT.
    pub const ABORT: u8 = 6;
    /// COOKIE ECHO.
    pub const COOKIE_ECHO: u8 = 10;
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
    /// The first chunk is longer than the packet, or shorter than its header.
    #[error("the first chunk of an SCTP packet has length {0}")]
    ChunkLength(usize),
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
}

impl<'a> Packet<'a> {
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
        let &[chunk_type, _, l0, l1] = rest.first_chunk().ok_or(truncated)?;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        let value = rest
            .get(CHUNK_HEADER_LEN..len)
            .ok_or(PacketError::ChunkLength(len))?;
        Ok(Self {
            source: u16::from_be_bytes([s0, s1]),
            destination: u16::from_be_bytes([d0, d1]),
            tag: u32::from_be_bytes([t0, t1, t2, t3]),
            chunk_type,
            value,
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
