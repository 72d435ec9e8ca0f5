//! The end that waits for a request.

use urnic_device::stream::MAX_STREAMING;
use urnic_wire::mpa::startup::EnhancedWord;

use super::failure::Failure;
use crate::mpa_startup::{Depths, Excerpt, PrivateDataTooLong, Reply, ResponderEvent, Settings, Time};
use crate::{ddp_session, mpa_startup};
use urnic_config::Llp;

/// The state machine of a responder.
#[derive(Debug)]
pub enum Responder {
    /// Over TCP.
    Mpa(mpa_startup::Responder),
    /// Over SCTP.
    Session(ddp_session::Passive),
}

/// A request as the responder received it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// The received IRD/ORD word, if the request is enhanced.
    pub word: Option<EnhancedWord>,
    /// The private data of the initiator.
    pub private_data: &'a [u8],
}

impl Responder {
    /// Creates a responder that waits for the request on a stream.
    pub fn new(llp: Llp, settings: Settings, now: Time) -> Responder {
        match llp {
            Llp::Tcp => Responder::Mpa(mpa_startup::Responder::new(settings, now)),
            Llp::Sctp => Responder::Session(ddp_session::Passive::new(settings, now)),
        }
    }

    /// The lower layer of the stream.
    pub fn llp(&self) -> Llp {
        match self {
            Responder::Mpa(_) => Llp::Tcp,
            Responder::Session(_) => Llp::Sctp,
        }
    }

    /// The length of the next receive.
    pub fn bytes_needed(&self) -> usize {
        match self {
            Responder::Mpa(mpa) => mpa.bytes_needed(),
            Responder::Session(_) => MAX_STREAMING as usize,
        }
    }

    /// When the request, or what must follow the answer, is overdue. While the ULP decides there is
    /// no deadline.
    pub fn deadline(&self) -> Option<Time> {
        match self {
            Responder::Mpa(mpa) => mpa.deadline(),
            Responder::Session(session) => session.deadline(),
        }
    }

    /// The request, from its arrival until it is answered.
    pub fn request(&self) -> Option<Request<'_>> {
        match self {
            Responder::Mpa(mpa) => mpa.request().map(|request| Request {
                word: request.word,
                private_data: &request.private_data,
            }),
            Responder::Session(session) => session.request().map(|request| Request {
                word: request.word,
                private_data: &request.private_data,
            }),
        }
    }

    /// Takes the result of a receive of [`bytes_needed`](Self::bytes_needed) bytes: some of them,
    /// or a message; none because the stream ended; or an error.
    ///
    /// # Errors
    /// [`Failure`] when the bytes are not what was due, or the stream ended too early. Drop the
    /// responder after an error.
    pub fn take<E>(&mut self, arrived: Result<&[u8], E>) -> Result<Option<ResponderEvent>, Failure> {
        match (self, arrived) {
            (Responder::Mpa(mpa), arrived) => Ok(mpa.take(arrived)?),
            (Responder::Session(session), Err(_) | Ok([])) => Err(session.closed().into()),
            (Responder::Session(session), Ok(message)) => {
                session.receive(message)?;
                Ok(Some(ResponderEvent::Request))
            }
        }
    }

    /// Accepts, with these depths limited by the request.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`]; the request is then still unanswered.
    pub fn accept(
        &mut self,
        own: Depths,
        private_data: &[u8],
        now: Time,
    ) -> Result<Reply, PrivateDataTooLong> {
        match self {
            Responder::Mpa(mpa) => mpa.accept(own, private_data, now),
            Responder::Session(session) => {
                let (bytes, negotiated) = session.accept(own, private_data)?.unzip();
                Ok(Reply {
                    bytes: bytes.unwrap_or_default(),
                    negotiated,
                })
            }
        }
    }

    /// Rejects for the ULP: returns what to send before the stream is closed. If the number of
    /// outstanding Reads was the reason, `required_ord` informs an enhanced initiator over TCP how
    /// many this end must have outstanding (RFC 6581 §9.1); a Reject has no such word.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`]; the request is then still unanswered.
    pub fn reject(
        &mut self,
        private_data: &[u8],
        required_ord: Option<u16>,
    ) -> Result<Vec<u8>, PrivateDataTooLong> {
        match self {
            Responder::Mpa(mpa) => mpa.reject(private_data, required_ord),
            Responder::Session(session) => Ok(session.reject(private_data)?.unwrap_or_default()),
        }
    }

    /// Refuses without the ULP, which has too many undecided requests: returns the frame to send
    /// before the stream is closed. Over SCTP closing it is the refusal.
    pub fn refuse(&mut self) -> Option<Vec<u8>> {
        match self {
            Responder::Mpa(mpa) => mpa.reject(&[], None).ok(),
            Responder::Session(session) => {
                session.refuse();
                None
            }
        }
    }

    /// The bytes of an incomplete request that have arrived, for the log.
    pub fn arrived(&self) -> Excerpt {
        match self {
            Responder::Mpa(mpa) => mpa.arrived(),
            Responder::Session(_) => Excerpt::default(),
        }
    }
}
