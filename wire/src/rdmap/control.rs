//! Opcodes, the control byte, and the segments in which messages may be sent (RFC 5040 §4.1).

use crate::assigned::assigned;
use crate::ddp;

/// Queue of Sends and Immediate Data (RFC 5040 §3.1).
pub const QN_SEND: u32 = 0;
/// Queue of Read Requests and Atomic Requests (RFC 5040 §3.1, RFC 7306 §5.2.1).
pub const QN_READ_REQUEST: u32 = 1;
/// Queue of the Terminate (RFC 5040 §3.1).
pub const QN_TERMINATE: u32 = 2;
/// Queue of Atomic Responses (RFC 7306 §5.2.2).
pub const QN_ATOMIC_RESPONSE: u32 = 3;

/// RV: the version of RDMAP that RFC 5040 §4.1 defines.
pub const VERSION: u8 = 1;

assigned! {
    /// A message type.
    Opcode: u8 {
        /// RDMA Write.
        Write = 0x0 => "Write",
        /// RDMA Read Request.
        ReadRequest = 0x1 => "ReadRequest",
        /// RDMA Read Response.
        ReadResponse = 0x2 => "ReadResponse",
        /// Send.
        Send = 0x3 => "Send",
        /// Send with Invalidate.
        SendInvalidate = 0x4 => "SendInv",
        /// Send with Solicited Event.
        SendSolicited = 0x5 => "SendSE",
        /// Send with Solicited Event and Invalidate.
        SendSolicitedInvalidate = 0x6 => "SendSEInv",
        /// Terminate.
        Terminate = 0x7 => "Terminate",
        /// Immediate Data (RFC 7306 §6).
        Immediate = 0x8 => "Immediate",
        /// Immediate Data with Solicited Event (RFC 7306 §6).
        ImmediateSolicited = 0x9 => "ImmediateSE",
        /// Atomic Request (RFC 7306 §5).
        AtomicRequest = 0xa => "AtomicRequest",
        /// Atomic Response (RFC 7306 §5).
        AtomicResponse = 0xb => "AtomicResponse",
    }
}

impl Opcode {
    /// The queue of this type's messages, `None` if they are tagged.
    #[inline]
    pub const fn queue(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse => None,
            Self::Send
            | Self::SendInvalidate
            | Self::SendSolicited
            | Self::SendSolicitedInvalidate
            | Self::Immediate
            | Self::ImmediateSolicited => Some(QN_SEND),
            Self::ReadRequest | Self::AtomicRequest => Some(QN_READ_REQUEST),
            Self::Terminate => Some(QN_TERMINATE),
            Self::AtomicResponse => Some(QN_ATOMIC_RESPONSE),
        }
    }

    /// Whether the receiver raises an event (SE).
    #[inline]
    pub const fn solicited(self) -> bool {
        matches!(
            self,
            Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited
        )
    }

    /// Whether the Invalidate STag word has a meaning.
    #[inline]
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSolicitedInvalidate)
    }

    /// Whether RFC 7306 defines the opcode: for a peer without the extensions it is unexpected.
    #[inline]
    pub const fn is_extension(self) -> bool {
        self as u8 >= Self::Immediate as u8
    }
}

/// RDMAP's control byte: `RV(2)|Rsv(2)|Opcode(4)` (RFC 5040 §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// The message type.
    pub opcode: Opcode,
}

/// A fault of a control byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// RV is not [`VERSION`].
    #[error("RDMAP version {0}")]
    Version(u8),
    /// No message has this opcode.
    #[error("RDMAP opcode 0x{0:x} is not assigned")]
    Opcode(u8),
}

impl Control {
    const VERSION_SHIFT: u32 = 6;
    const OPCODE: u8 = 0x0f;

    /// Parses the byte, which is the first of DDP's RsvdULP. Ignores the two reserved bits.
    ///
    /// # Errors
    /// [`ControlError::Version`] if RV is not [`VERSION`], otherwise [`ControlError::Opcode`] if
    /// the opcode is not assigned.
    #[inline]
    pub const fn parse(byte: u8) -> Result<Self, ControlError> {
        if byte >> Self::VERSION_SHIFT != VERSION {
            return Err(ControlError::Version(byte >> Self::VERSION_SHIFT));
        }
        let code = byte & Self::OPCODE;
        if (code as usize) < Opcode::ALL.len() {
            Ok(Self {
                opcode: Opcode::ALL[code as usize],
            })
        } else {
            Err(ControlError::Opcode(code))
        }
    }

    /// The control byte to send.
    #[inline]
    pub const fn byte(self) -> u8 {
        VERSION << Self::VERSION_SHIFT | self.opcode as u8
    }
}

impl From<Opcode> for Control {
    #[inline]
    fn from(opcode: Opcode) -> Self {
        Self { opcode }
    }
}

/// An opcode in a DDP segment of the wrong kind (RFC 5040 §4.1, table 4; RFC 7306 figure 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// A tagged message without the T bit, or an untagged message with it.
    #[error("{} in {} segment", .0, if .0.queue().is_some() { "a tagged" } else { "an untagged" })]
    Tagging(Opcode),
    /// A queue that RDMAP does not have.
    #[error("{opcode} on queue {qn}, which does not exist")]
    NoQueue {
        /// The message.
        opcode: Opcode,
        /// QN as sent.
        qn: u32,
    },
    /// A queue of RDMAP, but not the queue of this message.
    #[error("{opcode} on queue {qn}")]
    WrongQueue {
        /// The message.
        opcode: Opcode,
        /// QN as sent.
        qn: u32,
    },
}

/// Checks that `opcode` may be in a segment with this header: its T bit, then its queue.
///
/// # Errors
/// [`PlacementError`] if it may not; no byte of such a segment may be placed.
#[inline]
pub fn check_placement(opcode: Opcode, header: &ddp::Header) -> Result<(), PlacementError> {
    match (opcode.queue(), header) {
        (None, ddp::Header::Tagged(_)) => Ok(()),
        (Some(queue), ddp::Header::Untagged(header)) if queue == header.qn => Ok(()),
        (Some(_), ddp::Header::Untagged(header)) if header.qn > QN_ATOMIC_RESPONSE => {
            Err(PlacementError::NoQueue {
                opcode,
                qn: header.qn,
            })
        }
        (Some(_), ddp::Header::Untagged(header)) => Err(PlacementError::WrongQueue {
            opcode,
            qn: header.qn,
        }),
        _ => Err(PlacementError::Tagging(opcode)),
    }
}

/// A fault of the payload of a message that has a fixed RDMAP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The payload and the header differ in length.
    #[error("{opcode} of {found} bytes, must have {expected}")]
    Length {
        /// The message.
        opcode: Opcode,
        /// Length of the header in bytes.
        expected: usize,
        /// Length of the DDP payload in bytes.
        found: usize,
    },
    /// An AOpCode that is neither FetchAdd nor CmpSwap (RFC 7306 §5.2.1).
    #[error("atomic operation {0} is not assigned")]
    AtomicOperation(u8),
}
