//! Start-up frames: a frame that is being received, the bytes of a frame to send, and the end of a
//! start-up whose frames are wrong or missing.

use urnic_wire::mpa::startup::{
    FrameKind, HEADER_LEN, MAX_PRIVATE_DATA, StartupError, StartupFrame, StartupHeader,
};
use urnic_wire::rdmap::TerminateError;

use std::fmt;

/// A frame that is being received.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    header: Option<StartupHeader>,
}

impl Incoming {
    /// The number of bytes missing to the known end of the frame.
    pub(super) fn bytes_needed(&self) -> usize {
        self.len() - self.bytes.len()
    }

    fn len(&self) -> usize {
        HEADER_LEN + self.header.map_or(0, |header| header.private_data_len)
    }

    /// The bytes that have arrived.
    pub(super) fn arrived(&self) -> Excerpt {
        Excerpt::of(&self.bytes)
    }

    /// Takes the bytes that belong to the frame. The first byte that no frame has identifies a
    /// wrong peer, and `check` examines the header as soon as it is complete. Returns the number of
    /// bytes taken.
    pub(super) fn take(
        &mut self,
        mut bytes: &[u8],
        check: impl Fn(StartupHeader) -> Result<StartupHeader, Failure>,
    ) -> Result<usize, Failure> {
        let all = bytes.len();
        loop {
            let (now, rest) = bytes.split_at(self.bytes_needed().min(bytes.len()));
            self.bytes.extend_from_slice(now);
            bytes = rest;
            if !FrameKind::may_begin(&self.bytes) {
                return Err(Fault::NotMpa(self.arrived()).into());
            }
            if self.header.is_some() || self.bytes_needed() > 0 {
                return Ok(all - bytes.len());
            }
            if let Some(fixed) = self.bytes.first_chunk() {
                self.header = Some(check(StartupHeader::parse(fixed)?)?);
            }
        }
    }

    /// Header and private data, once the frame is complete.
    pub(super) fn whole(&self) -> Option<(StartupHeader, &[u8])> {
        let header = self.header.filter(|_| self.bytes_needed() == 0)?;
        Some((header, self.bytes.get(HEADER_LEN..)?))
    }
}

/// The ULP's private data is too long for the frame (512 bytes, 508 after an enhanced word: RFC
/// 6581 §9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes of private data are too long: with the IRD/ORD word the maximum is {MAX_PRIVATE_DATA}")]
pub struct PrivateDataTooLong(pub usize);

/// The bytes of a frame.
pub(super) fn frame(frame: &StartupFrame<'_>) -> Result<Vec<u8>, PrivateDataTooLong> {
    let mut bytes = vec![0; frame.buffer_len()];
    frame
        .emit(&mut bytes)
        .map_err(|_| PrivateDataTooLong(frame.private_data.len()))?;
    Ok(bytes)
}

/// The first bytes of a peer that should have sent a frame, for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Excerpt {
    bytes: [u8; HEADER_LEN],
    len: usize,
}

impl Excerpt {
    fn of(bytes: &[u8]) -> Excerpt {
        let len = bytes.len().min(HEADER_LEN);
        let mut excerpt = Excerpt {
            len,
            ..Excerpt::default()
        };
        for (to, from) in excerpt.bytes.iter_mut().zip(bytes) {
            *to = *from;
        }
        excerpt
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\"{}\"",
            self.bytes.get(..self.len).unwrap_or_default().escape_ascii()
        )
    }
}

/// The fault that ended a start-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The peer sent bytes that are not a frame, or not the frame that was due.
    #[error(transparent)]
    Frame(#[from] StartupError),
    /// The peer sent bytes with which no frame begins.
    #[error("the peer does not speak MPA: it sent {0}")]
    NotMpa(Excerpt),
    /// Bytes after the Request: an initiator sends nothing before the Reply (RFC 5044 §7.1.2).
    #[error("{0} bytes after the MPA Request: an initiator must wait for the Reply")]
    Trailing(usize),
    /// The Reply to an enhanced Request is not enhanced (RFC 6581 §10).
    #[error("the MPA Reply to an enhanced Request has revision {0} and no IRD/ORD word")]
    NotEnhanced(u8),
    /// More private data than the ULP can take.
    #[error("{0} bytes of private data: programs can take 255")]
    PrivateData(usize),
    /// The peer uses revision 0, defined by the RDMA Consortium (RFC 5044 appendix C).
    #[error("the peer uses MPA revision 0, which is not supported")]
    Rdmac,
    /// The timeout expired (RFC 5044 §7.1.2(8, 10)).
    #[error("MPA start-up timed out")]
    Timeout,
    /// The TCP connection ended before start-up did.
    #[error("the TCP connection ended during MPA start-up")]
    Closed,
}

impl Fault {
    /// The error code of RFC 5044 §8 for this fault: code 4 for an invalid frame, code 1 for a
    /// stream that ended or timed out.
    pub const fn mpa_error(self) -> TerminateError {
        match self {
            Fault::Frame(_)
            | Fault::NotMpa(_)
            | Fault::Trailing(_)
            | Fault::NotEnhanced(_)
            | Fault::PrivateData(_)
            | Fault::Rdmac => TerminateError::MpaStartup,
            Fault::Timeout | Fault::Closed => TerminateError::MpaConnectionLost,
        }
    }
}

/// The way to end the TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// By a reset, which also makes cxgb4 and irdma fall back to revision 1.
    Abort,
    /// In an orderly way, after the pending bytes are sent.
    Orderly,
}

/// The end of a start-up that failed. No Terminate can be sent, so the code of RFC 5044 §8 appears
/// in the message only.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("MPA error {}: {fault}", .fault.mpa_error().code())]
pub struct Failure {
    /// The reason.
    pub fault: Fault,
    /// The way to end the connection.
    pub close: Close,
    /// A frame to send before the close.
    pub final_frame: Option<Vec<u8>>,
    /// The peer may support only revision 1: a new connection with an unenhanced Request may
    /// succeed, if the ULP does not depend on the results of enhanced start-up (RFC 6581 §10).
    pub fall_back: bool,
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Failure {
        Failure {
            fault,
            close: Close::Abort,
            final_frame: None,
            fall_back: false,
        }
    }
}

impl From<StartupError> for Failure {
    fn from(error: StartupError) -> Failure {
        Fault::from(error).into()
    }
}
