//! Sockets of streams and of listeners: descriptors and options.

use super::*;

/// The next connection, which may still be in progress when its client has connected.
fn taken(listener: &mut dyn Listener) -> Box<dyn Stream> {
    crate::testing::mock::wait_for("a call", || listener.accept().unwrap())
}

#[test]
fn a_connection_waits_for_a_free_descriptor() {
    let tcp = Tcp {
        descriptors: Descriptors::new(2, None),
        same_host: None,
    };
    let mut listener = tcp.listen("127.0.0.1:0".parse().unwrap(), 8, 0, false).unwrap();
    let there = listener.local();
    let call = || std::net::TcpStream::connect(there).unwrap();
    let _callers = [call(), call()];
    let first = taken(&mut *listener);
    assert_eq!(listener.accept().map(drop), Err(Errno::MFILE));
    assert_eq!(tcp.connect(there, None, 0).map(drop), Err(Errno::MFILE));
    drop(first);
    // It was kept.
    taken(&mut *listener);
}

#[test]
fn streams_of_a_listener_have_its_traffic_class_and_options() {
    let tcp = Tcp {
        descriptors: Descriptors::new(16, None),
        same_host: None,
    };
    for (local, client) in [
        ("127.0.0.1:0", "127.0.0.1"),
        ("[::]:0", "127.0.0.1"),
        ("[::]:0", "::1"),
    ] {
        let mut listener = tcp.listen(local.parse().unwrap(), 1, 72, false).unwrap();
        let there = SocketAddr::new(client.parse().unwrap(), listener.local().port());
        let _caller = std::net::TcpStream::connect(there).unwrap();
        let accepted = taken(&mut *listener);
        let socket = accepted.descriptor().unwrap();
        let class = match client {
            "::1" => sockopt::ipv6_tclass(socket).unwrap(),
            _ => sockopt::ip_tos(socket).unwrap().into(),
        };
        assert_eq!(class, 72, "{local} connected from {client}");
        assert!(sockopt::tcp_nodelay(socket).unwrap());
        assert!(sockopt::socket_keepalive(socket).unwrap());
    }
}

#[test]
fn a_stream_probes_its_peer_until_it_is_stopped() {
    let tcp = Tcp {
        descriptors: Descriptors::new(16, None),
        same_host: None,
    };
    let mut listener = tcp.listen("127.0.0.1:0".parse().unwrap(), 1, 0, false).unwrap();
    let caller = std::net::TcpStream::connect(listener.local()).unwrap();
    let mut accepted = taken(&mut *listener);
    let times = |stream: &dyn Stream| {
        let socket = stream.descriptor().unwrap();
        let idle = sockopt::tcp_keepidle(socket).unwrap();
        let interval = sockopt::tcp_keepintvl(socket).unwrap();
        (idle, interval, sockopt::tcp_keepcnt(socket).unwrap())
    };
    let usual = times(&*accepted);
    let second = Duration::from_secs(1);
    for interval in [second, second * 7] {
        accepted.probe_peer(Probing::Every(interval));
        assert_eq!(times(&*accepted), (interval, interval, 127));
    }
    accepted.probe_peer(Probing::Usual);
    assert_eq!(times(&*accepted), usual);
    accepted.send_bytes(b"x").unwrap();
    // The peer's system acknowledges, whatever its program does.
    crate::testing::mock::wait_for("an acknowledgement", || {
        let answers = accepted.answers().unwrap();
        (answers.unacknowledged == 0).then_some(answers)
    });
    drop(caller);
}
