//! Hostile clients of `urnic serve`: they stop only their own functions.

mod soak;

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, ftruncate};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::Signal;
use urnic_device::registers::{STATUS, fatal};
use urnic_device::wqe::{Opcode as Work, SendHeader, Sge};
use urnic_tests::Running;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::hostile_client::{BASE, HostileClient, OwnPeer, Refused, memory};
use urnic_tests::program::Program;
use urnic_tests::wait::{TIME_LIMIT, descriptors, leave_descriptors, limit_descriptors, until};
use urnic_vfio_user::{IrqAction, IrqData, Request, SetIrqs, irq_index};

/// A server for this many clients. Its functions reach only each other.
pub(crate) struct Server {
    pub(crate) running: Running,
    pub(crate) socket: PathBuf,
}

impl Server {
    pub(crate) fn start(name: &str, clients: usize) -> Self {
        let socket = scratch().join(format!("{name}-{}.sock", std::process::id()));
        let mut running = Program::plain(urnic())
            .args(["serve", "--addr", "127.0.0.79/32", "--clients"])
            .args([clients.to_string()])
            .arg("--socket")
            .arg(&socket)
            .spawn();
        running.wait_for_output("that it serves", |printed| {
            printed.contains("serving").then_some(())
        });
        Self { running, socket }
    }

    /// Checks that a new client gets a function that works.
    pub(crate) fn serves(&self) {
        let mut client = HostileClient::begin(&self.socket)
            .unwrap_or_else(|refused| panic!("{refused:?}\n{}", self.running.output()));
        client.enable().expect("memory may be lent");
        client.works().expect("a command");
    }

    /// Sends SIGTERM and checks that the server ends.
    pub(crate) fn ends(mut self) {
        self.running.signal(Signal::TERM);
        let ended = until(TIME_LIMIT, || self.running.ended());
        assert!(
            ended.is_some_and(|how| how.success()),
            "{}",
            self.running.output()
        );
        assert!(!self.socket.exists());
    }

    pub(crate) fn maps(&self) -> String {
        std::fs::read_to_string(format!("/proc/{}/maps", self.running.pid())).expect("it runs")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn begin(socket: &Path) -> HostileClient {
    HostileClient::begin(socket).expect("a place")
}

fn eventfds<'a>(count: u32) -> Request<'a> {
    Request::SetIrqs(SetIrqs {
        index: irq_index::MSIX,
        start: 0,
        count,
        action: IrqAction::Trigger,
        data: IrqData::Eventfd,
    })
}

fn trigger() -> Request<'static> {
    Request::SetIrqs(SetIrqs {
        index: irq_index::MSIX,
        start: 0,
        count: 1,
        action: IrqAction::Trigger,
        data: IrqData::None,
    })
}

/// First and last address after each mapping, with its file's name.
fn mappings(maps: &str) -> Vec<(u64, u64, String)> {
    let number = |text: &str| u64::from_str_radix(text, 16).expect("an address");
    let parse = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (first, behind) = range.split_once('-')?;
        Some((number(first), number(behind), rest.to_owned()))
    };
    maps.lines().filter_map(parse).collect()
}

#[test]
fn a_file_that_cannot_be_mapped_leaves_no_hole() {
    const WINDOW: u64 = 64 << 30;
    const HUGE: u64 = 32 << 30;
    const MARKED: u64 = 48 << 30;
    let server = Server::start("no-hole", 4);
    let mut client = begin(&server.socket);
    let marked = memory("urnic-marked", 4096, MemfdFlags::empty());
    client.map_memory(MARKED, 4096, 0, &marked).expect("memory");
    let window = mappings(&server.maps())
        .iter()
        .find_map(|(first, _, file)| file.contains("urnic-marked").then_some(first - MARKED))
        .expect("it is mapped");
    let is_whole = |server: &Server| {
        let mut at = window;
        for (first, behind, _) in mappings(&server.maps()) {
            if first <= at && at < behind {
                at = behind;
            }
        }
        at >= window + WINDOW
    };
    assert!(is_whole(&server));
    let huge = memory("huge", HUGE, MemfdFlags::HUGETLB);
    for round in 0..8 {
        let refused = client.map_memory(0, HUGE, 0, &huge);
        assert!(
            matches!(refused, Err(Refused::Errno(_))),
            "{refused:?}: 32 GiB of huge pages are there"
        );
        assert!(is_whole(&server), "round {round}:\n{}", server.maps());
        // The server allocates the memory, and the client maps and unmaps at the address of the
        // file.
        server.serves();
        let own = memory("own", 1 << 20, MemfdFlags::empty());
        client.map_memory(round << 20, 1 << 20, 0, &own).expect("memory");
        client.unmap_memory(round << 20, 1 << 20).expect("what was lent");
        assert!(is_whole(&server), "round {round}:\n{}", server.maps());
    }
    drop(client);
    server.serves();
    server.ends();
}

/// Bytes of each half of a region of scattered pages.
const HALF: u64 = 80 << 20;
const DATA: u64 = 0x20_0000_0000;

/// A function with a queue pair that is its own peer, and a region of `2 * HALF` bytes whose pages
/// lie apart in a file.
fn scattered(server: &Server) -> (HostileClient, OwnPeer, u32, File) {
    let mut client = begin(&server.socket);
    client.enable().expect("memory may be lent");
    let peer = client.own_peer().expect("a queue pair");
    let file = memory("scattered", 4 * HALF, MemfdFlags::empty());
    client
        .map_memory(DATA, 4 * HALF, 0, &file)
        .expect("memory may be lent");
    let stag = client
        .register_every_second_page(peer.pd, DATA, 2 * HALF / 4096)
        .expect("a region");
    (client, peer, stag, file)
}

fn write_half(client: &mut HostileClient, peer: &mut OwnPeer, stag: u32) {
    let header = SendHeader {
        opcode: Work::Write as u8,
        remote_offset: HALF.into(),
        stag: stag.into(),
        ..SendHeader::default()
    };
    let from = Sge {
        offset: 0.into(),
        len: (HALF as u32).into(),
        stag: stag.into(),
    };
    client.post(peer, header, &[from]);
}

#[test]
fn truncating_scattered_memory_ends_only_its_client() {
    let server = Server::start("truncated", 4);
    let mut other = begin(&server.socket);
    other.enable().expect("memory may be lent");
    let before = mappings(&server.maps()).len();
    let (mut client, mut peer, stag, file) = scattered(&server);
    ftruncate(&file, 0).expect("our own file");
    for _ in 0..16 {
        write_half(&mut client, &mut peer, stag);
    }
    client.ring(&peer).expect("it is connected");
    client.expect_end();
    other
        .works()
        .unwrap_or_else(|refused| panic!("{refused:?}\n{}", server.running.output()));
    // Blocks that are no longer in use are kept; little else.
    let after = mappings(&server.maps()).len();
    assert!(after < before + 64, "{before} mappings before, {after} after");
    server.serves();
    server.ends();
}

#[test]
fn truncating_memory_during_a_transfer_harms_no_other() {
    let server = Server::start("truncating", 4);
    let mut other = begin(&server.socket);
    other.enable().expect("memory may be lent");
    for round in 0..6 {
        let (mut client, mut peer, stag, file) = scattered(&server);
        let cutting = std::thread::spawn(move || {
            for len in [3 * HALF, HALF + 4096 * round, 4 * HALF, 0, 4 * HALF, 0] {
                ftruncate(&file, len).expect("our own file");
            }
        });
        while client.register(STATUS).is_ok() {
            write_half(&mut client, &mut peer, stag);
            if client.ring(&peer).is_err() {
                break;
            }
        }
        cutting.join().expect("it cuts");
        let worked = other.works();
        worked.unwrap_or_else(|refused| panic!("{refused:?}\n{}", server.running.output()));
    }
    server.ends();
}

#[test]
fn memory_unmapped_under_many_rings_costs_little() {
    let server = Server::start("taken-back", 4);
    let mut client = begin(&server.socket);
    client.enable().expect("memory may be lent");
    let before = mappings(&server.maps()).len();
    for _ in 0..20 {
        let peer = client.own_peer().expect("a queue pair");
        client
            .unmap_memory(BASE, urnic_tests::hostile_client::LEN)
            .expect("what was lent");
        for _ in 0..100 {
            client.ring(&peer).expect("it is connected");
        }
        let stopped = until(TIME_LIMIT, || {
            let stopped = client.register(STATUS).expect("registers") == 2;
            stopped.then_some(())
        });
        assert!(stopped.is_some());
        let code = client.register(urnic_device::registers::FATAL_CODE);
        assert_eq!(code, Ok(fatal::HOST_MEMORY));
        client.request(&Request::DeviceReset, &[]).expect("a reset");
        client.enable().expect("memory may be lent again");
        client.works().expect("it is as new");
    }
    let after = mappings(&server.maps()).len();
    assert!(after < before + 16, "{before} mappings before, {after} after");
    server.ends();
}

/// A TCP socket whose close blocks: its peer receives nothing, and the socket lingers for hours.
/// The other two keep it so.
pub(crate) fn lingering() -> (TcpStream, TcpStream, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("a backlog");
    let (peer, _) = listener.accept().expect("connected above");
    socket.set_nonblocking(true).expect("a socket");
    while socket.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&socket, Some(Duration::from_secs(30_000))).expect("a socket");
    (socket, peer, listener)
}

/// The ways in which a client passes a descriptor.
const WAYS: usize = 7;

fn pass(server: &Server, way: usize, fd: BorrowedFd<'_>) -> HostileClient {
    let half = &[1, 0, 13, 0, 64, 0][..];
    if way == 6 {
        // Before the handshake; the server never reads it.
        let mut client = HostileClient::connect(&server.socket).expect("a server");
        let _ = client.send_raw(half, &[fd]);
        return client;
    }
    let mut client = begin(&server.socket);
    // The result does not matter: some of these descriptors end the connection.
    let _ = match way {
        0 => client.send(&eventfds(1), false, &[fd]),
        1 => client.send(&Request::DeviceReset, false, &[fd]),
        2 => client.send(&eventfds(16), false, &[fd; 16]),
        3 => client.send(&Request::DeviceReset, false, &[fd; 40]),
        4 => client.send_raw(half, &[fd]),
        _ => client.send_raw(&[0xff; 64], &[fd]),
    };
    client
}

/// Sockets that linger, and the threads here that close this side's descriptors: closing the last
/// descriptor blocks, too, until the peer closes.
#[derive(Default)]
struct Lingering {
    peers: Vec<(TcpStream, TcpListener)>,
    closing: Vec<JoinHandle<()>>,
}

impl Lingering {
    /// Passes one socket; the server's descriptor is the last as soon as this side's is closed.
    fn pass(&mut self, server: &Server, way: usize) -> HostileClient {
        let (socket, peer, listener) = lingering();
        let client = pass(server, way, socket.as_fd());
        self.peers.push((peer, listener));
        self.closing.push(std::thread::spawn(move || drop(socket)));
        client
    }

    fn end(self) {
        drop(self.peers);
        self.closing
            .into_iter()
            .for_each(|thread| thread.join().expect("it closes"));
    }
}

#[test]
fn lingering_descriptors_stop_no_other_client() {
    let server = Server::start("lingering", 4);
    let mut sockets = Lingering::default();
    for round in 0..2 {
        for way in 0..WAYS {
            drop(sockets.pass(&server, way));
            if way % 3 == round {
                server.serves();
            }
        }
        server.serves();
    }
    // The remaining connections do not block others, and the server ends.
    let staying: Vec<HostileClient> = (0..4).map(|way| sockets.pass(&server, way)).collect();
    server.ends();
    drop(staying);
    sockets.end();
}

#[test]
fn a_client_that_cannot_be_served_stops_no_other_one() {
    let mut server = Server::start("no-descriptors", 4);
    let pid = server.running.pid();
    let mut other = begin(&server.socket);
    other.enable().expect("memory may be lent");
    other.works().expect("a command");
    let before = descriptors(pid);
    let mut sockets = Lingering::default();
    // Enough to accept a client, and too few for its session.
    for left in [1, 2] {
        // The last client's session returns its own first.
        let ended = until(TIME_LIMIT, || (descriptors(pid) <= before).then_some(()));
        assert!(
            ended.is_some(),
            "{} descriptors, {before} before",
            descriptors(pid)
        );
        // The client's descriptor is there before the server accepts it.
        server.running.signal(Signal::STOP);
        leave_descriptors(pid, left);
        let client = sockets.pass(&server, 6);
        server.running.signal(Signal::CONT);
        server.running.wait_for_output("why it is not served", |printed| {
            (printed.matches("cannot serve a client").count() == left).then_some(())
        });
        limit_descriptors(pid, None);
        drop(client);
        server.serves();
        other.works().expect("a command");
    }
    server.ends();
    sockets.end();
}

#[test]
fn a_blocking_eventfd_stops_no_other_client() {
    let server = Server::start("blocking", 4);
    let fill = |way: usize| {
        let mut client = begin(&server.socket);
        let event: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        client
            .request(&eventfds(1), &[event.as_fd()])
            .expect("an eventfd is taken");
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).expect("it has room for that");
        // The server has its own descriptor of the same file, and shares the flags with it.
        fcntl_setfl(&event, OFlags::empty()).expect("our own");
        for _ in 0..=way {
            client.send(&trigger(), true, &[]).expect("it is connected");
        }
        client
    };
    for way in 0..12 {
        drop(fill(way % 3));
    }
    server.serves();
    let staying = [fill(0), fill(1)];
    server.serves();
    server.ends();
    drop(staying);
}

#[test]
fn other_descriptors_than_memory_and_eventfds_are_closed() {
    let server = Server::start("kinds", 2);
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    let null: OwnedFd = File::open("/dev/null").expect("it is there").into();
    let file: OwnedFd = File::open(urnic()).expect("it is there").into();
    let mut client = begin(&server.socket);
    for fd in [&reader, &writer, &null, &file] {
        let refused = client.request(&eventfds(1), &[fd.as_fd()]).map(drop);
        assert!(matches!(refused, Err(Refused::Errno(_))), "{refused:?}");
    }
    let mapped = |server: &Server| server.maps().contains("/dev/null") || server.maps().contains("pipe:");
    // Lent without a place in the server: reached by messages.
    for (number, fd) in [&reader, &null].into_iter().enumerate() {
        client
            .map_memory(number as u64 * 4096, 4096, 0, fd)
            .expect("by messages");
    }
    assert!(!mapped(&server));
    let memory = memory("kind", 4096, MemfdFlags::empty());
    let refused = client.request(&eventfds(1), &[memory.as_fd()]).map(drop);
    assert!(matches!(refused, Err(Refused::Errno(_))), "{refused:?}");
    server.serves();
    server.ends();
}
