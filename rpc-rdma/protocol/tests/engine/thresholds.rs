//! Tests of the inline thresholds (RFC 8166 §3.3.2): each kind of message that exactly fills the
//! threshold is sent, and one that is a word longer goes another way or not at all.

use crate::scripted::{End, call, item, message, rpc};
use urnic_rpc_rdma::engine::{
    Action, Call, CallError, Config, Event, Exposed, Item, RegionId, Reply, Role, Terms,
};
use urnic_rpc_rdma::{Body, ChunkLists, ErrorBody, Segment, WriteChunk};

/// Bytes of a header with three absent lists.
const BARE: usize = 28;
/// Bytes of a Read list entry, and of a Write chunk of one segment in its list.
const ENTRY: usize = 24;

/// An end whose Sends may have `send` bytes, and those of its peer `receive` bytes.
fn end(role: Role, send: usize, receive: usize) -> End {
    let terms = Terms {
        send,
        receive,
        ..Terms::default()
    };
    End::over(&Config::new(role), terms)
}

/// A client that makes this call. The peer may send much more than this end.
fn calling(send: usize, call: Call<&'static str>) -> End {
    let mut end = end(Role::Client, send, 1 << 16);
    end.engine.call(call).unwrap();
    end.run();
    end
}

fn failed(end: &End) -> bool {
    matches!(
        end.events[..],
        [Event::Answered {
            outcome: Err(CallError::TooLong),
            ..
        }]
    )
}

#[test]
fn rpc_h_05_arguments_fill_the_threshold_to_the_last_byte() {
    // 28 bytes of header, 40 of message, 956 of argument.
    let mut end = calling(1024, call(1, 40, 956, 0, 100));
    let sent = end.next();
    assert_eq!((sent.len, sent.memory), (1024, vec![("argument", 956)]));
    assert!(end.others.is_empty());
    let mut end = calling(1024, call(1, 40, 957, 0, 100));
    let sent = end.next();
    assert_eq!(sent.lists().reads[0].segment.length, 957);
    assert!(sent.memory.is_empty());
}

#[test]
fn rpc_h_05_a_call_with_read_chunks_fills_the_threshold() {
    // With one word less, the whole call goes by chunk, too.
    for (send, reads) in [(BARE + ENTRY + 400, 1), (BARE + ENTRY + 396, 2)] {
        let sent = calling(send, call(1, 400, 5000, 0, 100)).next();
        assert_eq!(sent.lists().reads.len(), reads);
        assert!(sent.len <= send, "{} bytes, of {send}", sent.len);
    }
}

/// A long call whose lists do not fit fails before its memory is exposed.
#[test]
fn rpc_h_05_the_lists_of_a_long_call_fill_the_threshold() {
    let mut many = call(1, 4000, 0, 0, 100);
    many.arguments = (0..9).map(|n| item(40 + 4 * n, "argument", 5000)).collect();
    let len = BARE + 10 * ENTRY;
    let sent = calling(len, many.clone()).next();
    assert_eq!((sent.len, sent.lists().reads.len()), (len, 10));
    let end = calling(len - 4, many);
    assert!(failed(&end) && end.sent.is_empty() && end.others.is_empty());
}

/// A registration may return more segments than one: here, 39 of them and 60 bytes of message make
/// 1024 bytes.
#[test]
fn rpc_h_05_segments_of_a_registration_fill_the_threshold() {
    for (len, fits) in [(60, true), (64, false)] {
        let mut end = end(Role::Client, 1024, 1024);
        end.registers = false;
        end.engine.call(call(1, len, 100_000, 0, 100)).unwrap();
        end.run();
        let segment = Segment {
            handle: 1,
            length: 100_000 / 39,
            offset: 0,
        };
        end.engine.registered(RegionId(1), vec![segment; 39]);
        end.run();
        match fits {
            true => assert_eq!(end.next().len, 1024),
            false => assert!(failed(&end) && end.sent.is_empty()),
        }
    }
}

/// Long replies are offered memory if the longest reply does not fit, with the lists that it
/// returns.
#[test]
fn rpc_k_07_a_reply_of_one_byte_too_many_gets_a_reply_chunk() {
    let offered = |result, max_reply| {
        let mut end = end(Role::Client, 1 << 16, 1024);
        end.engine.call(call(1, 40, 0, result, max_reply)).unwrap();
        end.run();
        let sent = end.next();
        (sent.lists().writes.len(), sent.lists().reply.is_some())
    };
    assert_eq!(offered(0, 1024 - BARE), (0, false));
    assert_eq!(offered(0, 1024 - BARE + 1), (0, true));
    assert_eq!(offered(4096, 1024 - BARE - ENTRY), (1, false));
    assert_eq!(offered(4096, 1024 - BARE - ENTRY + 1), (1, true));
    // The result stays inline, with its padding.
    assert_eq!(offered(797, 1024 - BARE - 800), (0, false));
    assert_eq!(offered(797, 1024 - BARE - 800 + 1), (1, false));
}

/// The answer of a server, whose Sends may have `send` bytes, to a call with these lists.
fn answering(send: usize, lists: ChunkLists, len: usize, results: Vec<Item<&'static str>>) -> End {
    let mut end = end(Role::Server, send, 1 << 16);
    end.receive(&rpc(1, 0, 8, lists), None);
    let [Event::CallReceived(incoming)] = &std::mem::take(&mut end.events)[..] else {
        panic!()
    };
    let message = message(1, 1, len).into();
    let reply = Reply { message, results };
    end.engine.reply(incoming.call, &reply).unwrap();
    end.run();
    end
}

fn chunk(segments: usize) -> WriteChunk {
    let segment = Segment {
        handle: 9,
        length: 5000,
        offset: 0,
    };
    WriteChunk(vec![segment; segments])
}

#[test]
fn rpc_h_05_a_reply_fills_the_threshold_to_the_last_byte() {
    let lists = || ChunkLists {
        writes: vec![chunk(1)],
        reply: Some(chunk(1)),
        ..Default::default()
    };
    let result = || vec![item(28, "result", 4096)];
    // Both chunks come back in the header: 24 bytes for one, 20 more for the other.
    let len = BARE + ENTRY + 20 + 500;
    let sent = answering(len, lists(), 500, result()).next();
    assert_eq!((sent.len, sent.payload.len()), (len, 500));
    let mut end = answering(len - 4, lists(), 500, result());
    let sent = end.next();
    assert!(matches!(sent.header.body, Body::NoMsg(_)) && sent.payload.is_empty());
    assert_eq!(sent.lists().reply.as_ref().unwrap().bytes(), 500);
}

#[test]
fn rpc_h_05_the_lists_of_a_long_reply_fill_the_threshold() {
    let lists = || ChunkLists {
        writes: vec![chunk(30), chunk(30)],
        reply: Some(chunk(1)),
        ..Default::default()
    };
    let len = BARE + 2 * 8 + 60 * 16 + 20;
    let sent = answering(len, lists(), 4000, Vec::new()).next();
    assert_eq!(sent.len, len);
    assert!(matches!(sent.header.body, Body::NoMsg(_)));
    // No reply is possible (RFC 8166 §4.5.3), and nothing is written for it.
    let mut end = answering(len - 4, lists(), 4000, Vec::new());
    assert_eq!(end.next().header.body, Body::Error(ErrorBody::Chunk));
    assert!(
        !end.others
            .iter()
            .any(|action| matches!(action, Action::Write { .. }))
    );
}

/// The thresholds of the directions differ: calls keep to that of the client's Sends, and replies
/// to that of the server's.
#[test]
fn rpc_h_05_each_direction_has_a_threshold_of_its_own() {
    let mut end = end(Role::Client, 1024, 4096);
    end.engine.call(call(1, 1024 - BARE, 0, 0, 4096 - BARE)).unwrap();
    end.run();
    let sent = end.next();
    assert_eq!((sent.len, sent.lists().is_empty()), (1024, true));
    end.receive_reply(1, 8);
    end.engine
        .call(call(2, 1024 - BARE + 4, 0, 0, 4096 - BARE + 1))
        .unwrap();
    end.run();
    let exposed = end.others.iter().filter_map(|action| match action {
        Action::Register { what, .. } => Some(what),
        _ => None,
    });
    assert!(matches!(
        exposed.collect::<Vec<_>>()[..],
        [Exposed::Bytes(_), Exposed::Fresh(4069)]
    ));
}
