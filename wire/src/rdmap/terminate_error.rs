//! Every reason for a Terminate: layer, error type, error code (RFC 5040 figure 9; RFC 5041 §7.2;
//! RFC 5044 §8; RFC 6581 §9; collected in RFC 6580 §3).

use super::control::{ControlError, HeaderError, PlacementError};
use crate::assigned::assigned;
use crate::ddp;
use crate::mpa::fpdu::FpduError;

assigned! {
    /// A reason for a Terminate. Its discriminant is the first half of the Terminate Control field:
    /// 4 bits layer, 4 bits error type, 8 bits error code.
    TerminateError: u16 {
        /// RDMAP failed locally. Any received code has this meaning; zero is sent.
        RdmapLocalCatastrophic = 0x0000 => "RDMAP local catastrophic error",

        /// Protection: the STag does not exist.
        RdmapInvalidStag = 0x0100 => "RDMAP invalid STag",
        /// Protection: outside the buffer.
        RdmapBaseOrBounds = 0x0101 => "RDMAP base or bounds violation",
        /// Protection: the STag does not grant this access.
        RdmapAccessRights = 0x0102 => "RDMAP access rights violation",
        /// Protection: the STag is not for this stream.
        RdmapStagNotAssociated = 0x0103 => "RDMAP STag not associated with stream",
        /// Protection: tagged offset and length exceed 64 bits.
        RdmapToWrap = 0x0104 => "RDMAP TO wrap",
        /// Protection: the STag exists, but this stream may not invalidate it.
        RdmapProtectedFromInvalidate = 0x0109 => "RDMAP STag protected from invalidation",
        /// Protection, unspecified.
        RdmapProtection = 0x01ff => "RDMAP remote protection error",

        /// Operation: RV is not 1.
        RdmapVersion = 0x0205 => "RDMAP invalid version",
        /// Operation: an opcode that is unassigned, unsupported, or not for this kind of segment.
        RdmapUnexpectedOpcode = 0x0206 => "RDMAP unexpected opcode",
        /// Operation: this stream cannot continue.
        RdmapCatastrophicStream = 0x0207 => "RDMAP catastrophic error of the stream",
        /// Operation: no stream can continue.
        RdmapCatastrophicGlobal = 0x0208 => "RDMAP catastrophic error of the device",
        /// Operation: the STag cannot be invalidated.
        RdmapCannotInvalidate = 0x0209 => "RDMAP STag cannot be invalidated",
        /// Operation, unspecified.
        RdmapOperation = 0x02ff => "RDMAP remote operation error",

        /// DDP failed locally.
        DdpLocalCatastrophic = 0x1000 => "DDP local catastrophic error",

        /// Tagged: the STag does not exist.
        DdpInvalidStag = 0x1100 => "DDP invalid STag",
        /// Tagged: outside the buffer.
        DdpBaseOrBounds = 0x1101 => "DDP base or bounds violation",
        /// Tagged: the STag is not for this stream.
        DdpStagNotAssociated = 0x1102 => "DDP STag not associated with stream",
        /// Tagged: tagged offset and length exceed 64 bits.
        DdpToWrap = 0x1103 => "DDP TO wrap",
        /// Tagged: DV is not 1.
        DdpTaggedVersion = 0x1104 => "DDP invalid version (tagged)",

        /// Untagged: no such queue.
        DdpInvalidQueue = 0x1201 => "DDP invalid QN",
        /// Untagged: no buffer for this MSN.
        DdpNoBuffer = 0x1202 => "DDP no buffer for MSN",
        /// Untagged: the MSN is out of range.
        DdpInvalidMsn = 0x1203 => "DDP MSN out of range",
        /// Untagged: the MO is outside the buffer or unexpected.
        DdpInvalidMo = 0x1204 => "DDP invalid MO",
        /// Untagged: the message exceeds its buffer.
        DdpTooLong = 0x1205 => "DDP message too long for buffer",
        /// Untagged: DV is not 1.
        DdpUntaggedVersion = 0x1206 => "DDP invalid version (untagged)",

        /// MPA: the TCP connection closed or was lost.
        MpaConnectionLost = 0x2001 => "MPA connection lost",
        /// MPA: an FPDU's CRC does not match.
        MpaCrc = 0x2002 => "MPA CRC error",
        /// MPA: a marker and ULPDU_Length disagree.
        MpaMarker = 0x2003 => "MPA marker and length disagree",
        /// MPA: a bad Request or Reply frame.
        MpaStartup = 0x2004 => "MPA bad Request or Reply",
        /// MPA: start-up failed locally (RFC 6581 §9.3).
        MpaLocalCatastrophic = 0x2005 => "MPA local catastrophic error",
        /// MPA: the local IRD cannot hold the peer's ORD (RFC 6581 §9.1).
        MpaInsufficientIrd = 0x2006 => "MPA insufficient IRD",
        /// MPA: the Reply offers no RTR that this end supports (RFC 6581 §9.2).
        MpaNoMatchingRtr = 0x2007 => "MPA no matching RTR",
    }
}

impl TerminateError {
    /// The error with these three numbers, if an RFC assigns them.
    pub fn from_codes(layer: u8, etype: u8, code: u8) -> Option<Self> {
        if (layer, etype) == (0, 0) {
            return Some(Self::RdmapLocalCatastrophic);
        }
        Self::ALL
            .into_iter()
            .find(|error| (error.layer(), error.etype(), error.code()) == (layer, etype, code))
    }

    /// Layer, error type and code of the first word of a Terminate.
    pub const fn codes_of(control: u32) -> (u8, u8, u8) {
        let [first, code, ..] = control.to_be_bytes();
        (first >> 4, first & 0xf, code)
    }

    /// The error of the first word of a Terminate, if an RFC assigns it.
    pub fn of_control(control: u32) -> Option<Self> {
        let (layer, etype, code) = Self::codes_of(control);
        Self::from_codes(layer, etype, code)
    }

    /// The layer: 0 RDMAP, 1 DDP, 2 LLP.
    pub const fn layer(self) -> u8 {
        (self as u16 >> 12) as u8
    }

    /// The error type within the layer.
    pub const fn etype(self) -> u8 {
        (self as u16 >> 8) as u8 & 0xf
    }

    /// The error code within the type.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<ddp::Error> for TerminateError {
    /// RFC 5041 has no code for a segment shorter than its header; hardware sends DDP's local
    /// catastrophic error.
    fn from(error: ddp::Error) -> Self {
        match error {
            ddp::Error::Truncated { .. } => Self::DdpLocalCatastrophic,
            ddp::Error::Version { tagged: true, .. } => Self::DdpTaggedVersion,
            ddp::Error::Version { tagged: false, .. } => Self::DdpUntaggedVersion,
        }
    }
}

impl From<ControlError> for TerminateError {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Version(_) => Self::RdmapVersion,
            ControlError::Opcode(_) => Self::RdmapUnexpectedOpcode,
        }
    }
}

impl From<PlacementError> for TerminateError {
    /// A message of the wrong kind for its segment is an unexpected opcode; no RFC assigns a code
    /// to this error.
    fn from(error: PlacementError) -> Self {
        match error {
            PlacementError::NoQueue { .. } => Self::DdpInvalidQueue,
            PlacementError::Tagging(_) | PlacementError::WrongQueue { .. } => Self::RdmapUnexpectedOpcode,
        }
    }
}

impl From<HeaderError> for TerminateError {
    /// No RFC assigns a code to a header of the wrong length. The buffer of such a message is
    /// exactly one header, so a longer message is too long for its buffer; a shorter message is an
    /// unspecified operation error.
    fn from(error: HeaderError) -> Self {
        match error {
            HeaderError::Length { expected, found, .. } if found > expected => Self::DdpTooLong,
            HeaderError::Length { .. } => Self::RdmapOperation,
            HeaderError::AtomicOperation(_) => Self::RdmapUnexpectedOpcode,
        }
    }
}

impl TerminateError {
    /// The error of an FPDU; `None` if the FPDU is only incomplete.
    pub fn from_fpdu(error: FpduError) -> Option<Self> {
        match error {
            FpduError::Incomplete { .. } => None,
            FpduError::Crc { .. } => Some(Self::MpaCrc),
            FpduError::Marker { .. } => Some(Self::MpaMarker),
        }
    }
}
