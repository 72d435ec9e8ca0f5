//! The negotiated parameters: the settings of one end, the negotiation of RFC 6581 §9 (Read depths
//! and the choice of an RTR message), and the result.

use std::time::Duration;

use urnic_wire::ddp::UNTAGGED_LEN;
use urnic_wire::mpa::fpdu::{self, CrcMode, fpdu_len};
use urnic_wire::mpa::marker::{self, marked_len};
use urnic_wire::mpa::startup::{
    EnhancedWord, MAX_DEPTH, MAX_PRIVATE_DATA, NO_NEGOTIATION, RtrKey, StartupHeader, WORD_LEN,
};

use super::frame::Fault;
use urnic_wire::rdmap::Terminate;

use urnic_config::{Llp, Mpa, RtrTypes};

/// The time since an arbitrary epoch; the owner of a stream provides it.
pub type Time = Duration;

/// The settings of an end for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Request CRCs. The request of one side binds both (RFC 5044 §7.1.1).
    pub crc: bool,
    /// Request markers in the bytes that this end receives (RFC 5044 §4.3).
    pub markers: bool,
    /// The highest supported revision, 1 or 2. With 1 there is no enhanced start-up.
    pub revision: u8,
    /// RTR messages that this end can send and receive; at least one (RFC 6581 §9.2).
    pub rtr: RtrTypes,
    /// The RTR frame proposed in 2007: the spelling of the key that this end sends, or `None`:
    /// disabled. Use it only for peers that support it, since soft-iWARP echoes flags that it does
    /// not support. Revision 2 takes precedence.
    pub rtr_frame: Option<RtrKey>,
    /// This end accepts one inbound Read more than it negotiates, so a Read as RTR message needs no
    /// place.
    pub spare_read: bool,
    /// Maximum private data of the peer, without the enhanced word.
    pub max_private_data: usize,
    /// The time that an initiator allows for the whole exchange.
    pub initiator_timeout: Duration,
    /// The time that a responder waits for the Request.
    pub responder_timeout: Duration,
    /// The time that a responder waits for the first FPDU after its Reply.
    pub rtr_timeout: Duration,
}

impl Settings {
    /// Refuses a frame with more private data than the ULP can take.
    ///
    /// # Errors
    /// [`Fault::PrivateData`].
    pub(super) fn check_private_data(&self, header: StartupHeader) -> Result<(), Fault> {
        let word = if header.has_word() { WORD_LEN } else { 0 };
        let len = header.private_data_len.saturating_sub(word);
        match len > self.max_private_data {
            true => Err(Fault::PrivateData(len)),
            false => Ok(()),
        }
    }
}

impl From<&Mpa> for Settings {
    fn from(mpa: &Mpa) -> Settings {
        Settings {
            crc: mpa.crc,
            markers: mpa.markers,
            revision: mpa.revision,
            rtr: mpa.rtr_types,
            rtr_frame: None,
            spare_read: false,
            max_private_data: MAX_PRIVATE_DATA,
            initiator_timeout: mpa.startup_timeout_initiator,
            responder_timeout: mpa.startup_timeout_responder,
            rtr_timeout: mpa.rtr_timeout,
        }
    }
}

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

/// The parameters that both ends agreed on: the arguments of attaching the stream to a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// The lower layer.
    pub llp: Llp,
    /// This end sent the Request.
    pub initiator: bool,
    /// The negotiated revision.
    pub revision: u8,
    /// CRCs are generated and checked in both directions.
    pub crc: bool,
    /// The peer requires markers in the bytes that this end sends.
    pub markers_tx: bool,
    /// Markers are in the bytes that this end receives.
    pub markers_rx: bool,
    /// The limits on Reads of this end.
    pub depths: Depths,
    /// The RTR message: sent before anything else (initiator), or expected (responder).
    pub rtr: Option<Rtr>,
    /// Nothing may be sent before the first FPDU arrives: for responders, unless they received an
    /// RTR frame (RFC 5044 §7.1.2(4)).
    pub fenced: bool,
    /// The control word of the Terminate to send instead of starting (RFC 6581 §9; RFC 5040 §4.8).
    pub terminate: Option<u32>,
}

impl Negotiated {
    /// The parameters of a DDP stream session, which has neither CRCs, markers nor a fence. An
    /// enhanced one corresponds to revision 2 of MPA.
    pub(crate) fn of_session(initiator: bool, enhanced: bool) -> Negotiated {
        Negotiated {
            llp: Llp::Sctp,
            initiator,
            revision: if enhanced { 2 } else { 1 },
            crc: false,
            markers_tx: false,
            markers_rx: false,
            depths: Depths::default(),
            rtr: None,
            fenced: false,
            terminate: None,
        }
    }

    /// The FPDU of a Terminate with this control word, for an initiator whose queue pair cannot be
    /// attached. No other FPDU is sent. `None` over SCTP, where only an attached stream sends
    /// segments.
    pub fn terminate_frame(&self, control: u32) -> Option<Vec<u8>> {
        if self.llp == Llp::Sctp {
            return None;
        }
        let mut ulpdu = [0; UNTAGGED_LEN + 4];
        Terminate::header().emit(&mut ulpdu);
        if let Some(payload) = ulpdu.last_chunk_mut() {
            *payload = control.to_be_bytes();
        }
        let crc = if self.crc { CrcMode::On } else { CrcMode::Off };
        let plain = fpdu_len(ulpdu.len());
        let mut bytes = vec![
            0;
            if self.markers_tx {
                marked_len(0, plain)
            } else {
                plain
            }
        ];
        if self.markers_tx {
            marker::emit(0, &ulpdu, crc, &mut bytes);
        } else {
            fpdu::emit(&ulpdu, crc, &mut bytes);
        }
        Some(bytes)
    }
}

/// Control words of the Terminates of RFC 6581 §8: layer 2 (LLP), error type 0.
pub mod terminate {
    /// An error of this end that has no specific code.
    pub const LOCAL: u32 = 0x2005_0000;
    /// This end cannot hold as many inbound Reads as the responder requests.
    pub const INSUFFICIENT_IRD: u32 = 0x2006_0000;
    /// None of the responder's RTR messages can be sent by this end.
    pub const NO_MATCHING_RTR: u32 = 0x2007_0000;
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
pub(crate) fn request(offer: &Offer, rtr: RtrTypes) -> EnhancedWord {
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
pub(crate) fn answer(
    request: EnhancedWord,
    own: Depths,
    settings: &Settings,
) -> (EnhancedWord, Depths, Option<Rtr>) {
    let ours = [Rtr::Read, Rtr::Write, Rtr::Send]
        .into_iter()
        .filter(|r| r.is_of(settings.rtr));
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
    // A Read as RTR message occupies a place even if the initiator declares that it sends no other
    // Read, as NFS clients do.
    let least = u16::from(chosen == Some(Rtr::Read) && !settings.spare_read);
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
pub(crate) fn conclude(
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
