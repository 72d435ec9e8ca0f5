//! Queue pairs of kind UC: sends never fail, and lost streams are replaced.

use super::*;

/// Waits longer than the sends of a queue pair do for its first connection.
const PATIENCE: Duration = Duration::from_secs(60);

fn unreliable_to_rtr(net: &mut Net, us: Qp, peer: Qp) {
    let params = PeerParams {
        unreliable: true,
        ird: 0,
        ..params(us, peer)
    };
    net.on(us.host, |engine, world| engine.reached_rtr(world, us.qpn, params));
}

/// The attributes of RTS, as `ibv_uc_pingpong` sets them: neither retries nor Reads.
fn unreliable_to_rts(net: &mut Net, us: Qp) {
    let rts = RtsParams {
        sq_psn: psn(us),
        ord: 0,
        rnr_retry: 0,
        retry_time: None,
    };
    net.on(us.host, |engine, world| engine.reached_rts(world, us.qpn, rts));
}

pub(super) fn unreliable_up(net: &mut Net, us: Qp, peer: Qp) {
    unreliable_to_rtr(net, us, peer);
    unreliable_to_rts(net, us);
}

fn connected() -> (Net, Qp, Qp) {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    unreliable_up(&mut net, a, b);
    unreliable_up(&mut net, b, a);
    net.until(SECOND, both_open(a, b));
    assert_joined(&net, a, b);
    (net, a, b)
}

#[test]
fn an_unreliable_connection_needs_no_reads() {
    let (net, a, b) = connected();
    for qp in [a, b] {
        let attached = net.attached(qp.host, qp.qid)[0];
        assert!(matches!(attached.terms, Terms::Native { unreliable: true, .. }));
        assert!(!attached.delivered);
        let depths = attached.negotiated.unwrap().depths;
        assert_eq!((depths.ird, depths.ord), (Some(0), Some(0)));
        assert_eq!((attached.ird, attached.ord), (0, 0));
    }
}

#[test]
fn uc_11_ends_of_different_kinds_do_not_connect() {
    for first in [true, false] {
        let mut net = Net::new(2);
        let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
        if first {
            up(&mut net, a, b);
            unreliable_up(&mut net, b, a);
        } else {
            unreliable_up(&mut net, b, a);
            up(&mut net, a, b);
        }
        net.until(PATIENCE, |net| net.is_unreachable(0, 1));
        net.run(PATIENCE);
        assert!(net.attached(0, 1).is_empty() && net.attached(1, 1).is_empty());
        // The reliable end fails; the other end drops its sends.
        assert!(!net.is_open(0, 1) && net.is_open(1, 1) && !net.is_unreachable(1, 1));
    }
}

#[test]
fn uc_12_sends_wait_for_a_peer_that_is_late() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    unreliable_up(&mut net, a, b);
    net.send_waits(0, 1);
    net.run(SECOND);
    assert!(!net.is_open(0, 1), "held back");
    unreliable_up(&mut net, b, a);
    net.until(5 * SECOND, both_open(a, b));
    assert_joined(&net, a, b);
}

#[test]
fn uc_12_sends_do_not_wait_for_ever() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    net.set_stopped(1, true);
    unreliable_up(&mut net, a, b);
    net.send_waits(0, 1);
    net.until(PATIENCE, |net| net.is_open(0, 1));
    assert!(!net.is_unreachable(0, 1));
    // The peer comes late.
    net.run(PATIENCE);
    net.set_stopped(1, false);
    unreliable_up(&mut net, b, a);
    net.until(PATIENCE, |net| net.are_joined((0, 1), (1, 1)));
}

#[test]
fn uc_12_a_destroyed_peer_makes_no_send_fail() {
    let mut net = Net::new(2);
    let (a, removed) = (make(&mut net, 0, 1), make(&mut net, 1, 2));
    let _other = make(&mut net, 1, 1);
    net.on(1, |engine, world| engine.remove_queue_pair(world, removed.qpn));
    unreliable_up(&mut net, a, removed);
    net.until(PATIENCE, |net| net.is_open(0, 1));
    net.run(PATIENCE);
    assert!(!net.is_unreachable(0, 1));
    assert_eq!((net.in_start_up(0), net.in_start_up(1)), (0, 0));
}

#[test]
fn uc_12_a_lost_stream_is_replaced() {
    let (mut net, a, b) = connected();
    for lost in [[a, b], [b, a]] {
        let before = [a, b].map(|qp| net.attached(qp.host, qp.qid).len());
        for qp in lost {
            net.on(qp.host, |engine, world| engine.lost(world, qp.qid));
        }
        net.until(PATIENCE, |net| {
            [a, b].map(|qp| net.attached(qp.host, qp.qid).len()) == before.map(|n| n + 1)
        });
    }
    assert!(!net.is_unreachable(0, 1) && !net.is_unreachable(1, 1));
}

#[test]
fn uc_12_a_peer_that_was_reset_connects_again() {
    let (mut net, a, b) = connected();
    net.on(1, |engine, world| engine.retire(world, b.qpn, true));
    net.on(0, |engine, world| engine.lost(world, a.qid));
    net.run(SECOND);
    unreliable_up(&mut net, b, a);
    net.until(PATIENCE, |net| {
        net.attached(0, 1).len() == 2 && net.attached(1, 1).len() == 2
    });
}

#[test]
fn uc_12_a_stream_without_a_first_fpdu_is_given_up() {
    let (mut net, a, b) = connected();
    let ends = [a, b].map(|qp| (qp, net.attached(qp.host, qp.qid)[0].negotiated.unwrap()));
    let fenced = ends.iter().find(|(_, negotiated)| negotiated.fenced).unwrap().0;
    // The FPDU seems not to have arrived.
    net.on(fenced.host, |engine, _| {
        if let Some(Phase::Connected { fenced, .. }) = engine.pairs.get_mut(&fenced.qpn).map(|p| &mut p.phase)
        {
            *fenced = true;
        }
    });
    net.on(fenced.host, |engine, world| engine.pair_timer(world, fenced.qpn));
    net.run(Duration::ZERO);
    assert!(
        net.is_unreachable(fenced.host, fenced.qid),
        "the device gives it up"
    );
    net.on(fenced.host, |engine, world| engine.lost(world, fenced.qid));
    let phase = net.on(fenced.host, |engine, _| {
        matches!(engine.pairs[&fenced.qpn].phase, Phase::Connecting(_))
    });
    assert!(phase);
}

#[test]
fn a_reliable_queue_pair_does_not_connect_again() {
    let mut net = Net::new(2);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    up(&mut net, a, b);
    up(&mut net, b, a);
    net.until(SECOND, both_open(a, b));
    net.on(0, |engine, world| engine.lost(world, a.qid));
    net.run(PATIENCE);
    assert_eq!(net.attached(0, 1).len(), 1);
}
