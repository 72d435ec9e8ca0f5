//! The machines of a queue pair, by its kind: RC or UC.

use crate::time::Nanos;
use urnic_device::vocabulary::WcStatus;
use urnic_roce::message::{Message, PostError};
use urnic_roce::requester::{Packet, Requester, Status};
use urnic_roce::responder::Responder;
use urnic_roce::unreliable::{self, Receiver, Sender};
use urnic_wire::roce::{Body, Header, Transfer};

/// The machine that sends requests.
#[derive(Debug)]
pub(super) enum Sending {
    Reliable(Box<Requester>),
    Unreliable {
        sender: Box<Sender>,
        /// Messages of which all packets were made, and which are not complete.
        made: usize,
        /// The message after them was refused.
        refused: bool,
    },
}

/// The machine that takes requests.
#[derive(Debug)]
pub(super) enum Taking {
    Reliable(Box<Responder>),
    Unreliable(Box<Receiver>, Dropping),
}

/// Counts the messages of kind UC that are dropped, each once.
#[derive(Debug, Default)]
pub(super) struct Dropping {
    /// A message has arrived in part.
    is_within: bool,
    /// The message of which packets arrive is counted.
    is_counted: bool,
}

impl Dropping {
    /// A packet arrives. Returns whether a message has lost its end.
    pub(super) fn lost(&mut self, transfer: &Transfer) -> bool {
        let begins = matches!(
            transfer,
            Transfer::SendFirst | Transfer::SendOnly(_) | Transfer::WriteFirst(_) | Transfer::WriteOnly(..)
        );
        begins && std::mem::take(self).is_within
    }

    /// The packet was placed.
    pub(super) fn placed(&mut self, is_last: bool) {
        self.is_within = !is_last;
    }

    /// The packet was dropped. Returns whether its message is to be counted.
    pub(super) fn dropped(&mut self, transfer: &Transfer) -> bool {
        // The first packet of the message that follows may be lost.
        let ends = matches!(
            transfer,
            Transfer::SendLast(_) | Transfer::SendOnly(_) | Transfer::WriteLast(_) | Transfer::WriteOnly(..)
        );
        self.is_within = false;
        !std::mem::replace(&mut self.is_counted, !ends)
    }
}

/// A packet of a request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Outbound {
    Reliable(Packet),
    Unreliable(unreliable::Packet),
}

impl Outbound {
    /// The header of the packet to the queue pair `qpn`.
    pub(super) fn header(&self, qpn: u32) -> Header {
        match self {
            Outbound::Reliable(packet) => Header {
                solicited: packet.solicited,
                ack_request: packet.ack_request,
                ..Header::new(qpn, packet.psn, Body::Request(packet.request))
            },
            Outbound::Unreliable(packet) => Header {
                solicited: packet.solicited,
                ..Header::new(qpn, packet.psn, Body::Unreliable(packet.transfer))
            },
        }
    }

    /// The message, and the place of the payload in it: offset and length.
    pub(super) fn payload(&self) -> (u64, u32, u32) {
        match self {
            Outbound::Reliable(packet) => (packet.id, packet.offset, packet.length),
            Outbound::Unreliable(packet) => (packet.id, packet.offset, packet.length),
        }
    }
}

impl Sending {
    pub(super) fn unreliable(sender: Sender) -> Sending {
        Sending::Unreliable {
            sender: Box::new(sender),
            made: 0,
            refused: false,
        }
    }

    pub(super) fn post(&mut self, message: Message) -> Result<(), PostError> {
        match self {
            Sending::Reliable(requester) => requester.post(message),
            Sending::Unreliable { sender, .. } => sender.post(message),
        }
    }

    pub(super) fn transmit(&mut self, now: Nanos) -> Option<Outbound> {
        match self {
            Sending::Reliable(requester) => requester.transmit(now.0).map(Outbound::Reliable),
            Sending::Unreliable { refused: true, .. } => None,
            Sending::Unreliable { sender, .. } => sender.transmit().map(Outbound::Unreliable),
        }
    }

    /// The payload of a packet was gathered, or could not be: then its message fails.
    pub(super) fn gathered(&mut self, packet: &Outbound, is_there: bool) {
        match (self, packet) {
            (Sending::Unreliable { made, refused, .. }, Outbound::Unreliable(packet)) => {
                *refused |= !is_there;
                *made += usize::from(is_there && packet.is_last);
            }
            (sending, _) if !is_there => sending.refuse(packet.payload().0),
            _ => {}
        }
    }

    pub(super) fn refuse(&mut self, id: u64) {
        if let Sending::Reliable(requester) = self {
            requester.refuse(id);
        }
    }

    /// The status of the oldest message, if it has ended. One of kind UC ends when it is sent.
    pub(super) fn poll(&mut self) -> Option<WcStatus> {
        match self {
            Sending::Reliable(requester) => requester.poll().map(|ended| status_of(ended.status)),
            Sending::Unreliable { made, refused, .. } => match (*made, *refused) {
                (0, false) => None,
                (0, true) => Some(WcStatus::LocProtErr),
                (left, _) => {
                    *made = left - 1;
                    Some(WcStatus::Success)
                }
            },
        }
    }

    /// The machine of a queue pair whose requests were flushed: that of kind UC goes on.
    pub(super) fn flushed(self) -> Option<Sending> {
        match self {
            Sending::Reliable(_) => None,
            Sending::Unreliable { mut sender, .. } => {
                sender.flush();
                Some(Sending::unreliable(*sender))
            }
        }
    }

    /// The machine of kind RC.
    pub(super) fn reliable(&mut self) -> Option<&mut Requester> {
        match self {
            Sending::Reliable(requester) => Some(requester),
            Sending::Unreliable { .. } => None,
        }
    }

    /// Whether [`transmit`](Self::transmit) has no packet until something arrives or is posted.
    pub(super) fn is_waiting(&self) -> bool {
        match self {
            Sending::Reliable(requester) => requester.is_waiting(),
            // A run that leaves packets requests another one.
            Sending::Unreliable { .. } => true,
        }
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        match self {
            Sending::Reliable(requester) => requester.deadline().map(Nanos),
            Sending::Unreliable { .. } => None,
        }
    }
}

impl Taking {
    /// The machine of kind RC.
    pub(super) fn reliable(&self) -> Option<&Responder> {
        match self {
            Taking::Reliable(responder) => Some(responder),
            Taking::Unreliable(..) => None,
        }
    }

    /// The same.
    pub(super) fn reliable_mut(&mut self) -> Option<&mut Responder> {
        match self {
            Taking::Reliable(responder) => Some(responder),
            Taking::Unreliable(..) => None,
        }
    }
}

fn status_of(status: Status) -> WcStatus {
    match status {
        Status::Success => WcStatus::Success,
        Status::RetryExceeded => WcStatus::RetryExcErr,
        Status::RnrRetryExceeded => WcStatus::RnrRetryExcErr,
        Status::RemoteInvalidRequest => WcStatus::RemInvReqErr,
        Status::RemoteAccess => WcStatus::RemAccessErr,
        Status::RemoteOperation => WcStatus::RemOpErr,
        Status::BadResponse => WcStatus::BadRespErr,
        Status::Local => WcStatus::LocProtErr,
        Status::Flushed => WcStatus::WrFlushErr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The packets of two messages that are dropped, the First of the second lost.
    #[test]
    fn a_dropped_message_counts_also_if_its_first_packet_is_lost() {
        let mut dropping = Dropping::default();
        let packets = [
            (Transfer::SendFirst, true),
            (Transfer::SendMiddle, false),
            (Transfer::SendLast(None), false),
            (Transfer::SendMiddle, true),
            (Transfer::SendLast(None), false),
            (Transfer::SendOnly(None), true),
            (Transfer::WriteMiddle, true),
            (Transfer::WriteLast(None), false),
            (Transfer::WriteLast(None), true),
        ];
        for (number, (transfer, counts)) in packets.into_iter().enumerate() {
            assert!(!dropping.lost(&transfer), "{number}");
            assert_eq!(dropping.dropped(&transfer), counts, "{number}");
        }
    }
}
