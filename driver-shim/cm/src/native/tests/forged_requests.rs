//! Requests that resemble the peer's: from another address, without a PSN, or with a guessed PSN.

use std::net::Ipv4Addr;

use super::*;
use crate::native::tests::net::other_address;

/// A Request of `from` for `to` with these PSNs.
fn request_with_psns(from: Qp, to: Qp, sq_psn: Option<u32>, rq_psn: u32) -> Vec<u8> {
    let us = Identity {
        from: from.qpn,
        to: to.qpn,
        unreliable: false,
        sq_psn,
        rq_psn,
        rnr_retry: Some(7),
        nonce: 9,
        ticket: None,
    };
    request_of(us)
}

/// The Request that the peer itself would send.
fn valid_request(from: Qp, to: Qp) -> Vec<u8> {
    request_with_psns(from, to, Some(psn(from)), psn(to))
}

/// Two queue pairs on hosts 0 and 1; the third host belongs to an attacker.
fn two_peers_and_an_attacker(config: &Config) -> (Net, Qp, Qp) {
    let mut net = Net::with(3, config);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    (net, a, b)
}

fn with_nat() -> Config {
    let mut config = Config::default();
    config.native.allow_nat = true;
    config
}

/// Checks that an attacker's stream received a rejecting Reply and was closed.
fn assert_refused(net: &Net, sid: u32) {
    let (reply, closed) = net.received_on(sid);
    assert!(closed && is_rejection(&reply));
}

#[test]
pub(super) fn a_request_without_a_psn_connects_nothing() {
    for (parked, ready) in [(true, false), (true, true), (false, false), (false, true)] {
        let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
        let enter = |net: &mut Net| {
            to_rtr(net, b, a);
            if ready {
                to_rts(net, b);
            }
        };
        if !parked {
            enter(&mut net);
        }
        // The Request comes from the peer's own address, and is otherwise valid.
        let sid = net.raw_stream(0, b.qpn, 1, &request_with_psns(a, b, None, psn(b)));
        net.run(50 * MS);
        if parked {
            enter(&mut net);
        }
        net.run(50 * MS);
        assert_refused(&net, sid);
        assert!(net.attached(1, 1).is_empty(), "parked {parked}, at RTS {ready}");
        up(&mut net, a, b);
        net.until(2 * SECOND, |net| net.is_open(0, 1));
    }
}

#[test]
pub(super) fn a_request_from_another_address_is_refused_unless_allowed() {
    for allowed in [false, true] {
        for (parked, ready) in [(true, false), (true, true), (false, false), (false, true)] {
            let config = if allowed { with_nat() } else { Config::default() };
            let (mut net, a, b) = two_peers_and_an_attacker(&config);
            let enter = |net: &mut Net| {
                to_rtr(net, b, a);
                if ready {
                    to_rts(net, b);
                }
            };
            if !parked {
                enter(&mut net);
            }
            let sid = net.raw_stream(2, b.qpn, 1, &valid_request(a, b));
            net.run(10 * MS);
            if parked {
                enter(&mut net);
            }
            net.run(2 * RTS_GRACE);
            assert_eq!(net.attached(1, 1).len(), usize::from(allowed), "{parked} {ready}");
            if !allowed {
                assert_refused(&net, sid);
                up(&mut net, a, b);
                net.until(2 * SECOND, |net| net.is_open(0, 1));
            }
        }
    }
}

#[test]
pub(super) fn an_initiator_connects_from_the_address_of_its_gid() {
    let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
    net.route_from(0, other_address(0));
    up(&mut net, a, b);
    up(&mut net, b, a);
    let took = net.until(SECOND, both_open(a, b));
    assert!(took < 20 * MS, "{took:?}");
    assert_joined(&net, a, b);
}

#[test]
pub(super) fn after_a_refused_source_address_the_peer_initiates() {
    // The address of the lower end, which initiates, is translated; the other direction is not.
    let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
    net.translate(0, other_address(7));
    up(&mut net, b, a);
    up(&mut net, a, b);
    let took = net.until(SECOND, both_open(a, b));
    assert!(took < 50 * MS, "{took:?}: waited for the grace period");
    net.run(SECOND);
    assert_joined(&net, a, b);
}

#[test]
fn two_translated_hosts_connect_only_if_nat_is_allowed() {
    for allowed in [false, true] {
        let config = if allowed { with_nat() } else { Config::default() };
        let (mut net, a, b) = two_peers_and_an_attacker(&config);
        net.translate(0, other_address(7));
        net.translate(1, other_address(8));
        for (us, peer) in [(a, b), (b, a)] {
            net.send_waits(us.host, us.qid);
            up(&mut net, us, peer);
        }
        net.run(30 * SECOND);
        assert_eq!((net.is_open(0, 1), net.is_unreachable(0, 1)), (allowed, !allowed));
    }
}

#[test]
pub(super) fn peers_of_one_host_may_use_any_of_its_addresses() {
    for source in [Ipv4Addr::LOCALHOST.into(), other_address(0)] {
        let mut net = Net::new(1);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 0, 2));
        net.translate(0, source);
        up(&mut net, a, b);
        up(&mut net, b, a);
        net.until(20 * MS, both_open(a, b));
        assert_joined(&net, a, b);
    }
    // Loopback is not the address of another host.
    let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
    up(&mut net, b, a);
    net.translate(2, Ipv4Addr::LOCALHOST.into());
    let sid = net.raw_stream(2, b.qpn, 1, &valid_request(a, b));
    net.run(100 * MS);
    assert_refused(&net, sid);
}

#[test]
pub(super) fn guessed_psns_at_rtr_do_not_keep_out_the_peer() {
    for receive_only in [false, true] {
        let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
        to_rtr(&mut net, b, a);
        // The Requests come from another user of the peer's host. The queue pair examines 16, and
        // one more each second.
        for n in 0..200 {
            net.raw_stream(
                0,
                b.qpn,
                1,
                &request_with_psns(a, b, Some(psn(a) ^ (n + 1)), psn(b)),
            );
            net.run(MS / 10);
        }
        // A Request with the right PSN is rejected unexamined.
        let sid = net.raw_stream(0, b.qpn, 1, &valid_request(a, b));
        net.run(10 * MS);
        assert_refused(&net, sid);
        assert!(net.attached(1, 1).is_empty());
        // Guesses continue at both ends while the peer connects.
        if !receive_only {
            to_rts(&mut net, b);
        }
        up(&mut net, a, b);
        let mut n = 1000;
        while !both_open(a, b)(&net) {
            n += 1;
            assert!(n < 50_000, "the peer is kept out");
            net.raw_stream(0, b.qpn, 1, &request_with_psns(a, b, Some(psn(a) ^ n), psn(b)));
            net.raw_stream(1, a.qpn, 0, &request_with_psns(b, a, Some(psn(b) ^ n), psn(a)));
            net.raw_stream(1, a.qpn, 0, &request_with_psns(b, a, None, psn(a) ^ n));
            net.run(MS / 10);
        }
        assert!(net.are_joined((0, 1), (1, 1)));
    }
}

#[test]
pub(super) fn at_rts_both_psns_must_match() {
    let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
    up(&mut net, b, a);
    for n in 0..100 {
        for (sq, rq) in [(psn(a), psn(b) ^ (n + 1)), (psn(a) ^ (n + 1), psn(b))] {
            net.raw_stream(0, b.qpn, 1, &request_with_psns(a, b, Some(sq), rq));
        }
    }
    net.run(100 * MS);
    assert!(net.attached(1, 1).is_empty());
    // The right Request is accepted after any number of wrong Requests.
    net.raw_stream(0, b.qpn, 1, &valid_request(a, b));
    net.run(5 * MS);
    assert_eq!(net.attached(1, 1).len(), 1);
}

#[test]
pub(super) fn one_more_request_is_examined_each_second() {
    let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
    to_rtr(&mut net, b, a);
    for n in 0..50 {
        net.raw_stream(
            0,
            b.qpn,
            1,
            &request_with_psns(a, b, Some(psn(a) ^ (n + 1)), psn(b)),
        );
    }
    net.run(10 * MS);
    let take = |net: &mut Net| {
        net.raw_stream(0, b.qpn, 1, &valid_request(a, b));
        net.run(2 * RTS_GRACE);
        net.attached(1, 1).len()
    };
    assert_eq!(take(&mut net), 0);
    net.run(1100 * MS);
    assert_eq!(take(&mut net), 1);
}

#[test]
pub(super) fn another_host_cannot_displace_parked_requests() {
    let mut config = Config::default();
    config.native.max_parked = 20;
    let (mut net, a, b) = two_peers_and_an_attacker(&config);
    let idle: Vec<Qp> = (2..30).map(|qid| make(&mut net, 1, qid)).collect();
    up(&mut net, a, b);
    net.run(10 * MS);
    assert_eq!(net.in_start_up(1), 1, "the Request of the peer is parked");
    for n in 0..100 {
        net.raw_stream(2, b.qpn, 1, &valid_request(a, b));
        net.raw_stream(2, b.qpn, 1, &valid_request(a, idle[n % idle.len()]));
    }
    net.run(10 * MS);
    net.on(1, |engine, _| assert_eq!(engine.parked, 20));
    up(&mut net, b, a);
    let took = net.until(SECOND, |net| net.are_joined((0, 1), (1, 1)));
    assert!(took <= MS, "{took:?}: the Request was no longer parked");
}

#[test]
pub(super) fn a_displaced_parked_request_is_replaced_soon() {
    let (mut net, a, b) = two_peers_and_an_attacker(&Config::default());
    up(&mut net, a, b);
    net.run(10 * MS);
    // The Requests come from the peer's host, so their address is valid. They occupy all places
    // when the queue pair reaches RTR.
    for _ in 0..100 {
        net.raw_stream(0, b.qpn, 1, &request_with_psns(a, b, Some(1), 2));
    }
    net.run(5 * MS);
    up(&mut net, b, a);
    let took = net.until(2 * SECOND, both_open(a, b));
    assert!(took < 50 * MS, "{took:?}: waited for the grace period");
}
