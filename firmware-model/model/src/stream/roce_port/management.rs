//! The member to which a management datagram goes: all of a host's are for queue pair 1.
//!
//! Members choose communication IDs and request IDs whose upper 16 bits are their native port, as
//! the numbers of their queue pairs. The messages that have no ID of the recipient name a service,
//! whose ID ends with the number that listeners reserve, a UDP port.

use super::members::Recipient;
use urnic_wire::mad::{self, MAD_LEN, Message};

/// BTH and DETH (InfiniBand Architecture Specification vol. 1, §9.2 and §9.3.2).
const HEADERS: usize = 12 + 8;

/// The member that a packet to queue pair 1 is for; `None` if the packet does not tell.
pub(super) fn recipient(packet: &[u8]) -> Option<Recipient> {
    let datagram = packet.get(HEADERS..HEADERS + MAD_LEN)?;
    let id = match mad::parse(datagram).ok()?.message {
        Message::Connect(request) => return Some(Recipient::of_service(request.service_id)),
        Message::Request(request) => return Some(Recipient::of_service(request.service_id)),
        Message::Reply(message) => message.request_id,
        message => message.ids()?.remote,
    };
    Recipient::member((id >> 16) as u16)
}
