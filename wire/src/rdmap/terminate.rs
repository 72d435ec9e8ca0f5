//! The Terminate header (RFC 5040 §4.8).
//!
//! ```text
//! Layer(4)|EType(4)  Error Code(8)  M|D|R|Reserved(13)
//! DDP Segment Length (16)           if M or D
//! Terminated DDP Header (14 | 18)   if D
//! Terminated RDMA Header (28)       if R
//! ```

use super::{HeaderError, Opcode, ReadRequest, TerminateError};
use crate::ddp;
use core::fmt;

/// Octets of the Terminate Control field and its reserved bits.
const CONTROL_LEN: usize = 4;
/// Octets of the DDP Segment Length.
const LENGTH_LEN: usize = 2;

/// HdrCt: which of the three parts follow.
mod hdrct {
    pub(super) const M: u8 = 0x80;
    pub(super) const D: u8 = 0x40;
    pub(super) const R: u8 = 0x20;
    pub(super) const ALL: u8 = M | D | R;
}

/// The payload of a Terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminate<'a> {
    /// Layer, 4 bits: 0 RDMAP, 1 DDP, 2 LLP.
    pub layer: u8,
    /// Error type, 4 bits.
    pub etype: u8,
    /// Error code.
    pub code: u8,
    /// M: length of the DDP segment at fault, header and payload (ULPDU_Length, over MPA).
    pub segment_length: Option<u16>,
    /// D: its DDP header as it came, 14 or 18 octets by its T bit.
    pub ddp_header: Option<&'a [u8]>,
    /// R: the Read Request at fault, its offsets advanced by what was answered already.
    pub read_request: Option<ReadRequest>,
}

impl<'a> Terminate<'a> {
    /// Octets of the longest Terminate header.
    pub const MAX_LEN: usize = CONTROL_LEN + LENGTH_LEN + ddp::UNTAGGED_LEN + ReadRequest::LEN;

    /// A Terminate without headers: for the LLP's errors, RDMAP's local ones and those in creating a message
    /// (RFC 5040 §7.1, figure 10).
    pub const fn new(error: TerminateError) -> Self {
        Self {
            layer: error.layer(),
            etype: error.etype(),
            code: error.code(),
            segment_length: None,
            ddp_header: None,
            read_request: None,
        }
    }

    /// A Terminate for an error in the inbound DDP segment `ulpdu`: with its length and DDP header (if it is long
    /// enough to have one) and, where a remote protection error is in a Read Request, that.
    pub fn for_segment(error: TerminateError, ulpdu: &'a [u8], read_request: Option<ReadRequest>) -> Self {
        let header_len = ulpdu
            .first()
            .map_or(usize::MAX, |&control| ddp::header_len(control));
        Self {
            segment_length: u16::try_from(ulpdu.len()).ok(),
            ddp_header: ulpdu.get(..header_len),
            read_request,
            ..Self::new(error)
        }
    }

    /// The reason, if any RFC has these three numbers.
    pub fn error(&self) -> Option<TerminateError> {
        TerminateError::from_codes(self.layer, self.etype, self.code)
    }

    /// Parses the payload of a Terminate, with patience: it is the last the peer says, and some say it oddly.
    ///
    /// * LLP errors under error type 3, as Chelsio's and Intel's hardware sends them, become error type 0.
    /// * The octets of soft-iWARP on little-endian machines, which swaps the nibbles of the first and has M, D, R in
    ///   the low bits of the third, are put right where they can be told: those low bits are set and HdrCt is not, or
    ///   only the swapped numbers have a meaning.
    /// * Parts that are announced but cut off are left out.
    ///
    /// # Errors
    /// [`HeaderError::Length`] where not even the control field is complete.
    pub fn parse(payload: &'a [u8]) -> Result<Self, HeaderError> {
        let Some((control, rest)) = payload.split_first_chunk::<CONTROL_LEN>() else {
            return Err(HeaderError::Length {
                opcode: Opcode::Terminate,
                expected: CONTROL_LEN,
                found: payload.len(),
            });
        };
        let [first, code, third, _] = *control;
        let known = |octet: u8| TerminateError::from_codes(octet >> 4, octet & 0xf, code).is_some();
        let swapped = first.rotate_left(4);
        let low = third & 0x07;
        let (first, present) = match first {
            0x23 => (0x20, third & hdrct::ALL),
            _ if third & hdrct::ALL == 0 && low != 0 => (swapped, low.reverse_bits()),
            _ if !known(first) && known(swapped) => (swapped, third & hdrct::ALL),
            _ => (first, third & hdrct::ALL),
        };

        let (segment_length, rest) = match rest.split_first_chunk::<LENGTH_LEN>() {
            Some((length, rest)) if present & (hdrct::M | hdrct::D) != 0 => (
                (present & hdrct::M != 0).then_some(u16::from_be_bytes(*length)),
                rest,
            ),
            _ => (None, rest),
        };
        let header_len = rest.first().map_or(0, |&control| ddp::header_len(control));
        let (ddp_header, rest) = match rest.split_at_checked(header_len) {
            Some((header, rest)) if present & hdrct::D != 0 && header_len > 0 => (Some(header), rest),
            _ => (None, rest),
        };
        let read_request = match rest.first_chunk::<{ ReadRequest::LEN }>() {
            Some(header) if present & hdrct::R != 0 => ReadRequest::parse(header).ok(),
            _ => None,
        };
        Ok(Self {
            layer: first >> 4,
            etype: first & 0xf,
            code,
            segment_length,
            ddp_header,
            read_request,
        })
    }

    /// As [`Self::parse`], for an end that has not sent one FPDU yet: nothing it did can be an RDMAP error, so the
    /// codes that RFC 6581 gives to start-up mean that also with the nibbles swapped.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn parse_at_startup(payload: &'a [u8]) -> Result<Self, HeaderError> {
        let terminate = Self::parse(payload)?;
        let swapped = TerminateError::from_codes(terminate.etype, terminate.layer, terminate.code);
        Ok(match swapped {
            Some(
                TerminateError::MpaLocalCatastrophic
                | TerminateError::MpaInsufficientIrd
                | TerminateError::MpaNoMatchingRtr,
            ) => Self {
                layer: terminate.etype,
                etype: terminate.layer,
                ..terminate
            },
            _ => terminate,
        })
    }

    /// Octets the Terminate takes.
    pub fn buffer_len(&self) -> usize {
        let length = self.segment_length.is_some() || self.ddp_header.is_some();
        CONTROL_LEN
            + if length { LENGTH_LEN } else { 0 }
            + self.ddp_header.map_or(0, <[u8]>::len)
            + self.read_request.map_or(0, |_| ReadRequest::LEN)
    }

    /// Writes the Terminate to the front of `buffer`; returns the octets written.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`].
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let bit = |set, mask| if set { mask } else { 0 };
        let present = bit(self.segment_length.is_some(), hdrct::M)
            | bit(self.ddp_header.is_some(), hdrct::D)
            | bit(self.read_request.is_some(), hdrct::R);
        buffer[..CONTROL_LEN].copy_from_slice(&[self.layer << 4 | self.etype & 0xf, self.code, present, 0]);
        let mut at = CONTROL_LEN;
        if present & (hdrct::M | hdrct::D) != 0 {
            let length = self.segment_length.unwrap_or_default();
            buffer[at..at + LENGTH_LEN].copy_from_slice(&length.to_be_bytes());
            at += LENGTH_LEN;
        }
        if let Some(header) = self.ddp_header {
            buffer[at..at + header.len()].copy_from_slice(header);
            at += header.len();
        }
        if let Some(request) = &self.read_request {
            at += request.emit(&mut buffer[at..]);
        }
        at
    }
}

impl fmt::Display for Terminate<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{:02x}", self.layer, self.etype, self.code)?;
        match self.error() {
            Some(error) => write!(f, " {error}")?,
            None => f.write_str(" unknown error")?,
        }
        if let Some(length) = self.segment_length {
            write!(f, ", segment length {length}")?;
        }
        if let Some(Ok((header, _))) = self.ddp_header.map(ddp::Header::parse) {
            write!(f, ", {header}")?;
        }
        if let Some(request) = &self.read_request {
            write!(f, ", {request}")?;
        }
        Ok(())
    }
}
