//! Hostile clients take as many resources as possible. Meanwhile a well-behaved client is served,
//! from another address and from the same address.

use super::{Server, connect_from, pattern};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::time::{Duration, Instant};
use urnic_nfs::call::Tcp;
use urnic_nfs::client::{self, Client};
use urnic_nfs::memory::Pool;
use urnic_nfs::nfs3::{
    CreateArgs, CreateHow, Created, Entry, Handle, Procedure, ReadArgs, SetAttributes, Stable, Wcc,
};
use urnic_nfs::rpc::{Call, Credential};
use urnic_nfs::xdr::Xdr;

const HOSTILE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const MIB: usize = 1 << 20;

/// A record with a call of procedure 0 (NULL).
const NULL: [u32; 11] = [0x8000_0028, 7, 0, 2, 100_003, 3, 0, 0, 0, 0, 0];

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// A record with a call of `procedure` and its arguments. Its fragment header states a length that
/// is `more` bytes longer.
fn record(procedure: Procedure, arguments: impl FnOnce(&mut Vec<u8>), more: usize) -> Vec<u8> {
    let call = Call {
        xid: 9,
        program: 100_003,
        version: 3,
        procedure: procedure as u32,
        credential: Credential::Anonymous,
    };
    let mut message = call.emit();
    arguments(&mut message);
    let header = (message.len() + more) as u32 | 1 << 31;
    [&header.to_be_bytes()[..], &message].concat()
}

pub(super) fn answered(mut stream: &TcpStream) -> std::io::Result<()> {
    stream.write_all(&bytes(&NULL))?;
    stream.read_exact(&mut [0; 28])
}

/// Waits until the server counts the connection as served. The server does so between the first
/// reply and the second one.
#[track_caller]
pub(super) fn is_counted_as_served(stream: &TcpStream) {
    for _ in 0..2 {
        answered(stream).expect("an answer");
    }
}

#[track_caller]
fn ends(mut stream: &TcpStream) {
    let ended = loop {
        match stream.read(&mut [0; 1 << 16]) {
            Ok(0) => break Ok(()),
            Ok(_) => {}
            Err(error) => break Err(error.kind()),
        }
    };
    assert!(
        matches!(ended, Ok(()) | Err(ErrorKind::ConnectionReset)),
        "it is not ended: {ended:?}"
    );
}

/// Mounts the export, writes a file of two MiB, and reads it back.
#[track_caller]
fn is_served(server: &Server, from: Ipv4Addr) -> (Client, Handle) {
    let tcp = Tcp::over(connect_from(from, server.address)).expect("a connection");
    let mut client = Client::new(Box::new(tcp), Pool::new());
    let dir = client.mount(b"/").expect("it mounts");
    let name = format!("file of {from}");
    let create = CreateArgs {
        place: Entry {
            dir,
            name: name.as_bytes(),
        },
        how: CreateHow::Unchecked(SetAttributes::default()),
    };
    let created = client.nfs::<Created, Wcc>(Procedure::Create, &create);
    let file = created.expect("a file").file.expect("its handle");
    let data = pattern(2 * MIB);
    for half in 0..2 {
        let mut memory = client.memory(MIB).expect("memory");
        memory.copy_from_slice(&data[half * MIB..(half + 1) * MIB]);
        let offset = (half * MIB) as u64;
        client
            .begin_write(file, offset, memory.share(), Stable::Unstable)
            .expect("it is sent");
        let (_, answer) = client.wait().expect("an answer");
        let written = client::written(&answer).expect("it is written");
        assert_eq!(written.count as usize, MIB);
    }
    for half in 0..2 {
        client
            .begin_read(file, (half * MIB) as u64, MIB as u32)
            .expect("it is sent");
        let (_, answer) = client.wait().expect("an answer");
        let (_, read, _) = client::read(answer).expect("it is read");
        assert!(read.expect("data")[..] == data[half * MIB..(half + 1) * MIB]);
    }
    (client, file)
}

fn threads(server: &Server) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.child.id()));
    tasks.expect("its threads").count()
}

/// Memory in use by the server, in KiB.
fn resident(server: &Server) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.expect("its memory")
}

/// Five hundred incomplete records of one MiB, of which only the first bytes arrive: in one
/// fragment or in several, with a WRITE or another call.
#[test]
fn announced_records_hold_no_memory() {
    let server = Server::start(
        0,
        &["--memory", "64M", "--buffers", "128M", "--stall-timeout", "600"],
    );
    let file = Handle::new(&[0; 16]);
    let write = record(
        Procedure::Write,
        |out| (file, (0_u64, (MIB as u32, (2_u32, MIB as u32)))).put(out),
        MIB,
    );
    let beginnings = [
        bytes(&[MIB as u32]),
        bytes(&[MIB as u32 | 1 << 31]),
        [&bytes(&[MIB as u32])[..], &[7; 5000]].concat(),
        [&write[..], &[7; 3000]].concat(),
    ];
    let hostile: Vec<_> = (0..500)
        .map(|n| {
            let mut stream = connect_from(HOSTILE, server.address);
            stream
                .write_all(&beginnings[n % beginnings.len()])
                .expect("the socket accepts it");
            stream
        })
        .collect();
    for from in [OTHER, HOSTILE] {
        is_served(&server, from);
    }
    assert!(resident(&server) < 200 << 10, "{} KiB", resident(&server));
    drop(hostile);
}

/// WRITEs without their last byte, more than there is memory for.
#[test]
fn one_address_cannot_take_all_memory() {
    let server = Server::start(
        0,
        &["--memory", "64M", "--buffers", "64M", "--stall-timeout", "600"],
    );
    let (_client, file) = is_served(&server, OTHER);
    let write = record(
        Procedure::Write,
        |out| (file, (0_u64, (MIB as u32, (2_u32, MIB as u32)))).put(out),
        MIB,
    );
    let call = [&write[..], &vec![7; MIB - 1]].concat();
    let hostile: Vec<_> = (0..100)
        .map(|_| {
            let mut stream = connect_from(HOSTILE, server.address);
            stream.set_nonblocking(true).expect("a socket");
            // Bytes that the server does not receive at first are not sent later.
            let mut sent = 0;
            let mut tries = 0;
            while sent < call.len() && tries < 50 {
                match stream.write(&call[sent..]) {
                    Ok(count) => sent += count,
                    Err(_) => {
                        tries += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            }
            stream
        })
        .collect();
    for from in [OTHER, HOSTILE] {
        is_served(&server, from);
    }
    assert!(resident(&server) < 300 << 10, "{} KiB", resident(&server));
    drop(hostile);
}

/// Connections that receive no reply. Each makes sixty READs of one MiB.
fn clients_that_read_nothing(server: &Server, file: Handle, count: usize) -> Vec<TcpStream> {
    let read = record(
        Procedure::Read,
        |out| {
            let (offset, count) = (0, MIB as u32);
            ReadArgs { file, offset, count }.put(out);
        },
        0,
    );
    let calls = read.repeat(60);
    let connections = (0..count).map(|_| {
        let mut stream = connect_from(HOSTILE, server.address);
        stream.write_all(&calls).expect("the socket accepts it");
        stream
    });
    connections.collect()
}

#[test]
fn unread_replies_hold_at_most_a_share_of_memory() {
    let server = Server::start(
        0,
        &["--memory", "64M", "--buffers", "64M", "--stall-timeout", "600"],
    );
    let (_client, file) = is_served(&server, OTHER);
    let hostile = clients_that_read_nothing(&server, file, 40);
    for from in [OTHER, HOSTILE, OTHER, HOSTILE] {
        is_served(&server, from);
    }
    assert!(resident(&server) < 300 << 10, "{} KiB", resident(&server));
    drop(hostile);
}

#[test]
fn unread_replies_hold_at_most_a_share_of_threads() {
    const CONNECTIONS: usize = 40;
    let server = Server::start(0, &["--memory", "64M"]);
    let (_client, file) = is_served(&server, OTHER);
    let before = threads(&server);
    let hostile = clients_that_read_nothing(&server, file, CONNECTIONS);
    // Each connection has one thread, and the client has half of the 256 further threads.
    let most = before + CONNECTIONS + 128;
    let begin = Instant::now();
    while threads(&server) < most - 10 {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "{} threads",
            threads(&server)
        );
    }
    for from in [OTHER, HOSTILE, OTHER, HOSTILE] {
        is_served(&server, from);
        // The connections that are now served have threads, too.
        let threads = threads(&server);
        assert!(threads < most + 20, "{threads} threads, {before} before");
    }
    drop(hostile);
}

#[test]
fn a_message_has_a_time_limit_in_each_direction() {
    let server = Server::start(0, &["--memory", "64M", "--stall-timeout", "1"]);
    let (_client, file) = is_served(&server, OTHER);
    let connect = || connect_from(HOSTILE, server.address);
    let silent = connect();
    let mut begun = connect();
    begun
        .write_all(&bytes(&[MIB as u32]))
        .expect("the socket accepts it");
    let mut after_a_call = connect();
    answered(&after_a_call).expect("an answer");
    after_a_call.write_all(&[0x80]).expect("the socket accepts it");
    let takes_nothing = clients_that_read_nothing(&server, file, 1);
    // A byte from time to time is not enough progress.
    let mut slow = connect();
    slow.write_all(&bytes(&[MIB as u32]))
        .expect("the socket accepts it");
    let begin = Instant::now();
    while slow.write_all(&[7]).is_ok() {
        assert!(
            begin.elapsed() < Duration::from_secs(120),
            "the server still receives"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    [&silent, &begun, &after_a_call].into_iter().for_each(ends);
    // If the connection is not reset, its end follows the replies that were already sent.
    ends(&takes_nothing[0]);
    is_served(&server, HOSTILE);
}

#[test]
fn idle_connections_end_and_others_stay() {
    let server = Server::start(0, &["--memory", "64M", "--idle-timeout", "2"]);
    let [idle, busy] = [(); 2].map(|()| connect_from(HOSTILE, server.address));
    answered(&idle).expect("an answer");
    idle.set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a time");
    let begin = Instant::now();
    loop {
        answered(&busy).expect("an answer as before");
        match (&idle).read(&mut [0; 1]) {
            Ok(0) => break,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            other => panic!("{other:?}"),
        }
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "the connection still exists"
        );
    }
    answered(&busy).expect("an answer to the other");
}

/// Connections without a call make room before a connection with a call, although all have one
/// address.
#[test]
fn connections_without_a_call_make_room_first() {
    let server = Server::start(0, &["--memory", "1M", "--max-connections", "16"]);
    let honest = connect_from(HOSTILE, server.address);
    is_counted_as_served(&honest);
    let hostile: Vec<_> = (0..100).map(|_| connect_from(HOSTILE, server.address)).collect();
    for n in 0..20 {
        let next = connect_from(if n % 2 == 0 { OTHER } else { HOSTILE }, server.address);
        answered(&next).expect("an answer to the next");
    }
    answered(&honest).expect("an answer as before");
    drop(hostile);
}

/// The descriptors are the limit, and not the number of connections.
#[test]
fn without_free_descriptors_the_next_client_is_served() {
    let server = Server::start(0, &["--memory", "64M"]);
    answered(&connect_from(OTHER, server.address)).expect("an answer");
    let pid = Pid::from_raw(server.child.id() as i32);
    let limit = Rlimit {
        current: Some(64),
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    prlimit(pid, Resource::Nofile, limit).expect("our own child");
    let hostile: Vec<_> = (0..200).map(|_| connect_from(HOSTILE, server.address)).collect();
    for from in [OTHER, HOSTILE] {
        is_served(&server, from);
    }
    // A thread that only retries would have used all of its time.
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.child.id())).expect("its times");
        let times = stat.split_whitespace().skip(13).take(2);
        times
            .map(|time| time.parse::<u64>().expect("a time"))
            .sum::<u64>()
    };
    let before = ticks();
    std::thread::sleep(Duration::from_secs(1));
    let used = ticks() - before;
    assert!(used < 50, "{used} hundredths of a second in one, idle");
    for stream in &hostile {
        let _ = stream.shutdown(Shutdown::Both);
    }
    is_served(&server, HOSTILE);
}
