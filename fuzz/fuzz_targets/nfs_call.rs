//! NFS and MOUNT calls, on a tree in memory: any message is answered or is no call, and arguments that make no sense harm nobody.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::LazyLock;
use urnic_nfs::memory::Pool;
use urnic_nfs::service::{Request, Service};
use urnic_nfs::tree::{Caller, InMemory};
use urnic_nfs::{Options, Server};
use urnic_rpc_rdma::rpc::{SUCCESS_LEN, call};

const NFS: (u32, u32) = (100_003, 3);
const MOUNT: (u32, u32) = (100_005, 3);
const MNT: u32 = 1;
const XID: u32 = 0x1234_5678;
const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 700);

struct Served {
    server: Server,
    pool: Pool,
    /// Handle of the root, behind its length.
    root: Vec<u8>,
}

static SERVED: LazyLock<Served> = LazyLock::new(|| {
    let pool = Pool::limited(256 << 20);
    let owner = Caller {
        uid: 0,
        gid: 0,
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
    // Behind the status, which is 0.
    let handle = &reply[SUCCESS_LEN + 4..];
    let len = u32::from_be_bytes(*handle.first_chunk().expect("a length")) as usize;
    let root = handle[..4 + len.next_multiple_of(4)].to_vec();
    Served { server, pool, root }
});

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

fuzz_target!(|input: &[u8]| {
    let Served { server, pool, root } = &*SERVED;
    // A message from the first octet on; or one with a good header, and often with the handle of a directory that there is.
    let Some((choice, rest)) = input.split_first() else {
        return;
    };
    if choice & 1 == 0 {
        answered(server, rest, None);
        return;
    }
    let Some((procedure, arguments)) = rest.split_first() else {
        return;
    };
    let (program, version) = if choice & 2 == 0 { NFS } else { MOUNT };
    let mut message = call(XID, program, version, u32::from(procedure % 23));
    if choice & 4 == 0 {
        message.extend(root);
    }
    // Some octets at the end may come apart, as a Read chunk brings them.
    let apart = if choice & 8 == 0 { 0 } else { arguments.len() / 2 };
    let (inline, item) = arguments.split_at(arguments.len() - apart);
    message.extend(inline);
    let item = (apart > 0).then(|| {
        let mut memory = pool.take(apart).expect("there is memory");
        memory.copy_from_slice(item);
        memory.share()
    });
    answered(server, &message, item);
});
