//! The end that requests a session.

use urnic_wire::sctp::session::{Function, SessionMessage};

use super::message::{Failure, Fault, bytes_of};
use crate::mpa_startup::{
    Accepted, Answer, Depths, Negotiated, Offer, PrivateDataTooLong, Rejected, Settings, Time, conclude,
    request,
};

/// The state machine of the active end: its Initiate is sent, and the answer is due.
#[derive(Debug)]
pub struct Active {
    settings: Settings,
    /// `None`: the Initiate is not enhanced.
    offer: Option<Offer>,
    deadline: Time,
}

impl Active {
    /// Creates the active end, and returns the Initiate to send: an enhanced one with an offer,
    /// unless `settings` allow only revision 1.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`].
    pub fn new(
        settings: Settings,
        offer: Option<Offer>,
        private_data: &[u8],
        now: Time,
    ) -> Result<(Active, Vec<u8>), PrivateDataTooLong> {
        let offer = offer.filter(|_| settings.revision >= 2);
        let word = offer.as_ref().map(|offer| request(offer, settings.rtr));
        let initiate = bytes_of(&SessionMessage::new(Function::Initiate, word, private_data))?;
        let deadline = now + settings.initiator_timeout;
        let active = Active {
            settings,
            offer,
            deadline,
        };
        Ok((active, initiate))
    }

    /// When the answer is overdue.
    pub fn deadline(&self) -> Time {
        self.deadline
    }

    /// Takes the peer's first message, which answers the Initiate.
    ///
    /// # Errors
    /// [`Failure`] when the message is not an answer to this Initiate.
    pub fn receive(&self, message: &[u8]) -> Result<Answer, Failure> {
        let message = SessionMessage::parse(message)?;
        let SessionMessage {
            function,
            enhanced,
            word,
            private_data,
        } = message;
        match function {
            Function::Initiate => {
                let due = "an answer";
                return Err(Fault::Sequence { found: function, due }.into());
            }
            // A peer that does not know the enhanced form ends the session (RFC 5043 §6.1).
            Function::Terminate => return Err(self.terminated()),
            _ if private_data.len() > self.settings.max_private_data => {
                return Err(Fault::PrivateData(private_data.len()).into());
            }
            Function::Accept if enhanced != self.offer.is_some() => return Err(Fault::Form.into()),
            // In either form: the enhanced one is only for what the other would have accepted.
            Function::Reject => {
                let private_data = private_data.to_vec();
                return Ok(Answer::Rejected(Rejected { word, private_data }));
            }
            Function::Accept => {}
        }
        let (depths, rtr, terminate) = match (&self.offer, word) {
            (Some(offer), Some(word)) => conclude(offer, word, self.settings.rtr),
            _ => (Depths::default(), None, None),
        };
        let negotiated = Negotiated {
            depths,
            rtr,
            terminate,
            ..Negotiated::of_session(true, enhanced)
        };
        Ok(Answer::Accepted(Accepted {
            negotiated,
            rtr_frame: None,
            word,
            private_data: private_data.to_vec(),
        }))
    }

    /// A Terminate ended the session before the answer.
    pub fn terminated(&self) -> Failure {
        Failure {
            fall_back: self.offer.is_some(),
            ..Fault::Refused.into()
        }
    }

    /// The association ended before the answer.
    pub fn closed(&self) -> Failure {
        Fault::Closed.into()
    }
}
