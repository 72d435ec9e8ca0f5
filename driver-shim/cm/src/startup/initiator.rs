//! The end that requests a connection.

use urnic_device::stream::MAX_STREAMING;

use super::failure::Failure;
use crate::mpa_startup::{Answer, Excerpt, Offer, PrivateDataTooLong, Settings, Time};
use crate::{ddp_session, mpa_startup};
use urnic_config::Llp;

/// The state machine of an initiator: its Request or Initiate is sent, and the answer is due.
#[derive(Debug)]
pub enum Initiator {
    /// Over TCP.
    Mpa(mpa_startup::Initiator),
    /// Over SCTP.
    Session(ddp_session::Active),
}

impl Initiator {
    /// Creates an initiator, and returns what it sends. Over SCTP the offer is one for the
    /// client-server model: without a fence, an RTR message would open nothing.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`].
    pub fn new(
        llp: Llp,
        settings: Settings,
        offer: Option<Offer>,
        private_data: &[u8],
        now: Time,
    ) -> Result<(Initiator, Vec<u8>), PrivateDataTooLong> {
        Ok(match llp {
            Llp::Tcp => {
                let (mpa, request) = mpa_startup::Initiator::new(settings, offer, private_data, now)?;
                (Initiator::Mpa(mpa), request)
            }
            Llp::Sctp => {
                let offer = offer.map(|offer| Offer {
                    peer_to_peer: false,
                    ..offer
                });
                let (session, initiate) = ddp_session::Active::new(settings, offer, private_data, now)?;
                (Initiator::Session(session), initiate)
            }
        })
    }

    /// The length of the next receive: bytes beyond it may be the peer's first FPDU.
    pub fn bytes_needed(&self) -> usize {
        match self {
            Initiator::Mpa(mpa) => mpa.bytes_needed(),
            Initiator::Session(_) => MAX_STREAMING as usize,
        }
    }

    /// When the answer is overdue.
    pub fn deadline(&self) -> Time {
        match self {
            Initiator::Mpa(mpa) => mpa.deadline(),
            Initiator::Session(session) => session.deadline(),
        }
    }

    /// Takes the result of a receive of [`bytes_needed`](Self::bytes_needed) bytes: some of them,
    /// or a message; none because the stream ended; or an error. Returns the answer once it is
    /// complete.
    ///
    /// # Errors
    /// [`Failure`] when the bytes are not an answer, or the stream ended too early. Drop the
    /// initiator after an error.
    pub fn take<E>(&mut self, arrived: Result<&[u8], E>) -> Result<Option<Answer>, Failure> {
        match (self, arrived) {
            (Initiator::Mpa(mpa), arrived) => Ok(mpa.take(arrived)?),
            (Initiator::Session(session), Err(_)) => Err(session.closed().into()),
            // A Terminate ends the stream.
            (Initiator::Session(session), Ok([])) => Err(session.terminated().into()),
            (Initiator::Session(session), Ok(message)) => Ok(Some(session.receive(message)?)),
        }
    }

    /// The bytes of an incomplete answer that have arrived, for the log.
    pub fn arrived(&self) -> Excerpt {
        match self {
            Initiator::Mpa(mpa) => mpa.arrived(),
            Initiator::Session(_) => Excerpt::default(),
        }
    }
}
