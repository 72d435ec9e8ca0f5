//! Messages as a peer sends them about a connection of an end, and forgeries of them.

use urnic_wire::mad::*;

use super::{End, Mad, Message, State, connect};

/// The kinds of messages; an MRA is about one of two.
pub(super) const KINDS: [&str; 8] = [
    "REQ",
    "MRA of REQ",
    "MRA of REP",
    "REJ",
    "REP",
    "RTU",
    "DREQ",
    "DREP",
];

/// A message with the numbers that the peer of a connection would use. A peer that has not told its
/// number uses 77.
pub(super) fn from_peer(end: &End, id: u32, kind: &str) -> Mad {
    let connection = end.connections.table.get(id).unwrap();
    let remote = connection.remote;
    let ids = CommIds {
        local: remote.map_or(77, |remote| remote.comm_id),
        remote: id,
    };
    let ca_guid = remote.map_or(7, |remote| remote.ca_guid);
    let receipt = |about| {
        Message::Receipt(ReceiptAck {
            ids,
            about,
            service_timeout: 24,
            private_data: [0; RECEIPT_PRIVATE_DATA],
        })
    };
    let message = match kind {
        "REQ" => Message::Connect(request(end, ids.local, ca_guid)),
        "MRA of REQ" => receipt(About::REQUEST),
        "MRA of REP" => receipt(About::REPLY),
        "REJ" => Message::Reject(ConnectReject {
            ids,
            about: About::OTHER,
            reason: RejectReason::CONSUMER,
            information: RejectInformation::NONE,
            private_data: [0; REJECT_PRIVATE_DATA],
        }),
        "REP" => Message::ConnectReply(ConnectReply {
            ids,
            qkey: 0,
            qpn: 0x77,
            eecn: 0,
            starting_psn: 5,
            responder_resources: 1,
            initiator_depth: 1,
            target_ack_delay: 15,
            failover_accepted: 0,
            flow_control: false,
            rnr_retry_count: 7,
            srq: false,
            ca_guid,
            private_data: [0; CONNECT_REPLY_PRIVATE_DATA],
        }),
        "RTU" => Message::Ready(ReadyToUse {
            ids,
            private_data: [0; READY_PRIVATE_DATA],
        }),
        "DREQ" => Message::Disconnect(DisconnectRequest {
            ids,
            remote_qpn: connection.qpn,
            private_data: [0; DISCONNECT_PRIVATE_DATA],
        }),
        "DREP" => Message::DisconnectReply(DisconnectReply {
            ids,
            private_data: [0; DISCONNECT_REPLY_PRIVATE_DATA],
        }),
        other => panic!("{other}"),
    };
    Mad {
        transaction_id: connection.transaction_id,
        message,
    }
}

/// A REQ of the end's peer.
fn request(end: &End, local_comm_id: u32, ca_guid: u64) -> ConnectRequest {
    let mut peer = End::new(super::settings(ca_guid), end.route.remote, end.route.local);
    let route = peer.route;
    peer.connections.connect(peer.now, route, &connect()).unwrap();
    peer.drain();
    ConnectRequest {
        local_comm_id,
        ..super::request_of(&peer.only())
    }
}

/// Changes one of the 32 bits of either number: the sender's first, then the recipient's.
pub(super) fn flip(mad: &mut Mad, bit: u32) {
    let ids = match &mut mad.message {
        Message::Connect(request) => {
            if bit < 32 {
                request.local_comm_id ^= 1 << bit;
            }
            return;
        }
        Message::Receipt(message) => &mut message.ids,
        Message::Reject(message) => &mut message.ids,
        Message::ConnectReply(message) => &mut message.ids,
        Message::Ready(message) => &mut message.ids,
        Message::Disconnect(message) => &mut message.ids,
        Message::DisconnectReply(message) => &mut message.ids,
        Message::Request(_) | Message::Reply(_) => return,
    };
    match bit {
        0..32 => ids.local ^= 1 << bit,
        _ => ids.remote ^= 1 << (bit - 32),
    }
}

/// Whether the message with a changed number is not one of the connection's peer. Before its REP
/// the peer has told no number, so that any is right; and a REQ names only the sender's.
pub(super) fn is_another(state: State, mad: &Mad, bit: u32) -> bool {
    match mad.message {
        Message::Connect(_) => bit < 32,
        _ => bit >= 32 || state != State::ReqSent,
    }
}
