//! A DDP segment as an RDMAP message: the whole of a ULPDU, checked and displayed.

use super::control::{Control, ControlError, HeaderError, Opcode, PlacementError, check_placement};
use super::extensions::{AtomicRequest, AtomicResponse, ImmediateData};
use super::read::ReadRequest;
use super::terminate::Terminate;
use super::terminate_error::TerminateError;
use crate::ddp;
use core::fmt;

/// The headers at the start of every segment of RDMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// The message type.
    pub opcode: Opcode,
    /// The DDP header.
    pub header: ddp::Header,
}

impl Headers {
    /// Parses the front of a ULPDU; returns the headers and the bytes after them.
    /// [`Headers::check_placement`] is the next step.
    ///
    /// # Errors
    /// [`SegmentError::Ddp`] if the DDP header is invalid, otherwise [`SegmentError::Control`] if
    /// the control byte is invalid.
    #[inline]
    pub fn parse(ulpdu: &[u8]) -> Result<(Self, &[u8]), SegmentError> {
        let (header, payload) = ddp::Header::parse(ulpdu)?;
        let Control { opcode } = Control::parse(header.rsvd_ulp())?;
        Ok((Self { opcode, header }, payload))
    }

    /// Checks that the message may be in a segment with this header: its T bit, then its queue.
    ///
    /// # Errors
    /// [`PlacementError`] if it may not; no byte of such a segment may be placed.
    #[inline]
    pub fn check_placement(&self) -> Result<(), PlacementError> {
        check_placement(self.opcode, &self.header)
    }
}

/// A ULPDU that belongs to an RDMAP stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// The message type.
    pub opcode: Opcode,
    /// The DDP header.
    pub header: ddp::Header,
    /// The payload.
    pub body: Body<'a>,
}

/// The payload of a DDP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// The ULP's bytes in an RDMA Write, a Read Response or one of the Sends.
    Data(&'a [u8]),
    /// The header of a Read Request.
    ReadRequest(ReadRequest),
    /// The header of a Terminate.
    Terminate(Terminate<'a>),
    /// The data of an Immediate Data message, with or without SE.
    Immediate(ImmediateData),
    /// The header of an Atomic Request.
    AtomicRequest(AtomicRequest),
    /// The header of an Atomic Response.
    AtomicResponse(AtomicResponse),
}

/// Why a ULPDU is not an RDMAP message; the first fault in the order of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The ULPDU is not a DDP segment.
    #[error(transparent)]
    Ddp(#[from] ddp::Error),
    /// The control byte is invalid.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The message is in the wrong kind of segment.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The RDMAP header is invalid.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

impl From<SegmentError> for TerminateError {
    fn from(error: SegmentError) -> Self {
        match error {
            SegmentError::Ddp(error) => error.into(),
            SegmentError::Control(error) => error.into(),
            SegmentError::Placement(error) => error.into(),
            SegmentError::Header(error) => error.into(),
        }
    }
}

impl<'a> Segment<'a> {
    /// Parses a ULPDU.
    ///
    /// # Errors
    /// [`SegmentError`] for the first fault; each converts into the
    /// [`TerminateError`](super::TerminateError) to send.
    #[inline]
    pub fn parse(ulpdu: &'a [u8]) -> Result<Self, SegmentError> {
        let (headers, payload) = Headers::parse(ulpdu)?;
        headers.check_placement()?;
        let Headers { opcode, header } = headers;
        let body = match opcode {
            Opcode::Write
            | Opcode::ReadResponse
            | Opcode::Send
            | Opcode::SendInvalidate
            | Opcode::SendSolicited
            | Opcode::SendSolicitedInvalidate => Body::Data(payload),
            Opcode::ReadRequest => Body::ReadRequest(ReadRequest::parse(payload)?),
            Opcode::Terminate => Body::Terminate(Terminate::parse(payload)?),
            Opcode::Immediate | Opcode::ImmediateSolicited => Body::Immediate(ImmediateData::parse(payload)?),
            Opcode::AtomicRequest => Body::AtomicRequest(AtomicRequest::parse(payload)?),
            Opcode::AtomicResponse => Body::AtomicResponse(AtomicResponse::parse(payload)?),
        };
        Ok(Self { opcode, header, body })
    }

    /// Length of the ULPDU in bytes.
    pub fn buffer_len(&self) -> usize {
        self.header.buffer_len()
            + match self.body {
                Body::Data(data) => data.len(),
                Body::ReadRequest(_) => ReadRequest::LEN,
                Body::Terminate(terminate) => terminate.buffer_len(),
                Body::Immediate(_) => ImmediateData::LEN,
                Body::AtomicRequest(_) => AtomicRequest::LEN,
                Body::AtomicResponse(_) => AtomicResponse::LEN,
            }
    }

    /// Writes the ULPDU to the front of `buffer`; returns the bytes written. The header is sent
    /// unchanged, so its `rsvd_ulp` must be the control byte of `opcode`.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`].
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let at = self.header.emit(buffer);
        let rest = &mut buffer[at..];
        at + match &self.body {
            Body::Data(data) => {
                rest[..data.len()].copy_from_slice(data);
                data.len()
            }
            Body::ReadRequest(request) => request.emit(rest),
            Body::Terminate(terminate) => terminate.emit(rest),
            Body::Immediate(immediate) => immediate.emit(rest),
            Body::AtomicRequest(request) => request.emit(rest),
            Body::AtomicResponse(response) => response.emit(rest),
        }
    }
}

impl fmt::Display for Segment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RDMAP {} {}", self.opcode, self.header)?;
        if let (true, ddp::Header::Untagged(header)) = (self.opcode.invalidates(), &self.header) {
            write!(f, " invalidate 0x{:08x}", header.rsvd_ulp_word)?;
        }
        match &self.body {
            Body::Data(data) => write!(f, " length {}", data.len()),
            Body::ReadRequest(request) => write!(f, ": {request}"),
            Body::Terminate(terminate) => write!(f, ": {terminate}"),
            Body::Immediate(immediate) => write!(f, ": {immediate}"),
            Body::AtomicRequest(request) => write!(f, ": {request}"),
            Body::AtomicResponse(response) => write!(f, ": {response}"),
        }
    }
}
