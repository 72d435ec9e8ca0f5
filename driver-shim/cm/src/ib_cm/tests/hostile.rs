//! Floods, impossible lengths, and what strangers may cost.

use proptest::prelude::*;
use urnic_wire::mad::{RejectReason, parse};

use super::*;
use crate::ib_cm::refusals::MAX_REFUSALS;

/// The REQ number `number` of a client at an address.
fn request_from(client: IpAddr, number: u32) -> Mad {
    let mut end = End::new(settings(0xc), client, SERVER);
    end.connect();
    let mut mad = end.only();
    let mut request = request_of(&mad);
    (request.local_comm_id, request.qpn) = (1000 + number, 1000 + number);
    (mad.message, mad.transaction_id) = (Message::Connect(request), number.into());
    mad
}

fn address(number: u32) -> IpAddr {
    IpAddr::from((0x0a02_0000 + number).to_be_bytes())
}

fn limited(connections: usize, per_peer: usize, undecided: usize) -> End {
    let limits = Limits {
        connections,
        per_peer,
        undecided,
        ..Limits::default()
    };
    let settings = Settings {
        limits,
        ..settings(0x5)
    };
    End::new(settings, SERVER, CLIENT)
}

#[test]
fn cmc_15_a_flood_of_requests_is_bounded() {
    // By the requests that the program has not answered: dropped, so that a peer tries again.
    let mut server = limited(100, 100, 10);
    for number in 0..1000 {
        let client = address(number);
        server.receive_by(Route::new(SERVER, client), &request_from(client, number));
    }
    assert_eq!((server.events.len(), server.said().len()), (10, 0));
    let waiting: Vec<u32> = server.events.drain(..).map(|(id, _)| id).collect();
    for id in &waiting {
        server.connections.release(server.now, *id);
    }
    server.drain();
    assert_eq!(server.said(), ["REJ"; 10]);
    assert_eq!(server.connections.table.sizes(), (0, [0; 4]));
    server.receive(&request_from(CLIENT, 7));
    assert_eq!(name(&server.event().1), "CONNECT_REQUEST");
}

#[test]
fn cmc_15_one_address_does_not_hold_all_undecided_requests() {
    let share = Limits::default().undecided_per_peer as u32;
    let mut server = End::server();
    let (flooder, other) = (address(1), address(2));
    let ask = |server: &mut End, client: IpAddr, number| {
        server.receive_by(Route::new(SERVER, client), &request_from(client, number));
        (server.events.len() as u32, server.said().len())
    };
    for number in 0..share {
        assert_eq!(ask(&mut server, flooder, number), (number + 1, 0));
    }
    assert_eq!(ask(&mut server, flooder, share), (share, 0), "dropped");
    assert_eq!(ask(&mut server, other, 0), (share + 1, 0));
    // What the program answers makes room.
    let (first, _) = server.events.remove(0);
    server.connections.accept(server.now, first, &accept()).unwrap();
    server.drain();
    assert_eq!(server.said(), ["REP"]);
    assert_eq!(ask(&mut server, flooder, share), (share + 1, 0));
}

#[test]
fn cmc_15_connections_are_limited_in_total_and_for_each_peer() {
    let mut server = limited(8, 3, 100);
    let reason = |server: &mut End, client: IpAddr, number| {
        server.receive_by(Route::new(SERVER, client), &request_from(client, number));
        match server.sent.pop().map(|mad| mad.message) {
            Some(Message::Reject(reject)) => Some(reject.reason),
            _ => None,
        }
    };
    for number in 0..3 {
        assert_eq!(reason(&mut server, address(0), number), None);
    }
    let full = Some(RejectReason::NO_RESOURCES);
    assert_eq!(full.map(|reason| reason.0), Some(3));
    assert_eq!(reason(&mut server, address(0), 3), full, "one peer");
    for number in 1..6 {
        assert_eq!(reason(&mut server, address(number), 0), None);
    }
    assert_eq!(reason(&mut server, address(6), 0), full, "all peers");
    assert_eq!(server.connections.table.sizes().0, 8);
    let to = Route::new(SERVER, address(9));
    let refused = server.connections.connect(server.now, to, &connect());
    assert_eq!(refused, Err(CallError::NoRoom));
}

#[test]
fn cmc_15_remembered_refusals_are_bounded_and_forgotten() {
    let mut server = limited(10_000, 10_000, 10_000);
    let refuse = |server: &mut End, number| {
        server.receive(&request_from(CLIENT, number));
        let (id, _) = server.event();
        server.connections.reject(server.now, id, b"").unwrap();
        server.drain();
    };
    for number in 0..MAX_REFUSALS as u32 + 5 {
        refuse(&mut server, number);
    }
    assert_eq!(server.connections.refusals.len(), MAX_REFUSALS);
    // The oldest ones are new requests, the newest is not.
    server.receive(&request_from(CLIENT, MAX_REFUSALS as u32));
    assert!(server.events.is_empty());
    server.receive(&request_from(CLIENT, 0));
    assert_eq!(name(&server.event().1), "CONNECT_REQUEST");
    server.pass(Duration::from_secs(100));
    refuse(&mut server, 20_000);
    assert_eq!(server.connections.refusals.len(), 1);
}

#[test]
fn cmc_15_timeouts_that_a_peer_chooses_are_bounded() {
    for (code, seconds) in [(31, 150), (0, 12)] {
        let mut server = End::server();
        let mut mad = request_from(CLIENT, 1);
        let mut request = request_of(&mad);
        (request.local_response_timeout, request.max_cm_retries) = (code, 15);
        mad.message = Message::Connect(request);
        server.receive(&mad);
        let (id, _) = server.event();
        server.accept(id);
        // Not all at once.
        server.pass(Duration::from_millis(400));
        assert_eq!(server.said(), ["REP"]);
        server.pass(Duration::from_secs(seconds));
        assert_eq!(server.state(id), None, "{code}");
        assert_eq!(server.said().len(), 16, "{code}");
    }
}

#[test]
fn cmc_16_private_data_has_the_length_of_its_message() {
    let too_long = |len, max| Err(CallError::PrivateData { len, max });
    let (mut client, now) = (End::client(), START);
    let with = |len: usize| Connect {
        private_data: vec![1; len],
        ..connect()
    };
    let route = client.route;
    assert_eq!(
        client.connections.connect(now, route, &with(57)),
        Err(CallError::PrivateData { len: 57, max: 56 })
    );
    assert!(client.connections.connect(now, route, &with(56)).is_ok());

    let mut pair = Pair::requested();
    let server = &mut pair.server.connections;
    let long = Accept {
        private_data: vec![1; 197],
        ..accept()
    };
    assert_eq!(server.accept(now, pair.passive, &long), too_long(197, 196));
    assert_eq!(server.reject(now, pair.passive, &[1; 149]), too_long(149, 148));
    assert_eq!(server.state(pair.passive), Some(State::ReqRcvd));
    let full = Accept {
        private_data: vec![1; 196],
        ..accept()
    };
    assert_eq!(server.accept(now, pair.passive, &full), Ok(()));

    let mut pair = Pair::replied();
    let client = &mut pair.client.connections;
    assert_eq!(client.ready(pair.active, &[1; 225]), too_long(225, 224));
    assert_eq!(client.ready(pair.active, &[1; 224]), Ok(()));
}

#[test]
fn queue_pairs_for_management_cannot_be_connected() {
    let mut pair = Pair::requested();
    for qpn in [0, 1, 0xff_ffff, 0x100_0000] {
        let wrong = CallError::QueuePair(qpn);
        let connect = Connect { qpn, ..connect() };
        let client = &mut pair.client;
        let called = client.connections.connect(client.now, client.route, &connect);
        assert_eq!(called, Err(wrong));
        let accept = Accept { qpn, ..accept() };
        let server = &mut pair.server;
        let called = server.connections.accept(server.now, pair.passive, &accept);
        assert_eq!(called, Err(wrong));
    }
    // Nor those of a peer.
    pair.server.accept(pair.passive);
    let mut mad = pair.server.only();
    if let Message::ConnectReply(reply) = &mut mad.message {
        reply.qpn = 1;
    }
    pair.client.receive(&mad);
    let (_, Event::Rejected { reason, .. }) = pair.client.event() else {
        panic!();
    };
    assert_eq!(reason, RejectReason::UNSUPPORTED);
    assert_eq!(pair.client.said(), ["REJ"]);
}

/// A request of another host with the numbers of a known one is another request.
#[test]
fn cmc_14_a_stranger_cannot_hide_behind_the_guid_of_another() {
    let mut pair = Pair::established();
    let stranger: IpAddr = [10, 9, 9, 9].into();
    let known = pair.server.connections.table.get(pair.passive).unwrap();
    let mut mad = request_from(stranger, 0);
    let mut request = request_of(&mad);
    let remote = known.remote.unwrap();
    (request.local_comm_id, request.ca_guid, request.qpn) = (remote.comm_id, remote.ca_guid, remote.qpn);
    mad.message = Message::Connect(request);
    pair.server.receive_by(Route::new(SERVER, stranger), &mad);
    let (id, Event::Requested(_)) = pair.server.event() else {
        panic!();
    };
    assert_ne!(id, pair.passive);
    assert_eq!(pair.server.state(pair.passive), Some(State::Established));
    assert_eq!(pair.server.said(), [""; 0]);
}

proptest! {
    /// Whatever comes from the network: no panic, no more connections than the limit, and all of it
    /// ends when the programs do.
    #[test]
    fn any_messages_are_taken(
        bodies in prop::collection::vec((0x10..0x17u8, 0..4u8, prop::array::uniform32(any::<u8>())), 0..60),
    ) {
        let mut server = limited(10, 5, 7);
        let peers = [CLIENT, address(1)];
        let mut known: Vec<u32> = Vec::new();
        for (attribute, choice, body) in bodies {
            let peer = peers[usize::from(choice & 1)];
            let mut bytes = [0; 256];
            request_from(peer, u32::from(body[0]) % 8).emit(&mut bytes);
            bytes[17] = attribute;
            // Half of the messages have numbers of known connections.
            match known.get(usize::from(body[1]) % 8) {
                Some(id) if choice & 2 == 0 => bytes[28..32].copy_from_slice(&id.to_be_bytes()),
                _ => bytes[28..32].copy_from_slice(&body[4..8]),
            }
            bytes[32..34].copy_from_slice(&body[8..10]);
            if let Ok(mad) = parse(&bytes) {
                server.receive_by(Route::new(SERVER, peer), &mad);
            }
            server.pass(Duration::from_millis(u64::from(body[2]) * 8));
            for (id, event) in server.events.drain(..) {
                if let Event::Requested(_) = event {
                    known.push(id);
                    if body[3] & 1 == 0 {
                        prop_assert_eq!(server.connections.accept(server.now, id, &accept()), Ok(()));
                    }
                }
            }
            server.drain();
            prop_assert!(server.connections.table.sizes().0 <= 10);
        }
        for id in known {
            server.connections.release(server.now, id);
        }
        server.pass(Duration::from_secs(300));
        prop_assert_eq!(server.connections.table.sizes(), (0, [0; 4]));
    }
}
