//! Calls in each state of an id, against what a kernel answers (`cma.c`, `cm.c`, `iwcm.c`).

use super::*;
use urnic_config::Identity;

/// The states of an id that a program can distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    Connecting,
    Requested,
    Connected,
    Disconnected,
    Rejected,
}

/// The calls, in the order of a row.
const CALLS: [&str; 10] = [
    "bind",
    "resolve_addr",
    "resolve_route",
    "listen",
    "connect",
    "accept",
    "reject",
    "disconnect",
    "notify",
    "reuseaddr 0",
];

/// A network with an id of process 0 in this state. Returns its channel and number.
fn at(identity: Identity, stage: Stage) -> (Net, (u64, u32)) {
    let config = Config {
        identity,
        ..Config::default()
    };
    let mut net = Net::new(&[config.clone(), config]);
    let bound = |net: &mut Net, side| {
        net.at(side, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, 100, PS_TCP).unwrap();
            (engine.bind(world, channel, id, address(7400))).unwrap();
            (channel, id)
        })
    };
    let listening = |net: &mut Net, side| {
        let (channel, id) = bound(net, side);
        let listens = net.at(side, |engine, world| engine.listen(world, channel, id, 4));
        listens.unwrap();
        (channel, id)
    };
    let id = match stage {
        Stage::Idle => net.at(0, |engine, _| {
            let channel = engine.open_channel();
            (channel, engine.create(channel, 100, PS_TCP).unwrap())
        }),
        Stage::Bound => bound(&mut net, 0),
        Stage::AddressResolved => net.at(0, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, 100, PS_TCP).unwrap();
            (engine.resolve_address(world, channel, id, None, address(7400))).unwrap();
            (channel, id)
        }),
        Stage::RouteResolved => net.ready(0, 7400, 100, false),
        Stage::Listening => listening(&mut net, 0),
        Stage::Connecting => {
            net.wire.borrow_mut().silent = true;
            let _ = listening(&mut net, 1);
            let initiator = net.ready(0, 7400, 100, false);
            net.connect(0, initiator, parameters(3, 1, 1, &[]));
            initiator
        }
        Stage::Requested => {
            let (channel, _) = listening(&mut net, 0);
            let initiator = net.ready(1, 7400, 100, false);
            net.connect(1, initiator, parameters(3, 1, 1, &[]));
            (channel, net.request(0, channel).0)
        }
        Stage::Connected | Stage::Disconnected | Stage::Rejected => {
            let (channel, _) = listening(&mut net, 1);
            let initiator = net.ready(0, 7400, 100, false);
            net.connect(0, initiator, parameters(3, 1, 1, &[]));
            let (request, _) = net.request(1, channel);
            if stage == Stage::Rejected {
                net.at(1, |engine, world| engine.reject(world, channel, request, &[]))
                    .unwrap();
            } else {
                net.accept(1, channel, request, 200, parameters(9, 1, 1, &[]));
                if identity.is_roce() {
                    let (channel, id) = initiator;
                    net.at(0, |engine, world| engine.accept(world, channel, id, 0, None))
                        .unwrap();
                }
            }
            net.run();
            if stage == Stage::Disconnected {
                net.at(1, |engine, world| engine.disconnect(world, channel, request))
                    .unwrap();
            }
            net.run();
            initiator
        }
    };
    (net, id)
}

fn address(port: u16) -> CmAddress {
    CmAddress::Ip(SocketAddr::new([127, 0, 0, 1].into(), port))
}

fn call(net: &mut Net, name: &str, (channel, id): (u64, u32)) -> Result<(), Errno> {
    net.at(0, |engine, world| match name {
        "bind" => engine.bind(world, channel, id, address(7500)),
        "resolve_addr" => engine.resolve_address(world, channel, id, None, address(7400)),
        "resolve_route" => engine.resolve_route(world, channel, id),
        "listen" => engine.listen(world, channel, id, 4),
        "connect" => engine.connect(world, channel, id, parameters(4, 1, 1, &[])),
        "accept" => engine.accept(world, channel, id, 300, Some(parameters(5, 1, 1, &[]))),
        "reject" => engine.reject(world, channel, id, &[]),
        "disconnect" => engine.disconnect(world, channel, id),
        "notify" => engine.notify(world, channel, id, 4),
        _ => engine.set_option(world, channel, id, (0, 1), &0i32.to_ne_bytes()),
    })
}

#[test]
pub(super) fn calls_in_each_state_have_the_kernels_answers() {
    // 0: success; E: EINVAL; C: EISCONN. Where two answers differ, the first is that of a RoCE
    // NIC.
    let rows = [
        (Stage::Idle, "0 0 E 0 E E E E E 0"),
        (Stage::Bound, "E 0 E 0 E E E E E E"),
        (Stage::AddressResolved, "E E 0 E E E E E E E"),
        (Stage::RouteResolved, "E E E E 0 E E E E E"),
        (Stage::Listening, "E E E E E E E 0E E0 E"),
        (Stage::Connecting, "E E E E E E 0E 0 E0 E"),
        (Stage::Requested, "E E E E E 0 0 0 E0 E"),
        (Stage::Connected, "E E E E E E E 0 C0 E"),
        (Stage::Disconnected, "E E E E E E E 0 E0 E"),
        (Stage::Rejected, "E E E E E E E 0 E0 E"),
    ];
    for (stage, row) in rows {
        for (name, answers) in CALLS.iter().zip(row.split(' ')) {
            for identity in [Identity::Roce, Identity::Iwarp] {
                let answer = match identity {
                    Identity::Roce => answers.chars().next(),
                    Identity::Iwarp => answers.chars().last(),
                };
                let expected = match answer {
                    Some('0') => Ok(()),
                    Some('C') => Err(Errno::ISCONN),
                    _ => Err(Errno::INVAL),
                };
                let (mut net, id) = at(identity, stage);
                let done = call(&mut net, name, id);
                assert_eq!(done, expected, "{name} of an id that is {stage:?}, {identity:?}");
                net.run();
                // Each id can be destroyed, and its number means nothing afterwards.
                let destroyed = net.at(0, |engine, world| engine.destroy(world, id.0, id.1));
                assert!(destroyed.is_ok(), "{stage:?}");
                assert_eq!(call(&mut net, name, id), Err(Errno::NOENT));
            }
        }
    }
}

#[test]
pub(super) fn disconnecting_early_ends_the_connection_when_it_is_made() {
    let mut net = Net::pair();
    let (channel, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, channel);
    assert_eq!(call(&mut net, "disconnect", initiator), Ok(()));
    assert!(net.take_events(0, initiator.0).is_empty());
    net.accept(1, channel, id, 200, parameters(9, 1, 1, &[]));
    let events = net.take_events(0, initiator.0);
    let kinds: Vec<u32> = events.iter().map(|event| event.2).collect();
    assert_eq!(kinds, [9, 10]);
    net.finish();
}

#[test]
pub(super) fn disconnecting_before_accept_ends_the_connection_at_accept() {
    let mut net = Net::pair();
    let (channel, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, true);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, channel);
    net.accept(1, channel, id, 200, parameters(9, 1, 1, &[]));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 5, 0)]);
    assert_eq!(call(&mut net, "disconnect", initiator), Ok(()));
    let accepted = net.at(0, |engine, world| {
        engine.accept(world, initiator.0, initiator.1, 0, None)
    });
    assert_eq!(accepted, Ok(()));
    net.run();
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 10, 0)]);
    net.finish();
}

#[test]
fn rejecting_at_the_initiator_ends_the_attempt_at_both_ends() {
    let config = Config {
        identity: Identity::Roce,
        ..Config::default()
    };
    let mut net = Net::new(&[config.clone(), config]);
    let (channel, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, channel);
    net.accept(1, channel, id, 200, parameters(9, 1, 1, &[]));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 5, 0)]);
    assert_eq!(call(&mut net, "reject", initiator), Ok(()));
    net.run();
    assert!(net.take_events(0, initiator.0).is_empty());
    assert_eq!(net.take_events(1, channel), [(200, id, 8, 28)]);
    net.finish();
}
