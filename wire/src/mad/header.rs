//! The header that all management datagrams have (§13.4.2 of the InfiniBand Architecture
//! Specification), and the choice of the message after it.

use super::connect::ConnectRequest;
use super::connection::{ConnectReply, DisconnectReply, DisconnectRequest, ReadyToUse, ReceiptAck};
use super::ids::CommIds;
use super::reject::{ConnectReject, REJECT_INFORMATION};
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

/// The attributes, which are the kinds of message (§16.7.3).
mod attribute {
    pub(super) const REQ: u16 = 0x10;
    pub(super) const MRA: u16 = 0x11;
    pub(super) const REJ: u16 = 0x12;
    pub(super) const REP: u16 = 0x13;
    pub(super) const RTU: u16 = 0x14;
    pub(super) const DREQ: u16 = 0x15;
    pub(super) const DREP: u16 = 0x16;
    pub(super) const SIDR_REQ: u16 = 0x17;
    pub(super) const SIDR_REP: u16 = 0x18;
    /// Load alternate path.
    pub(super) const LAP: u16 = 0x19;
    /// Alternate path response.
    pub(super) const APR: u16 = 0x1a;
}

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
const BODY_LEN: usize = MAD_LEN - HEADER_LEN;
const _: () = assert!(HEADER_LEN == 24 && ConnectRequest::LEN == BODY_LEN);
const _: () = assert!(ReceiptAck::LEN == BODY_LEN && ConnectReject::LEN == BODY_LEN);
const _: () = assert!(ConnectReply::LEN == BODY_LEN && ReadyToUse::LEN == BODY_LEN);
const _: () = assert!(DisconnectRequest::LEN == BODY_LEN && DisconnectReply::LEN == BODY_LEN);
const _: () = assert!(ServiceRequest::LEN == BODY_LEN && ServiceReply::LEN == BODY_LEN);

/// A management datagram of the communication manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad {
    /// The reply to a request has that of the request.
    pub transaction_id: u64,
    /// The message itself.
    pub message: Message,
}

/// A message of the communication manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// REQ.
    Connect(ConnectRequest),
    /// MRA.
    Receipt(ReceiptAck),
    /// REJ.
    Reject(ConnectReject),
    /// REP.
    ConnectReply(ConnectReply),
    /// RTU.
    Ready(ReadyToUse),
    /// DREQ.
    Disconnect(DisconnectRequest),
    /// DREP.
    DisconnectReply(DisconnectReply),
    /// SIDR_REQ.
    Request(ServiceRequest),
    /// SIDR_REP.
    Reply(ServiceReply),
}

impl Message {
    /// The numbers of both ends; `None` in messages that have not both.
    pub fn ids(&self) -> Option<CommIds> {
        match self {
            Message::Receipt(message) => Some(message.ids),
            Message::Reject(message) => Some(message.ids),
            Message::ConnectReply(message) => Some(message.ids),
            Message::Ready(message) => Some(message.ids),
            Message::Disconnect(message) => Some(message.ids),
            Message::DisconnectReply(message) => Some(message.ids),
            Message::Connect(_) | Message::Request(_) | Message::Reply(_) => None,
        }
    }

    fn attribute(&self) -> u16 {
        match self {
            Message::Connect(_) => attribute::REQ,
            Message::Receipt(_) => attribute::MRA,
            Message::Reject(_) => attribute::REJ,
            Message::ConnectReply(_) => attribute::REP,
            Message::Ready(_) => attribute::RTU,
            Message::Disconnect(_) => attribute::DREQ,
            Message::DisconnectReply(_) => attribute::DREP,
            Message::Request(_) => attribute::SIDR_REQ,
            Message::Reply(_) => attribute::SIDR_REP,
        }
    }

    fn emit(&self, body: &mut [u8]) {
        match self {
            Message::Connect(message) => message.emit(body),
            Message::Receipt(message) => message.emit(body),
            Message::Reject(message) => message.emit(body),
            Message::ConnectReply(message) => message.emit(body),
            Message::Ready(message) => message.emit(body),
            Message::Disconnect(message) => message.emit(body),
            Message::DisconnectReply(message) => message.emit(body),
            Message::Request(message) => message.emit(body),
            Message::Reply(message) => message.emit(body),
        }
    }

    fn parse(attribute: u16, body: &[u8]) -> Result<Message, MadError> {
        let message = match attribute {
            attribute::REQ => ConnectRequest::parse(body).map(Message::Connect),
            attribute::MRA => ReceiptAck::parse(body).map(Message::Receipt),
            attribute::REJ => match ConnectReject::parse(body) {
                Some(Err(len)) => return Err(MadError::RejectInformation(len)),
                parsed => parsed.and_then(Result::ok).map(Message::Reject),
            },
            attribute::REP => ConnectReply::parse(body).map(Message::ConnectReply),
            attribute::RTU => ReadyToUse::parse(body).map(Message::Ready),
            attribute::DREQ => DisconnectRequest::parse(body).map(Message::Disconnect),
            attribute::DREP => DisconnectReply::parse(body).map(Message::DisconnectReply),
            attribute::SIDR_REQ => ServiceRequest::parse(body).map(Message::Request),
            attribute::SIDR_REP => ServiceReply::parse(body).map(Message::Reply),
            attribute::LAP | attribute::APR => return Err(MadError::AlternatePath(attribute)),
            other => return Err(MadError::Attribute(other)),
        };
        message.ok_or(MadError::Length(HEADER_LEN + body.len()))
    }
}

/// Why bytes are not a message of the communication manager.
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
    /// LAP or APR. Ethernet has no alternate paths.
    #[error("attribute {0:#06x} is about an alternate path, which RoCE does not have")]
    AlternatePath(u16),
    /// No message of the communication manager.
    #[error("attribute {0:#06x} is not a message of the communication manager")]
    Attribute(u16),
    /// A REJ with more additional information than it has room for.
    #[error("REJ has {0} bytes of additional information: at most {REJECT_INFORMATION}")]
    RejectInformation(u8),
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
        let layout = Layout {
            base_version: BASE_VERSION,
            class: CLASS,
            class_version: CLASS_VERSION,
            method: SEND,
            status: 0.into(),
            class_specific: 0.into(),
            transaction_id: self.transaction_id.into(),
            attribute_id: self.message.attribute().into(),
            reserved: 0.into(),
            attribute_modifier: 0.into(),
        };
        let (header, body) = buffer[..MAD_LEN].split_at_mut(HEADER_LEN);
        header.copy_from_slice(layout.as_bytes());
        self.message.emit(body);
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
    Ok(Mad {
        transaction_id: layout.transaction_id.get(),
        message: Message::parse(layout.attribute_id.get(), body)?,
    })
}

impl fmt::Display for Mad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Message::Connect(message) => message.fmt(f)?,
            Message::Receipt(message) => message.fmt(f)?,
            Message::Reject(message) => message.fmt(f)?,
            Message::ConnectReply(message) => message.fmt(f)?,
            Message::Ready(message) => message.fmt(f)?,
            Message::Disconnect(message) => message.fmt(f)?,
            Message::DisconnectReply(message) => message.fmt(f)?,
            Message::Request(message) => message.fmt(f)?,
            Message::Reply(message) => message.fmt(f)?,
        }
        write!(f, ", transaction 0x{:016x}", self.transaction_id)
    }
}
