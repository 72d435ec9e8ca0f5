//! Connections: the events of both ends, and how queue pairs are attached.

use super::*;
use crate::mpa_startup::{Rtr, terminate};
use crate::rdma_cm::messages::Message;
use urnic_config::RtrTypes;
use urnic_wire::mpa::startup::{EnhancedWord, NO_NEGOTIATION};

/// Establishes a connection with these parameters; returns channel and id of the initiator and of
/// the responder.
fn connected(net: &mut Net, ours: Parameters, theirs: Parameters) -> ((u64, u32), (u64, u32)) {
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, ours);
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, theirs);
    (initiator, (at, id))
}

/// A target of NVMe over Fabrics warns of an initiator that announces Reads of its own.
#[test]
pub(super) fn a_request_without_reads_is_a_depth_of_0_at_the_peer() {
    for (resources, depth) in [(16, 0), (0, 16), (0, 0)] {
        let mut net = Net::pair();
        let (at, _) = net.listen(1, 7471, 0);
        let initiator = net.ready(0, 7471, 5, false);
        net.connect(0, initiator, parameters(3, resources, depth, b""));
        let (_, param) = net.request(1, at);
        assert_eq!(
            (param.initiator_depth, param.responder_resources),
            (resources, depth)
        );
        net.finish();
    }
}

#[test]
fn both_ends_get_the_peers_parameters_and_the_end() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 4, 2, b"hello"));
    let (id, param) = net.request(1, at);
    assert_eq!(&param.private_data[..6], b"hello\0");
    assert_eq!(param.private_data_len, 5);
    // The limits of the initiator appear reversed at the responder.
    assert_eq!((param.initiator_depth, param.responder_resources), (4, 2));
    net.accept(1, at, id, 200, parameters(9, 8, 8, b"welcome"));
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!((event.event, event.uid, event.id), (9, 5, initiator.1));
    assert_eq!(&event.param.private_data[..7], b"welcome");
    assert_eq!(net.take_events(1, at), [(200, id, 9, 0)]);
    {
        let wire = net.wire.borrow();
        let [(1, at_responder), (0, at_initiator)] = wire.attached[..] else {
            panic!("{:?}", wire.attached);
        };
        assert_eq!((at_responder.qid, at_initiator.qid), (9, 3));
        // EMPA-30: neither end sends more than the other accepts.
        assert_eq!((at_responder.ord, at_initiator.ird), (4, 4));
        assert!(at_initiator.ord <= at_responder.ird);
        assert_eq!(at_responder.negotiated.unwrap().rtr, Some(Rtr::Read));
        assert_eq!(at_initiator.negotiated.unwrap().rtr, Some(Rtr::Read));
    }
    assert_eq!(net.engines[1].notices(), [Notice::Open(9)], "at the first FPDU");
    net.at(0, |engine, world| {
        engine.disconnect(world, initiator.0, initiator.1)
    })
    .unwrap();
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 10, 0)]);
    assert_eq!(net.take_events(1, at), [(200, id, 10, 0)]);
    assert_eq!(
        net.at(1, |engine, world| engine.disconnect(world, at, id)),
        Ok(()),
        "the connection has ended already"
    );
    net.advance(TIME_WAIT * 2);
    for (side, channel) in [(0, initiator.0), (1, at)] {
        assert!(
            net.take_events(side, channel).is_empty(),
            "an RNIC has no TIMEWAIT_EXIT"
        );
    }
    net.finish();
}

/// The depths of an event: `responder_resources` and `initiator_depth`.
fn depths(param: &ConnParam) -> (u8, u8) {
    (param.responder_resources, param.initiator_depth)
}

#[test]
fn empa_36_programs_get_the_depths_of_request_reply_and_rejection() {
    for accepts in [true, false] {
        let mut net = Net::pair();
        let (at, _) = net.listen(1, 7471, 0);
        let initiator = net.ready(0, 7471, 5, false);
        net.connect(0, initiator, parameters(3, 4, 2, &[]));
        let (id, param) = net.request(1, at);
        assert_eq!(depths(&param), (2, 4));
        let expected = match accepts {
            true => {
                net.accept(1, at, id, 200, parameters(9, 3, 1, &[]));
                (1, 3)
            }
            false => {
                net.at(1, |engine, world| engine.reject(world, at, id, &[]))
                    .unwrap();
                // A Read as RTR would need one place.
                (0, 1)
            }
        };
        let event = net.event(0, initiator.0).unwrap();
        assert_eq!(depths(&event.param), expected, "accepts: {accepts}");
        net.finish();
    }
}

/// The fields of events have 8 bits. Where the peer leaves a depth to the program, the program gets
/// the limit of its own device, which it may use.
#[test]
fn empa_36_events_show_what_14_bits_say_in_8() {
    let net = Net::pair();
    let engine = &net.engines[0];
    let shown = |ird, ord| {
        let word = EnhancedWord {
            ird,
            ord,
            ..EnhancedWord::default()
        };
        let params = engine.event_params(Message::Reply, Some(word), Vec::new());
        (params.initiator_depth, params.responder_resources)
    };
    for (depth, expected) in [(0, 0), (1, 1), (255, 255), (256, 255), (0x3ffe, 255)] {
        assert_eq!(shown(depth, 7), (expected, 7));
        assert_eq!(shown(7, depth), (7, expected));
    }
    assert_eq!(shown(NO_NEGOTIATION, 7), (engine.max_ord, 7));
    assert_eq!(shown(7, NO_NEGOTIATION), (7, engine.max_ird));
    assert!(engine.max_ord < u8::MAX && engine.max_ird < u8::MAX);
    net.finish();
}

#[test]
pub(super) fn a_rejection_delivers_its_private_data() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, at);
    net.at(1, |engine, world| engine.reject(world, at, id, b"not today"))
        .unwrap();
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!((event.event, event.status.cast_signed()), (8, REFUSED));
    assert_eq!(&event.param.private_data[..9], b"not today");
    assert!(net.take_events(1, at).is_empty());
    net.finish();
}

#[test]
fn refused_and_unanswered_attempts_have_different_events() {
    let mut net = Net::pair();
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 8, REFUSED)]);
    net.wire.borrow_mut().silent = true;
    let initiator = net.ready(0, 7471, 6, false);
    net.connect(0, initiator, parameters(4, 1, 1, &[]));
    net.advance(Duration::from_secs(19));
    assert!(net.take_events(0, initiator.0).is_empty());
    net.advance(Duration::from_secs(1));
    assert_eq!(net.take_events(0, initiator.0), [(6, initiator.1, 7, TIMED_OUT)]);
    net.finish();
}

#[test]
pub(super) fn accepting_after_the_initiators_timeout_fails() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, at);
    net.advance(Duration::from_secs(20));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 7, TIMED_OUT)]);
    let late = net.at(1, |engine, world| {
        engine.accept(world, at, id, 200, Some(parameters(9, 1, 1, &[])))
    });
    assert_eq!(late, Err(Errno::CONNRESET));
    assert!(net.wire.borrow().attached.is_empty());
    net.finish();
}

#[test]
fn an_external_queue_pair_is_attached_at_accept() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, true);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 1, 1, b"data"));
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!(
        (event.event, event.param.private_data_len),
        (5, 4),
        "CONNECT_RESPONSE"
    );
    assert!(net.take_events(1, at).is_empty(), "the RTR is due");
    for state in 1..=3 {
        assert!(
            net.at(0, |engine, world| engine.qp_attributes(
                world,
                initiator.0,
                initiator.1,
                state
            ))
            .is_ok()
        );
    }
    net.at(0, |engine, world| {
        engine.accept(world, initiator.0, initiator.1, 0, None)
    })
    .unwrap();
    assert_eq!(net.take_events(1, at), [(200, id, 9, 0)]);
    assert!(net.take_events(0, initiator.0).is_empty());
    assert_eq!(net.engines[0].notices(), [Notice::Open(3)]);
    net.finish();
}

#[test]
fn empa_07_the_second_attempt_uses_revision_1() {
    let mut old = Config::default();
    old.mpa.revision = 1;
    let mut net = Net::new(&[Config::default(), old]);
    let (initiator, responder) = connected(&mut net, parameters(3, 5, 6, &[]), parameters(9, 7, 8, &[]));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 9, 0)]);
    // No RTR message follows: the fence stays closed, and the event is reported immediately.
    assert_eq!(net.take_events(1, responder.0), [(200, responder.1, 9, 0)]);
    assert!(net.engines[1].notices().is_empty());
    {
        let wire = net.wire.borrow();
        let [(1, theirs), (0, ours)] = wire.attached[..] else {
            panic!("{:?}", wire.attached);
        };
        assert_eq!(
            (
                theirs.negotiated.unwrap().revision,
                ours.negotiated.unwrap().revision
            ),
            (1, 1)
        );
        assert_eq!(
            (ours.ird, ours.ord, theirs.ird, theirs.ord),
            (5, 6, 7, 8),
            "each end keeps its own limits"
        );
        assert_eq!(ours.negotiated.unwrap().rtr, None);
    }
    net.at(1, |engine, world| engine.first_fpdu(world, 9));
    assert_eq!(net.engines[1].notices(), [Notice::Open(9)]);
    net.finish();
}

#[test]
fn without_peer_to_peer_the_responder_begins_fenced() {
    let mut plain = Config::default();
    plain.mpa.peer_to_peer = false;
    let mut net = Net::new(&[plain, Config::default()]);
    let (initiator, responder) = connected(&mut net, parameters(3, 1, 1, &[]), parameters(9, 1, 1, &[]));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 9, 0)]);
    assert_eq!(net.take_events(1, responder.0), [(200, responder.1, 9, 0)]);
    assert!(net.engines[1].notices().is_empty());
    net.finish();
}

#[test]
fn every_rtr_message_is_offered_chosen_and_sent() {
    let types = |bits: u8| RtrTypes {
        send: bits & 1 != 0,
        write: bits & 2 != 0,
        read: bits & 4 != 0,
    };
    for ours in 1..8 {
        for theirs in 1..8 {
            let config = |bits| {
                let mut config = Config::default();
                config.mpa.rtr_types = types(bits);
                config
            };
            let mut net = Net::new(&[config(ours), config(theirs)]);
            let (initiator, responder) =
                connected(&mut net, parameters(3, 1, 1, &[]), parameters(9, 1, 1, &[]));
            let attached = net.wire.borrow().attached.clone();
            let [(1, at_responder), (0, at_initiator)] = attached[..] else {
                panic!("{attached:?}");
            };
            if ours & theirs == 0 {
                // EMPA-16: the initiator has no matching RTR message, and reports that by a
                // Terminate.
                assert_eq!(
                    at_initiator.negotiated.unwrap().terminate,
                    Some(terminate::NO_MATCHING_RTR)
                );
                assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 6, -71)]);
                assert_eq!(net.take_events(1, responder.0), [(200, responder.1, 6, -104)]);
            } else {
                assert_eq!(
                    at_initiator.negotiated.unwrap().rtr,
                    at_responder.negotiated.unwrap().rtr
                );
                assert!(at_initiator.negotiated.unwrap().rtr.is_some());
                assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 9, 0)]);
                assert_eq!(net.take_events(1, responder.0), [(200, responder.1, 9, 0)]);
            }
            net.finish();
        }
    }
}

#[test]
fn a_missing_rtr_ends_the_connection() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, true);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 1, 1, &[]));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 5, 0)]);
    net.advance(Duration::from_secs(10));
    assert_eq!(net.take_events(1, at), [(200, id, 7, TIMED_OUT)]);
    assert_eq!(net.wire.borrow().aborted, [(1, 9)]);
    net.finish();
}

#[test]
pub(super) fn a_lost_peer_is_reported_as_one_disconnection() {
    let mut net = Net::pair();
    let (initiator, responder) = connected(&mut net, parameters(3, 1, 1, &[]), parameters(9, 1, 1, &[]));
    let events = (
        net.take_events(0, initiator.0).len(),
        net.take_events(1, responder.0).len(),
    );
    assert_eq!(events, (1, 1));
    net.at(1, |engine, world| engine.close_channel(world, responder.0));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 10, 0)]);
    net.at(0, |engine, world| {
        engine.connection_ended(world, 3, Errno::CONNRESET)
    });
    assert!(net.take_events(0, initiator.0).is_empty());
    net.finish();
}

#[test]
pub(super) fn a_port_in_use_is_replaced_unless_the_program_chose_it() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    net.wire.borrow_mut().taken = (1..=u16::MAX).filter(|port| *port != FREE_PORT).collect();
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    net.request(1, at);
    assert_eq!(
        net.port_of(0, initiator),
        FREE_PORT,
        "queries name the port in use"
    );
    let refused = net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 6, PS_TCP).unwrap();
        let own = CmAddress::Ip("127.0.0.1:5555".parse().unwrap());
        let remote = CmAddress::Ip("127.0.0.1:7471".parse().unwrap());
        engine
            .resolve_address(world, channel, id, Some(own), remote)
            .unwrap();
        engine.resolve_route(world, channel, id).unwrap();
        engine.connect(world, channel, id, parameters(4, 1, 1, &[]))
    });
    assert_eq!(refused, Err(Errno::ADDRINUSE));
    net.finish();
}
