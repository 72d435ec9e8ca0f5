//! Tests of MPA start-up, named by the rows of the conformance list. They use no socket and no
//! clock.

mod enhanced;
mod revision_1;
mod rtr_frame;

use std::collections::HashMap;
use std::time::Duration;

use urnic_config::RtrTypes;
use urnic_wire::mpa::startup::{EnhancedWord, FrameKind, RtrKey, StartupFlags, StartupFrame};

use super::frame::frame;
use super::*;

pub(crate) const START: Time = Duration::from_secs(1000);
const NO_RTR: RtrTypes = RtrTypes {
    send: false,
    write: false,
    read: false,
};
const READ: RtrTypes = RtrTypes { read: true, ..NO_RTR };
const WRITE: RtrTypes = RtrTypes {
    write: true,
    ..NO_RTR
};
const SEND: RtrTypes = RtrTypes { send: true, ..NO_RTR };
const READ_WRITE: RtrTypes = RtrTypes { read: true, ..WRITE };
const ALL_RTR: RtrTypes = RtrTypes {
    send: true,
    write: true,
    read: true,
};

/// The default settings, with Read and Write as RTR.
pub(crate) fn settings() -> Settings {
    Settings {
        rtr: READ_WRITE,
        ..Settings::from(&urnic_config::Config::default().mpa)
    }
}

pub(crate) fn depths(ird: u16, ord: u16) -> Depths {
    Depths {
        ird: Some(ird),
        ord: Some(ord),
    }
}

pub(crate) fn offer(ird: u16, ord: u16) -> Offer {
    Offer {
        peer_to_peer: true,
        depths: depths(ird, ord),
        max_ird: 128,
    }
}

/// The bytes of the test vector `name`.
fn vector(name: &str) -> Vec<u8> {
    let all: HashMap<String, String> =
        serde_json::from_str(include_str!("../../../../../wire/tests/vectors.json")).unwrap();
    let hex = &all[name];
    (0..hex.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
        .collect()
}

/// The bytes of a frame, with an enhanced word if `word` is set.
fn bytes(
    kind: FrameKind,
    revision: u8,
    flags: StartupFlags,
    word: Option<EnhancedWord>,
    data: &[u8],
) -> Vec<u8> {
    frame(&StartupFrame {
        kind,
        flags,
        revision,
        word,
        private_data: data,
    })
    .unwrap()
}

fn word(bits: u32) -> EnhancedWord {
    EnhancedWord::parse(bits.to_be_bytes())
}

fn bits(word: EnhancedWord) -> u32 {
    u32::from_be_bytes(word.to_bytes())
}

/// A responder that has received `request`.
fn with_request(settings: Settings, request: &[u8]) -> Responder {
    let mut responder = Responder::new(settings, START);
    assert_eq!(
        responder.receive(request),
        Ok((request.len(), Some(ResponderEvent::Request)))
    );
    responder
}

/// An enhanced Request of revision 2 with this word.
fn enhanced_request(bits: u32) -> Vec<u8> {
    bytes(
        FrameKind::Request,
        2,
        StartupFlags {
            crc: true,
            ..StartupFlags::default()
        },
        Some(word(bits)),
        &[],
    )
}

fn enhanced_reply(bits: u32) -> Vec<u8> {
    bytes(
        FrameKind::Reply,
        2,
        StartupFlags {
            crc: true,
            ..StartupFlags::default()
        },
        Some(word(bits)),
        &[],
    )
}

/// A responder's result for a Request with the word `request`: the word of its Reply, and the
/// negotiated parameters.
fn answer(settings: Settings, own: Depths, request: u32) -> (u32, Negotiated) {
    let mut responder = with_request(settings, &enhanced_request(request));
    let reply = responder.accept(own, &[], START).unwrap();
    let (frame, rest) = StartupFrame::parse(&reply.bytes).unwrap();
    assert!(rest.is_empty());
    assert_eq!(
        (frame.kind, frame.revision, frame.flags.reject),
        (FrameKind::Reply, 2, false)
    );
    (bits(frame.word.unwrap()), reply.negotiated.unwrap())
}

/// An initiator that has sent its Request.
fn new_initiator(settings: Settings, offer: Option<Offer>) -> Initiator {
    Initiator::new(settings, offer, &[], START).unwrap().0
}

fn accepted(initiator: &mut Initiator, reply: &[u8]) -> Accepted {
    match initiator.receive(reply) {
        Ok((taken, Some(Answer::Accepted(accepted)))) => {
            assert_eq!(taken, reply.len());
            accepted
        }
        other => panic!("not accepted: {other:?}"),
    }
}

/// Runs an accepted start-up between two state machines, whose bytes arrive in pieces of `piece`.
fn run(
    initiator: (Settings, Option<Offer>, &[u8]),
    responder: (Settings, Depths, &[u8]),
    piece: usize,
) -> (Accepted, Negotiated, Request) {
    let (mut sender, request) = Initiator::new(initiator.0, initiator.1, initiator.2, START).unwrap();
    let mut receiver = Responder::new(responder.0, START);
    feed(&request, piece, |bytes| receiver.receive(bytes).unwrap().0);
    let received = receiver.request().unwrap().clone();
    let reply = receiver.accept(responder.1, responder.2, START).unwrap();
    let mut answer = None;
    feed(&reply.bytes, piece, |bytes| {
        let (taken, received) = sender.receive(bytes).unwrap();
        answer = received;
        taken
    });
    match answer {
        Some(Answer::Accepted(accepted)) => (accepted, reply.negotiated.unwrap(), received),
        other => panic!("not accepted: {other:?}"),
    }
}

fn feed(mut bytes: &[u8], piece: usize, mut take: impl FnMut(&[u8]) -> usize) {
    while !bytes.is_empty() {
        let now = piece.min(bytes.len());
        let taken = take(&bytes[..now]);
        assert_eq!(taken, now);
        bytes = &bytes[now..];
    }
}
