//! Ids for datagrams: both ends find each other's queue pairs by messages.

use super::*;
use crate::qp_attr::QpMask;
use ud_net::Ud;
use urnic_config::Identity;
use urnic_wire::mad::{
    IpAddressing, MAD_LEN, Mad, Message, REPLY_PRIVATE_DATA, REQUEST_PRIVATE_DATA, ServiceReply,
    ServiceRequest, ServiceStatus, parse, service_id,
};
use urnic_wire::roce::DEFAULT_PKEY;

const PS_UDP: u16 = 0x0111;
const UDP_QKEY: u32 = 0x0123_4567;
const REQUEST: u32 = 4;
const UNREACHABLE: u32 = 7;
const ESTABLISHED: u32 = 9;

fn roce() -> Config {
    Config {
        identity: Identity::Roce,
        ..Config::default()
    }
}

fn pair() -> Net {
    Net::new(&[roce(), roce()])
}

/// Takes the next event of a listener, which must be a request: the new id and its private data.
fn request(net: &mut Net, channel: u64) -> (u32, Vec<u8>) {
    let event = net.event(1, channel).expect("the channel has no event");
    assert_eq!((event.event, event.uid, event.status), (REQUEST, 100, 0));
    let param = event.datagrams();
    // The peer's queue pair is not known before its first datagram.
    assert_eq!((param.qp_num, param.qkey, param.address.is_global), (0, 0, 0));
    let len = usize::from(param.private_data_len);
    (event.id, param.private_data[..len].to_vec())
}

/// A request that a stranger sends to the service at `port`.
fn stranger(request_id: u32, port: u16) -> Mad {
    let mut private_data = [0; REQUEST_PRIVATE_DATA];
    let addressing = IpAddressing {
        source_port: 9,
        source: [203, 0, 113, 7].into(),
        destination: [127, 0, 0, 1].into(),
    };
    addressing.emit(&mut private_data);
    Mad {
        transaction_id: 1,
        message: Message::Request(ServiceRequest {
            request_id,
            pkey: DEFAULT_PKEY,
            service_id: service_id(PS_UDP, port),
            private_data,
        }),
    }
}

fn bytes(mad: &Mad) -> [u8; MAD_LEN] {
    let mut bytes = [0; MAD_LEN];
    mad.emit(&mut bytes);
    bytes
}

#[test]
fn cmu_03_a_lookup_gives_both_programs_what_the_kernel_gives() {
    let mut net = pair();
    let (at, listener) = net.listen_for_datagrams(1, 7471, 0);
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b"hello"));
    let (id, data) = request(&mut net, at);
    // All that a request has room for, after the addresses.
    assert_eq!((&data[..5], data.len()), (&b"hello"[..], 180));
    let addresses = net.addresses(1, (at, id)).unwrap();
    assert_eq!(addresses.local.unwrap().to_string(), "127.0.0.1:7471");
    let port = net.port_of(0, asker);
    assert_eq!(addresses.remote.unwrap().to_string(), format!("127.0.0.1:{port}"));
    assert_eq!(addresses.node_guid, 77);
    net.accept(1, at, id, 200, parameters(9, 0, 0, b"welcome"));
    let event = net.event(0, asker.0).expect("an event");
    assert_eq!(
        (event.uid, event.id, event.event, event.status),
        (5, asker.1, ESTABLISHED, 0)
    );
    let param = event.datagrams();
    assert_eq!((param.qp_num, param.qkey), (9, UDP_QKEY));
    assert_eq!(
        (&param.private_data[..7], param.private_data_len),
        (&b"welcome"[..], 136)
    );
    let address = param.address;
    assert_eq!((address.is_global, address.port, address.sgid_index), (1, 1, 3));
    assert_eq!(address.dgid, OWN_GID);
    // The accepting side has no event, and there is nothing to disconnect.
    assert!(net.take_events(1, at).is_empty());
    for (side, (channel, id)) in [(0, asker), (1, (at, id)), (1, (at, listener))] {
        net.at(side, |engine, world| engine.disconnect(world, channel, id))
            .unwrap();
    }
    assert!(net.take_events(0, asker.0).is_empty() && net.take_events(1, at).is_empty());
    net.finish();
}

#[test]
fn cmu_04_a_refusal_and_a_missing_service_are_unreachable() {
    let mut net = pair();
    let (at, _) = net.listen_for_datagrams(1, 7471, 0);
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    let (id, _) = request(&mut net, at);
    net.at(1, |engine, world| engine.reject(world, at, id, b"no"))
        .unwrap();
    let event = net.event(0, asker.0).unwrap();
    assert_eq!((event.event, event.status), (UNREACHABLE, 2));
    assert_eq!(&event.datagrams().private_data[..2], b"no");
    // An id that is destroyed without an answer refuses, too.
    let asker = net.ready_for_datagrams(0, 7471, 6);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    let (id, _) = request(&mut net, at);
    net.at(1, |engine, world| engine.destroy(world, at, id)).unwrap();
    assert_eq!(net.take_events(0, asker.0), [(6, asker.1, UNREACHABLE, 2)]);
    // A port of another id, which never listens.
    let other = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 7, PS_UDP).unwrap();
        let (local, remote) = ("127.0.0.1:7472", "127.0.0.1:7473");
        engine
            .bind(world, channel, id, CmAddress::Ip(local.parse().unwrap()))
            .unwrap();
        engine
            .resolve_address(world, channel, id, None, CmAddress::Ip(remote.parse().unwrap()))
            .unwrap();
        (channel, id)
    });
    assert_eq!(net.take_events(1, other.0), [(7, other.1, 0, 0)]);
    let asker = net.ready_for_datagrams(0, 7472, 8);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    assert_eq!(net.take_events(0, asker.0), [(8, asker.1, UNREACHABLE, 1)]);
    net.finish();
}

#[test]
fn cmu_05_requests_are_repeated_until_the_time_is_up() {
    let mut net = pair();
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    assert_eq!(net.wire.borrow().ud.sent, 1);
    net.advance(Duration::from_millis(249));
    assert_eq!(net.wire.borrow().ud.sent, 1);
    for (time, sent) in [(1, 2), (500, 3), (1000, 4), (2000, 5), (4000, 6)] {
        net.advance(Duration::from_millis(time));
        assert_eq!(net.wire.borrow().ud.sent, sent, "{time}");
    }
    assert!(net.take_events(0, asker.0).is_empty());
    net.advance(Config::default().mpa.startup_timeout_initiator);
    assert_eq!(
        net.take_events(0, asker.0),
        [(5, asker.1, UNREACHABLE, TIMED_OUT)]
    );
    assert_eq!(net.engines[0].deadline(), None);
    net.finish();
}

#[test]
fn a_lost_request_or_reply_is_repaired() {
    for lost in [[true, false], [false, true]] {
        let mut net = pair();
        let (at, _) = net.listen_for_datagrams(1, 7471, 0);
        let asker = net.ready_for_datagrams(0, 7471, 5);
        net.wire.borrow_mut().ud.lost = lost;
        net.connect(0, asker, parameters(3, 0, 0, b""));
        if lost[0] {
            assert!(net.take_events(1, at).is_empty());
            net.wire.borrow_mut().ud.lost = [false; 2];
            net.advance(Duration::from_millis(250));
        }
        let (id, _) = request(&mut net, at);
        // A repetition before the answer makes no second id.
        net.advance(Duration::from_millis(500));
        assert!(net.take_events(1, at).is_empty());
        net.accept(1, at, id, 200, parameters(9, 0, 0, b""));
        if lost[1] {
            assert!(net.take_events(0, asker.0).is_empty());
            net.wire.borrow_mut().ud.lost = [false; 2];
            net.advance(Duration::from_secs(4));
        }
        assert_eq!(net.take_events(0, asker.0), [(5, asker.1, ESTABLISHED, 0)]);
        assert!(net.take_events(1, at).is_empty());
        net.finish();
    }
}

#[test]
fn a_program_between_bind_and_listen_gets_the_request_later() {
    let mut net = pair();
    let (at, listener) = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, PS_UDP).unwrap();
        let local = CmAddress::Ip("0.0.0.0:7471".parse().unwrap());
        engine.bind(world, channel, id, local).unwrap();
        (channel, id)
    });
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    assert!(net.take_events(0, asker.0).is_empty());
    net.at(1, |engine, world| engine.listen(world, at, listener, 0))
        .unwrap();
    net.advance(Duration::from_millis(250));
    request(&mut net, at);
    net.finish();
}

#[test]
fn cmu_06_a_flood_of_requests_makes_no_more_ids_than_the_backlog() {
    let mut net = pair();
    let (at, _) = net.listen_for_datagrams(1, 7471, 3);
    for request_id in 0..1000 {
        net.inject(1, 7471, &bytes(&stranger(request_id, 7471)));
    }
    assert_eq!(net.engines[1].ids.len(), 4);
    // The program takes one, so that there is room for one more.
    request(&mut net, at);
    for request_id in 2000..2010 {
        net.inject(1, 7471, &bytes(&stranger(request_id, 7471)));
    }
    assert_eq!(net.engines[1].ids.len(), 5);
    net.finish();
}

#[test]
fn cmu_07_only_the_queried_host_can_answer() {
    let mut net = pair();
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    let asked = parse(&net.wire.borrow().ud.last).unwrap();
    let Message::Request(of_asker) = asked.message else {
        panic!("{asked}");
    };
    let reply = |transaction_id, request_id| {
        bytes(&Mad {
            transaction_id,
            message: Message::Reply(ServiceReply {
                request_id,
                status: ServiceStatus::VALID,
                qpn: 9,
                service_id: of_asker.service_id,
                qkey: UDP_QKEY,
                private_data: [0; REPLY_PRIVATE_DATA],
            }),
        })
    };
    let port = net.common_port(0);
    // From another host; then with another transaction, and another request.
    net.inject(0, port, &reply(asked.transaction_id, of_asker.request_id));
    for forged in [
        reply(asked.transaction_id ^ 1, of_asker.request_id),
        reply(asked.transaction_id, of_asker.request_id ^ 1),
    ] {
        net.inject_from("127.0.0.1:7471", 0, port, &forged);
    }
    assert!(net.take_events(0, asker.0).is_empty());
    let right = reply(asked.transaction_id, of_asker.request_id);
    net.inject_from("127.0.0.1:7471", 0, port, &right);
    assert_eq!(net.take_events(0, asker.0), [(5, asker.1, ESTABLISHED, 0)]);
    // A reply that comes twice has no effect.
    net.inject_from("127.0.0.1:7471", 0, port, &right);
    assert!(net.take_events(0, asker.0).is_empty());
    net.finish();
}

#[test]
fn cmu_08_the_attributes_of_a_queue_pair_have_the_q_key() {
    let mut net = pair();
    let (channel, id) = net.ready_for_datagrams(0, 7471, 5);
    net.at(0, |engine, world| {
        let attributes = engine.qp_attributes(world, channel, id, 1).unwrap();
        let mask = QpMask::STATE | QpMask::PKEY_INDEX | QpMask::PORT | QpMask::QKEY;
        assert_eq!(attributes.mask, mask.bits());
        assert_eq!(
            (attributes.port, attributes.qkey, attributes.state),
            (1, UDP_QKEY, 1)
        );
        let bound_to_any = engine.create(channel, 6, PS_UDP).unwrap();
        let any = CmAddress::Ip("0.0.0.0:0".parse().unwrap());
        engine.bind(world, channel, bound_to_any, any).unwrap();
        let refused = engine.qp_attributes(world, channel, bound_to_any, 1);
        assert_eq!(refused.map(|_| ()), Err(Errno::INVAL));
    });
    net.finish();
}

#[test]
fn a_peer_with_another_q_key_is_an_error_of_its_address() {
    let mut net = pair();
    let (channel, id) = net.ready_for_datagrams(0, 7471, 5);
    net.at(0, |engine, world| engine.qp_attributes(world, channel, id, 1))
        .unwrap();
    net.connect(0, (channel, id), parameters(3, 0, 0, b""));
    let asked = parse(&net.wire.borrow().ud.last).unwrap();
    let Message::Request(of_asker) = asked.message else {
        panic!("{asked}");
    };
    let reply = Mad {
        message: Message::Reply(ServiceReply {
            request_id: of_asker.request_id,
            status: ServiceStatus::VALID,
            qpn: 9,
            service_id: of_asker.service_id,
            qkey: 77,
            private_data: [0; REPLY_PRIVATE_DATA],
        }),
        ..asked
    };
    let port = net.common_port(0);
    net.inject_from("127.0.0.1:7471", 0, port, &bytes(&reply));
    assert_eq!(net.take_events(0, channel), [(5, id, 1, -22)]);
    net.finish();
}

#[test]
fn private_data_beyond_the_messages_is_refused() {
    let mut net = pair();
    let (at, _) = net.listen_for_datagrams(1, 7471, 0);
    let (channel, id) = net.ready_for_datagrams(0, 7471, 5);
    let connect = |net: &mut Net, len: usize| {
        let parameters = parameters(3, 0, 0, &vec![1; len]);
        net.at(0, |engine, world| engine.connect(world, channel, id, parameters))
    };
    assert_eq!(connect(&mut net, 181), Err(Errno::INVAL));
    assert_eq!(connect(&mut net, 180), Ok(()));
    net.run();
    let (child, data) = request(&mut net, at);
    assert_eq!(data, [1; 180]);
    let accept = |net: &mut Net, len: usize| {
        let parameters = parameters(9, 0, 0, &vec![2; len]);
        net.at(1, |engine, world| {
            engine.accept(world, at, child, 200, Some(parameters))
        })
    };
    assert_eq!(accept(&mut net, 137), Err(Errno::INVAL));
    assert_eq!(accept(&mut net, 136), Ok(()));
    assert_eq!(accept(&mut net, 136), Err(Errno::INVAL));
    net.run();
    assert_eq!(net.take_events(0, channel), [(5, id, ESTABLISHED, 0)]);
    net.finish();
}

#[test]
fn ids_of_ipoib_have_no_address_of_ethernet() {
    for config in [roce(), Config::default()] {
        let mut net = Net::new(&[config]);
        let (channel, id) = net.at(0, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, 5, 0x0002).unwrap();
            let address = |text: &str| CmAddress::Ip(text.parse().unwrap());
            assert_eq!(
                engine.bind(world, channel, id, address("127.0.0.1:0")),
                Err(Errno::INVAL)
            );
            engine
                .resolve_address(world, channel, id, None, address("127.0.0.1:7471"))
                .unwrap();
            (channel, id)
        });
        assert_eq!(net.take_events(0, channel), [(5, id, 1, -22)]);
        net.finish();
    }
}

#[test]
fn an_address_of_loopback_has_a_device_and_no_address_has_none() {
    for config in [roce(), Config::default()] {
        for space in [PS_TCP, PS_UDP] {
            let mut net = Net::new(std::slice::from_ref(&config));
            net.at(0, |engine, world| {
                let channel = engine.open_channel();
                for (text, guid) in [
                    ("127.0.0.1:0", 77),
                    ("[::1]:0", 77),
                    ("0.0.0.0:0", 0),
                    ("[::]:0", 0),
                ] {
                    let id = engine.create(channel, 5, space).unwrap();
                    engine
                        .bind(world, channel, id, CmAddress::Ip(text.parse().unwrap()))
                        .unwrap();
                    let addresses = engine.addresses(world, channel, id).unwrap();
                    assert_eq!(addresses.node_guid, guid, "{text}, port space {space:#x}");
                    assert_ne!(addresses.local.unwrap().port(), 0, "{text}");
                }
            });
            net.finish();
        }
    }
}

#[test]
fn options_depend_on_the_state_and_the_port_space_as_in_a_kernel() {
    const REUSE: (u32, u32) = (0, 1);
    const ONE_FAMILY: (u32, u32) = (0, 2);
    const ACK_TIMEOUT: (u32, u32) = (0, 3);
    let (on, off) = (1i32.to_ne_bytes(), 0i32.to_ne_bytes());
    for space in [PS_TCP, PS_UDP] {
        let mut net = pair();
        net.at(0, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, 5, space).unwrap();
            let set = |engine: &mut Engine, world: &mut World<'_>, option, value: &[u8]| {
                engine.set_option(world, channel, id, option, value)
            };
            assert_eq!(set(engine, world, REUSE, &off), Ok(()));
            let timeout = set(engine, world, ACK_TIMEOUT, &[14]);
            assert_eq!(timeout.is_ok(), space == PS_TCP, "only of connections");
            let local = CmAddress::Ip("[::]:0".parse().unwrap());
            engine.bind(world, channel, id, local).unwrap();
            assert_eq!(set(engine, world, ONE_FAMILY, &on), Ok(()));
            assert_eq!(set(engine, world, REUSE, &on), Ok(()));
            assert_eq!(set(engine, world, REUSE, &off), Err(Errno::INVAL));
            engine.listen(world, channel, id, 0).unwrap();
            for option in [ONE_FAMILY, REUSE] {
                assert_eq!(set(engine, world, option, &on), Err(Errno::INVAL), "{option:?}");
            }
        });
        net.finish();
    }
}

#[test]
fn a_listener_of_one_family_has_no_service_for_the_other() {
    let mut net = pair();
    let (channel, listener) = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, PS_UDP).unwrap();
        let flag = 1i32.to_ne_bytes();
        engine.set_option(world, channel, id, (0, 2), &flag).unwrap();
        let local = CmAddress::Ip("[::]:7471".parse().unwrap());
        engine.bind(world, channel, id, local).unwrap();
        (channel, id)
    });
    net.at(1, |engine, world| engine.listen(world, channel, listener, 0))
        .unwrap();
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    assert_eq!(net.take_events(0, asker.0), [(5, asker.1, UNREACHABLE, 1)]);
    net.finish();
}

#[test]
fn the_common_port_is_one_of_those_for_queue_pairs() {
    let mut config = roce();
    config.native.port_range = Some(7471..=7473);
    let mut net = Net::new(&[config, roce()]);
    net.listen_for_datagrams(1, 7471, 0);
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    assert_eq!(net.common_port(0), 7472, "the first is in use");
    net.finish();
}

#[test]
fn two_ids_do_not_share_a_port() {
    let mut net = pair();
    net.listen_for_datagrams(0, 7471, 0);
    net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 6, PS_UDP).unwrap();
        let local = CmAddress::Ip("127.0.0.1:7471".parse().unwrap());
        assert_eq!(engine.bind(world, channel, id, local), Err(Errno::ADDRNOTAVAIL));
        // A TCP port is separate.
        let id = engine.create(channel, 7, PS_TCP).unwrap();
        assert_eq!(engine.bind(world, channel, id, local), Ok(()));
    });
    net.finish();
}

#[test]
fn a_lost_device_ends_lookups() {
    let mut net = pair();
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    net.at(0, |engine, world| engine.device_lost(world, |_| true, |_| true));
    assert_eq!(net.take_events(0, asker.0), [(5, asker.1, 11, 0)]);
    net.advance(Duration::from_secs(100));
    assert!(net.take_events(0, asker.0).is_empty());
    net.finish();
}

/// Two processes with a second device each.
fn two_devices() -> Net {
    let net = pair();
    net.wire.borrow_mut().ud.others = [vec![SECOND], vec![SECOND]];
    net
}

/// The address of the second device of each process.
const SECOND: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 9));

#[test]
fn a_listener_on_any_address_serves_at_each_device() {
    let mut net = two_devices();
    let (at, listener) = net.listen_for_datagrams(1, 7471, 0);
    for (remote, uid) in [("127.0.0.1:7471", 5), ("192.0.2.9:7471", 6)] {
        // From a common port of the device that has the address.
        let asker = net.ready_for_datagrams_to(0, remote, uid);
        net.connect(0, asker, parameters(3, 0, 0, b""));
        let (id, _) = request(&mut net, at);
        let addresses = net.addresses(1, (at, id)).unwrap();
        assert_eq!(addresses.local.unwrap().to_string(), remote);
        net.accept(1, at, id, 50, parameters(4, 0, 0, b""));
        assert_eq!(net.take_events(0, asker.0), [(uid, asker.1, ESTABLISHED, 0)]);
    }
    assert_eq!(net.engines[0].datagrams.common_ports.len(), 2);
    net.at(1, |engine, world| engine.destroy(world, at, listener))
        .unwrap();
    let left: Vec<u32> = net.wire.borrow().ud.ports.keys().copied().collect();
    let mut common: Vec<u32> = net.engines[0].datagrams.common_ports.values().copied().collect();
    common.sort_unstable();
    assert_eq!(left, common);
    net.finish();
}

#[test]
fn a_lost_device_ends_its_lookups_only() {
    let mut net = two_devices();
    let first = net.ready_for_datagrams_to(0, "127.0.0.1:7471", 5);
    let second = net.ready_for_datagrams_to(0, "192.0.2.9:7471", 6);
    for asker in [first, second] {
        net.connect(0, asker, parameters(3, 0, 0, b""));
    }
    let lost = net.engines[0].datagrams.common_ports[&1];
    net.at(0, |engine, world| {
        engine.device_lost(world, |number| number == lost, |local| local.ip() == SECOND);
    });
    assert_eq!(net.take_events(0, second.0), [(6, second.1, 11, 0)]);
    assert!(net.take_events(0, first.0).is_empty());
    assert_eq!(net.engines[0].datagrams.common_ports.len(), 1);
    let (at, _) = net.listen_for_datagrams(1, 7471, 0);
    net.advance(Duration::from_secs(1));
    request(&mut net, at);
    net.finish();
}

/// Delivers arbitrary bytes to a listener and to an id that asks.
#[test]
fn arbitrary_messages_cause_no_panic() {
    let mut net = pair();
    let (at, _) = net.listen_for_datagrams(1, 7471, 8);
    let asker = net.ready_for_datagrams(0, 7471, 5);
    net.connect(0, asker, parameters(3, 0, 0, b""));
    net.take_events(1, at);
    let port = net.common_port(0);
    let mut random = 1_u64;
    for n in 0..2000_usize {
        let mut message = bytes(&stranger(n as u32, 7471));
        for _ in 0..1 + n % 5 {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            message[(random >> 33) as usize % MAD_LEN] = (random >> 56) as u8;
        }
        let len = if n % 7 == 0 { n % MAD_LEN } else { MAD_LEN };
        net.inject(1, 7471, &message[..len]);
        net.inject(0, port, &message[..len]);
    }
    assert!(net.engines[1].ids.len() <= 2 + 8);
    net.finish();
}

mod groups {
    use super::*;

    const JOINED: u32 = 12;

    fn address(text: &str) -> CmAddress {
        CmAddress::Ip(text.parse().unwrap())
    }

    /// An id that is bound to an address.
    fn bound(net: &mut Net, channel: u64, uid: u64) -> u32 {
        net.at(0, |engine, world| {
            let id = engine.create(channel, uid, PS_UDP).unwrap();
            engine.bind(world, channel, id, address("127.0.0.1:0")).unwrap();
            id
        })
    }

    fn join(net: &mut Net, (channel, id): Ud, uid: u64, group: &str) -> Result<u32, Errno> {
        net.at(0, |engine, world| {
            engine.join(world, channel, id, uid, address(group))
        })
    }

    #[test]
    fn cmu_09_a_join_gives_the_address_of_the_group() {
        let mut net = pair();
        let channel = net.at(0, |engine, _| engine.open_channel());
        let id = bound(&mut net, channel, 5);
        for (group, dgid) in [
            ("239.0.1.1:0", "::ffff:239.0.1.1"),
            ("[ff05::114]:0", "ff05::114"),
        ] {
            let number = join(&mut net, (channel, id), 300, group).unwrap();
            let event = net.event(0, channel).unwrap();
            // The event is that of the membership, not of the id.
            assert_eq!(
                (event.uid, event.id, event.event, event.status),
                (300, number, JOINED, 0)
            );
            let param = event.datagrams();
            assert_eq!((param.qp_num, param.qkey), (0xff_ffff, UDP_QKEY));
            let dgid: std::net::Ipv6Addr = dgid.parse().unwrap();
            assert_eq!(param.address.dgid, dgid.octets());
            assert_eq!((param.address.is_global, param.address.port), (1, 1));
        }
        net.finish();
    }

    #[test]
    fn cmu_10_events_of_memberships_count_for_both() {
        let mut net = pair();
        let channel = net.at(0, |engine, _| engine.open_channel());
        let id = bound(&mut net, channel, 5);
        let taken = join(&mut net, (channel, id), 300, "239.0.1.1:0").unwrap();
        let waiting = join(&mut net, (channel, id), 301, "239.0.1.2:0").unwrap();
        assert_ne!(taken, waiting);
        assert_eq!(net.event(0, channel).unwrap().uid, 300);
        net.at(0, |engine, world| {
            assert_eq!(engine.leave(world, channel, taken), Ok(1));
            assert_eq!(engine.leave(world, channel, taken), Err(Errno::NOENT));
            // The event of the other one is discarded.
            assert_eq!(engine.leave(world, channel, waiting), Ok(0));
            assert!(engine.take_event(world, channel).is_none());
            assert_eq!(engine.destroy(world, channel, id), Ok(1));
        });
        assert!(!net.is_readable(0, channel));
        net.finish();
    }

    #[test]
    fn an_id_leaves_its_groups_when_it_is_destroyed() {
        let mut net = pair();
        let (channel, other) = net.at(0, |engine, _| (engine.open_channel(), engine.open_channel()));
        let id = bound(&mut net, channel, 5);
        // Numbers of memberships are not those of ids: an event is not taken for one about an id.
        let bystander = bound(&mut net, channel, 6);
        let numbers: Vec<u32> = (0..4)
            .map(|n| join(&mut net, (channel, id), 300 + n, "239.0.1.1:0").unwrap())
            .collect();
        assert!(numbers.contains(&bystander));
        net.at(0, |engine, world| {
            assert_eq!(engine.leave(world, other, numbers[0]), Err(Errno::INVAL));
            assert_eq!(engine.destroy(world, channel, id), Ok(0));
            assert!(engine.take_event(world, channel).is_none());
            for number in numbers {
                assert_eq!(engine.leave(world, channel, number), Err(Errno::NOENT));
            }
            assert_eq!(engine.destroy(world, channel, bystander), Ok(0));
        });
        net.finish();
    }

    #[test]
    fn joins_that_a_kernel_refuses_are_refused() {
        let mut net = pair();
        let channel = net.at(0, |engine, _| engine.open_channel());
        let id = bound(&mut net, channel, 5);
        assert_eq!(join(&mut net, (channel, id), 1, "0.0.0.0:0"), Err(Errno::INVAL));
        assert_eq!(join(&mut net, (channel, 77), 1, "239.0.1.1:0"), Err(Errno::NOENT));
        let (unbound, tcp) = net.at(0, |engine, world| {
            let unbound = engine.create(channel, 7, PS_UDP).unwrap();
            let tcp = engine.create(channel, 8, PS_TCP).unwrap();
            engine.bind(world, channel, tcp, address("127.0.0.1:0")).unwrap();
            (unbound, tcp)
        });
        for id in [unbound, tcp] {
            assert_eq!(join(&mut net, (channel, id), 1, "239.0.1.1:0"), Err(Errno::INVAL));
        }
        let routed = net.ready_for_datagrams(0, 7471, 9);
        assert_eq!(join(&mut net, routed, 1, "239.0.1.1:0"), Err(Errno::INVAL));
        let ib = net.at(0, |engine, world| {
            engine.join(world, channel, id, 1, CmAddress::Ib([1; 16]))
        });
        assert_eq!(ib, Err(Errno::INVAL));
        net.finish();
        let mut rnic = Net::pair();
        let channel = rnic.at(0, |engine, _| engine.open_channel());
        let id = bound(&mut rnic, channel, 5);
        assert_eq!(
            join(&mut rnic, (channel, id), 1, "239.0.1.1:0"),
            Err(Errno::OPNOTSUPP)
        );
        rnic.finish();
    }
}
