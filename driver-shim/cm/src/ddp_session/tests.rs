//! Tests of DDP stream sessions: the legal sequences of RFC 5043 §6 and RFC 6581 §7, and what ends
//! in a Terminate. They use no association and no clock.

use proptest::prelude::*;
use urnic_wire::mpa::startup::{EnhancedWord, NO_NEGOTIATION};
use urnic_wire::sctp::session::{Function, MAX_MESSAGE_LEN, SessionError, SessionMessage};

use super::message::bytes_of;
use super::*;
use crate::mpa_startup::tests::{self, START, depths, settings};
use crate::mpa_startup::{Answer, Depths, Negotiated, Offer, Rtr, Settings, terminate as words};

const TERMINATE: [u8; 2] = [0, 4];

/// The client-server model, which needs no RTR: either end may send first.
fn offer(ird: u16, ord: u16) -> Offer {
    Offer {
        peer_to_peer: false,
        ..tests::offer(ird, ord)
    }
}

fn active(offer: Option<Offer>, data: &[u8]) -> (Active, Vec<u8>) {
    Active::new(settings(), offer, data, START).expect("the data fits")
}

fn passive() -> Passive {
    Passive::new(settings(), START)
}

fn parsed(bytes: &[u8]) -> SessionMessage<'_> {
    SessionMessage::parse(bytes).expect("a message of ours")
}

fn bytes(message: SessionMessage<'_>) -> Vec<u8> {
    bytes_of(&message).expect("it fits")
}

/// Both ends' results of a session that the passive end accepts with these depths.
fn accepted(offered: Option<Offer>, own: Depths) -> (Negotiated, Negotiated) {
    let (active, initiate) = active(offered, b"question");
    let mut passive = passive();
    passive.receive(&initiate).expect("an Initiate");
    assert_eq!(passive.request().expect("a request").private_data, b"question");
    let (accept, theirs) = passive.accept(own, b"answer").unwrap().expect("a request");
    let Ok(Answer::Accepted(ours)) = active.receive(&accept) else {
        panic!("not accepted: {}", parsed(&accept));
    };
    assert_eq!(ours.private_data, b"answer");
    assert_eq!((ours.rtr_frame, passive.request()), (None, None));
    (ours.negotiated, theirs)
}

#[test]
fn sctp_06_and_15_an_accepted_session_has_no_fence() {
    let (ours, theirs) = accepted(None, depths(4, 4));
    assert_eq!(ours, Negotiated::of_session(true, false));
    assert_eq!(theirs, Negotiated::of_session(false, false));
    assert!(!theirs.fenced && theirs.rtr.is_none());
}

#[test]
fn sctp_05_an_enhanced_session_agrees_on_depths() {
    let (ours, theirs) = accepted(Some(offer(16, 8)), depths(4, 32));
    assert_eq!((ours.depths, theirs.depths), (depths(16, 4), depths(4, 16)));
    assert_eq!((ours.revision, theirs.revision), (2, 2));
    assert!(!theirs.fenced && ours.rtr.is_none() && theirs.rtr.is_none());
}

#[test]
fn sctp_06_peer_to_peer_gets_an_indication_and_no_fence() {
    let peer_to_peer = Offer {
        peer_to_peer: true,
        ..offer(16, 8)
    };
    let (ours, theirs) = accepted(Some(peer_to_peer), depths(8, 8));
    assert_eq!((ours.rtr, theirs.rtr), (Some(Rtr::Read), Some(Rtr::Read)));
    assert!(!theirs.fenced);
}

#[test]
fn depths_that_are_not_negotiated_stay() {
    let unlimited = Offer {
        depths: Depths::default(),
        ..offer(0, 0)
    };
    let (_, initiate) = active(Some(unlimited), b"");
    assert_eq!(
        parsed(&initiate).word.map(|w| (w.ird, w.ord)),
        Some((NO_NEGOTIATION, NO_NEGOTIATION))
    );
    let (ours, theirs) = accepted(Some(unlimited), depths(3, 5));
    assert_eq!((ours.depths, theirs.depths), (Depths::default(), depths(3, 5)));
}

#[test]
fn an_accept_that_demands_too_much_is_answered_by_an_rdmap_terminate() {
    let (active, _) = active(Some(offer(1, 1)), b"");
    let word = EnhancedWord {
        ird: 1,
        ord: 129,
        ..EnhancedWord::default()
    };
    let accept = bytes(SessionMessage::new(Function::Accept, Some(word), b""));
    let Ok(Answer::Accepted(accepted)) = active.receive(&accept) else {
        panic!("not accepted");
    };
    assert_eq!(accepted.negotiated.terminate, Some(words::INSUFFICIENT_IRD));
}

#[test]
fn sctp_19_and_33_a_program_rejects_in_the_initiates_form() {
    for offered in [None, Some(offer(1, 1))] {
        let (active, initiate) = active(offered, b"");
        let mut passive = passive();
        passive.receive(&initiate).expect("an Initiate");
        let reject = passive.reject(b"busy").unwrap().expect("a request");
        assert_eq!(
            parsed(&reject),
            SessionMessage::reject(offered.is_some(), b"busy")
        );
        let Ok(Answer::Rejected(rejected)) = active.receive(&reject) else {
            panic!("not rejected");
        };
        assert_eq!((rejected.private_data, rejected.word), (b"busy".to_vec(), None));
        assert_eq!(passive.reject(b"again"), Ok(None));
    }
}

#[test]
fn sctp_16_and_19_and_34_without_its_program_an_end_refuses() {
    let (enhanced, initiate) = active(Some(offer(1, 1)), b"");
    let mut passive = passive();
    passive.receive(&initiate).expect("an Initiate");
    passive.refuse();
    assert_eq!(passive.request(), None);
    let failure = enhanced.receive(&TERMINATE).unwrap_err();
    assert_eq!(failure.fault, Fault::Refused);
    assert!(failure.fall_back, "the peer may not know RFC 6581");
    let (plain, _) = active(None, b"");
    assert!(!plain.receive(&TERMINATE).unwrap_err().fall_back);
}

#[test]
fn sctp_07_the_active_end_takes_only_an_answer_in_its_form() {
    let word = Some(EnhancedWord::default());
    let cases = [
        (SessionMessage::new(Function::Accept, word, b""), Fault::Form),
        (
            SessionMessage::new(Function::Initiate, None, b""),
            Fault::Sequence {
                found: Function::Initiate,
                due: "an answer",
            },
        ),
    ];
    let (active, _) = active(None, b"");
    for (message, fault) in cases {
        assert_eq!(active.receive(&bytes(message)).unwrap_err().fault, fault);
    }
    let failure = active.receive(&[0, 9]).unwrap_err();
    assert_eq!(failure.fault, SessionError::Function(9).into());
}

#[test]
fn sctp_07_the_passive_end_takes_one_initiate_and_no_more() {
    for message in [
        SessionMessage::new(Function::Accept, None, b""),
        SessionMessage::reject(true, b""),
        SessionMessage::TERMINATE,
    ] {
        let failure = passive().receive(&bytes(message)).unwrap_err();
        assert!(matches!(
            failure.fault,
            Fault::Sequence {
                due: "an Initiate",
                ..
            }
        ));
    }
    let (_, initiate) = active(None, b"");
    let mut twice = passive();
    twice.receive(&initiate).expect("an Initiate");
    assert!(matches!(
        twice.receive(&initiate).unwrap_err().fault,
        Fault::Sequence {
            found: Function::Initiate,
            ..
        }
    ));
    assert_eq!(twice.receive(&TERMINATE).unwrap_err().fault, Fault::Cancelled);
}

#[test]
fn sctp_04_and_05_private_data_may_be_512_bytes() {
    let long = [7; 513];
    assert!(Active::new(settings(), None, &long[..512], START).is_ok());
    assert!(Active::new(settings(), None, &long, START).is_err());
    assert!(Active::new(settings(), Some(offer(1, 1)), &long[..508], START).is_ok());
    assert!(Active::new(settings(), Some(offer(1, 1)), &long[..509], START).is_err());
    let mut passive = passive();
    passive
        .receive(&active(None, &long[..512]).1)
        .expect("an Initiate");
    assert!(passive.accept(depths(1, 1), &long).is_err() && passive.reject(&long).is_err());
    assert!(passive.request().is_some(), "it is still unanswered");
    assert!(matches!(passive.accept(depths(1, 1), &long[..512]), Ok(Some(_))));
}

#[test]
fn settings_limit_the_form_and_the_private_data() {
    let narrow = Settings {
        revision: 1,
        max_private_data: 255,
        ..settings()
    };
    let mut passive = Passive::new(narrow.clone(), START);
    let (_, enhanced) = active(Some(offer(1, 1)), b"");
    assert_eq!(passive.receive(&enhanced).unwrap_err().fault, Fault::Enhanced);
    let (_, long) = active(None, &[0; 256]);
    assert_eq!(passive.receive(&long).unwrap_err().fault, Fault::PrivateData(256));
    let (active, initiate) = Active::new(narrow, Some(offer(1, 1)), b"", START).unwrap();
    assert!(!parsed(&initiate).enhanced);
    let accept = bytes(SessionMessage::new(Function::Accept, None, &[0; 256]));
    assert_eq!(
        active.receive(&accept).unwrap_err().fault,
        Fault::PrivateData(256)
    );
}

#[test]
fn a_rejection_counts_in_either_form() {
    let (enhanced, _) = active(Some(offer(1, 1)), b"");
    let (plain, _) = active(None, b"");
    for active in [enhanced, plain] {
        for form in [false, true] {
            let reject = bytes(SessionMessage::reject(form, b"busy"));
            assert!(matches!(active.receive(&reject), Ok(Answer::Rejected(_))));
        }
    }
}

#[test]
fn sctp_20_a_program_may_take_its_time_to_decide() {
    let (active, initiate) = active(None, b"");
    assert_eq!(active.deadline(), START + settings().initiator_timeout);
    let mut passive = passive();
    assert_eq!(passive.deadline(), Some(START + settings().responder_timeout));
    passive.receive(&initiate).expect("an Initiate");
    assert_eq!(passive.deadline(), None);
}

proptest! {
    /// Whatever a peer sends, each end answers, or fails and says why.
    #[test]
    fn any_messages_are_taken(messages in proptest::collection::vec((0..9u8, proptest::collection::vec(any::<u8>(), 0..20)), 0..5)) {
        let (plain, _) = active(None, b"");
        let (enhanced, _) = active(Some(offer(2, 2)), b"");
        let mut passive = passive();
        for (code, data) in messages {
            let message = [&[0, code][..], &data].concat();
            for active in [&plain, &enhanced] {
                match active.receive(&message) {
                    Ok(Answer::Accepted(accepted)) => prop_assert_eq!(accepted.word.is_some(), code == 6),
                    Ok(Answer::Rejected(_)) => prop_assert!([3, 7].contains(&code)),
                    Err(failure) => prop_assert!(code != 4 || failure.fault == Fault::Refused || !data.is_empty()),
                }
            }
            let was_asked = passive.request().is_some();
            match passive.receive(&message) {
                Ok(()) => prop_assert!(!was_asked && [1, 5].contains(&code)),
                Err(failure) => drop(failure.to_string()),
            }
            if passive.request().is_some() {
                let accept = passive.accept(depths(1, 1), b"").unwrap();
                let (accept, negotiated) = accept.expect("a request");
                prop_assert!(accept.len() <= MAX_MESSAGE_LEN && !negotiated.fenced);
            }
        }
    }
}
