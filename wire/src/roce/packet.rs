//! A packet: the base transport header (§9.2 of the InfiniBand Architecture Specification),
//! extended transport headers (§9.3), payload, pad and ICRC.

use super::body::Body;
use super::error::PacketError;
use super::icrc::{Ends, ICRC_LEN, icrc};
use super::identification;
use super::opcode::{Extended, Opcode};
use super::psn::Psn;
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

mod flags {
    pub(super) const SOLICITED: u8 = 0x80;
    pub(super) const MIGRATED: u8 = 0x40;
    pub(super) const PAD_SHIFT: u8 = 4;
    pub(super) const PAD: u8 = 3;
    pub(super) const VERSION: u8 = 0x0f;
}
const FECN: u32 = 1 << 31;
const BECN: u32 = 1 << 30;
const ACK_REQUEST: u32 = 1 << 31;
const QPN_MASK: u32 = 0xff_ffff;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    opcode: u8,
    /// Solicited event, migration, pad count, transport version.
    flags: u8,
    pkey: U16,
    /// FECN, BECN, 6 bits reserved, 24 bits destination.
    destination_qpn: U32,
    /// Acknowledge request, 7 bits reserved, 24 bits.
    psn: U32,
}

const LAYOUT_LEN: usize = size_of::<Layout>();
const _: () = assert!(LAYOUT_LEN == 12);

/// Most bytes in front of the payload: those of an atomic operation.
pub const MAX_HEADER_LEN: usize = LAYOUT_LEN + Extended::ATOMIC_ETH.buffer_len();
/// Most bytes beyond the payload: pad and ICRC.
pub const MAX_TRAILER_LEN: usize = 3 + ICRC_LEN;

/// The headers of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// SE: the receiver requests an event for the message.
    pub solicited: bool,
    /// M, the migration state. Without automatic path migration it has no meaning.
    pub migrated: bool,
    /// The partition.
    pub pkey: u16,
    /// FECN: a switch on the way had a full queue. The ICRC does not cover this bit.
    pub fecn: bool,
    /// BECN: a packet of the other direction had FECN. The ICRC does not cover this bit.
    pub becn: bool,
    /// The queue pair that receives it, 24 bits, or [`MULTICAST_QPN`].
    pub destination_qpn: u32,
    /// A: the responder shall acknowledge the packet.
    pub ack_request: bool,
    /// Packet sequence number.
    pub psn: Psn,
    /// The opcode and the extended headers.
    pub body: Body,
}

impl Header {
    /// A header with the default P_Key and all flags clear.
    pub const fn new(destination_qpn: u32, psn: Psn, body: Body) -> Self {
        Self {
            solicited: false,
            migrated: false,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            destination_qpn,
            ack_request: false,
            psn,
            body,
        }
    }

    /// Bytes of the headers.
    #[inline]
    pub fn buffer_len(&self) -> usize {
        LAYOUT_LEN + self.body.opcode().extended().buffer_len()
    }

    /// Writes the headers of a packet with `payload_len` bytes of payload to the front of `buffer`;
    /// returns their length. The payload belongs right after, then comes [`seal`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`].
    pub fn emit(&self, buffer: &mut [u8], payload_len: usize) -> usize {
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let flags =
            flag(self.solicited, flags::SOLICITED.into()) | flag(self.migrated, flags::MIGRATED.into());
        let congestion = flag(self.fecn, FECN) | flag(self.becn, BECN);
        let layout = Layout {
            opcode: self.body.opcode().value(),
            flags: flags as u8 | (pad(payload_len) as u8) << flags::PAD_SHIFT,
            pkey: self.pkey.into(),
            destination_qpn: (congestion | self.destination_qpn & QPN_MASK).into(),
            psn: (flag(self.ack_request, ACK_REQUEST) | self.psn.number()).into(),
        };
        let len = self.buffer_len();
        let (base, extended) = buffer[..len].split_at_mut(LAYOUT_LEN);
        base.copy_from_slice(layout.as_bytes());
        self.body.emit(extended);
        len
    }
}

/// Bytes that pad a payload to a multiple of four.
fn pad(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

/// The length of a packet with so many bytes of headers and payload: that of pad and ICRC is added.
pub const fn sealed_len(len: usize) -> usize {
    // The headers' length is a multiple of four.
    len.next_multiple_of(4) + ICRC_LEN
}

/// Writes pad and ICRC after headers and payload, which are the first `len` bytes of `packet`;
/// returns the length of the packet. Its IPv4 identification is 0.
///
/// # Panics
/// If `packet` is shorter than [`sealed_len`] of `len`.
pub fn seal(packet: &mut [u8], len: usize, ends: &Ends) -> usize {
    seal_numbered(packet, len, ends, 0)
}

/// Completes a packet as [`seal`] does, of this IPv4 identification, which has no meaning with
/// IPv6.
///
/// # Panics
/// As [`seal`].
pub fn seal_numbered(packet: &mut [u8], len: usize, ends: &Ends, identification: u16) -> usize {
    let sealed = sealed_len(len);
    let end = sealed - ICRC_LEN;
    packet[len..end].fill(0);
    let check = icrc(&packet[..end], ends, identification);
    packet[end..sealed].copy_from_slice(&check);
    sealed
}

/// Parses a packet that was received from and at these addresses; returns its headers and payload.
/// Reserved bits have no meaning on receipt. The IPv4 identification of the packet is 0.
///
/// # Errors
/// [`PacketError`]: the first one in the packet, and [`PacketError::Icrc`] only without another.
pub fn parse<'p>(packet: &'p [u8], ends: &Ends) -> Result<(Header, &'p [u8]), PacketError> {
    checked(packet, ends, |_, difference| difference == [0; ICRC_LEN])
}

/// Parses a packet as [`parse`] does, of a peer whose packets may have any IPv4 identification: the
/// ICRC detects fewer errors then.
///
/// # Errors
/// As [`parse`].
pub fn parse_numbered<'p>(packet: &'p [u8], ends: &Ends) -> Result<(Header, &'p [u8]), PacketError> {
    let is_v4 = ends.source.ip().to_canonical().is_ipv4();
    checked(packet, ends, |covered, difference| {
        difference == [0; ICRC_LEN] || is_v4 && identification::explains(difference, covered)
    })
}

/// Parses a packet; `is_right` decides by the number of bytes before the ICRC, and by the bits in
/// which the ICRC differs from the computed one.
fn checked<'p>(
    packet: &'p [u8],
    ends: &Ends,
    is_right: impl Fn(usize, [u8; ICRC_LEN]) -> bool,
) -> Result<(Header, &'p [u8]), PacketError> {
    let short = PacketError::Length(packet.len());
    let (layout, rest) = Layout::ref_from_prefix(packet).map_err(|_| short)?;
    let (mut rest, check) = rest.split_last_chunk::<ICRC_LEN>().ok_or(short)?;
    let opcode = Opcode::new(layout.opcode).ok_or(PacketError::Opcode(layout.opcode))?;
    let body = Body::parse(opcode, &mut rest, packet.len())?;
    let pad = usize::from(layout.flags >> flags::PAD_SHIFT & flags::PAD);
    let payload_len = rest.len().checked_sub(pad).ok_or(short)?;
    let payload = rest.get(..payload_len).ok_or(short)?;
    if !packet.len().is_multiple_of(4) || !(opcode.has_payload() || rest.is_empty()) {
        return Err(short);
    }
    if layout.flags & flags::VERSION != 0 {
        return Err(PacketError::Version(layout.flags & flags::VERSION));
    }
    let covered = packet.len() - ICRC_LEN;
    let computed = u32::from_ne_bytes(icrc(&packet[..covered], ends, 0));
    let difference = (computed ^ u32::from_ne_bytes(*check)).to_ne_bytes();
    if !is_right(covered, difference) {
        return Err(PacketError::Icrc);
    }
    let (destination_qpn, psn) = (layout.destination_qpn.get(), layout.psn.get());
    let header = Header {
        solicited: layout.flags & flags::SOLICITED != 0,
        migrated: layout.flags & flags::MIGRATED != 0,
        pkey: layout.pkey.get(),
        fecn: destination_qpn & FECN != 0,
        becn: destination_qpn & BECN != 0,
        destination_qpn: destination_qpn & QPN_MASK,
        ack_request: psn & ACK_REQUEST != 0,
        psn: Psn::new(psn),
        body,
    };
    Ok((header, payload))
}

/// The PSN of a packet of which perhaps only the beginning is left, as after an error of the
/// network. Nothing is checked.
pub fn psn_of(beginning: &[u8]) -> Option<Psn> {
    let word = beginning.get(offset_of!(Layout, psn)..)?.first_chunk()?;
    Some(Psn::new(u32::from_be_bytes(*word)))
}

/// The queue pair to which a packet goes, 24 bits. Nothing is checked.
pub fn destination_of(packet: &[u8]) -> Option<u32> {
    let word = packet.get(offset_of!(Layout, destination_qpn)..)?.first_chunk()?;
    Some(u32::from_be_bytes(*word) & QPN_MASK)
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} to qp 0x{:06x}, psn {}{}",
            self.body.opcode(),
            self.destination_qpn,
            self.psn,
            self.body
        )?;
        for (set, name) in [
            (self.ack_request, "ack requested"),
            (self.solicited, "solicited"),
            (self.fecn, "FECN"),
            (self.becn, "BECN"),
        ] {
            if set {
                write!(f, ", {name}")?;
            }
        }
        Ok(())
    }
}
