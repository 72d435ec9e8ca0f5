//! Properties that hold for any bytes and any values.

use crate::{emitted, places, rpc};
use proptest::collection::vec;
use proptest::prelude::*;
use urnic_rpc_rdma::payload::{Piece, padding, positions, unreduced};
use urnic_rpc_rdma::{
    Body, ChunkLists, ErrorBody, Header, Limits, Profile, ReadChunk, ReadSegment, Refusal, Segment, VERSION,
    WriteChunk, call, reply,
};

const LIMITS: Limits = Limits {
    segments: 64,
    read_bytes: u64::MAX,
};

fn segment() -> impl Strategy<Value = Segment> {
    any::<(u32, u32, u64)>().prop_map(|(handle, length, offset)| Segment {
        handle,
        length,
        offset,
    })
}

fn chunk() -> impl Strategy<Value = WriteChunk> {
    vec(segment(), 0..5).prop_map(WriteChunk)
}

fn lists() -> impl Strategy<Value = ChunkLists> {
    let read = (0..100_u32, segment()).prop_map(|(words, segment)| ReadSegment {
        position: 4 * words,
        segment,
    });
    (vec(read, 0..6), vec(chunk(), 0..5), proptest::option::of(chunk()))
        .prop_map(|(reads, writes, reply)| ChunkLists { reads, writes, reply })
}

fn header() -> impl Strategy<Value = Header> {
    let body = prop_oneof![
        lists().prop_map(Body::Msg),
        lists().prop_map(Body::NoMsg),
        any::<(u32, u32)>().prop_map(|(low, high)| Body::Error(ErrorBody::Version { low, high })),
        Just(Body::Error(ErrorBody::Chunk)),
    ];
    (any::<(u32, u32, u32)>(), body).prop_map(|((xid, version, credits), body)| {
        let version = if matches!(body, Body::Error(_)) {
            version
        } else {
            VERSION
        };
        Header {
            xid,
            version,
            credits,
            body,
        }
    })
}

/// Words that are often valid in a header, so that parsing proceeds beyond the first words.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![4 => 0..5_u32, 1 => any::<u32>()];
    (any::<u32>(), vec(word, 0..60)).prop_map(|(xid, words)| {
        let words = [&[xid, 1][..], &words].concat();
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    })
}

fn parses_or_refuses(bytes: &[u8]) {
    if let Ok((header, rest)) = Header::parse(bytes, &LIMITS) {
        assert_eq!(
            emitted(&header, rest),
            bytes,
            "a parsed message encodes to the same bytes"
        );
    }
    for profile in [Profile::Rfc8166, Profile::Draft04] {
        match call(bytes, &LIMITS, profile) {
            Ok(call) => {
                let inline = call.payload.map_or(0, <[u8]>::len);
                if call.payload.is_some() {
                    assert!(unreduced(inline, &places(&call.reads)).is_ok());
                }
            }
            Err(Refusal::Answer(answer, _)) => {
                let mut bytes = Vec::new();
                answer.emit(&mut bytes);
                assert!(bytes.len() <= 28);
                assert!(matches!(call(&bytes, &LIMITS, profile), Err(Refusal::Discard(_))));
            }
            Err(Refusal::Discard(_)) => {}
        }
    }
    let _ = reply(bytes, &LIMITS);
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(bytes: Vec<u8>) {
        parses_or_refuses(&bytes);
    }

    #[test]
    fn plausible_bytes_are_parsed_or_refused(bytes in plausible()) {
        parses_or_refuses(&bytes);
    }

    #[test]
    fn emitted_headers_are_parsed(header in header(), payload: Vec<u8>) {
        let bytes = emitted(&header, &payload);
        match Header::parse(&bytes, &LIMITS) {
            Ok(parsed) => prop_assert_eq!(parsed, (header, &payload[..])),
            Err(error) => {
                let nothing = matches!(&header.body, Body::NoMsg(l) if l.reads.is_empty() && l.reply.is_none());
                prop_assert!(nothing, "{}", error);
            }
        }
    }

    #[test]
    fn a_truncated_header_is_refused(header in header(), cut: prop::sample::Index) {
        let bytes = emitted(&header, &[]);
        prop_assert!(Header::parse(&bytes[..cut.index(bytes.len())], &LIMITS).is_err());
    }

    #[test]
    fn a_filled_chunk_holds_the_request_and_returns_the_offer(offered in chunk(), len: u64) {
        let fits = len <= offered.bytes();
        let filled = offered.filled(len);
        prop_assert_eq!(filled.is_some(), fits);
        if let Some(filled) = filled {
            prop_assert_eq!(filled.bytes(), len);
            prop_assert!(filled.returns(&offered));
        }
    }

    /// Items that are left out of a stream at any offsets return to these offsets, with their
    /// padding in the chunk or without.
    #[test]
    fn reduced_streams_are_restored(
        pieces in vec((vec(any::<u32>(), 1..4), vec(any::<u8>(), 0..30), any::<bool>()), 0..6),
        tail: Vec<u32>,
    ) {
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<_>>();
        let (mut whole, mut inline) = (rpc(7, 0), rpc(7, 0));
        let mut left_out = Vec::new();
        let mut contents = Vec::new();
        for (before, item, padded) in &pieces {
            whole.extend(bytes(before));
            inline.extend(bytes(before));
            let padding = padding(item.len() as u64);
            left_out.push((inline.len(), item.len() as u64));
            whole.extend(item);
            whole.extend(std::iter::repeat_n(0, padding));
            let brought = if *padded { padding } else { 0 };
            contents.push([&item[..], &vec![0; brought]].concat());
        }
        whole.extend(bytes(&tail));
        inline.extend(bytes(&tail));

        let chunks: Vec<_> = positions(left_out).unwrap().into_iter().zip(&contents).map(|(position, content)| {
            let (head, rest) = content.split_at(content.len() / 2);
            let segments = [head, rest].map(|part| Segment { handle: 0, length: part.len() as u32, offset: 0 });
            ReadChunk { position, segments: segments.to_vec() }
        }).collect();
        let mut again = Vec::new();
        for piece in unreduced(inline.len(), &places(&chunks)).unwrap() {
            match piece {
                Piece::Inline(range) => again.extend(&inline[range]),
                Piece::Chunk(index) => again.extend(&contents[index]),
                Piece::Pad(count) => again.extend(std::iter::repeat_n(0, count)),
            }
        }
        prop_assert_eq!(again, whole);
    }
}
