//! Connections of `wire=roce`: two processes of different hosts, whose connection managers exchange
//! messages between their queue pairs 1.

use super::abi::QpAttrResponse;
use super::net::NATIVE_PORT;
use super::*;
use crate::ib_cm::State as Cm;
use crate::qp_attr::QpMask;
use urnic_config::{Identity, Wire};
use urnic_process::port_gids::gid_of;
use urnic_wire::mad::{MAD_LEN, Mad, Message, parse};

const INIT: u32 = 1;
const RTR: u32 = 2;
const RTS: u32 = 3;

const RESPONSE: u32 = 5;
const UNREACHABLE: u32 = 7;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;
const TIMEWAIT_EXIT: u32 = 15;

/// The time after which a message is repeated.
const INTERVAL: Duration = Duration::from_secs(5);

fn config() -> Config {
    Config {
        identity: Identity::Roce,
        wire: Wire::Roce,
        ..Config::default()
    }
}

/// Two hosts, with a listener at the second: its channel and id.
fn hosts(backlog: u32) -> (Net, (u64, u32)) {
    let mut net = Net::new(&[config(), config()]);
    net.wire.borrow_mut().ud.hosts = true;
    let listener = net.listen(1, 7471, backlog);
    (net, listener)
}

/// An id of the first host that is ready to connect to a port of the second.
fn ready(net: &mut Net, port: u16, uid: u64) -> (u64, u32) {
    let (channel, id) = net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, uid, PS_TCP).unwrap();
        let remote = CmAddress::Ip(format!("10.0.0.1:{port}").parse().unwrap());
        engine.resolve_address(world, channel, id, None, remote).unwrap();
        engine.resolve_route(world, channel, id).unwrap();
        (channel, id)
    });
    assert_eq!(net.take_events(0, channel), [(uid, id, 0, 0), (uid, id, 2, 0)]);
    (channel, id)
}

/// `rdma_resolve_addr` from this address of the first host: the event's type and status.
fn resolved_from(local: &str, remote: &str) -> (u32, i32) {
    let (mut net, _) = hosts(1);
    let address = |text: &str| CmAddress::Ip(text.parse().unwrap());
    let channel = net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 5, PS_TCP).unwrap();
        let (local, remote) = (address(local), address(remote));
        engine
            .resolve_address(world, channel, id, Some(local), remote)
            .unwrap();
        channel
    });
    let events = net.take_events(0, channel);
    assert_eq!(events.len(), 1, "{events:?}");
    (events[0].2, events[0].3)
}

#[test]
fn a_loopback_address_leads_to_no_other_host() {
    const ADDRESS_RESOLVED: u32 = 0;
    const ADDRESS_ERROR: u32 = 1;
    let einval = -Errno::INVAL.raw_os_error();
    for (local, remote, event) in [
        ("127.0.0.1:0", "10.0.0.1:7471", (ADDRESS_ERROR, einval)),
        ("127.0.0.1:0", "127.0.0.1:7471", (ADDRESS_RESOLVED, 0)),
        // Its own other address.
        ("127.0.0.1:0", "10.0.0.0:7471", (ADDRESS_RESOLVED, 0)),
        ("10.0.0.0:0", "10.0.0.1:7471", (ADDRESS_RESOLVED, 0)),
    ] {
        assert_eq!(resolved_from(local, remote), event, "{local} to {remote}");
    }
}

fn attributes(
    net: &mut Net,
    side: usize,
    (channel, id): (u64, u32),
    state: u32,
) -> Result<QpAttrResponse, Errno> {
    net.at(side, |engine, world| {
        engine.qp_attributes(world, channel, id, state)
    })
}

/// A connection: the initiator, and the id of its request.
fn connected(net: &mut Net, at: u64) -> ((u64, u32), u32) {
    let initiator = ready(net, 7471, 5);
    net.connect(0, initiator, parameters(0x81_0003, 4, 2, b"hello"));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(0x81_0109, 8, 8, b"welcome"));
    establish(net, initiator);
    assert_eq!(net.take_events(1, at), [(200, id, ESTABLISHED, 0)]);
    (initiator, id)
}

/// Answers the event CONNECT_RESPONSE as librdmacm does.
fn establish(net: &mut Net, (channel, id): (u64, u32)) {
    assert_eq!(net.take_events(0, channel), [(5, id, RESPONSE, 0)]);
    net.at(0, |engine, world| engine.accept(world, channel, id, 0, None))
        .unwrap();
    net.run();
}

fn end(net: &mut Net) {
    let channels = |net: &Net, side: usize| net.engines[side].channels.keys().copied().collect::<Vec<u64>>();
    for side in [0, 1] {
        for channel in channels(net, side) {
            net.at(side, |engine, world| engine.close_channel(world, channel));
        }
    }
    for _ in 0..40 {
        net.advance(INTERVAL);
    }
}

fn finish(mut net: Net) {
    end(&mut net);
    for engine in &net.engines {
        assert!(
            engine
                .adapters
                .opened
                .values()
                .all(|adapter| adapter.ids.is_empty())
        );
    }
    net.finish();
}

/// What both queue pairs are set to.
#[test]
fn cmc_04_the_queue_pairs_get_each_others_attributes() {
    let (mut net, (at, _)) = hosts(0);
    let initiator = ready(&mut net, 7471, 5);
    net.at(0, |engine, world| {
        let (channel, id) = initiator;
        engine.set_option(world, channel, id, (0, 3), &[19])
    })
    .unwrap();
    assert_eq!(attributes(&mut net, 0, initiator, RTR).err(), Some(Errno::INVAL));
    attributes(&mut net, 0, initiator, INIT).unwrap();
    net.connect(0, initiator, parameters(0x81_0003, 4, 2, b"hello"));
    assert_eq!(attributes(&mut net, 0, initiator, RTR).err(), Some(Errno::INVAL));
    let (id, param) = net.request(1, at);
    assert_eq!(
        (param.qp_num, param.retry_count, param.rnr_retry_count),
        (0x81_0003, 7, 7)
    );
    // A program brings its queue pair to RTS before it accepts.
    let rtr = attributes(&mut net, 1, (at, id), RTR).unwrap();
    let rts = attributes(&mut net, 1, (at, id), RTS).unwrap();
    net.accept(1, at, id, 200, parameters(0x81_0109, 8, 1, b"welcome"));
    assert_eq!(rtr.mask, QpMask::RTR_OF_CHANNEL_ADAPTER.bits());
    assert_eq!(
        (rtr.dest_qp_num, rtr.path_mtu, rtr.max_dest_rd_atomic),
        (0x81_0003, 3, 2)
    );
    assert_eq!(rtr.address_vectors[12..16], [10, 0, 0, 0], "the peer's GID");
    assert_eq!(rts.mask, QpMask::RTS_OF_CHANNEL_ADAPTER.bits());
    assert_eq!(
        (rts.timeout, rts.retry_cnt, rts.rnr_retry, rts.max_rd_atomic),
        (19, 7, 7, 4)
    );
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!((event.event, event.param.qp_num), (RESPONSE, 0x81_0109));
    let peer_rtr = attributes(&mut net, 0, initiator, RTR).unwrap();
    let peer_rts = attributes(&mut net, 0, initiator, RTS).unwrap();
    assert_eq!(peer_rtr.dest_qp_num, 0x81_0109);
    assert_eq!((rtr.rq_psn, rts.sq_psn), (peer_rts.sq_psn, peer_rtr.rq_psn));
    // The acceptor asked for less.
    assert_eq!((peer_rtr.max_dest_rd_atomic, peer_rts.max_rd_atomic), (1, 2));
    assert_eq!(peer_rts.timeout, 19);
    finish(net);
}

#[test]
fn cmc_03_a_connection_has_the_events_of_a_kernel() {
    for ends_first in [0, 1] {
        let (mut net, (at, _)) = hosts(0);
        let (initiator, id) = connected(&mut net, at);
        assert!(net.wire.borrow().attached.is_empty() && net.wire.borrow().listening().is_empty());
        let ends = [initiator, (at, id)];
        let uids = [5, 200];
        let disconnect = |net: &mut Net, side: usize| {
            let (channel, id) = ends[side];
            net.at(side, |engine, world| engine.disconnect(world, channel, id))
        };
        disconnect(&mut net, ends_first).unwrap();
        for side in [0, 1] {
            let (channel, id) = ends[side];
            assert_eq!(
                net.take_events(side, channel),
                [(uids[side], id, DISCONNECTED, 0)]
            );
            assert_eq!(
                disconnect(&mut net, side),
                Ok(()),
                "a program answers the event so"
            );
        }
        net.advance(Duration::from_secs(1));
        for side in [0, 1] {
            let (channel, id) = ends[side];
            assert_eq!(
                net.take_events(side, channel),
                [(uids[side], id, TIMEWAIT_EXIT, 0)]
            );
        }
        finish(net);
    }
}

#[test]
fn cmc_16_messages_fill_their_private_data_and_have_limits() {
    let (mut net, (at, _)) = hosts(0);
    let initiator = ready(&mut net, 7471, 5);
    let mut connect = |len: usize| {
        net.at(0, |engine, world| {
            engine.connect(
                world,
                initiator.0,
                initiator.1,
                parameters(0x81_0003, 4, 2, &vec![1; len]),
            )
        })
    };
    assert_eq!(connect(57), Err(Errno::INVAL));
    assert_eq!(connect(56), Ok(()));
    net.run();
    let (id, param) = net.request(1, at);
    assert_eq!(
        (
            param.private_data_len,
            param.responder_resources,
            param.initiator_depth
        ),
        (56, 2, 4)
    );
    net.accept(1, at, id, 200, parameters(0x81_0109, 2, 4, b"welcome"));
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!((event.event, event.param.private_data_len), (RESPONSE, 196));
    assert_eq!(&event.param.private_data[..8], b"welcome\0");
    assert_eq!(
        (event.param.responder_resources, event.param.initiator_depth),
        (4, 2)
    );
    // An acceptance that is too long rejects.
    let other = ready(&mut net, 7471, 6);
    net.connect(0, other, parameters(0x81_0004, 0, 0, b""));
    let (id, _) = net.request(1, at);
    let accepted = net.at(1, |engine, world| {
        engine.accept(world, at, id, 201, Some(parameters(0x81_010a, 0, 0, &[0; 197])))
    });
    assert_eq!(accepted, Err(Errno::INVAL));
    assert_eq!(net.take_events(0, other.0), [(6, other.1, REJECTED, 28)]);
    finish(net);
}

#[test]
fn cmc_06_a_refusal_has_a_reason_and_private_data() {
    let (mut net, (at, _)) = hosts(0);
    let nobody = ready(&mut net, 7472, 4);
    net.connect(0, nobody, parameters(0x81_0003, 0, 0, b""));
    assert_eq!(net.take_events(0, nobody.0), [(4, nobody.1, REJECTED, 8)]);
    let initiator = ready(&mut net, 7471, 5);
    net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
    let (id, _) = net.request(1, at);
    net.at(1, |engine, world| engine.reject(world, at, id, &[9; 148]))
        .unwrap();
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!((event.event, event.status), (REJECTED, 28));
    assert_eq!(event.param.private_data[..148], [9; 148]);
    // So does an id that is destroyed; and the peer's program may refuse the acceptance.
    let initiator = ready(&mut net, 7471, 6);
    net.connect(0, initiator, parameters(0x81_0004, 0, 0, b""));
    let (id, _) = net.request(1, at);
    net.at(1, |engine, world| engine.destroy(world, at, id)).unwrap();
    assert_eq!(net.take_events(0, initiator.0), [(6, initiator.1, REJECTED, 28)]);
    let initiator = ready(&mut net, 7471, 7);
    net.connect(0, initiator, parameters(0x81_0005, 0, 0, b""));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(0x81_010b, 0, 0, b""));
    net.at(0, |engine, world| {
        engine.reject(world, initiator.0, initiator.1, b"no")
    })
    .unwrap();
    assert_eq!(net.take_events(1, at), [(200, id, REJECTED, 28)]);
    // The end of TimeWait is told after DISCONNECTED only.
    net.advance(INTERVAL);
    assert!(net.take_events(1, at).is_empty());
    // An acceptance may be taken back.
    let initiator = ready(&mut net, 7471, 8);
    net.connect(0, initiator, parameters(0x81_0006, 0, 0, b""));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(0x81_010c, 0, 0, b""));
    assert_eq!(net.take_events(0, initiator.0), [(8, initiator.1, RESPONSE, 0)]);
    net.at(1, |engine, world| engine.reject(world, at, id, &[7; 148]))
        .unwrap();
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!((event.event, event.status), (REJECTED, 28));
    assert_eq!(event.param.private_data[..148], [7; 148]);
    net.advance(INTERVAL);
    assert!(net.take_events(0, initiator.0).is_empty() && net.take_events(1, at).is_empty());
    finish(net);
}

#[test]
fn cmc_08_without_an_answer_the_peer_is_unreachable() {
    let (mut net, (at, _)) = hosts(0);
    net.wire.borrow_mut().ud.lost = [true, false];
    let initiator = ready(&mut net, 7471, 5);
    net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
    for _ in 0..16 {
        assert!(net.take_events(0, initiator.0).is_empty());
        net.advance(INTERVAL);
    }
    assert_eq!(net.wire.borrow().ud.sent, 17, "16 REQs and a REJ");
    assert_eq!(
        net.take_events(0, initiator.0),
        [(5, initiator.1, UNREACHABLE, TIMED_OUT)]
    );
    assert!(net.take_events(1, at).is_empty());
    finish(net);
}

/// Loses each message that a step sends, and lets it be repeated.
#[test]
fn cmc_17_each_message_may_be_lost() {
    for lost in 0..4 {
        let (mut net, (at, _)) = hosts(0);
        let lose = |net: &mut Net, step: usize, by: usize| net.wire.borrow_mut().ud.lost[by] = step == lost;
        let repeat = |net: &mut Net, step: usize| {
            if step == lost {
                net.wire.borrow_mut().ud.lost = [false; 2];
                net.advance(INTERVAL);
            }
        };
        let initiator = ready(&mut net, 7471, 5);
        lose(&mut net, 0, 0);
        net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
        repeat(&mut net, 0);
        let (id, _) = net.request(1, at);
        lose(&mut net, 1, 1);
        net.accept(1, at, id, 200, parameters(0x81_0109, 0, 0, b""));
        repeat(&mut net, 1);
        lose(&mut net, 2, 0);
        establish(&mut net, initiator);
        repeat(&mut net, 2);
        assert_eq!(net.take_events(1, at), [(200, id, ESTABLISHED, 0)], "{lost}");
        lose(&mut net, 3, 0);
        net.at(0, |engine, world| {
            engine.disconnect(world, initiator.0, initiator.1)
        })
        .unwrap();
        repeat(&mut net, 3);
        assert_eq!(net.take_events(1, at), [(200, id, DISCONNECTED, 0)], "{lost}");
        assert_eq!(
            net.take_events(0, initiator.0),
            [(5, initiator.1, DISCONNECTED, 0)]
        );
        finish(net);
    }
}

#[test]
fn cmc_05_the_first_message_establishes_if_the_rtu_is_lost() {
    let (mut net, (at, _)) = hosts(0);
    let initiator = ready(&mut net, 7471, 5);
    net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
    let (id, _) = net.request(1, at);
    let notify = |net: &mut Net| net.at(1, |engine, world| engine.notify(world, at, id, 4));
    assert_eq!(notify(&mut net), Err(Errno::INVAL));
    net.accept(1, at, id, 200, parameters(0x81_0109, 0, 0, b""));
    net.wire.borrow_mut().ud.lost = [true, false];
    establish(&mut net, initiator);
    assert!(net.take_events(1, at).is_empty());
    assert_eq!(notify(&mut net), Ok(()));
    assert_eq!(net.take_events(1, at), [(200, id, ESTABLISHED, 0)]);
    assert_eq!(notify(&mut net), Err(Errno::ISCONN));
    net.wire.borrow_mut().ud.lost = [false; 2];
    finish(net);
}

#[test]
fn a_lost_queue_pair_ends_the_connection_at_both_ends() {
    let (mut net, (at, _)) = hosts(0);
    let (initiator, id) = connected(&mut net, at);
    net.at(0, |engine, world| {
        engine.connection_ended(world, 0x81_0003, Errno::CONNRESET)
    });
    assert_eq!(
        net.take_events(0, initiator.0),
        [(5, initiator.1, DISCONNECTED, 0)]
    );
    assert_eq!(net.take_events(1, at), [(200, id, DISCONNECTED, 0)]);
    finish(net);
}

#[test]
fn a_process_that_ends_tells_its_peers() {
    let (mut net, (at, _)) = hosts(0);
    let (initiator, id) = connected(&mut net, at);
    net.at(0, |engine, world| engine.end(world, |_| true));
    assert_eq!(net.take_events(1, at), [(200, id, DISCONNECTED, 0)]);
    assert!(net.take_events(0, initiator.0).is_empty());
    finish(net);
}

#[test]
fn a_killed_peer_is_noticed_by_a_disconnect() {
    let (mut net, (at, _)) = hosts(0);
    let (initiator, _) = connected(&mut net, at);
    net.wire.borrow_mut().ud.lost = [false, true];
    net.at(0, |engine, world| {
        engine.disconnect(world, initiator.0, initiator.1)
    })
    .unwrap();
    for _ in 0..16 {
        assert!(net.take_events(0, initiator.0).is_empty());
        net.advance(INTERVAL);
    }
    assert_eq!(
        net.take_events(0, initiator.0),
        [(5, initiator.1, DISCONNECTED, TIMED_OUT)]
    );
    finish(net);
}

#[test]
fn cmc_07_requests_beyond_the_backlog_come_again() {
    let (mut net, (at, _)) = hosts(1);
    let initiators: Vec<(u64, u32)> = (0..2)
        .map(|n| {
            let initiator = ready(&mut net, 7471, 5 + n);
            net.connect(0, initiator, parameters(0x81_0003 + n as u32, 0, 0, b""));
            initiator
        })
        .collect();
    net.request(1, at);
    assert!(net.take_events(1, at).is_empty());
    net.advance(INTERVAL);
    net.request(1, at);
    assert!(net.take_events(0, initiators[1].0).is_empty());
    finish(net);
}

#[test]
fn a_request_before_the_program_listens_comes_again() {
    let (mut net, _) = hosts(0);
    let (channel, id) = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, PS_TCP).unwrap();
        let local = CmAddress::Ip("0.0.0.0:7472".parse().unwrap());
        engine.bind(world, channel, id, local).unwrap();
        (channel, id)
    });
    let initiator = ready(&mut net, 7472, 5);
    net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
    assert!(net.take_events(0, initiator.0).is_empty());
    net.at(1, |engine, world| engine.listen(world, channel, id, 0))
        .unwrap();
    net.advance(INTERVAL);
    net.request(1, channel);
    finish(net);
}

#[test]
fn two_listeners_cannot_have_one_number() {
    let (mut net, _) = hosts(0);
    let bound = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 7, PS_TCP).unwrap();
        engine.bind(world, channel, id, CmAddress::Ip("0.0.0.0:7471".parse().unwrap()))
    });
    assert_eq!(bound, Err(Errno::ADDRNOTAVAIL));
    // The number's TCP port is free for other programs; its UDP port is not.
    assert!(net.wire.borrow().listening().is_empty());
    assert!(net.wire.borrow().has_udp_port(7471));
    finish(net);
}

#[test]
fn cmc_18_numbers_on_the_wire_name_the_process() {
    let (mut net, (at, _)) = hosts(0);
    let initiator = ready(&mut net, 7471, 5);
    net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
    let number = |net: &Net| {
        let bytes = net.wire.borrow().ud.last.clone();
        match parse(&bytes).unwrap().message {
            Message::Connect(request) => request.local_comm_id,
            Message::ConnectReply(reply) => reply.ids.local,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(number(&net) >> 16, u32::from(NATIVE_PORT));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(0x81_0109, 0, 0, b""));
    assert_eq!(number(&net) >> 16, u32::from(NATIVE_PORT) + 1);
    finish(net);
}

#[test]
fn cmc_14_a_strangers_messages_change_nothing() {
    let (mut net, (at, _)) = hosts(0);
    let (initiator, id) = connected(&mut net, at);
    net.at(1, |engine, world| engine.disconnect(world, at, id))
        .unwrap();
    let mut bytes = [0; MAD_LEN];
    bytes.copy_from_slice(&net.wire.borrow().ud.last);
    assert!(matches!(parse(&bytes).unwrap().message, Message::Disconnect(_)));
    // The DREQ, as a stranger would send it who guesses: from another address, or another number.
    let mut net_events = |from: &str, bytes: &[u8]| {
        let (number, arrival) = {
            let wire = net.wire.borrow();
            let (number, _) = wire
                .ud
                .ports
                .iter()
                .find(|(_, at)| at.device == 0 && wire.ud.is_of(at, 0))
                .unwrap();
            let arrival = Arrival {
                local: [10, 0, 0, 0].into(),
                remote: from.parse().unwrap(),
            };
            (*number, arrival)
        };
        net.at(0, |engine, world| {
            engine.message_received(world, number, arrival, bytes)
        });
        match net.engines[0].ids[&initiator.1].state {
            State::ByMessages(of) => net.engines[0].adapters.state(of),
            _ => None,
        }
    };
    assert_eq!(net_events("10.0.0.9:4791", &bytes), Some(Cm::Established));
    let Mad {
        transaction_id,
        message: Message::Disconnect(mut request),
    } = parse(&bytes).unwrap()
    else {
        panic!("no DREQ");
    };
    request.ids.local ^= 1;
    let mut changed = [0; MAD_LEN];
    let message = Message::Disconnect(request);
    Mad {
        transaction_id,
        message,
    }
    .emit(&mut changed);
    assert_eq!(net_events("10.0.0.1:4791", &changed), Some(Cm::Established));
    assert_eq!(net_events("10.0.0.1:4791", &bytes), Some(Cm::TimeWait));
    finish(net);
}

#[test]
fn a_lost_device_ends_its_connections() {
    let (mut net, (at, _)) = hosts(0);
    let (initiator, _) = connected(&mut net, at);
    let attempt = ready(&mut net, 7471, 6);
    net.wire.borrow_mut().ud.lost = [true; 2];
    net.connect(0, attempt, parameters(0x81_0004, 0, 0, b""));
    net.at(0, |engine, world| engine.device_lost(world, |_| true, |_| true));
    let events = net.take_events(0, initiator.0);
    assert_eq!(
        events,
        [(5, initiator.1, DISCONNECTED, 0), (5, initiator.1, 11, 0)]
    );
    let nodev = -Errno::NODEV.raw_os_error();
    let events = net.take_events(0, attempt.0);
    assert_eq!(events, [(6, attempt.1, 6, nodev), (6, attempt.1, 11, 0)]);
    net.wire.borrow_mut().ud.lost = [false; 2];
    finish(net);
}

#[test]
fn a_queue_pair_that_nobody_has_is_refused() {
    let (mut net, _) = hosts(0);
    let initiator = ready(&mut net, 7471, 5);
    let connect = |net: &mut Net, qpn| {
        net.at(0, |engine, world| {
            engine.connect(world, initiator.0, initiator.1, parameters(qpn, 0, 0, b""))
        })
    };
    assert_eq!(connect(&mut net, 1), Err(Errno::INVAL));
    net.wire.borrow_mut().unreliable = vec![0x81_0007];
    assert_eq!(connect(&mut net, 0x81_0007), Err(Errno::OPNOTSUPP));
    assert_eq!(
        connect(&mut net, 0x81_0008),
        Ok(()),
        "the id can connect afterwards"
    );
    finish(net);
}

/// The first id has gone through TimeWait, or is destroyed, when the second id has its queue pair.
#[test]
fn a_queue_pair_that_is_connected_again_belongs_to_the_second_id() {
    for destroyed in [false, true] {
        let (mut net, (at, _)) = hosts(0);
        let (first, id) = connected(&mut net, at);
        let reset = |net: &mut Net| {
            net.at(0, |engine, world| {
                engine.connection_ended(world, 0x81_0003, Errno::CONNRESET);
            });
        };
        net.at(0, |engine, world| engine.disconnect(world, first.0, first.1))
            .unwrap();
        assert_eq!(net.take_events(0, first.0), [(5, first.1, DISCONNECTED, 0)]);
        assert_eq!(net.take_events(1, at), [(200, id, DISCONNECTED, 0)]);
        reset(&mut net);
        let (second, id) = connected(&mut net, at);
        if destroyed {
            net.at(0, |engine, world| engine.destroy(world, first.0, first.1))
                .unwrap();
        }
        net.advance(Duration::from_secs(1));
        net.take_events(1, at);
        reset(&mut net);
        assert_eq!(
            net.take_events(0, second.0),
            [(5, second.1, DISCONNECTED, 0)],
            "destroyed: {destroyed}"
        );
        assert_eq!(net.take_events(1, at), [(200, id, DISCONNECTED, 0)]);
        finish(net);
    }
}

#[test]
fn a_request_is_not_accepted_with_a_queue_pair_of_kind_uc() {
    let (mut net, (at, _)) = hosts(0);
    let initiator = ready(&mut net, 7471, 5);
    net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
    let (id, _) = net.request(1, at);
    net.wire.borrow_mut().unreliable = vec![0x81_0107];
    let accepted = net.at(1, |engine, world| {
        engine.accept(world, at, id, 200, Some(parameters(0x81_0107, 0, 0, b"")))
    });
    assert_eq!(accepted, Err(Errno::OPNOTSUPP));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, REJECTED, 28)]);
    finish(net);
}

/// Link-local addresses: the answers to a REQ go to the network that it came from.
#[test]
fn answers_go_to_the_scope_of_the_request() {
    let (mut net, (_, _)) = hosts(0);
    net.wire.borrow_mut().ud.lost = [true; 2];
    let at = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, PS_TCP).unwrap();
        let local = CmAddress::Ip("[::]:7473".parse().unwrap());
        engine.bind(world, channel, id, local).unwrap();
        engine.listen(world, channel, id, 0).unwrap();
        channel
    });
    let (own, peer) = ("fe80::1".parse().unwrap(), "[fe80::2%3]:4791");
    let peer: SocketAddr = peer.parse().unwrap();
    for (port, is_listener) in [(7473, true), (7474, false)] {
        let initiator = ready(&mut net, port, 5);
        net.connect(0, initiator, parameters(0x81_0003, 0, 0, b""));
        let mut mad = parse(&net.wire.borrow().ud.last).unwrap();
        let Message::Connect(request) = &mut mad.message else {
            panic!("{mad}");
        };
        let path = &mut request.primary_path;
        (path.local_gid, path.remote_gid) = (gid_of(peer.ip()), gid_of(own));
        let mut bytes = [0; MAD_LEN];
        mad.emit(&mut bytes);
        net.at(1, |engine, world| {
            let arrival = Arrival {
                local: own,
                remote: peer,
            };
            let number = engine.adapters.opened[&0].port;
            engine.message_received(world, number, arrival, &bytes);
        });
        if is_listener {
            let (id, _) = net.request(1, at);
            net.at(1, |engine, world| engine.reject(world, at, id, b"no"))
                .unwrap();
        }
        let last = parse(&net.wire.borrow().ud.last).unwrap().message;
        assert!(matches!(last, Message::Reject(_)), "{port}");
        assert_eq!(net.wire.borrow().ud.last_remote, Some(peer), "{port}");
    }
    net.wire.borrow_mut().ud.lost = [false; 2];
    finish(net);
}

#[test]
fn a_lost_device_ends_time_wait_later() {
    let (mut net, (at, _)) = hosts(0);
    let (initiator, _) = connected(&mut net, at);
    net.at(0, |engine, world| {
        engine.disconnect(world, initiator.0, initiator.1)
    })
    .unwrap();
    assert_eq!(
        net.take_events(0, initiator.0),
        [(5, initiator.1, DISCONNECTED, 0)]
    );
    net.at(0, |engine, world| engine.device_lost(world, |_| true, |_| true));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 11, 0)]);
    net.advance(Duration::from_secs(60));
    assert_eq!(
        net.take_events(0, initiator.0),
        [(5, initiator.1, TIMEWAIT_EXIT, 0)]
    );
    assert!(net.engines[0].queue_pairs.is_empty());
    finish(net);
}
