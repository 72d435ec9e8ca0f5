//! The Terminate: how an error is reported to the peer, and how the peer's Terminate is handled
//! (RFC 5040 §4.8, §5.4, §7).

use crate::memory::{InvalidateError, Violation};
use urnic_device::vocabulary::WcStatus;
use urnic_wire::ddp::Header;
use urnic_wire::rdmap::{Control, Opcode, QN_READ_REQUEST, QN_SEND, Terminate, TerminateError};

/// Bytes of the Terminate Control field.
const CONTROL_LEN: usize = 4;

/// A Terminate to send, as its payload.
#[derive(Debug, Clone)]
pub(super) struct Outgoing {
    bytes: [u8; Terminate::MAX_LEN],
    len: usize,
}

impl Outgoing {
    pub(super) fn new(terminate: &Terminate<'_>) -> Outgoing {
        let mut bytes = [0; Terminate::MAX_LEN];
        let len = terminate.emit(&mut bytes);
        Outgoing { bytes, len }
    }

    /// A Terminate without headers, made from its control word: start-up's errors (RFC 6581 §9).
    pub(super) fn from_control(control: u32) -> Outgoing {
        let mut bytes = [0; Terminate::MAX_LEN];
        bytes[..CONTROL_LEN].copy_from_slice(&(control & 0xffff_0000).to_be_bytes());
        Outgoing {
            bytes,
            len: CONTROL_LEN,
        }
    }

    /// The control word, in host order.
    pub(super) fn control(&self) -> u32 {
        let [a, b, c, d, ..] = self.bytes;
        u32::from_be_bytes([a, b, c, d])
    }

    pub(super) fn payload(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The request of this end that a Terminate of the peer names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OffendingRequest {
    /// The Send or Immediate with this MSN on queue 0.
    Send(u32),
    /// The Read or atomic with this MSN on queue 1.
    Request(u32),
    /// A Write that covers this place.
    Write { stag: u32, to: u64 },
}

/// A Terminate received.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received {
    /// Control word of the Terminate, as it should have been sent.
    pub(super) control: u32,
    /// The status of the offending request; `None`: the error is one of the stream.
    pub(super) status: Option<WcStatus>,
    /// Whether a receive buffer was missing.
    pub(super) no_buffer: bool,
    /// The offending request, if it names one.
    pub(super) offending: Option<OffendingRequest>,
    /// The kind of the offending message, if its header names one.
    pub(super) message: Option<Opcode>,
}

impl Received {
    /// Whether the peer reports an error that has nothing to do with a request of this end.
    pub(super) fn is_of_peer_itself(&self) -> bool {
        let error = TerminateError::of_control(self.control);
        self.message == Some(Opcode::ReadResponse)
            || error == Some(TerminateError::RdmapLocalCatastrophic) && self.offending.is_none()
    }

    pub(super) fn new(terminate: &Terminate<'_>) -> Received {
        let bit = |set: bool, mask: u32| if set { mask } else { 0 };
        let control = u32::from(terminate.layer) << 28
            | u32::from(terminate.etype & 0xf) << 24
            | u32::from(terminate.code) << 16
            | bit(terminate.segment_length.is_some(), 0x8000)
            | bit(terminate.ddp_header.is_some(), 0x4000)
            | bit(terminate.read_request.is_some(), 0x2000);
        Received {
            control,
            status: status(terminate),
            no_buffer: terminate.error() == Some(TerminateError::DdpNoBuffer),
            offending: terminate.ddp_header.and_then(offending),
            message: terminate.ddp_header.and_then(message),
        }
    }
}

/// The status of the request at fault.
fn status(terminate: &Terminate<'_>) -> Option<WcStatus> {
    use TerminateError as E;
    if is_of_answer(terminate) {
        return Some(WcStatus::RemOpErr);
    }
    Some(match (terminate.layer, terminate.etype, terminate.error()) {
        (0, 1, _) => WcStatus::RemAccessErr,
        (0, 2, Some(E::RdmapVersion | E::RdmapUnexpectedOpcode)) => WcStatus::RemInvReqErr,
        // A RoCE NIC refuses the key of an invalidation like that of an access, and the address of
        // an atomic that is no multiple of eight like a request that it does not support.
        (0, 2, Some(E::RdmapCannotInvalidate)) => WcStatus::RemAccessErr,
        (0, 2, Some(E::RdmapCatastrophicStream)) if is_of_atomic(terminate) => WcStatus::RemInvReqErr,
        (0, _, _) => WcStatus::RemOpErr,
        (1, 1, Some(E::DdpTaggedVersion)) => WcStatus::RemInvReqErr,
        (1, 1, _) => WcStatus::RemAccessErr,
        (1, 2, Some(E::DdpNoBuffer)) => WcStatus::RemOpErr,
        (1, 2, _) => WcStatus::RemInvReqErr,
        (1, 0, _) => WcStatus::RemOpErr,
        // LLP errors (also under the etype 3 that RFC 5041 reserves for them) and codes that no RFC
        // defines.
        _ => return None,
    })
}

/// Whether the offending request is an atomic.
fn is_of_atomic(terminate: &Terminate<'_>) -> bool {
    terminate.ddp_header.and_then(message) == Some(Opcode::AtomicRequest)
}

/// Whether the peer could not place our answer to its Read.
fn is_of_answer(terminate: &Terminate<'_>) -> bool {
    terminate.ddp_header.and_then(message) == Some(Opcode::ReadResponse)
}

/// The kind of a message, by its DDP header.
fn message(header: &[u8]) -> Option<Opcode> {
    let (header, _) = Header::parse(header).ok()?;
    let control = Control::parse(header.rsvd_ulp()).ok()?;
    Some(control.opcode)
}

fn offending(header: &[u8]) -> Option<OffendingRequest> {
    let (header, _) = Header::parse(header).ok()?;
    match header {
        Header::Untagged(h) if h.qn == QN_SEND => Some(OffendingRequest::Send(h.msn)),
        Header::Untagged(h) if h.qn == QN_READ_REQUEST => Some(OffendingRequest::Request(h.msn)),
        Header::Tagged(h) => match Control::parse(h.rsvd_ulp).ok()?.opcode {
            Opcode::Write => Some(OffendingRequest::Write {
                stag: h.stag,
                to: h.to,
            }),
            _ => None,
        },
        Header::Untagged(_) => None,
    }
}

/// The error of a tagged segment (RFC 5041 §7.2). DDP has no code for a missing right; RDMAP has
/// (row DDP-V-14).
pub(super) fn tagged(violation: Violation) -> TerminateError {
    match violation {
        Violation::InvalidStag => TerminateError::DdpInvalidStag,
        Violation::NotAssociated => TerminateError::DdpStagNotAssociated,
        Violation::Wrap => TerminateError::DdpToWrap,
        Violation::Bounds => TerminateError::DdpBaseOrBounds,
        Violation::AccessRights => TerminateError::RdmapAccessRights,
    }
}

/// The error of the source of a Read, or of the target of an atomic (RFC 5040 §7.2).
pub(super) fn source(violation: Violation) -> TerminateError {
    match violation {
        Violation::InvalidStag => TerminateError::RdmapInvalidStag,
        Violation::NotAssociated => TerminateError::RdmapStagNotAssociated,
        Violation::Wrap => TerminateError::RdmapToWrap,
        Violation::Bounds => TerminateError::RdmapBaseOrBounds,
        Violation::AccessRights => TerminateError::RdmapAccessRights,
    }
}

/// The error of a Send that was to invalidate a STag (row RDM-S-04).
pub(super) fn invalidation(error: InvalidateError) -> TerminateError {
    match error {
        InvalidateError::NotAssociated => TerminateError::RdmapProtectedFromInvalidate,
        InvalidateError::InvalidStag
        | InvalidateError::Shared
        | InvalidateError::Bound
        | InvalidateError::NotInvalidable => TerminateError::RdmapCannotInvalidate,
    }
}
