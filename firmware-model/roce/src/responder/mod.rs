//! The responder of a reliable connection (§9.7.4 and §9.7.5 of the InfiniBand Architecture
//! Specification).
//!
//! A request that is the next one becomes a [`Step`], by which the caller executes it and says so.
//! Only then the responder expects the next packet: a step that is dropped leaves the packet
//! unreceived, and the peer sends it again.
//!
//! Answers leave in the order of requests: responses of Reads and atomic operations first, then a
//! negative acknowledgement or the acknowledgement of all that has arrived.

mod answers;

use crate::assembly::Assembly;
use crate::message::{MAX_MESSAGE_LEN, Mtu};
use answers::{Answer, Answers};
use urnic_wire::roce::{Aeth, AtomicEth, Credits, NakCode, Psn, Request, Response, Reth, Syndrome};

pub use crate::assembly::{End, Place, Target};
pub use answers::Packet;

/// Numbers of messages have 24 bits.
const MSN_MASK: u32 = 0xff_ffff;
/// Alignment of the operand of an atomic operation.
const ATOMIC_ALIGNMENT: u64 = 8;

/// The attributes of a receive queue, as `ibv_modify_qp` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Path MTU.
    pub mtu: Mtu,
    /// PSN of the first request.
    pub first_psn: Psn,
    /// Code of the time in RNR NAKs.
    pub min_rnr_timer: u8,
    /// Reads and atomic operations that wait for their answers at most.
    pub max_dest_rd_atomic: u8,
    /// Packets that are acknowledged together, when the peer does not request it earlier.
    pub ack_every: u32,
}

/// A request that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Packet sequence number.
    pub psn: Psn,
    /// Opcode and extended headers.
    pub request: Request,
    /// Bytes of payload.
    pub payload_len: usize,
    /// A of the header.
    pub ack_request: bool,
}

/// Why the caller does not execute a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No receive is posted. The peer sends the message again after a time.
    NotReady,
    /// The request is not valid here, such as a Send that is longer than the receive. It ends the
    /// connection, as do those below.
    Invalid,
    /// The key, the addresses or the rights of memory are wrong.
    Access,
    /// The responder cannot execute it, such as for an error in a receive.
    Operation,
}

/// Why the connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A request was malformed or not permitted.
    InvalidRequest,
    /// Access to memory was not permitted.
    Access,
    /// A request could not be executed.
    Operation,
}

/// What the caller does for a request.
#[derive(Debug)]
pub enum Step<'r> {
    /// Nothing: the packet is a duplicate, came too early, or ended the connection.
    Ignored,
    /// Places the payload of a Send or Write.
    Place(Placement<'r>),
    /// Checks that the peer may read.
    Read(ReadCheck<'r>),
    /// Executes an atomic operation.
    Atomic(Execution<'r>),
}

/// A packet of a Send or Write that is the next one.
#[derive(Debug)]
pub struct Placement<'r> {
    responder: &'r mut Responder,
    place: Place,
    after: Assembly,
    ack_request: bool,
}

/// A Read whose memory is to be checked. It is read when its responses leave.
#[derive(Debug)]
pub struct ReadCheck<'r> {
    responder: &'r mut Responder,
    psn: Psn,
    reth: Reth,
    is_duplicate: bool,
}

/// An atomic operation that is the next request.
#[derive(Debug)]
pub struct Execution<'r> {
    responder: &'r mut Responder,
    request: Request,
    operand: AtomicEth,
}

/// The receive queue of a reliable connection.
#[derive(Debug)]
pub struct Responder {
    attributes: Attributes,
    /// PSN of the next new request.
    expected: Psn,
    /// Messages completed.
    msn: u32,
    assembly: Assembly,
    answers: Answers,
    /// A negative acknowledgement to send after the answers.
    nak: Option<(Psn, Syndrome)>,
    /// The expected packet was asked for by a negative acknowledgement; no other one is sent until
    /// it arrives (§9.7.5.2).
    nak_sent: bool,
    ack_due: bool,
    /// Packets since the last acknowledgement.
    unacknowledged: u32,
    ended: Option<Fault>,
}

impl Responder {
    /// A receive queue in the state RTR.
    pub fn new(attributes: Attributes) -> Self {
        Self {
            attributes,
            expected: attributes.first_psn,
            msn: 0,
            assembly: Assembly::Idle,
            answers: Answers::new(attributes.max_dest_rd_atomic),
            nak: None,
            nak_sent: false,
            ack_due: false,
            unacknowledged: 0,
            ended: None,
        }
    }

    /// Takes a request; returns what the caller does.
    pub fn receive(&mut self, arrival: &Arrival) -> Step<'_> {
        if self.ended.is_some() {
            return Step::Ignored;
        }
        match arrival.psn.since(self.expected) {
            0 => {
                // It is here: nothing to ask for.
                (self.nak, self.nak_sent) = (None, false);
                self.execute(arrival)
            }
            1.. => {
                self.ask(Syndrome::Nak(NakCode::PsnSequenceError));
                Step::Ignored
            }
            _ => self.repeat(arrival),
        }
    }

    /// The next packet to send: none until something arrives. The caller reads the memory of the
    /// packet's payload, or calls [`refuse`](Self::refuse).
    pub fn transmit(&mut self) -> Option<Packet> {
        self.answer().or_else(|| self.acknowledge())
    }

    /// The next packet to send, as [`transmit`](Self::transmit) has it, but no acknowledgement of
    /// Sends and Writes.
    pub fn answer(&mut self) -> Option<Packet> {
        if let Some(packet) = self.answers.next(self.attributes.mtu) {
            return Some(packet);
        }
        let (psn, syndrome) = self.nak.take()?;
        // It acknowledges the packets before it.
        self.acknowledged();
        Some(self.acknowledgement(psn, syndrome))
    }

    /// The acknowledgement of Sends and Writes, if it is due and no answer is to be sent before.
    pub fn acknowledge(&mut self) -> Option<Packet> {
        if !self.owes_only_acknowledgement() {
            return None;
        }
        self.acknowledged();
        let last = self.expected.after(u32::MAX);
        Some(self.acknowledgement(last, Syndrome::Ack(Credits::INVALID)))
    }

    fn acknowledgement(&self, psn: Psn, syndrome: Syndrome) -> Packet {
        let msn = self.msn;
        Packet {
            psn,
            response: Response::Acknowledge(Aeth { syndrome, msn }),
            data: answers::NO_DATA,
            repeated: false,
        }
    }

    /// Ends the connection, because the memory of this response cannot be read. That of a repeated
    /// request is dropped: the peer may have the first one, and have revoked its key.
    pub fn refuse(&mut self, packet: &Packet, fault: Fault) {
        if packet.repeated {
            return self.answers.drop_repeated(packet.psn);
        }
        self.answers.clear();
        self.end(packet.psn, fault);
    }

    /// Whether [`answer`](Self::answer) has packets.
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty() || self.nak.is_some()
    }

    /// Whether [`acknowledge`](Self::acknowledge) has a packet.
    pub fn owes_only_acknowledgement(&self) -> bool {
        self.ack_due && !self.has_answers()
    }

    /// Packets that were executed since the last acknowledgement.
    pub fn unacknowledged(&self) -> u32 {
        self.unacknowledged
    }

    /// Why the connection has ended, if it has: no request is executed any more. The reason is sent
    /// to the peer by [`transmit`](Self::transmit).
    pub fn fault(&self) -> Option<Fault> {
        self.ended
    }

    /// PSN of the next new request.
    pub fn expected(&self) -> Psn {
        self.expected
    }

    /// The number of messages completed, 24 bits.
    pub fn msn(&self) -> u32 {
        self.msn
    }

    /// The next new request.
    fn execute(&mut self, arrival: &Arrival) -> Step<'_> {
        let mtu = self.attributes.mtu;
        match self.assembly.place(&arrival.request, arrival.payload_len, mtu) {
            Some(Ok((place, after))) => {
                return Step::Place(Placement {
                    responder: self,
                    place,
                    after,
                    ack_request: arrival.ack_request,
                });
            }
            Some(Err(_)) => {
                self.end(self.expected, Fault::InvalidRequest);
                return Step::Ignored;
            }
            None => {}
        }
        // Each Read and atomic operation takes one of the resources that the peer was told of.
        let has_place = self.assembly.is_idle() && arrival.payload_len == 0 && self.answers.make_room();
        match arrival.request {
            Request::Read(reth) if has_place && reth.length <= MAX_MESSAGE_LEN => Step::Read(ReadCheck {
                responder: self,
                psn: arrival.psn,
                reth,
                is_duplicate: false,
            }),
            Request::CompareSwap(operand) | Request::FetchAdd(operand)
                if has_place && operand.address.is_multiple_of(ATOMIC_ALIGNMENT) =>
            {
                Step::Atomic(Execution {
                    responder: self,
                    request: arrival.request,
                    operand,
                })
            }
            _ => {
                self.end(self.expected, Fault::InvalidRequest);
                Step::Ignored
            }
        }
    }

    /// A request that was executed before (§9.7.5.1). The peer sends all requests after it again.
    fn repeat(&mut self, arrival: &Arrival) -> Step<'_> {
        match arrival.request {
            Request::Read(reth) => {
                let packets = self.attributes.mtu.packets(reth.length);
                let is_known =
                    reth.length <= MAX_MESSAGE_LEN && arrival.psn.after(packets).since(self.expected) <= 0;
                if !is_known {
                    return Step::Ignored;
                }
                Step::Read(ReadCheck {
                    responder: self,
                    psn: arrival.psn,
                    reth,
                    is_duplicate: true,
                })
            }
            Request::CompareSwap(_) | Request::FetchAdd(_) => {
                self.answers.repeat_atomic(arrival.psn);
                self.acknowledged();
                Step::Ignored
            }
            _ => {
                self.ack_due = true;
                Step::Ignored
            }
        }
    }

    /// Asks once for the expected packet.
    fn ask(&mut self, syndrome: Syndrome) {
        if !self.nak_sent {
            self.nak_sent = true;
            self.nak = Some((self.expected, syndrome));
        }
    }

    fn end(&mut self, psn: Psn, fault: Fault) {
        let code = match fault {
            Fault::InvalidRequest => NakCode::InvalidRequest,
            Fault::Access => NakCode::RemoteAccessError,
            Fault::Operation => NakCode::RemoteOperationalError,
        };
        self.nak = Some((psn, Syndrome::Nak(code)));
        self.ended = Some(fault);
    }

    fn refuse_next(&mut self, refusal: Refusal) {
        let fault = match refusal {
            Refusal::NotReady => return self.ask(Syndrome::RnrNak(self.attributes.min_rnr_timer)),
            Refusal::Invalid => Fault::InvalidRequest,
            Refusal::Access => Fault::Access,
            Refusal::Operation => Fault::Operation,
        };
        self.end(self.expected, fault);
    }

    /// A packet that acknowledges all before it is about to be sent.
    fn acknowledged(&mut self) {
        (self.ack_due, self.unacknowledged) = (false, 0);
    }

    fn complete_message(&mut self) {
        self.msn = (self.msn + 1) & MSN_MASK;
    }
}

impl Placement<'_> {
    /// What to do.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The payload is placed, and the message completed if the packet ends it.
    pub fn done(self) {
        let responder = self.responder;
        responder.assembly = self.after;
        responder.expected = responder.expected.after(1);
        if self.place.end.is_some() {
            responder.complete_message();
        }
        responder.unacknowledged += 1;
        responder.ack_due |= self.ack_request || responder.unacknowledged >= responder.attributes.ack_every;
    }

    /// The packet is not executed.
    pub fn refuse(self, refusal: Refusal) {
        self.responder.refuse_next(refusal);
    }
}

impl ReadCheck<'_> {
    /// The memory to check. A Read of 0 bytes needs no rights.
    pub fn memory(&self) -> Reth {
        self.reth
    }

    /// The peer may read: the responses follow from [`Responder::transmit`].
    pub fn done(self) {
        let responder = self.responder;
        let packets = responder.attributes.mtu.packets(self.reth.length);
        if !self.is_duplicate {
            responder.expected = responder.expected.after(packets);
            responder.complete_message();
        }
        responder.answers.push(Answer::read(
            (self.psn, self.is_duplicate),
            self.reth,
            packets,
            responder.msn,
        ));
        responder.acknowledged();
    }

    /// The Read is not executed. A duplicate that is refused is dropped.
    pub fn refuse(self, refusal: Refusal) {
        if !self.is_duplicate {
            self.responder.refuse_next(refusal);
        }
    }
}

impl Execution<'_> {
    /// The operation: [`Request::CompareSwap`] or [`Request::FetchAdd`].
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The operands.
    pub fn operand(&self) -> &AtomicEth {
        &self.operand
    }

    /// The operation is executed; `original` is the value before it.
    pub fn done(self, original: u64) {
        let responder = self.responder;
        responder.complete_message();
        responder
            .answers
            .push_atomic(responder.expected, original, responder.msn);
        responder.expected = responder.expected.after(1);
        responder.acknowledged();
    }

    /// The operation is not executed.
    pub fn refuse(self, refusal: Refusal) {
        self.responder.refuse_next(refusal);
    }
}
