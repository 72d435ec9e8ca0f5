//! The end of a start-up that failed, over either lower layer.

use std::fmt::{self, Display};

use rustix::io::Errno;

use crate::mpa_startup::Close;
use crate::{ddp_session, mpa_startup};

/// The fault that ended a start-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Over TCP.
    #[error(transparent)]
    Mpa(#[from] mpa_startup::Fault),
    /// Over SCTP.
    #[error(transparent)]
    Session(#[from] ddp_session::Fault),
}

impl Fault {
    /// The connection ended before start-up did.
    pub fn is_closed(self) -> bool {
        use {ddp_session::Fault as Session, mpa_startup::Fault as Mpa};
        matches!(self, Fault::Mpa(Mpa::Closed) | Fault::Session(Session::Closed))
    }

    /// The error number of the event that reports the fault.
    pub fn errno(self) -> Errno {
        use {ddp_session::Fault as Session, mpa_startup::Fault as Mpa};
        match self {
            Fault::Mpa(Mpa::Timeout) => Errno::TIMEDOUT,
            Fault::Mpa(Mpa::Closed) | Fault::Session(Session::Closed | Session::Cancelled) => {
                Errno::CONNRESET
            }
            Fault::Session(Session::Refused) => Errno::CONNREFUSED,
            Fault::Mpa(
                Mpa::Frame(_)
                | Mpa::NotMpa(_)
                | Mpa::Trailing(_)
                | Mpa::NotEnhanced(_)
                | Mpa::PrivateData(_)
                | Mpa::Rdmac,
            )
            | Fault::Session(
                Session::Message(_)
                | Session::Sequence { .. }
                | Session::Form
                | Session::PrivateData(_)
                | Session::Enhanced,
            ) => Errno::PROTO,
        }
    }
}

/// The end of a start-up that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The reason.
    pub fault: Fault,
    /// The way to close the stream. Over SCTP each sends the Terminate of the session, unless the
    /// peer has sent one.
    pub close: Close,
    /// A frame to send before the close.
    pub final_frame: Option<Vec<u8>>,
    /// The peer may not know RFC 6581: an unenhanced start-up may succeed, if the ULP does not
    /// depend on the results of the enhanced one.
    pub fall_back: bool,
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::Mpa(fault) => write!(f, "MPA error {}: {fault}", fault.mpa_error().code()),
            Fault::Session(fault) => write!(f, "{fault}"),
        }
    }
}

impl From<mpa_startup::Failure> for Failure {
    fn from(failure: mpa_startup::Failure) -> Failure {
        Failure {
            fault: failure.fault.into(),
            close: failure.close,
            final_frame: failure.final_frame,
            fall_back: failure.fall_back,
        }
    }
}

impl From<ddp_session::Failure> for Failure {
    fn from(failure: ddp_session::Failure) -> Failure {
        Failure {
            fault: failure.fault.into(),
            close: Close::Abort,
            final_frame: None,
            fall_back: failure.fall_back,
        }
    }
}
