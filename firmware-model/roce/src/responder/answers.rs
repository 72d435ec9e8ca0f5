//! The answers of Reads and atomic operations, in the order of their requests.

use crate::message::Mtu;
use std::collections::VecDeque;
use urnic_wire::roce::{Aeth, Credits, Psn, Response, Reth, Syndrome};

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Packet sequence number.
    pub psn: Psn,
    /// Opcode and extended headers.
    pub response: Response,
    /// The memory that is the payload; its length is 0 for other packets than those of a Read.
    pub data: Reth,
    /// The request was executed before.
    pub repeated: bool,
}

/// The memory of a packet without payload.
pub(super) const NO_DATA: Reth = Reth {
    address: 0,
    rkey: 0,
    length: 0,
};

/// The answer of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    first: Psn,
    msn: u32,
    /// The request was executed before.
    repeated: bool,
    content: Content,
}

#[derive(Clone, Copy, Debug)]
enum Content {
    Read {
        reth: Reth,
        /// Packets of the whole response.
        packets: u32,
        /// Index of the next packet.
        next: u32,
        /// Index after the last packet to send: the peer has requested what follows again.
        stop: u32,
    },
    Atomic {
        original: u64,
    },
}

impl Answer {
    pub(super) fn read((first, repeated): (Psn, bool), reth: Reth, packets: u32, msn: u32) -> Self {
        Self {
            first,
            msn,
            repeated,
            content: Content::Read {
                reth,
                packets,
                next: 0,
                stop: packets,
            },
        }
    }

    /// The next packet, and whether it is the last one to send.
    fn packet(&mut self, mtu: Mtu) -> (Packet, bool) {
        let aeth = Aeth {
            syndrome: Syndrome::Ack(Credits::INVALID),
            msn: self.msn,
        };
        match &mut self.content {
            Content::Atomic { original } => {
                let packet = Packet {
                    psn: self.first,
                    response: Response::AtomicAcknowledge(aeth, *original),
                    data: NO_DATA,
                    repeated: self.repeated,
                };
                (packet, true)
            }
            Content::Read {
                reth,
                packets,
                next,
                stop,
            } => {
                let (offset, length) = mtu.piece(reth.length, *next);
                let response = match (*next == 0, *next + 1 == *packets) {
                    (true, true) => Response::ReadOnly(aeth),
                    (true, false) => Response::ReadFirst(aeth),
                    (false, true) => Response::ReadLast(aeth),
                    (false, false) => Response::ReadMiddle,
                };
                let packet = Packet {
                    psn: self.first.after(*next),
                    response,
                    data: Reth {
                        address: reth.address.wrapping_add(offset.into()),
                        rkey: reth.rkey,
                        length,
                    },
                    repeated: self.repeated,
                };
                *next += 1;
                (packet, *next >= *stop)
            }
        }
    }

    fn has(&self, psn: Psn) -> bool {
        let packets = match self.content {
            Content::Read { packets, .. } => packets,
            Content::Atomic { .. } => 1,
        };
        let at = psn.since(self.first);
        at >= 0 && i64::from(at) < i64::from(packets)
    }

    /// Sends nothing from `psn` on; returns whether something is left.
    fn cut(&mut self, psn: Psn) -> bool {
        let before = u32::try_from(psn.since(self.first)).unwrap_or_default();
        match &mut self.content {
            Content::Atomic { .. } => before > 0,
            Content::Read { next, stop, .. } => {
                *stop = before.min(*stop);
                *next < *stop
            }
        }
    }
}

/// Results of atomic operations that were executed.
#[derive(Clone, Copy, Debug)]
struct Executed {
    psn: Psn,
    original: u64,
    msn: u32,
}

/// Answers that wait to be sent, and the results that a repeated atomic operation gets.
#[derive(Debug)]
pub(super) struct Answers {
    waiting: VecDeque<Answer>,
    executed: VecDeque<Executed>,
    most: usize,
}

impl Answers {
    pub(super) fn new(most: u8) -> Self {
        let most = most.into();
        Self {
            waiting: VecDeque::with_capacity(most),
            executed: VecDeque::with_capacity(most),
            most,
        }
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < self.most
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether there is room for the answer of a new request. A peer that sends one has the
    /// answers of those before it that it repeated: they give way.
    pub(super) fn make_room(&mut self) -> bool {
        if !self.has_room() {
            self.waiting.retain(|waiting| !waiting.repeated);
        }
        self.has_room()
    }

    /// Drops the answer of a repeated request that has this packet.
    pub(super) fn drop_repeated(&mut self, psn: Psn) {
        self.waiting
            .retain(|waiting| !(waiting.repeated && waiting.has(psn)));
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Adds the answer of a request. The peer has requested again what waits from its PSN on.
    pub(super) fn push(&mut self, answer: Answer) {
        self.waiting.retain_mut(|waiting| waiting.cut(answer.first));
        if self.has_room() {
            self.waiting.push_back(answer);
        }
    }

    pub(super) fn push_atomic(&mut self, psn: Psn, original: u64, msn: u32) {
        if self.executed.len() >= self.most {
            self.executed.pop_front();
        }
        let executed = Executed { psn, original, msn };
        self.executed.push_back(executed);
        self.answer(&executed, false);
    }

    /// Answers an atomic operation again, if its result is known.
    pub(super) fn repeat_atomic(&mut self, psn: Psn) {
        // The latest: PSNs repeat.
        let mut executed = self.executed.iter().rev();
        if let Some(executed) = executed.find(|executed| executed.psn == psn).copied() {
            self.answer(&executed, true);
        }
    }

    fn answer(&mut self, executed: &Executed, repeated: bool) {
        self.push(Answer {
            first: executed.psn,
            msn: executed.msn,
            repeated,
            content: Content::Atomic {
                original: executed.original,
            },
        });
    }

    /// The next packet to send.
    pub(super) fn next(&mut self, mtu: Mtu) -> Option<Packet> {
        let (packet, is_last) = self.waiting.front_mut()?.packet(mtu);
        if is_last {
            self.waiting.pop_front();
        }
        Some(packet)
    }
}
