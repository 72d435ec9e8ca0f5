//! Conformance §3: the RTR frame proposed in 2007.

use super::*;
use urnic_wire::mpa::startup::StartupError;

fn on(key: RtrKey) -> Settings {
    Settings {
        rtr_frame: Some(key),
        ..settings()
    }
}

#[test]
fn s001_01_the_rtr_frame_follows_a_reply_that_agrees() {
    let (mut initiator, request) = Initiator::new(on(RtrKey::Hex), None, &[], START).unwrap();
    assert_eq!(request, vector("S001-REQ"));
    let mut responder = with_request(on(RtrKey::Hex), &request);
    let reply = responder.accept(Depths::default(), &[], START).unwrap();
    assert_eq!(
        (reply.bytes.clone(), reply.negotiated),
        (vector("S001-REP"), None)
    );
    let frame = accepted(&mut initiator, &reply.bytes).rtr_frame.unwrap();
    assert_eq!(frame.len(), 20);
    match responder.receive(&frame).unwrap() {
        (20, Some(ResponderEvent::Ready(negotiated))) => assert!(!negotiated.fenced && negotiated.crc),
        other => panic!("{other:?}"),
    }
    // No RTR frame follows a reject.
    let reject = with_request(on(RtrKey::Hex), &request).reject(&[], None).unwrap();
    let (_, answer) = new_initiator(on(RtrKey::Hex), None).receive(&reject).unwrap();
    assert!(matches!(answer, Some(Answer::Rejected(_))));
}

#[test]
fn s001_02_a_reply_that_does_not_agree_falls_back_silently() {
    let accepted = accepted(&mut new_initiator(on(RtrKey::Hex), None), &vector("MPA-REP-R1"));
    assert_eq!(accepted.rtr_frame, None);
}

#[test]
fn s001_03_the_responder_agrees_only_with_option_and_offer() {
    let agrees = |ours: Settings, request: &str| {
        let reply = with_request(ours, &vector(request))
            .accept(depths(1, 1), &[], START)
            .unwrap();
        reply.negotiated.is_none()
    };
    assert!(agrees(on(RtrKey::Hex), "S001-REQ"));
    assert!(!agrees(on(RtrKey::Hex), "MPA-REQ-R1"));
    assert!(!agrees(on(RtrKey::Hex), "MPA-REQ-R2-P2P"));
    assert!(!agrees(settings(), "S001-REQ"));
}

#[test]
fn s001_04_both_spellings_of_the_key_are_read_and_written() {
    let is_ready_after = |frame: &[u8]| {
        let mut responder = with_request(on(RtrKey::Hex), &vector("S001-REQ"));
        responder.accept(Depths::default(), &[], START).unwrap();
        matches!(responder.receive(frame), Ok((20, Some(ResponderEvent::Ready(_)))))
    };
    for name in ["S001-RTR-hex", "S001-RTR-ascii"] {
        assert!(is_ready_after(&vector(name)), "{name}");
    }
    for (key, name) in [(RtrKey::Hex, "S001-RTR-hex"), (RtrKey::Text, "S001-RTR-ascii")] {
        let sent = accepted(&mut new_initiator(on(key), None), &vector("S001-REP"))
            .rtr_frame
            .unwrap();
        assert_eq!(sent[..16], vector(name)[..16]);
        // The flags follow the Reply's C.
        assert_eq!(sent[16..], [0x40, 1, 0, 0]);
        assert!(is_ready_after(&sent));
    }
}

#[test]
fn s001_05_private_data_in_the_rtr_frame_is_tolerated() {
    let mut responder = with_request(on(RtrKey::Hex), &vector("S001-REQ"));
    responder.accept(Depths::default(), &[], START).unwrap();
    let mut stream = bytes(
        FrameKind::Rtr(RtrKey::Hex),
        1,
        StartupFlags::default(),
        None,
        b"ignored",
    );
    let start_up = stream.len();
    stream.extend(vector("F-SEND-hello"));
    let (taken, event) = responder.receive(&stream).unwrap();
    assert!(matches!(event, Some(ResponderEvent::Ready(_))));
    assert_eq!(
        taken, start_up,
        "the first FPDU and the first marker follow immediately"
    );
}

#[test]
fn s001_06_a_frame_other_than_the_rtr_ends_start_up() {
    for bytes in [vector("F-SEND-hello"), vector("S001-REQ")] {
        let mut responder = with_request(on(RtrKey::Hex), &vector("S001-REQ"));
        responder.accept(Depths::default(), &[], START).unwrap();
        let failure = responder.receive(&bytes).unwrap_err();
        assert!(matches!(
            failure.fault,
            Fault::NotMpa(_) | Fault::Frame(StartupError::Kind { .. })
        ));
        assert_eq!(failure.close, Close::Abort);
    }
    let mut responder = with_request(on(RtrKey::Hex), &vector("S001-REQ"));
    responder.accept(Depths::default(), &[], START).unwrap();
    let late = START + settings().rtr_timeout;
    assert_eq!(responder.expire(late).unwrap().fault, Fault::Timeout);
}

#[test]
fn s001_07_echoed_flags_are_harmless_without_the_option() {
    // soft-iWARP's Reply has the flags of the Request.
    let echo = |request: &[u8]| {
        let mut reply = request.to_vec();
        reply[..16].copy_from_slice(&vector("MPA-REP-R1")[..16]);
        reply
    };
    let (mut initiator, request) = Initiator::new(settings(), None, &[], START).unwrap();
    assert_eq!(accepted(&mut initiator, &echo(&request)).rtr_frame, None);
    // With the RTR frame enabled, the echo counts as agreement: enable the RTR frame only for peers
    // that support it.
    let (mut initiator, request) = Initiator::new(on(RtrKey::Hex), None, &[], START).unwrap();
    assert!(accepted(&mut initiator, &echo(&request)).rtr_frame.is_some());
}

#[test]
fn s001_08_revision_2_takes_precedence() {
    let (mut initiator, request) = Initiator::new(on(RtrKey::Hex), Some(offer(16, 8)), &[], START).unwrap();
    assert_eq!(request, vector("MPA-REQ-R2-P2P"));
    assert_eq!(
        accepted(&mut initiator, &vector("MPA-REP-R2-P2P")).rtr_frame,
        None
    );
}
