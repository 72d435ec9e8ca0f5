//! The Terminate header (RFC 5040 §4.8).
//!
//! ```text
//! Layer(4)|EType(4)  Error Code(8)  M|D|R|Reserved(13)
//! DDP Segment Length (16)           if M or D
//! Terminated DDP Header (14 | 18)   if D
//! Terminated RDMA Header (28)       if R
//! ```

use super::control::{Control, HeaderError, Opcode, QN_TERMINATE};
use super::read::ReadRequest;
use super::terminate_error::TerminateError;
use crate::ddp;
use core::fmt;

/// Bytes of the Terminate Control field and its reserved bits.
const CONTROL_LEN: usize = 4;
/// Bytes of the DDP Segment Length.
const LENGTH_LEN: usize = 2;

const RDMAP: u8 = 0;
const LLP: u8 = 2;
const LOCAL_CATASTROPHIC: u8 = 0;
const REMOTE_PROTECTION: u8 = 1;

/// First byte of an LLP error as Chelsio's and Intel's hardware sends it: error type 3, which RFC
/// 5041 reserves for the LLP in layer 1.
const LLP_AS_ETYPE_3: u8 = 0x23;

/// HdrCt: the bits of the three parts that may follow.
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
    /// D: DDP header of the segment at fault as received, 14 or 18 bytes depending on its T bit.
    pub ddp_header: Option<&'a [u8]>,
    /// R: the Read Request at fault, with its offsets advanced by the data that was already sent.
    pub read_request: Option<ReadRequest>,
}

impl<'a> Terminate<'a> {
    /// Bytes of the longest Terminate header.
    pub const MAX_LEN: usize = CONTROL_LEN + LENGTH_LEN + ddp::UNTAGGED_LEN + ReadRequest::LEN;

    /// A Terminate without headers, for errors of the LLP, for RDMAP's local errors, and for errors
    /// in the creation of a message (RFC 5040 §7.1, figure 10).
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

    /// A Terminate for an error in the inbound DDP segment `ulpdu`, with the headers that RFC 5040
    /// figure 10 requires for the error: segment length and DDP header for all of DDP's errors and
    /// for RDMAP's remote errors, and `read_request` for RDMAP's remote protection errors. The DDP
    /// header is omitted if the segment is too short for it.
    pub fn for_segment(error: TerminateError, ulpdu: &'a [u8], read_request: Option<ReadRequest>) -> Self {
        let terminate = Self::new(error);
        match (error.layer(), error.etype()) {
            (RDMAP, LOCAL_CATASTROPHIC) | (LLP, _) => terminate,
            (layer, etype) => Self {
                segment_length: u16::try_from(ulpdu.len()).ok(),
                ddp_header: ulpdu
                    .first()
                    .and_then(|&control| ulpdu.get(..ddp::header_len(control))),
                read_request: read_request.filter(|_| (layer, etype) == (RDMAP, REMOTE_PROTECTION)),
                ..terminate
            },
        }
    }

    /// The DDP header before a Terminate: the only message of queue 2 (RFC 5040 §4.8).
    pub fn header() -> ddp::UntaggedHeader {
        ddp::UntaggedHeader {
            last: true,
            rsvd_ulp: Control::from(Opcode::Terminate).byte(),
            rsvd_ulp_word: 0,
            qn: QN_TERMINATE,
            msn: 1,
            mo: 0,
        }
    }

    /// The error, if an RFC assigns these three numbers.
    pub fn error(&self) -> Option<TerminateError> {
        TerminateError::from_codes(self.layer, self.etype, self.code)
    }

    /// Parses the payload of a Terminate tolerantly, because it is the last message of the peer and
    /// some peers deviate from the RFCs.
    ///
    /// * LLP errors with error type 3, which some hardware sends, become error type 0.
    /// * soft-iWARP on little-endian machines swaps the nibbles of the first byte and has M, D, R
    ///   in the low bits of the third byte. The parser corrects this if it is visible: either those
    ///   bits are set and HdrCt is not, or the numbers have no meaning unswapped; and they have a
    ///   meaning when swapped.
    /// * Parts whose bit in HdrCt is set, but that are truncated, are left out.
    ///
    /// # Errors
    /// [`HeaderError::Length`] if even the control field is incomplete.
    pub fn parse(payload: &'a [u8]) -> Result<Self, HeaderError> {
        let Some((control, rest)) = payload.split_first_chunk::<CONTROL_LEN>() else {
            return Err(HeaderError::Length {
                opcode: Opcode::Terminate,
                expected: CONTROL_LEN,
                found: payload.len(),
            });
        };
        let [first, code, third, _] = *control;
        let known = |byte: u8| TerminateError::from_codes(byte >> 4, byte & 0xf, code).is_some();
        let swapped = first.rotate_left(4);
        let (hdrct, low) = (third & hdrct::ALL, third & hdrct::ALL.reverse_bits());
        let only_low = hdrct == 0 && low != 0;
        let (first, present) = if first == LLP_AS_ETYPE_3 && known(LLP << 4) {
            (LLP << 4, hdrct)
        } else if known(swapped) && (only_low || !known(first)) {
            (swapped, if only_low { low.reverse_bits() } else { hdrct })
        } else {
            (first, hdrct)
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

    /// Parses the payload of a Terminate for an end that has not sent any FPDU yet. Like
    /// [`Self::parse`], but this end cannot have caused an RDMAP error, so the codes that RFC 6581
    /// assigns to start-up have that meaning also with the nibbles swapped.
    ///
    /// # Errors
    /// [`HeaderError::Length`] if even the control field is incomplete.
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

    /// Length of the Terminate in bytes.
    pub fn buffer_len(&self) -> usize {
        let length = self.segment_length.is_some() || self.ddp_header.is_some();
        CONTROL_LEN
            + if length { LENGTH_LEN } else { 0 }
            + self.ddp_header.map_or(0, <[u8]>::len)
            + self.read_request.map_or(0, |_| ReadRequest::LEN)
    }

    /// Writes the Terminate to the front of `buffer`; returns the bytes written.
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
