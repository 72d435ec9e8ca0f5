//! The refusal of a message about a connection, REJ (§12.6.7 of the InfiniBand Architecture
//! Specification).

use super::bits::{bits, placed};
use super::ids::{CommIds, IdsLayout};
use core::fmt;
use zerocopy::byteorder::big_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of private data of [`ConnectReject`].
pub const REJECT_PRIVATE_DATA: usize = 148;
/// Most bytes of additional information of [`ConnectReject`].
pub const REJECT_INFORMATION: usize = 72;

/// The message that a REJ or an MRA answers, 2 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About(pub u8);

impl About {
    /// REQ.
    pub const REQUEST: About = About(0);
    /// REP.
    pub const REPLY: About = About(1);
    /// None of them: in an MRA an LAP.
    pub const OTHER: About = About(2);
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("REQ"),
            1 => f.write_str("REP"),
            _ => f.write_str("another message"),
        }
    }
}

/// Why a message is refused (§12.6.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// No room for the connection.
    pub const NO_RESOURCES: RejectReason = RejectReason(3);
    /// The sender gave up waiting. The additional information is its CA GUID.
    pub const TIMEOUT: RejectReason = RejectReason(4);
    /// A request that the sender does not support.
    pub const UNSUPPORTED: RejectReason = RejectReason(5);
    /// The recipient's number is not that of a connection here.
    pub const INVALID_COMM_ID: RejectReason = RejectReason(6);
    /// Nothing listens for the service.
    pub const INVALID_SERVICE_ID: RejectReason = RejectReason(8);
    /// Another kind of queue pair than the service has.
    pub const INVALID_TRANSPORT: RejectReason = RejectReason(9);
    /// The recipient's queue pair belongs to another connection here.
    pub const STALE_CONNECTION: RejectReason = RejectReason(10);
    /// The primary path has a GID that is not of its end.
    pub const INVALID_GID: RejectReason = RejectReason(12);
    /// The path MTU is too large, or no MTU.
    pub const INVALID_MTU: RejectReason = RejectReason(26);
    /// The program refused.
    pub const CONSUMER: RejectReason = RejectReason(28);
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = match *self {
            RejectReason::NO_RESOURCES => "no resources",
            RejectReason::TIMEOUT => "timeout",
            RejectReason::UNSUPPORTED => "unsupported request",
            RejectReason::INVALID_COMM_ID => "invalid communication id",
            RejectReason::INVALID_SERVICE_ID => "invalid service id",
            RejectReason::INVALID_TRANSPORT => "invalid transport service",
            RejectReason::STALE_CONNECTION => "stale connection",
            RejectReason::INVALID_GID => "invalid gid",
            RejectReason::INVALID_MTU => "invalid path mtu",
            RejectReason::CONSUMER => "refused by the program",
            RejectReason(other) => return write!(f, "reason {other}"),
        };
        write!(f, "{known} ({})", self.0)
    }
}

/// The additional information of a refusal: at most [`REJECT_INFORMATION`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectInformation {
    len: u8,
    bytes: [u8; REJECT_INFORMATION],
}

impl RejectInformation {
    /// No information.
    pub const NONE: RejectInformation = RejectInformation {
        len: 0,
        bytes: [0; REJECT_INFORMATION],
    };

    /// The information `given`; `None` if it is too long.
    pub fn new(given: &[u8]) -> Option<RejectInformation> {
        let mut bytes = [0; REJECT_INFORMATION];
        bytes.get_mut(..given.len())?.copy_from_slice(given);
        let len = given.len() as u8;
        Some(RejectInformation { len, bytes })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The refusal of a message, or the end of an attempt to connect: REJ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectReject {
    /// The numbers of the connection; a number that the sender has not given or does not know is 0.
    pub ids: CommIds,
    /// The refused message.
    pub about: About,
    /// The reason.
    pub reason: RejectReason,
    /// Depends on the reason.
    pub information: RejectInformation,
    /// From the service, if the reason is [`RejectReason::CONSUMER`].
    pub private_data: [u8; REJECT_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    ids: IdsLayout,
    /// Message (2), reserved (6).
    about: u8,
    /// Length of the additional information (7), reserved (1).
    len: u8,
    reason: U16,
    information: [u8; REJECT_INFORMATION],
    private_data: [u8; REJECT_PRIVATE_DATA],
}

impl ConnectReject {
    pub(super) const LEN: usize = size_of::<Layout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = Layout {
            ids: self.ids.layout(),
            about: placed(self.about.0, 6, 2),
            len: placed(self.information.len, 1, 7),
            reason: self.reason.0.into(),
            information: self.information.bytes,
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    /// The refusal, or the length of its additional information if that is impossible.
    pub(super) fn parse(body: &[u8]) -> Option<Result<ConnectReject, u8>> {
        let layout = Layout::ref_from_bytes(body).ok()?;
        let len = bits(layout.len, 1, 7);
        let Some(information) = layout.information.get(..usize::from(len)) else {
            return Some(Err(len));
        };
        Some(Ok(ConnectReject {
            ids: CommIds::of(&layout.ids),
            about: About(bits(layout.about, 6, 2)),
            reason: RejectReason(layout.reason.get()),
            information: RejectInformation::new(information)?,
            private_data: layout.private_data,
        }))
    }
}

impl fmt::Display for ConnectReject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "REJ {} of {}: {}", self.ids, self.about, self.reason)
    }
}
