//! Tests of the memory that a requester exposes: the choice of chunks, and the end of the access.

use crate::scripted::{End, call, handle, header, item, message, rpc, short};
use urnic_rpc_rdma::engine::{
    Access, Action, Answer, CallError, Closing, Config, Connection, Event, Exposed, Invalid, Message,
    RegionId, Role, Terms,
};
use urnic_rpc_rdma::{Body, ChunkLists, ErrorBody, Segment, WriteChunk};

fn client() -> End {
    End::new(Role::Client)
}

/// A client that has sent calls with these xids, after a first call and its reply.
fn client_with_calls(xids: std::ops::Range<u32>) -> End {
    let mut end = client();
    end.call(0);
    end.receive_reply(0, 8);
    for xid in xids {
        end.engine.call(call(xid, 40, 5000, 0, 100)).unwrap();
    }
    end.run();
    end
}

fn made(call: urnic_rpc_rdma::engine::Call<&'static str>) -> (End, crate::scripted::Sent) {
    let mut end = client();
    end.engine.call(call).unwrap();
    end.run();
    let sent = end.next();
    assert!(sent.len <= 1024);
    (end, sent)
}

fn lengths(chunk: &WriteChunk) -> Vec<u32> {
    chunk.0.iter().map(|segment| segment.length).collect()
}

#[test]
fn rpc_k_03_padding_is_sent_inline_and_not_in_chunks() {
    let (_, sent) = made(call(1, 40, 5, 0, 100));
    assert_eq!(sent.payload[40..], *b"mmmmm\0\0\0");
    let (_, sent) = made(call(1, 1000 - 28, 1001, 0, 100));
    assert_eq!(sent.lists().reads.len(), 1);
    assert_eq!(
        (
            sent.lists().reads[0].position,
            sent.lists().reads[0].segment.length
        ),
        (972, 1001)
    );
}

#[test]
fn rpc_k_02_positions_are_those_of_the_unreduced_stream() {
    let mut two = call(1, 60, 0, 0, 100);
    two.arguments = vec![item(44, "one", 5001), item(48, "two", 7000)];
    let (end, sent) = made(two);
    let reads: Vec<_> = sent
        .lists()
        .reads
        .iter()
        .map(|read| (read.position, read.segment.length))
        .collect();
    assert_eq!(reads, [(44, 5001), (44 + 5004 + 4, 7000)]);
    let registered: Vec<_> = end
        .others
        .iter()
        .map(|action| match action {
            Action::Register {
                what: Exposed::Memory(memory, len),
                access,
                ..
            } => (*memory, *len, *access),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        registered,
        [
            ("one", 5001, Access::RemoteRead),
            ("two", 7000, Access::RemoteRead)
        ]
    );
}

#[test]
fn rpc_k_07_a_long_call_goes_by_the_position_zero_chunk() {
    let (_, sent) = made(call(1, 996, 0, 0, 100));
    assert_eq!((sent.len, matches!(sent.header.body, Body::Msg(_))), (1024, true));
    let (end, sent) = made(call(1, 1000, 0, 0, 100));
    assert!(matches!(sent.header.body, Body::NoMsg(_)) && sent.payload.is_empty());
    assert_eq!(
        (
            sent.lists().reads[0].position,
            sent.lists().reads[0].segment.length
        ),
        (0, 1000)
    );
    assert!(
        matches!(&end.others[0], Action::Register { what: Exposed::Bytes(bytes), .. } if bytes.len() == 1000)
    );
}

#[test]
fn rpc_k_07_a_reply_chunk_is_offered_for_replies_too_long() {
    let (_, sent) = made(call(1, 40, 0, 0, 996));
    assert!(sent.lists().is_empty());
    let (end, sent) = made(call(1, 40, 0, 0, 997));
    assert_eq!(lengths(sent.lists().reply.as_ref().unwrap()), [997]);
    assert!(matches!(
        end.others[0],
        Action::Register {
            what: Exposed::Fresh(997),
            access: Access::RemoteWrite,
            ..
        }
    ));
}

#[test]
fn rpc_k_07_with_write_chunks_the_reply_chunk_is_for_the_rest() {
    // A result that fits inline needs no chunk.
    let (_, sent) = made(call(1, 40, 0, 800, 100));
    assert!(sent.lists().is_empty());
    let (_, sent) = made(call(1, 40, 0, 4096, 100));
    assert_eq!(lengths(&sent.lists().writes[0]), [4096]);
    assert_eq!(sent.lists().reply, None);
    let (_, sent) = made(call(1, 40, 0, 4096, 990));
    assert_eq!(lengths(&sent.lists().writes[0]), [4096]);
    assert_eq!(lengths(sent.lists().reply.as_ref().unwrap()), [990]);
}

#[test]
fn rpc_k_10_memory_is_released_before_the_answer_is_delivered() {
    let (mut end, sent) = made(call(1, 40, 5000, 4096, 100));
    end.releases = false;
    end.others.clear();
    let returned = ChunkLists {
        writes: vec![sent.lists().writes[0].filled(10).unwrap()],
        ..Default::default()
    };
    end.receive(&rpc(1, 1, 8, returned), None);
    let regions: Vec<_> = end
        .others
        .iter()
        .map(|action| match action {
            Action::Release {
                region,
                invalidated: None,
                keep: false,
            } => *region,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(regions.len(), 2);
    assert!(end.events.is_empty());
    end.engine.released(regions[0]);
    end.run();
    assert!(end.events.is_empty());
    end.engine.released(regions[1]);
    end.run();
    let answer = Answer {
        message: Message::Short(message(1, 1, 24)),
        placed: vec![Some(10)],
    };
    assert!(matches!(&end.events[..], [Event::Answered { xid: 1, outcome: Ok(got), .. }] if *got == answer));
}

#[test]
fn rpc_k_09_arguments_stay_exposed_until_the_reply_arrives() {
    let (mut end, sent) = made(call(1, 40, 5000, 0, 100));
    end.engine.completed(sent.work);
    end.run();
    assert!(matches!(end.others[..], [Action::Register { .. }]));
    end.receive_reply(1, 8);
    assert!(matches!(end.others[..], [_, Action::Release { .. }]));
}

#[test]
fn rpc_h_02_calls_are_sent_with_version_one() {
    for made in [
        made(short(7)),
        made(call(1, 40, 5000, 0, 100)),
        made(call(1, 5000, 0, 0, 100)),
    ] {
        assert_eq!(made.1.header.version, 1);
    }
}

#[test]
fn rpc_f_01_a_message_is_one_send_with_no_record_mark() {
    let (end, sent) = made(short(7));
    assert!(end.sent.is_empty());
    assert_eq!(
        (sent.header.xid, sent.len),
        (7, 28 + 40),
        "it begins with the header"
    );
    assert_eq!(sent.payload, message(7, 0, 40));
}

#[test]
fn rpc_k_10_cancelled_calls_keep_memory_until_released() {
    let (mut end, _) = made(call(1, 40, 5000, 0, 100));
    end.releases = false;
    end.others.clear();
    end.engine.cancel(1);
    end.run();
    let [Action::Release { region, .. }] = end.others[..] else {
        panic!("{:?}", end.others)
    };
    assert!(end.events.is_empty());
    end.engine.released(region);
    end.run();
    assert!(matches!(
        end.events[..],
        [Event::Answered {
            outcome: Err(CallError::Cancelled),
            ..
        }]
    ));
}

#[test]
fn rpc_k_10_unreleased_memory_closes_the_connection_first() {
    let (mut end, _) = made(call(1, 40, 5000, 0, 100));
    end.releases = false;
    end.receive(&rpc(1, 1, 8, ChunkLists::default()), None);
    end.others.clear();
    end.engine.release_failed(RegionId(1));
    end.run();
    assert_eq!(end.others, [Action::Close(Closing::Release)]);
    assert!(end.events.is_empty());
    end.engine.disconnected();
    end.run();
    assert!(matches!(end.events[..], [Event::Answered { outcome: Ok(_), .. }]));
}

#[test]
fn rpc_k_11_each_call_has_registrations_of_its_own() {
    let mut end = client();
    let mut handles = Vec::new();
    for xid in 1..4 {
        end.engine.call(call(xid, 40, 5000, 4096, 100)).unwrap();
        end.run();
        let sent = end.next();
        handles.extend(sent.lists().handles());
        let writes = sent.lists().writes.clone();
        end.receive(
            &rpc(
                xid,
                1,
                8,
                ChunkLists {
                    writes,
                    ..Default::default()
                },
            ),
            None,
        );
    }
    handles.sort_unstable();
    handles.dedup();
    assert_eq!(handles.len(), 6);
    assert_eq!(end.others.len(), 12, "each was registered and released");
}

#[test]
fn rpc_i_04_a_reply_invalidates_and_we_do_not_again() {
    let (mut end, _) = made(call(1, 40, 5000, 4096, 100));
    end.others.clear();
    end.receive(&rpc(1, 1, 8, ChunkLists::default()), Some(handle(RegionId(1))));
    let released = |region, invalidated| Action::Release {
        region,
        invalidated,
        keep: false,
    };
    assert_eq!(
        end.others,
        [
            released(RegionId(1), Some(handle(RegionId(1)))),
            released(RegionId(2), None)
        ]
    );
    assert_eq!(end.events.len(), 1);
}

#[test]
fn rpc_i_04_invalidating_another_calls_memory_ends_it() {
    let mut end = client_with_calls(1..3);
    end.others.clear();
    end.receive(&rpc(1, 1, 8, ChunkLists::default()), Some(handle(RegionId(2))));
    assert!(end.others.contains(&Action::Close(Closing::ForeignInvalidation)));
}

#[test]
fn rpc_k_05_replies_that_do_not_fit_their_call_are_discarded() {
    let offered = |end: &mut End| {
        end.engine.call(call(1, 40, 0, 4096, 990)).unwrap();
        end.run();
        end.next().lists().clone()
    };
    let broken: [fn(&mut ChunkLists); 5] = [
        |lists| lists.writes[0].0[0].length += 1,
        |lists| lists.writes[0].0[0].handle += 1,
        |lists| lists.writes[0].0.clear(),
        |lists| lists.writes.push(WriteChunk::default()),
        |lists| {
            lists.writes[0].0.push(Segment {
                handle: 0,
                length: 0,
                offset: 0,
            })
        },
    ];
    for break_it in broken {
        let mut end = client();
        let mut lists = offered(&mut end);
        break_it(&mut lists);
        end.receive(&rpc(1, 1, 8, lists), None);
        assert!(end.events.is_empty());
        assert_eq!(end.receives, 1, "another may come");
    }
    // A long reply needs its Reply chunk and must fit into it.
    for (reply, fits) in [
        (None, false),
        (Some(991), false),
        (Some(4), false),
        (Some(990), true),
        (Some(8), true),
    ] {
        let mut end = client();
        let mut lists = offered(&mut end);
        match reply {
            Some(len) => lists.reply.as_mut().unwrap().0[0].length = len,
            None => {
                lists = ChunkLists {
                    reply: Some(WriteChunk(vec![])),
                    ..lists
                }
            }
        }
        end.receive(&header(1, 8, Body::NoMsg(lists)), None);
        assert_eq!(end.events.len(), usize::from(fits));
    }
}

#[test]
fn rpc_k_07_a_long_reply_uses_the_memory_allocated_for_it() {
    let (mut end, sent) = made(call(1, 40, 0, 0, 5000));
    let reply = sent.lists().reply.as_ref().unwrap().filled(3000);
    end.receive(
        &header(
            1,
            8,
            Body::NoMsg(ChunkLists {
                reply,
                ..Default::default()
            }),
        ),
        None,
    );
    assert!(matches!(
        end.others.last(),
        Some(Action::Release { keep: true, .. })
    ));
    let message = Message::Long {
        region: RegionId(1),
        len: 3000,
    };
    assert!(
        matches!(&end.events[..], [Event::Answered { outcome: Ok(answer), .. }] if answer.message == message)
    );
}

#[test]
fn rpc_e_04_an_error_ends_the_call_finally() {
    for error in [ErrorBody::Chunk, ErrorBody::Version { low: 2, high: 3 }] {
        let (mut end, _) = made(call(1, 40, 5000, 0, 100));
        end.receive(&header(1, 8, Body::Error(error)), None);
        assert!(
            matches!(end.events[..], [Event::Answered { outcome: Err(CallError::Refused(got)), .. }] if got == error)
        );
        assert_eq!(end.engine.outstanding(), 0);
    }
}

#[test]
fn rpc_e_08_a_call_that_cannot_be_made_fails_here() {
    // The registration is not answered.
    let mut end = client();
    end.registers = false;
    end.engine.call(call(1, 40, 5000, 4096, 100)).unwrap();
    end.engine.call(short(2)).unwrap();
    end.run();
    let segment = Segment {
        handle: 1,
        length: 5000,
        offset: 0,
    };
    end.engine.registered(RegionId(1), vec![segment]);
    end.engine.register_failed(RegionId(2));
    end.run();
    assert!(matches!(
        end.events[..],
        [Event::Answered {
            xid: 1,
            outcome: Err(CallError::Register),
            ..
        }]
    ));
    assert_eq!(end.next().header.xid, 2, "its credit is free");

    // There are more segments than a message has room for.
    let mut end = client();
    end.registers = false;
    end.engine.call(call(1, 40, 100_000, 0, 100)).unwrap();
    end.run();
    end.engine.registered(
        RegionId(1),
        vec![
            Segment {
                length: 1000,
                ..segment
            };
            100
        ],
    );
    end.run();
    assert!(matches!(
        end.events[..],
        [Event::Answered {
            outcome: Err(CallError::TooLong),
            ..
        }]
    ));
    assert!(end.sent.is_empty());
}

#[test]
fn messages_that_are_no_calls_are_refused() {
    let mut end = client();
    let mut reply = short(1);
    reply.message = message(1, 1, 40).into();
    assert_eq!(end.engine.call(reply), Err(Invalid::NotACall));
    let mut cut = short(1);
    cut.message = [0; 7].into();
    assert_eq!(end.engine.call(cut), Err(Invalid::NotACall));
    for offsets in [vec![44], vec![4], vec![10], vec![20, 16]] {
        let mut call = short(1);
        call.arguments = offsets
            .iter()
            .map(|offset| item(*offset, "argument", 1))
            .collect();
        assert_eq!(end.engine.call(call), Err(Invalid::Items), "{offsets:?}");
    }
    assert_eq!(end.engine.call(short(1)), Ok(1));
    assert_eq!(end.engine.call(short(1)), Err(Invalid::XidInUse(1)));
}

#[test]
fn rpc_bd_06_calls_are_resent_with_their_xids() {
    let mut end = client_with_calls(1..4);
    let handles = |end: &mut End| {
        end.sent
            .drain(..)
            .map(|sent| sent.lists().reads[0].segment.handle)
            .collect::<Vec<_>>()
    };
    end.sent.pop_front();
    assert_eq!(handles(&mut end), [0x101, 0x102, 0x103]);
    end.receive_reply(2, 8);
    end.events.clear();
    end.engine.disconnected();
    end.receives = 0;
    end.run();
    assert!(end.sent.is_empty() && end.events.is_empty());
    assert_eq!(end.engine.outstanding(), 2);

    // There is one credit again, and memory is registered again.
    end.engine.connected(Terms::default());
    end.run();
    let sent = end.next();
    assert_eq!(
        (sent.header.xid, sent.lists().reads[0].segment.handle),
        (1, 0x104)
    );
    assert!(end.sent.is_empty());
    end.receive_reply(1, 8);
    assert_eq!(end.next().header.xid, 3);
    end.receive_reply(3, 8);
    assert_eq!((end.events.len(), end.engine.outstanding()), (2, 0));
}

#[test]
fn registrations_that_complete_too_late_are_released() {
    let mut end = client();
    end.registers = false;
    end.engine.call(call(1, 40, 5000, 0, 100)).unwrap();
    end.run();
    end.engine.disconnected();
    end.engine.registered(
        RegionId(1),
        vec![Segment {
            handle: 1,
            length: 5000,
            offset: 0,
        }],
    );
    end.run();
    assert!(matches!(
        end.others[..],
        [
            Action::Register { .. },
            Action::Release {
                region: RegionId(1),
                ..
            }
        ]
    ));
    end.registers = true;
    end.engine.connected(Terms::default());
    end.run();
    assert_eq!(end.next().header.xid, 1);
}

#[test]
fn a_reply_before_the_call_was_sent_is_discarded() {
    let mut end = client();
    end.registers = false;
    end.engine.call(call(1, 40, 5000, 0, 100)).unwrap();
    end.run();
    end.receive_reply(1, 8);
    assert!(end.events.is_empty());
    end.engine.registered(
        RegionId(1),
        vec![Segment {
            handle: 1,
            length: 5000,
            offset: 0,
        }],
    );
    end.run();
    assert_eq!(end.sent.len(), 1);
}

#[test]
fn a_call_without_a_connection_waits_for_one() {
    let mut engine = Connection::<&str>::new(&Config::new(Role::Client));
    engine.call(short(1)).unwrap();
    assert!(engine.actions().is_empty());
    engine.connected(Terms::default());
    assert_eq!(engine.actions().len(), 2);
}
