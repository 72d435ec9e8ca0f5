//! A packet: the base transport header (§9.2 of the InfiniBand Architecture Specification), the
//! datagram extended transport header (§9.3.3), immediate data (§9.3.7), payload, pad and ICRC.

use super::icrc::{Ends, ICRC_LEN, icrc};
use core::fmt;
use core::mem::offset_of;
use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The UDP port of RoCE v2. Queue pairs have ports of their own here; multicast groups have this
/// one.
pub const UDP_PORT: u16 = 4791;
/// Destination of packets to a multicast group.
pub const MULTICAST_QPN: u32 = 0xff_ffff;
/// The only P_Key of an Ethernet port.
pub const DEFAULT_PKEY: u16 = 0xffff;

const SEND_ONLY: u8 = 0x64;
const SEND_ONLY_WITH_IMMEDIATE: u8 = 0x65;
const SOLICITED: u8 = 0x80;
const PAD_SHIFT: u8 = 4;
const VERSION: u8 = 0x0f;
const QPN_MASK: u32 = 0xff_ffff;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    opcode: u8,
    /// Solicited event, migration, pad count, transport version.
    flags: u8,
    pkey: U16,
    /// 8 bits reserved, 24 bits destination.
    destination_qpn: U32,
    /// Acknowledge request, 7 bits reserved, 24 bits.
    psn: U32,
    qkey: U32,
    /// 8 bits reserved, 24 bits source.
    source_qpn: U32,
}

const LAYOUT_LEN: usize = size_of::<Layout>();
const IMMEDIATE_LEN: usize = 4;
const _: () = assert!(LAYOUT_LEN == 20);

/// Most bytes in front of the payload.
pub const MAX_HEADER_LEN: usize = LAYOUT_LEN + IMMEDIATE_LEN;
/// Most bytes beyond the payload: pad and ICRC.
pub const MAX_TRAILER_LEN: usize = 3 + ICRC_LEN;

/// The headers of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The receiver requests an event for the datagram.
    pub solicited: bool,
    /// The partition.
    pub pkey: u16,
    /// The queue pair that receives it, 24 bits, or [`MULTICAST_QPN`].
    pub destination_qpn: u32,
    /// Packet sequence number, 24 bits.
    pub psn: u32,
    /// The Q_Key, which must be that of the receiving queue pair.
    pub qkey: u32,
    /// The queue pair that sent it, 24 bits.
    pub source_qpn: u32,
    /// Immediate data, as the sender's program gave it.
    pub immediate: Option<[u8; IMMEDIATE_LEN]>,
}

/// Why a packet is not a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// The packet ends within its headers, or its pad is longer than its payload.
    #[error("the packet has {0} bytes, too few for its headers")]
    Length(usize),
    /// Another opcode than those of UD.
    #[error("opcode {0:#04x} is not one of UD")]
    Opcode(u8),
    /// Another transport version than 0.
    #[error("transport version {0} instead of 0")]
    Version(u8),
    /// The invariant CRC is wrong.
    #[error("the ICRC is wrong")]
    Icrc,
}

impl Header {
    /// Bytes of the headers.
    #[inline]
    pub fn buffer_len(&self) -> usize {
        LAYOUT_LEN + self.immediate.map_or(0, |immediate| immediate.len())
    }

    /// Writes the headers of a datagram with `payload_len` bytes of payload to the front of
    /// `buffer`; returns their length. The payload belongs right after, then comes [`seal`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`].
    pub fn emit(&self, buffer: &mut [u8], payload_len: usize) -> usize {
        let opcode = match self.immediate {
            None => SEND_ONLY,
            Some(_) => SEND_ONLY_WITH_IMMEDIATE,
        };
        let solicited = if self.solicited { SOLICITED } else { 0 };
        let layout = Layout {
            opcode,
            flags: solicited | (pad(payload_len) as u8) << PAD_SHIFT,
            pkey: self.pkey.into(),
            destination_qpn: (self.destination_qpn & QPN_MASK).into(),
            psn: (self.psn & QPN_MASK).into(),
            qkey: self.qkey.into(),
            source_qpn: (self.source_qpn & QPN_MASK).into(),
        };
        buffer[..LAYOUT_LEN].copy_from_slice(layout.as_bytes());
        if let Some(immediate) = self.immediate {
            buffer[LAYOUT_LEN..MAX_HEADER_LEN].copy_from_slice(&immediate);
        }
        self.buffer_len()
    }
}

/// Bytes that pad a payload to a multiple of four.
fn pad(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

/// Writes pad and ICRC after headers and payload, which are the first `len` bytes of `packet`;
/// returns the length of the packet.
///
/// # Panics
/// If `packet` is shorter than `len` and [`MAX_TRAILER_LEN`].
pub fn seal(packet: &mut [u8], len: usize, ends: &Ends) -> usize {
    // The headers' length is a multiple of four.
    let end = len + pad(len);
    packet[len..end].fill(0);
    let check = icrc(&packet[..end], ends);
    packet[end..end + ICRC_LEN].copy_from_slice(&check);
    end + ICRC_LEN
}

/// Parses a packet that was received from and at these addresses; returns its headers and payload.
///
/// # Errors
/// [`PacketError`], the first in the order of its variants.
pub fn parse<'p>(packet: &'p [u8], ends: &Ends) -> Result<(Header, &'p [u8]), PacketError> {
    let short = PacketError::Length(packet.len());
    let (layout, rest) = Layout::ref_from_prefix(packet).map_err(|_| short)?;
    let (rest, check) = rest.split_last_chunk::<ICRC_LEN>().ok_or(short)?;
    let (immediate, rest) = match layout.opcode {
        SEND_ONLY => (None, rest),
        SEND_ONLY_WITH_IMMEDIATE => {
            let (immediate, rest) = rest.split_first_chunk().ok_or(short)?;
            (Some(*immediate), rest)
        }
        other => return Err(PacketError::Opcode(other)),
    };
    let pad = usize::from(layout.flags >> PAD_SHIFT & 3);
    let payload_len = rest.len().checked_sub(pad).ok_or(short)?;
    let payload = rest.get(..payload_len).ok_or(short)?;
    if layout.flags & VERSION != 0 {
        return Err(PacketError::Version(layout.flags & VERSION));
    }
    if icrc(&packet[..packet.len() - ICRC_LEN], ends) != *check {
        return Err(PacketError::Icrc);
    }
    let header = Header {
        solicited: layout.flags & SOLICITED != 0,
        pkey: layout.pkey.get(),
        destination_qpn: layout.destination_qpn.get() & QPN_MASK,
        psn: layout.psn.get() & QPN_MASK,
        qkey: layout.qkey.get(),
        source_qpn: layout.source_qpn.get() & QPN_MASK,
        immediate,
    };
    Ok((header, payload))
}

/// The PSN of a packet of which perhaps only the beginning is left, as after an error of the
/// network. Nothing is checked.
pub fn psn_of(beginning: &[u8]) -> Option<u32> {
    let word = beginning.get(offset_of!(Layout, psn)..)?.first_chunk()?;
    Some(u32::from_be_bytes(*word) & QPN_MASK)
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "UD Send from qp 0x{:06x} to qp 0x{:06x}, psn {}, qkey 0x{:08x}",
            self.source_qpn, self.destination_qpn, self.psn, self.qkey
        )?;
        if let Some(immediate) = self.immediate {
            write!(f, ", immediate 0x{:08x}", u32::from_be_bytes(immediate))?;
        }
        if self.solicited {
            f.write_str(", solicited")?;
        }
        Ok(())
    }
}
