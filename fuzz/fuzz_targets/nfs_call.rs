//! NFS, NFSACL and MOUNT calls on a tree in memory: each message gets a reply or is no call, and
//! invalid arguments do no harm.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::iter::successors;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::LazyLock;
use urnic_nfs::memory::Pool;
use urnic_nfs::service::{Request, Service};
use urnic_nfs::tree::{Caller, InMemory};
use urnic_nfs::{Options, Server};
use urnic_rpc_rdma::rpc::{SUCCESS_LEN, call};

const NFS: (u32, u32) = (100_003, 3);
const ACL: (u32, u32) = (100_227, 3);
const MOUNT: (u32, u32) = (100_005, 3);
const MNT: u32 = 1;
const CREATE: u32 = 8;
/// Maximum number of calls in an input.
const CALLS: usize = 16;
const NOBODY_ID: u32 = 65534;
const XID: u32 = 0x1234_5678;
const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 700);

struct Served {
    server: Server,
    pool: Pool,
    /// Handles of the root and of a file in it.
    handles: [Vec<u8>; 2],
}

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::limited(256 << 20));

/// An empty tree, which a caller without a name may change. Each input gets its own tree.
fn served() -> Served {
    let pool = POOL.clone();
    let owner = Caller {
        uid: NOBODY_ID,
        gid: NOBODY_ID,
        groups: Vec::new(),
    };
    let tree = InMemory::new(64 << 20, pool.clone(), &owner).expect("there is memory");
    let options = Options {
        trust_root: true,
        ..Options::default()
    };
    let server = Server::new(Box::new(tree), options);
    let mut message = call(XID, MOUNT.0, MOUNT.1, MNT);
    message.extend([0, 0, 0, 1, b'/', 0, 0, 0]);
    let reply = answered(&server, &message, None).expect("an answer");
    // The handle follows the status, which is 0.
    let root = handle(&reply[SUCCESS_LEN + 4..]);
    let mut message = call(XID, NFS.0, NFS.1, CREATE);
    message.extend(&root);
    // The name, UNCHECKED, and six attributes that are not set.
    message.extend([0, 0, 0, 1, b'f', 0, 0, 0]);
    message.extend([0; 4 * 7]);
    let reply = answered(&server, &message, None).expect("an answer");
    // The handle follows the status and the flag that there is a handle.
    let file = handle(&reply[SUCCESS_LEN + 8..]);
    Served {
        server,
        pool,
        handles: [root, file],
    }
}

/// The handle at the front, with its length.
fn handle(bytes: &[u8]) -> Vec<u8> {
    let len = u32::from_be_bytes(*bytes.first_chunk().expect("a length")) as usize;
    bytes[..4 + len.next_multiple_of(4)].to_vec()
}

fn answered(server: &Server, message: &[u8], item: Option<urnic_nfs::memory::Slice>) -> Option<Vec<u8>> {
    let response = server.call(Request {
        peer: PEER,
        message,
        item,
        back: None,
    })?;
    assert_eq!(response.message.first_chunk(), message.first_chunk::<4>());
    assert!(response.message.len().is_multiple_of(4));
    if let Some((at, pieces)) = &response.item {
        assert!(at.is_multiple_of(4) && *at <= response.message.len());
        assert!(pieces.iter().map(|piece| piece.len()).sum::<usize>() <= 1 << 20);
    }
    Some(response.message)
}

/// Makes a call from the input: a choice, a procedure, the length of the arguments, and the
/// arguments.
fn made<'a>(served: &Served, input: &'a [u8]) -> Option<&'a [u8]> {
    let ([choice, procedure, len], rest) = input.split_first_chunk()?;
    let (arguments, rest) = rest.split_at(usize::from(*len).min(rest.len()));
    let (program, version) = match choice & 0x42 {
        0 | 0x40 => NFS,
        2 => MOUNT,
        _ => ACL,
    };
    let mut message = call(
        XID,
        program,
        version,
        u32::from(procedure % if program == ACL.0 { 4 } else { 23 }),
    );
    if choice & 4 == 0 {
        message.extend(&served.handles[usize::from(choice >> 4 & 1)]);
    }
    // Bytes at the end may come separately, as in a Read chunk.
    let apart = if choice & 8 == 0 { 0 } else { arguments.len() / 2 };
    let (inline, item) = arguments.split_at(arguments.len() - apart);
    message.extend(inline);
    let item = (apart > 0).then(|| {
        let mut memory = served.pool.take(apart).expect("there is memory");
        memory.copy_from_slice(item);
        memory.share()
    });
    answered(&served.server, &message, item);
    Some(rest)
}

fuzz_target!(|input: &[u8]| {
    let served = served();
    // A message from the first byte on; or calls with valid headers, often with the handle of the
    // directory or the file.
    match input.split_first() {
        Some((0, message)) => drop(answered(&served.server, message, None)),
        Some((_, calls)) => drop(
            successors(Some(calls), |calls| made(&served, calls))
                .take(CALLS)
                .count(),
        ),
        None => {}
    }
});
