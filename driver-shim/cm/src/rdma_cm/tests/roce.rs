//! Connections of programs that see a RoCE NIC: the program brings its queue pair to RTS itself.

use super::*;
use crate::carrier::Attachment;
use crate::qp_attr::{MANAGER_QPN, QpMask};
use urnic_config::Identity;
use urnic_wire::mad::{
    IP_ADDRESSING_LEN, MAD_LEN, Mad, Message, REPLY_PRIVATE_DATA, ServiceReply, ServiceStatus, parse,
};

const INIT: u32 = 1;
const RTR: u32 = 2;
const RTS: u32 = 3;

fn roce() -> Config {
    Config {
        identity: Identity::Roce,
        ..Config::default()
    }
}

/// Answers the event CONNECT_RESPONSE of an initiator as librdmacm does.
fn establish(net: &mut Net, (channel, id): (u64, u32), uid: u64) {
    assert_eq!(net.take_events(0, channel), [(uid, id, 5, 0)]);
    net.at(0, |engine, world| engine.accept(world, channel, id, 0, None))
        .unwrap();
    net.run();
}

#[test]
fn the_program_reaches_rts_between_reply_and_connection() {
    for configs in [
        [roce(), roce()],
        [roce(), Config::default()],
        [Config::default(), roce()],
    ] {
        let at_initiator = configs[0].identity;
        let mut net = Net::new(&configs);
        let (at, _) = net.listen(1, 7471, 0);
        let initiator = net.ready(0, 7471, 5, false);
        net.connect(0, initiator, parameters(3, 4, 2, b"hello"));
        let (id, _) = net.request(1, at);
        net.accept(1, at, id, 200, parameters(9, 8, 8, b"welcome"));
        match at_initiator {
            Identity::Roce => establish(&mut net, initiator, 5),
            Identity::Iwarp => assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 9, 0)]),
        }
        assert_eq!(net.take_events(1, at), [(200, id, 9, 0)]);
        let attached: Vec<_> = net
            .wire
            .borrow()
            .attached
            .iter()
            .map(|(side, a)| (*side, a.qid))
            .collect();
        assert_eq!(attached, [(1, 9), (0, 3)]);
        net.at(1, |engine, world| engine.disconnect(world, at, id))
            .unwrap();
        assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 10, 0)]);
        assert_eq!(net.take_events(1, at), [(200, id, 10, 0)]);
        net.advance(TIME_WAIT);
        net.finish();
    }
}

/// Side, the program's Reads, and all Reads of each queue pair that was attached.
fn reads(net: &Net) -> Vec<(usize, u16, u16)> {
    let wire = net.wire.borrow();
    let of = |(side, attachment): &(usize, Attachment)| (*side, attachment.ord, attachment.ord_limit);
    wire.attached.iter().map(of).collect()
}

#[test]
fn reads_stay_within_the_depths_of_a_peer_without_a_spare_read() {
    let mut net = Net::new(&[roce(), roce()]);
    let (at, _) = net.listen(1, 7471, 0);
    let port = net.wire.borrow().listening()[0];
    // The messages of both ends come without the announcement.
    net.wire.borrow_mut().ud.lost = [true; 2];
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 4, 2, b""));
    let mad = parse(&net.wire.borrow().ud.last).unwrap();
    let mut bytes = [0; MAD_LEN];
    let Message::Request(mut request) = mad.message else {
        panic!("{mad}");
    };
    request.private_data[IP_ADDRESSING_LEN..].fill(0);
    let message = Message::Request(request);
    Mad { message, ..mad }.emit(&mut bytes);
    net.inject_from("127.0.0.1:4791", 1, 7471, &bytes);
    let message = Message::Reply(ServiceReply {
        request_id: request.request_id,
        status: ServiceStatus::VALID,
        qpn: port.into(),
        service_id: request.service_id,
        qkey: 0,
        private_data: [0; REPLY_PRIVATE_DATA],
    });
    Mad { message, ..mad }.emit(&mut bytes);
    let common = net.common_port(0);
    net.inject_from("127.0.0.1:7471", 0, common, &bytes);
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 8, 8, b""));
    establish(&mut net, initiator, 5);
    assert_eq!(reads(&net), [(1, 4, 4), (0, 2, 2)]);
    net.finish();
}

#[test]
pub(super) fn requests_complete_when_delivered() {
    let mut net = Net::new(&[roce(), roce()]);
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 4, 2, b""));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 8, 8, b""));
    establish(&mut net, initiator, 5);
    assert!(
        net.wire
            .borrow()
            .attached
            .iter()
            .all(|(_, attachment)| attachment.delivered)
    );
    assert_eq!(reads(&net), [(1, 4, 5), (0, 2, 3)], "one more for confirmations");
    net.finish();
}

#[test]
fn the_attributes_are_those_of_a_channel_adapter() {
    let mut net = Net::new(&[roce(), roce()]);
    let (at, _) = net.listen(1, 7471, 0);
    let (channel, id) = net.ready(0, 7471, 5, false);
    net.connect(0, (channel, id), parameters(3, 4, 2, b""));
    let mut attributes = |state| net.at(0, |engine, world| engine.qp_attributes(world, channel, id, state));
    let init = attributes(INIT).unwrap();
    let expected = QpMask::STATE | QpMask::PKEY_INDEX | QpMask::PORT | QpMask::ACCESS_FLAGS;
    assert_eq!((init.mask, init.port), (expected.bits(), 1));
    let rtr = attributes(RTR).unwrap();
    assert_eq!(rtr.mask, QpMask::RTR_OF_CHANNEL_ADAPTER.bits());
    assert_eq!((rtr.dest_qp_num, rtr.max_dest_rd_atomic), (MANAGER_QPN, 4));
    assert_eq!(
        rtr.address_vectors[..16],
        OWN_GID,
        "the peer is at a loopback address"
    );
    // Index of the own GID, and whether the address is global.
    assert_eq!((rtr.address_vectors[20], rtr.address_vectors[29]), (3, 1));
    let rts = attributes(RTS).unwrap();
    assert_eq!(rts.mask, QpMask::RTS_OF_CHANNEL_ADAPTER.bits());
    assert_eq!(rts.max_rd_atomic, 2);
    assert_eq!(attributes(4).err(), Some(Errno::INVAL));
    let (request, _) = net.request(1, at);
    let rtr = net
        .at(1, |engine, world| engine.qp_attributes(world, at, request, RTR))
        .unwrap();
    assert_eq!(
        rtr.max_dest_rd_atomic, 2,
        "the Reads of the initiator, without the one that confirms"
    );
    net.finish();
}

/// The depths of an event: `responder_resources` and `initiator_depth`.
fn depths(param: &ConnParam) -> (u8, u8) {
    (param.responder_resources, param.initiator_depth)
}

#[test]
fn events_have_the_fixed_lengths_and_the_given_depths() {
    for (resources, depth) in [(16, 16), (0, 16), (16, 0), (0, 0)] {
        let mut net = Net::new(&[roce(), roce()]);
        let (at, _) = net.listen(1, 7471, 0);
        let initiator = net.ready(0, 7471, 5, false);
        net.connect(0, initiator, parameters(3, resources, depth, b"hello"));
        let (id, param) = net.request(1, at);
        assert_eq!(param.private_data_len, 56);
        assert_eq!(&param.private_data[..6], b"hello\0");
        assert_eq!(depths(&param), (depth, resources));
        net.accept(1, at, id, 200, parameters(9, depth, resources, &[7; 196]));
        let event = net.event(0, initiator.0).unwrap();
        assert_eq!((event.event, event.param.private_data_len), (5, 196));
        assert_eq!(event.param.private_data[..196], [7; 196]);
        assert_eq!(depths(&event.param), (resources, depth));
        net.at(0, |engine, world| {
            engine.accept(world, initiator.0, initiator.1, 0, None)
        })
        .unwrap();
        net.run();
        let event = net.event(1, at).unwrap();
        assert_eq!((event.event, event.param.private_data_len), (9, 0));
        assert_eq!(depths(&event.param), (0, 0), "an RTU has none");
        let wire = net.wire.borrow();
        for (side, attachment) in &wire.attached {
            let expected = if *side == 0 { depth } else { resources };
            assert_eq!(attachment.ord, u16::from(expected), "the program's Reads");
            assert_eq!(
                attachment.ord_limit,
                u16::from(expected) + 1,
                "and one that confirms"
            );
            assert!(matches!(attachment.terms, Terms::RdmaCm { spare_read: true, .. }));
        }
        drop(wire);
        net.finish();
    }
}

#[test]
fn a_peer_without_a_query_shares_its_reads_with_confirmations() {
    for depth in [0, 16] {
        let mut net = Net::new(&[roce(), Config::default()]);
        let (at, _) = net.listen(1, 7471, 0);
        let initiator = net.ready(0, 7471, 5, false);
        net.connect(0, initiator, parameters(3, 1, depth, b""));
        let (id, param) = net.request(1, at);
        assert_eq!(param.private_data_len, 0, "an RNIC has exact lengths");
        assert_eq!(param.responder_resources, depth.max(1));
        net.accept(1, at, id, 200, parameters(9, 16, 1, b""));
        establish(&mut net, initiator, 5);
        let wire = net.wire.borrow();
        let (_, attachment) = wire.attached.iter().find(|(side, _)| *side == 0).unwrap();
        assert_eq!(
            (attachment.ord, attachment.ord_limit),
            (depth.into(), depth.max(1).into())
        );
        drop(wire);
        net.finish();
    }
}

#[test]
fn private_data_beyond_a_message_is_refused() {
    let mut net = Net::new(&[roce(), roce()]);
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    let long = net.at(0, |engine, world| {
        engine.connect(world, initiator.0, initiator.1, parameters(3, 1, 1, &[1; 57]))
    });
    assert_eq!(long, Err(Errno::INVAL));
    net.connect(0, initiator, parameters(3, 1, 1, &[1; 56]));
    let (id, _) = net.request(1, at);
    let long = net.at(1, |engine, world| engine.reject(world, at, id, &[1; 149]));
    assert_eq!(long, Err(Errno::INVAL));
    let long = net.at(1, |engine, world| {
        engine.accept(world, at, id, 200, Some(parameters(9, 1, 1, &[1; 197])))
    });
    assert_eq!(long, Err(Errno::INVAL));
    net.run();
    let event = net.event(0, initiator.0).unwrap();
    let found = (event.event, event.status, event.param.private_data_len);
    assert_eq!(found, (8, 28, 148), "a program that cannot accept has rejected");
    net.finish();
}

#[test]
pub(super) fn a_rejection_has_a_reason() {
    let mut net = Net::new(&[roce(), roce()]);
    let initiator = net.ready(0, 7471, 5, false);
    net.connect(0, initiator, parameters(3, 1, 1, b""));
    let event = net.event(0, initiator.0).unwrap();
    let found = (event.event, event.status, event.param.private_data_len);
    assert_eq!(found, (8, 8, 148), "no program listens");
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 6, false);
    net.connect(0, initiator, parameters(3, 1, 1, b""));
    let (id, _) = net.request(1, at);
    net.at(1, |engine, world| engine.reject(world, at, id, &[9; 148]))
        .unwrap();
    net.run();
    let event = net.event(0, initiator.0).unwrap();
    assert_eq!((event.event, event.status, depths(&event.param)), (8, 28, (0, 0)));
    assert_eq!(event.param.private_data[..148], [9; 148]);
    net.finish();
}

#[test]
fn a_route_has_one_path() {
    let mut net = Net::new(&[roce(), Config::default()]);
    let (channel, id) = net.ready(0, 7471, 5, false);
    let addresses = net.addresses(0, (channel, id)).unwrap();
    let (path, route) = (addresses.path(), addresses.route());
    assert_eq!((path.num_paths, route.num_paths), (1, 1));
    assert_eq!(path.record.dgid, route.route[0].dgid);
    assert_eq!((path.record.sgid, path.record.dgid), (OWN_GID, OWN_GID));
    let (channel, id) = net.ready(1, 7471, 6, false);
    let addresses = net.addresses(1, (channel, id)).unwrap();
    assert_eq!((addresses.path().num_paths, addresses.route().num_paths), (0, 0));
    net.finish();
}

#[test]
pub(super) fn without_a_queue_pair_a_connection_carries_private_data() {
    for ends_first in [0, 1] {
        let mut net = Net::new(&[roce(), roce()]);
        net.wire.borrow_mut().unmoved = vec![3, 9];
        let (at, _) = net.listen(1, 7471, 0);
        let initiator = net.ready(0, 7471, 5, true);
        net.connect(0, initiator, parameters(3, 1, 1, b"hello"));
        let (id, param) = net.request(1, at);
        assert_eq!(&param.private_data[..6], b"hello\0");
        net.accept(1, at, id, 200, parameters(9, 1, 1, b"welcome"));
        assert_eq!(net.take_events(1, at), [(200, id, 9, 0)]);
        establish(&mut net, initiator, 5);
        assert!(net.wire.borrow().attached.is_empty());
        let ends = [initiator, (at, id)];
        let (channel, ending) = ends[ends_first];
        net.at(ends_first, |engine, world| {
            engine.disconnect(world, channel, ending)
        })
        .unwrap();
        assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 10, 0)]);
        assert_eq!(net.take_events(1, at), [(200, id, 10, 0)]);
        let (channel, other) = ends[1 - ends_first];
        net.at(1 - ends_first, |engine, world| {
            engine.disconnect(world, channel, other)
        })
        .unwrap();
        net.advance(TIME_WAIT);
        assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 15, 0)]);
        net.finish();
    }
}

#[test]
pub(super) fn an_id_that_is_destroyed_ends_its_exchange() {
    let mut net = Net::new(&[roce(), roce()]);
    net.wire.borrow_mut().unmoved = vec![3, 9];
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, true);
    net.connect(0, initiator, parameters(3, 1, 1, b""));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 1, 1, b""));
    establish(&mut net, initiator, 5);
    net.at(0, |engine, world| engine.destroy(world, initiator.0, initiator.1))
        .unwrap();
    assert_eq!(net.take_events(1, at), [(200, id, 9, 0), (200, id, 10, 0)]);
    net.finish();
}

#[test]
fn a_connected_queue_pair_is_not_attached_again() {
    let mut net = Net::new(&[roce(), roce()]);
    let (at, _) = net.listen(1, 7471, 0);
    for (uid, qpns) in [(5, (3, 9)), (6, (3, 9))] {
        let initiator = net.ready(0, 7471, uid, false);
        net.connect(0, initiator, parameters(qpns.0, 1, 1, b""));
        let (id, _) = net.request(1, at);
        net.accept(1, at, id, 200 + uid, parameters(qpns.1, 1, 1, b""));
        establish(&mut net, initiator, uid);
        assert_eq!(net.take_events(1, at), [(200 + uid, id, 9, 0)]);
    }
    assert_eq!(net.wire.borrow().attached.len(), 2);
    net.finish();
}
