//! Sockets of streams and of listeners: descriptors and options.

use super::*;

/// The next connection, which may still be in progress when its client has connected.
fn taken(listener: &mut dyn Listener) -> Box<dyn Stream> {
    crate::mock::wait_for("a call", || listener.accept().unwrap())
}

#[test]
fn a_connection_waits_for_a_free_descriptor() {
    let tcp = Tcp {
        descriptors: Descriptors::new(2, None),
        liveness: Duration::ZERO,
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
        liveness: Duration::from_secs(80),
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
        let times = (sockopt::tcp_keepidle(socket), sockopt::tcp_keepintvl(socket));
        assert_eq!(times, (Ok(Duration::from_secs(40)), Ok(Duration::from_secs(10))));
        assert_eq!(sockopt::tcp_keepcnt(socket), Ok(4));
    }
}
