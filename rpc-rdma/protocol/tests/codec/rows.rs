//! Conformance rows of the codec.

use crate::vectors::vector;
use crate::{call_with, chunk, emitted, header, read, rpc, segment, words};
use urnic_rpc_rdma::{
    Body, ChunkLists, ErrorBody, Header, Limits, Malformed, Profile, Refusal, Reply, WriteChunk, call,
    refused, reply,
};

const LIMITS: Limits = Limits {
    segments: 512,
    read_bytes: 1 << 20,
};

fn answer(message: &[u8], profile: Profile) -> Option<Header> {
    match call(message, &LIMITS, profile) {
        Ok(call) => panic!("taken: {call:?}"),
        Err(Refusal::Answer(header, _)) => Some(header),
        Err(Refusal::Discard(_)) => None,
    }
}

fn err_chunk(xid: u32) -> Option<Header> {
    Some(header(xid, 0, Body::Error(ErrorBody::Chunk)))
}

/// `bytes` with the word at `index` replaced.
fn with_word(mut bytes: Vec<u8>, index: usize, word: u32) -> Vec<u8> {
    bytes[4 * index..][..4].copy_from_slice(&word.to_be_bytes());
    bytes
}

const PROFILES: [Profile; 2] = [Profile::Rfc8166, Profile::Draft04];

#[test]
fn rpc_h_01_a_payload_with_another_xid_is_err_chunk() {
    let message = with_word(vector("RR-MSG-CALL"), 7, 0x1234_5679);
    for profile in PROFILES {
        let header = answer(&message, profile).unwrap();
        assert_eq!(Some(&header), err_chunk(0x1234_5678).as_ref());
        assert_eq!(emitted(&header, &[]).len(), 20);
    }
}

#[test]
fn rpc_h_02_the_version_is_one() {
    for bytes in [vector("RR-MSG-CALL"), vector("RR-NOMSG-LONGCALL")] {
        assert_eq!(bytes[4..8], [0, 0, 0, 1]);
        assert!(call(&bytes, &LIMITS, Profile::default()).is_ok());
        for version in [0, 2, u32::MAX] {
            let other = with_word(bytes.clone(), 1, version);
            assert!(call(&other, &LIMITS, Profile::default()).is_err());
        }
    }
    let answered = vector("RR-NOMSG-LONGREPLY");
    assert!(reply(&answered, &LIMITS).is_ok());
    assert!(reply(&with_word(answered, 1, 2), &LIMITS).is_err());
}

#[test]
fn rpc_h_03_unknown_procedures_are_answered_err_chunk() {
    for procedure in [5, 9, u32::MAX] {
        let message = with_word(vector("RR-MSG-CALL"), 3, procedure);
        assert_eq!(answer(&message, Profile::default()), err_chunk(0x1234_5678));
    }
}

#[test]
fn rpc_h_04_the_payload_follows_lists_that_may_be_absent() {
    let read = vec![read(8, 1, 4, 0)];
    let payload = rpc(7, 0);
    for present in 0..8 {
        let lists = ChunkLists {
            reads: if present & 1 != 0 { read.clone() } else { vec![] },
            writes: if present & 2 != 0 {
                vec![chunk(&[1])]
            } else {
                vec![]
            },
            reply: (present & 4 != 0).then(|| chunk(&[2])),
        };
        let message = call_with(lists.clone(), &payload);
        let call = call(&message, &LIMITS, Profile::default()).unwrap();
        assert_eq!((call.lists, call.payload), (lists, Some(&payload[..])));
    }
}

#[test]
fn rpc_h_04_nomsg_without_lists_is_answered_err_chunk() {
    let message = emitted(&header(7, 1, Body::NoMsg(ChunkLists::default())), &[]);
    assert_eq!(answer(&message, Profile::default()), err_chunk(7));
    assert_eq!(reply(&message, &LIMITS), Err(Malformed::NoPayload));
}

#[test]
fn rpc_h_04_a_long_call_needs_bytes_at_position_zero() {
    let writes = vec![chunk(&[4])];
    let none = |reads| ChunkLists {
        reads,
        writes: writes.clone(),
        reply: Some(chunk(&[4])),
    };
    for reads in [vec![], vec![read(4, 1, 100, 0)], vec![read(0, 1, 0, 0)]] {
        let message = emitted(&header(7, 1, Body::NoMsg(none(reads))), &[]);
        assert_eq!(answer(&message, Profile::default()), err_chunk(7));
    }
}

/// RFC 4506 §4.4: a flag is 0 or 1. The rest of the lists is complete here, so nothing else is
/// wrong with the message.
#[test]
fn rpc_h_06_a_flag_of_a_list_is_zero_or_one() {
    let lists = ChunkLists {
        reads: vec![read(8, 1, 4, 0)],
        writes: vec![chunk(&[4])],
        reply: Some(chunk(&[4])),
    };
    let message = call_with(lists, &rpc(7, 0));
    assert!(call(&message, &LIMITS, Profile::default()).is_ok());
    // The entry of a list, the end of two lists, and the Reply chunk.
    for (index, flag) in [(4, 1), (10, 0), (11, 1), (17, 0), (18, 1)] {
        assert_eq!(message[4 * index..][..4], words(&[flag]));
        for other in [2, 0x100, u32::MAX] {
            let flawed = with_word(message.clone(), index, other);
            let refusal = call(&flawed, &LIMITS, Profile::default());
            let expected = Refusal::Answer(err_chunk(7).unwrap(), Malformed::Flag(other));
            assert_eq!(refusal, Err(expected), "{index}");
        }
    }
}

#[test]
fn rpc_h_07_words_are_big_endian() {
    let bytes = emitted(&header(0x0102_0304, 5, Body::Msg(ChunkLists::default())), &[]);
    assert_eq!(bytes[..12], [1, 2, 3, 4, 0, 0, 0, 1, 0, 0, 0, 5]);
}

#[test]
fn rpc_h_08_less_than_28_bytes_are_discarded() {
    let message = vector("RR-MSG-CALL");
    for len in 0..28 {
        assert_eq!(answer(&message[..len], Profile::Rfc8166), None, "{len}");
    }
    // From 28 bytes on, the xid is valid. The payload is missing.
    assert_eq!(answer(&message[..28], Profile::Rfc8166), err_chunk(0x1234_5678));
    // The draft has no such rule, but the message must contain an xid.
    assert_eq!(answer(&message[..15], Profile::Draft04), None);
    assert_eq!(answer(&message[..16], Profile::Draft04), err_chunk(0x1234_5678));
}

#[test]
fn rpc_k_04_a_result_fills_the_segments_in_order() {
    let offered = chunk(&[4, 4, 4, 4]);
    let lengths = |chunk: &WriteChunk| chunk.0.iter().map(|segment| segment.length).collect::<Vec<_>>();
    let returned = offered.filled(10).unwrap();
    assert_eq!(lengths(&returned), [4, 4, 2, 0]);
    assert!(returned.returns(&offered));
    assert_eq!(offered.filled(17), None);
    assert!(!chunk(&[4, 2, 4, 0]).returns(&offered), "out of order");
    assert!(!chunk(&[4, 4, 2]).returns(&offered), "another count");
    assert!(!chunk(&[5, 0, 0, 0]).returns(&offered), "more than there is");
}

#[test]
fn rpc_k_05_an_unused_chunk_has_its_segments_at_length_zero() {
    let offered = chunk(&[4096, 1]);
    let unused = offered.filled(0).unwrap();
    assert_eq!(unused, chunk(&[0, 0]));
    assert!(unused.returns(&offered) && unused.bytes() == 0 && !unused.is_empty());
}

#[test]
fn rpc_k_06_an_empty_chunk_keeps_its_place_in_the_list() {
    let lists = ChunkLists {
        writes: vec![chunk(&[]), chunk(&[8]), chunk(&[])],
        ..Default::default()
    };
    let message = call_with(lists.clone(), &rpc(7, 0));
    let call = call(&message, &LIMITS, Profile::default()).unwrap();
    assert_eq!(call.lists, lists);
    assert!(chunk(&[]).is_empty() && chunk(&[]).returns(&chunk(&[])));
}

#[test]
fn rpc_k_08_a_reply_with_a_read_list_is_discarded() {
    let lists = ChunkLists {
        reads: vec![read(8, 1, 4, 0)],
        reply: Some(chunk(&[4])),
        ..Default::default()
    };
    let short = call_with(lists.clone(), &rpc(7, 1));
    let long = emitted(&header(7, 1, Body::NoMsg(lists)), &[]);
    assert_eq!(reply(&short, &LIMITS), Err(Malformed::ReplyReads));
    assert_eq!(reply(&long, &LIMITS), Err(Malformed::ReplyReads));
}

#[test]
fn rpc_k_12_segments_are_limited_over_all_chunks() {
    let reads = |count: u32| ChunkLists {
        reads: (0..count).map(|n| read(8, n, 0, 0)).collect(),
        ..Default::default()
    };
    let writes = |count: usize| ChunkLists {
        writes: vec![chunk(&[]); count],
        ..Default::default()
    };
    let one = |count: usize| ChunkLists {
        reply: Some(chunk(&vec![1; count])),
        ..Default::default()
    };
    for (within, beyond) in [
        (reads(512), reads(513)),
        (writes(512), writes(513)),
        (one(512), one(513)),
    ] {
        let message = call_with(within, &rpc(7, 0));
        assert!(call(&message, &LIMITS, Profile::default()).is_ok());
        let message = call_with(beyond, &rpc(7, 0));
        assert_eq!(
            call(&message, &LIMITS, Profile::default()),
            Err(Refusal::Answer(err_chunk(7).unwrap(), Malformed::Segments))
        );
    }
    // A million entries need no more work than the first 513.
    assert_eq!(
        answer(&call_with(reads(1_000_000), &rpc(7, 0)), Profile::default()),
        err_chunk(7)
    );
}

#[test]
fn rpc_k_12_a_count_of_missing_segments_allocates_nothing() {
    let limits = Limits {
        segments: usize::MAX,
        ..LIMITS
    };
    let message = [words(&[7, 1, 1, 0, 0, 1, u32::MAX]), vec![0; 64]].concat();
    assert_eq!(Header::parse(&message, &limits), Err(Malformed::Truncated));
}

#[test]
fn rpc_k_12_bytes_to_read_are_limited() {
    let lists = |lengths: &[u32]| ChunkLists {
        reads: lengths.iter().map(|&length| read(8, 1, length, 0)).collect(),
        ..Default::default()
    };
    let taken = |lengths| {
        call(
            &call_with(lists(lengths), &rpc(7, 0)),
            &LIMITS,
            Profile::default(),
        )
        .is_ok()
    };
    assert!(taken(&[1 << 20]));
    assert!(!taken(&[1 << 20, 1]));
    assert!(!taken(&[u32::MAX; 300]));
}

#[test]
fn rpc_e_01_another_version_is_answered_with_the_range() {
    for version in [0, 2, u32::MAX] {
        for profile in PROFILES {
            let message = with_word(vector("RR-MSG-CALL"), 1, version);
            let header = answer(&message, profile).unwrap();
            assert_eq!(header.version, version);
            assert_eq!(header.body, Body::Error(ErrorBody::Version { low: 1, high: 1 }));
            assert_eq!(emitted(&header, &[]).len(), 28);
        }
    }
    // With 32 credits, the message is the vector.
    let message = with_word(vector("RR-MSG-CALL"), 1, 2);
    let header = Header {
        credits: 32,
        ..answer(&message, Profile::default()).unwrap()
    };
    assert_eq!(emitted(&header, &[]), vector("RR-ERR-VERS"));
}

#[test]
fn rpc_e_02_faults_in_the_lists_are_answered_err_chunk() {
    for index in 4..7 {
        for flag in [2, u32::MAX, 0x0100_0000] {
            let message = with_word(vector("RR-MSG-CALL"), index, flag);
            assert_eq!(answer(&message, Profile::default()), err_chunk(0x1234_5678));
        }
    }
    let message = vector("RR-MSG-CHUNKS");
    for len in 28..message.len() - 32 {
        assert_eq!(
            answer(&message[..len], Profile::default()),
            err_chunk(0x1234_5678),
            "{len}"
        );
    }
}

#[test]
fn rpc_e_02_a_payload_that_is_no_call_is_answered_err_chunk() {
    for payload in [vec![], words(&[7]), rpc(7, 1), rpc(7, 2)] {
        let message = call_with(ChunkLists::default(), &payload);
        assert_eq!(answer(&message, Profile::default()), err_chunk(7));
    }
}

#[test]
fn rpc_e_03_responders_discard_rdma_error() {
    for profile in PROFILES {
        for name in ["RR-ERR-VERS", "RR-ERR-CHUNK"] {
            assert_eq!(answer(&vector(name), profile), None);
        }
        let undecodable = with_word(vector("RR-ERR-VERS"), 4, 3);
        assert_eq!(answer(&undecodable, profile), None);
    }
}

#[test]
fn rpc_e_03_requesters_discard_invalid_messages() {
    let cases = [
        (with_word(vector("RR-MSG-REPLY"), 1, 2), Malformed::Version(2)),
        (with_word(vector("RR-MSG-REPLY"), 3, 9), Malformed::Procedure(9)),
        (with_word(vector("RR-MSG-REPLY"), 4, 9), Malformed::Flag(9)),
        (
            with_word(vector("RR-MSG-REPLY"), 7, 9),
            Malformed::Xid(0x1234_5678),
        ),
        (with_word(vector("RR-MSG-REPLY"), 8, 9), Malformed::Direction),
        (with_word(vector("RR-ERR-VERS"), 4, 3), Malformed::ErrorCode(3)),
        (vector("RR-ERR-VERS")[..24].to_vec(), Malformed::Truncated),
        (vector("RR-MSG-REPLY")[..15].to_vec(), Malformed::Truncated),
    ];
    for (message, expected) in cases {
        assert_eq!(reply(&message, &LIMITS), Err(expected));
    }
}

#[test]
fn rpc_e_04_rdma_error_names_the_transaction_that_it_ends() {
    let xid = 0x1234_5678;
    let error = ErrorBody::Version { low: 1, high: 1 };
    assert_eq!(
        reply(&vector("RR-ERR-VERS"), &LIMITS),
        Ok(Reply::Error { xid, error })
    );
    let error = ErrorBody::Chunk;
    assert_eq!(
        reply(&vector("RR-ERR-CHUNK"), &LIMITS),
        Ok(Reply::Error { xid, error })
    );
}

#[test]
fn rpc_e_06_responders_answer_msgp_and_requesters_discard_it() {
    let message = with_word(vector("RR-MSG-CALL"), 3, 2);
    for profile in PROFILES {
        assert_eq!(answer(&message, profile), err_chunk(0x1234_5678));
    }
    assert_eq!(reply(&message, &LIMITS), Err(Malformed::Withdrawn(2)));
}

#[test]
fn rpc_e_06_done_is_discarded_and_answered_in_the_draft() {
    let message = words(&[7, 1, 32, 3]);
    assert_eq!(answer(&message, Profile::Rfc8166), None);
    assert_eq!(answer(&message, Profile::Draft04), err_chunk(7));
    let longer = with_word(vector("RR-MSG-CALL"), 3, 3);
    assert_eq!(answer(&longer, Profile::Rfc8166), None);
    assert_eq!(reply(&longer, &LIMITS), Err(Malformed::Withdrawn(3)));
}

#[test]
fn rpc_bd_04_a_responder_without_chunks_refuses_them() {
    let lists = ChunkLists {
        writes: vec![WriteChunk(vec![segment(1, 2, 3)])],
        ..Default::default()
    };
    let message = call_with(lists, &rpc(7, 0));
    let refusal = refused(&message, Malformed::Segments, Profile::default());
    assert_eq!(
        refusal,
        Refusal::Answer(err_chunk(7).unwrap(), Malformed::Segments)
    );
}
