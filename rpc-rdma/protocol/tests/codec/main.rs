//! Tests of the header codec: the project's vectors, the conformance rows (a test's name begins
//! with the id of its row), and properties over any bytes and any values.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

mod positions;
mod private_data;
mod properties;
mod rows;
mod vectors;

use urnic_rpc_rdma::{Body, ChunkLists, Header, ReadChunk, ReadSegment, Segment, VERSION, WriteChunk};

fn segment(handle: u32, length: u32, offset: u64) -> Segment {
    Segment {
        handle,
        length,
        offset,
    }
}

fn read(position: u32, handle: u32, length: u32, offset: u64) -> ReadSegment {
    ReadSegment {
        position,
        segment: segment(handle, length, offset),
    }
}

fn chunk(lengths: &[u32]) -> WriteChunk {
    WriteChunk(
        lengths
            .iter()
            .zip(1..)
            .map(|(&length, n)| segment(n, length, u64::from(n) << 32))
            .collect(),
    )
}

fn header(xid: u32, credits: u32, body: Body) -> Header {
    Header {
        xid,
        version: VERSION,
        credits,
        body,
    }
}

fn emitted(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    header.emit(&mut message);
    assert_eq!(message.len(), header.encoded_len());
    message.extend_from_slice(payload);
    message
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// The first words of a call (0) or a reply (1).
fn rpc(xid: u32, msg_type: u32) -> Vec<u8> {
    words(&[xid, msg_type])
}

/// A call without a program, with these chunk lists.
fn call_with(lists: ChunkLists, payload: &[u8]) -> Vec<u8> {
    emitted(&header(7, 32, Body::Msg(lists)), payload)
}

fn places(chunks: &[ReadChunk]) -> Vec<(u32, u64)> {
    chunks.iter().map(ReadChunk::place).collect()
}
