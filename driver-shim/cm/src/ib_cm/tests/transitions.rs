//! The transitions that calls, answers and time cause.

use urnic_wire::mad::{About, CONNECT_PRIVATE_DATA, IpAddressing, RejectReason};

use super::*;
use crate::qp_attr::QpMask;

#[test]
fn cmc_03_a_connection_begins_and_ends() {
    let (mut client, mut server) = (End::client(), End::server());
    let active = client.connect();
    assert_eq!(client.state(active), Some(State::ReqSent));
    server.receive(&client.only());
    let (passive, Event::Requested(requested)) = server.event() else {
        panic!();
    };
    assert_eq!(server.state(passive), Some(State::ReqRcvd));
    assert_eq!(requested.addressing.source_port, 0x8001);
    assert_eq!(requested.remote_qpn, CLIENT_QPN);
    assert_eq!((requested.responder_resources, requested.initiator_depth), (9, 4));
    assert_eq!((requested.retry_count, requested.rnr_retry_count), (6, 5));
    assert_eq!(requested.private_data.len(), 56);
    assert!(requested.private_data.starts_with(b"hello\0"));

    server.accept(passive);
    assert_eq!(server.state(passive), Some(State::RepSent));
    client.receive(&server.only());
    let (id, Event::Accepted(accepted)) = client.event() else {
        panic!();
    };
    assert_eq!((id, client.state(id)), (active, Some(State::RepRcvd)));
    assert_eq!(accepted.remote_qpn, SERVER_QPN);
    assert_eq!((accepted.responder_resources, accepted.initiator_depth), (4, 3));
    assert_eq!(accepted.private_data.len(), 196);
    assert!(accepted.private_data.starts_with(b"welcome\0"));

    client.ready(active);
    assert_eq!(client.state(active), Some(State::Established));
    server.receive(&client.only());
    assert_eq!(server.event(), (passive, Event::Established(vec![0; 224])));
    assert_eq!(server.state(passive), Some(State::Established));
    let deadlines = (client.connections.deadline(), server.connections.deadline());
    assert_eq!(deadlines, (None, None));

    server.connections.disconnect(server.now, passive).unwrap();
    server.drain();
    assert_eq!(server.state(passive), Some(State::DreqSent));
    client.receive(&server.only());
    let disconnected = Event::Disconnected { timed_out: false };
    assert_eq!(client.event(), (active, disconnected.clone()));
    server.receive(&client.only());
    assert_eq!(server.event(), (passive, disconnected));
    for (end, id) in [(&mut client, active), (&mut server, passive)] {
        assert_eq!(end.state(id), Some(State::TimeWait));
        end.pass(Duration::from_secs(1));
        assert_eq!(end.event(), (id, Event::TimeWaitExit));
        assert_eq!(end.state(id), None);
        assert_eq!(end.connections.table.sizes(), (0, [0; 4]));
        assert_eq!(end.said(), [""; 0]);
    }
}

/// Both ends of the connection are in one table.
#[test]
fn cmc_03_an_adapter_connects_to_itself() {
    let mut both = End::new(settings(0xc), CLIENT, CLIENT);
    let active = both.connect();
    let deliver = |both: &mut End| {
        let mad = both.only();
        both.receive(&mad);
    };
    deliver(&mut both);
    let (passive, _) = both.event();
    both.accept(passive);
    deliver(&mut both);
    assert_eq!(both.event().0, active);
    both.ready(active);
    deliver(&mut both);
    assert_eq!(name(&both.event().1), "ESTABLISHED");
    let (rtr, _) = both.connections.rtr(active).unwrap();
    let (rts, _) = both.connections.rts(passive).unwrap();
    assert_eq!((rtr.dest_qpn, rtr.rq_psn), (SERVER_QPN, rts.sq_psn));
    both.connections.disconnect(both.now, active).unwrap();
    both.drain();
    deliver(&mut both);
    assert_eq!(both.event().0, passive);
    deliver(&mut both);
    assert_eq!(both.event().0, active);
    both.pass(Duration::from_secs(1));
    assert_eq!(both.connections.table.sizes(), (0, [0; 4]));
}

#[test]
fn cmc_01_a_request_of_rdma_cm_has_the_fields_that_a_kernel_sends() {
    let mut client = End::client();
    let id = client.connect();
    let mad = client.only();
    let request = request_of(&mad);
    assert_eq!((request.local_comm_id, request.ca_guid), (id, 0xc));
    assert_eq!(request.service_id, 0x0000_0000_0106_0000 | 7471);
    let path = request.primary_path;
    assert_eq!((path.local_lid, path.remote_lid), (0xffff, 0xffff));
    assert_eq!(path.local_gid, urnic_process::port_gids::gid_of(CLIENT));
    assert_eq!(path.remote_gid, urnic_process::port_gids::gid_of(SERVER));
    assert_eq!((path.hop_limit, path.traffic_class), (64, 0x20));
    assert_eq!(
        (request.remote_response_timeout, request.max_cm_retries),
        (20, 15)
    );
    let addressing = IpAddressing::parse(&request.private_data).unwrap();
    assert_eq!((addressing.source, addressing.destination), (CLIENT, SERVER));
}

#[test]
fn cmc_04_both_queue_pairs_get_attributes_that_fit() {
    let mut pair = Pair::requested();
    assert_eq!(pair.client.connections.rtr(pair.active), None);
    assert_eq!(pair.client.connections.rts(pair.active), None);
    // The program may bring its queue pair to RTR, and to RTS, before it accepts.
    let (early, _) = pair.server.connections.rtr(pair.passive).unwrap();
    pair.server.accept(pair.passive);
    pair.client.receive(&pair.server.only());
    let (client, server) = (&pair.client.connections, &pair.server.connections);
    let (client_rtr, mask) = client.rtr(pair.active).unwrap();
    assert_eq!(mask, QpMask::RTR_OF_CHANNEL_ADAPTER);
    let (client_rts, mask) = client.rts(pair.active).unwrap();
    assert_eq!(mask, QpMask::RTS_OF_CHANNEL_ADAPTER);
    let (server_rtr, _) = server.rtr(pair.passive).unwrap();
    let (server_rts, _) = server.rts(pair.passive).unwrap();
    assert_eq!((early.rq_psn, early.dest_qpn), (server_rtr.rq_psn, CLIENT_QPN));
    assert_eq!(
        (client_rtr.dest_qpn, server_rtr.dest_qpn),
        (SERVER_QPN, CLIENT_QPN)
    );
    assert_eq!((client_rtr.path_mtu, server_rtr.path_mtu), (3, 3));
    assert_eq!(client_rtr.rq_psn, server_rts.sq_psn);
    assert_eq!(server_rtr.rq_psn, client_rts.sq_psn);
    assert_ne!(client_rtr.rq_psn, server_rtr.rq_psn);
    // The client has 9 Reads out and accepts 4; the server accepts 3 and would have 8 out.
    assert_eq!((client_rts.max_rd_atomic, server_rtr.max_dest_rd_atomic), (3, 3));
    assert_eq!((server_rts.max_rd_atomic, client_rtr.max_dest_rd_atomic), (4, 4));
    assert_eq!((client_rts.retry_cnt, server_rts.retry_cnt), (6, 6));
    assert_eq!((client_rts.rnr_retry, server_rts.rnr_retry), (7, 5));
    assert_eq!((client_rts.timeout, server_rts.timeout), (17, 17));
    let ended = Pair::ended();
    assert_eq!(ended.client.connections.rtr(ended.active), None);
    assert_eq!(ended.server.connections.rts(ended.passive), None);
}

#[test]
fn cmc_04_the_timeout_covers_a_peer_that_acknowledges_late() {
    let slow = Settings {
        ack_delay: 20,
        ..settings(0x5)
    };
    let (mut client, mut server) = (End::client(), End::new(slow, SERVER, CLIENT));
    let active = client.connect();
    server.receive(&client.only());
    let (passive, _) = server.event();
    server.accept(passive);
    client.receive(&server.only());
    assert_eq!(client.connections.rts(active).unwrap().0.timeout, 20);
}

#[test]
fn cmc_05_the_first_message_establishes_without_an_rtu() {
    let mut pair = Pair::replied();
    pair.client.ready(pair.active);
    let late = pair.client.only();
    let Pair { server, passive, .. } = &mut pair;
    server.connections.communication_established(*passive).unwrap();
    server.drain();
    assert_eq!(server.event(), (*passive, Event::Established(Vec::new())));
    server.receive(&late);
    server.connections.communication_established(*passive).unwrap();
    server.drain();
    assert!(server.events.is_empty(), "it is established once");
}

#[test]
fn cmc_06_a_program_rejects_with_private_data() {
    let mut pair = Pair::requested();
    let Pair {
        client,
        server,
        active,
        passive,
    } = &mut pair;
    server.connections.reject(server.now, *passive, b"busy").unwrap();
    server.drain();
    assert_eq!(server.state(*passive), None);
    client.receive(&server.only());
    let (id, Event::Rejected { reason, private_data }) = client.event() else {
        panic!();
    };
    assert_eq!((id, reason, reason.0), (*active, RejectReason::CONSUMER, 28));
    assert_eq!(private_data.len(), 148);
    assert!(private_data.starts_with(b"busy\0"));
    assert_eq!(client.state(id), None);
}

#[test]
fn cmc_06_a_program_may_take_its_acceptance_back() {
    let mut pair = Pair::replied();
    let Pair {
        client,
        server,
        active,
        passive,
    } = &mut pair;
    server.connections.reject(server.now, *passive, b"no").unwrap();
    server.drain();
    client.receive(&server.only());
    let (id, Event::Rejected { reason, private_data }) = client.event() else {
        panic!();
    };
    assert_eq!((id, reason), (*active, RejectReason::CONSUMER));
    assert!(private_data.starts_with(b"no\0"));
    // It may have received packets.
    assert_eq!(server.state(*passive), Some(State::TimeWait));
    server.pass(Duration::from_secs(5));
    assert_eq!(server.state(*passive), None);
    assert!(server.events.is_empty());
}

#[test]
fn cmc_06_the_initiator_may_reject_the_acceptance() {
    let mut pair = Pair::replied();
    let Pair {
        client,
        server,
        active,
        passive,
    } = &mut pair;
    client.connections.reject(client.now, *active, b"no").unwrap();
    client.drain();
    server.receive(&client.only());
    let (id, Event::Rejected { reason, .. }) = server.event() else {
        panic!();
    };
    assert_eq!((id, reason), (*passive, RejectReason::CONSUMER));
    assert_eq!(server.state(id), Some(State::TimeWait));
}

#[test]
fn cmc_07_requests_that_cannot_be_served_are_refused_with_the_reason() {
    let mut client = End::client();
    client.connect();
    let good = client.only();
    let refused = |change: &dyn Fn(&mut ConnectRequest), admission| {
        let mut mad = good;
        let mut request = request_of(&good);
        change(&mut request);
        mad.message = Message::Connect(request);
        let mut server = End::server();
        server.admission = admission;
        server.receive(&mad);
        assert!(server.events.is_empty());
        let Message::Reject(reject) = server.only().message else {
            panic!();
        };
        assert_eq!(reject.about, About::REQUEST);
        assert_eq!(server.connections.table.sizes().0, 0);
        reject.reason.0
    };
    let shown = Admission::Shown;
    assert_eq!(refused(&|_| {}, Admission::NoListener), 8);
    assert_eq!(refused(&|request| request.transport_service.0 = 1, shown), 9);
    assert_eq!(refused(&|request| request.extended_transport = 1, shown), 9);
    assert_eq!(
        refused(&|request| request.primary_path.local_gid[15] ^= 1, shown),
        12
    );
    assert_eq!(
        refused(&|request| request.primary_path.remote_gid[15] ^= 1, shown),
        12
    );
    for mtu in [0, 4, 15] {
        assert_eq!(refused(&|request| request.path_mtu = mtu, shown), 26);
    }
    for qpn in [0, 1, 0xff_ffff] {
        assert_eq!(refused(&|request| request.qpn = qpn, shown), 5);
    }
    assert_eq!(refused(&|request| request.pkey = 0x8001, shown), 5);
    let no_addresses = |request: &mut ConnectRequest| request.private_data = [1; CONNECT_PRIVATE_DATA];
    assert_eq!(refused(&no_addresses, shown), 28);
}

#[test]
fn cmc_07_a_full_backlog_drops_the_request_until_there_is_room() {
    let (mut client, mut server) = (End::client(), End::server());
    client.connect();
    let request = client.only();
    server.admission = Admission::Full;
    server.receive(&request);
    assert_eq!((server.said().len(), server.events.len()), (0, 0));
    server.admission = Admission::Shown;
    client.pass(Duration::from_secs(5));
    assert_eq!(client.sent, [request]);
    server.receive(&request);
    assert_eq!(name(&server.event().1), "CONNECT_REQUEST");
}

#[test]
fn cmc_08_a_request_is_repeated_and_then_given_up() {
    let mut client = End::client();
    let id = client.connect();
    client.pass(Duration::from_secs(4));
    assert_eq!(client.said(), ["REQ"]);
    client.pass(Duration::from_secs(1));
    assert_eq!(client.said(), ["REQ"]);
    client.pass(Duration::from_secs(100));
    let mut said = client.said();
    assert_eq!(said.pop(), Some("REJ"), "so that the peer need not wait");
    assert_eq!(said, ["REQ"; 14]);
    assert_eq!(client.event(), (id, Event::Unreachable));
    assert_eq!(client.state(id), None);
}

#[test]
fn cmc_08_an_abandoned_request_ends_at_the_responder() {
    for accepted in [false, true] {
        let mut pair = Pair::requested();
        if accepted {
            pair.server.accept(pair.passive);
            assert_eq!(pair.server.said(), ["REP"]);
        }
        pair.client.connections.release(pair.client.now, pair.active);
        pair.client.drain();
        let abandoned = pair.client.only();
        pair.server.receive(&abandoned);
        let (id, Event::Rejected { reason, .. }) = pair.server.event() else {
            panic!();
        };
        assert_eq!((id, reason.0), (pair.passive, 4));
        assert!(pair.client.events.is_empty());
    }
}

#[test]
fn cmc_08_a_reply_is_repeated_and_then_given_up() {
    let mut pair = Pair::requested();
    pair.server.accept(pair.passive);
    pair.server.pass(Duration::from_secs(100));
    let mut sent = std::mem::take(&mut pair.server.sent);
    let last = sent.pop().unwrap();
    assert_eq!(sent.iter().map(word).collect::<Vec<_>>(), ["REP"; 16]);
    let events: Vec<_> = pair.server.events.drain(..).collect();
    assert_eq!(
        events,
        [
            (pair.passive, Event::Unreachable),
            (pair.passive, Event::TimeWaitExit)
        ]
    );
    // The client, whose REP was always lost, learns it.
    pair.client.receive(&last);
    let (_, Event::Rejected { reason, .. }) = pair.client.event() else {
        panic!();
    };
    assert_eq!(reason, RejectReason::TIMEOUT);
}

#[test]
fn cmc_08_a_peer_that_is_gone_cannot_delay_the_end_for_ever() {
    let mut pair = Pair::disconnecting();
    pair.client.pass(Duration::from_secs(100));
    assert_eq!(pair.client.said(), ["DREQ"; 16]);
    let events: Vec<_> = pair.client.events.drain(..).map(|(_, event)| event).collect();
    let disconnected = Event::Disconnected { timed_out: true };
    assert_eq!(events, [disconnected, Event::TimeWaitExit]);
}

#[test]
fn cmc_09_repeated_messages_are_answered_again() {
    // A REQ: nothing is shown to the program again.
    let mut pair = Pair::requested();
    pair.client.pass(Duration::from_secs(5));
    let request = pair.client.only();
    pair.server.receive(&request);
    assert_eq!(pair.server.said(), ["MRA"]);
    pair.server.accept(pair.passive);
    let reply = pair.server.only();
    pair.server.receive(&request);
    assert_eq!(pair.server.sent, [reply]);
    // A REP.
    pair.client.receive(&reply);
    pair.client.receive(&reply);
    assert_eq!(pair.client.said(), ["MRA"]);
    pair.client.ready(pair.active);
    let ready = pair.client.only();
    pair.client.receive(&reply);
    assert_eq!(pair.client.sent, [ready]);
    assert_eq!(pair.client.events.len(), 1);
    assert!(pair.server.events.is_empty());
    // A DREQ, in TimeWait and after it.
    let mut pair = Pair::disconnecting();
    let request = pair.client.only();
    for _ in 0..3 {
        pair.server.receive(&request);
        assert_eq!(pair.server.said(), ["DREP"]);
        pair.server.pass(Duration::from_millis(500));
    }
    assert_eq!(pair.server.state(pair.passive), None);
    // A REQ that was rejected; one of another transaction is another request.
    let mut pair = Pair::requested();
    pair.client.pass(Duration::from_secs(5));
    let request = pair.client.only();
    let server = &mut pair.server;
    server
        .connections
        .reject(server.now, pair.passive, b"busy")
        .unwrap();
    server.drain();
    let reject = server.only();
    server.receive(&request);
    assert_eq!(server.sent, [reject]);
    assert!(server.events.is_empty());
    let another = Mad {
        transaction_id: 1,
        ..request
    };
    server.receive(&another);
    let (id, _) = server.event();
    server.accept(id);
    server.sent.clear();
    // It is not a repetition of that one, either.
    server.receive(&request);
    server.receive(&another);
    assert_eq!(server.said(), ["REP"]);
}

#[test]
fn cmc_09_the_acceptance_of_an_abandoned_request_is_refused() {
    let mut pair = Pair::requested();
    pair.client.connections.release(pair.client.now, pair.active);
    pair.client.drain();
    pair.client.sent.clear();
    pair.server.accept(pair.passive);
    pair.client.receive(&pair.server.only());
    pair.server.receive(&pair.client.only());
    let (id, Event::Rejected { reason, .. }) = pair.server.event() else {
        panic!();
    };
    assert_eq!((id, reason.0), (pair.passive, 6));
}

#[test]
fn cmc_10_an_mra_prolongs_the_wait_once_for_each_repetition() {
    let mut pair = Pair::requested();
    pair.client.pass(Duration::from_secs(5));
    pair.server.receive(&pair.client.only());
    let receipt = pair.server.only();
    pair.client.receive(&receipt);
    pair.client.pass(Duration::from_secs(60));
    assert_eq!(pair.client.said(), [""; 0]);
    // The second one, without a repetition between them, has no effect.
    pair.client.receive(&receipt);
    pair.client.pass(Duration::from_secs(10));
    assert_eq!(pair.client.said(), ["REQ"]);
    pair.client.receive(&receipt);
    pair.client.pass(Duration::from_secs(60));
    assert_eq!(pair.client.said(), [""; 0]);
    // However many of them come, the attempt ends.
    for _ in 0..30 {
        pair.client.receive(&receipt);
        pair.client.pass(Duration::from_secs(70));
    }
    assert_eq!(pair.client.event().1, Event::Unreachable);
}

#[test]
fn cmc_10_an_mra_does_not_shorten_the_wait() {
    let mut pair = Pair::requested();
    let mut receipt = messages::from_peer(&pair.client, pair.active, "MRA of REQ");
    if let Message::Receipt(receipt) = &mut receipt.message {
        receipt.service_timeout = 0;
    }
    pair.client.receive(&receipt);
    pair.client.pass(Duration::from_secs(4));
    assert_eq!(pair.client.said(), [""; 0]);
    pair.client.pass(Duration::from_secs(1));
    assert_eq!(pair.client.said(), ["REQ"]);
}

#[test]
fn cmc_10_an_mra_of_the_initiator_prolongs_the_wait() {
    let mut pair = Pair::replied();
    pair.server.pass(Duration::from_secs(5));
    pair.client.receive(&pair.server.only());
    pair.server.receive(&pair.client.only());
    pair.server.pass(Duration::from_secs(60));
    assert_eq!(pair.server.said(), [""; 0]);
    pair.client.ready(pair.active);
    pair.server.receive(&pair.client.only());
    assert_eq!(name(&pair.server.event().1), "ESTABLISHED");
}

#[test]
fn cmc_11_a_request_of_a_connected_queue_pair_ends_the_stale_connection() {
    let mut pair = Pair::established();
    // The client's host has started again: another number, the same queue pair.
    let mut again = End::new(settings(0xc), CLIENT, SERVER);
    again.connections = Connections::new(settings(0xc), Box::new(random(99)));
    let id = again.connect();
    pair.server.receive(&again.only());
    let sent: Vec<_> = pair.server.sent.drain(..).collect();
    assert_eq!(sent.iter().map(word).collect::<Vec<_>>(), ["REJ", "DREQ"]);
    for mad in &sent {
        again.receive(mad);
    }
    let (rejected, Event::Rejected { reason, .. }) = again.event() else {
        panic!();
    };
    assert_eq!((rejected, reason.0), (id, 10));
    assert_eq!(again.state(id), Some(State::TimeWait));
    // The client does not know the old connection, and says that it has ended.
    pair.server.receive(&again.only());
    assert_eq!(
        pair.server.event(),
        (pair.passive, Event::Disconnected { timed_out: false })
    );
    // Then the queue pair is free.
    again.connect();
    pair.server.receive(&again.only());
    assert_eq!(name(&pair.server.event().1), "CONNECT_REQUEST");
}

#[test]
fn cmc_11_a_rejected_connection_in_time_wait_takes_no_acceptance() {
    let mut client = End::client();
    let id = client.connect();
    let reply = messages::from_peer(&client, id, "REP");
    let mut stale = messages::from_peer(&client, id, "REJ");
    if let Message::Reject(reject) = &mut stale.message {
        reject.reason = RejectReason::STALE_CONNECTION;
    }
    client.receive(&stale);
    assert_eq!(name(&client.event().1), "REJECTED");
    client.receive(&reply);
    assert_eq!(client.state(id), Some(State::TimeWait));
    assert!(client.events.is_empty());
}

#[test]
fn cmc_11_a_reply_of_a_connected_queue_pair_ends_both() {
    let mut pair = Pair::established();
    let mut other = End::server();
    other.connections = Connections::new(settings(0x5), Box::new(random(98)));
    let second = Connect {
        qpn: CLIENT_QPN + 1,
        ..connect()
    };
    let client = &mut pair.client;
    let id = client
        .connections
        .connect(client.now, client.route, &second)
        .unwrap();
    client.drain();
    other.receive(&client.only());
    let (passive, _) = other.event();
    other.accept(passive);
    client.receive(&other.only());
    let (rejected, Event::Rejected { reason, .. }) = client.event() else {
        panic!();
    };
    assert_eq!((rejected, reason), (id, RejectReason::STALE_CONNECTION));
    assert_eq!(client.said(), ["REJ", "DREQ"]);
    assert_eq!(client.state(pair.active), Some(State::DreqSent));
}

#[test]
fn cmc_12_crossing_dreqs_end_the_connection() {
    let mut pair = Pair::disconnecting();
    let server = &mut pair.server;
    server.connections.disconnect(server.now, pair.passive).unwrap();
    server.drain();
    let (of_client, of_server) = (pair.client.only(), pair.server.only());
    pair.client.receive(&of_server);
    pair.server.receive(&of_client);
    pair.client.receive(&pair.server.only());
    pair.server.receive(&pair.client.only());
    let disconnected = Event::Disconnected { timed_out: false };
    assert_eq!(pair.client.event(), (pair.active, disconnected.clone()));
    assert_eq!(pair.server.event(), (pair.passive, disconnected));
}

#[test]
fn a_released_connection_ends_without_events() {
    // What the end says, and its state, after the program has released it.
    let released = |end: &mut End, id| {
        end.sent.clear();
        end.connections.release(end.now, id);
        end.drain();
        let said = end.said();
        let state = end.state(id);
        end.pass(Duration::from_secs(200));
        assert!(end.events.is_empty(), "{:?}", end.events);
        assert_eq!(end.connections.table.sizes(), (0, [0; 4]));
        (said, state)
    };
    let mut pair = Pair::requested();
    assert_eq!(released(&mut pair.client, pair.active), (vec!["REJ"], None));
    assert_eq!(released(&mut pair.server, pair.passive), (vec!["REJ"], None));
    let mut pair = Pair::replied();
    assert_eq!(released(&mut pair.client, pair.active), (vec!["REJ"], None));
    let waits = Some(State::TimeWait);
    assert_eq!(released(&mut pair.server, pair.passive), (vec!["REJ"], waits));
    let mut pair = Pair::established();
    let sent = Some(State::DreqSent);
    assert_eq!(released(&mut pair.client, pair.active), (vec!["DREQ"], sent));
    let mut pair = Pair::ended();
    assert_eq!(released(&mut pair.client, pair.active), (vec![], waits));
    let mut pair = Pair::disconnecting();
    assert_eq!(released(&mut pair.client, pair.active), (vec![], sent));
}

#[test]
fn calls_in_other_states_have_no_effect() {
    let states = [
        Pair::requested as fn() -> Pair,
        Pair::replied,
        Pair::established,
        Pair::disconnecting,
        Pair::ended,
    ];
    for make in states {
        for client in [true, false] {
            let pair = make();
            let (mut end, id) = match client {
                true => (pair.client, pair.active),
                false => (pair.server, pair.passive),
            };
            end.sent.clear();
            let state = end.state(id).unwrap();
            let (now, connections) = (end.now, &mut end.connections);
            let wrong = Err(CallError::State(state));
            let mut check =
                |legal: &[State], call: &mut dyn FnMut(&mut Connections) -> Result<(), CallError>| {
                    if !legal.contains(&state) {
                        assert_eq!(call(connections), wrong, "{state}");
                        assert_eq!(connections.state(id), Some(state));
                        assert_eq!(connections.next_output(), None);
                    }
                };
            check(&[State::ReqRcvd], &mut |all| all.accept(now, id, &accept()));
            check(&[State::RepRcvd], &mut |all| all.ready(id, b""));
            check(&[State::ReqRcvd, State::RepRcvd, State::RepSent], &mut |all| {
                all.reject(now, id, b"")
            });
            check(&[State::Established], &mut |all| all.disconnect(now, id));
            check(&[State::RepSent, State::Established], &mut |all| {
                all.communication_established(id)
            });
        }
    }
    let mut end = End::client();
    let unknown = Err(CallError::Unknown(7));
    assert_eq!(end.connections.accept(START, 7, &accept()), unknown);
    assert_eq!(end.connections.ready(7, b""), unknown);
    assert_eq!(end.connections.reject(START, 7, b""), unknown);
    assert_eq!(end.connections.disconnect(START, 7), unknown);
    assert_eq!(end.connections.communication_established(7), unknown);
    end.connections.release(START, 7);
    assert_eq!(end.connections.next_output(), None);
}
