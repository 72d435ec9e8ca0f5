//! Clients that take as many resources as they can: memory by Reads that they do not answer and by
//! replies that they do not receive, and connections. A well-behaved client is served meanwhile,
//! from another address and from theirs.

use std::net::{Ipv4Addr, TcpStream};

use urnic_tests::peer::Peer;
use urnic_tests::wait::{TIME_LIMIT, until};

use super::super::{Export, folder, pattern, read, urnic_nfs, write};
use super::{ABSENT, H, NULL, Requester, X, msg};

const HOSTILE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
/// The address from which the hostile program connects.
const THEIRS: Ipv4Addr = Ipv4Addr::LOCALHOST;
const MIB: u32 = 1 << 20;

fn serving(name: &str, line: &str) -> Export {
    let folder = folder(name);
    std::fs::create_dir_all(folder.file("served")).expect("a folder");
    let program = urnic_nfs(&format!("serve --no-root-squash {line}")).arg(folder.file("served"));
    Export::start(folder, program, &[])
}

/// A requester; `None` while this address has used its share.
fn try_requester(export: &Export, from: Ipv4Addr) -> Option<Requester> {
    let port = export.rdma.parse().expect("a port");
    Requester::try_over(Peer::connect_from(from, (Ipv4Addr::LOCALHOST, port).into()))
}

fn requester(export: &Export, from: Ipv4Addr) -> Requester {
    try_requester(export, from).expect("a connection")
}

/// Checks that a file of three MiB can be copied to the server and back.
#[track_caller]
fn is_served(export: &Export) {
    let bytes = pattern(3 << 20);
    write(&export.here("sent"), &bytes);
    let put = export.client("put").arg(export.here("sent"));
    put.arg("127.0.0.1:/file").run().success();
    let get = export.client("get").arg("127.0.0.1:/file");
    get.arg(export.here("got")).run().success();
    assert!(read(&export.here("got")) == bytes);
    std::fs::remove_file(export.here("got")).expect("ours");
}

/// Calls with two MiB by chunk, which do not come, until there is no more memory, and then with
/// less, to the last page. The memory of a connection is free for others when the connection has
/// ended.
#[test]
fn reads_that_are_not_answered_hold_a_share_of_memory() {
    let export = serving("unanswered", "--buffers 32M --stall-timeout 600");
    for from in [HOSTILE, THEIRS, HOSTILE] {
        let sizes = [(2 * MIB, 20), (MIB / 2, 5), (MIB / 8, 5), (4096, 10)];
        let each = sizes
            .iter()
            .flat_map(|(size, count)| std::iter::repeat_n(*size, *count));
        let connect = |size| {
            let mut requester = try_requester(&export, from)?;
            requester.sends(&msg(&[1, 40, H, size, 0, 0, 0, 0, 0], &NULL));
            Some(requester)
        };
        let hostile: Vec<_> = each.filter_map(connect).collect();
        is_served(&export);
        drop(hostile);
    }
}

/// The handle in a reply to MNT or LOOKUP, after the headers and the status.
fn handle(reply: &[u8]) -> Vec<u32> {
    let words = reply.as_chunks().0.iter();
    let words: Vec<u32> = words.map(|word| u32::from_be_bytes(*word)).collect();
    assert_eq!(words[13], 0, "the status: {words:x?}");
    let len = words[14] as usize;
    words[14..][..1 + len.div_ceil(4)].to_vec()
}

/// READs of a MiB by chunk on connections whose replies are not received.
#[test]
fn unread_replies_by_rdma_hold_a_share_of_memory() {
    let export = serving("untaken", "--buffers 64M --stall-timeout 600");
    is_served(&export);
    let mut asks = requester(&export, HOSTILE);
    let call = |program: u32, procedure: u32, arguments: &[u32]| {
        [&[X, 0, 2, program, 3, procedure, 0, 0, 0, 0], arguments].concat()
    };
    let name = |text: [u8; 4]| u32::from_be_bytes(text);
    asks.sends(&msg(&ABSENT, &call(100_005, 1, &[1, name(*b"/\0\0\0")])));
    let root = handle(&asks.receives().expect("an answer"));
    let lookup = [&root[..], &[4, name(*b"file")]].concat();
    asks.sends(&msg(&ABSENT, &call(100_003, 3, &lookup)));
    let file = handle(&asks.receives().expect("an answer"));
    let read = call(100_003, 6, &[&file[..], &[0, 0, MIB]].concat());
    let read = msg(&[0, 1, 1, H, MIB, 0, 0, 0, 0], &read);
    for from in [HOSTILE, THEIRS] {
        let hostile: Vec<_> = (0..16)
            .filter_map(|_| {
                let mut requester = try_requester(&export, from)?;
                for _ in 0..60 {
                    requester.sends(&read);
                }
                Some(requester)
            })
            .collect();
        is_served(&export);
        is_served(&export);
        drop(hostile);
    }
}

#[test]
fn connections_by_rdma_without_a_call_make_room_first() {
    let export = serving("many", "--max-connections 16");
    let mut honest = requester(&export, HOSTILE);
    honest.continues("nothing");
    let port = export.rdma.parse().expect("a port");
    let silent: Vec<_> = (0..200)
        .map(|_| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("it listens"))
        .collect();
    let hostile: Vec<_> = (0..60).map(|_| requester(&export, HOSTILE)).collect();
    is_served(&export);
    honest.continues("many that did not call");
    drop((silent, hostile));
}

#[test]
fn connections_by_rdma_have_a_time_to_call_and_to_go_on() {
    let export = serving("late", "--stall-timeout 1 --idle-timeout 2");
    let mut silent = requester(&export, HOSTILE);
    let mut unanswered = requester(&export, HOSTILE);
    unanswered.sends(&msg(&[1, 40, H, 2 * MIB, 0, 0, 0, 0, 0], &NULL));
    let mut idle = requester(&export, HOSTILE);
    idle.continues("nothing");
    let mut busy = requester(&export, HOSTILE);
    for requester in [&mut silent, &mut idle] {
        let port = export.rdma.clone();
        let ended = std::thread::scope(|scope| {
            let ended = scope.spawn(|| requester.receives());
            let waited = until(TIME_LIMIT, || {
                busy.continues("nothing elsewhere");
                ended.is_finished().then_some(())
            });
            assert!(waited.is_some(), "the connection to {port} is there still");
            ended.join().expect("no panic")
        });
        assert_eq!(ended, None);
    }
    // The Read Request, and then the end.
    unanswered.peer.read_to_end();
    busy.continues("all others ended");
    is_served(&export);
}
