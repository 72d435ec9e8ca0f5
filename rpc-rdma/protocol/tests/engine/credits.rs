//! Tests of credits and receives (RFC 8166 §3.3).

use crate::scripted::{End, header, rpc, short};
use urnic_rpc_rdma::engine::{Action, CallError, Closing, Config, Event, Reply, Role, Terms};
use urnic_rpc_rdma::{Body, ChunkLists, ErrorBody};

fn client(request: u32) -> End {
    End::with(&Config {
        request,
        ..Config::new(Role::Client)
    })
}

fn server(grant: u32) -> End {
    End::with(&Config {
        grant,
        ..Config::new(Role::Server)
    })
}

/// An end after its first call and reply: the peer grants `credits` from now on.
fn opened(request: u32, credits: u32) -> End {
    let mut end = client(request);
    end.call(0);
    end.receive_reply(0, credits);
    end.sent.clear();
    end
}

#[test]
fn rpc_c_02_one_call_before_the_first_reply() {
    let mut end = client(16);
    end.call(1);
    end.call(2);
    assert_eq!((end.sent.len(), end.receives), (1, 1));
    assert_eq!(end.next().header.credits, 16);
    end.receive_reply(1, 16);
    assert_eq!(end.next().header.xid, 2);
}

/// A grant is valid for the connection on which it was made.
#[test]
fn rpc_c_02_one_call_before_the_next_connections_first_reply() {
    let mut end = opened(16, 16);
    end.engine.disconnected();
    end.engine.connected(Terms::default());
    (1..4).for_each(|xid| end.call(xid));
    assert_eq!(end.sent.len(), 1);
    end.receive_reply(1, 16);
    assert_eq!(end.sent.len(), 3);
}

#[test]
fn rpc_c_02_an_error_grants_nothing() {
    let mut end = client(16);
    (1..4).for_each(|xid| end.call(xid));
    end.sent.clear();
    end.receive(&header(1, 16, Body::Error(ErrorBody::Chunk)), None);
    assert_eq!(end.sent.len(), 1);
}

#[test]
fn rpc_c_01_with_one_credit_calls_are_strictly_serial() {
    let mut end = opened(16, 1);
    (1..5).for_each(|xid| end.call(xid));
    for xid in 1..5 {
        assert_eq!(end.sent.len(), 1);
        assert_eq!(end.next().header.xid, xid);
        end.receive_reply(xid, 1);
    }
    assert!(end.sent.is_empty());
}

#[test]
fn rpc_c_01_a_lowered_grant_holds_calls_back() {
    let mut end = opened(16, 8);
    (1..13).for_each(|xid| end.call(xid));
    assert_eq!(end.sent.len(), 8);
    end.sent.clear();
    for xid in 1..7 {
        end.receive_reply(xid, 2);
        assert!(end.sent.is_empty(), "{} in flight", 8 - xid);
    }
    end.receive_reply(7, 2);
    assert_eq!(end.sent.len(), 1);
    // The grant is raised again.
    end.receive_reply(8, 8);
    assert_eq!(end.sent.len(), 4);
}

#[test]
fn rpc_c_01_calls_never_exceed_the_requested_credits() {
    let mut end = opened(4, 100);
    (1..10).for_each(|xid| end.call(xid));
    assert_eq!(end.sent.len(), 4);
    end.engine.set_request(6);
    end.run();
    assert_eq!(end.sent.len(), 6);
    assert_eq!(end.sent.back().unwrap().header.credits, 6);
}

#[test]
fn rpc_c_04_a_grant_is_at_least_one_and_at_most_the_request() {
    for (granted, expected) in [(0, 1), (1 << 31, 4)] {
        let mut end = opened(4, granted);
        (1..10).for_each(|xid| end.call(xid));
        assert_eq!(end.sent.len(), expected);
    }
}

#[test]
fn rpc_c_03_a_requester_has_a_receive_for_every_reply() {
    let mut end = opened(16, 16);
    (1..17).for_each(|xid| end.call(xid));
    assert_eq!((end.sent.len(), end.receives), (16, 16));
}

#[test]
fn rpc_c_03_receives_are_posted_before_their_send() {
    let mut end = client(1);
    end.engine.call(short(1)).unwrap();
    let actions = end.engine.actions();
    assert!(
        matches!(actions[..], [Action::Receive(1), Action::Send { .. }]),
        "{actions:?}"
    );
}

#[test]
fn rpc_c_03_a_responder_has_receives_for_all_it_grants() {
    let mut end = server(4);
    assert_eq!(end.receives, 4);
    (1..5).for_each(|xid| end.receive_call(xid, 32));
    assert_eq!(end.receives, 0, "all are in use");
    // The grant is raised: the receives are posted before the reply that carries the grant.
    end.engine.set_grant(6);
    let Event::CallReceived(incoming) = end.events.remove(0) else {
        panic!()
    };
    let reply = Reply {
        message: crate::scripted::message(1, 1, 24).into(),
        results: vec![],
    };
    end.engine.reply(incoming.call, &reply).unwrap();
    let actions = end.engine.actions();
    assert!(
        matches!(actions[..], [Action::Receive(3), Action::Send { .. }]),
        "{actions:?}"
    );
}

#[test]
fn rpc_c_03_a_lowered_grant_lets_receives_run_out() {
    let mut end = server(4);
    end.engine.set_grant(1);
    for xid in 1..5 {
        end.receive_call(xid, 32);
        let Event::CallReceived(incoming) = end.events.remove(0) else {
            panic!()
        };
        let reply = Reply {
            message: crate::scripted::message(xid, 1, 24).into(),
            results: vec![],
        };
        end.engine.reply(incoming.call, &reply).unwrap();
        end.run();
        let sent = end.next();
        assert_eq!(sent.header.credits, 1);
        assert_eq!(end.receives, (4 - xid as usize).max(1));
        end.engine.completed(sent.work);
        end.engine.events();
    }
}

/// An error carries no grant: the peer may use the credit of the call that it answers again, by the
/// grant before.
#[test]
fn rpc_c_03_an_error_for_a_reply_leaves_a_receive_for_a_call() {
    let mut end = server(4);
    end.engine.set_grant(1);
    (1..5).for_each(|xid| end.receive_call(xid, 32));
    assert_eq!(end.receives, 0);
    let Event::CallReceived(incoming) = end.events.remove(0) else {
        panic!()
    };
    let too_long = Reply {
        message: crate::scripted::message(1, 1, 2000).into(),
        results: vec![],
    };
    end.engine.reply(incoming.call, &too_long).unwrap();
    end.run();
    assert_eq!(end.next().header.body, Body::Error(ErrorBody::Chunk));
    assert_eq!(end.receives, 1);
}

/// The peer may still make the eight calls that it was granted, so their receives are not available
/// for replies to calls of this end.
#[test]
fn rpc_c_03_receives_of_a_lowered_grant_are_not_reused() {
    let mut end = server(8);
    end.engine.peer_takes_calls();
    end.engine.set_grant(2);
    end.call(1);
    assert_eq!(end.receives, 9);
}

/// The grant that the reply contained when it was made counts, although the grant was lowered
/// before the reply was sent.
#[test]
fn rpc_c_03_receives_are_for_the_grant_that_a_reply_carries() {
    let mut end = server(2);
    end.receive_call(1, 32);
    let Some(Event::CallReceived(incoming)) = end.events.pop() else {
        panic!()
    };
    let reply = Reply {
        message: crate::scripted::message(1, 1, 24).into(),
        results: vec![],
    };
    end.engine.set_grant(6);
    end.engine.reply(incoming.call, &reply).unwrap();
    end.engine.set_grant(1);
    end.run();
    assert_eq!((end.next().header.credits, end.receives), (6, 6));
}

#[test]
fn rpc_c_05_calls_beyond_a_lowered_grant_are_served() {
    let mut end = server(4);
    end.engine.set_grant(1);
    (1..5).for_each(|xid| end.receive_call(xid, 32));
    assert_eq!(end.events.len(), 4);
}

#[test]
fn rpc_e_09_errors_carry_the_grant() {
    let mut end = server(3);
    end.receive(&rpc(1, 2, 32, ChunkLists::default()), None);
    let error = end.next();
    assert_eq!(error.header.body, Body::Error(ErrorBody::Chunk));
    assert_eq!((error.header.xid, error.header.credits, error.len), (1, 3, 20));
    assert_eq!(end.receives, 3, "the receive is posted again");
}

#[test]
fn a_peer_that_takes_no_answers_loses_the_connection() {
    let mut end = server(3);
    for xid in 0..3 {
        end.receive(&rpc(xid, 2, 32, ChunkLists::default()), None);
    }
    assert_eq!((end.sent.len(), end.others.len()), (3, 0));
    // Sent answers make room for others.
    let work = end.next().work;
    end.engine.completed(work);
    end.receive(&rpc(3, 2, 32, ChunkLists::default()), None);
    assert!(end.others.is_empty());
    end.receive(&rpc(4, 2, 32, ChunkLists::default()), None);
    assert_eq!(end.others, [Action::Close(Closing::Faults)]);
}

#[test]
fn a_cancelled_call_keeps_credit_and_xid_until_its_answer() {
    let mut end = opened(16, 1);
    end.events.clear();
    end.call(1);
    end.call(2);
    assert!(end.engine.cancel(1));
    end.run();
    assert!(matches!(
        end.events[..],
        [Event::Answered {
            xid: 1,
            outcome: Err(CallError::Cancelled),
            ..
        }]
    ));
    assert_eq!(end.sent.len(), 1, "the other waits");
    assert!(end.engine.call(short(1)).is_err());
    end.receive_reply(1, 1);
    assert_eq!(end.sent.len(), 2);
    assert!(end.engine.call(short(1)).is_ok());
    assert_eq!(end.events.len(), 1, "cancelled once");
}

#[test]
fn an_unexpected_reply_is_ignored() {
    let mut end = opened(16, 1);
    end.call(1);
    end.call(2);
    end.events.clear();
    end.receive(&rpc(77, 1, 16, ChunkLists::default()), None);
    assert_eq!((end.sent.len(), end.events.len(), end.receives), (1, 0, 1));
}

#[test]
fn unread_replies_do_not_accumulate() {
    let mut end = server(2);
    let answer = |end: &mut End, xid| {
        end.receive_call(xid, 32);
        let Some(Event::CallReceived(incoming)) = end.events.pop() else {
            panic!("call {xid} was not taken")
        };
        let reply = Reply {
            message: crate::scripted::message(xid, 1, 24).into(),
            results: vec![],
        };
        end.engine.reply(incoming.call, &reply).unwrap();
        assert!(end.engine.reply(incoming.call, &reply).is_err());
        end.run();
    };
    (1..5).for_each(|xid| answer(&mut end, xid));
    // Two replies are being sent. Two replies wait, and their credits wait with them.
    assert_eq!((end.sent.len(), end.receives), (2, 0));
    for xid in 1..5 {
        let sent = end.next();
        assert_eq!(sent.header.xid, xid);
        end.engine.completed(sent.work);
        end.run();
    }
    assert_eq!((end.sent.len(), end.receives), (0, 2));
    // No reply is left over for the next connection.
    (5..9).for_each(|xid| answer(&mut end, xid));
    end.sent.clear();
    end.events.clear();
    end.engine.disconnected();
    end.engine.connected(urnic_rpc_rdma::engine::Terms::default());
    end.run();
    assert_eq!(end.events.len(), 4);
    assert!(end.sent.is_empty());
}
