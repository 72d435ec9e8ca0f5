//! The first messages of a connection: which end may send first, the ready-to-receive indication
//! (RTR), and the report that the first FPDU has arrived.
//!
//! The driver has exchanged the MPA Request and Reply. The initiator may then send. A responder
//! sends nothing before it has received a valid FPDU (the MPA fence, RFC 5044 §7.1.2), unless it
//! knows that its peer is ready. If the initiator's program has nothing to send, an RTR opens the
//! fence: a first message of the initiator that no program sees (RFC 6581 §9.2).

use super::responder::Refusal;
use crate::counters::Counter;
use crate::rdmap::attachment::{Attachment, Rtr};
use crate::transport::Env;
use urnic_device::event::{Event, EventKind};
use urnic_wire::ddp::Header;
use urnic_wire::rdmap::{Opcode, ReadRequest, TerminateError};

/// The right of an end to send first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Role {
    /// We sent the MPA Request.
    Initiator,
    /// A responder that knows that its peer is ready, or a queue pair that is its own peer.
    Ready,
    /// A responder, which waits for an FPDU.
    #[default]
    Fenced,
}

/// The messages that have arrived from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Arrived {
    #[default]
    Nothing,
    /// The beginning of the first message, which was compared with the RTR.
    Message,
    /// A valid FPDU.
    Fpdu,
}

/// The state of one end while a connection starts.
#[derive(Debug, Default)]
pub(super) struct Startup {
    role: Role,
    arrived: Arrived,
    /// An FPDU was framed.
    has_sent: bool,
    /// The RTR that we have still to send.
    rtr: Option<Rtr>,
    /// The RTR that the first FPDU should be.
    expected: Option<Rtr>,
    /// A first message other than the expected one is an error (row EMPA-21).
    is_strict: bool,
}

impl Startup {
    pub(super) fn new(attachment: &Attachment) -> Startup {
        Startup {
            role: match (attachment.initiator, attachment.fence_open) {
                (true, _) => Role::Initiator,
                (false, true) => Role::Ready,
                (false, false) => Role::Fenced,
            },
            rtr: attachment.rtr_send,
            expected: attachment.rtr_expect,
            is_strict: attachment.strict_rtr,
            ..Startup::default()
        }
    }

    /// A queue pair that is its own peer has no fence and no RTR.
    pub(super) fn of_own_peer() -> Startup {
        Startup {
            role: Role::Ready,
            ..Startup::default()
        }
    }

    /// Ends start-up that failed after the Reply: a Terminate may be sent at once (RFC 6581 §9).
    pub(super) fn abort(&mut self) {
        self.arrived = Arrived::Fpdu;
    }

    /// Whether we may send (RFC 5044 §7.1.2).
    #[inline]
    pub(super) fn may_send(&self) -> bool {
        self.role != Role::Fenced || self.arrived == Arrived::Fpdu
    }

    /// Takes the RTR that is still to be sent, before anything else.
    #[inline]
    pub(super) fn take_rtr(&mut self) -> Option<Rtr> {
        self.rtr.take()
    }

    /// Whether the RTR has not been sent.
    #[inline]
    pub(super) fn owes_rtr(&self) -> bool {
        self.rtr.is_some()
    }

    /// Notes that an FPDU was framed.
    #[inline]
    pub(super) fn note_sent(&mut self) {
        self.has_sent = true;
    }

    /// Whether anything was sent. Before that, the peer can only report errors of start-up.
    pub(super) fn has_sent(&self) -> bool {
        self.has_sent
    }

    /// Whether no message has arrived.
    #[inline]
    pub(super) fn awaits_message(&self) -> bool {
        self.arrived == Arrived::Nothing
    }

    /// Checks the beginning of the first message, with this header and payload. Returns whether it
    /// is the RTR, a Send that no program may see; `first_msn` is the MSN that a first Send has. A
    /// first message other than the agreed one is accepted, too, unless the attachment was strict
    /// (row EMPA-21).
    pub(super) fn first_message(
        &mut self,
        env: &Env<'_>,
        opcode: Opcode,
        (header, payload): (&Header, &[u8]),
        first_msn: u32,
    ) -> Result<bool, Refusal> {
        self.arrived = Arrived::Message;
        let asks_nothing = || ReadRequest::parse(payload).is_ok_and(|request| request.size == 0);
        let as_agreed = match self.expected {
            None => return Ok(false),
            Some(Rtr::Send) => opcode == Opcode::Send && payload.is_empty() && header.last(),
            Some(Rtr::Write) => opcode == Opcode::Write && payload.is_empty(),
            Some(Rtr::Read) => opcode == Opcode::ReadRequest && asks_nothing(),
        };
        if !as_agreed {
            self.mismatch(env, opcode)?;
        }
        let is_first = matches!(header, Header::Untagged(h) if h.msn == first_msn && h.mo == 0);
        Ok(as_agreed && self.expected == Some(Rtr::Send) && is_first)
    }

    /// Checks the beginning of a first message with payload, which an RTR does not have.
    pub(super) fn first_message_with_payload(
        &mut self,
        env: &Env<'_>,
        opcode: Opcode,
    ) -> Result<(), Refusal> {
        if !self.awaits_message() {
            return Ok(());
        }
        self.arrived = Arrived::Message;
        match self.expected {
            Some(_) => self.mismatch(env, opcode),
            None => Ok(()),
        }
    }

    /// Reports a first message that is not the agreed RTR.
    fn mismatch(&self, env: &Env<'_>, opcode: Opcode) -> Result<(), Refusal> {
        env.counters.add(Counter::RtrMismatches, 1);
        if self.is_strict && opcode != Opcode::Terminate {
            return Err(TerminateError::MpaLocalCatastrophic.into());
        }
        Ok(())
    }

    /// A valid FPDU has arrived; `is_accepted`: its message or segment was accepted.
    #[inline]
    pub(super) fn fpdu_received(&mut self, env: &mut Env<'_>, is_accepted: bool) {
        if self.arrived != Arrived::Fpdu {
            self.arrived = Arrived::Fpdu;
            if is_accepted {
                self.report(env);
            }
        }
    }

    /// The driver reports the connection as established at this event: the peer's Terminate, an
    /// error or a refused RTR must not cause it (row EMPA-40).
    #[cold]
    fn report(&self, env: &mut Env<'_>) {
        match self.role {
            // A responder sends nothing before it has an FPDU: this one arrived with its Reply.
            Role::Initiator if !self.has_sent => env.counters.add(Counter::EarlyFpdus, 1),
            Role::Fenced => env.effects.event(Event::new(EventKind::FirstFpdu, env.qp.qid)),
            Role::Initiator | Role::Ready => {}
        }
    }
}
