//! Tests of a responder: the data that it fetches, places and sends.

use crate::scripted::{End, header, item, message, rpc};
use urnic_rpc_rdma::engine::{
    Action, CallId, Closing, Config, Connection, Event, Incoming, Reply, Role, Source, Terms, UnknownCall,
};
use urnic_rpc_rdma::{Body, ChunkLists, ErrorBody, ReadSegment, Segment, WriteChunk};

fn segment(handle: u32, length: u32) -> Segment {
    Segment {
        handle,
        length,
        offset: 0x1000,
    }
}

fn chunk(lengths: &[u32]) -> WriteChunk {
    WriteChunk(lengths.iter().map(|length| segment(9, *length)).collect())
}

fn read(position: u32, handle: u32, length: u32) -> ReadSegment {
    ReadSegment {
        position,
        segment: segment(handle, length),
    }
}

/// A call with these chunk lists, as the consumer receives it.
fn end_with_call(lists: ChunkLists) -> (End, Incoming) {
    let mut end = End::new(Role::Server);
    end.receive(&rpc(1, 0, 8, lists), None);
    let [Event::CallReceived(incoming)] = &end.events[..] else {
        panic!("{:?}", end.events)
    };
    let incoming = incoming.clone();
    end.events.clear();
    (end, incoming)
}

fn answered(lists: ChunkLists, reply: &Reply<&'static str>) -> (End, crate::scripted::Sent) {
    let (mut end, incoming) = end_with_call(lists);
    end.engine.reply(incoming.call, reply).unwrap();
    end.run();
    let sent = end.next();
    assert!(sent.len <= 1024);
    (end, sent)
}

fn reply(len: usize, results: &[(usize, &'static str, u32)]) -> Reply<&'static str> {
    Reply {
        message: message(1, 1, len).into(),
        results: results
            .iter()
            .map(|(offset, memory, len)| item(*offset, memory, *len))
            .collect(),
    }
}

fn lengths(chunk: &WriteChunk) -> Vec<u32> {
    chunk.0.iter().map(|segment| segment.length).collect()
}

/// Bytes and handle of each posted RDMA Write.
fn written(end: &End) -> Vec<(usize, u32)> {
    end.others
        .iter()
        .map(|action| match action {
            Action::Write { pieces, remote } => {
                let len = pieces.iter().map(|piece| piece.len).sum();
                assert_eq!(len, remote.length as usize);
                (len, remote.handle)
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn rpc_k_04_a_result_fills_segments_without_padding() {
    let lists = ChunkLists {
        writes: vec![chunk(&[4, 4, 4, 4])],
        ..Default::default()
    };
    let (end, sent) = answered(lists, &reply(28, &[(28, "result", 10)]));
    assert_eq!(lengths(&sent.lists().writes[0]), [4, 4, 2, 0]);
    assert_eq!(written(&end), [(4, 9), (4, 9), (2, 9)]);
    assert_eq!(sent.payload.len(), 28, "neither the item nor its padding");
}

#[test]
fn rpc_k_05_chunks_that_no_result_needs_are_returned_unused() {
    let lists = ChunkLists {
        writes: vec![chunk(&[100]), chunk(&[100, 7])],
        ..Default::default()
    };
    let (_, sent) = answered(lists.clone(), &reply(28, &[(28, "result", 10)]));
    assert_eq!(
        [lengths(&sent.lists().writes[0]), lengths(&sent.lists().writes[1])],
        [vec![10], vec![0, 0]]
    );
    let (end, sent) = answered(lists, &reply(28, &[]));
    assert_eq!(
        [lengths(&sent.lists().writes[0]), lengths(&sent.lists().writes[1])],
        [vec![0], vec![0, 0]]
    );
    assert!(end.others.is_empty());
}

#[test]
fn rpc_k_06_an_empty_chunk_requests_its_result_inline() {
    let lists = ChunkLists {
        writes: vec![chunk(&[]), chunk(&[100])],
        ..Default::default()
    };
    let (mut end, incoming) = end_with_call(lists);
    assert_eq!(incoming.results, [None, Some(100)]);
    end.engine
        .reply(incoming.call, &reply(32, &[(24, "first", 5), (28, "second", 6)]))
        .unwrap();
    end.run();
    let sent = end.next();
    assert_eq!(sent.memory, [("first", 5)]);
    assert_eq!(sent.payload[24..32], *b"mmmmm\0\0\0");
    assert_eq!(
        [lengths(&sent.lists().writes[0]), lengths(&sent.lists().writes[1])],
        [vec![], vec![6]]
    );
}

#[test]
fn rpc_k_07_a_long_reply_fills_the_reply_chunk_with_padding() {
    let lists = ChunkLists {
        reply: Some(chunk(&[1500, 1500])),
        ..Default::default()
    };
    let (end, sent) = answered(lists, &reply(100, &[(100, "result", 1601)]));
    assert!(matches!(sent.header.body, Body::NoMsg(_)) && sent.payload.is_empty());
    assert_eq!(lengths(sent.lists().reply.as_ref().unwrap()), [1500, 204]);
    assert_eq!(written(&end), [(1500, 9), (204, 9)]);
}

#[test]
fn rpc_k_08_a_short_reply_returns_the_reply_chunk_unused() {
    let lists = ChunkLists {
        reply: Some(chunk(&[5000])),
        ..Default::default()
    };
    let (end, sent) = answered(lists, &reply(100, &[]));
    assert!(matches!(sent.header.body, Body::Msg(_)));
    assert_eq!(lengths(sent.lists().reply.as_ref().unwrap()), [0]);
    assert!(sent.lists().reads.is_empty() && end.others.is_empty());
}

#[test]
fn rpc_k_08_the_read_list_of_a_reply_is_empty() {
    let mut end = End::new(Role::Server);
    let lists = ChunkLists {
        reads: vec![read(24, 5, 10)],
        ..Default::default()
    };
    end.receive(&rpc(1, 0, 8, lists), None);
    let Some(Action::Read { work, .. }) = end.others.pop() else {
        panic!()
    };
    end.engine.completed(work);
    end.run();
    let Some(Event::CallReceived(incoming)) = end.events.pop() else {
        panic!()
    };
    end.engine.reply(incoming.call, &reply(24, &[])).unwrap();
    end.run();
    assert!(end.next().lists().is_empty());
}

#[test]
fn rpc_k_02_a_call_is_delivered_after_all_chunks_are_read() {
    let mut end = End::new(Role::Server);
    let lists = ChunkLists {
        reads: vec![read(24, 5, 10), read(8, 6, 4), read(24, 7, 0), read(24, 7, 3)],
        ..Default::default()
    };
    end.receive(&rpc(1, 0, 8, lists), None);
    let reads: Vec<_> = end
        .others
        .drain(..)
        .map(|action| match action {
            Action::Read {
                work,
                item,
                length,
                at,
                remote,
                ..
            } => (work, (item, length, at, remote.handle)),
            other => panic!("{other:?}"),
        })
        .collect();
    let places: Vec<_> = reads.iter().map(|(_, place)| *place).collect();
    assert_eq!(places, [(0, 4, 0, 6), (1, 13, 0, 5), (1, 13, 10, 7)]);
    for (work, _) in &reads[..2] {
        end.engine.completed(*work);
    }
    end.run();
    assert!(end.events.is_empty());
    end.engine.completed(reads[2].0);
    end.run();
    let [Event::CallReceived(incoming)] = &end.events[..] else {
        panic!()
    };
    assert_eq!(incoming.items, [(8, 4), (24, 13)]);
    assert_eq!(incoming.message.as_deref(), Some(&message(1, 0, 24)[..]));
}

#[test]
fn reads_are_few_at_a_time() {
    let mut end = End::with(&Config {
        max_reads: 2,
        ..Config::new(Role::Server)
    });
    let lists = ChunkLists {
        reads: (0..5).map(|_| read(24, 5, 4)).collect(),
        ..Default::default()
    };
    end.receive(&rpc(1, 0, 8, lists), None);
    for left in (0..5).rev() {
        assert_eq!(end.others.len(), 2.min(left + 1));
        let Action::Read { work, .. } = end.others.remove(0) else {
            panic!()
        };
        assert!(end.events.is_empty());
        end.engine.completed(work);
        end.run();
    }
    assert_eq!(end.events.len(), 1);
}

#[test]
fn rpc_k_07_a_long_call_is_the_first_item() {
    let mut end = End::new(Role::Server);
    let lists = ChunkLists {
        reads: vec![read(0, 5, 2000)],
        ..Default::default()
    };
    end.receive(&header(1, 8, Body::NoMsg(lists)), None);
    let Some(Action::Read {
        work,
        item: 0,
        length: 2000,
        ..
    }) = end.others.pop()
    else {
        panic!()
    };
    end.engine.completed(work);
    end.run();
    assert!(
        matches!(&end.events[..], [Event::CallReceived(Incoming { message: None, items, .. })] if *items == [(0, 2000)])
    );
}

#[test]
fn rpc_e_02_a_reply_that_fits_nowhere_is_answered_err_chunk() {
    let cases = [
        (ChunkLists::default(), reply(1000, &[])),
        (
            ChunkLists {
                reply: Some(chunk(&[1200])),
                ..Default::default()
            },
            reply(1204, &[]),
        ),
        (
            ChunkLists {
                writes: vec![chunk(&[9])],
                ..Default::default()
            },
            reply(28, &[(28, "result", 10)]),
        ),
    ];
    for (lists, reply) in cases {
        let (end, sent) = answered(lists, &reply);
        assert_eq!(sent.header.body, Body::Error(ErrorBody::Chunk));
        assert_eq!((sent.header.xid, sent.header.credits), (1, 64));
        assert!(end.others.is_empty(), "nothing was written");
    }
}

#[test]
fn rpc_i_04_replies_invalidate_their_calls_memory_if_agreed() {
    let lists = ChunkLists {
        writes: vec![chunk(&[4])],
        ..Default::default()
    };
    let (_, sent) = answered(lists.clone(), &reply(28, &[]));
    assert_eq!(sent.invalidate, None);

    let mut end = End::new(Role::Server);
    end.engine.disconnected();
    end.engine.connected(Terms {
        remote_invalidation: true,
        ..Terms::default()
    });
    end.run();
    for (lists, expected) in [(lists, Some(9)), (ChunkLists::default(), None)] {
        end.receive(&rpc(1, 0, 8, lists), None);
        let Some(Event::CallReceived(incoming)) = end.events.pop() else {
            panic!()
        };
        end.engine.reply(incoming.call, &reply(28, &[])).unwrap();
        end.run();
        assert_eq!(end.next().invalidate, expected);
    }
}

#[test]
fn memory_is_in_use_until_the_reply_is_sent() {
    let lists = ChunkLists {
        writes: vec![chunk(&[40])],
        ..Default::default()
    };
    let (mut end, sent) = answered(lists, &reply(28, &[(28, "result", 10)]));
    assert!(
        matches!(&end.others[..], [Action::Write { pieces, .. }] if pieces[0].source == Source::Memory("result"))
    );
    assert!(end.events.is_empty());
    end.engine.completed(sent.work);
    end.run();
    assert_eq!(end.events, [Event::Finished(CallId(1))]);
}

#[test]
fn calls_are_answered_once_and_not_after_their_connection() {
    let (mut end, incoming) = end_with_call(ChunkLists::default());
    end.engine.reply(incoming.call, &reply(28, &[])).unwrap();
    assert_eq!(end.engine.reply(incoming.call, &reply(28, &[])), Err(UnknownCall));
    end.receive_call(2, 8);
    let Some(Event::CallReceived(second)) = end.events.pop() else {
        panic!()
    };
    end.engine.disconnected();
    assert_eq!(end.engine.reply(second.call, &reply(28, &[])), Err(UnknownCall));
    end.run();
    assert_eq!(
        end.events,
        [Event::Finished(CallId(1)), Event::Finished(CallId(2))]
    );
}

#[test]
fn rpc_e_08_a_call_that_gets_no_reply_ends_the_connection() {
    let (mut end, incoming) = end_with_call(ChunkLists::default());
    end.engine.drop_call(incoming.call).unwrap();
    end.run();
    assert_eq!(end.others, [Action::Close(Closing::Dropped)]);
}

#[test]
fn rpc_e_07_a_call_that_broke_the_connection_is_refused() {
    let mut end = End::new(Role::Server);
    let lists = ChunkLists {
        reads: vec![read(24, 5, 10)],
        ..Default::default()
    };
    end.receive(&rpc(1, 0, 8, lists.clone()), None);
    let Some(Action::Read { work, .. }) = end.others.pop() else {
        panic!()
    };
    end.engine.failed(work);
    end.engine.disconnected();
    end.run();
    assert_eq!(end.events, [Event::Finished(CallId(1))]);

    let mut next = End {
        engine: Connection::new(&Config::new(Role::Server)),
        ..End::new(Role::Server)
    };
    next.engine.refuse(end.engine.refused());
    next.engine.connected(Terms::default());
    next.receives = 0;
    next.run();
    next.receive(&rpc(1, 0, 8, lists.clone()), None);
    let sent = next.next();
    assert_eq!(
        (sent.header.xid, sent.header.body),
        (1, Body::Error(ErrorBody::Chunk))
    );
    assert!(next.others.is_empty());
    // The transaction is refused once, because the requester has then given it up.
    next.receive(&rpc(1, 0, 8, lists), None);
    assert!(matches!(next.others[..], [Action::Read { .. }]));
}

#[test]
fn rpc_e_03_a_server_discards_unsolicited_errors_and_replies() {
    let mut end = End::new(Role::Server);
    end.receive(&header(1, 8, Body::Error(ErrorBody::Chunk)), None);
    end.receive(&rpc(1, 1, 8, ChunkLists::default()), None);
    assert!(end.sent.is_empty() && end.events.is_empty() && end.others.is_empty());
    assert_eq!(end.receives, 64);
}
