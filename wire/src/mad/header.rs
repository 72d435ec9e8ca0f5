//! The header that all management datagrams have (§13.4.2 of the InfiniBand Architecture
//! Specification), and the choice of the message after it.

use super::sidr::{ServiceReply, ServiceRequest};
use core::fmt;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a management datagram.
pub const MAD_LEN: usize = 256;
/// The queue pair that receives them: the general services interface (§13.5.1).
pub const MANAGEMENT_QPN: u32 = 1;
/// The Q_Key of that queue pair (§10.2.5).
pub const MANAGEMENT_QKEY: u32 = 0x8001_0000;

const BASE_VERSION: u8 = 1;
/// Communication management (§13.4.4).
const CLASS: u8 = 0x07;
const CLASS_VERSION: u8 = 2;
/// `ComMgtSend()` (§16.7.1).
const SEND: u8 = 0x03;
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    base_version: u8,
    class: u8,
    class_version: u8,
    method: u8,
    status: U16,
    class_specific: U16,
    transaction_id: U64,
    attribute_id: U16,
    reserved: U16,
    attribute_modifier: U32,
}

const HEADER_LEN: usize = size_of::<Layout>();
const _: () = assert!(HEADER_LEN == 24 && HEADER_LEN + ServiceRequest::LEN == MAD_LEN);
const _: () = assert!(HEADER_LEN + ServiceReply::LEN == MAD_LEN);

/// A management datagram of the communication manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad {
    /// The reply to a request has that of the request.
    pub transaction_id: u64,
    /// The message itself.
    pub message: Message,
}

/// A message of the communication manager about datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// SIDR_REQ.
    Request(ServiceRequest),
    /// SIDR_REP.
    Reply(ServiceReply),
}

/// Why bytes are not a message about datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MadError {
    /// Not [`MAD_LEN`] bytes.
    #[error("{0} bytes instead of {MAD_LEN}")]
    Length(usize),
    /// Another version of the header or of the class.
    #[error("base version {0} and class version {1} instead of {BASE_VERSION} and {CLASS_VERSION}")]
    Version(u8, u8),
    /// Another class than communication management.
    #[error("class {0:#04x} is not communication management")]
    Class(u8),
    /// Another method than a send.
    #[error("method {0:#04x} is not a send")]
    Method(u8),
    /// Another message than SIDR_REQ and SIDR_REP.
    #[error("attribute {0:#06x} is not a message about datagrams")]
    Attribute(u16),
}

impl Mad {
    /// Bytes of a management datagram.
    #[inline]
    pub fn buffer_len(&self) -> usize {
        MAD_LEN
    }

    /// Writes the management datagram to the front of `buffer`; returns its length.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`].
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let attribute_id = match self.message {
            Message::Request(_) => SIDR_REQ,
            Message::Reply(_) => SIDR_REP,
        };
        let layout = Layout {
            base_version: BASE_VERSION,
            class: CLASS,
            class_version: CLASS_VERSION,
            method: SEND,
            status: 0.into(),
            class_specific: 0.into(),
            transaction_id: self.transaction_id.into(),
            attribute_id: attribute_id.into(),
            reserved: 0.into(),
            attribute_modifier: 0.into(),
        };
        let (header, body) = buffer[..MAD_LEN].split_at_mut(HEADER_LEN);
        header.copy_from_slice(layout.as_bytes());
        match &self.message {
            Message::Request(request) => request.emit(body),
            Message::Reply(reply) => reply.emit(body),
        }
        MAD_LEN
    }
}

/// Parses a management datagram.
///
/// # Errors
/// [`MadError`], the first in the order of its variants.
pub fn parse(bytes: &[u8]) -> Result<Mad, MadError> {
    let wrong_length = MadError::Length(bytes.len());
    let bytes: &[u8; MAD_LEN] = bytes.try_into().map_err(|_| wrong_length)?;
    let (layout, body) = Layout::ref_from_prefix(bytes).map_err(|_| wrong_length)?;
    if (layout.base_version, layout.class_version) != (BASE_VERSION, CLASS_VERSION) {
        return Err(MadError::Version(layout.base_version, layout.class_version));
    }
    if layout.class != CLASS {
        return Err(MadError::Class(layout.class));
    }
    if layout.method != SEND {
        return Err(MadError::Method(layout.method));
    }
    let message = match layout.attribute_id.get() {
        SIDR_REQ => ServiceRequest::parse(body).map(Message::Request),
        SIDR_REP => ServiceReply::parse(body).map(Message::Reply),
        other => return Err(MadError::Attribute(other)),
    };
    Ok(Mad {
        transaction_id: layout.transaction_id.get(),
        message: message.ok_or(wrong_length)?,
    })
}

impl fmt::Display for Mad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Message::Request(request) => request.fmt(f)?,
            Message::Reply(reply) => reply.fmt(f)?,
        }
        write!(f, ", transaction 0x{:016x}", self.transaction_id)
    }
}
