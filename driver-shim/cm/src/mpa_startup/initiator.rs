//! The end that sends the Request.

use urnic_wire::mpa::startup::{EnhancedWord, FrameKind, RtrKey, StartupFlags, StartupFrame, StartupHeader};

use super::frame::{Close, Excerpt, Failure, Fault, Incoming, PrivateDataTooLong, frame};
use super::negotiate::{self, Depths, Negotiated, Offer, Settings, Time, terminate};
use urnic_config::Llp;

/// The state machine of an initiator: its Request is sent, and the Reply is due.
#[derive(Debug)]
pub struct Initiator {
    settings: Settings,
    /// `None`: the Request is not enhanced.
    offer: Option<Offer>,
    deadline: Time,
    incoming: Incoming,
}

/// The responder's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The responder accepted the Request.
    Accepted(Accepted),
    /// The responder rejected the Request. MPA is finished: the ULP may use or close the TCP
    /// connection (RFC 5044 §7.1.2(6)).
    Rejected(Rejected),
}

/// An accepting Reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The parameters with which to attach the stream.
    pub negotiated: Negotiated,
    /// The RTR frame of 2007, which must be sent before the stream is attached.
    pub rtr_frame: Option<Vec<u8>>,
    /// The received word of the responder: the ULP gets its IRD and ORD (RFC 6581 §9.1).
    pub word: Option<EnhancedWord>,
    /// The responder's private data.
    pub private_data: Vec<u8>,
}

/// A rejecting Reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The received word of the responder: its ORD may be the ORD that the responder requires (RFC
    /// 6581 §9.1).
    pub word: Option<EnhancedWord>,
    /// The responder's private data.
    pub private_data: Vec<u8>,
}

impl Initiator {
    /// Creates an initiator, and returns the Request to send. Without an offer, or if `settings`
    /// allow only revision 1, the Request is an unenhanced Request of revision 1, since RFC 6581
    /// §10 forbids the enhanced form when none of its features is requested.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`].
    pub fn new(
        settings: Settings,
        offer: Option<Offer>,
        private_data: &[u8],
        now: Time,
    ) -> Result<(Initiator, Vec<u8>), PrivateDataTooLong> {
        let offer = offer.filter(|_| settings.revision >= 2);
        let request = frame(&StartupFrame {
            kind: FrameKind::Request,
            flags: StartupFlags {
                markers: settings.markers,
                crc: settings.crc,
                reject: false,
                enhanced: offer.is_none() && settings.rtr_frame.is_some(),
            },
            revision: if offer.is_some() { 2 } else { 1 },
            word: offer
                .as_ref()
                .map(|offer| negotiate::request(offer, settings.rtr)),
            private_data,
        })?;
        let deadline = now + settings.initiator_timeout;
        Ok((
            Initiator {
                settings,
                offer,
                deadline,
                incoming: Incoming::default(),
            },
            request,
        ))
    }

    /// The number of bytes that the initiator needs next; bytes beyond them may be the peer's first
    /// FPDU.
    pub fn bytes_needed(&self) -> usize {
        self.incoming.bytes_needed()
    }

    /// When [`Initiator::expire`] is due.
    pub fn deadline(&self) -> Time {
        self.deadline
    }

    /// Takes bytes from the stream. Returns the number of bytes that belong to the Reply, and the
    /// answer once the Reply is complete. Bytes after the Reply are FPDUs: soft-iWARP responders
    /// do not wait for the initiator's first FPDU.
    ///
    /// # Errors
    /// [`Failure`] when the bytes are not a Reply, or not a Reply to this Request. Drop the
    /// initiator after an error.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(usize, Option<Answer>), Failure> {
        let enhanced = self.offer.is_some();
        let taken = self
            .incoming
            .take(bytes, |header| check(header, enhanced, &self.settings))?;
        let Some((header, private_data)) = self.incoming.whole() else {
            return Ok((taken, None));
        };
        let reply = StartupFrame::from_parts(header, private_data)?;
        Ok((taken, Some(self.conclude(&reply)?)))
    }

    fn conclude(&self, reply: &StartupFrame<'_>) -> Result<Answer, Failure> {
        let (word, private_data) = (reply.word, reply.private_data.to_vec());
        if reply.flags.reject {
            return Ok(Answer::Rejected(Rejected { word, private_data }));
        }
        let (depths, rtr, terminate) = match (&self.offer, word) {
            (Some(offer), Some(word)) => negotiate::conclude(offer, word, self.settings.rtr),
            (Some(_), None) => {
                return Err(Failure {
                    fall_back: true,
                    ..Fault::NotEnhanced(reply.revision).into()
                });
            }
            (None, _) => (Depths::default(), None, None),
        };
        // RFC 5044 §7.1.1: a request for CRCs binds both ends. The flags of the RTR frame are the
        // flags of the Reply.
        let crc = self.settings.crc || reply.flags.crc;
        let agreed = self
            .settings
            .rtr_frame
            .filter(|_| self.offer.is_none() && reply.flags.enhanced);
        let negotiated = Negotiated {
            llp: Llp::Tcp,
            initiator: true,
            revision: reply.revision,
            crc,
            markers_tx: reply.flags.markers,
            markers_rx: self.settings.markers,
            depths,
            rtr,
            fenced: false,
            terminate,
        };
        let rtr_frame = agreed.map(|key| rtr_frame(key, reply.flags));
        Ok(Answer::Accepted(Accepted {
            negotiated,
            rtr_frame,
            word,
            private_data,
        }))
    }

    /// Takes the result of a receive of [`bytes_needed`](Self::bytes_needed) bytes: some of them,
    /// none because the stream ended, or an error.
    ///
    /// # Errors
    /// The errors of [`receive`](Self::receive); the stream ended too early.
    pub fn take<E>(&mut self, arrived: Result<&[u8], E>) -> Result<Option<Answer>, Failure> {
        let bytes = arrived.map_err(|_| self.closed())?;
        if bytes.is_empty() {
            return Err(self.closed());
        }
        Ok(self.receive(bytes)?.1)
    }

    /// The bytes of the Reply that have arrived, for the log.
    pub fn arrived(&self) -> Excerpt {
        self.incoming.arrived()
    }

    /// The connection ended before the Reply.
    pub fn closed(&self) -> Failure {
        Failure {
            fall_back: self.offer.is_some(),
            ..Fault::Closed.into()
        }
    }

    /// Checks the deadline; returns a failure once the deadline is reached.
    pub fn expire(&self, now: Time) -> Option<Failure> {
        (now >= self.deadline).then(|| Fault::Timeout.into())
    }
}

impl Accepted {
    /// The result of start-up after an error of this end between the Reply and attaching: a
    /// Terminate reports the error to the peer (RFC 6581 §9.3).
    #[must_use]
    pub fn failed_here(mut self) -> Accepted {
        self.negotiated.terminate.get_or_insert(terminate::LOCAL);
        self.negotiated.rtr = None;
        self
    }
}

fn check(header: StartupHeader, enhanced: bool, settings: &Settings) -> Result<StartupHeader, Failure> {
    if header.kind == FrameKind::Reply && header.revision == 0 {
        return Err(Failure {
            close: Close::Orderly,
            ..Fault::Rdmac.into()
        });
    }
    let highest = if enhanced { 2 } else { 1 };
    let header = header.require(FrameKind::Reply, 1..=highest)?;
    settings.check_private_data(header)?;
    if enhanced && !header.has_word() && !header.flags.reject {
        return Err(Failure {
            fall_back: true,
            ..Fault::NotEnhanced(header.revision).into()
        });
    }
    Ok(header)
}

/// The third frame: the layout of Request and Reply, no private data, S = 0 (conformance S001).
fn rtr_frame(key: RtrKey, reply: StartupFlags) -> Vec<u8> {
    let flags = StartupFlags {
        crc: reply.crc,
        ..StartupFlags::default()
    };
    frame(&StartupFrame {
        kind: FrameKind::Rtr(key),
        flags,
        revision: 1,
        word: None,
        private_data: &[],
    })
    .unwrap_or_default()
}
