//! Tests of the bindings of NFSv3, NFSACL and MOUNT: the items that may move by chunk, and the
//! lengths of replies (RFC 8267).

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

use proptest::prelude::*;
use urnic_nfs::binding::{BINDINGS, Mount3, Nfs3, NfsAcl3};
use urnic_rpc_rdma::binding::{Binding, Bound};
use urnic_rpc_rdma::rpc::{CallHeader, MAX_REPLY_HEADER};

const READ: u32 = 6;
const WRITE: u32 = 7;
const SYMLINK: u32 = 10;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn opaque(len: u32) -> Vec<u8> {
    let padded = len.next_multiple_of(4) as usize;
    [words(&[len]), vec![b'o'; padded]].concat()
}

/// A call of NFSv3 with AUTH_SYS of 20 bytes.
fn nfs(procedure: u32, arguments: &[u8]) -> Vec<u8> {
    let header = words(&[7, 0, 2, 100_003, 3, procedure, 1]);
    [&header[..], &opaque(20), &words(&[0, 0]), arguments].concat()
}

/// Bytes before the arguments.
const HEADER: usize = 28 + 24 + 8;

fn read_arguments(count: u32) -> Vec<u8> {
    [opaque(30), words(&[0, 4096, count])].concat()
}

/// Arguments of a WRITE up to the count of the data, inclusive.
fn write_arguments(count: u32) -> Vec<u8> {
    [opaque(30), words(&[0, 4096, count, 2, count])].concat()
}

fn bound(message: &[u8]) -> Bound {
    let bindings = BINDINGS.map(|binding| binding as &dyn Binding);
    urnic_rpc_rdma::binding::bound(&bindings, message)
}

fn bound_of(procedure: u32, arguments: &[u8]) -> Bound {
    bound(&nfs(procedure, arguments))
}

#[test]
fn rpc_b_02_of_nfs_3_four_items_may_go_by_chunk() {
    // The mode and the client's times are present. The other attributes are absent.
    let attributes = words(&[1, 0o777, 0, 0, 0, 2, 1, 2, 2, 3, 4]);
    let symlink = [opaque(30), opaque(5), attributes, words(&[9])].concat();
    for procedure in 0..22 {
        let arguments = match procedure {
            WRITE => write_arguments(5000),
            SYMLINK => symlink.clone(),
            _ => read_arguments(5000),
        };
        let bound = bound_of(procedure, &arguments);
        let argument = matches!(procedure, WRITE | SYMLINK).then_some(HEADER + arguments.len());
        assert_eq!(bound.argument, argument, "{procedure}");
        let result = match procedure {
            READ => Some(5000),
            5 => Some(4096),
            _ => None,
        };
        assert_eq!(bound.result, result, "{procedure}");
        assert!(bound.max_reply.is_some() || procedure == 16 || procedure == 17);
    }
}

#[test]
fn rpc_b_02_replies_of_nfs_3_stay_within_the_given_maximum() {
    let max =
        |procedure, arguments: &[u8]| bound_of(procedure, arguments).max_reply.unwrap() - MAX_REPLY_HEADER;
    assert_eq!(max(1, &opaque(30)), 88);
    assert_eq!(max(3, &[]), 4 + 68 + 88 + 88);
    assert_eq!(
        max(READ, &read_arguments(1 << 20)),
        4 + 88 + 12,
        "the data is not among them"
    );
    assert_eq!(max(WRITE, &write_arguments(9)), 4 + 116 + 16);
    let readdir = [opaque(64), words(&[0, 0, 0, 0, 8192])].concat();
    assert_eq!(max(16, &readdir), 4 + 8192);
    let readdirplus = [opaque(64), words(&[0, 0, 0, 0, 512, 32768])].concat();
    assert_eq!(max(17, &readdirplus), 4 + 32768);
    assert_eq!(bound_of(22, &[]).max_reply, None);
}

#[test]
fn rpc_b_01_nfs_has_its_own_port_and_mount_uses_rpcbind() {
    assert_eq!((Nfs3.port(), Mount3.port()), (Some(20049), None));
    assert_eq!((Nfs3.program(), Mount3.program()), ((100_003, 3), (100_005, 3)));
    assert_eq!((NfsAcl3.port(), NfsAcl3.program()), (Nfs3.port(), (100_227, 3)));
}

/// Both lists have 1024 entries.
#[test]
fn acls_stay_inline_and_have_a_maximum_length() {
    for (procedure, results) in [(0, Some(0)), (1, Some(24_688)), (2, Some(92)), (3, None)] {
        let mut call = nfs(procedure, &[opaque(25), words(&[5])].concat());
        call[12..20].copy_from_slice(&words(&[100_227, 3]));
        let max_reply = results.map(|len: usize| MAX_REPLY_HEADER + len);
        let bound_data = Bound {
            max_reply,
            ..Bound::default()
        };
        assert_eq!(bound(&call), bound_data, "{procedure}");
    }
}

#[test]
fn mount_data_stays_inline() {
    let mut call = nfs(1, &opaque(8));
    call[12..20].copy_from_slice(&words(&[100_005, 3]));
    assert_eq!(bound(&call), Bound::default());
}

proptest! {
    #[test]
    fn an_items_offset_is_within_any_message(
        procedure in 0..23_u32,
        arguments in prop::collection::vec(0..9_u32, 0..40),
    ) {
        let message = nfs(procedure, &words(&arguments));
        let header = CallHeader::parse(&message).unwrap();
        prop_assert_eq!((header.len, header.procedure, header.protected), (HEADER, procedure, false));
        let bound_data = bound(&message);
        prop_assert!(bound_data.argument.is_none_or(|offset| offset <= message.len() && offset % 4 == 0));
    }
}
