//! Connection attempts that are lost, late, rejected or sent to the wrong queue pair.

use super::*;

#[test]
fn an_unknown_number_is_turned_down_for_good() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    let gone = make(&mut net, 1, 2);
    net.on(1, |engine, world| engine.remove_queue_pair(world, gone.qpn));
    up(&mut net, a, gone);
    net.until(100 * MS, |net| net.is_unreachable(0, 1));
    net.run(30 * SECOND);
    assert_eq!(net.notices(0), [Notice::Unreachable(1)]);
    assert_eq!((net.in_start_up(0), net.in_start_up(1)), (0, 0));
    let _ = b;
}

#[test]
fn a_queue_pair_bound_to_another_peer_rejects() {
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
fn a_call_whose_caller_hung_up_does_no_harm() {
    // It is found out when the stream would be used, and the next call is taken.
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, a, b);
    net.run(4 * MS);
    net.on(0, |engine, world| engine.retire(world, a.qpn, true));
    net.run(4 * MS);
    assert_eq!(net.in_start_up(1), 1, "parked, and nobody says that it is dead");
    up(&mut net, b, a);
    up(&mut net, a, b);
    net.until(2 * SECOND, both_open(a, b));
    net.run(SECOND);
    assert!(net.are_joined((0, 1), (1, 1)));
    assert!(!net.is_unreachable(0, 1) && !net.is_unreachable(1, 1));
}

#[test]
fn parked_calls_of_others_are_turned_down_at_rtr() {
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
fn parking_is_bounded_in_time_and_the_call_is_repeated() {
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
    let callers: Vec<Qp> = (1..=100).map(|qid| make(&mut net, 0, qid)).collect();
    // Twelve connect to the same queue pair, the others to different ones.
    for caller in &callers[..12] {
        up(&mut net, *caller, idle[0]);
    }
    net.run(500 * MS);
    net.on(1, |engine, _| assert_eq!(engine.parked, MAX_PARKED_EACH));
    for (n, caller) in callers.iter().enumerate().skip(12) {
        up(&mut net, *caller, idle[1 + n % 9]);
    }
    net.run(500 * MS);
    // What is neither parked nor settled is a call that was just repeated.
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
fn a_send_without_a_peer_fails_when_the_retries_are_spent() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.kill(1, true);
    net.send_waits(0, 1);
    up(&mut net, a, b);
    let took = net.until(10 * SECOND, |net| net.is_unreachable(0, 1));
    assert!(
        took >= 4 * SECOND,
        "{took:?}: the other side has a second to call, and TCP one to repeat itself"
    );
    net.run(SECOND);
    assert_eq!(net.in_start_up(0), 0);
}

#[test]
fn retry_budgets_are_waited_for_and_may_be_endless() {
    for (timeout, expected) in [(Some(2 * SECOND), Some(16 * SECOND)), (None, None)] {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        net.black_hole(0, 1);
        net.send_waits(0, 1);
        to_rtr(&mut net, a, b);
        let ready = RtsParams { timeout, ..rts(a) };
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
fn without_a_send_a_lost_peer_is_called_until_it_is_back() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.kill(1, true);
    up(&mut net, a, b);
    net.run(100 * SECOND);
    assert!(net.notices(0).is_empty());
    net.kill(1, false);
    up(&mut net, b, a);
    net.until(2 * SECOND, both_open(a, b));
    assert_joined(&net, a, b);
}

#[test]
fn a_send_posted_after_the_budget_was_spent_fails_soon() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.kill(1, true);
    up(&mut net, a, b);
    net.run(100 * SECOND);
    net.send_waits(0, 1);
    net.until(2 * SECOND, |net| net.is_unreachable(0, 1));
}

#[test]
fn a_refused_caller_pauses_longer_and_longer() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.kill(1, true);
    up(&mut net, a, b);
    net.run(60 * SECOND);
    let attempts = net.on(0, |engine, _| match &engine.pairs[&a.qpn].phase {
        Phase::Seeking(seek) => seek.attempts,
        other => panic!("{other:?}"),
    });
    assert!((55..70).contains(&attempts), "{attempts} in a minute");
}

#[test]
fn a_fence_that_never_opens_is_given_up() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, b, a);
    // An initiator that identifies itself as a, takes the Reply, and sends nothing more.
    let us = Identity {
        from: a.qpn,
        to: b.qpn,
        sq_psn: Some(psn(a)),
        rq_psn: psn(b),
        rnr_retry: Some(7),
        nonce: 1,
        ticket: None,
    };
    let settings = Settings::from(&Config::default().mpa);
    let (_, request) = Initiator::new(settings, None, &us.emit(), net.now()).unwrap();
    net.stranger(0, b.qpn, 1, &request);
    net.until(SECOND, |net| !net.attached(1, 1).is_empty());
    let took = net.until(20 * SECOND, |net| net.is_unreachable(1, 1));
    assert!(took >= 9 * SECOND);
    assert!(!net.is_open(1, 1));
}

#[test]
fn retiring_ends_what_is_under_way() {
    // Connecting, asking, parked: in each stage the caller or the called goes away.
    for (time, who) in [(0, 0), (1, 0), (3, 0), (100, 0), (3, 1), (100, 1)] {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        up(&mut net, a, b);
        net.run(time * MS);
        let gone = if who == 0 { a } else { b };
        net.on(who, |engine, world| engine.remove_queue_pair(world, gone.qpn));
        net.run(30 * SECOND);
        assert_eq!(
            (net.in_start_up(0), net.in_start_up(1)),
            (0, 0),
            "after {time} ms, host {who}"
        );
        assert_eq!(net.is_unreachable(0, 1), who == 1);
        net.on(who, |engine, _| {
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
    assert_eq!(net.attached(0, 1)[0].rnr_timeout, None, "b tries for ever");
    assert_eq!(
        net.attached(1, 1)[0].rnr_timeout,
        Some(Duration::from_micros(2 * 491_520)),
        "a twice"
    );
    net.on(1, |engine, _| {
        assert_eq!(
            engine.rnr_timeout(b.qpn, 30),
            Some(Some(Duration::from_micros(2 * 327_680)))
        );
        assert_eq!(engine.rnr_timeout(a.qpn + 1000, 30), None);
    });
}
