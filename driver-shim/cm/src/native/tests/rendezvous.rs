//! Connections between two queue pairs that name each other.

use super::*;
use crate::mpa_startup::Rtr;
use proptest::prelude::*;

#[test]
pub(super) fn the_lower_end_initiates_and_both_open() {
    for swapped in [false, true] {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        let (first, second) = if swapped { (b, a) } else { (a, b) };
        up(&mut net, first, second);
        up(&mut net, second, first);
        let took = net.until(SECOND, both_open(a, b));
        net.run(10 * SECOND);
        assert_joined(&net, a, b);
        assert!(net.attached(0, 1)[0].negotiated.unwrap().initiator);
        assert!(took < 10 * MS, "{took:?}: waited for a timer");
    }
}

#[test]
pub(super) fn a_request_before_rtr_is_parked_and_accepted_at_rtr() {
    let mut net = Net::new(2);
    let (server, client) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    // As in ibv_rc_pingpong: the server reaches RTS before the client has its number.
    up(&mut net, server, client);
    net.run(3 * SECOND);
    assert!(net.notices(0).is_empty() && net.notices(1).is_empty());
    up(&mut net, client, server);
    net.until(10 * MS, both_open(server, client));
    net.run(SECOND);
    assert_joined(&net, server, client);
}

#[test]
pub(super) fn the_higher_end_waits_for_a_request() {
    let mut net = Net::new(2);
    let (client, server) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, server, client);
    net.run(500 * MS);
    assert_eq!(net.in_start_up(0), 0, "no Request yet");
    up(&mut net, client, server);
    net.until(10 * MS, both_open(server, client));
    net.run(SECOND);
    assert_joined(&net, client, server);
}

#[test]
fn start_up_negotiates_the_native_parameters() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, a, b);
    up(&mut net, b, a);
    net.until(SECOND, both_open(a, b));
    for (host, initiator) in [(0, true), (1, false)] {
        let Attachment {
            negotiated,
            ird,
            ord,
            ord_limit,
            terms,
            ..
        } = net.attached(host, 1)[0];
        let negotiated = negotiated.unwrap();
        assert_eq!(
            (negotiated.initiator, negotiated.fenced, negotiated.rtr),
            (initiator, !initiator, Some(Rtr::Write))
        );
        // Each end offers one Read more than its program, for confirmations of delivery.
        assert_eq!(
            (negotiated.depths.ird, negotiated.depths.ord),
            (Some(17), Some(9))
        );
        assert_eq!(
            (negotiated.revision, negotiated.crc, negotiated.terminate),
            (2, true, None)
        );
        assert_eq!((ird, ord, ord_limit), (16, 8, 9));
        let expected = Terms::Native {
            unreliable: false,
            rnr_timeout: None,
        };
        assert_eq!(terms, expected);
    }
}

#[test]
pub(super) fn revision_1_is_sufficient() {
    let mut config = Config::default();
    config.mpa.revision = 1;
    let mut net = Net::with(2, &config);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, a, b);
    up(&mut net, b, a);
    net.until(SECOND, both_open(a, b));
    assert_joined(&net, a, b);
    let attachment = net.attached(0, 1)[0];
    assert_eq!(attachment.negotiated.unwrap().revision, 1);
    assert_eq!(
        (attachment.ord, attachment.ord_limit),
        (8, 0),
        "the peer's IRD is unknown"
    );
}

#[test]
pub(super) fn two_queue_pairs_of_one_process_connect() {
    let mut net = Net::new(1);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 0, 2));
    up(&mut net, a, b);
    up(&mut net, b, a);
    net.until(10 * MS, both_open(a, b));
    net.run(SECOND);
    assert_joined(&net, a, b);
}

#[test]
pub(super) fn a_queue_pair_that_names_itself_needs_no_stream() {
    let mut net = Net::new(1);
    let a = make(&mut net, 0, 7);
    up(&mut net, a, a);
    assert_eq!(
        (net.notices(0), net.loops()),
        (&[Notice::Open(7)][..], vec![(0, 7)])
    );
    net.run(10 * SECOND);
    assert_eq!(net.notices(0).len(), 1);
    net.on(0, |engine, world| engine.remove_queue_pair(world, a.qpn));
}

#[test]
fn a_queue_pair_that_names_itself_retries_by_its_attributes() {
    for (rnr_retry, timeout) in [(0, Some(Duration::ZERO)), (1, Some(MIN_RNR)), (7, None)] {
        let mut net = Net::new(1);
        let a = make(&mut net, 0, 7);
        to_rtr(&mut net, a, a);
        let ready = RtsParams { rnr_retry, ..rts(a) };
        net.on(0, |engine, world| engine.reached_rts(world, a.qpn, ready));
        net.on(0, |engine, _| {
            assert_eq!(
                engine.rnr_timeout(a.qpn, 12),
                Some(timeout),
                "rnr_retry {rnr_retry}"
            );
        });
    }
}

#[test]
pub(super) fn a_receiver_that_stays_at_rtr_is_connected() {
    for (lower, higher) in [(0, 1), (1, 0)] {
        let mut net = Net::new(2);
        let qps = [make(&mut net, 0, 1), make(&mut net, 1, 1)];
        let (sender, receiver) = (qps[lower], qps[higher]);
        to_rtr(&mut net, receiver, sender);
        up(&mut net, sender, receiver);
        net.until(100 * MS, both_open(sender, receiver));
        net.run(SECOND);
        assert_joined(&net, sender, receiver);
    }
}

/// As soon as its program is doing something else, whichever end must initiate.
#[test]
fn a_receiver_whose_program_moved_on_is_connected_at_once() {
    for (lower, higher) in [(0, 1), (1, 0)] {
        for goes_on_after in [0, 7] {
            let mut net = Net::new(2);
            net.latency(Duration::from_micros(10));
            let qps = [make(&mut net, 0, 1), make(&mut net, 1, 1)];
            let (sender, receiver) = (qps[lower], qps[higher]);
            to_rtr(&mut net, receiver, sender);
            up(&mut net, sender, receiver);
            net.run(goes_on_after * MS);
            assert!(!net.is_open(sender.host, sender.qid));
            net.goes_on(receiver.host, receiver.qid);
            let took = net.until(100 * MS, both_open(sender, receiver));
            assert!(took < 2 * MS, "{took:?}");
            net.run(SECOND);
            assert_joined(&net, sender, receiver);
        }
    }
}

/// The Reply has the value, so it waits for RTS.
#[test]
fn a_responder_that_reaches_rts_later_has_its_rnr_retry_respected() {
    let mut net = Net::new(2);
    let (receiver, sender) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    to_rtr(&mut net, sender, receiver);
    up(&mut net, receiver, sender);
    net.run(10 * MS);
    let rts = RtsParams {
        rnr_retry: 0,
        ..rts(sender)
    };
    net.on(sender.host, |engine, world| {
        engine.reached_rts(world, sender.qpn, rts)
    });
    net.until(100 * MS, both_open(sender, receiver));
    net.run(SECOND);
    assert_joined(&net, sender, receiver);
    let attached = net.attached(receiver.host, receiver.qid);
    assert_eq!(rnr_timeout_of(&attached[0]), Some(Duration::ZERO));
}

#[test]
pub(super) fn one_connection_results_if_neither_or_both_initiate() {
    for we_initiate in [false, true] {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        for (us, peer) in [(a, b), (b, a)] {
            let PeerParams { peer: named, .. } = params(us, peer);
            let params = PeerParams {
                peer: Peer { we_initiate, ..named },
                ..params(us, peer)
            };
            net.on(us.host, |engine, world| engine.reached_rtr(world, us.qpn, params));
        }
        to_rts(&mut net, a);
        to_rts(&mut net, b);
        let took = net.until(2 * SECOND, both_open(a, b));
        assert_eq!(took >= SECOND, !we_initiate);
        net.run(30 * SECOND);
        assert_joined(&net, a, b);
    }
}

#[test]
pub(super) fn behind_a_one_way_firewall_the_other_end_initiates() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.black_hole(0, 1);
    for (us, peer) in [(a, b), (b, a)] {
        net.send_waits(us.host, us.qid);
        up(&mut net, us, peer);
    }
    let took = net.until(2 * SECOND, both_open(a, b));
    assert!(took >= SECOND);
    net.run(30 * SECOND);
    assert_joined(&net, a, b);
    assert!(!net.attached(0, 1)[0].negotiated.unwrap().initiator);
}

#[test]
pub(super) fn queue_pairs_beyond_256_open_another_listener() {
    let mut net = Net::new(2);
    assert_eq!(
        net.listeners(0),
        0,
        "the first queue pair opens the first listener"
    );
    let pairs: Vec<(Qp, Qp)> = (1..=300)
        .map(|qid| (make(&mut net, 0, qid), make(&mut net, 1, qid)))
        .collect();
    assert_eq!((net.listeners(0), net.listeners(1)), (2, 2));
    let numbers: std::collections::BTreeSet<u32> = pairs.iter().map(|(a, _)| a.qpn).collect();
    assert_eq!(numbers.len(), 300);
    assert!(numbers.iter().all(|qpn| *qpn < 1 << 24));
    for (a, b) in &pairs {
        up(&mut net, *a, *b);
        up(&mut net, *b, *a);
    }
    for (a, b) in &pairs {
        net.until(SECOND, both_open(*a, *b));
    }
    net.run(SECOND);
    pairs.iter().for_each(|(a, b)| assert_joined(&net, *a, *b));
}

#[test]
fn a_released_number_is_not_reused_at_once() {
    let mut net = Net::new(1);
    let first = make(&mut net, 0, 1);
    net.on(0, |engine, world| engine.remove_queue_pair(world, first.qpn));
    for qid in 2..=256 {
        let qp = make(&mut net, 0, qid);
        assert_ne!(qp.qpn, first.qpn);
        net.on(0, |engine, world| engine.remove_queue_pair(world, qp.qpn));
    }
    assert_eq!(make(&mut net, 0, 257).qpn, first.qpn);
    assert_eq!(net.listeners(0), 1);
    // While the others are in use, a number is not used again at once: another listener has more
    // numbers.
    let all: Vec<Qp> = (300..500).map(|qid| make(&mut net, 0, qid)).collect();
    for qid in 500..600 {
        let qp = make(&mut net, 0, qid);
        net.on(0, |engine, world| engine.remove_queue_pair(world, qp.qpn));
        assert_ne!(make(&mut net, 0, qid + 1000).qpn, qp.qpn);
    }
    assert!(all.iter().all(|qp| net.listeners(0) == 2 && qp.qpn != first.qpn));
}

#[test]
pub(super) fn listeners_use_only_the_configured_ports() {
    let mut config = Config::default();
    config.native.port_range = Some(7000..=7001);
    let mut net = Net::with(1, &config);
    let numbers: Vec<u32> = (1..=512).map(|qid| make(&mut net, 0, qid).qpn >> 8).collect();
    assert!(numbers.iter().all(|port| (7000..=7001).contains(port)));
    let full = net.on(0, |engine, world| engine.add_queue_pair(world));
    assert_eq!(full, Err(Errno::ADDRINUSE));
}

#[test]
pub(super) fn a_reset_queue_pair_can_connect_to_another_peer() {
    let mut net = Net::new(3);
    let (a, b, c) = (make(&mut net, 0, 1), make(&mut net, 1, 1), make(&mut net, 2, 1));
    up(&mut net, a, b);
    up(&mut net, b, a);
    net.until(SECOND, both_open(a, b));
    net.on(0, |engine, world| engine.retire(world, a.qpn, true));
    up(&mut net, c, a);
    up(&mut net, a, c);
    net.until(SECOND, |net| net.are_joined((0, 1), (2, 1)) && net.is_open(2, 1));
    assert_eq!(net.notices(0), [Notice::Open(1), Notice::Open(1)]);
}

proptest! {
    #[test]
    fn any_order_and_latency_result_in_one_connection(
        latency_us in 1u64..200_000,
        delays in proptest::array::uniform4(0u64..3_000),
        we_initiate in proptest::array::uniform2(any::<bool>()),
        one_way in 0u8..3,
        same_process in any::<bool>(),
        gone_on in proptest::array::uniform2(any::<bool>()),
    ) {
        let mut net = Net::new(2);
        net.latency(Duration::from_micros(latency_us));
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, usize::from(!same_process), 2));
        for (qp, gone_on) in [a, b].into_iter().zip(gone_on) {
            if gone_on {
                net.goes_on(qp.host, qp.qid);
            }
        }
        match one_way {
            1 if !same_process => net.black_hole(0, 1),
            2 if !same_process => net.black_hole(1, 0),
            _ => {}
        }
        // Each side reaches RTR, and RTS some time later, in any order of the two sides.
        let rtr = [delays[0], delays[1]];
        let rts = [delays[0] + delays[2], delays[1] + delays[3]];
        let mut steps: Vec<(u64, usize, bool)> =
            (0..2).flat_map(|side| [(rtr[side], side, false), (rts[side], side, true)]).collect();
        steps.sort();
        for (at, side, is_rts) in steps {
            let target = Duration::from_millis(at);
            let wait = target.saturating_sub(net.now());
            net.run(wait);
            let (us, peer) = if side == 0 { (a, b) } else { (b, a) };
            if is_rts {
                to_rts(&mut net, us);
            } else {
                let named = Peer { we_initiate: we_initiate[side], ..peer_of(us, peer) };
                let params = PeerParams { peer: named, ..params(us, peer) };
                net.on(us.host, |engine, world| engine.reached_rtr(world, us.qpn, params));
            }
        }
        net.until(60 * SECOND, both_open(a, b));
        net.run(120 * SECOND);
        assert_joined(&net, a, b);
    }
}
