//! Whole servers at real sockets, and clients of all kinds.

use super::super::endpoint::Endpoint;
use super::super::link::Link;
use super::super::memory::{Budget, ClientMemory};
use super::super::passed::Passed;
use super::super::remote::Remote;
use super::super::server::{ServeError, Server};
use super::client::{Client, Served, config, fresh_path, lend, memory, named_memory, take_back};
use super::wait_for;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::ftruncate;
use rustix::io::Errno;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use urnic_device::command::{Handle, Nothing, Opcode, Status};
use urnic_device::doorbell::WAKE;
use urnic_device::registers::*;
use urnic_device::stream::{Connect, Endpoint as Place, Listen};
use urnic_model::config::ModelConfig;
use urnic_model::host::{HostMemory, RemoteMemory, Unreachable};
use urnic_vfio_user::*;

const BASE: u64 = 0x1_0000_0000;
const LEN: u64 = 1 << 20;

fn errno(errno: Errno) -> u32 {
    errno.raw_os_error() as u32
}

/// Checks that this client's function works.
fn works(client: &mut Client) {
    let file = memory(LEN);
    let address = 0x7000_0000_0000;
    let mut commands = client.enable(&file, address);
    assert!(commands.execute(client, Opcode::AllocPd, &Nothing {}).is_ok());
    client.ask(&Request::DeviceReset, &[]).unwrap();
    client.ask(&take_back(address, LEN), &[]).unwrap();
    assert_eq!(client.read32(STATUS), 0);
}

#[test]
fn a_client_drives_its_function() {
    let served = Served::start(4);
    let mut client = Client::begin(&served.path);
    assert_eq!(client.read32(MAGIC), MAGIC_VALUE);
    let file = memory(LEN);
    let mut commands = client.enable(&file, BASE);
    // The vector of command completions.
    let interrupt_fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let set = Request::SetIrqs(SetIrqs {
        index: irq_index::MSIX,
        start: 1,
        count: 1,
        action: IrqAction::Trigger,
        data: IrqData::Eventfd,
    });
    client.ask(&set, &[interrupt_fd.as_fd()]).unwrap();
    client.write32(CMD_VECTOR, 1);
    let pd = commands
        .execute(&mut client, Opcode::AllocPd, &Nothing {})
        .unwrap()
        .result::<Handle>();
    let mut count = [0; 8];
    rustix::io::read(&interrupt_fd, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    commands.execute(&mut client, Opcode::FreePd, &pd).unwrap();
    // BAR 2 is a file. While no doorbell rings, its wake words show that the device sleeps.
    let message = client
        .ask(&Request::RegionInfo { argsz: 64, index: 2 }, &[])
        .unwrap();
    assert_eq!(message.fds.len(), 1);
    let uar = commands
        .execute(&mut client, Opcode::AllocUar, &Nothing {})
        .unwrap()
        .result::<Handle>();
    assert_ne!(uar.id.get(), 0);
    let access = RegionAccess {
        offset: WAKE.into(),
        region: 2,
        count: 4,
    };
    assert!(client.ask(&Request::RegionRead(access), &[]).is_ok());
}

#[test]
fn clients_have_functions_of_their_own_and_come_again() {
    let served = Served::start(2);
    let mut first = Client::begin(&served.path);
    let mut second = Client::begin(&served.path);
    works(&mut first);
    let file = memory(LEN);
    first.enable(&file, BASE);
    assert_eq!(second.read32(STATUS), 0, "the other's function is not enabled");
    // Two clients are the maximum.
    Client::connect(&served.path).expect_end();
    drop(first);
    let mut third = Client::begin(&served.path);
    assert_eq!(third.read32(STATUS), 0, "as new");
    works(&mut third);
    works(&mut second);
}

#[test]
fn a_new_client_gets_the_place_of_a_leaving_one() {
    let served = Served::start(1);
    for round in 0..200 {
        let mut client = Client::begin(&served.path);
        let file = memory(LEN);
        client.enable(&file, BASE);
        if round % 2 == 1 {
            // The server may still be cleaning up when the client sees the end of the connection.
            client.send_raw(&[0xff; 64], &[]);
            while client.next().is_some() {}
        }
    }
}

#[test]
fn an_invalid_message_ends_only_its_connection() {
    let served = Served::start(8);
    let mut other = Client::begin(&served.path);
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let mut reset = Vec::new();
    Request::DeviceReset.emit(1, false, &mut reset);
    let with = |at: std::ops::Range<usize>, value: u32| {
        let mut bytes = reset.clone();
        bytes[at].copy_from_slice(&value.to_ne_bytes());
        bytes
    };
    // A message that is too short, one that is too long, one without a type, a reply to no command,
    // too many descriptors, and a first message that is not a version.
    for bytes in [
        with(4..8, 15),
        with(4..8, u32::MAX),
        with(8..12, 7),
        with(8..12, 1),
    ] {
        let mut client = Client::begin(&served.path);
        client.send_raw(&bytes, &[]);
        assert!(client.next().is_none());
    }
    let mut client = Client::begin(&served.path);
    client.send_raw(&reset, &[null.as_fd(); 17]);
    assert!(client.next().is_none());
    let mut client = Client::connect(&served.path);
    assert_eq!(
        client.ask(&Request::DeviceReset, &[]).err(),
        Some(errno(Errno::INVAL))
    );
    assert!(client.next().is_none());
    // A client that sends half a message and closes, and a client that never sends a message.
    let mut half = Client::begin(&served.path);
    half.socket.write_all(&with(4..8, 1000)).unwrap();
    drop(half);
    let _silent = Client::connect(&served.path);
    works(&mut other);
}

#[test]
fn a_flood_is_answered_in_order_and_limited() {
    let served = Served::start(2);
    let mut other = Client::begin(&served.path);
    let mut client = Client::begin(&served.path);
    // The replies exceed the socket buffers: the server reads no more until they are read.
    let socket = client.socket.try_clone().unwrap();
    const COUNT: u32 = 50_000;
    let flood = std::thread::spawn(move || {
        let mut writer = Client::over(socket);
        for _ in 0..COUNT {
            let access = RegionAccess {
                offset: 0,
                region: 0,
                count: 64,
            };
            writer.send(&Request::RegionRead(access), false, &[]);
        }
    });
    works(&mut other);
    for _ in 0..COUNT {
        let message = client.next().expect("an answer");
        assert_eq!(message.header.command, Command::RegionRead as u16);
    }
    flood.join().unwrap();
    works(&mut client);
}

#[test]
fn files_that_are_too_short_are_not_mapped() {
    let served = Served::start(1);
    let mut client = Client::begin(&served.path);
    let file = memory(LEN);
    assert_eq!(
        client.ask(&lend(BASE, LEN + 4096), &[file.as_fd()]).err(),
        Some(errno(Errno::INVAL))
    );
    assert_eq!(
        client.ask(&lend(BASE + 1, 4096), &[file.as_fd()]).err(),
        Some(errno(Errno::INVAL))
    );
    assert_eq!(
        client.ask(&lend(BASE, 4095), &[file.as_fd()]).err(),
        Some(errno(Errno::INVAL))
    );
    let huge = memory(1 << 50);
    assert_eq!(
        client.ask(&lend(0, 1 << 50), &[huge.as_fd()]).err(),
        Some(errno(Errno::NOMEM))
    );
    let offset = Request::DmaMap(DmaMap {
        flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
        offset: u64::MAX - 4095,
        address: BASE,
        size: 8192,
    });
    assert_eq!(
        client.ask(&offset, &[file.as_fd()]).err(),
        Some(errno(Errno::INVAL))
    );
    client.ask(&lend(BASE, LEN), &[file.as_fd()]).unwrap();
    assert_eq!(
        client.ask(&lend(BASE + 4096, 4096), &[file.as_fd()]).err(),
        Some(errno(Errno::EXIST))
    );
    works(&mut client);
}

#[test]
fn a_shrinking_file_ends_its_own_connection_only() {
    let served = Served::start(2);
    let mut other = Client::begin(&served.path);
    let mut client = Client::begin(&served.path);
    let file = memory(LEN);
    client.enable(&file, BASE);
    ftruncate(&file, 0).unwrap();
    client.send(
        &Request::RegionWrite {
            offset: CMD_DOORBELL.into(),
            region: 0,
            data: &1u32.to_le_bytes(),
        },
        false,
        &[],
    );
    while client.next().is_some() {}
    works(&mut other);
    works(&mut Client::begin(&served.path));
}

#[test]
fn memory_unmapped_too_early_stops_the_function_until_reset() {
    let served = Served::start(2);
    let mut other = Client::begin(&served.path);
    let mut client = Client::begin(&served.path);
    let file = memory(LEN);
    client.enable(&file, BASE);
    client.ask(&take_back(BASE, LEN), &[]).unwrap();
    client.write32(CMD_DOORBELL, 1);
    wait_for("the device stops", || (client.read32(STATUS) == 2).then_some(()));
    assert_eq!(client.read32(FATAL_CODE), fatal::HOST_MEMORY);
    works(&mut other);
    client.ask(&Request::DeviceReset, &[]).unwrap();
    works(&mut client);
}

#[test]
fn memory_of_a_disconnected_client_is_unmapped() {
    const NAME: &str = "urnic-let-go";
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(NAME);
    let served = Served::start(1);
    let mut client = Client::begin(&served.path);
    client.enable(&named_memory(NAME, LEN), BASE);
    assert!(mapped());
    drop(client);
    wait_for("nothing of it is mapped", || (!mapped()).then_some(()));
}

#[test]
fn memory_mapped_page_by_page_is_contiguous() {
    let served = Served::start(1);
    let mut client = Client::begin(&served.path);
    let file = memory(LEN);
    // In reverse order of the file, and across the border of two windows.
    let base = (1 << 36) - 2 * 4096;
    for page in 0..4u64 {
        let map = Request::DmaMap(DmaMap {
            flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
            offset: (3 - page) * 4096,
            address: base + page * 4096,
            size: 4096,
        });
        client.ask(&map, &[file.as_fd()]).unwrap();
    }
    // Two pages of commands, within one window.
    client.write32(CMD_LOG_SIZE, 6);
    client.write32(CMD_BASE, base as u32);
    client.write32(CMD_BASE + 4, (base >> 32) as u32);
    client.write32(CMD_COMPLETION_BASE, (base + 2 * 4096) as u32);
    client.write32(CMD_COMPLETION_BASE + 4, ((base + 2 * 4096) >> 32) as u32);
    client.write32(CONTROL, Control::ENABLE.bits());
    assert_eq!(client.read32(STATUS), 1);
}

#[test]
fn rings_may_not_lie_where_only_messages_reach() {
    let served = Served::start(1);
    let mut client = Client::begin(&served.path);
    client.ask(&lend(BASE, LEN), &[]).unwrap();
    client.write32(CMD_LOG_SIZE, 4);
    client.write32(CMD_BASE + 4, 1);
    client.write32(CMD_COMPLETION_BASE + 4, 1);
    client.write32(CONTROL, Control::ENABLE.bits());
    assert_eq!(
        (client.read32(STATUS), client.read32(FATAL_CODE)),
        (2, fatal::COMMAND_DMA)
    );
    client.ask(&Request::DeviceReset, &[]).unwrap();
    works(&mut client);
}

/// Memory and a link as a session has them, and the client's end of the connection.
fn remote(capabilities: &Capabilities) -> (Arc<ClientMemory>, Arc<Link>, Client) {
    remote_by(capabilities, true)
}

fn remote_by(capabilities: &Capabilities, process_vm: bool) -> (Arc<ClientMemory>, Arc<Link>, Client) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let memory = Arc::new(ClientMemory::new(Budget::new(1)).unwrap());
    let wake = memory.faults().wake().try_clone_to_owned().unwrap();
    let link = Arc::new(Link::new(ours.into(), wake));
    memory.set_remote(Remote::new(link.clone(), capabilities, process_vm));
    (memory, link, Client::over(theirs))
}

fn map(memory: &ClientMemory, request: &Request<'_>, file: Option<OwnedFd>) {
    let Request::DmaMap(map) = request else {
        panic!("a map");
    };
    memory.map(map, file.map(Passed::new)).unwrap();
}

#[test]
fn memory_without_a_file_is_copied_by_messages() {
    let room = Capabilities {
        max_data_xfer_size: Some(1000),
        ..Capabilities::default()
    };
    let (memory, link, mut client) = remote(&room);
    map(&memory, &lend(BASE, 4096), None);
    // A neighbouring extent with a file.
    let file = self::memory(4096);
    map(&memory, &lend(BASE + 4096, 4096), Some(file.into()));
    assert!(memory.covers(BASE + 10, 8000) && !memory.covers(BASE, 8193) && memory.reach(BASE, 1).is_none());
    let answering = std::thread::spawn(move || {
        let mut ram = vec![0; 4096];
        let mut bytes = 0;
        // A command that arrives meanwhile is queued for the connection's thread.
        client.send(&Request::DeviceReset, false, &[]);
        while let Some(message) = client.next() {
            let mut out = Vec::new();
            match message.request().unwrap() {
                Request::DmaRead(access) => {
                    let at = (access.address - BASE) as usize;
                    let data = &ram[at..at + access.count as usize];
                    bytes += data.len();
                    let address = access.address;
                    Reply::DmaRead { address, data }.emit(message.header.id, &mut out);
                }
                Request::DmaWrite { address, data } => {
                    assert!(data.len() <= 1000);
                    bytes += data.len();
                    let at = (address - BASE) as usize;
                    ram[at..at + data.len()].copy_from_slice(data);
                    Reply::DmaWrite.emit(message.header.id, &mut out);
                }
                other => panic!("{other:?}"),
            }
            client.send_raw(&out, &[]);
        }
        bytes
    });
    let wrote: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
    memory.write(BASE + 96, &wrote).unwrap();
    // Several requests at once: each has its own reply.
    std::thread::scope(|scope| {
        for part in 0..5usize {
            let (memory, wrote) = (&memory, &wrote);
            scope.spawn(move || {
                let mut read = vec![0; 1000];
                memory.read(BASE + 96 + 1000 * part as u64, &mut read).unwrap();
                assert_eq!(read, wrote[1000 * part..1000 * (part + 1)]);
            });
        }
    });
    let woken = rustix::io::read(memory.faults().wake(), &mut [0; 8]);
    assert_eq!(woken, Ok(8), "the connection's thread learns of it");
    let queued = link.command().expect("the command that came first");
    assert_eq!(queued.header.command, Command::DeviceReset as u16);
    assert_eq!(memory.read(BASE + 8192, &mut [0]), Err(Unreachable));
    memory.unmap(BASE, BASE + 4095, None).unwrap();
    assert_eq!(memory.read(BASE, &mut [0]), Err(Unreachable));
    link.disconnect();
    assert_eq!(
        answering.join().unwrap(),
        2 * 4000,
        "what is mapped makes no messages"
    );
}

#[test]
fn a_refused_or_unanswered_access_is_unreachable() {
    let (memory, link, mut client) = remote(&Capabilities::default());
    map(&memory, &lend(BASE, 4096), None);
    let refusing = std::thread::spawn(move || {
        let message = client.next().unwrap();
        let mut out = Vec::new();
        emit_error(
            message.header.id,
            message.header.command,
            errno(Errno::FAULT),
            &mut out,
        );
        client.send_raw(&out, &[]);
        // A reply of the wrong length counts as a failure.
        let message = client.next().unwrap();
        out.clear();
        let (address, data) = (BASE, &[1u8][..]);
        Reply::DmaRead { address, data }.emit(message.header.id, &mut out);
        client.send_raw(&out, &[]);
        // The next request gets no reply.
        client.next().unwrap();
    });
    for _ in 0..3 {
        assert_eq!(memory.read(BASE, &mut [0; 2]), Err(Unreachable));
    }
    assert!(link.is_broken());
    refusing.join().unwrap();
}

#[test]
fn a_client_that_left_stays_away_while_its_link_closes() {
    for _ in 0..5000 {
        let (theirs, ours) = std::os::unix::net::UnixStream::pair().unwrap();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let link = Link::new(ours.into(), wake);
        drop(theirs);
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| {
                link.disconnect();
                link.close();
            });
            while !closing.is_finished() {
                assert!(link.is_leaving());
                std::thread::yield_now();
            }
        });
    }
}

/// The capabilities of a urnic client.
fn ours() -> Capabilities {
    let urnic = Urnic {
        identity: true,
        memory: None,
    };
    Capabilities {
        urnic: Some(urnic),
        ..Capabilities::default()
    }
}

#[test]
fn without_process_vm_memory_is_copied_by_messages() {
    let (memory, link, mut client) = remote_by(&ours(), false);
    let theirs = [7u8; 64];
    let base = theirs.as_ptr().expose_provenance() as u64;
    map(&memory, &lend(base, 64), None);
    let answering = std::thread::spawn(move || {
        let message = client.next().unwrap();
        let mut out = Vec::new();
        let (address, data) = (base, &[8u8; 2][..]);
        Reply::DmaRead { address, data }.emit(message.header.id, &mut out);
        client.send_raw(&out, &[]);
    });
    let mut read = [0; 2];
    memory.read(base, &mut read).unwrap();
    assert_eq!(read, [8; 2], "the client's answer, not the mapped memory");
    answering.join().unwrap();
    drop(link);
}

#[test]
fn memory_of_a_client_of_ours_is_copied_by_the_kernel() {
    let (memory, _link, _client) = remote(&ours());
    let mut theirs = vec![7u8; 3 * 4096];
    let start = theirs.as_mut_ptr().expose_provenance() as u64;
    let base = start.next_multiple_of(4096);
    map(&memory, &lend(base, 8192), None);
    let mut read = [0; 5000];
    memory.read(base + 100, &mut read).unwrap();
    assert_eq!(read, [7; 5000]);
    memory.write(base + 4000, &[9; 200]).unwrap();
    assert_eq!(theirs[(base - start) as usize + 4000..][..200], [9; 200]);
    // Lent, but not mapped in the client.
    map(&memory, &lend(4096, 4096), None);
    assert_eq!(memory.read(4096, &mut [0]), Err(Unreachable));
}

fn place(text: &str) -> Place {
    text.parse::<std::net::SocketAddr>().unwrap().into()
}

#[test]
fn a_confined_function_reaches_its_own_addresses_only() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let served = Served::start_with(config("127.0.0.77", &["192.0.2.1"]), 1);
    let mut client = Client::begin(&served.path);
    let file = memory(LEN);
    let mut commands = client.enable(&file, BASE);
    let anywhere = Place::default();
    for remote in [
        format!("127.0.0.1:{port}"),
        format!("[::1]:{port}"),
        "192.0.2.1:22".to_owned(),
        format!("0.0.0.0:{port}"),
    ] {
        for local in [anywhere, place("127.0.0.77:0")] {
            let connect = Connect {
                remote: place(&remote),
                local,
                ..Connect::default()
            };
            let refused = commands.execute(&mut client, Opcode::StreamConnect, &connect);
            assert_eq!(refused.err(), Some(Status::Denied), "{remote}");
        }
    }
    let from_another = Connect {
        remote: place("198.51.100.1:9"),
        local: place("127.0.0.1:0"),
        ..Connect::default()
    };
    let refused = commands.execute(&mut client, Opcode::StreamConnect, &from_another);
    assert_eq!(refused.err(), Some(Status::Denied));
    for local in ["127.0.0.1:0", "[::1]:0"] {
        let listen = Listen {
            local: place(local),
            backlog: 4.into(),
            ..Listen::default()
        };
        let refused = commands.execute(&mut client, Opcode::StreamListen, &listen);
        assert_eq!(refused.err(), Some(Status::Denied), "{local}");
    }
    let listen = Listen {
        local: place("127.0.0.77:0"),
        backlog: 4.into(),
        ..Listen::default()
    };
    assert!(
        commands
            .execute(&mut client, Opcode::StreamListen, &listen)
            .is_ok()
    );
    let own = Connect {
        remote: place("127.0.0.77:9"),
        local: anywhere,
        ..Connect::default()
    };
    assert!(commands.execute(&mut client, Opcode::StreamConnect, &own).is_ok());
}

#[test]
fn a_function_without_descriptors_leaves_others_theirs() {
    let mut config = config("127.0.0.78", &[]);
    config.limits.descriptors = 12;
    let served = Served::start_with(config, 2);
    let (mut greedy, mut other) = (Client::begin(&served.path), Client::begin(&served.path));
    let (mut commands, mut others) = (
        greedy.enable(&memory(LEN), BASE),
        other.enable(&memory(LEN), BASE),
    );
    let listen = Listen {
        local: Place::from("127.0.0.78:0".parse::<std::net::SocketAddr>().unwrap()),
        backlog: 1.into(),
        ..Listen::default()
    };
    for _ in 0..2 {
        let mut made = Vec::new();
        let refused = loop {
            match commands.execute(&mut greedy, Opcode::StreamListen, &listen) {
                Ok(done) => made.push(done.result::<Handle>()),
                Err(status) => break status,
            }
        };
        // The device itself uses two of the twelve descriptors to wait for events.
        assert_eq!((refused, made.len()), (Status::NoResources, 10));
        let done = others.execute(&mut other, Opcode::StreamListen, &listen).unwrap();
        let lid = done.result::<Handle>();
        others.execute(&mut other, Opcode::StreamUnlisten, &lid).unwrap();
        // Returned resources can be allocated again.
        for lid in made {
            commands
                .execute(&mut greedy, Opcode::StreamUnlisten, &lid)
                .unwrap();
        }
    }
}

#[test]
fn only_a_dead_servers_socket_is_replaced() {
    let endpoint = |path: &std::path::Path| Endpoint {
        path: path.to_owned(),
        mode: 0o640,
        config: ModelConfig::default(),
        clients: 1,
        process_vm: true,
    };
    let path = fresh_path();
    drop(UnixListener::bind(&path).unwrap());
    let server = Server::bind(vec![endpoint(&path)]).unwrap();
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o640
    );
    assert!(matches!(
        Server::bind(vec![endpoint(&path)]).err(),
        Some(ServeError::Live(_))
    ));
    assert!(UnixStream::connect(&path).is_ok(), "the first one is still there");
    drop(server);
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(
        Server::bind(vec![endpoint(&path)]).err(),
        Some(ServeError::NoSocket(_))
    ));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    let nowhere = path.join("socket");
    assert!(matches!(
        Server::bind(vec![endpoint(&nowhere)]).err(),
        Some(ServeError::System(..))
    ));
}
