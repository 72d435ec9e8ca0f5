//! The end of a start-up that failed: the fault, and how to close.

use urnic_wire::mpa::startup::StartupError;
use urnic_wire::rdmap::TerminateError;

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The peer sent something that is no frame, or not the one that was due.
    #[error(transparent)]
    Frame(#[from] StartupError),
    /// Bytes behind the Request: an initiator is silent until the Reply (RFC 5044 §7.1.2).
    #[error("{0} octets behind the MPA Request, where an initiator has to wait for the Reply")]
    Trailing(usize),
    /// The Reply to an enhanced Request is not enhanced (RFC 6581 §10).
    #[error("the MPA Reply to an enhanced Request is of revision {0} without IRD/ORD word")]
    NotEnhanced(u8),
    /// The peer speaks revision 0, the RDMA Consortium's (RFC 5044 appendix C).
    #[error("the peer speaks MPA revision 0")]
    Rdmac,
    /// Time is up (RFC 5044 §7.1.2(8, 10)).
    #[error("MPA start-up did not end in time")]
    Timeout,
    /// The connection ended first.
    #[error("the TCP connection ended during MPA start-up")]
    Closed,
}

impl Fault {
    /// The error of RFC 5044 §8 that this is: code 4 for a frame that is wrong, code 1 for a stream
    /// that ended or stayed silent.
    pub const fn mpa_error(self) -> TerminateError {
        match self {
            Fault::Frame(_) | Fault::Trailing(_) | Fault::NotEnhanced(_) | Fault::Rdmac => {
                TerminateError::MpaStartup
            }
            Fault::Timeout | Fault::Closed => TerminateError::MpaConnectionLost,
        }
    }
}

/// How to end the TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// By a reset: also what makes cxgb4 and irdma fall back to revision 1.
    Abort,
    /// In an orderly way, once what is to be sent is sent.
    Orderly,
}

/// The end of a start-up that failed. There is nobody to send a Terminate to, so the code of RFC
/// 5044 §8 is in the message alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("MPA error {}: {fault}", .fault.mpa_error().code())]
pub struct Failure {
    /// Why.
    pub fault: Fault,
    /// How to end the connection.
    pub close: Close,
    /// A frame to send first.
    pub final_frame: Option<Vec<u8>>,
    /// The peer may be one that knows only revision 1: a new connection with an unenhanced Request
    /// may succeed, if the ULP can do without what enhanced start-up settles (RFC 6581 §10).
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
