//! What is different over SCTP: no fence, the choice of the lower layer, and whole messages.

use super::*;
use crate::carrier::testing::run_over_sctp;
use crate::mpa_startup::Depths;
use urnic_config::Identity as DeviceIdentity;

/// A configuration whose file contains this text.
fn config(text: &str) -> Config {
    let mut config = Config::default();
    config.set_file(text, std::path::Path::new("test.toml")).unwrap();
    config
}

fn llp_of(net: &Net, qp: Qp) -> Llp {
    net.attached(qp.host, qp.qid)[0].negotiated.unwrap().llp
}

/// Joins queue pairs of two hosts, and returns the lower layer of their stream.
fn joined(net: &mut Net, hosts: (usize, usize), qid: u32) -> Llp {
    let (a, b) = (make(net, hosts.0, qid), make(net, hosts.1, qid + 100));
    up(net, a, b);
    up(net, b, a);
    net.until(10 * SECOND, both_open(a, b));
    net.run(SECOND);
    assert_joined(net, a, b);
    assert_eq!(llp_of(net, a), llp_of(net, b));
    llp_of(net, a)
}

#[test]
fn sctp_06_the_responder_is_open_once_it_has_accepted() {
    let mut net = Net::with(2, &config("llp = \"sctp\""));
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, b, a);
    up(&mut net, a, b);
    net.until(SECOND, |net| net.is_open(1, 1));
    assert!(!net.is_open(0, 1), "the Accept is on its way");
    net.until(SECOND, both_open(a, b));
    for (qp, initiator) in [(a, true), (b, false)] {
        let attached = net.attached(qp.host, qp.qid)[0];
        let negotiated = attached.negotiated.unwrap();
        let depths = Depths {
            ird: Some(17),
            ord: Some(9),
        };
        let expected = Negotiated {
            depths,
            ..Negotiated::of_session(initiator, true)
        };
        assert_eq!(negotiated, expected);
        assert!(!negotiated.fenced && negotiated.rtr.is_none() && !negotiated.crc);
        assert_eq!((attached.ird, attached.ord, attached.ord_limit), (16, 8, 9));
    }
}

#[test]
fn the_lower_layer_is_that_of_the_peers_section() {
    // The hosts 10.0.0.1 and 10.0.0.2 reach each other over SCTP, and 10.0.0.3 over TCP.
    let near = "[[peer]]\naddress = \"10.0.0.1\"\nllp = \"sctp\"\n[[peer]]\naddress = \"10.0.0.2\"\nllp = \"sctp\"\n";
    let mut net = Net::with(3, &config(near));
    assert_eq!(joined(&mut net, (0, 1), 1), Llp::Sctp);
    assert_eq!(joined(&mut net, (1, 2), 2), Llp::Tcp);
    assert_eq!(joined(&mut net, (0, 0), 3), Llp::Sctp, "on one host, too");
    assert_eq!(net.listeners(0), 2);
    let far = "llp = \"sctp\"\n[[peer]]\naddress = \"10.0.0.0/24\"\nprofile = \"siw\"\n";
    assert_eq!(joined(&mut Net::with(2, &config(far)), (0, 1), 1), Llp::Tcp);
}

#[test]
fn queue_pairs_of_kind_uc_stay_with_tcp() {
    let roce = Config {
        identity: DeviceIdentity::Roce,
        ..config("llp = \"sctp\"")
    };
    let mut net = Net::with(2, &roce);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    unreliable::unreliable_up(&mut net, a, b);
    unreliable::unreliable_up(&mut net, b, a);
    net.until(SECOND, both_open(a, b));
    assert_eq!((llp_of(&net, a), llp_of(&net, b)), (Llp::Tcp, Llp::Tcp));
    assert_eq!(joined(&mut net, (0, 1), 2), Llp::Sctp);
}

#[test]
fn ends_with_different_lower_layers_do_not_connect() {
    let mut net = Net::of(&[config("llp = \"sctp\""), config("")]);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, a, b);
    up(&mut net, b, a);
    net.run(20 * SECOND);
    assert!(!net.is_open(0, 1) && !net.is_open(1, 1));
}

#[test]
fn a_port_is_one_that_is_free_over_both_lower_layers() {
    let both = config("llp = \"sctp\"\n[[peer]]\naddress = \"10.0.0.9\"\nllp = \"tcp\"\n");
    for (range, taken, expected) in [
        // Each attempt takes two numbers of the simulated hosts.
        (None, 1000..1003, Ok(1004)),
        (Some(7000..=7002), 7000..7002, Ok(7002)),
        (Some(7000..=7001), 7000..7002, Err(Errno::ADDRINUSE)),
        (None, 1000..2000, Err(Errno::ADDRINUSE)),
    ] {
        let mut config = both.clone();
        config.native.port_range = range;
        let mut net = Net::with(1, &config);
        taken.for_each(|port| net.take_port(0, Llp::Sctp, port));
        let before = net.listeners(0);
        let qpn = net.on(0, |engine, world| engine.add_queue_pair(world));
        assert_eq!(qpn.map(|qpn| qpn >> 8), expected);
        let more = if expected.is_ok() { 2 } else { 0 };
        assert_eq!(net.listeners(0), before + more, "none is left");
    }
}

#[test]
fn a_terminate_in_place_of_an_answer_is_an_attempt_that_failed() {
    run_over_sctp(|| {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        up(&mut net, a, b);
        net.run(5 * MS);
        // The peer has parked the Request; a Terminate comes in its name.
        let sid = net.on(0, |engine, _| *engine.streams.keys().next().unwrap());
        net.on(0, |engine, world| engine.received(world, sid, Ok(&[0, 4])));
        assert_eq!(net.in_start_up(0), 0);
        net.run(100 * MS);
        up(&mut net, b, a);
        net.until(SECOND, both_open(a, b));
        assert_joined(&net, a, b);
    });
}

#[test]
fn a_message_before_the_accept_ends_the_attempt() {
    run_over_sctp(|| {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        let us = Identity {
            from: a.qpn,
            to: b.qpn,
            unreliable: false,
            sq_psn: Some(psn(a)),
            rq_psn: psn(b),
            rnr_retry: Some(7),
            nonce: 3,
            ticket: None,
        };
        let sid = net.raw_stream(0, b.qpn, 1, &request_of(us));
        net.send_raw(sid, &request_of(us));
        net.run(10 * MS);
        assert_eq!(net.in_start_up(1), 1, "parked");
        up(&mut net, b, a);
        net.run(10 * MS);
        assert_eq!(net.received_on(sid), (Vec::new(), true));
        assert!(net.attached(1, 1).is_empty());
    });
}
