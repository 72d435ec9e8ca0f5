//! The end that waits for the Request.

use urnic_wire::mpa::startup::{
    EnhancedWord, FrameKind, NO_NEGOTIATION, RtrKey, StartupFlags, StartupFrame, StartupHeader,
};

use super::frame::{Close, Excerpt, Failure, Fault, Incoming, PrivateDataTooLong, frame};
use super::negotiate::{self, Depths, Negotiated, Settings, Time};
use urnic_config::Llp;

/// The state machine of a responder.
#[derive(Debug)]
pub struct Responder {
    settings: Settings,
    stage: Stage,
    deadline: Option<Time>,
    incoming: Incoming,
}

#[derive(Debug)]
enum Stage {
    /// The Request is due.
    Request,
    /// The ULP decides on the Request.
    Unanswered(Box<Request>),
    /// Accepted; the RTR frame is due, and after it start-up has this result.
    RtrFrame(Negotiated),
    /// Accepted; the first FPDU is due.
    Fenced,
    /// Finished: rejected, or open.
    Done,
}

/// A Request as the responder received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The flags of the Request; R and reserved flags have no meaning.
    flags: StartupFlags,
    /// The revision of the Request.
    pub revision: u8,
    /// The received enhanced word, if the Request is enhanced: the ULP gets its IRD and ORD (RFC
    /// 6581 §9.1).
    pub word: Option<EnhancedWord>,
    /// The initiator's private data.
    pub private_data: Vec<u8>,
}

/// An accepting Reply to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The bytes of the Reply.
    pub bytes: Vec<u8>,
    /// The parameters with which to attach as soon as the bytes are sent; `None`: the RTR frame
    /// comes first, and [`Responder::receive`] returns the parameters.
    pub negotiated: Option<Negotiated>,
}

/// The event that received bytes caused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResponderEvent {
    /// A complete Request, also returned by [`Responder::request`].
    Request,
    /// A complete RTR frame: attach with these parameters.
    Ready(Negotiated),
}

impl Responder {
    /// Creates a responder that waits for the Request.
    pub fn new(settings: Settings, now: Time) -> Responder {
        let deadline = Some(now + settings.responder_timeout);
        Responder {
            settings,
            stage: Stage::Request,
            deadline,
            incoming: Incoming::default(),
        }
    }

    /// The number of bytes that the responder needs next: none while the ULP decides, or once the
    /// stream is attached.
    pub fn bytes_needed(&self) -> usize {
        match self.stage {
            Stage::Request | Stage::RtrFrame(_) => self.incoming.bytes_needed(),
            Stage::Unanswered(_) | Stage::Fenced | Stage::Done => 0,
        }
    }

    /// When [`Responder::expire`] is due. While the ULP decides there is no deadline.
    pub fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// The Request, from its arrival until it is answered.
    pub fn request(&self) -> Option<&Request> {
        match &self.stage {
            Stage::Unanswered(request) => Some(request),
            _ => None,
        }
    }

    /// Takes bytes from the stream. Returns the number of bytes that belong to start-up, and the
    /// event.
    ///
    /// # Errors
    /// [`Failure`] when the bytes are not the frame that was due, or arrive while the initiator
    /// must wait. Drop the responder after an error.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(usize, Option<ResponderEvent>), Failure> {
        match &self.stage {
            Stage::Request => self.receive_request(bytes),
            Stage::RtrFrame(negotiated) => {
                let negotiated = *negotiated;
                let taken = self.incoming.take(bytes, |header| {
                    // Both spellings of the key are valid; S and the private data have no meaning
                    // (conformance S001-04, -05).
                    Ok(header.require(FrameKind::Rtr(RtrKey::Hex), 1..=1)?)
                })?;
                let ready = self.incoming.whole().is_some();
                if ready {
                    self.stage = Stage::Done;
                    self.deadline = None;
                }
                Ok((taken, ready.then_some(ResponderEvent::Ready(negotiated))))
            }
            Stage::Unanswered(_) if !bytes.is_empty() => Err(Fault::Trailing(bytes.len()).into()),
            Stage::Unanswered(_) | Stage::Fenced | Stage::Done => Ok((0, None)),
        }
    }

    fn receive_request(&mut self, bytes: &[u8]) -> Result<(usize, Option<ResponderEvent>), Failure> {
        let settings = &self.settings;
        let taken = self.incoming.take(bytes, |header| check(header, settings))?;
        let Some((header, private_data)) = self.incoming.whole() else {
            return Ok((taken, None));
        };
        let StartupFrame {
            flags,
            revision,
            word,
            private_data,
            ..
        } = StartupFrame::from_parts(header, private_data)?;
        let request = Request {
            flags,
            revision,
            word,
            private_data: private_data.to_vec(),
        };
        let excess = settings.check_private_data(header);
        if taken < bytes.len() {
            return Err(Fault::Trailing(bytes.len() - taken).into());
        }
        self.stage = Stage::Unanswered(Box::new(request));
        self.deadline = None;
        self.incoming = Incoming::default();
        if let Err(fault) = excess {
            // Private data that the ULP cannot take makes the frame improper (RFC 5044 §7.1.2(9)),
            // which ends the connection. The Reply tells the initiator that the port was right.
            return Err(Failure {
                close: Close::Orderly,
                final_frame: self.reject(&[], None).ok(),
                ..fault.into()
            });
        }
        Ok((taken, Some(ResponderEvent::Request)))
    }

    /// Accepts, with these depths limited by the Request. A queue pair must be bound to this end of
    /// the stream before (RFC 5044 §7.1): call this function only with such a queue pair.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`]; the Request is then still unanswered.
    ///
    /// # Panics
    /// Never; without a Request the Reply is empty.
    pub fn accept(
        &mut self,
        own: Depths,
        private_data: &[u8],
        now: Time,
    ) -> Result<Reply, PrivateDataTooLong> {
        let Some(request) = self.request() else {
            return Ok(Reply {
                bytes: Vec::new(),
                negotiated: None,
            });
        };
        let answer = request
            .word
            .map(|word| negotiate::answer(word, own, &self.settings));
        let (depths, rtr) = answer.map_or((Depths::default(), None), |(_, depths, rtr)| (depths, rtr));
        let rtr_frame = self.settings.rtr_frame.is_some() && request.revision == 1 && request.flags.enhanced;
        let crc = self.settings.crc || request.flags.crc;
        let bytes = frame(&StartupFrame {
            kind: FrameKind::Reply,
            flags: StartupFlags {
                markers: self.settings.markers,
                crc,
                reject: false,
                enhanced: rtr_frame,
            },
            revision: request.revision.min(self.settings.revision),
            word: answer.map(|(word, ..)| word),
            private_data,
        })?;
        let negotiated = Negotiated {
            llp: Llp::Tcp,
            initiator: false,
            revision: request.revision.min(self.settings.revision),
            crc,
            markers_tx: request.flags.markers,
            markers_rx: self.settings.markers,
            depths,
            rtr,
            fenced: !rtr_frame,
            terminate: None,
        };
        self.deadline = Some(now + self.settings.rtr_timeout);
        self.stage = if rtr_frame {
            Stage::RtrFrame(negotiated)
        } else {
            Stage::Fenced
        };
        Ok(Reply {
            bytes,
            negotiated: (!rtr_frame).then_some(negotiated),
        })
    }

    /// Rejects. If the number of outstanding Reads was the reason, `required_ord` informs an
    /// enhanced initiator how many Reads this end must have outstanding (RFC 6581 §9.1). The ULP
    /// decides whether the TCP connection is closed after the Reply (RFC 5044 §7.1.2(6)).
    ///
    /// # Errors
    /// [`PrivateDataTooLong`]; the Request is then still unanswered.
    pub fn reject(
        &mut self,
        private_data: &[u8],
        required_ord: Option<u16>,
    ) -> Result<Vec<u8>, PrivateDataTooLong> {
        let Some(request) = self.request() else {
            return Ok(Vec::new());
        };
        let word = request.word.map(|word| {
            let (word, ..) = negotiate::answer(
                word,
                Depths {
                    ird: Some(0),
                    ord: Some(0),
                },
                &self.settings,
            );
            EnhancedWord {
                ord: required_ord.map_or(word.ord, |ord| ord.min(NO_NEGOTIATION)),
                ..word
            }
        });
        let bytes = frame(&StartupFrame {
            kind: FrameKind::Reply,
            flags: StartupFlags {
                markers: self.settings.markers,
                crc: self.settings.crc || request.flags.crc,
                reject: true,
                enhanced: false,
            },
            revision: request.revision.min(self.settings.revision),
            word,
            private_data,
        })?;
        self.stage = Stage::Done;
        self.deadline = None;
        Ok(bytes)
    }

    /// The first valid FPDU arrived: the fence is open (RFC 5044 §7.1.2(4)).
    pub fn first_fpdu(&mut self) {
        if matches!(self.stage, Stage::Fenced) {
            self.stage = Stage::Done;
            self.deadline = None;
        }
    }

    /// Reports an error of this end. Before the Reply, the peer gets a rejecting Reply; after the
    /// Reply nothing may be sent, so the connection is reset (RFC 6581 §9.3, conformance EMPA-38).
    pub fn failed_here(&mut self) -> Option<Vec<u8>> {
        self.request()?;
        self.reject(&[], None).ok()
    }

    /// Takes the result of a receive of [`bytes_needed`](Self::bytes_needed) bytes: some of them,
    /// none because the stream ended, or an error.
    ///
    /// # Errors
    /// The errors of [`receive`](Self::receive); the stream ended too early.
    pub fn take<E>(&mut self, arrived: Result<&[u8], E>) -> Result<Option<ResponderEvent>, Failure> {
        let bytes = arrived.map_err(|_| self.closed())?;
        if bytes.is_empty() {
            return Err(self.closed());
        }
        Ok(self.receive(bytes)?.1)
    }

    /// The bytes of the due frame that have arrived, for the log.
    pub fn arrived(&self) -> Excerpt {
        self.incoming.arrived()
    }

    /// The connection ended.
    pub fn closed(&self) -> Failure {
        Fault::Closed.into()
    }

    /// Checks the deadline; returns a failure once the deadline is reached.
    pub fn expire(&self, now: Time) -> Option<Failure> {
        self.deadline
            .filter(|deadline| now >= *deadline)
            .map(|_| Fault::Timeout.into())
    }
}

fn check(header: StartupHeader, settings: &Settings) -> Result<StartupHeader, Failure> {
    if header.kind == FrameKind::Request && header.revision == 0 {
        // RFC 5044 appendix C.2.1: answer with revision 1, then close gracefully.
        let flags = StartupFlags {
            markers: settings.markers,
            crc: settings.crc,
            reject: true,
            enhanced: false,
        };
        let reply = StartupFrame {
            kind: FrameKind::Reply,
            flags,
            revision: 1,
            word: None,
            private_data: &[],
        };
        let final_frame = frame(&reply).ok();
        return Err(Failure {
            close: Close::Orderly,
            final_frame,
            ..Fault::Rdmac.into()
        });
    }
    Ok(header.require(FrameKind::Request, 1..=settings.revision)?)
}
