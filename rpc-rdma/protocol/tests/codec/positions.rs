//! Positions of items in a Payload stream, and their padding.

use crate::{call_with, emitted, header, places, read, rpc, segment};
use hex_literal::hex;
use urnic_rpc_rdma::payload::{Piece, positions, unreduced};
use urnic_rpc_rdma::{Body, ChunkLists, Limits, Malformed, Profile, ReadChunk, Refusal, call};

fn parsed(message: &[u8]) -> Result<Vec<ReadChunk>, Malformed> {
    match call(message, &Limits::default(), Profile::default()) {
        Ok(call) => Ok(call.reads),
        Err(Refusal::Answer(_, malformed) | Refusal::Discard(malformed)) => Err(malformed),
    }
}

fn reads(reads: impl IntoIterator<Item = (u32, u32)>) -> ChunkLists {
    let entry = |(n, (position, length)): (usize, (u32, u32))| read(position, n as u32, length, 0);
    ChunkLists {
        reads: reads.into_iter().enumerate().map(entry).collect(),
        ..Default::default()
    }
}

/// RR-MSG-2CHUNK: opaques of 5 and 7 bytes, whose counts stay inline after 40 bytes of RPC header.
#[test]
fn rpc_k_02_positions_count_the_items_before_and_their_padding() {
    let message = hex!(
        "12345678 00000001 00000020 00000000 00000001 0000002c 000000b1 00000005 00000000 00001000"
        "00000001 00000038 000000b2 00000007 00000000 00002000 00000000 00000000 00000000"
        "12345678 00000000 00000002 20000001 00000001 00000001 00000000 00000000 00000000 00000000"
        "00000005 00000007 eeeeeeee"
    );
    let call = call(&message, &Limits::default(), Profile::default()).unwrap();
    let pieces = unreduced(call.payload.unwrap().len(), &places(&call.reads)).unwrap();
    assert_eq!(
        pieces,
        [
            Piece::Inline(0..44),
            Piece::Chunk(0),
            Piece::Pad(3),
            Piece::Inline(44..48),
            Piece::Chunk(1),
            Piece::Pad(1),
            Piece::Inline(48..52),
        ]
    );
    assert_eq!(positions([(44, 5), (48, 7)]), Some(vec![44, 56]));
}

#[test]
fn rpc_k_02_a_chunk_is_one_positions_entries_in_order() {
    let payload = [rpc(7, 0), vec![0; 40]].concat();
    let message = call_with(reads([(24, 4), (8, 100), (24, 9), (8, 20)]), &payload);
    let one = |position, segments: &[(u32, u32)]| ReadChunk {
        position,
        segments: segments
            .iter()
            .map(|&(handle, length)| segment(handle, length, 0))
            .collect(),
    };
    // The item at 8 has 120 bytes, so Position 24 is within it. Two messages are necessary.
    assert_eq!(parsed(&message), Err(Malformed::Position(24)));
    let message = call_with(reads([(132, 4), (8, 100), (132, 9), (8, 20)]), &payload);
    assert_eq!(
        parsed(&message),
        Ok(vec![one(8, &[(1, 100), (3, 20)]), one(132, &[(0, 4), (2, 9)])])
    );
}

#[test]
fn rpc_k_02_a_position_is_aligned_within_the_payload() {
    let payload = [rpc(7, 0), vec![0; 8]].concat();
    for position in [9, 10, 11, 20, 0x8000_0000, u32::MAX, u32::MAX - 3] {
        assert_eq!(
            parsed(&call_with(reads([(position, 4)]), &payload)),
            Err(Malformed::Position(position))
        );
    }
    for position in [4, 8, 12, 16] {
        assert!(parsed(&call_with(reads([(position, 4)]), &payload)).is_ok());
    }
}

#[test]
fn rpc_k_02_position_zero_is_no_item_of_an_inline_payload() {
    assert_eq!(
        parsed(&call_with(reads([(0, 4)]), &rpc(7, 0))),
        Err(Malformed::Position(0))
    );
}

/// The items of a long call lie within the bytes of its position-zero chunk, as those of a short
/// call within its payload.
#[test]
fn rpc_k_02_positions_of_a_long_call_are_within_its_bytes() {
    let long = |items: &[(u32, u32)]| {
        let lists = reads([&[(0, 100)], items].concat());
        parsed(&emitted(&header(7, 32, Body::NoMsg(lists)), &[]))
    };
    for items in [&[(8, 5), (16, 4)][..], &[(100, 4)], &[(8, 5), (108, 4)]] {
        assert_eq!(long(items).map(|chunks| chunks.len()), Ok(1 + items.len()));
    }
    for items in [
        &[(8, 5), (12, 4)][..],
        &[(104, 4)],
        &[(8, 5), (112, 4)],
        &[(u32::MAX - 3, 4)],
    ] {
        let (position, _) = items[items.len() - 1];
        assert_eq!(long(items), Err(Malformed::Position(position)));
    }
}

/// An item of five bytes has three bytes of padding: not sent, sent as part of the segment, or sent
/// as a segment of its own. The following data has the same Position in each case.
#[test]
fn rpc_k_03_padding_may_be_in_the_chunk_or_not() {
    let payload = [rpc(7, 0), vec![0; 8]].concat();
    for (entries, pad) in [
        (vec![(12, 5)], &[Piece::Pad(3)][..]),
        (vec![(12, 8)], &[]),
        (vec![(12, 5), (12, 3)], &[]),
        (vec![(12, 2), (12, 3)], &[Piece::Pad(3)]),
    ] {
        let reads = parsed(&call_with(reads(entries), &payload)).unwrap();
        let expected = [
            &[Piece::Inline(0..12), Piece::Chunk(0)],
            pad,
            &[Piece::Inline(12..16)],
        ]
        .concat();
        assert_eq!(unreduced(payload.len(), &places(&reads)), Ok(expected));
    }
}

#[test]
fn rpc_k_03_an_item_within_other_padding_is_refused() {
    let payload = [rpc(7, 0), vec![0; 8]].concat();
    assert_eq!(
        parsed(&call_with(reads([(8, 5), (12, 4)]), &payload)),
        Err(Malformed::Position(12))
    );
    assert!(parsed(&call_with(reads([(8, 5), (16, 4)]), &payload)).is_ok());
}

#[test]
fn positions_beyond_32_bits_have_no_encoding() {
    assert_eq!(positions([(8, 1 << 32), (12, 1)]), None);
}
