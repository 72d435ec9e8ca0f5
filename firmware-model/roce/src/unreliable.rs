//! Both ends of an unreliable connection (§9.8.2 of the InfiniBand Architecture Specification): no
//! packet is acknowledged or sent again, and a message of which one is missing is dropped whole.

use crate::assembly::{Assembly, Place};
use crate::message::{Message, Mtu, PostError};
use std::collections::VecDeque;
use urnic_wire::roce::{Psn, Request, Transfer};

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// [`Message::id`].
    pub id: u64,
    /// Packet sequence number.
    pub psn: Psn,
    /// Opcode and extended headers.
    pub transfer: Transfer,
    /// Where the payload begins in the message.
    pub offset: u32,
    /// Bytes of payload.
    pub length: u32,
    /// SE of the header.
    pub solicited: bool,
    /// The message is complete when this packet is sent.
    pub is_last: bool,
}

/// The send queue of an unreliable connection.
#[derive(Debug)]
pub struct Sender {
    mtu: Mtu,
    psn: Psn,
    messages: VecDeque<(Message, u32)>,
    /// Index of the next packet of the first message.
    index: u32,
}

impl Sender {
    /// A send queue with room for `depth` messages from the beginning.
    pub fn new(mtu: Mtu, first_psn: Psn, depth: usize) -> Self {
        Self {
            mtu,
            psn: first_psn,
            messages: VecDeque::with_capacity(depth),
            index: 0,
        }
    }

    /// Queues a message. Fences have no effect: there are no Reads.
    ///
    /// # Errors
    /// [`PostError`]
    pub fn post(&mut self, message: Message) -> Result<(), PostError> {
        let packets = message.packets(self.mtu)?;
        match message.kind.transfer(message.length, 0, 1) {
            None => Err(PostError::NoResources),
            Some((_, Some(_))) => Err(PostError::Invalidate),
            Some((_, None)) => {
                self.messages.push_back((message, packets));
                Ok(())
            }
        }
    }

    /// Drops the messages that are not sent. The peer drops one of which packets were sent.
    pub fn flush(&mut self) {
        self.messages.clear();
        self.index = 0;
    }

    /// The next packet to send. With the last packet of a message, the message is complete.
    pub fn transmit(&mut self) -> Option<Packet> {
        let &(message, packets) = self.messages.front()?;
        let (transfer, _) = message.kind.transfer(message.length, self.index, packets)?;
        let (offset, length) = self.mtu.piece(message.length, self.index);
        let is_last = self.index + 1 == packets;
        let packet = Packet {
            id: message.id,
            psn: self.psn,
            transfer,
            offset,
            length,
            solicited: is_last && message.solicited && message.kind.takes_receive(),
            is_last,
        };
        self.psn = self.psn.after(1);
        self.index += 1;
        if is_last {
            self.messages.pop_front();
            self.index = 0;
        }
        Some(packet)
    }
}

/// The receive queue of an unreliable connection.
#[derive(Debug)]
pub struct Receiver {
    mtu: Mtu,
    expected: Psn,
    assembly: Assembly,
    /// A receive was taken for a Send that was dropped: the next message that needs one has it.
    has_receive: bool,
}

/// A packet that continues or begins a message. If it is dropped, so is its message, and a receive
/// that was taken for an earlier packet of it is used for the next one.
#[derive(Debug)]
pub struct Placement<'r> {
    receiver: &'r mut Receiver,
    place: Place,
    after: Assembly,
}

impl Receiver {
    /// A receive queue.
    pub fn new(mtu: Mtu, first_psn: Psn) -> Self {
        Self {
            mtu,
            expected: first_psn,
            assembly: Assembly::Idle,
            has_receive: false,
        }
    }

    /// Takes a packet; returns what the caller does, if the packet belongs to a message of which
    /// all packets have come so far.
    pub fn receive(&mut self, psn: Psn, transfer: Transfer, payload_len: usize) -> Option<Placement<'_>> {
        let begins = matches!(
            transfer,
            Transfer::SendFirst | Transfer::SendOnly(_) | Transfer::WriteFirst(_) | Transfer::WriteOnly(..)
        );
        if begins || psn != self.expected {
            self.abandon();
        }
        self.expected = psn.after(1);
        let before = std::mem::take(&mut self.assembly);
        let placed = before.place(&Request::Transfer(transfer), payload_len, self.mtu);
        let Some(Ok((mut place, after))) = placed else {
            self.assembly = before;
            self.abandon();
            return None;
        };
        place.takes_receive &= !self.has_receive;
        // Until the packet is done, its message is dropped and leaves the receive that it has.
        self.has_receive |= matches!(before, Assembly::Send(_));
        Some(Placement {
            receiver: self,
            place,
            after,
        })
    }

    /// Drops the message of which packets have arrived.
    fn abandon(&mut self) {
        if let Assembly::Send(_) = self.assembly {
            self.has_receive = true;
        }
        self.assembly = Assembly::Idle;
    }
}

impl Placement<'_> {
    /// What to do. A receive that an earlier message left is used without taking one.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The payload is placed, and the message completed if the packet ends it.
    pub fn done(self) {
        let receiver = self.receiver;
        receiver.assembly = self.after;
        if let Some(end) = self.place.end {
            receiver.has_receive &= !end.completes_receive;
        }
    }
}
