//! Ids, channels and events.

use proptest::prelude::*;

use super::*;
use urnic_config::Identity;

#[test]
fn destroy_returns_the_number_of_taken_events() {
    let mut net = Net::pair();
    let (channel, id) = net.ready(0, 7471, 5, false);
    net.connect(0, (channel, id), parameters(3, 1, 1, &[]));
    assert!(net.is_readable(0, channel), "the rejection is queued");
    let reported = net.at(0, |engine, world| engine.destroy(world, channel, id));
    assert_eq!(reported, Ok(2), "both resolutions; the rejection was not taken");
    assert!(!net.is_readable(0, channel));
    assert!(net.event(0, channel).is_none());
    let again = net.at(0, |engine, world| engine.destroy(world, channel, id));
    assert_eq!(again, Err(Errno::NOENT));
    net.finish();
}

#[test]
pub(super) fn destroying_a_listener_closes_its_unread_requests() {
    let mut net = Net::pair();
    let (at, listener) = net.listen(1, 7471, 0);
    let initiators: Vec<_> = (0..3).map(|n| net.ready(0, 7471, 10 + n, false)).collect();
    for (n, initiator) in initiators.iter().enumerate() {
        net.connect(0, *initiator, parameters(n as u32 + 1, 1, 1, &[]));
    }
    let (kept, _) = net.request(1, at);
    assert_eq!(
        net.at(1, |engine, world| engine.destroy(world, at, listener)),
        Ok(1)
    );
    net.accept(1, at, kept, 200, parameters(9, 1, 1, &[]));
    assert_eq!(
        net.take_events(1, at),
        [(200, kept, 9, 0)],
        "the program has taken this Request"
    );
    let ends: Vec<_> = initiators
        .iter()
        .map(|(channel, _)| net.take_events(0, *channel))
        .collect();
    assert_eq!(ends[0], [(10, initiators[0].1, 9, 0)]);
    assert_eq!(ends[1], [(11, initiators[1].1, 8, REFUSED)]);
    assert_eq!(ends[2], [(12, initiators[2].1, 8, REFUSED)]);
    net.finish();
}

#[test]
pub(super) fn the_backlog_limits_unread_requests() {
    let config = Config {
        identity: Identity::Roce,
        ..Config::default()
    };
    let mut net = Net::new(&[config.clone(), config]);
    let (at, listener) = net.listen(1, 7471, 1);
    for n in 0..3 {
        let initiator = net.ready(0, 7471, 10 + n, false);
        net.connect(0, initiator, parameters(n as u32 + 1, 1, 1, &[]));
    }
    let queued = |net: &Net| net.engines[1].channels[&at].len();
    assert_eq!(queued(&net), 1, "the others are not examined yet");
    net.request(1, at);
    net.run();
    assert_eq!(queued(&net), 2, "no Request is lost");
    net.request(1, at);
    net.request(1, at);
    assert_eq!(
        net.at(1, |engine, world| engine.destroy(world, at, listener)),
        Ok(3)
    );
    net.finish();
}

#[test]
pub(super) fn an_rnic_rejects_requests_beyond_the_backlog() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 2);
    for n in 0..5 {
        let initiator = net.ready(0, 7471, 10 + n, false);
        net.connect(0, initiator, parameters(n as u32 + 1, 1, 1, &[]));
        let events = net.take_events(0, initiator.0);
        let rejected = [(10 + n, initiator.1, 8, REFUSED)];
        assert_eq!(events, if n < 2 { vec![] } else { rejected.to_vec() });
    }
    net.request(1, at);
    let initiator = net.ready(0, 7471, 20, false);
    net.connect(0, initiator, parameters(9, 1, 1, &[]));
    assert!(net.take_events(0, initiator.0).is_empty(), "there is room again");
    net.request(1, at);
    net.request(1, at);
    net.finish();
}

#[test]
fn a_program_queues_events_of_its_own() {
    let mut net = Net::pair();
    let (channel, id) = net.ready(0, 7471, 5, false);
    let other = net.at(0, |engine, _| engine.open_channel());
    let mut write = |channel, id, event| {
        net.at(0, |engine, world| {
            engine.write_event(world, channel, id, (event, 7, 0x1122_3344_5566_7788))
        })
    };
    assert_eq!(write(channel, id, CmEvent::User as u32), Ok(()));
    assert_eq!(write(channel, id, CmEvent::Internal as u32), Ok(()));
    for event in [0, CmEvent::TimewaitExit as u32, 16, 17, 20] {
        assert_eq!(write(channel, id, event), Err(Errno::INVAL), "event {event}");
    }
    assert_eq!(
        write(other, id, 18),
        Err(Errno::INVAL),
        "it is on the other channel"
    );
    assert_eq!(write(channel, id + 1, 18), Err(Errno::NOENT));
    assert!(net.is_readable(0, channel));
    for event in [18, 19] {
        let taken = net
            .at(0, |engine, world| engine.take_event(world, channel))
            .unwrap();
        assert_eq!(
            (taken.uid, taken.id, taken.event, taken.status),
            (5, id, event, 7)
        );
        let argument = [taken.param.qp_num, taken.param.qkey];
        assert_eq!(argument, [0x5566_7788, 0x1122_3344], "low word first");
    }
    assert!(!net.is_readable(0, channel));
    let reported = net.at(0, |engine, world| engine.destroy(world, channel, id));
    assert_eq!(reported, Ok(4), "with those of the address and the route");
    net.finish();
}

#[test]
fn an_id_moves_to_another_channel_with_its_events() {
    let mut net = Net::pair();
    let (old, id) = net.ready(0, 7471, 5, false);
    net.connect(0, (old, id), parameters(3, 1, 1, &[]));
    let new = net.at(0, |engine, _| engine.open_channel());
    let wrong = net.at(0, |engine, world| engine.migrate(world, new, old, id));
    assert_eq!(wrong, Err(Errno::INVAL), "it is on the other channel");
    assert_eq!(
        net.at(0, |engine, world| engine.migrate(world, old, new, id)),
        Ok(2)
    );
    assert!(!net.is_readable(0, old) && net.is_readable(0, new));
    assert_eq!(net.take_events(0, new), [(5, id, 8, REFUSED)]);
    assert_eq!(
        net.at(0, |engine, world| engine.destroy(world, old, id)),
        Err(Errno::INVAL)
    );
    net.finish();
}

#[test]
pub(super) fn bind_takes_the_port_and_connections_wait_for_listen() {
    let mut net = Net::pair();
    let (channel, id) = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 1, PS_TCP).unwrap();
        let any = CmAddress::Ip("0.0.0.0:0".parse().unwrap());
        engine.bind(world, channel, id, any).unwrap();
        (channel, id)
    });
    let addresses = net.addresses(1, (channel, id)).unwrap();
    let port = addresses.local.unwrap().port();
    assert!(port != 0, "bind assigns the port");
    assert_eq!(
        addresses.node_guid, 0,
        "the unspecified address belongs to no device"
    );
    let second = net.at(0, |engine, world| {
        let other = engine.open_channel();
        let id = engine.create(other, 2, PS_TCP).unwrap();
        engine.bind(
            world,
            other,
            id,
            CmAddress::Ip(format!("0.0.0.0:{port}").parse().unwrap()),
        )
    });
    assert_eq!(second, Err(Errno::ADDRINUSE));
    let initiator = net.ready(0, port, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    assert!(net.take_events(0, initiator.0).is_empty() && net.take_events(1, channel).is_empty());
    net.at(1, |engine, world| engine.listen(world, channel, id, 0))
        .unwrap();
    let event = net.event(1, channel).unwrap();
    assert_eq!((event.uid, event.event), (1, 4));
    net.finish();
}

#[test]
fn commands_in_the_wrong_state_are_invalid() {
    let mut net = Net::pair();
    let (channel, id) = net.at(0, |engine, _| {
        let channel = engine.open_channel();
        (channel, engine.create(channel, 1, PS_TCP).unwrap())
    });
    net.at(0, |engine, world| {
        let invalid = Err(Errno::INVAL);
        assert_eq!(engine.resolve_route(world, channel, id), invalid);
        assert_eq!(
            engine.connect(world, channel, id, parameters(1, 1, 1, &[])),
            invalid
        );
        assert_eq!(
            engine.accept(world, channel, id, 1, Some(parameters(1, 1, 1, &[]))),
            invalid
        );
        assert_eq!(engine.reject(world, channel, id, &[]), invalid);
        assert_eq!(engine.disconnect(world, channel, id), invalid);
        assert_eq!(
            engine.qp_attributes(world, channel, id, 1).err(),
            Some(Errno::INVAL)
        );
        assert_eq!(engine.create(channel, 1, 0x999), Err(Errno::PROTONOSUPPORT));
        let ib = CmAddress::Ib([0xfe; 16]);
        assert_eq!(engine.bind(world, channel, id, ib), Err(Errno::ADDRNOTAVAIL));
        assert_eq!(
            engine.resolve_address(world, channel, id, None, ib),
            Err(Errno::NODEV)
        );
    });
    net.finish();
}

#[test]
fn an_event_reports_a_missing_route_and_a_retry_works() {
    let mut net = Net::pair();
    net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 4, PS_TCP).unwrap();
        let unreachable = CmAddress::Ip("10.0.0.1:9".parse().unwrap());
        engine
            .resolve_address(world, channel, id, None, unreachable)
            .unwrap();
        let event = engine.take_event(world, channel).unwrap();
        assert_eq!((event.event, event.status.cast_signed()), (1, -101));
        let unspecified = CmAddress::Ip("0.0.0.0:7471".parse().unwrap());
        engine
            .resolve_address(world, channel, id, None, unspecified)
            .unwrap();
        assert_eq!(engine.take_event(world, channel).unwrap().event, 0);
        let addresses = engine.addresses(world, channel, id).unwrap();
        assert_eq!(
            addresses.remote,
            Some("127.0.0.1:7471".parse().unwrap()),
            "the unspecified address means this host"
        );
        assert_eq!(addresses.node_guid, 77);
        assert!(addresses.local.unwrap().port() >= 32768);
    });
    net.finish();
}

#[test]
fn datagram_ids_resolve_but_do_not_connect_or_listen() {
    let mut net = Net::pair();
    net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 4, 0x111).unwrap();
        let group = CmAddress::Ip("224.1.1.1:7471".parse().unwrap());
        engine.resolve_address(world, channel, id, None, group).unwrap();
        engine.resolve_route(world, channel, id).unwrap();
        let refused = engine.connect(world, channel, id, parameters(1, 1, 1, &[]));
        assert_eq!(refused, Err(Errno::OPNOTSUPP));
        let server = engine.create(channel, 5, 0x111).unwrap();
        engine
            .bind(
                world,
                channel,
                server,
                CmAddress::Ip("0.0.0.0:7471".parse().unwrap()),
            )
            .unwrap();
        assert_eq!(engine.listen(world, channel, server, 0), Err(Errno::OPNOTSUPP));
    });
    net.finish();
}

#[test]
fn options_are_checked() {
    let mut net = Net::pair();
    net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 4, PS_TCP).unwrap();
        let mut set = |option, value: &[u8]| engine.set_option(world, channel, id, option, value);
        assert_eq!(set((0, 0), &[0x20]), Ok(()));
        assert_eq!(set((0, 1), &1i32.to_ne_bytes()), Ok(()));
        assert_eq!(set((0, 2), &1i32.to_ne_bytes()), Ok(()));
        assert_eq!(set((0, 3), &[31]), Ok(()));
        assert_eq!(set((0, 3), &[32]), Err(Errno::INVAL));
        assert_eq!(set((0, 3), &[1, 2]), Err(Errno::INVAL));
        assert_eq!(set((0, 1), &[1]), Err(Errno::INVAL));
        assert_eq!(set((1, 1), &[]), Err(Errno::INVAL));
        assert_eq!(set((1, 2), &[]), Err(Errno::NOSYS));
        assert_eq!(set((0, 9), &[1]), Err(Errno::NOSYS));
    });
    net.finish();
}

/// `struct ib_path_rec_data` with these flags.
fn path(flags: u32) -> Vec<u8> {
    let mut record = vec![0; 72];
    record[..4].copy_from_slice(&flags.to_ne_bytes());
    record
}

#[test]
fn a_path_of_the_program_resolves_the_route() {
    let mut net = Net::pair();
    let (channel, id) = net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 4, PS_TCP).unwrap();
        let set = |engine: &mut Engine, world: &mut World<'_>, value: &[u8]| {
            engine.set_option(world, channel, id, (1, 1), value)
        };
        assert_eq!(
            set(engine, world, &path(0b10_1011)),
            Err(Errno::INVAL),
            "no address yet"
        );
        let remote = CmAddress::Ip("127.0.0.1:7471".parse().unwrap());
        engine.resolve_address(world, channel, id, None, remote).unwrap();
        for wrong in [path(0b10_1001), path(0b10_1011)[1..].to_vec()] {
            assert_eq!(set(engine, world, &wrong), Err(Errno::INVAL));
        }
        let two = [path(4), path(0b10_1011)].concat();
        assert_eq!(set(engine, world, &two), Ok(()));
        assert_eq!(
            set(engine, world, &two),
            Err(Errno::INVAL),
            "the route is resolved already"
        );
        (channel, id)
    });
    assert_eq!(net.take_events(0, channel), [(4, id, 0, 0), (4, id, 2, 0)]);
    net.finish();
}

#[test]
fn notify_requires_a_connection() {
    let mut net = Net::pair();
    let (at, listener) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    let notify = |net: &mut Net| {
        net.at(0, |engine, world| {
            engine.notify(world, initiator.0, initiator.1, 4)
        })
    };
    assert_eq!(notify(&mut net), Err(Errno::INVAL));
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    assert_eq!(notify(&mut net), Ok(()));
    assert_eq!(
        net.at(1, |engine, world| engine.notify(world, at, listener, 4)),
        Ok(())
    );
    net.finish();
}

/// Runs the command with number `command`.
fn run_command(net: &mut Net, side: usize, channel: u64, command: u8, id: u32, port: u16) {
    net.at(side, |engine, world| {
        let name = CmAddress::Ip(format!("127.0.0.1:{port}").parse().unwrap());
        let parameters = parameters(id + 1, 1, 1, b"private");
        match command {
            0 | 1 => drop(engine.create(channel, u64::from(id) + 1, PS_TCP)),
            2 => drop(engine.bind(world, channel, id, name)),
            3 => drop(engine.listen(world, channel, id, 2)),
            4 => drop(engine.resolve_address(world, channel, id, None, name)),
            5 => drop(engine.resolve_route(world, channel, id)),
            6 => drop(engine.qp_attributes(world, channel, id, 1)),
            7 => drop(engine.connect(world, channel, id, parameters)),
            8 => drop(engine.accept(world, channel, id, 50, Some(parameters))),
            9 => drop(engine.accept(world, channel, id, 0, None)),
            10 => drop(engine.reject(world, channel, id, b"no")),
            11 => drop(engine.disconnect(world, channel, id)),
            12 => drop(engine.destroy(world, channel, id)),
            13 => drop(engine.set_option(world, channel, id, (1, 1), &path(0b10_1011))),
            _ => drop(engine.take_event(world, channel)),
        }
    });
}

#[test]
pub(super) fn a_stream_of_a_closed_listener_is_closed() {
    let mut net = Net::pair();
    let channel = net.at(0, |engine, _| engine.open_channel());
    let create = [(0, 0, 5000); 5];
    let connect = [(2, 4, 5002), (4, 3, 5002), (13, 3, 5000), (7, 3, 5000)];
    for (command, id, port) in create.into_iter().chain(connect).chain([(12, 4, 5000)]) {
        run_command(&mut net, 0, channel, command, id, port);
    }
    net.finish();
}

proptest! {
    #[test]
    fn arbitrary_commands_leave_nothing_behind(
        steps in proptest::collection::vec((0..2usize, 0..16u8, 0..6u32, 0..3u16, 0..5u8), 0..200),
    ) {
        let mut net = Net::pair();
        let channels: Vec<u64> = (0..2).map(|side| net.at(side, |engine, _| engine.open_channel())).collect();
        for (side, command, id, port, then) in steps {
            run_command(&mut net, side, channels[side], command, id, 5000 + port);
            match then {
                0 => {}
                1 => net.advance(Duration::from_secs(3)),
                _ => net.run(),
            }
        }
        net.finish();
    }
}
