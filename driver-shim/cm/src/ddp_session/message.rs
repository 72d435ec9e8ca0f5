//! The bytes of messages to send, and why a session did not begin.

use urnic_wire::sctp::session::{Function, MAX_MESSAGE_LEN, SessionError, SessionMessage};

use crate::mpa_startup::PrivateDataTooLong;

/// The bytes of a message.
pub(super) fn bytes_of(message: &SessionMessage<'_>) -> Result<Vec<u8>, PrivateDataTooLong> {
    let mut bytes = vec![0; message.buffer_len().min(MAX_MESSAGE_LEN)];
    message
        .emit(&mut bytes)
        .map_err(|_| PrivateDataTooLong(message.private_data.len()))?;
    Ok(bytes)
}

/// The fault that kept a session from beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The peer sent a message that is malformed.
    #[error(transparent)]
    Message(#[from] SessionError),
    /// The peer sent a message that no legal sequence has there (RFC 5043 §6.1).
    #[error("a DDP session {found} came where {due} was due")]
    Sequence {
        /// What the peer sent.
        found: Function,
        /// What may come.
        due: &'static str,
    },
    /// The Accept of an enhanced Initiate is not enhanced, or the other way round (RFC 6581 §7).
    #[error("the peer answered in another form of session control than it was asked in")]
    Form,
    /// The peer refused without its program: its limit of requests, or a form or an RTR indication
    /// that it does not know (RFC 5043 §6.4).
    #[error("the peer refused the DDP session before its program saw the request")]
    Refused,
    /// The active end gave up while the ULP decided.
    #[error("the peer gave up its request for a DDP session")]
    Cancelled,
    /// More private data than the ULP can take.
    #[error("{0} bytes of private data: programs can take 255")]
    PrivateData(usize),
    /// An enhanced Initiate, and this end is set to use RFC 5043 only.
    #[error("an enhanced DDP session was requested, and enhanced sessions are off")]
    Enhanced,
    /// The association ended first.
    #[error("the SCTP association ended before the DDP session began")]
    Closed,
}

/// The end of a session that did not begin. Closing its stream sends a Terminate, unless the peer
/// has sent one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{fault}")]
pub struct Failure {
    /// The reason.
    pub fault: Fault,
    /// The peer may not know RFC 6581: an unenhanced Initiate may succeed, if the ULP does not
    /// depend on the results of the enhanced one.
    pub fall_back: bool,
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Failure {
        let fall_back = false;
        Failure { fault, fall_back }
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Failure {
        Fault::from(error).into()
    }
}
