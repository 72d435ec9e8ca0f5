//! Listeners whose port is not that of TCP: initiators query the TCP port at the UDP port.

use super::*;
use urnic_config::{CmPorts, Identity};
use urnic_wire::mad::{
    MAD_LEN, Mad, Message, REPLY_PRIVATE_DATA, REQUEST_PRIVATE_DATA, ServiceReply, ServiceRequest,
    ServiceStatus, parse, service_id,
};
use urnic_wire::roce::DEFAULT_PKEY;

const PS_UDP: u16 = PS_DATAGRAMS[0];
const CONNECT_ERROR: u32 = 6;
const UNREACHABLE: u32 = 7;
const REJECTED: u32 = 8;
/// From the first request to the time when a silent peer's TCP port is tried.
const SILENCE: Duration = Duration::from_millis(1750);

fn config(ports: CmPorts) -> Config {
    let mut config = Config::default();
    config.cm.ports = ports;
    config
}

fn own() -> Config {
    config(CmPorts::Own)
}

fn tcp() -> Config {
    config(CmPorts::Tcp)
}

/// Initiator and listener with ports of their own.
fn pair() -> Net {
    Net::new(&[own(), own()])
}

fn ip(text: &str) -> CmAddress {
    CmAddress::Ip(text.parse().unwrap())
}

/// Creates an id of a port space on a channel of its own and binds it.
fn bound(net: &mut Net, side: usize, port_space: u16, local: &str) -> Result<(u64, u32), Errno> {
    net.at(side, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, port_space)?;
        engine.bind(world, channel, id, ip(local))?;
        Ok((channel, id))
    })
}

/// Connects to port 7471; returns the initiator.
fn begin(net: &mut Net) -> (u64, u32) {
    let initiator = net.ready(0, 7471, 5, false);
    net.at(0, |engine, world| {
        let parameters = parameters(3, 1, 1, b"hello");
        engine.connect(world, initiator.0, initiator.1, parameters)
    })
    .unwrap();
    initiator
}

/// The request of an initiator that was sent last.
fn asked(net: &Net) -> (Mad, ServiceRequest) {
    let mad = parse(&net.wire.borrow().ud.last).unwrap();
    let Message::Request(request) = mad.message else {
        panic!("{mad}");
    };
    (mad, request)
}

fn reply(asked: &(Mad, ServiceRequest), status: ServiceStatus, qpn: u32) -> [u8; MAD_LEN] {
    let mad = Mad {
        transaction_id: asked.0.transaction_id,
        message: Message::Reply(ServiceReply {
            request_id: asked.1.request_id,
            status,
            qpn,
            service_id: asked.1.service_id,
            qkey: 0,
            private_data: [0; REPLY_PRIVATE_DATA],
        }),
    };
    bytes(&mad)
}

fn bytes(mad: &Mad) -> [u8; MAD_LEN] {
    let mut bytes = [0; MAD_LEN];
    mad.emit(&mut bytes);
    bytes
}

#[test]
fn cmp_01_a_listener_leaves_the_tcp_port_to_others() {
    let mut net = pair();
    net.listen(1, 7471, 0);
    let ports: Vec<u16> = net.wire.borrow().listening();
    assert!(!ports.contains(&7471), "{ports:?}");
    // By default, with the identity of a RoCE NIC.
    let roce = Config {
        identity: Identity::Roce,
        ..Config::default()
    };
    for (config, has_it) in [(roce, false), (Config::default(), true), (tcp(), true)] {
        let mut net = Net::new(&[config.clone(), config]);
        net.listen(1, 7471, 0);
        assert_eq!(net.wire.borrow().listening().contains(&7471), has_it);
        net.finish();
    }
    net.finish();
}

#[test]
fn cmp_02_programs_see_the_number_of_the_listener_only() {
    for configs in [[own(), own()], [tcp(), own()]] {
        let mut net = Net::new(&configs);
        let (at, listener) = net.listen(1, 7471, 0);
        assert_eq!(net.port_of(1, (at, listener)), 7471);
        let initiator = begin(&mut net);
        let (id, param) = net.request(1, at);
        assert_eq!(&param.private_data[..5], b"hello");
        let child = net.addresses(1, (at, id)).unwrap();
        assert_eq!(child.local.unwrap().port(), 7471);
        assert_eq!(child.remote.unwrap().port(), net.port_of(0, initiator));
        let near = net.addresses(0, initiator).unwrap();
        assert_eq!(near.remote.unwrap().port(), 7471);
        net.accept(1, at, id, 200, parameters(9, 1, 1, &[]));
        assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 9, 0)]);
        net.finish();
    }
}

#[test]
fn cmp_03_initiators_reach_listeners_with_tcp_ports() {
    for initiator in [own(), tcp()] {
        let mut net = Net::new(&[initiator, tcp()]);
        let (at, _) = net.listen(1, 7471, 0);
        begin(&mut net);
        net.request(1, at);
        net.finish();
    }
}

#[test]
fn cmp_04_without_a_listener_an_initiator_is_rejected_at_once() {
    for initiator in [own(), tcp()] {
        let mut net = Net::new(&[initiator, own()]);
        let (channel, id) = begin(&mut net);
        assert_eq!(net.take_events(0, channel), [(5, id, REJECTED, REFUSED)]);
        assert_eq!(net.wire.borrow().ud.sent, 1);
        // The UDP port has another service.
        bound(&mut net, 1, PS_UDP, "127.0.0.1:7471").unwrap();
        bound(&mut net, 1, PS_IB, "127.0.0.1:7471").unwrap();
        let (channel, id) = begin(&mut net);
        assert_eq!(net.take_events(0, channel), [(5, id, REJECTED, REFUSED)]);
        net.finish();
    }
}

#[test]
pub(super) fn cmp_05_a_silent_peer_gets_three_queries_then_tcp() {
    let mut net = Net::new(&[own(), tcp()]);
    net.wire.borrow_mut().ud.mute = true;
    let (at, _) = net.listen(1, 7471, 0);
    begin(&mut net);
    for sent in [2, 3] {
        net.advance(Duration::from_millis(250 << (sent - 2)));
        assert_eq!(net.wire.borrow().ud.sent, sent);
    }
    net.advance(Duration::from_millis(999));
    assert!(net.event(1, at).is_none());
    net.advance(Duration::from_millis(1));
    net.request(1, at);
    assert_eq!(net.wire.borrow().ud.sent, 3);
    net.finish();
}

#[test]
fn a_silent_peer_without_a_tcp_listener_is_unreachable_in_time() {
    let mut net = pair();
    net.wire.borrow_mut().ud.mute = true;
    let (channel, id) = begin(&mut net);
    let limit = Config::default().mpa.startup_timeout_initiator;
    let mut time = Duration::ZERO;
    while time + Duration::from_millis(250) < limit {
        net.advance(Duration::from_millis(250));
        time += Duration::from_millis(250);
        assert!(net.take_events(0, channel).is_empty(), "{time:?}");
    }
    net.advance(Duration::from_millis(250));
    assert_eq!(net.take_events(0, channel), [(5, id, UNREACHABLE, TIMED_OUT)]);
    net.finish();
    // TCP refused before: that is the answer.
    let mut net = Net::new(&[tcp(), own()]);
    net.wire.borrow_mut().ud.mute = true;
    let (channel, id) = begin(&mut net);
    net.run();
    net.advance(Duration::from_millis(250));
    net.advance(Duration::from_millis(500));
    assert!(net.take_events(0, channel).is_empty());
    net.advance(Duration::from_millis(1000));
    assert_eq!(net.take_events(0, channel), [(5, id, REJECTED, REFUSED)]);
    net.finish();
}

#[test]
fn a_listener_that_was_stopped_for_seconds_is_reached() {
    let mut net = pair();
    net.wire.borrow_mut().ud.lost = [true, false];
    let (at, _) = net.listen(1, 7471, 0);
    begin(&mut net);
    for _ in 0..24 {
        net.advance(Duration::from_millis(250));
    }
    assert!(net.event(1, at).is_none());
    net.wire.borrow_mut().ud.lost = [false; 2];
    net.advance(SILENCE);
    net.advance(SILENCE);
    net.request(1, at);
    net.finish();
}

#[test]
fn cmp_06_only_the_queried_host_can_name_a_port() {
    let mut net = pair();
    net.wire.borrow_mut().ud.mute = true;
    let (channel, id) = begin(&mut net);
    net.run();
    let asked = asked(&net);
    assert_eq!(asked.1.service_id, service_id(PS_TCP, 7471));
    let port = net.common_port(0);
    net.inject(0, port, &reply(&asked, ServiceStatus::UNSUPPORTED, 0));
    let mut forged = asked;
    forged.0.transaction_id ^= 1;
    net.inject_from(
        "127.0.0.1:7471",
        0,
        port,
        &reply(&forged, ServiceStatus::UNSUPPORTED, 0),
    );
    let mut forged = asked;
    forged.1.request_id ^= 1;
    net.inject_from(
        "127.0.0.1:7471",
        0,
        port,
        &reply(&forged, ServiceStatus::UNSUPPORTED, 0),
    );
    assert!(net.take_events(0, channel).is_empty());
    net.inject_from(
        "127.0.0.1:7471",
        0,
        port,
        &reply(&asked, ServiceStatus::UNSUPPORTED, 0),
    );
    assert_eq!(net.take_events(0, channel), [(5, id, REJECTED, REFUSED)]);
    net.finish();
}

#[test]
fn cmp_07_an_answer_without_a_port_ends_the_attempt() {
    let error = |errno: Errno| -errno.raw_os_error();
    for (status, qpn, event) in [
        (ServiceStatus::VALID, 0, (CONNECT_ERROR, error(Errno::PROTO))),
        (
            ServiceStatus::VALID,
            0x1_0000,
            (CONNECT_ERROR, error(Errno::PROTO)),
        ),
        (
            ServiceStatus::VALID,
            0xff_ffff,
            (CONNECT_ERROR, error(Errno::PROTO)),
        ),
        (ServiceStatus::REJECTED, 7471, (REJECTED, REFUSED)),
        (ServiceStatus(9), 7471, (REJECTED, REFUSED)),
    ] {
        let mut net = pair();
        net.wire.borrow_mut().ud.mute = true;
        let (channel, id) = begin(&mut net);
        net.run();
        let asked = asked(&net);
        let port = net.common_port(0);
        net.inject_from("127.0.0.1:7471", 0, port, &reply(&asked, status, qpn));
        assert_eq!(net.take_events(0, channel), [(5, id, event.0, event.1)], "{qpn}");
        // A further reply has no effect.
        net.inject_from("127.0.0.1:7471", 0, port, &reply(&asked, ServiceStatus::VALID, 7));
        assert!(net.take_events(0, channel).is_empty());
        net.finish();
    }
}

#[test]
fn cmp_08_requests_for_a_port_make_no_state_and_one_answer() {
    let mut net = pair();
    net.listen(1, 7471, 1);
    let before = net.wire.borrow().ud.sent;
    for request_id in 0..1000 {
        let mad = Mad {
            transaction_id: 1,
            message: Message::Request(ServiceRequest {
                request_id,
                pkey: DEFAULT_PKEY,
                service_id: service_id(PS_TCP, 7471),
                private_data: [0; REQUEST_PRIVATE_DATA],
            }),
        };
        net.inject(1, 7471, &bytes(&mad));
    }
    // An answer is as long as a request.
    assert_eq!(net.wire.borrow().ud.sent - before, 1000);
    assert_eq!(net.engines[1].ids.len(), 1);
    assert!(net.engines[1].datagrams.inquiries.is_empty());
    net.finish();
}

#[test]
fn cmp_09_port_spaces_share_a_number_in_a_process() {
    for [first, second] in [[PS_TCP, PS_UDP], [PS_UDP, PS_TCP]] {
        let mut net = Net::new(&[
            own(),
            Config {
                identity: Identity::Roce,
                ..own()
            },
        ]);
        let one = bound(&mut net, 1, first, "0.0.0.0:7471").unwrap();
        // One port space has a number once, also in part, and other processes cannot share it.
        for (local, of_another) in [
            ("0.0.0.0:7471", Errno::ADDRNOTAVAIL),
            ("127.0.0.1:7471", Errno::ADDRINUSE),
        ] {
            let again = bound(&mut net, 1, first, local);
            assert_eq!(again.err(), Some(Errno::ADDRNOTAVAIL));
            let elsewhere = bound(&mut net, 0, PS_TCP, local);
            assert_eq!(elsewhere.err(), Some(of_another));
        }
        let other = bound(&mut net, 1, second, "0.0.0.0:7471").unwrap();
        for (channel, id) in [one, other] {
            net.at(1, |engine, world| engine.listen(world, channel, id, 0))
                .unwrap();
        }
        let at = if first == PS_TCP { one } else { other };
        begin(&mut net);
        net.request(1, at.0);
        // The number stays in use until both are gone.
        net.at(1, |engine, world| engine.close_channel(world, one.0));
        let elsewhere = bound(&mut net, 0, PS_TCP, "0.0.0.0:7471");
        assert_eq!(elsewhere.err(), Some(Errno::ADDRNOTAVAIL));
        net.at(1, |engine, world| engine.close_channel(world, other.0));
        bound(&mut net, 0, PS_TCP, "0.0.0.0:7471").unwrap();
        net.finish();
    }
}

#[test]
fn a_part_of_a_wildcard_answers_for_its_address_alone() {
    let mut net = Net::new(&[
        own(),
        Config {
            identity: Identity::Roce,
            ..own()
        },
    ]);
    let any = bound(&mut net, 1, PS_UDP, "0.0.0.0:7471").unwrap();
    let (channel, id) = bound(&mut net, 1, PS_TCP, "192.0.2.9:7471").unwrap();
    net.at(1, |engine, world| engine.listen(world, channel, id, 0))
        .unwrap();
    let initiator = begin(&mut net);
    assert_eq!(
        net.take_events(0, initiator.0),
        [(5, initiator.1, REJECTED, REFUSED)]
    );
    let (channel, id) = bound(&mut net, 1, PS_TCP, "127.0.0.1:7471").unwrap();
    net.at(1, |engine, world| engine.listen(world, channel, id, 0))
        .unwrap();
    begin(&mut net);
    net.request(1, channel);
    net.at(1, |engine, world| engine.close_channel(world, any.0));
    net.finish();
}

#[test]
fn ids_of_different_families_share_a_number() {
    let mut net = pair();
    let flag = 1i32.to_ne_bytes();
    let channels = ["0.0.0.0:3260", "[::]:3260"].map(|local| {
        net.at(1, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, 100, PS_TCP).unwrap();
            engine.set_option(world, channel, id, (0, 2), &flag).unwrap();
            engine.bind(world, channel, id, ip(local)).unwrap();
            engine.listen(world, channel, id, 0).unwrap();
            channel
        })
    });
    let (channel, id) = net.ready(0, 3260, 5, false);
    net.connect(0, (channel, id), parameters(3, 1, 1, &[]));
    assert!(net.event(1, channels[1]).is_none());
    net.request(1, channels[0]);
    net.finish();
}

#[test]
fn a_number_from_bind_is_reserved_and_shown_also_if_tcp_has_it() {
    let mut net = pair();
    let (at, _) = net.listen(1, 7471, 0);
    // Another program's TCP port, and an ephemeral one that TCP chooses.
    net.wire.borrow_mut().taken = vec![9229];
    let (channel, id) = bound(&mut net, 0, PS_TCP, "127.0.0.1:9229").unwrap();
    net.at(0, |engine, world| {
        engine.resolve_address(world, channel, id, None, ip("127.0.0.1:7471"))?;
        engine.resolve_route(world, channel, id)?;
        engine.qp_attributes(world, channel, id, 1)
    })
    .unwrap();
    let other = bound(&mut net, 1, PS_TCP, "127.0.0.1:9229");
    assert_eq!(other.err(), Some(Errno::ADDRINUSE));
    // It accepts no connection.
    assert_eq!(net.wire.borrow().listening().len(), 1);
    net.connect(0, (channel, id), parameters(3, 1, 1, &[]));
    let (child, _) = net.request(1, at);
    let remote = net.addresses(1, (at, child)).unwrap().remote;
    assert_eq!(remote.unwrap().port(), FREE_PORT);
    assert_eq!(net.port_of(0, (channel, id)), 9229);
    net.finish();
}

#[test]
fn any_port_is_one_that_udp_and_tcp_do_not_use() {
    let mut net = Net::new(&[tcp(), own()]);
    for port in 50_100..50_110 {
        net.listen(0, port, 0);
    }
    // The next UDP port is the first of these.
    while net.wire.borrow_mut().number() < 99 {}
    let own = bound(&mut net, 1, PS_TCP, "0.0.0.0:0").unwrap();
    let port = net.port_of(1, own);
    assert!(port >= 50_110 && !net.wire.borrow().listening().contains(&port));
    assert_eq!(net.engines[1].datagrams.places.len(), 1);
    net.finish();
}

#[test]
fn tcp_ports_of_listeners_are_in_the_range() {
    let mut config = own();
    config.native.port_range = Some(4000..=4001);
    let mut net = Net::new(&[own(), config]);
    net.listen(1, 7471, 0);
    net.listen(1, 7472, 0);
    assert_eq!(net.wire.borrow().listening(), [4000, 4001]);
    let third = bound(&mut net, 1, PS_TCP, "0.0.0.0:7473");
    assert_eq!(third.err(), Some(Errno::ADDRINUSE));
    // Nothing is left of it.
    assert_eq!(net.engines[1].datagrams.places.len(), 2);
    net.finish();
}

#[test]
pub(super) fn a_connection_between_bind_and_listen_waits() {
    let mut net = pair();
    let (channel, id) = bound(&mut net, 1, PS_TCP, "0.0.0.0:7471").unwrap();
    begin(&mut net);
    assert!(net.event(1, channel).is_none());
    net.at(1, |engine, world| engine.listen(world, channel, id, 0))
        .unwrap();
    net.request(1, channel);
    net.finish();
}

#[test]
fn an_id_ends_during_its_query() {
    for lost in [false, true] {
        let mut net = pair();
        net.wire.borrow_mut().ud.mute = true;
        let (channel, id) = begin(&mut net);
        net.at(0, |engine, world| {
            assert_eq!(engine.disconnect(world, channel, id), Ok(()));
            if lost {
                engine.device_lost(world, |_| true, |_| true);
            } else {
                engine.destroy(world, channel, id).unwrap();
            }
        });
        let seen: Vec<u32> = net.take_events(0, channel).iter().map(|event| event.2).collect();
        assert_eq!(seen, if lost { vec![CONNECT_ERROR, 11] } else { vec![] });
        net.advance(Duration::from_secs(30));
        assert_eq!(net.wire.borrow().ud.sent, 1);
        net.finish();
    }
}

#[test]
fn a_device_without_datagrams_has_tcp_ports() {
    let roce = Config {
        identity: Identity::Roce,
        ..Config::default()
    };
    let mut net = Net::new(&[roce.clone(), roce]);
    net.wire.borrow_mut().ud.unsupported = true;
    let (at, _) = net.listen(1, 7471, 0);
    assert_eq!(net.wire.borrow().listening(), [7471]);
    begin(&mut net);
    net.request(1, at);
    net.finish();
    let mut net = pair();
    net.wire.borrow_mut().ud.unsupported = true;
    let refused = bound(&mut net, 1, PS_TCP, "0.0.0.0:7471");
    assert_eq!(refused.err(), Some(Errno::OPNOTSUPP));
    net.finish();
}
