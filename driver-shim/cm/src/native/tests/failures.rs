//! Connection attempts that are lost, late, rejected or sent to the wrong queue pair.

use super::*;

#[test]
pub(super) fn an_unknown_number_is_rejected_permanently() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    let removed = make(&mut net, 1, 2);
    net.on(1, |engine, world| engine.remove_queue_pair(world, removed.qpn));
    up(&mut net, a, removed);
    net.until(100 * MS, |net| net.is_unreachable(0, 1));
    net.run(30 * SECOND);
    assert_eq!(net.notices(0), [Notice::Unreachable(1)]);
    assert_eq!(net.in_start_up(0), 0);
    let _ = b;
}

#[test]
pub(super) fn a_queue_pair_bound_to_another_peer_rejects() {
    let mut net = Net::new(3);
    let (a, b, c) = (make(&mut net, 0, 1), make(&mut net, 1, 1), make(&mut net, 2, 1));
    // b connects to c, which does not exist yet; a connects to b.
    up(&mut net, b, c);
    up(&mut net, a, b);
    net.until(100 * MS, |net| net.is_unreachable(0, 1));
    up(&mut net, c, b);
    net.until(100 * MS, both_open(b, c));
    assert_joined(&net, b, c);
}

#[test]
fn a_reused_number_is_not_mistaken_for_its_predecessor() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, b, a);
    // a expects the PSN of an earlier queue pair with b's number.
    let stale = PeerParams {
        rq_psn: psn(b) ^ 1,
        ..params(a, b)
    };
    net.on(0, |engine, world| engine.reached_rtr(world, a.qpn, stale));
    to_rts(&mut net, a);
    net.until(100 * MS, |net| net.is_unreachable(0, 1));
    assert!(net.attached(1, 1).is_empty());
}

#[test]
pub(super) fn an_abandoned_parked_request_is_skipped() {
    // The responder detects the closed stream when it accepts, and takes the next Request.
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, a, b);
    net.run(4 * MS);
    net.on(0, |engine, world| engine.retire(world, a.qpn, true));
    net.run(4 * MS);
    assert_eq!(
        net.in_start_up(1),
        1,
        "parked: the end of the stream is not reported"
    );
    up(&mut net, b, a);
    up(&mut net, a, b);
    net.until(2 * SECOND, both_open(a, b));
    net.run(SECOND);
    assert!(net.are_joined((0, 1), (1, 1)));
    assert!(!net.is_unreachable(0, 1) && !net.is_unreachable(1, 1));
}

#[test]
pub(super) fn parked_requests_of_other_peers_are_rejected_at_rtr() {
    let mut net = Net::new(3);
    let (a, b, c) = (make(&mut net, 0, 1), make(&mut net, 1, 1), make(&mut net, 2, 1));
    up(&mut net, a, c);
    up(&mut net, b, c);
    net.run(100 * MS);
    assert_eq!(net.in_start_up(2), 2);
    up(&mut net, c, b);
    net.until(100 * MS, both_open(b, c));
    net.until(100 * MS, |net| net.is_unreachable(0, 1));
    assert_joined(&net, b, c);
}

#[test]
pub(super) fn parking_is_bounded_in_time_and_requests_are_repeated() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, a, b);
    net.run(60 * SECOND);
    assert!(net.notices(0).is_empty(), "no send waits, so nothing has failed");
    assert!(net.in_start_up(1) <= 1);
    up(&mut net, b, a);
    net.until(2 * SECOND, both_open(a, b));
    net.run(SECOND);
    assert_joined(&net, a, b);
}

#[test]
fn parking_is_bounded_in_number() {
    let mut config = Config::default();
    config.native.max_parked = 20;
    let mut net = Net::with(2, &config);
    let idle: Vec<Qp> = (1..=10).map(|qid| make(&mut net, 1, qid)).collect();
    let initiators: Vec<Qp> = (1..=100).map(|qid| make(&mut net, 0, qid)).collect();
    // Twelve connect to the same queue pair, the others to different ones.
    for initiator in &initiators[..12] {
        up(&mut net, *initiator, idle[0]);
    }
    net.run(500 * MS);
    net.on(1, |engine, _| assert_eq!(engine.parked, MAX_PARKED_EACH));
    for (n, initiator) in initiators.iter().enumerate().skip(12) {
        up(&mut net, *initiator, idle[1 + n % 9]);
    }
    net.run(500 * MS);
    // A stream that is neither parked nor finished is a Request that was just repeated.
    net.on(1, |engine, _| {
        assert_eq!(engine.parked, 20);
        assert!(
            engine
                .pairs
                .values()
                .all(|pair| pair.parked.len() <= MAX_PARKED_EACH)
        );
        assert!(engine.streams.len() < 20 + 80);
    });
    idle.iter()
        .for_each(|qp| net.on(1, |engine, world| engine.remove_queue_pair(world, qp.qpn)));
    net.on(1, |engine, _| assert_eq!(engine.parked, 0));
}

#[test]
pub(super) fn a_send_without_a_peer_fails_after_the_retry_budget() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.set_stopped(1, true);
    net.send_waits(0, 1);
    up(&mut net, a, b);
    let took = net.until(10 * SECOND, |net| net.is_unreachable(0, 1));
    assert!(
        took >= 2 * SECOND && took < 3 * SECOND,
        "{took:?}: the peer has a second to initiate, and TCP one to retransmit"
    );
    net.run(SECOND);
    assert_eq!(net.in_start_up(0), 0);
}

#[test]
fn a_retry_budget_may_be_finite_or_unlimited() {
    for (retry_time, expected) in [(Some(16 * SECOND), Some(16 * SECOND)), (None, None)] {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        net.black_hole(0, 1);
        net.send_waits(0, 1);
        to_rtr(&mut net, a, b);
        let ready = RtsParams { retry_time, ..rts(a) };
        net.on(0, |engine, world| engine.reached_rts(world, a.qpn, ready));
        match expected {
            Some(expected) => {
                let took = net.until(30 * SECOND, |net| net.is_unreachable(0, 1));
                assert!(took >= expected && took < expected + 2 * SECOND, "{took:?}");
            }
            None => {
                net.run(3600 * SECOND);
                assert!(net.notices(0).is_empty());
            }
        }
    }
}

#[test]
fn attempts_without_a_waiting_send_do_not_end() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.set_stopped(1, true);
    up(&mut net, a, b);
    net.run(100 * SECOND);
    assert!(net.notices(0).is_empty());
    net.set_stopped(1, false);
    up(&mut net, b, a);
    net.until(2 * SECOND, both_open(a, b));
    assert_joined(&net, a, b);
}

#[test]
fn a_late_send_is_retried_as_long_as_an_early_one() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.set_stopped(1, true);
    up(&mut net, a, b);
    net.run(100 * SECOND);
    net.send_waits(0, 1);
    let took = net.until(10 * SECOND, |net| net.is_unreachable(0, 1));
    assert!(took >= 2 * SECOND && took < 3 * SECOND, "{took:?}");
}

#[test]
fn a_send_to_a_peer_below_rtr_fails_after_the_retry_budget() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.send_waits(0, 1);
    up(&mut net, a, b);
    net.run(SECOND);
    assert_eq!(net.in_start_up(1), 1, "the peer parks the Request");
    let took = net.until(10 * SECOND, |net| net.is_unreachable(0, 1));
    assert!(took >= SECOND && took < 2 * SECOND, "{took:?}");
    net.run(SECOND);
    assert_eq!(net.in_start_up(0), 0);
}

#[test]
pub(super) fn refused_attempts_back_off() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.set_stopped(1, true);
    up(&mut net, a, b);
    net.run(60 * SECOND);
    let attempts = net.on(0, |engine, _| match &engine.pairs[&a.qpn].phase {
        Phase::Connecting(connecting) => connecting.attempts,
        other => panic!("{other:?}"),
    });
    assert!((55..70).contains(&attempts), "{attempts} in a minute");
}

#[test]
fn a_fence_that_never_opens_times_out() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, b, a);
    // An initiator that identifies itself as a, takes the Reply, and sends nothing more.
    let us = Identity {
        from: a.qpn,
        to: b.qpn,
        unreliable: false,
        sq_psn: Some(psn(a)),
        rq_psn: psn(b),
        rnr_retry: Some(7),
        nonce: 1,
        ticket: None,
    };
    net.raw_stream(0, b.qpn, 1, &request_of(us));
    net.until(SECOND, |net| !net.attached(1, 1).is_empty());
    let took = net.until(20 * SECOND, |net| net.is_unreachable(1, 1));
    assert!(took >= 9 * SECOND);
    assert!(!net.is_open(1, 1));
}

#[test]
pub(super) fn removing_a_queue_pair_ends_its_start_up() {
    // One of the queue pairs is removed while the stream connects, sends the Request, or is parked.
    for (time, host) in [(0, 0), (1, 0), (3, 0), (100, 0), (3, 1), (100, 1)] {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        up(&mut net, a, b);
        net.run(time * MS);
        let removed = if host == 0 { a } else { b };
        net.on(host, |engine, world| engine.remove_queue_pair(world, removed.qpn));
        net.run(30 * SECOND);
        assert_eq!(
            (net.in_start_up(0), net.in_start_up(1)),
            (0, 0),
            "after {time} ms, host {host}"
        );
        assert_eq!(net.is_unreachable(0, 1), host == 1);
        net.on(host, |engine, _| {
            assert!(engine.streams.is_empty() && engine.pairs.is_empty() && engine.parked == 0)
        });
    }
}

#[test]
fn rnr_policy_has_the_senders_count_and_the_receivers_timer() {
    assert_eq!(rnr_timeout(7, 12), None);
    assert_eq!(rnr_timeout(0, 12), Some(Duration::ZERO));
    assert_eq!(rnr_timeout(1, 1), Some(MIN_RNR));
    assert_eq!(rnr_timeout(6, 0), Some(Duration::from_micros(6 * 655_360)));
    assert_eq!(rnr_timeout(2, 31), Some(Duration::from_micros(2 * 491_520)));

    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    for (us, peer, rnr_retry) in [(a, b, 2), (b, a, 7)] {
        let params = PeerParams {
            min_rnr_timer: 31,
            ..params(us, peer)
        };
        net.on(us.host, |engine, world| engine.reached_rtr(world, us.qpn, params));
        let ready = RtsParams { rnr_retry, ..rts(us) };
        net.on(us.host, |engine, world| engine.reached_rts(world, us.qpn, ready));
    }
    net.until(SECOND, both_open(a, b));
    assert_eq!(
        rnr_timeout_of(&net.attached(0, 1)[0]),
        None,
        "b retries without limit"
    );
    assert_eq!(
        rnr_timeout_of(&net.attached(1, 1)[0]),
        Some(Duration::from_micros(2 * 491_520)),
        "a retries twice"
    );
    net.on(1, |engine, _| {
        assert_eq!(
            engine.rnr_timeout(b.qpn, 30),
            Some(Some(Duration::from_micros(2 * 327_680)))
        );
        assert_eq!(engine.rnr_timeout(a.qpn + 1000, 30), None);
    });
}
