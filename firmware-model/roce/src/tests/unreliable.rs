//! Rules of an unreliable connection.

use super::network::{Random, at};
use crate::message::{Kind, Message, Mtu, PostError};
use crate::unreliable::{Receiver, Sender};
use urnic_wire::roce::{Psn, Reth, Transfer};

const FIRST: Psn = Psn::MAX;
const MTU: usize = 256;

fn receiver() -> Receiver {
    Receiver::new(Mtu::Bytes256, FIRST)
}

/// Takes a packet and does what it says; returns whether a receive was taken, and the length of a
/// message that is complete.
fn take(receiver: &mut Receiver, index: u32, transfer: Transfer, len: usize) -> Option<(bool, Option<u32>)> {
    let placement = receiver.receive(FIRST.after(index), transfer, len)?;
    let place = *placement.place();
    placement.done();
    Some((place.takes_receive, place.end.map(|end| end.length)))
}

#[test]
fn a_missing_packet_drops_its_message_only() {
    let mut receiver = receiver();
    assert_eq!(
        take(&mut receiver, 0, Transfer::SendFirst, MTU),
        Some((true, None))
    );
    // Packet 1 is missing: what follows of the message is dropped, and it keeps the receive.
    assert_eq!(take(&mut receiver, 2, Transfer::SendMiddle, MTU), None);
    assert_eq!(take(&mut receiver, 3, Transfer::SendLast(None), 5), None);
    assert_eq!(
        take(&mut receiver, 4, Transfer::SendOnly(None), 6),
        Some((false, Some(6)))
    );
    assert_eq!(
        take(&mut receiver, 5, Transfer::SendOnly(None), 7),
        Some((true, Some(7)))
    );
}

#[test]
fn a_first_packet_within_a_message_drops_the_message() {
    let mut receiver = receiver();
    assert_eq!(
        take(&mut receiver, 0, Transfer::SendFirst, MTU),
        Some((true, None))
    );
    assert_eq!(
        take(&mut receiver, 1, Transfer::SendFirst, MTU),
        Some((false, None))
    );
    assert_eq!(
        take(&mut receiver, 2, Transfer::SendLast(None), 5),
        Some((false, Some(MTU as u32 + 5)))
    );
    let reth = Reth {
        address: at(0).address,
        rkey: 1,
        length: 5,
    };
    let write = Transfer::WriteOnly(reth, Some([0; 4]));
    assert_eq!(take(&mut receiver, 3, write, 5), Some((true, Some(5))));
    // Of a wrong length.
    assert_eq!(take(&mut receiver, 4, write, 4), None);
    assert_eq!(take(&mut receiver, 5, write, 5), Some((true, Some(5))));
}

#[test]
fn a_message_that_is_refused_is_dropped_whole() {
    let mut receiver = receiver();
    assert!(receiver.receive(FIRST, Transfer::SendFirst, MTU).is_some());
    assert_eq!(take(&mut receiver, 1, Transfer::SendLast(None), 5), None);
    assert_eq!(
        take(&mut receiver, 2, Transfer::SendFirst, MTU),
        Some((true, None))
    );
    assert!(
        receiver
            .receive(FIRST.after(3), Transfer::SendMiddle, MTU)
            .is_some()
    );
    assert_eq!(take(&mut receiver, 4, Transfer::SendLast(None), 5), None);
    assert_eq!(
        take(&mut receiver, 5, Transfer::SendOnly(None), 5),
        Some((false, Some(5)))
    );
}

#[test]
fn an_unreliable_sender_sends_each_packet_once() {
    let mut sender = Sender::new(Mtu::Bytes256, FIRST, 4);
    let message = |id, kind, length| Message {
        id,
        kind,
        length,
        solicited: true,
        fence: false,
    };
    assert_eq!(
        sender.post(message(0, Kind::Read(at(0)), 5)),
        Err(PostError::NoResources)
    );
    assert_eq!(
        sender.post(message(0, Kind::SendInvalidate(1), 5)),
        Err(PostError::Invalidate)
    );
    sender.post(message(1, Kind::Send, 300)).unwrap();
    sender.post(message(2, Kind::Send, 0)).unwrap();
    let packets: Vec<_> = std::iter::from_fn(|| sender.transmit()).collect();
    let found: Vec<_> = packets
        .iter()
        .map(|it| {
            (
                it.id,
                it.psn.since(FIRST),
                it.transfer,
                it.offset,
                it.length,
                it.is_last,
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            (1, 0, Transfer::SendFirst, 0, 256, false),
            (1, 1, Transfer::SendLast(None), 256, 44, true),
            (2, 2, Transfer::SendOnly(None), 0, 0, true),
        ]
    );
    assert_eq!(
        packets.iter().map(|it| it.solicited).collect::<Vec<_>>(),
        [false, true, true]
    );
}

/// A network that loses packets: messages arrive whole or not at all, and in order.
#[test]
fn whole_messages_arrive() {
    let mut random = Random(3);
    let mut sender = Sender::new(Mtu::Bytes256, FIRST, 4);
    let mut receiver = receiver();
    let (mut arrived, mut current) = (Vec::new(), Vec::new());
    for id in 0..2000 {
        let message = Message {
            id,
            kind: Kind::Send,
            length: random.below(4 * MTU as u64) as u32,
            solicited: false,
            fence: false,
        };
        sender.post(message).unwrap();
        while let Some(packet) = sender.transmit() {
            if random.percent(10) {
                continue;
            }
            let Some(placement) = receiver.receive(packet.psn, packet.transfer, packet.length as usize)
            else {
                continue;
            };
            if packet.offset == 0 {
                current.clear();
            }
            current.push((packet.id, packet.offset));
            if placement.place().end.is_some() {
                assert!(current.iter().all(|(of, _)| *of == id), "packets of one message");
                let offsets: Vec<_> = current.iter().map(|(_, offset)| *offset as usize).collect();
                assert!(offsets.iter().enumerate().all(|(n, offset)| *offset == n * MTU));
                arrived.push(id);
            }
            placement.done();
        }
    }
    assert!(arrived.is_sorted() && arrived.len() > 1000 && arrived.len() < 2000);
}
