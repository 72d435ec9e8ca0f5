//! Streaming mode over real TCP; the test's end of each connection is in `std::net`.

use crate::ModelConfig;
use crate::config::{DeviceAddress, Reach};
use crate::testing::mock::{Driver, End, assert_cqe, config, wait_for};
use rustix::event::{EventfdFlags, eventfd};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use urnic_device::command::*;
use urnic_device::event::EventKind;
use urnic_device::stream::{Close, Connect, Endpoint, Endpoints, Listen, Listening, attach, input, listen};
use urnic_device::vocabulary::WcStatus;
use urnic_faults::Network;
use urnic_wire::mpa::fpdu::CrcMode;
use urnic_wire::mpa::marker;
use zerocopy::FromBytes;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn errno(code: rustix::io::Errno) -> u16 {
    code.raw_os_error() as u16
}

fn any_port(ip: &str) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), 0)
}

pub(super) fn send(driver: &Driver, sid: u32, bytes: &[u8]) -> Result<(), Status> {
    let mut command = Command::new(Opcode::StreamSend, &Handle { id: sid.into() });
    command.input = driver.arena.alloc(bytes.len()).into();
    command.input_len = (bytes.len() as u32).into();
    driver.arena.write(command.input.get(), bytes);
    driver.execute(command).map(drop)
}

/// Starts to receive `len` bytes; returns the address of their buffer.
pub(super) fn receive(driver: &Driver, sid: u32, len: u32) -> Result<u64, Status> {
    let mut command = Command::new(Opcode::StreamReceive, &Handle { id: sid.into() });
    command.output = driver.arena.alloc(len as usize).into();
    command.output_len = len.into();
    driver.execute(command).map(|_| command.output.get())
}

fn close(driver: &Driver, sid: u32, abort: bool) -> Result<(), Status> {
    let arguments = Close {
        sid: sid.into(),
        abort: u32::from(abort).into(),
    };
    driver.command(Opcode::StreamClose, &arguments).map(drop)
}

fn query(driver: &Driver, sid: u32) -> Endpoints {
    let mut command = Command::new(Opcode::StreamQuery, &Handle { id: sid.into() });
    let len = size_of::<Endpoints>();
    command.output = driver.arena.alloc(len).into();
    command.output_len = (len as u32).into();
    driver.execute(command).unwrap();
    let bytes = driver.arena.read(command.output.get(), len);
    Endpoints::read_from_bytes(&bytes).unwrap()
}

pub(super) fn endpoints(driver: &Driver, sid: u32) -> (SocketAddr, SocketAddr) {
    let both = query(driver, sid);
    (both.local.into(), both.remote.into())
}

/// A stream of the device and the program's end of it.
fn connected(driver: &Driver) -> (u32, TcpStream) {
    let listener = TcpListener::bind(any_port("127.0.0.1")).unwrap();
    let sid = driver.connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    let event = driver.await_event(EventKind::StreamConnected, sid);
    assert_eq!(event.code.get(), 0);
    (sid, peer)
}

#[test]
fn a_query_reports_input_and_takes_none() {
    let driver = Driver::start();
    let (sid, mut peer) = connected(&driver);
    assert_eq!(query(&driver, sid).input.get(), input::NONE);
    peer.write_all(b"ab").unwrap();
    await_input(&driver, sid, input::BYTES);
    await_input(&driver, sid, input::BYTES);
    let buffer = receive(&driver, sid, 2).unwrap();
    driver.await_event(EventKind::StreamReceived, sid);
    assert_eq!(driver.arena.read(buffer, 2), b"ab");
    assert_eq!(query(&driver, sid).input.get(), input::NONE);
    drop(peer);
    await_input(&driver, sid, input::END);
}

/// Waits for input: loopback usually delivers before `write` returns, but does not guarantee it.
fn await_input(driver: &Driver, sid: u32, wanted: u32) {
    let found = std::iter::repeat_with(|| query(driver, sid).input.get())
        .take(1_000_000)
        .any(|input| input == wanted);
    assert!(found, "never {wanted}");
}

#[test]
fn a_connection_knows_both_addresses() {
    let driver = Driver::start();
    for ip in ["127.0.0.1", "::1"] {
        let Ok(listener) = TcpListener::bind(any_port(ip)) else {
            continue;
        };
        let there = listener.local_addr().unwrap();
        let sid = driver.connect(there).unwrap();
        let (peer, from) = listener.accept().unwrap();
        let event = driver.await_event(EventKind::StreamConnected, sid);
        assert_eq!(event.code.get(), 0);
        assert_eq!(endpoints(&driver, sid), (from, there));
        drop(peer);
        close(&driver, sid, false).unwrap();
        assert_eq!(close(&driver, sid, false), Err(Status::InvalidHandle));
    }
}

#[test]
fn a_connection_uses_the_requested_source_address() {
    let driver = Driver::start();
    let listener = TcpListener::bind(any_port("127.0.0.1")).unwrap();
    let free = TcpListener::bind(any_port("127.0.0.3"))
        .unwrap()
        .local_addr()
        .unwrap();
    let arguments = Connect {
        remote: listener.local_addr().unwrap().into(),
        local: free.into(),
        ..Connect::default()
    };
    let sid = driver.create(Opcode::StreamConnect, &arguments).unwrap();
    let (_peer, from) = listener.accept().unwrap();
    assert_eq!(from, free);
    driver.await_event(EventKind::StreamConnected, sid);
}

/// Makes the kernel answer with RST.
fn reset(peer: TcpStream) {
    let no_linger = std::time::Duration::ZERO;
    rustix::net::sockopt::set_socket_linger(&peer, Some(no_linger)).unwrap();
}

#[test]
fn a_reset_ends_the_receive_with_its_errno() {
    let driver = Driver::start();
    let (sid, peer) = connected(&driver);
    receive(&driver, sid, 20).unwrap();
    reset(peer);
    let event = driver.await_event(EventKind::StreamReceived, sid);
    assert_eq!(
        (event.code.get(), event.data.get()),
        (errno(rustix::io::Errno::CONNRESET), 0)
    );
}

#[test]
fn an_orderly_close_sends_fin_after_the_bytes() {
    let driver = Driver::start();
    let (sid, mut peer) = connected(&driver);
    send(&driver, sid, b"last words").unwrap();
    // Unread input would make TCP discard the last bytes.
    peer.write_all(b"never read").unwrap();
    close(&driver, sid, false).unwrap();
    let mut received = Vec::new();
    peer.read_to_end(&mut received).unwrap();
    assert_eq!(received, b"last words");
    wait_for("the descriptor's end", || {
        (driver.device.core().descriptor_numbers().len() == 2).then_some(())
    });
}

#[test]
fn an_abort_sends_rst() {
    let driver = Driver::start();
    let (sid, mut peer) = connected(&driver);
    close(&driver, sid, true).unwrap();
    let error = peer.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(driver.device.core().descriptor_numbers().len(), 2);
}

#[test]
fn a_listener_delivers_its_connections() {
    let driver = Driver::start();
    let (lid, port) = driver.listen(any_port("127.0.0.1"), 8).unwrap();
    let peer = TcpStream::connect((LOCALHOST, port)).unwrap();
    let event = driver.await_event(EventKind::StreamAccepted, lid);
    let sid = event.data.get() as u32;
    assert_eq!(
        endpoints(&driver, sid),
        (peer.peer_addr().unwrap(), peer.local_addr().unwrap())
    );
    driver.on(Opcode::StreamUnlisten, lid).unwrap();
    assert_eq!(
        TcpStream::connect((LOCALHOST, port)).unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused
    );
    // The accepted connection still works.
    send(&driver, sid, b"still here").unwrap();
    let mut received = [0; 10];
    (&peer).read_exact(&mut received).unwrap();
}

#[test]
fn listening_everywhere_takes_ipv4_and_ipv6() {
    let driver = Driver::start();
    let (lid, port) = driver.listen(any_port("::"), 8).unwrap();
    for ip in ["127.0.0.1", "::1"] {
        let there = SocketAddr::new(ip.parse().unwrap(), port);
        let Ok(peer) = TcpStream::connect(there) else {
            assert_eq!(ip, "::1", "no IPv6 here");
            continue;
        };
        let event = driver.await_event(EventKind::StreamAccepted, lid);
        let (local, remote) = endpoints(&driver, event.data.get() as u32);
        assert_eq!((local, remote), (there, peer.local_addr().unwrap()));
    }
    // A port with a listener is in use; a port with closing connections only is not.
    for place in ["0.0.0.0", "::", "127.0.0.1"] {
        let taken = driver.listen(SocketAddr::new(place.parse().unwrap(), port), 1);
        assert_eq!(taken, Err(Status::AddressInUse), "{place}");
    }
    driver.on(Opcode::StreamUnlisten, lid).unwrap();
    driver.listen(SocketAddr::new(LOCALHOST, port), 1).unwrap();
}

#[test]
fn listening_on_ipv6_alone_leaves_the_port_to_ipv4() {
    let driver = Driver::start();
    let (ipv4, port) = driver.listen(any_port("0.0.0.0"), 8).unwrap();
    let everywhere = Listen {
        local: SocketAddr::new("::".parse().unwrap(), port).into(),
        backlog: 8.into(),
        traffic_class: 0.into(),
    };
    let listen_at = |arguments: &Listen| -> Result<Listening, Status> {
        Ok(driver.command(Opcode::StreamListen, arguments)?.result())
    };
    assert_eq!(listen_at(&everywhere).err(), Some(Status::AddressInUse));
    let alone = Listen {
        traffic_class: listen::IPV6_ONLY.into(),
        ..everywhere
    };
    let ipv6 = match listen_at(&alone) {
        // A host without IPv6.
        Err(Status::InvalidArgument | Status::AddressNotAvailable) => return,
        listening => listening.unwrap(),
    };
    assert_eq!(u32::from(port), ipv6.port.get());
    for (ip, lid) in [("127.0.0.1", ipv4), ("::1", ipv6.lid.get())] {
        let _peer = TcpStream::connect((ip.parse::<IpAddr>().unwrap(), port)).unwrap();
        driver.await_event(EventKind::StreamAccepted, lid);
    }
    let nonsense = Listen {
        traffic_class: 1024.into(),
        ..everywhere
    };
    assert_eq!(listen_at(&nonsense).err(), Some(Status::InvalidArgument));
}

/// A peer that connects repeatedly cannot make the device grow: connections beyond the backlog wait
/// in the kernel.
#[test]
fn connections_the_driver_does_not_take_are_bounded() {
    let driver = Driver::start();
    let (lid, port) = driver.listen(any_port("127.0.0.1"), 2).unwrap();
    let there = SocketAddr::new(LOCALHOST, port);
    let _peers: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(there).unwrap()).collect();
    let first = driver.await_event(EventKind::StreamAccepted, lid);
    driver.await_event(EventKind::StreamAccepted, lid);
    // The same thread also serves a second listener, though the connections of the first one wait.
    let (other, other_port) = driver.listen(any_port("127.0.0.1"), 2).unwrap();
    let _other_peer = TcpStream::connect((LOCALHOST, other_port)).unwrap();
    driver.await_event(EventKind::StreamAccepted, other);
    assert!(driver.event().is_none());
    // An accepted connection makes room for another.
    endpoints(&driver, first.data.get() as u32);
    driver.await_event(EventKind::StreamAccepted, lid);
}

#[test]
fn a_stream_is_attached_once_and_only_when_idle() {
    let driver = Driver::start();
    let end = End::new(&driver);
    let (sid, _peer) = connected(&driver);
    receive(&driver, sid, 4).unwrap();
    assert_eq!(driver.attach(sid, &end.qp, true), Err(Status::WrongState));
    (&_peer).write_all(b"4444").unwrap();
    driver.await_event(EventKind::StreamReceived, sid);
    let cq = driver.cq(1);
    let not_ready = driver.qp(end.pd, &cq, &cq);
    assert_eq!(driver.attach(sid, &not_ready, true), Err(Status::WrongState));
    driver.attach(sid, &end.qp, true).unwrap();
    assert_eq!(driver.attach(sid, &end.qp, true), Err(Status::InvalidHandle));
    let (other, _other_peer) = connected(&driver);
    assert_eq!(driver.attach(other, &end.qp, true), Err(Status::WrongState));
    // The stream still exists after the refusal.
    send(&driver, other, b"well").unwrap();
}

/// A guest cannot connect to services of its host.
#[test]
fn a_confined_device_stays_within_its_addresses() {
    let table = |ip: [u8; 4]| DeviceAddress {
        ip: ip.into(),
        scope: 0,
        prefix_len: 8,
    };
    let driver = Driver::start_with(ModelConfig {
        addresses: vec![table([127, 0, 0, 5]), table([127, 0, 0, 6])],
        reach: Reach::Confined {
            host: Vec::new(),
            allow: Network::parse("127.0.0.9").into_iter().collect(),
        },
        ..config()
    });
    let on_host = TcpListener::bind(any_port("127.0.0.1")).unwrap();
    assert_eq!(driver.connect(on_host.local_addr().unwrap()), Err(Status::Denied));
    let allowed = TcpListener::bind(any_port("127.0.0.9")).unwrap();
    let sid = driver.connect(allowed.local_addr().unwrap()).unwrap();
    let (_peer, from) = allowed.accept().unwrap();
    assert_eq!(
        from.ip().to_string(),
        "127.0.0.5",
        "connections leave from an address of the table"
    );
    driver.await_event(EventKind::StreamConnected, sid);
    let elsewhere = Connect {
        remote: allowed.local_addr().unwrap().into(),
        local: Endpoint::from(any_port("127.0.0.1")),
        ..Connect::default()
    };
    assert_eq!(
        driver.create(Opcode::StreamConnect, &elsewhere),
        Err(Status::Denied)
    );
    assert_eq!(driver.listen(any_port("127.0.0.1"), 1), Err(Status::Denied));
    // The wildcard address means every address of the table.
    let (lid, port) = driver.listen(any_port("::"), 4).unwrap();
    assert!(TcpStream::connect((LOCALHOST, port)).is_err());
    for ip in [[127, 0, 0, 5], [127, 0, 0, 6]] {
        let _peer = TcpStream::connect((IpAddr::from(ip), port)).unwrap();
        driver.await_event(EventKind::StreamAccepted, lid);
    }
}

#[test]
fn descriptors_are_high_and_none_leaks() {
    let driver = Driver::start();
    let open = || driver.device.core().descriptor_numbers().len();
    assert_eq!(open(), 2);
    for round in 0..20 {
        let (lid, port) = driver.listen(any_port("127.0.0.1"), 4).unwrap();
        let mut peer = TcpStream::connect((LOCALHOST, port)).unwrap();
        let accepted = driver.await_event(EventKind::StreamAccepted, lid);
        let (sid, other) = connected(&driver);
        assert_eq!(open(), 5);
        driver.on(Opcode::StreamUnlisten, lid).unwrap();
        close(&driver, sid, round % 2 == 0).unwrap();
        close(&driver, accepted.data.get() as u32, false).unwrap();
        let mut nothing = Vec::new();
        peer.read_to_end(&mut nothing).unwrap();
        drop((peer, other));
        wait_for("all of them closed", || (open() == 2).then_some(()));
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.current.is_none_or(|n| n >= 1024) {
        assert!(
            driver
                .device
                .core()
                .descriptor_numbers()
                .iter()
                .all(|fd| *fd >= 512)
        );
    }
}

/// In a child after fork the device is closed and does nothing, whatever locks its threads held.
#[test]
fn an_abandoned_device_has_no_descriptors_and_does_nothing() {
    let driver = Driver::start();
    let (_sid, peer) = connected(&driver);
    let core = driver.device.core();
    let numbers = core.descriptor_numbers();
    assert_eq!(numbers.len(), 3);
    // The lock is held by a thread that does not exist in the child.
    let held = core.registers();
    // SAFETY: the child makes system calls and touches atomics, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        driver.device.abandon_in_child();
        driver.device.progress(0);
        driver.device.bar0_write(0x30, 1);
        driver.device.doorbell(1, 0, 1 << 56);
        driver.device.shutdown();
        // SAFETY: asks about numbers only.
        let closed = |fd: &i32| unsafe { libc::fcntl(*fd, libc::F_GETFD) } == -1;
        let code = i32::from(!numbers.iter().all(closed));
        // SAFETY: ends the child here, running nothing else.
        unsafe { libc::_exit(code) };
    }
    drop(held);
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    // The parent's device still works.
    send(&driver, _sid, b"alive").unwrap();
    let mut received = [0; 5];
    (&peer).read_exact(&mut received).unwrap();
}

#[test]
fn a_lent_thread_receives_and_the_device_works_without_it() {
    let driver = Driver::start();
    let (lid, port) = driver.listen(any_port("127.0.0.1"), 64).unwrap();
    let there = SocketAddr::new(LOCALHOST, port);
    let timeout = Duration::from_secs(60);
    let quiet = eventfd(0, EventfdFlags::empty()).unwrap();
    let mut callers = Vec::new();
    for _ in 0..20 {
        let connecting = std::thread::spawn(move || TcpStream::connect(there).unwrap());
        let mut event = None;
        let came = driver.device.lend(timeout, quiet.as_fd(), &mut || {
            event = event.or_else(|| driver.event());
            event.is_some()
        });
        assert!(came);
        let event = event.expect("what it waited for");
        assert_eq!(EventKind::from_raw(event.kind), Some(EventKind::StreamAccepted));
        callers.push(connecting.join().unwrap());
    }
    // The device does not use the thread after `lend` returned, with or without the event.
    for vain in [false, true] {
        if vain {
            assert!(!driver.device.lend(Duration::ZERO, quiet.as_fd(), &mut || false));
        }
        callers.push(TcpStream::connect(there).unwrap());
        driver.await_event(EventKind::StreamAccepted, lid);
    }
}

#[test]
fn a_lent_thread_is_notified_of_work_by_others() {
    let driver = Driver::start();
    let told = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let (said, received) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            wait_for("it to wait", || received.load(Ordering::SeqCst).then_some(()));
            said.store(true, Ordering::SeqCst);
            rustix::io::write(&told, &1u64.to_ne_bytes()).unwrap();
        });
        assert!(
            driver
                .device
                .lend(Duration::from_secs(60), told.as_fd(), &mut || {
                    received.store(true, Ordering::SeqCst);
                    said.load(Ordering::SeqCst)
                })
        );
    });
}

/// Marker positions count from the begin of full operation, in each direction separately,
/// regardless of the streaming data and start-up frames before it.
#[test]
fn mpa_s_17_full_operation_begins_after_streaming_data() {
    const STREAMING: [usize; 2] = [101, 37];
    let driver = Driver::start();
    let mut end = End::new(&driver);
    let (sid, mut peer) = connected(&driver);
    // Before full operation: streaming data, and a start-up frame.
    peer.write_all(&[b'x'; STREAMING[0]]).unwrap();
    peer.write_all(b"MPA ID Req Frame\xc0\x01\0\0").unwrap();
    let buffer = receive(&driver, sid, STREAMING[0] as u32).unwrap();
    driver.await_event(EventKind::StreamReceived, sid);
    assert_eq!(driver.arena.read(buffer, STREAMING[0]), [b'x'; STREAMING[0]]);
    let frame = receive(&driver, sid, 20).unwrap();
    driver.await_event(EventKind::StreamReceived, sid);
    assert_eq!(driver.arena.read(frame, 20), b"MPA ID Req Frame\xc0\x01\0\0");
    send(&driver, sid, &[b'y'; STREAMING[1]]).unwrap();
    send(&driver, sid, b"MPA ID Rep Frame\xc0\x01\0\0").unwrap();
    let mut before = [0; STREAMING[1] + 20];
    peer.read_exact(&mut before).unwrap();
    assert_eq!(&before[STREAMING[1]..], b"MPA ID Rep Frame\xc0\x01\0\0");

    // A Send of 1,000 bytes each way: markers at 0, 512 and 1,024.
    let ulpdu = |payload: &[u8]| {
        let header = [0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
        [&header[..], payload].concat()
    };
    let mut framed = vec![0; 2048];
    let len = marker::emit(0, &ulpdu(&[7; 1000]), CrcMode::On, &mut framed);
    end.qp.post_recv(&driver, 1, &[end.region.sge(0, 2000)]);
    let flags = attach::CRC | attach::MARKERS_TX | attach::MARKERS_RX;
    driver.attach_with(sid, &end.qp, flags).unwrap();
    peer.write_all(&framed[..len]).unwrap();
    let received = end.recv_cq.await_idly();
    assert_cqe(&received, 1, WcStatus::Success);
    assert_eq!(received.byte_len.get(), 1000);
    assert_eq!(driver.arena.read(end.region.iova, 1000), [7; 1000]);

    end.qp.post_send(&driver, 2, &[end.region.sge(0, 1000)]);
    assert_cqe(&end.send_cq.await_idly(), 2, WcStatus::Success);
    let mut sent = vec![0; len];
    peer.read_exact(&mut sent).unwrap();
    assert_eq!(sent, framed[..len]);
}
