//! What is different over SCTP: no fence, listeners over two lower layers, and Terminates.

use super::*;
use crate::carrier::testing::run_over_sctp;
use crate::ddp_session::{self, Active};
use crate::mpa_startup::{Offer, Rtr};
use crate::rdma_cm::failures::Cause;
use crate::startup::Fault;
use urnic_wire::sctp::session::{Function, SessionMessage};

const PROTO: i32 = -71;

/// A configuration whose file contains this text.
fn config(text: &str) -> Config {
    let mut config = Config::default();
    config.set_file(text, std::path::Path::new("test.toml")).unwrap();
    config
}

fn sctp() -> Config {
    config("llp = \"sctp\"")
}

/// Both lower layers, and SCTP for the peers of these tests.
fn both() -> Config {
    config("[[peer]]\naddress = \"127.0.0.0/8\"\nllp = \"sctp\"")
}

/// Begins to connect; returns the initiator's channel and id, and its stream.
fn begin(net: &mut Net) -> ((u64, u32), u32) {
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 4, 2, b"hello"));
    let attempts = net.engines[0].streams.keys().copied();
    (initiator, attempts.max().unwrap())
}

/// The results of start-up at the responder and at the initiator.
fn negotiated(net: &Net) -> [Negotiated; 2] {
    let attached = net.wire.borrow().attached.clone();
    let [(1, responder), (0, initiator)] = attached[..] else {
        panic!("{attached:?}");
    };
    [responder, initiator].map(|attachment| attachment.negotiated.unwrap())
}

#[test]
fn sctp_06_the_responder_is_established_once_it_has_accepted() {
    let mut net = Net::new(&[sctp(), sctp()]);
    let (at, _) = net.listen(1, 7471, 0);
    // The program has not brought its queue pair to RTS.
    let initiator = net.ready(0, 7471, 5, true);
    net.connect(0, initiator, parameters(3, 4, 2, b"hello"));
    let (id, param) = net.request(1, at);
    assert_eq!(
        (&param.private_data[..5], param.private_data_len),
        (&b"hello"[..], 5)
    );
    net.accept(1, at, id, 200, parameters(9, 8, 8, b"welcome"));
    assert_eq!(net.take_events(1, at), [(200, id, 9, 0)]);
    assert_eq!(net.engines[1].notices(), [Notice::Open(9)]);
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 5, 0)]);
    let (channel, id) = initiator;
    net.at(0, |engine, world| engine.accept(world, channel, id, 0, None))
        .unwrap();
    let [theirs, ours] = negotiated(&net);
    for (of, initiator) in [(theirs, false), (ours, true)] {
        let expected = Negotiated {
            depths: of.depths,
            ..Negotiated::of_session(initiator, true)
        };
        assert_eq!(of, expected, "no fence, no RTR, no CRC, no markers");
    }
    assert_eq!((ours.depths.ord, theirs.depths.ord), (Some(2), Some(4)));
    net.finish();
}

#[test]
fn a_peer_without_rfc_6581_is_asked_again_without_it() {
    let mut old = sctp();
    old.mpa.revision = 1;
    let mut net = Net::new(&[sctp(), old]);
    let (at, _) = net.listen(1, 7471, 0);
    let (initiator, _) = begin(&mut net);
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 7, 8, b"welcome"));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 9, 0)]);
    assert_eq!(net.take_events(1, at), [(200, id, 9, 0)]);
    assert_eq!(
        negotiated(&net).map(|of| (of.llp, of.revision)),
        [(Llp::Sctp, 1); 2]
    );
    net.finish();
}

#[test]
fn requests_beyond_the_backlog_are_refused_without_private_data() {
    let mut net = Net::new(&[sctp(), sctp()]);
    net.listen(1, 7471, 1);
    begin(&mut net);
    let (second, _) = begin(&mut net);
    let event = net.event(0, second.0).unwrap();
    assert_eq!((event.event, event.status.cast_signed()), (8, REFUSED));
    assert_eq!(event.param.private_data_len, 0);
    net.finish();
}

/// What the initiator receives in place of an answer, and the event that follows. After a Terminate
/// it has asked again without RFC 6581.
#[test]
fn what_is_no_answer_ends_the_attempt() {
    let message = |function| {
        let mut bytes = [0; 2];
        SessionMessage::new(function, None, b"").emit(&mut bytes).unwrap();
        bytes.to_vec()
    };
    let closed: Result<Vec<u8>, Errno> = Err(Errno::CONNRESET);
    for (answers, event) in [
        (
            vec![Ok(message(Function::Terminate)), Ok(message(Function::Terminate))],
            (8, REFUSED),
        ),
        (vec![Ok(Vec::new()), Ok(Vec::new())], (8, REFUSED)),
        (vec![Ok(message(Function::Accept))], (6, PROTO)),
        (vec![Ok(message(Function::Initiate))], (6, PROTO)),
        (vec![Ok(b"MPA ID Rep Frame".to_vec())], (6, PROTO)),
        (vec![Ok(vec![0])], (6, PROTO)),
        (vec![closed], (8, -104)),
    ] {
        let mut net = Net::new(&[sctp(), sctp()]);
        net.listen(1, 7471, 0);
        let (initiator, _) = begin(&mut net);
        for answer in &answers {
            let sid = *net.engines[0].streams.keys().next().unwrap();
            let answer = answer.as_deref().map_err(|errno| *errno);
            net.at(0, |engine, world| engine.received(world, sid, answer));
            net.run();
        }
        let events = net.take_events(0, initiator.0);
        assert_eq!(events, [(5, initiator.1, event.0, event.1)], "{answers:?}");
        assert!(net.engines[0].streams.is_empty());
        net.finish();
    }
}

#[test]
fn what_is_no_initiate_is_no_request() {
    for message in [&b"\0\x04"[..], b"\0\x02", b"\0", b"MPA ID Req Frame"] {
        let mut net = Net::new(&[sctp(), sctp()]);
        let (at, _) = net.listen(1, 7471, 0);
        let sid = net.raw_stream(0, Llp::Sctp, 7471, message);
        net.run();
        assert!(net.take_events(1, at).is_empty());
        assert!(net.has_ended(sid) && net.engines[1].streams.is_empty());
        net.close_raw(0, sid);
        net.finish();
    }
}

#[test]
fn an_rtr_indication_of_a_peer_is_expected_and_opens_nothing() {
    let mut net = Net::new(&[sctp(), sctp()]);
    let (at, _) = net.listen(1, 7471, 0);
    let offer = Offer {
        peer_to_peer: true,
        depths: Depths::default(),
        max_ird: 16,
    };
    let settings = Settings::from(&sctp().mpa);
    let (_, initiate) = Active::new(settings, Some(offer), b"", Time::ZERO).unwrap();
    let sid = net.raw_stream(0, Llp::Sctp, 7471, &initiate);
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 8, 8, b""));
    assert_eq!(net.take_events(1, at), [(200, id, 9, 0)]);
    assert_eq!(net.engines[1].notices(), [Notice::Open(9)]);
    let attached = net.wire.borrow().attached[0].1.negotiated.unwrap();
    assert_eq!((attached.rtr, attached.fenced), (Some(Rtr::Read), false));
    net.close_raw(0, sid);
    net.finish();
}

#[test]
fn a_listener_has_one_port_over_both_lower_layers() {
    let mut net = Net::new(&[Config::default(), both()]);
    let (at, id) = net.listen(1, 7471, 0);
    assert_eq!(net.wire.borrow().llps(7471), [Llp::Tcp, Llp::Sctp]);
    for (llp, peer) in [(Llp::Tcp, Config::default()), (Llp::Sctp, sctp())] {
        net.engines[0] = Engine::new(&peer, 16, 16, 1);
        let (initiator, _) = begin(&mut net);
        let (id, _) = net.request(1, at);
        net.accept(1, at, id, 200, parameters(9, 1, 1, &[]));
        let attached = net.wire.borrow_mut().attached.drain(..).next_back().unwrap().1;
        assert_eq!(attached.negotiated.unwrap().llp, llp);
        net.at(0, |engine, world| engine.close_channel(world, initiator.0));
        net.take_events(1, at);
    }
    net.at(1, |engine, world| engine.destroy(world, at, id)).unwrap();
    assert!(net.wire.borrow().listening().is_empty());
    net.finish();
}

#[test]
fn a_chosen_port_is_free_over_both_lower_layers() {
    let mut net = Net::new(&[both(), both()]);
    let next = net.wire.borrow_mut().number() as u16;
    let taken = (0..9).map(|n| (Llp::Sctp, 40_000 + next + n)).collect();
    net.wire.borrow_mut().busy = taken;
    let (at, id) = net.listen(1, 0, 0);
    let port = net.port_of(1, (at, id));
    assert!(port > 40_000 + next + 8);
    assert_eq!(net.wire.borrow().listening(), [port, port]);
    net.wire.borrow_mut().busy.push((Llp::Sctp, 7471));
    let bound = net.at(1, |engine, world| {
        let id = engine.create(at, 101, PS_TCP).unwrap();
        let local = CmAddress::Ip("0.0.0.0:7471".parse().unwrap());
        engine.bind(world, at, id, local)
    });
    assert_eq!(bound, Err(Errno::ADDRINUSE));
    assert_eq!(net.wire.borrow().listening(), [port, port], "none is left");
    net.finish();
}

#[test]
fn a_device_without_sctp_refuses_to_bind() {
    let mut net = Net::new(&[both(), both()]);
    net.wire.borrow_mut().without_sctp = true;
    let bound = net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, PS_TCP).unwrap();
        let local = CmAddress::Ip("0.0.0.0:7471".parse().unwrap());
        engine.bind(world, channel, id, local)
    });
    assert_eq!(bound, Err(Errno::OPNOTSUPP));
    let (channel, id) = net.ready(0, 7471, 5, false);
    let connected = net.at(0, |engine, world| {
        engine.connect(world, channel, id, parameters(3, 1, 1, &[]))
    });
    assert_eq!(connected, Err(Errno::OPNOTSUPP));
    net.finish();
}

/// A RoCE NIC's listener has its UDP port for messages, and SCTP has another one.
#[test]
fn a_silent_port_is_asked_for_the_one_of_sctp() {
    let roce = Config {
        identity: Identity::Roce,
        ..sctp()
    };
    let mut net = Net::new(&[sctp(), roce]);
    let (at, _) = net.listen(1, 7471, 0);
    let (initiator, _) = begin(&mut net);
    net.advance(SCTP_TIME / 2);
    assert!(net.event(1, at).is_none(), "nothing has answered");
    net.advance(SCTP_TIME / 2);
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 1, 1, &[]));
    assert_eq!(negotiated(&net).map(|of| of.llp), [Llp::Sctp; 2]);
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 9, 0)]);
    net.engines[1].notices();
    net.finish();
}

#[test]
fn a_port_that_stays_silent_is_tried_again_in_time() {
    let mut net = Net::new(&[sctp(), sctp()]);
    let refused = net.ready(0, 7471, 4, false);
    net.connect(0, refused, parameters(3, 1, 1, &[]));
    let events = net.take_events(0, refused.0);
    assert_eq!(events, [(4, refused.1, 8, REFUSED)], "no program has the port");
    net.wire.borrow_mut().silent = true;
    net.wire.borrow_mut().ud.mute = true;
    let (initiator, _) = begin(&mut net);
    net.advance(SCTP_TIME);
    for _ in 0..3 {
        net.advance(MAX_INTERVAL);
    }
    // A program listens after all.
    net.wire.borrow_mut().silent = false;
    net.advance(Duration::from_secs(4));
    assert!(net.take_events(0, initiator.0).is_empty());
    net.advance(Duration::from_secs(20));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 7, TIMED_OUT)]);
    net.finish();
}

#[test]
fn queue_pairs_of_kind_uc_stay_with_tcp() {
    let roce = Config {
        identity: Identity::Roce,
        ..sctp()
    };
    for (unreliable, llp) in [(vec![3, 9], Llp::Tcp), (vec![], Llp::Sctp)] {
        let mut net = Net::new(&[roce.clone(), roce.clone()]);
        net.wire.borrow_mut().unreliable = unreliable;
        let (at, _) = net.listen(1, 7471, 0);
        let (initiator, _) = begin(&mut net);
        let (id, _) = net.request(1, at);
        net.accept(1, at, id, 200, parameters(9, 1, 1, &[]));
        net.take_events(0, initiator.0);
        net.at(0, |engine, world| {
            engine.accept(world, initiator.0, initiator.1, 0, None)
        })
        .unwrap();
        assert_eq!(negotiated(&net).map(|of| of.llp), [llp; 2]);
        net.engines.iter_mut().for_each(|engine| drop(engine.notices()));
        net.finish();
    }
}

#[test]
fn an_accepted_request_without_a_queue_pair_sends_no_segment() {
    run_over_sctp(|| {
        let mut net = Net::pair();
        let (at, _) = net.listen(1, 7471, 0);
        net.wire.borrow_mut().unattachable = vec![3];
        let (initiator, sid) = begin(&mut net);
        let (id, _) = net.request(1, at);
        net.accept(1, at, id, 200, parameters(9, 1, 1, b"welcome"));
        assert_eq!(net.take_events(0, initiator.0).len(), 1);
        assert!(!net.engines[0].streams.contains_key(&sid));
        let accept = net.wire.borrow().last_sent.clone();
        assert!(accept.ends_with(b"welcome"), "nothing follows the Accept");
        net.at(1, |engine, world| {
            engine.connection_ended(world, 9, Errno::CONNRESET)
        });
    });
}

#[test]
fn lines_about_sctp_do_not_speak_of_tcp() {
    let second = Duration::from_secs(1);
    for cause in [
        Cause::Refused(Errno::CONNREFUSED, Location::Absent),
        Cause::Refused(Errno::CONNRESET, Location::Unknown),
        Cause::Refused(Errno::TIMEDOUT, Location::Unknown),
        Cause::Silent(second),
        Cause::NoFrame(second, Default::default()),
        Cause::Ended(Default::default()),
        Cause::NotWaiting,
        Cause::Fault(Fault::Session(ddp_session::Fault::Closed)),
    ] {
        assert!(!cause.over(Llp::Sctp).to_string().contains("TCP"), "{cause}");
        assert_eq!(cause.over(Llp::Tcp).to_string(), cause.to_string());
    }
}
