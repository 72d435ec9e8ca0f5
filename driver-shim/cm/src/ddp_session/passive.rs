//! The end that waits for an Initiate.

use urnic_wire::mpa::startup::EnhancedWord;
use urnic_wire::sctp::session::{Function, SessionMessage};

use super::message::{Failure, Fault, bytes_of};
use crate::mpa_startup::{Depths, Negotiated, PrivateDataTooLong, Settings, Time, answer};

/// The state machine of the passive end.
#[derive(Debug)]
pub struct Passive {
    settings: Settings,
    stage: Stage,
    /// When the Initiate must have come.
    deadline: Time,
}

#[derive(Debug)]
enum Stage {
    /// The Initiate is due.
    Initiate,
    /// The ULP decides.
    Unanswered(Request),
    /// Answered.
    Done,
}

/// An Initiate as the passive end received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The received IRD/ORD word, if the Initiate is enhanced.
    pub word: Option<EnhancedWord>,
    /// The private data of the active end.
    pub private_data: Vec<u8>,
}

impl Passive {
    /// Creates a passive end that waits for the Initiate of a stream.
    pub fn new(settings: Settings, now: Time) -> Passive {
        let deadline = now + settings.responder_timeout;
        Passive {
            settings,
            stage: Stage::Initiate,
            deadline,
        }
    }

    /// When the Initiate is overdue. While the ULP decides there is no deadline.
    pub fn deadline(&self) -> Option<Time> {
        matches!(self.stage, Stage::Initiate).then_some(self.deadline)
    }

    /// The Initiate, from its arrival until it is answered.
    pub fn request(&self) -> Option<&Request> {
        match &self.stage {
            Stage::Unanswered(request) => Some(request),
            Stage::Initiate | Stage::Done => None,
        }
    }

    /// Takes a message of the peer: its Initiate, after which [`Passive::request`] has it.
    ///
    /// # Errors
    /// [`Failure`] when the message is not an Initiate, or not the first one; [`Fault::Cancelled`]
    /// if the active end gave up while the ULP decided.
    pub fn receive(&mut self, message: &[u8]) -> Result<(), Failure> {
        let message = SessionMessage::parse(message)?;
        let found = message.function;
        match (&self.stage, found) {
            (Stage::Initiate, Function::Initiate) => {}
            (Stage::Unanswered(_), Function::Terminate) => return Err(Fault::Cancelled.into()),
            (Stage::Initiate, _) => {
                let due = "an Initiate";
                return Err(Fault::Sequence { found, due }.into());
            }
            (Stage::Unanswered(_) | Stage::Done, _) => {
                let due = "nothing";
                return Err(Fault::Sequence { found, due }.into());
            }
        }
        if message.enhanced && self.settings.revision < 2 {
            return Err(Fault::Enhanced.into());
        }
        let len = message.private_data.len();
        if len > self.settings.max_private_data {
            return Err(Fault::PrivateData(len).into());
        }
        self.stage = Stage::Unanswered(Request {
            word: message.word,
            private_data: message.private_data.to_vec(),
        });
        Ok(())
    }

    /// Accepts, with these depths limited by the Initiate: the Accept to send, and the parameters
    /// with which to attach the stream at once. `None` without an unanswered Initiate.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`]; the Initiate is then still unanswered.
    pub fn accept(
        &mut self,
        own: Depths,
        private_data: &[u8],
    ) -> Result<Option<(Vec<u8>, Negotiated)>, PrivateDataTooLong> {
        let Some(request) = self.request() else {
            return Ok(None);
        };
        let enhanced = request.word.is_some();
        let agreed = request.word.map(|word| answer(word, own, &self.settings));
        let word = agreed.map(|(word, ..)| word);
        let accept = bytes_of(&SessionMessage::new(Function::Accept, word, private_data))?;
        let (depths, rtr) = agreed.map_or((Depths::default(), None), |(_, depths, rtr)| (depths, rtr));
        self.stage = Stage::Done;
        let negotiated = Negotiated {
            depths,
            rtr,
            ..Negotiated::of_session(false, enhanced)
        };
        Ok(Some((accept, negotiated)))
    }

    /// Rejects for the ULP: the Reject to send, in the form of the Initiate. `None` without an
    /// unanswered Initiate.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`]; the Initiate is then still unanswered.
    pub fn reject(&mut self, private_data: &[u8]) -> Result<Option<Vec<u8>>, PrivateDataTooLong> {
        let Some(request) = self.request() else {
            return Ok(None);
        };
        let reject = bytes_of(&SessionMessage::reject(request.word.is_some(), private_data))?;
        self.stage = Stage::Done;
        Ok(Some(reject))
    }

    /// Refuses without the ULP, which has too many undecided requests or is gone: the Terminate of
    /// the closed stream is the answer (RFC 5043 §6.4).
    pub fn refuse(&mut self) {
        self.stage = Stage::Done;
    }

    /// The association ended.
    pub fn closed(&self) -> Failure {
        Fault::Closed.into()
    }
}
