//! Conformance §1.4: RFC 5044 §7.

use super::*;
use proptest::prelude::*;
use urnic_wire::mpa::startup::StartupError;

fn plain() -> Settings {
    Settings {
        revision: 1,
        ..settings()
    }
}

/// The fault of a responder that receives `bytes`, and sends no answer.
fn refused(settings: Settings, bytes: &[u8]) -> Fault {
    let mut responder = Responder::new(settings, START);
    let failure = responder.receive(bytes).unwrap_err();
    assert_eq!((failure.close, failure.final_frame), (Close::Abort, None));
    failure.fault
}

fn with(mut bytes: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
    bytes[at] = byte;
    bytes
}

#[test]
fn mpa_s_01_s_02_frames_are_twenty_bytes_and_private_data() {
    let (_, request) = Initiator::new(settings(), None, &[], START).unwrap();
    assert_eq!(request, vector("MPA-REQ-R1"));
    let no_crc = Settings {
        crc: false,
        ..settings()
    };
    assert_eq!(
        Initiator::new(no_crc, None, &[], START).unwrap().1,
        vector("MPA-REQ-R1-NOCRC")
    );
    let markers = Settings {
        markers: true,
        ..settings()
    };
    assert_eq!(
        Initiator::new(markers, None, &[], START).unwrap().1,
        vector("MPA-REQ-R1-MC")
    );
    let reply = with_request(settings(), &request)
        .accept(Depths::default(), &[], START)
        .unwrap();
    assert_eq!(reply.bytes, vector("MPA-REP-R1"));
}

#[test]
fn mpa_s_03_the_responder_waits_for_a_valid_request() {
    let mut responder = Responder::new(settings(), START);
    assert_eq!(responder.request(), None);
    // Nothing that may happen before the Request makes it send a byte.
    for part in [&[][..], &vector("MPA-REQ-R1")[..19]] {
        assert_eq!(responder.receive(part), Ok((part.len(), None)));
        let nothing = responder.accept(Depths::default(), &[], START).unwrap();
        assert_eq!((nothing.bytes.len(), nothing.negotiated), (0, None));
        assert_eq!(responder.reject(b"no", Some(1)), Ok(Vec::new()));
        assert_eq!(responder.failed_here(), None);
        assert_eq!(responder.closed().final_frame, None);
        let expired = responder.expire(START + Duration::from_secs(60)).unwrap();
        assert_eq!(expired.final_frame, None);
    }
    // The exchange works in pieces of any size, and does not depend on the end that opened the TCP
    // connection.
    for piece in [1, 3, 19, 20, 512] {
        let (accepted, negotiated, request) = run(
            (plain(), None, b"hello"),
            (plain(), Depths::default(), b"welcome"),
            piece,
        );
        assert_eq!(
            (request.private_data.as_slice(), accepted.private_data.as_slice()),
            (&b"hello"[..], &b"welcome"[..])
        );
        assert!(accepted.negotiated.initiator && !negotiated.initiator);
    }
}

#[test]
fn mpa_s_04_s_11_a_wrong_key_closes_without_an_answer() {
    let reply = vector("MPA-REP-R1");
    assert!(matches!(
        refused(settings(), &reply),
        Fault::Frame(StartupError::Kind { .. })
    ));
    let http = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    // One byte is enough.
    for len in 1..=http.len() {
        let fault = refused(settings(), &http[..len]);
        assert!(matches!(fault, Fault::NotMpa(_)), "{fault}");
        let failure = new_initiator(settings(), None).receive(&http[..len]).unwrap_err();
        assert!(matches!(failure.fault, Fault::NotMpa(_)));
        assert_eq!((failure.close, failure.fall_back), (Close::Abort, false));
    }
    let all = refused(settings(), http).to_string();
    assert!(all.ends_with(r#"it sent "GET / HTTP/1.1\r\nHost""#), "{all}");
}

#[test]
fn the_first_byte_that_is_in_no_key_ends_start_up() {
    let request = vector("MPA-REQ-R1");
    for at in 0..16 {
        let mut responder = Responder::new(settings(), START);
        assert!(responder.receive(&request[..at]).is_ok(), "a part of a key");
        let failure = responder.receive(b"\xff").unwrap_err();
        assert!(matches!(failure.fault, Fault::NotMpa(_)), "{failure}");
    }
}

#[test]
fn mpa_s_05_two_initiators_detect_each_other() {
    let (mut a, from_a) = Initiator::new(settings(), None, &[], START).unwrap();
    let (mut b, from_b) = Initiator::new(settings(), Some(offer(1, 1)), &[], START).unwrap();
    for failure in [a.receive(&from_b).unwrap_err(), b.receive(&from_a).unwrap_err()] {
        let request_for_reply = StartupError::Kind {
            expected: FrameKind::Reply,
            found: FrameKind::Request,
        };
        assert_eq!(failure.fault, Fault::Frame(request_for_reply));
        assert_eq!(failure.close, Close::Abort);
    }
}

#[test]
fn mpa_s_06_missing_and_partial_frames_time_out() {
    let responder_wait = Duration::from_secs(10);
    for len in [0, 1, 19] {
        let mut responder = Responder::new(settings(), START);
        assert_eq!(responder.receive(&vector("MPA-REQ-R1")[..len]), Ok((len, None)));
        assert_eq!(responder.bytes_needed(), 20 - len);
        assert_eq!(responder.deadline(), Some(START + responder_wait));
        assert_eq!(
            responder.expire(START + responder_wait - Duration::from_nanos(1)),
            None
        );
        let failure = responder.expire(START + responder_wait).unwrap();
        assert_eq!((failure.fault, failure.close), (Fault::Timeout, Close::Abort));
    }
    let initiator_wait = Duration::from_secs(20);
    let initiator = new_initiator(settings(), None);
    assert_eq!(initiator.deadline(), START + initiator_wait);
    assert_eq!(
        initiator.expire(START + initiator_wait - Duration::from_nanos(1)),
        None
    );
    assert_eq!(
        initiator.expire(START + initiator_wait).unwrap().fault,
        Fault::Timeout
    );
    let short = Settings {
        responder_timeout: Duration::from_secs(1),
        ..settings()
    };
    assert_eq!(
        Responder::new(short, START).deadline(),
        Some(START + Duration::from_secs(1))
    );
}

#[test]
fn mpa_s_06_there_is_no_deadline_while_the_ulp_decides() {
    let responder = with_request(settings(), &vector("MPA-REQ-R1"));
    assert_eq!((responder.deadline(), responder.bytes_needed()), (None, 0));
}

#[test]
fn mpa_s_07_flag_r_is_ignored_in_a_request() {
    let request = with(vector("MPA-REQ-R1"), 16, 0x60);
    let reply = with_request(settings(), &request)
        .accept(Depths::default(), &[], START)
        .unwrap();
    assert_eq!(reply.bytes, vector("MPA-REP-R1"));
}

#[test]
fn mpa_s_08_reserved_bits_are_ignored_and_not_echoed() {
    let request = with(vector("MPA-REQ-R1"), 16, 0x5f);
    let reply = with_request(settings(), &request)
        .accept(Depths::default(), &[], START)
        .unwrap();
    assert_eq!(reply.bytes, vector("MPA-REP-R1"));
}

#[test]
fn mpa_s_09_unsupported_revisions_are_closed() {
    for revision in [3, 129, 255] {
        let fault = refused(settings(), &with(vector("MPA-REQ-R1"), 17, revision));
        assert_eq!(fault, Fault::Frame(StartupError::Revision(revision)));
        let failure = new_initiator(settings(), None)
            .receive(&with(vector("MPA-REP-R1"), 17, revision))
            .unwrap_err();
        assert_eq!(failure.fault, Fault::Frame(StartupError::Revision(revision)));
    }
    let failure = new_initiator(settings(), None)
        .receive(&with(vector("MPA-REP-R1"), 17, 2))
        .unwrap_err();
    assert_eq!(
        failure.fault,
        Fault::Frame(StartupError::Revision(2)),
        "revision 2 to a Request of revision 1"
    );
    let (accepted, negotiated, request) =
        run((plain(), None, &[]), (settings(), Depths::default(), &[]), 512);
    assert_eq!(
        (
            accepted.negotiated.revision,
            negotiated.revision,
            request.revision
        ),
        (1, 1, 1)
    );
}

#[test]
fn mpa_s_10_private_data_has_at_most_512_bytes() {
    let most = [7; 512];
    let (accepted, _, request) = run((plain(), None, &most), (plain(), Depths::default(), &most), 100);
    assert_eq!(
        (request.private_data, accepted.private_data),
        (most.to_vec(), most.to_vec())
    );
    assert_eq!(
        Initiator::new(plain(), None, &[7; 513], START).unwrap_err(),
        PrivateDataTooLong(513)
    );

    let claims_513 = with(with(vector("MPA-REQ-R1"), 18, 2), 19, 1);
    assert_eq!(
        refused(settings(), &claims_513),
        Fault::Frame(StartupError::PrivateData(513))
    );

    let mut responder = Responder::new(settings(), START);
    assert_eq!(
        responder.receive(&with(vector("MPA-REQ-R1"), 19, 4)),
        Ok((20, None))
    );
    assert_eq!(responder.bytes_needed(), 4);
    assert_eq!(
        responder.expire(START + Duration::from_secs(10)).unwrap().fault,
        Fault::Timeout
    );
    assert_eq!(responder.closed().fault, Fault::Closed);
}

#[test]
fn mpa_s_10_a_reply_with_too_long_private_data_is_not_sent() {
    let mut responder = with_request(settings(), &vector("MPA-REQ-R1"));
    assert_eq!(
        responder.accept(Depths::default(), &[0; 513], START),
        Err(PrivateDataTooLong(513))
    );
    assert_eq!(responder.reject(&[0; 513], None), Err(PrivateDataTooLong(513)));
    assert!(responder.accept(Depths::default(), &[0; 512], START).is_ok());
}

#[test]
fn mpa_s_12_a_reject_has_private_data_and_ends_mpa_only() {
    let mut responder = with_request(settings(), &vector("MPA-REQ-R1"));
    let reply = responder.reject(b"no", None).unwrap();
    assert_eq!(reply, vector("MPA-REP-R1-REJ"));
    assert_eq!(
        (
            responder.bytes_needed(),
            responder.deadline(),
            responder.request()
        ),
        (0, None, None)
    );
    let (taken, answer) = new_initiator(settings(), None).receive(&reply).unwrap();
    assert_eq!(taken, reply.len());
    assert_eq!(
        answer,
        Some(Answer::Rejected(Rejected {
            word: None,
            private_data: b"no".to_vec()
        }))
    );
}

#[test]
fn mpa_s_13_a_responder_is_fenced_and_an_initiator_is_not() {
    for (ours, offered) in [(plain(), None), (settings(), Some(offer(1, 1)))] {
        let (accepted, negotiated, _) = run((ours, offered, &[]), (settings(), depths(1, 1), &[]), 512);
        assert!(negotiated.fenced && !accepted.negotiated.fenced);
    }
}

#[test]
fn mpa_s_14_the_reply_has_the_attach_parameters() {
    let reply = with_request(settings(), &vector("MPA-REQ-R1"))
        .accept(Depths::default(), &[], START)
        .unwrap();
    assert!(reply.negotiated.is_some());
}

#[test]
fn mpa_s_15_bytes_between_request_and_reply_are_malformed() {
    let request = [vector("MPA-REQ-R1"), vec![0; 4]].concat();
    assert_eq!(refused(settings(), &request), Fault::Trailing(4));
    let mut responder = with_request(settings(), &vector("MPA-REQ-R1"));
    let failure = responder.receive(&[0]).unwrap_err();
    assert_eq!((failure.fault, failure.close), (Fault::Trailing(1), Close::Abort));
}

#[test]
fn mpa_s_16_an_fpdu_after_the_reply_is_left_to_the_device() {
    let fpdu = vector("F-SEND-hello");
    let reply = [vector("MPA-REP-R1"), fpdu.clone()].concat();
    let mut initiator = new_initiator(settings(), None);
    let (taken, answer) = initiator.receive(&reply).unwrap();
    assert!(matches!(answer, Some(Answer::Accepted(_))));
    assert_eq!(reply[taken..], fpdu);
    assert_eq!(initiator.bytes_needed(), 0);
}

#[test]
fn mpa_s_20_revision_0_is_answered_with_1_and_closed() {
    let mut responder = Responder::new(settings(), START);
    let failure = responder.receive(&vector("MPA-REQ-R0-RDMAC")).unwrap_err();
    assert_eq!((failure.fault, failure.close), (Fault::Rdmac, Close::Orderly));
    let frame = failure.final_frame.unwrap();
    let (reply, _) = StartupFrame::parse(&frame).unwrap();
    assert_eq!(
        (reply.kind, reply.revision, reply.flags.reject),
        (FrameKind::Reply, 1, true)
    );

    let flags = StartupFlags {
        crc: true,
        markers: true,
        ..StartupFlags::default()
    };
    let failure = new_initiator(settings(), None)
        .receive(&bytes(FrameKind::Reply, 0, flags, None, &[]))
        .unwrap_err();
    assert_eq!(
        (failure.fault, failure.close, failure.final_frame),
        (Fault::Rdmac, Close::Orderly, None)
    );
}

#[test]
fn mpa_s_21_the_first_fpdu_has_a_deadline() {
    let mut responder = with_request(settings(), &vector("MPA-REQ-R1"));
    responder.accept(Depths::default(), &[], START).unwrap();
    let wait = settings().rtr_timeout;
    assert_eq!(responder.deadline(), Some(START + wait));
    assert_eq!(responder.expire(START + wait).unwrap().fault, Fault::Timeout);
    responder.first_fpdu();
    assert_eq!(
        (responder.deadline(), responder.expire(START + 2 * wait)),
        (None, None)
    );
}

#[test]
fn mpa_c_01_c_05_a_crc_request_of_one_end_binds_both() {
    for (a, b) in [(true, true), (true, false), (false, true), (false, false)] {
        let side = |crc| Settings { crc, ..plain() };
        let (accepted, negotiated, _) = run((side(a), None, &[]), (side(b), Depths::default(), &[]), 512);
        assert_eq!((accepted.negotiated.crc, negotiated.crc), (a || b, a || b));
    }
    assert!(settings().crc, "CRCs are on by default");
}

#[test]
fn mpa_m_01_m_02_only_the_requesting_end_gets_markers() {
    for (a, b) in [(true, true), (true, false), (false, true), (false, false)] {
        let side = |markers| Settings { markers, ..plain() };
        let (accepted, negotiated, _) = run((side(a), None, &[]), (side(b), Depths::default(), &[]), 512);
        assert_eq!(
            (accepted.negotiated.markers_rx, accepted.negotiated.markers_tx),
            (a, b)
        );
        assert_eq!((negotiated.markers_rx, negotiated.markers_tx), (b, a));
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_or_exceed_the_frame(
        start in prop_oneof![Just(Vec::new()), Just(b"MPA ID Req Frame".to_vec()), Just(b"MPA ID Rep Frame".to_vec())],
        noise in proptest::collection::vec(any::<u8>(), 0..600),
        piece in 1usize..40,
        highest in 1u8..=2,
        rtr_frame in any::<bool>(),
    ) {
        let bytes = [start, noise].concat();
        let ours = Settings { revision: highest, rtr_frame: rtr_frame.then_some(RtrKey::Hex), ..settings() };
        let mut responder = Responder::new(ours.clone(), START);
        for chunk in bytes.chunks(piece) {
            let bytes_needed = responder.bytes_needed();
            match responder.receive(chunk) {
                Ok((taken, event)) => {
                    prop_assert!(taken <= chunk.len() && (event.is_some() || bytes_needed >= taken || taken == chunk.len()));
                    if event == Some(ResponderEvent::Request) {
                        responder.accept(depths(1, 1), &[], START).unwrap();
                    }
                }
                Err(_) => break,
            }
        }
        let mut initiator = new_initiator(ours, Some(offer(1, 1)));
        for chunk in bytes.chunks(piece) {
            match initiator.receive(chunk) {
                Ok((taken, None)) => prop_assert_eq!(taken, chunk.len()),
                Ok((_, Some(_))) | Err(_) => break,
            }
        }
    }
}

#[test]
fn mpa_e_01_wrong_frames_are_code_4_and_lost_streams_code_1() {
    let code = |failure: &Failure| {
        let code = failure.fault.mpa_error().code();
        assert!(
            failure.to_string().starts_with(&format!("MPA error {code}: ")),
            "{failure}"
        );
        assert_eq!(
            (
                failure.fault.mpa_error().layer(),
                failure.fault.mpa_error().etype()
            ),
            (2, 0)
        );
        code
    };
    let request = vector("MPA-REQ-R1");
    let received = |bytes: &[u8]| code(&Responder::new(plain(), START).receive(bytes).unwrap_err());
    // Another key, an unknown revision, too much private data, bytes after the Request, and
    // revision 0.
    assert_eq!(received(&with(request.clone(), 9, b'x')), 4);
    assert_eq!(received(&with(request.clone(), 17, 3)), 4);
    assert_eq!(received(&with(request.clone(), 18, 0xff)), 4);
    assert_eq!(received(&[&request[..], &[0]].concat()), 4);
    assert_eq!(received(&with(request.clone(), 17, 0)), 4);
    let answered = |bytes: &[u8]| {
        code(
            &new_initiator(settings(), Some(offer(16, 8)))
                .receive(bytes)
                .unwrap_err(),
        )
    };
    // A Request from another initiator; a Reply that is not enhanced.
    assert_eq!(answered(&request), 4);
    assert_eq!(answered(&vector("MPA-REP-R1")), 4);
    // The peer closes, or sends nothing.
    assert_eq!(code(&Responder::new(plain(), START).closed()), 1);
    assert_eq!(code(&new_initiator(plain(), None).closed()), 1);
    let (responder, initiator) = (Responder::new(plain(), START), new_initiator(plain(), None));
    let late = START + Duration::from_secs(3600);
    assert_eq!(code(&responder.expire(late).unwrap()), 1);
    assert_eq!(code(&initiator.expire(late).unwrap()), 1);
}
