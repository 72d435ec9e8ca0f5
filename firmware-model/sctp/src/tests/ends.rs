//! How associations end, and what can still be taken then.

use super::*;
use crate::endpoint::Times;

/// How an association has ended, if it has.
fn end_of(net: &Net, end: usize, id: AssociationId) -> Option<Reason> {
    let mut ends = net.events[end].iter().filter_map(|event| match event {
        Event::Ended(ended, reason) if *ended == id => Some(*reason),
        _ => None,
    });
    let first = ends.next();
    assert_eq!(ends.next(), None, "it ends once");
    first
}

/// Runs until both ends have ended; returns how, and after which time.
fn ended(net: &mut Net, ids: [AssociationId; 2]) -> ([Reason; 2], Duration) {
    let begun = net.now;
    for _ in 0..12_000 {
        if let (Some(ours), Some(theirs)) = (end_of(net, 0, ids[0]), end_of(net, 1, ids[1])) {
            return ([ours, theirs], net.now - begun);
        }
        net.step();
    }
    panic!("not ended: {:?}", net.events);
}

fn send(net: &mut Net, end: usize, id: AssociationId, stream: u16, data: Vec<u8>) {
    let sent = net.ends[end].send(id, (stream, Contents::Segment), data, net.now);
    assert_eq!(sent, Ok(()));
}

fn taken(net: &mut Net, end: usize, id: AssociationId) -> usize {
    std::iter::from_fn(|| net.ends[end].take(id, net.now)).count()
}

#[test]
fn a_shutdown_comes_after_all_messages_of_both_ends() {
    for seed in 0..20u8 {
        // After the beginning, each packet has another fate in each run.
        let fate = |at: u8| at.wrapping_mul(37).wrapping_add(seed.wrapping_mul(101)) % 7;
        let fates: Vec<u8> = [9; 4].into_iter().chain((0..120).map(fate)).collect();
        let mut net = Net::of(settings, &fates, STEP);
        let ids = net.connected();
        for number in 0..30u8 {
            send(&mut net, 0, ids[0], 0, vec![number; 1000]);
            send(&mut net, 1, ids[1], 1, vec![number; 1000]);
        }
        let now = net.now;
        net.ends[0].shutdown(ids[0], now);
        let late = net.ends[0].send(ids[0], (0, Contents::Segment), vec![1], now);
        assert_eq!(late, Err(SendError::Ended));
        let (reasons, _) = ended(&mut net, ids);
        assert_eq!(reasons, [Reason::Closed, Reason::Closed]);
        // They were not taken before.
        assert_eq!([0, 1].map(|end| taken(&mut net, end, ids[end])), [30, 30]);
        assert_eq!([0, 1].map(|end| net.ends[end].associations()), [0, 0]);
    }
}

#[test]
fn both_ends_may_shut_down_at_once() {
    let mut net = Net::of(settings, &[], STEP);
    let ids = net.connected();
    for (end, id) in ids.into_iter().enumerate() {
        send(&mut net, end, id, 3, vec![7; 100]);
        let now = net.now;
        net.ends[end].shutdown(id, now);
    }
    let (reasons, after) = ended(&mut net, ids);
    assert_eq!(reasons, [Reason::Closed, Reason::Closed]);
    assert!(after < Duration::from_millis(100), "{after:?}");
    assert_eq!([0, 1].map(|end| taken(&mut net, end, ids[end])), [1, 1]);
}

#[test]
fn an_association_may_be_shut_down_before_it_is_established() {
    let mut net = Net::of(settings, &[], STEP);
    let ours = net.ends[0].connect(peer(1), net.now).expect("there is room");
    assert_eq!(net.ends[0].streams(ours), None);
    send(&mut net, 0, ours, 0, vec![1, 2, 3]);
    let now = net.now;
    net.ends[0].shutdown(ours, now);
    for _ in 0..100 {
        net.step();
    }
    let [Event::Accepted(theirs, _), Event::Readable(_), ..] = net.events[1][..] else {
        panic!("not accepted: {:?}", net.events);
    };
    assert_eq!(end_of(&net, 0, ours), Some(Reason::Closed));
    assert_eq!(end_of(&net, 1, theirs), Some(Reason::Closed));
    assert_eq!(taken(&mut net, 1, theirs), 1);
}

#[test]
fn messages_stay_after_the_end_until_they_are_taken_or_forgotten() {
    let mut net = Net::of(settings, &[], STEP);
    for round in 1..=4 {
        net.events = [Vec::new(), Vec::new()];
        let ids = net.connected();
        send(&mut net, 0, ids[0], 0, vec![round; 10]);
        let now = net.now;
        net.ends[0].shutdown(ids[0], now);
        ended(&mut net, ids);
        let events = &net.events[1];
        let at = |wanted: Event| events.iter().position(|event| *event == wanted);
        let end = at(Event::Ended(ids[1], Reason::Closed));
        assert!(at(Event::Readable(ids[1])).expect("readable") < end.expect("ended"));
        if round == 4 {
            // Four that nobody takes are the limit.
            net.events = [Vec::new(), Vec::new()];
            let id = net.ends[0].connect(peer(1), net.now).expect("there is room");
            for _ in 0..20 {
                net.step();
            }
            assert_eq!(end_of(&net, 0, id), Some(Reason::Aborted));
            net.ends[1].forget(ids[1]);
            assert_eq!(taken(&mut net, 1, ids[1]), 0);
        }
    }
    net.events = [Vec::new(), Vec::new()];
    net.connected();
}

#[test]
fn a_lost_last_packet_is_repeated_and_later_not_needed() {
    let mut net = Net::of(settings, &[], STEP);
    let ids = net.connected();
    let now = net.now;
    net.ends[0].shutdown(ids[0], now);
    while net.ends[0].associations() > 0 {
        net.step();
    }
    // The SHUTDOWN COMPLETE is lost.
    net.travelling.clear();
    let (reasons, after) = ended(&mut net, ids);
    assert_eq!(reasons, [Reason::Closed, Reason::Closed]);
    assert!(
        after < Duration::from_secs(2),
        "the SHUTDOWN ACK is answered again: {after:?}"
    );

    net.events = [Vec::new(), Vec::new()];
    let ids = net.connected();
    let now = net.now;
    net.ends[0].shutdown(ids[0], now);
    while net.ends[0].associations() > 0 {
        net.step();
    }
    net.travelling.clear();
    net.outage = Duration::from_secs(3);
    let (reasons, _) = ended(&mut net, ids);
    assert_eq!(reasons, [Reason::Closed, Reason::Closed], "both have all");
}

#[test]
fn a_killed_peer_is_noticed_after_about_ten_seconds() {
    for is_busy in [false, true] {
        let mut net = Net::of(settings, &[], STEP);
        let ids = net.connected();
        send(&mut net, 1, ids[1], 0, vec![1; 100]);
        // Heartbeats keep an idle association.
        for _ in 0..60 * 200 {
            net.step();
        }
        assert_eq!([0, 1].map(|end| net.ends[end].associations()), [1, 1]);
        net.outage = Duration::from_secs(3);
        if is_busy {
            send(&mut net, 0, ids[0], 0, vec![1; 100]);
        }
        let (reasons, after) = ended(&mut net, ids);
        assert_eq!(reasons, [Reason::Silent, Reason::Silent]);
        assert!((8..=12).contains(&after.as_secs()), "{after:?}");
        assert_eq!(taken(&mut net, 0, ids[0]), 1, "what came before can be taken");
    }
}

#[test]
fn a_peer_that_does_not_read_is_not_taken_for_dead() {
    let narrow = |port| Settings {
        window: 20_000,
        ..settings(port)
    };
    let mut net = Net::of(narrow, &[], STEP);
    let ids = net.connected();
    for _ in 0..50 {
        send(&mut net, 0, ids[0], 0, vec![1; 1000]);
    }
    for _ in 0..120 * 200 {
        net.step();
    }
    assert!(net.ends[0].unacknowledged(ids[0]) > 0, "the window is closed");
    assert_eq!([0, 1].map(|end| net.ends[end].associations()), [1, 1]);
    let mut count = 0;
    // It learns at once that the window is open again.
    for _ in 0..100 {
        count += taken(&mut net, 1, ids[1]);
        net.step();
    }
    assert_eq!((count, net.ends[0].unacknowledged(ids[0])), (50, 0));
}

#[test]
fn a_stopped_process_does_not_end_its_associations() {
    let mut net = Net::of(settings, &[], STEP);
    net.connected();
    net.now += Duration::from_secs(3600);
    for _ in 0..1000 {
        net.step();
    }
    assert_eq!([0, 1].map(|end| net.ends[end].associations()), [1, 1]);
}

#[test]
fn a_connection_to_nothing_fails_in_time() {
    let mut net = Net::new(&[0; 64]);
    let begun = net.now;
    let id = net.ends[0].connect(peer(1), net.now).expect("there is room");
    while net.ends[0].associations() > 0 {
        net.step();
    }
    assert_eq!(end_of(&net, 0, id), Some(Reason::Silent));
    let after = net.now - begun;
    assert!(
        after > Duration::from_secs(10) && after < Duration::from_secs(20),
        "{after:?}"
    );
    assert_eq!(net.log.len(), 1 + Times::default().requests as usize);
}

#[test]
fn an_unreachable_port_refuses_only_what_is_not_established() {
    let mut net = Net::of(settings, &[], STEP);
    let [ours, theirs] = net.connected();
    let other = net.ends[0].connect(Peer { port: 1, ..peer(1) }, net.now);
    let other = other.expect("there is room");
    net.ends[0].unreachable(address(0), &[]);
    assert_eq!(net.ends[0].associations(), 2, "another address");
    net.ends[0].unreachable(address(1), &[0; 20]);
    assert_eq!(net.ends[0].associations(), 1);
    net.step();
    assert_eq!(end_of(&net, 0, other), Some(Reason::Refused));
    assert_eq!(end_of(&net, 0, ours), None);
    send(&mut net, 0, ours, 0, vec![1]);
    net.step();
    net.step();
    assert_eq!(taken(&mut net, 1, theirs), 1);
}

#[test]
fn sctp_09_the_fewer_streams_are_agreed() {
    let uneven = |port| Settings {
        streams: if port == PORTS[0] { 8 } else { 3 },
        ..settings(port)
    };
    let mut net = Net::of(uneven, &[], STEP);
    let ids = net.connected();
    assert_eq!(
        [0, 1].map(|end| net.ends[end].streams(ids[end])),
        [Some(3), Some(3)]
    );
    // A message that was taken before, for a stream that does not exist.
    let mut net = Net::of(uneven, &[], STEP);
    let id = net.ends[0].connect(peer(1), net.now).expect("there is room");
    send(&mut net, 0, id, 3, vec![1]);
    for _ in 0..20 {
        net.step();
    }
    assert_eq!(end_of(&net, 0, id), Some(Reason::Aborted));
    assert_eq!(net.ends[1].associations(), 0);
}

/// The last packet that an end sent, all of whose bytes but the tag are changed.
fn quoted(net: &Net, end: usize) -> Vec<u8> {
    let (_, packet) = net.log.iter().rfind(|(from, _)| *from == end).expect("a packet");
    packet
        .iter()
        .enumerate()
        .map(|(at, byte)| if (4..8).contains(&at) { *byte } else { 0 })
        .collect()
}

/// The program at the other end is gone: the report has the tag of its association, which nobody
/// else knows.
#[test]
fn an_established_association_ends_by_a_report_with_its_tag() {
    let mut net = Net::new(&[]);
    let [ours, _] = net.connected();
    send(&mut net, 0, ours, 0, vec![1]);
    net.step();
    let [by_us, by_peer] = [0, 1].map(|end| quoted(&net, end));
    net.ends[0].unreachable(address(1), &by_peer);
    net.ends[0].unreachable(address(1), &by_us[..7]);
    net.ends[0].unreachable(address(0), &by_us);
    assert_eq!(net.ends[0].associations(), 1);
    net.ends[0].unreachable(address(1), &by_us[..8]);
    net.step();
    assert_eq!(end_of(&net, 0, ours), Some(Reason::Refused));
}

/// A router that translates addresses may give a peer another UDP port (RFC 6951 §5.4).
#[test]
fn an_association_follows_its_peer_to_another_port() {
    let mut net = Net::new(&[]);
    let [ours, theirs] = net.connected();
    send(&mut net, 0, ours, 0, vec![1]);
    net.step();
    let elsewhere = SocketAddr::new(address(0).ip(), 999);
    let forged = quoted(&net, 1);
    net.ends[1].receive(elsewhere, &forged, net.now);
    send(&mut net, 0, ours, 0, vec![2]);
    net.ends[0].advance(net.now);
    let (_, packet) = net.ends[0].next_packet().expect("the message");
    // Another host does not have the association, though it knows the tag.
    let other_host = SocketAddr::new([10, 9, 9, 9].into(), address(0).port());
    net.ends[1].receive(other_host, &packet, net.now);
    assert_eq!(taken(&mut net, 1, theirs), 1);
    net.ends[1].receive(elsewhere, &packet, net.now);
    assert_eq!(taken(&mut net, 1, theirs), 1);
    let now = net.now + Duration::from_secs(1);
    net.ends[1].advance(now);
    let (to, _) = net.ends[1].next_packet().expect("an acknowledgement");
    assert_eq!(to, elsewhere);
    let events: Vec<Event> = std::iter::from_fn(|| net.ends[1].next_event()).collect();
    let peer = Peer {
        address: elsewhere,
        ..peer(0)
    };
    assert!(events.contains(&Event::Moved(theirs, peer)), "{events:?}");
}
