//! Every RPC vector of `vectors.json`, emitted and parsed byte for byte.

use crate::{emitted, header, read, segment};
use hex_literal::hex;
use std::collections::BTreeMap;
use urnic_rpc_rdma::{
    Body, ChunkLists, Direction, ErrorBody, Header, Limits, PrivateData, WriteChunk, direction,
};

pub(crate) fn vector(name: &str) -> Vec<u8> {
    let text = include_str!("../../../../wire/tests/vectors.json");
    let hex: BTreeMap<String, String> = serde_json::from_str(text).unwrap();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    hex[name].as_bytes().chunks(2).map(byte).collect()
}

const NULL_CALL: [u8; 40] =
    hex!("12345678 00000000 00000002 000186a3 00000003 00000000 00000000 00000000 00000000 00000000");

fn both_ways(bytes: &[u8], expected: &Header, payload: &[u8]) {
    assert_eq!(
        Header::parse(bytes, &Limits::default()),
        Ok((expected.clone(), payload))
    );
    assert_eq!(emitted(expected, payload), bytes);
}

#[test]
fn rpc_h_01_rr_msg_call_carries_the_payloads_xid() {
    let expected = header(0x1234_5678, 32, Body::Msg(ChunkLists::default()));
    both_ways(&vector("RR-MSG-CALL"), &expected, &NULL_CALL);
    assert_eq!(direction(&expected, &NULL_CALL), Some(Direction::Call));
}

#[test]
fn rr_msg_reply() {
    let reply = hex!("12345678 00000001 00000000 00000000 00000000 00000000");
    let expected = header(0x1234_5678, 16, Body::Msg(ChunkLists::default()));
    both_ways(&vector("RR-MSG-REPLY"), &expected, &reply);
    assert_eq!(direction(&expected, &reply), Some(Direction::Reply));
}

#[test]
fn rpc_h_06_rr_nomsg_longcall() {
    let lists = ChunkLists {
        reads: vec![read(0, 0xaa01, 2000, 0x1000)],
        reply: Some(WriteChunk(vec![segment(0xaa02, 4096, 0x9000)])),
        ..Default::default()
    };
    let expected = header(0x1234_5678, 32, Body::NoMsg(lists));
    both_ways(&vector("RR-NOMSG-LONGCALL"), &expected, &[]);
    assert_eq!(direction(&expected, &[]), Some(Direction::Call));
}

#[test]
fn rpc_h_06_rr_nomsg_longreply() {
    let lists = ChunkLists {
        reply: Some(WriteChunk(vec![segment(0xaa02, 3000, 0x9000)])),
        ..Default::default()
    };
    let expected = header(0x1234_5678, 16, Body::NoMsg(lists));
    both_ways(&vector("RR-NOMSG-LONGREPLY"), &expected, &[]);
    assert_eq!(direction(&expected, &[]), Some(Direction::Reply));
}

#[test]
fn rpc_h_06_rr_msg_chunks() {
    let lists = ChunkLists {
        reads: vec![read(148, 0xbb01, 4096, 0x10000), read(148, 0xbb02, 1, 0x20000)],
        writes: vec![WriteChunk(vec![
            segment(0xcc01, 4096, 0x30000),
            segment(0xcc02, 4096, 0x40000),
        ])],
        reply: None,
    };
    let expected = header(0x1234_5678, 32, Body::Msg(lists));
    both_ways(&vector("RR-MSG-CHUNKS"), &expected, &NULL_CALL);
    assert_eq!(
        expected.to_string(),
        "RDMA_MSG xid 0x12345678 credits 32 read 4096@0xbb01:0x10000 +148 read 1@0xbb02:0x20000 +148 \
         write 4096@0xcc01:0x30000 4096@0xcc02:0x40000"
    );
}

#[test]
fn rpc_e_01_rr_err_vers_repeats_the_version_of_the_call() {
    let expected = Header {
        version: 2,
        ..header(
            0x1234_5678,
            32,
            Body::Error(ErrorBody::Version { low: 1, high: 1 }),
        )
    };
    both_ways(&vector("RR-ERR-VERS"), &expected, &[]);
    assert_eq!(direction(&expected, &[]), None);
}

#[test]
fn rpc_e_02_rr_err_chunk() {
    let expected = header(0x1234_5678, 32, Body::Error(ErrorBody::Chunk));
    both_ways(&vector("RR-ERR-CHUNK"), &expected, &[]);
}

#[test]
fn rpc_bd_07_rr_bc_call_is_a_call_by_its_message_type() {
    let bytes = vector("RR-BC-CALL");
    let (header, payload) = Header::parse(&bytes, &Limits::default()).unwrap();
    assert_eq!((header.xid, header.credits), (0x99, 2));
    assert_eq!(header.body, Body::Msg(ChunkLists::default()));
    assert_eq!(direction(&header, payload), Some(Direction::Call));
    assert_eq!(emitted(&header, payload), bytes);
}

#[test]
fn rpc_i_02_rpcrdma_cmpriv() {
    let expected = PrivateData {
        remote_invalidation: true,
        send_size: 4096,
        receive_size: 4096,
    };
    assert_eq!(PrivateData::find(&vector("RPCRDMA-CMPRIV")), Some(expected));
    assert_eq!(expected.emit()[..], vector("RPCRDMA-CMPRIV"));
}
