//! Tests of calls that a server makes (RFC 8167).

use crate::scripted::{End, call, header, message, rpc, short};
use urnic_rpc_rdma::engine::{Action, CallError, Closing, Config, Event, Reply, Role, Terms};
use urnic_rpc_rdma::{Body, ChunkLists, ErrorBody, ReadSegment, Segment, WriteChunk};

fn reply(xid: u32) -> Reply<&'static str> {
    Reply {
        message: message(xid, 1, 24).into(),
        results: vec![],
    }
}

/// A client that accepts `credits` calls.
fn client(credits: u32) -> End {
    let mut end = End::new(Role::Client);
    end.engine.set_grant(credits);
    end.run();
    end
}

fn server() -> End {
    let mut end = End::with(&Config {
        grant: 4,
        ..Config::new(Role::Server)
    });
    end.engine.peer_takes_calls();
    end.run();
    end
}

#[test]
fn rpc_bd_01_one_xid_both_ways_is_two_transactions() {
    for mut end in [client(2), server()] {
        end.call(7);
        end.receive_call(7, 2);
        let Some(Event::CallReceived(incoming)) = end.events.pop() else {
            panic!()
        };
        end.receive_reply(7, 8);
        assert!(matches!(
            end.events[..],
            [Event::Answered {
                xid: 7,
                outcome: Ok(_),
                ..
            }]
        ));
        end.engine.reply(incoming.call, &reply(7)).unwrap();
        end.run();
        assert_eq!(end.sent.len(), 2);
    }
}

#[test]
fn calls_beyond_the_credits_take_no_receives_of_replies() {
    let mut end = server();
    end.call(99);
    (1..5).for_each(|xid| end.receive_call(xid, 2));
    assert!(end.others.is_empty());
    assert_eq!((end.events.len(), end.receives), (4, 1));
    end.receive_call(5, 2);
    assert_eq!(end.others, [Action::Close(Closing::Credits)]);
    assert_eq!(end.events.len(), 4);
}

#[test]
fn rpc_bd_02_credits_of_either_direction_are_their_own() {
    let mut end = client(2);
    end.call(1);
    end.receive_reply(1, 3);
    end.sent.clear();
    // The 100 credits of a backward call are a request, so they permit no further call.
    end.receive_call(9, 100);
    (2..9).for_each(|xid| end.call(xid));
    assert_eq!(end.sent.len(), 3);
    end.sent.clear();
    let Some(Event::CallReceived(incoming)) = end.events.pop() else {
        panic!()
    };
    end.engine.reply(incoming.call, &reply(9)).unwrap();
    end.run();
    assert_eq!(end.next().header.credits, 2, "the backward grant");
}

#[test]
fn rpc_bd_03_a_server_calls_only_when_the_peer_is_ready() {
    let mut end = End::new(Role::Server);
    end.call(1);
    assert!(end.sent.is_empty());
    end.engine.peer_takes_calls();
    end.run();
    assert_eq!(end.sent.len(), 1);
}

#[test]
fn a_client_that_takes_no_calls_discards_them() {
    let mut end = End::new(Role::Client);
    end.call(1);
    end.receive_call(1, 2);
    assert!(end.events.is_empty() && end.sent.len() == 1);
    assert_eq!(end.receives, 1, "the reply may still come");
}

#[test]
fn rpc_bd_02_a_client_grants_a_credit_with_a_receive() {
    let mut end = client(2);
    end.engine.set_grant(0);
    end.receive_call(1, 2);
    end.receive_call(2, 2);
    let [Event::CallReceived(first), Event::CallReceived(second)] = &std::mem::take(&mut end.events)[..]
    else {
        panic!()
    };
    for (call, xid, receives) in [(first.call, 1, 0), (second.call, 2, 1)] {
        end.engine.reply(call, &reply(xid)).unwrap();
        end.run();
        let sent = end.next();
        assert_eq!((sent.header.credits, end.receives), (1, receives));
        end.engine.completed(sent.work);
    }
}

#[test]
fn rpc_bd_04_backward_calls_have_no_chunks() {
    let mut end = server();
    end.call(1);
    assert_eq!(*end.next().lists(), ChunkLists::default());
    for too_long in [
        call(2, 1000, 0, 0, 100),
        call(3, 40, 5000, 0, 100),
        call(4, 40, 0, 0, 5000),
    ] {
        end.engine.call(too_long).unwrap();
    }
    end.receive_reply(1, 8);
    let failed = end.events.iter().filter(|event| {
        matches!(
            event,
            Event::Answered {
                outcome: Err(CallError::TooLong),
                ..
            }
        )
    });
    assert_eq!(failed.count(), 3);
}

#[test]
fn rpc_bd_04_chunks_in_backward_calls_are_answered_err_chunk() {
    let segment = Segment {
        handle: 1,
        length: 100,
        offset: 0,
    };
    let reads = vec![ReadSegment { position: 0, segment }];
    let long = header(
        5,
        2,
        Body::NoMsg(ChunkLists {
            reads,
            ..Default::default()
        }),
    );
    let reply = Some(WriteChunk(vec![segment]));
    let short = rpc(
        5,
        0,
        2,
        ChunkLists {
            reply,
            ..Default::default()
        },
    );
    for message in [long, short] {
        let mut end = client(2);
        end.receive(&message, None);
        let sent = end.next();
        assert_eq!(
            (sent.header.xid, sent.header.body),
            (5, Body::Error(ErrorBody::Chunk))
        );
        assert!(end.events.is_empty());
    }
}

#[test]
fn rpc_bd_04_the_servers_call_ends_with_that_error() {
    let mut end = server();
    end.call(5);
    end.receive(&header(5, 2, Body::Error(ErrorBody::Chunk)), None);
    assert!(matches!(
        end.events[..],
        [Event::Answered {
            outcome: Err(CallError::Refused(ErrorBody::Chunk)),
            ..
        }]
    ));
}

#[test]
fn rpc_bd_05_receives_are_for_both_directions() {
    let mut end = client(3);
    assert_eq!(end.receives, 3);
    end.call(1);
    assert_eq!(end.receives, 4);
    end.receive_call(1, 2);
    assert_eq!(end.receives, 3, "one call is in use");
    end.receive_reply(1, 8);
    assert_eq!(end.receives, 2);
    let mut end = server();
    assert_eq!(end.receives, 4);
    end.call(1);
    assert_eq!(end.receives, 5);
    end.receive_call(1, 2);
    end.receive_reply(1, 2);
    assert_eq!(end.receives, 3);
}

#[test]
fn rpc_bd_06_a_servers_calls_wait_for_the_next_connection() {
    let mut end = server();
    end.call(1);
    end.sent.clear();
    end.engine.disconnected();
    end.receives = 0;
    end.run();
    assert!(end.events.is_empty());
    end.engine.connected(Terms::default());
    end.run();
    assert!(
        end.sent.is_empty(),
        "nothing is sent before the peer accepts calls"
    );
    end.engine.peer_takes_calls();
    end.run();
    assert_eq!(end.next().header.xid, 1);
}

#[test]
fn rpc_bd_07_the_message_type_determines_the_direction() {
    let mut end = client(1);
    end.engine.call(short(3)).unwrap();
    end.run();
    end.receive_call(3, 1);
    assert!(matches!(end.events[..], [Event::CallReceived(_)]));
    end.receive_reply(3, 1);
    assert!(matches!(
        end.events[..],
        [Event::CallReceived(_), Event::Answered { .. }]
    ));
}
