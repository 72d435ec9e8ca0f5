//! The negotiation of RFC 6581 §9: Read depths and the choice of an RTR message.

use urnic_wire::mpa::startup::{EnhancedWord, MAX_DEPTH, NO_NEGOTIATION};

use super::terminate;
use urnic_config::RtrTypes;

/// Limits on RDMA Reads of one end. `None`: the ULP negotiates the limit, encoded as 0x3FFF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Depths {
    /// The number of inbound Reads handled at the same time.
    pub ird: Option<u16>,
    /// The number of outbound Reads outstanding at the same time.
    pub ord: Option<u16>,
}

/// The offer of one end in an enhanced start-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Initiator: the peer-to-peer model, in which a dedicated RTR message opens the responder's
    /// fence. A responder uses the model of its peer.
    pub peer_to_peer: bool,
    /// The requested depths.
    pub depths: Depths,
    /// Maximum number of inbound Reads if the peer requests more than this end offered.
    pub max_ird: u16,
}

/// A ready-to-receive message of length zero, invisible to the ULP (RFC 6581 §9.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rtr {
    /// RDMA Read Request.
    Read,
    /// RDMA Write.
    Write,
    /// Send.
    Send,
}

impl Rtr {
    fn is_in(self, word: EnhancedWord) -> bool {
        match self {
            Rtr::Read => word.rtr_read,
            Rtr::Write => word.rtr_write,
            Rtr::Send => word.rtr_send,
        }
    }

    fn is_of(self, types: RtrTypes) -> bool {
        match self {
            Rtr::Read => types.read,
            Rtr::Write => types.write,
            Rtr::Send => types.send,
        }
    }
}

/// Encodes a depth for the enhanced word.
fn encode_depth(depth: Option<u16>) -> u16 {
    depth.map_or(NO_NEGOTIATION, |n| n.min(MAX_DEPTH))
}

/// Decodes a depth of the peer's enhanced word; `None`: not to be negotiated.
fn decode_depth(field: u16) -> Option<u16> {
    (field != NO_NEGOTIATION).then_some(field)
}

/// The enhanced word of an initiator's Request.
pub(super) fn request(offer: &Offer, rtr: RtrTypes) -> EnhancedWord {
    let p2p = offer.peer_to_peer;
    EnhancedWord {
        peer_to_peer: p2p,
        rtr_send: p2p && rtr.send,
        rtr_write: p2p && rtr.write,
        rtr_read: p2p && rtr.read,
        ird: encode_depth(offer.depths.ird),
        ord: encode_depth(offer.depths.ord),
    }
}

/// A responder's answer to `request`: its word, its depths, and the RTR message that it expects.
///
/// Of several RTR messages exactly one is chosen, Read first: cxgb4 does not accept more than one.
/// If none matches, the answer nevertheless names an RTR message of this end, and the initiator
/// ends the connection (RFC 6581 §9.2).
pub(super) fn answer(
    request: EnhancedWord,
    own: Depths,
    rtr: RtrTypes,
) -> (EnhancedWord, Depths, Option<Rtr>) {
    let ours = [Rtr::Read, Rtr::Write, Rtr::Send]
        .into_iter()
        .filter(|r| r.is_of(rtr));
    let chosen = request
        .peer_to_peer
        .then(|| {
            ours.clone()
                .find(|r| r.is_in(request))
                .or_else(|| ours.clone().next())
        })
        .flatten();
    // The ORD of this end is at most the peer's IRD; the answer to "not to be negotiated" is the
    // same value, and changes nothing (RFC 6581 §9.1).
    let ord = match decode_depth(request.ird) {
        Some(limit) => Some(own.ord.unwrap_or(limit).min(limit)),
        None => own.ord,
    };
    // A Read as RTR message occupies a place even if the initiator reports that it reads nothing
    // else, as NFS clients do.
    let least = u16::from(chosen == Some(Rtr::Read));
    let ird = match decode_depth(request.ord) {
        Some(requested) => Some(own.ird.unwrap_or(requested).max(least).min(MAX_DEPTH)),
        None => own.ird,
    };
    let word = EnhancedWord {
        peer_to_peer: request.peer_to_peer,
        rtr_send: chosen == Some(Rtr::Send),
        rtr_write: chosen == Some(Rtr::Write),
        rtr_read: chosen == Some(Rtr::Read),
        ird: decode_depth(request.ord).and(ird).unwrap_or(NO_NEGOTIATION),
        ord: decode_depth(request.ird).and(ord).unwrap_or(NO_NEGOTIATION),
    };
    (word, Depths { ird, ord }, chosen)
}

/// The result of an accepting Reply at the initiator: its depths, the RTR message to send, or the
/// Terminate to send instead.
pub(super) fn conclude(
    offer: &Offer,
    reply: EnhancedWord,
    rtr: RtrTypes,
) -> (Depths, Option<Rtr>, Option<u32>) {
    let own = offer.depths;
    let ord = match (own.ord, decode_depth(reply.ird)) {
        (Some(requested), Some(limit)) => Some(requested.min(limit)),
        (unchanged, _) => unchanged,
    };
    let ird = match (own.ird, decode_depth(reply.ord)) {
        (Some(offered), Some(required)) => Some(offered.max(required)),
        (unchanged, _) => unchanged,
    };
    let chosen = (offer.peer_to_peer && reply.peer_to_peer)
        .then(|| {
            [Rtr::Write, Rtr::Read, Rtr::Send]
                .into_iter()
                .find(|r| r.is_of(rtr) && r.is_in(reply))
        })
        .flatten();
    let terminate = if ird.is_some_and(|ird| ird > offer.max_ird.max(own.ird.unwrap_or(0))) {
        Some(terminate::INSUFFICIENT_IRD)
    } else if offer.peer_to_peer && chosen.is_none() {
        Some(terminate::NO_MATCHING_RTR)
    } else {
        None
    };
    (
        Depths { ird, ord },
        chosen.filter(|_| terminate.is_none()),
        terminate,
    )
}
