//! Conformance §2: RFC 6581.

use super::*;
use proptest::prelude::*;
use urnic_wire::mpa::startup::{NO_NEGOTIATION, StartupError};

const A: u32 = 0x8000_0000;
const B: u32 = 0x4000_0000;
const C: u32 = 0x0000_8000;
const D: u32 = 0x0000_4000;
const RTR: u32 = B | C | D;

/// The parameters that an initiator gets from a Reply with the word `reply`.
fn concluded(rtr: RtrTypes, offer: Offer, reply: u32) -> Negotiated {
    let settings = Settings { rtr, ..settings() };
    accepted(&mut new_initiator(settings, Some(offer)), &enhanced_reply(reply)).negotiated
}

#[test]
fn empa_01_empa_04_the_word_precedes_the_private_data() {
    let (_, request) = Initiator::new(settings(), Some(offer(16, 8)), &[], START).unwrap();
    assert_eq!(request, vector("MPA-REQ-R2-P2P"));
    let (_, request) = Initiator::new(settings(), Some(offer(16, 8)), b"ULP!", START).unwrap();
    assert_eq!(request, vector("MPA-REQ-R2-PD"));
    let received = with_request(settings(), &request).request().unwrap().clone();
    assert_eq!(
        (received.word, received.private_data.as_slice()),
        (Some(word(0x8010_c008)), &b"ULP!"[..])
    );
    let all = Settings {
        rtr: ALL_RTR,
        ..settings()
    };
    assert_eq!(
        Initiator::new(all, Some(offer(1, 1)), &[], START).unwrap().1,
        vector("MPA-REQ-R2-ALLRTR")
    );
    assert!(Initiator::new(settings(), Some(offer(1, 1)), &[0; 508], START).is_ok());
    assert_eq!(
        Initiator::new(settings(), Some(offer(1, 1)), &[0; 509], START).unwrap_err(),
        PrivateDataTooLong(509)
    );
}

#[test]
fn empa_02_a_request_of_revision_1_gets_a_reply_of_revision_1() {
    let reply = with_request(settings(), &vector("MPA-REQ-R1"))
        .accept(depths(8, 8), &[], START)
        .unwrap();
    assert_eq!(reply.bytes, vector("MPA-REP-R1"));
    let negotiated = reply.negotiated.unwrap();
    assert_eq!(
        (negotiated.depths, negotiated.rtr),
        (Depths::default(), None),
        "revision 1 negotiates no depths and no RTR"
    );
}

#[test]
fn empa_03_a_request_without_an_offer_is_not_enhanced() {
    let (_, request) = Initiator::new(settings(), None, &[], START).unwrap();
    assert_eq!(request, vector("MPA-REQ-R1"));
}

#[test]
fn empa_05_replies_are_enhanced_exactly_when_the_request_is() {
    for (request, enhanced) in [
        ("MPA-REQ-R1", false),
        ("MPA-REQ-R2-P2P", true),
        ("MPA-REQ-R2-CS", true),
    ] {
        let reply = with_request(settings(), &vector(request))
            .accept(depths(1, 1), &[], START)
            .unwrap();
        let (frame, _) = StartupFrame::parse(&reply.bytes).unwrap();
        assert_eq!(
            (frame.word.is_some(), frame.flags.enhanced, frame.revision == 2),
            (enhanced, enhanced, enhanced)
        );
    }
}

#[test]
fn empa_06_revision_1_resets_an_enhanced_request() {
    let mut responder = Responder::new(
        Settings {
            revision: 1,
            ..settings()
        },
        START,
    );
    let failure = responder.receive(&vector("MPA-REQ-R2-P2P")).unwrap_err();
    assert_eq!(failure.fault, Fault::Frame(StartupError::Revision(2)));
    assert_eq!((failure.close, failure.final_frame), (Close::Abort, None));
}

#[test]
fn empa_07_a_closed_enhanced_attempt_is_retried_unenhanced() {
    let failure = new_initiator(settings(), Some(offer(1, 1))).closed();
    assert_eq!((failure.fault, failure.fall_back), (Fault::Closed, true));
    assert!(!new_initiator(settings(), None).closed().fall_back);
    // The second attempt: a new connection, an unenhanced Request.
    let (mut again, request) = Initiator::new(settings(), None, &[], START).unwrap();
    assert_eq!(request, vector("MPA-REQ-R1"));
    let negotiated = accepted(&mut again, &vector("MPA-REP-R1")).negotiated;
    assert_eq!(
        (negotiated.revision, negotiated.depths, negotiated.rtr),
        (1, Depths::default(), None)
    );
}

#[test]
fn empa_08_flag_s_without_room_for_the_word_is_malformed() {
    let mut request = vector("MPA-REQ-R2-P2P");
    request.truncate(23);
    request[19] = 3;
    let failure = Responder::new(settings(), START).receive(&request).unwrap_err();
    assert_eq!(
        (failure.fault, failure.close),
        (Fault::Frame(StartupError::NoWord(3)), Close::Abort)
    );
}

#[test]
fn empa_09_flag_s_has_a_meaning_only_in_revision_2() {
    let reply = with_request(settings(), &vector("S001-REQ"))
        .accept(depths(1, 1), &[], START)
        .unwrap();
    assert_eq!(reply.bytes, vector("MPA-REP-R1"));
    let flags = StartupFlags {
        crc: true,
        ..StartupFlags::default()
    };
    let mut responder = with_request(settings(), &bytes(FrameKind::Request, 2, flags, None, b"data"));
    assert_eq!(responder.request().unwrap().private_data, b"data");
    let reply = responder.accept(depths(1, 1), &[], START).unwrap();
    assert_eq!(reply.bytes, bytes(FrameKind::Reply, 2, flags, None, &[]));
}

#[test]
fn empa_10_an_unenhanced_reply_ends_an_enhanced_attempt() {
    let flags = StartupFlags {
        crc: true,
        ..StartupFlags::default()
    };
    for reply in [
        vector("MPA-REP-R1"),
        vector("S001-REP"),
        bytes(FrameKind::Reply, 2, flags, None, &[]),
    ] {
        let failure = new_initiator(settings(), Some(offer(1, 1)))
            .receive(&reply)
            .unwrap_err();
        assert_eq!(
            (failure.fault, failure.fall_back),
            (Fault::NotEnhanced(reply[17]), true)
        );
    }
}

#[test]
fn empa_11_rtr_bits_count_only_in_the_peer_to_peer_model() {
    let (_, request) = Initiator::new(
        settings(),
        Some(Offer {
            peer_to_peer: false,
            ..offer(16, 8)
        }),
        &[],
        START,
    )
    .unwrap();
    assert_eq!(request, vector("MPA-REQ-R2-CS"));
    // With A, all types that this end supports, and no others.
    for (rtr, bits) in [(ALL_RTR, RTR), (READ_WRITE, C | D), (SEND, B), (WRITE, C)] {
        let settings = Settings { rtr, ..settings() };
        let (_, request) = Initiator::new(settings, Some(offer(16, 8)), &[], START).unwrap();
        let word = u32::from_be_bytes(request[20..24].try_into().unwrap());
        assert_eq!(word & (A | RTR), A | bits, "{rtr:?}");
    }
    let (reply, negotiated) = answer(settings(), depths(16, 16), RTR | 0x0010_0008);
    assert_eq!((reply & (A | RTR), negotiated.rtr), (0, None));
    let client = Offer {
        peer_to_peer: false,
        ..offer(16, 8)
    };
    let negotiated = concluded(READ_WRITE, client, A | RTR | 0x0010_0008);
    assert_eq!((negotiated.rtr, negotiated.terminate), (None, None));
}

#[test]
fn empa_12_empa_13_empa_14_the_reply_names_exactly_one_rtr() {
    let one = |rtr, request| {
        let (reply, negotiated) = answer(
            Settings { rtr, ..settings() },
            depths(1, 1),
            request | 0x0001_0001,
        );
        assert_eq!(reply & A, A);
        (reply & RTR, negotiated.rtr)
    };
    assert_eq!(one(ALL_RTR, A | RTR), (D, Some(Rtr::Read)));
    assert_eq!(one(ALL_RTR, A | C | D), (D, Some(Rtr::Read)));
    assert_eq!(one(ALL_RTR, A | B | C), (C, Some(Rtr::Write)));
    assert_eq!(one(ALL_RTR, A | B), (B, Some(Rtr::Send)));
    assert_eq!(one(WRITE, A | C | D), (C, Some(Rtr::Write)));
    // If nothing matches, the Reply names an RTR message of this end.
    assert_eq!(one(READ_WRITE, A | B), (D, Some(Rtr::Read)));
    assert_eq!(one(SEND, A | C | D), (B, Some(Rtr::Send)));
    assert_eq!(one(WRITE, A), (C, Some(Rtr::Write)));
}

#[test]
fn empa_15_the_initiator_sends_an_rtr_that_both_support() {
    let chosen = |rtr, reply| concluded(rtr, offer(1, 1), A | reply | 0x0001_0001).rtr;
    assert_eq!(chosen(READ_WRITE, D), Some(Rtr::Read));
    assert_eq!(chosen(READ_WRITE, C), Some(Rtr::Write));
    assert_eq!(chosen(READ_WRITE, C | D), Some(Rtr::Write));
    assert_eq!(chosen(READ, RTR), Some(Rtr::Read));
    assert_eq!(chosen(SEND, RTR), Some(Rtr::Send));
}

#[test]
fn empa_16_without_a_usable_rtr_a_terminate_is_sent() {
    for reply in [A | B, A, 0] {
        let negotiated = concluded(READ_WRITE, offer(1, 1), reply | 0x0001_0001);
        assert_eq!((negotiated.terminate, negotiated.rtr), (Some(0x2007_0000), None));
    }
    assert_eq!(terminate_of("F-TERM-207"), terminate::NO_MATCHING_RTR);
}

/// The control word in the FPDU of a Terminate: it follows two bytes of length and 18 bytes of DDP
/// header.
fn terminate_of(name: &str) -> u32 {
    u32::from_be_bytes(vector(name)[20..24].try_into().unwrap())
}

#[test]
fn empa_17_empa_18_both_ends_attach_with_the_chosen_rtr() {
    let (accepted, negotiated, _) = run(
        (settings(), Some(offer(4, 4)), &[]),
        (settings(), depths(4, 4), &[]),
        512,
    );
    assert_eq!(
        (accepted.negotiated.rtr, negotiated.rtr),
        (Some(Rtr::Read), Some(Rtr::Read))
    );
    assert_eq!((accepted.rtr_frame, accepted.negotiated.terminate), (None, None));
}

#[test]
fn empa_22_the_responder_is_fenced_until_the_first_fpdu() {
    let mut responder = with_request(settings(), &vector("MPA-REQ-R2-P2P"));
    assert!(
        responder
            .accept(depths(1, 1), &[], START)
            .unwrap()
            .negotiated
            .unwrap()
            .fenced
    );
    assert!(responder.deadline().is_some());
    responder.first_fpdu();
    assert_eq!(responder.deadline(), None);
}

#[test]
fn empa_24_the_client_server_model_uses_no_rtr() {
    let client = Offer {
        peer_to_peer: false,
        ..offer(16, 8)
    };
    let (accepted, negotiated, _) = run(
        (settings(), Some(client), &[]),
        (settings(), depths(16, 8), &[]),
        512,
    );
    assert_eq!(
        (
            accepted.negotiated.rtr,
            negotiated.rtr,
            accepted.negotiated.terminate
        ),
        (None, None, None)
    );
}

#[test]
fn negotiation_matches_the_test_vectors() {
    let (reply, negotiated) = answer(settings(), depths(8, 16), 0x8010_c008);
    assert_eq!((reply, negotiated.depths), (0x8008_4010, depths(8, 16)));
    let bytes = with_request(settings(), &vector("MPA-REQ-R2-P2P"))
        .accept(depths(8, 16), &[], START)
        .unwrap()
        .bytes;
    assert_eq!(bytes, vector("MPA-REP-R2-P2P"));
    assert_eq!(answer(settings(), depths(8, 16), 0x0010_0008).0 & (A | RTR), 0);
    assert_eq!(answer(settings(), depths(8, 16), 0x3fff_3fff).0, 0x3fff_3fff);
}

#[test]
fn empa_31_responder_ord_is_at_most_initiator_ird() {
    let (reply, negotiated) = answer(settings(), depths(8, 8), A | D | 0x0004_0001);
    assert_eq!((reply & 0x3fff, negotiated.depths.ord), (4, Some(4)));
}

#[test]
fn empa_32_a_read_as_rtr_needs_an_ird_of_one() {
    let (reply, negotiated) = answer(settings(), depths(0, 8), A | D | 0x0010_0000);
    assert_eq!((reply >> 16 & 0x3fff, negotiated.depths.ird), (1, Some(1)));
    let (reply, _) = answer(
        Settings {
            rtr: WRITE,
            ..settings()
        },
        depths(0, 8),
        A | C | 0x0010_0000,
    );
    assert_eq!(reply >> 16 & 0x3fff, 0);
}

#[test]
fn empa_33_a_reject_contains_the_required_ord() {
    let reply = with_request(settings(), &enhanced_request(A | D | 0x0001_0001))
        .reject(&[], Some(8))
        .unwrap();
    assert_eq!(reply[16], 0x70);
    let (_, answer) = new_initiator(settings(), Some(offer(1, 1)))
        .receive(&reply)
        .unwrap();
    match answer {
        Some(Answer::Rejected(rejected)) => assert_eq!(rejected.word.unwrap().ord, 8),
        other => panic!("{other:?}"),
    }
}

#[test]
fn peer_19_a_rejection_counts_with_the_word_and_without() {
    let flags = StartupFlags {
        crc: true,
        reject: true,
        ..StartupFlags::default()
    };
    let word = EnhancedWord {
        peer_to_peer: true,
        rtr_read: true,
        ord: 8,
        ..EnhancedWord::default()
    };
    for (revision, word) in [(2, Some(word)), (2, None), (1, None)] {
        let reply = bytes(FrameKind::Reply, revision, flags, word, b"no");
        let (taken, answer) = new_initiator(settings(), Some(offer(1, 1)))
            .receive(&reply)
            .unwrap();
        let rejected = Rejected {
            word,
            private_data: b"no".to_vec(),
        };
        assert_eq!((taken, answer), (reply.len(), Some(Answer::Rejected(rejected))));
    }
}

#[test]
fn empa_34_the_initiator_adapts_its_depths_to_the_reply() {
    let negotiated = concluded(READ_WRITE, offer(4, 16), A | D | 2 << 16 | 8);
    assert_eq!(
        negotiated.depths,
        depths(8, 2),
        "ORD is lowered to the IRD of the peer, IRD is raised to the ORD of the peer"
    );
    let negotiated = concluded(READ_WRITE, offer(16, 2), A | D | 8 << 16 | 4);
    assert_eq!(negotiated.depths, depths(16, 2));
}

#[test]
fn empa_35_an_insufficient_ird_is_reported_by_a_terminate() {
    let negotiated = concluded(READ_WRITE, offer(16, 16), A | D | 1 << 16 | 0x2000);
    assert_eq!(
        (negotiated.terminate, negotiated.rtr),
        (Some(terminate_of("F-TERM-206")), None)
    );
    let negotiated = concluded(READ_WRITE, offer(16, 16), A | D | 1 << 16 | 128);
    assert_eq!((negotiated.terminate, negotiated.depths.ird), (None, Some(128)));
}

#[test]
fn empa_36_both_ends_get_the_peers_unchanged_word() {
    let responder = with_request(settings(), &vector("MPA-REQ-R2-P2P"));
    let word = responder.request().unwrap().word.unwrap();
    assert_eq!((word.ird, word.ord), (16, 8));
    let accepted = accepted(
        &mut new_initiator(settings(), Some(offer(16, 8))),
        &vector("MPA-REP-R2-P2P"),
    );
    let word = accepted.word.unwrap();
    assert_eq!((word.ird, word.ord), (8, 16));
    // A depth that is not negotiated, too, in Request, Reply and rejection.
    for depths in [(0x3fff, 5), (5, 0x3fff)] {
        let bits = A | D | u32::from(depths.0) << 16 | u32::from(depths.1);
        let responder = with_request(settings(), &enhanced_request(bits));
        let word = responder.request().unwrap().word.unwrap();
        assert_eq!((word.ird, word.ord), depths);
        for reject in [false, true] {
            let flags = StartupFlags {
                crc: true,
                reject,
                ..StartupFlags::default()
            };
            let reply = bytes(FrameKind::Reply, 2, flags, Some(word), &[]);
            let (_, answer) = new_initiator(settings(), Some(offer(16, 8)))
                .receive(&reply)
                .unwrap();
            let received = match answer.unwrap() {
                Answer::Accepted(accepted) => accepted.word,
                Answer::Rejected(rejected) => rejected.word,
            };
            assert_eq!(received, Some(word), "rejected: {reject}");
        }
    }
}

#[test]
fn empa_37_all_ones_leaves_a_direction_to_the_ulp() {
    let (reply, negotiated) = answer(settings(), depths(5, 6), 16 << 16 | 0x3fff);
    assert_eq!(
        reply >> 16 & 0x3fff,
        0x3fff,
        "the ORD of the peer is not negotiated, nor is the IRD of this end"
    );
    assert_eq!((reply & 0x3fff, negotiated.depths), (6, depths(5, 6)));
    let (reply, negotiated) = answer(settings(), depths(5, 6), 0x3fff << 16 | 4);
    assert_eq!((reply & 0x3fff, negotiated.depths), (0x3fff, depths(5, 6)));
    // The initiator negotiates each direction separately.
    assert_eq!(
        concluded(READ_WRITE, offer(3, 9), A | D | 0x3fff << 16 | 2).depths,
        depths(3, 9)
    );
    assert_eq!(
        concluded(READ_WRITE, offer(3, 9), A | D | 2 << 16 | 0x3fff).depths,
        depths(3, 2)
    );
    let open = Offer {
        depths: Depths::default(),
        ..offer(0, 0)
    };
    let (_, request) = Initiator::new(
        settings(),
        Some(Offer {
            peer_to_peer: false,
            ..open
        }),
        &[],
        START,
    )
    .unwrap();
    assert_eq!(request, vector("MPA-REQ-R2-NONEG"));
    let negotiated = concluded(READ_WRITE, open, A | D | 0x3fff_3fff);
    assert_eq!(
        (negotiated.depths, negotiated.terminate),
        (Depths::default(), None)
    );
}

#[test]
fn empa_38_a_local_error_is_reported_to_the_peer() {
    let good = accepted(
        &mut new_initiator(settings(), Some(offer(16, 8))),
        &vector("MPA-REP-R2-P2P"),
    );
    let failed = good.failed_here().negotiated;
    assert_eq!(
        (failed.terminate, failed.rtr),
        (Some(terminate_of("F-TERM-205")), None)
    );
    // A responder rejects before its Reply, and sends nothing after it.
    let mut responder = with_request(settings(), &vector("MPA-REQ-R2-P2P"));
    assert_eq!(responder.failed_here().unwrap()[16] & 0x20, 0x20);
    let mut responder = with_request(settings(), &vector("MPA-REQ-R2-P2P"));
    responder.accept(depths(1, 1), &[], START).unwrap();
    assert_eq!(responder.failed_here(), None);
}

#[test]
fn empa_39_depths_beyond_14_bits_are_not_mistaken_for_all_ones() {
    let (_, request) = Initiator::new(settings(), Some(offer(0xffff, 0x3fff)), &[], START).unwrap();
    let word = with_request(settings(), &request)
        .request()
        .unwrap()
        .word
        .unwrap();
    assert_eq!((word.ird, word.ord), (0x3ffe, 0x3ffe));
    let (reply, _) = answer(settings(), depths(0xffff, 0xffff), A | D | 0x3ffe << 16 | 0x3ffe);
    assert_eq!((reply >> 16 & 0x3fff, reply & 0x3fff), (0x3ffe, 0x3ffe));
}

proptest! {
    #[test]
    fn empa_30_ord_of_each_end_is_at_most_the_peers_ird(
        ours in (0u16..0x4000, 0u16..0x4000),
        theirs in (0u16..0x4000, 0u16..0x4000),
        max_ird in 0u16..0x4000,
    ) {
        let offer = Offer { max_ird, ..offer(ours.0, ours.1) };
        let (accepted, negotiated, _) =
            run((settings(), Some(offer), &[]), (settings(), depths(theirs.0, theirs.1), &[]), 512);
        let (initiator, responder) = (accepted.negotiated, negotiated);
        prop_assert!(responder.depths.ord <= initiator.depths.ird);
        prop_assert!(initiator.depths.ord <= responder.depths.ird);
        prop_assert_eq!(initiator.terminate, None, "a responder requests at most the offered depths");
        prop_assert_eq!(initiator.rtr, responder.rtr);
        let word = accepted.word.unwrap();
        prop_assert!(word.ird != NO_NEGOTIATION && word.ord != NO_NEGOTIATION);
    }
}

#[test]
fn empa_04_private_data_that_programs_cannot_take_is_rejected() {
    let settings = Settings {
        max_private_data: 255,
        ..settings()
    };
    let offer = Offer {
        peer_to_peer: true,
        depths: Depths::default(),
        max_ird: 16,
    };
    for (len, taken) in [(255, true), (256, false)] {
        let (_, request) = Initiator::new(settings.clone(), Some(offer), &vec![1; len], Time::ZERO).unwrap();
        let mut responder = Responder::new(settings.clone(), Time::ZERO);
        let received = responder.receive(&request);
        assert_eq!(received.is_ok(), taken, "{received:?}");
        if let Err(failure) = received {
            assert_eq!(
                (failure.fault, failure.close),
                (Fault::PrivateData(len), Close::Orderly)
            );
            // The Reply tells the initiator that the port was right.
            let (_, answer) = new_initiator(settings.clone(), Some(offer))
                .receive(&failure.final_frame.unwrap())
                .unwrap();
            assert!(matches!(answer, Some(Answer::Rejected(_))), "{answer:?}");
        }
    }
}
