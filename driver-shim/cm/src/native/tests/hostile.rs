//! Streams of hostile peers, and of peers without the native protocol, to a listener.

use super::*;
use crate::carrier::testing::run_over_sctp;
use proptest::prelude::*;

/// A Request that names `qpn`, from a native initiator of this version.
fn request(from: u32, to: u32) -> Vec<u8> {
    request_of(Identity {
        unreliable: false,
        from,
        to,
        sq_psn: Some(1),
        rq_psn: 2,
        rnr_retry: Some(7),
        nonce: 3,
        ticket: None,
    })
}

/// Checks that two queue pairs still connect immediately over the same listener.
fn assert_others_connect(net: &mut Net, a: Qp, b: Qp) {
    up(net, a, b);
    up(net, b, a);
    let took = net.until(SECOND, both_open(a, b));
    assert!(took < 20 * MS, "{took:?}");
}

#[test]
pub(super) fn idle_streams_are_limited_and_delay_no_connection() {
    let mut net = Net::new(3);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    for _ in 0..5000 {
        net.raw_stream(2, b.qpn, 1, &[]);
    }
    net.run(100 * MS);
    assert_eq!(net.in_start_up(1), MAX_WITHOUT_REQUEST);
    assert_others_connect(&mut net, a, b);
    net.run(30 * SECOND);
    assert_eq!(net.in_start_up(1), 0, "all timed out");
    net.on(1, |engine, _| {
        assert!(engine.streams.is_empty() && engine.without_request.is_empty())
    });
}

#[test]
pub(super) fn partial_frames_and_garbage_are_closed_without_a_reply() {
    let mut net = Net::new(3);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    let whole = request(a.qpn, b.qpn);
    let mut bytes: Vec<Vec<u8>> = (0..whole.len()).map(|n| whole[..n].to_vec()).collect();
    bytes.push(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n".to_vec());
    bytes.push(vec![0xff; 4096]);
    let sids: Vec<u32> = bytes
        .iter()
        .map(|bytes| net.raw_stream(2, b.qpn, 1, bytes))
        .collect();
    net.run(30 * SECOND);
    for sid in sids {
        assert_eq!(net.received_on(sid), (Vec::new(), true));
    }
    assert_eq!(net.in_start_up(1), 0);
    assert_others_connect(&mut net, a, b);
}

#[test]
fn mpa_s_15_data_before_the_reply_ends_the_attempt() {
    let mut net = Net::new(3);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    // The Request is valid, but the initiator does not wait for the Reply.
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
    let bytes = [request_of(us), vec![0; 4]].concat();
    let sid = net.raw_stream(0, b.qpn, 1, &bytes);
    net.run(10 * MS);
    assert_eq!(net.in_start_up(1), 1, "parked");
    up(&mut net, b, a);
    net.run(10 * MS);
    assert_eq!(net.received_on(sid), (Vec::new(), true));
    assert_others_connect(&mut net, a, b);
}

#[test]
pub(super) fn mpa_s_19_nothing_is_accepted_without_a_queue_pair() {
    let mut net = Net::new(3);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    // An unknown number; private data of another protocol; a queue pair that names another peer.
    up(&mut net, b, a);
    let mut other_protocol = request(a.qpn, b.qpn);
    let private_data = if llp() == Llp::Tcp { 20 } else { 2 };
    other_protocol[private_data] ^= 0xff;
    for bytes in [request(a.qpn, b.qpn + 9), other_protocol, request(a.qpn, b.qpn)] {
        let sid = net.raw_stream(2, b.qpn, 1, &bytes);
        net.run(100 * MS);
        let (reply, closed) = net.received_on(sid);
        assert!(is_rejection(&reply) && closed);
    }
    assert!(net.attached(1, 1).is_empty());
}

#[test]
fn late_events_of_a_closed_stream_are_ignored() {
    let mut net = Net::new(2);
    let b = make(&mut net, 1, 1);
    let sid = net.raw_stream(0, b.qpn, 1, &[]);
    net.run(10 * MS);
    let there = sid + 1;
    net.on(1, |engine, world| {
        engine.closed(world, there);
        engine.closed(world, there);
        engine.received(world, there, Err(Errno::CONNRESET));
        engine.connected(world, there, Ok(()));
        engine.first_fpdu(world, 99);
    });
    assert_eq!(net.in_start_up(1), 0);
}

/// What a stream of a stranger brings.
#[derive(Debug, Clone)]
enum Sent {
    Bytes(Vec<u8>),
    /// A Request for this index of a queue pair, whose byte at a place is changed.
    Request(u16, usize, u8),
}

/// Checks that streams delay no connection.
fn assert_harmless(streams: &[Sent]) {
    let mut net = Net::new(3);
    let (a, b) = (make(&mut net, 0, 1), make(&mut net, 1, 1));
    let idle = make(&mut net, 1, 2);
    for stream in streams {
        let bytes = match stream {
            Sent::Bytes(bytes) => bytes.clone(),
            Sent::Request(to, at, xor) => {
                let mut bytes = request(1, (1001 << 8) + u32::from(to & 3));
                let at = at % bytes.len();
                bytes[at] ^= xor;
                bytes
            }
        };
        net.raw_stream(2, b.qpn, 1, &bytes);
    }
    assert_others_connect(&mut net, a, b);
    net.run(60 * SECOND);
    assert_eq!(net.in_start_up(1), 0);
    assert!(net.attached(1, idle.qid).is_empty());
    net.on(1, |engine, _| {
        assert!(engine.streams.is_empty() && engine.parked == 0)
    });
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_affect_another_connection(
        streams in proptest::collection::vec(
            prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..600).prop_map(Sent::Bytes),
                (any::<u16>(), 0usize..60, any::<u8>()).prop_map(|(to, at, xor)| Sent::Request(to, at, xor)),
            ],
            0..40,
        ),
    ) {
        assert_harmless(&streams);
        run_over_sctp(|| assert_harmless(&streams));
    }
}
