//! The port of an id: from bind to the end of its connection.

use super::*;
use urnic_config::CmPorts;

fn ip(text: &str) -> CmAddress {
    CmAddress::Ip(text.parse().unwrap())
}

/// An idle id on a channel of its own.
fn idle(net: &mut Net, side: usize) -> (u64, u32) {
    net.at(side, |engine, _| {
        let channel = engine.open_channel();
        (channel, engine.create(channel, 5, PS_TCP).unwrap())
    })
}

fn bind(net: &mut Net, side: usize, (channel, id): (u64, u32), local: &str) -> Result<(), Errno> {
    net.at(side, |engine, world| engine.bind(world, channel, id, ip(local)))
}

fn resolve(net: &mut Net, side: usize, (channel, id): (u64, u32), local: Option<&str>) -> Result<(), Errno> {
    net.at(side, |engine, world| {
        engine.resolve_address(world, channel, id, local.map(ip), ip("127.0.0.1:7471"))
    })
}

/// Connects an id that has its address; returns the port of the initiator, as the responder gets
/// it.
fn connect(net: &mut Net, side: usize, own: (u64, u32), at: u64) -> u16 {
    net.at(side, |engine, world| {
        engine.resolve_route(world, own.0, own.1).unwrap();
        engine.qp_attributes(world, own.0, own.1, 1).unwrap();
    });
    net.connect(side, own, parameters(3, 1, 1, &[]));
    let (child, _) = net.request(1, at);
    let peer = net.addresses(1, (at, child)).unwrap().remote;
    net.accept(1, at, child, 200, parameters(9, 1, 1, &[]));
    peer.unwrap().port()
}

#[test]
pub(super) fn a_bound_port_is_kept_for_every_source_address() {
    for source in [
        None,
        Some("127.0.0.1:0"),
        Some("127.0.0.1:1234"),
        Some("0.0.0.0:0"),
    ] {
        let mut net = Net::pair();
        let (at, _) = net.listen(1, 7471, 0);
        let own = idle(&mut net, 0);
        bind(&mut net, 0, own, "127.0.0.1:9229").unwrap();
        resolve(&mut net, 0, own, source).unwrap();
        assert_eq!(net.port_of(0, own), 9229, "{source:?}");
        assert_eq!(connect(&mut net, 0, own, at), 9229, "{source:?}");
        assert_eq!(net.port_of(0, own), 9229, "{source:?}");
        net.finish();
    }
}

#[test]
pub(super) fn a_port_from_bind_is_reserved_until_the_id_connects() {
    let mut net = Net::new(&[Config::default(), Config::default(), Config::default()]);
    let (at, _) = net.listen(1, 7471, 0);
    for source in [None, Some("127.0.0.1:0")] {
        let own = idle(&mut net, 0);
        if source.is_none() {
            bind(&mut net, 0, own, "0.0.0.0:0").unwrap();
        }
        resolve(&mut net, 0, own, source).unwrap();
        let port = net.port_of(0, own);
        let other = idle(&mut net, 2);
        let taken = bind(&mut net, 2, other, &format!("0.0.0.0:{port}"));
        assert_eq!(taken, Err(Errno::ADDRINUSE), "{source:?}");
        assert_eq!(connect(&mut net, 0, own, at), port, "{source:?}");
        net.at(0, |engine, world| engine.destroy(world, own.0, own.1))
            .unwrap();
        // The events are ESTABLISHED and DISCONNECTED.
        assert_eq!(net.take_events(1, at).len(), 2);
    }
    // The id is destroyed before it connects.
    let own = idle(&mut net, 0);
    resolve(&mut net, 0, own, Some("127.0.0.1:9229")).unwrap();
    net.at(0, |engine, world| engine.destroy(world, own.0, own.1))
        .unwrap();
    let other = idle(&mut net, 2);
    bind(&mut net, 2, other, "0.0.0.0:9229").unwrap();
    net.finish();
}

#[test]
fn an_unavailable_source_address_fails_at_once() {
    let mut net = Net::pair();
    net.listen(1, 7471, 0);
    let own = idle(&mut net, 0);
    let taken = resolve(&mut net, 0, own, Some("127.0.0.1:7471"));
    assert_eq!(taken, Err(Errno::ADDRINUSE));
    let other_port = resolve(&mut net, 0, own, Some(&format!("{OTHER_HOST}:0")));
    assert_eq!(other_port, Err(Errno::ADDRNOTAVAIL));
    let family = resolve(&mut net, 0, own, Some("[::1]:5"));
    assert_eq!(family, Err(Errno::INVAL));
    assert!(
        net.take_events(0, own.0).is_empty(),
        "a command that fails causes no event"
    );
    resolve(&mut net, 0, own, None).unwrap();
    assert_eq!(
        net.take_events(0, own.0),
        [(5, own.1, 0, 0)],
        "the id is still usable"
    );
    net.finish();
}

#[test]
pub(super) fn an_id_that_only_holds_its_port_accepts_no_connection() {
    let mut net = Net::pair();
    let own = idle(&mut net, 0);
    bind(&mut net, 0, own, "127.0.0.1:9229").unwrap();
    resolve(&mut net, 0, own, None).unwrap();
    let initiator = net.ready(1, 9229, 6, false);
    net.connect(1, initiator, parameters(3, 1, 1, &[]));
    net.run();
    assert_eq!(net.event(1, initiator.0).unwrap().event, 8, "rejected");
    assert_eq!(net.take_events(0, own.0), [(5, own.1, 0, 0)]);
    net.finish();
}

/// Binds an id of [`idle`], with `RDMA_OPTION_ID_AFONLY` if `one_family`.
fn bind_family(net: &mut Net, local: &str, one_family: bool) -> Result<(), Errno> {
    let own = idle(net, 0);
    let value = i32::from(one_family).to_ne_bytes();
    net.at(0, |engine, world| {
        engine.set_option(world, own.0, own.1, (0, 2), &value)
    })?;
    bind(net, 0, own, local)
}

#[test]
fn ids_of_different_families_share_a_port() {
    for (ipv6_only, outcome) in [(true, Ok(())), (false, Err(Errno::ADDRNOTAVAIL))] {
        let mut net = Net::pair();
        bind_family(&mut net, "0.0.0.0:3260", true).unwrap();
        assert_eq!(bind_family(&mut net, "[::]:3260", ipv6_only), outcome);
        net.finish();
    }
}

/// A bound id of process 0, with `RDMA_OPTION_ID_REUSEADDR` or without.
fn bound(net: &mut Net, local: &str, reuse: bool) -> Result<(u64, u32), Errno> {
    net.at(0, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, PS_TCP)?;
        let flag = i32::from(reuse).to_ne_bytes();
        engine.set_option(world, channel, id, (0, 1), &flag)?;
        engine.bind(world, channel, id, CmAddress::Ip(local.parse().unwrap()))?;
        Ok((channel, id))
    })
}

#[test]
fn ids_conflict_as_in_the_port_space_of_a_kernel() {
    for ports in [CmPorts::Tcp, CmPorts::Own] {
        let mut config = Config::default();
        config.cm.ports = ports;
        let mut net = Net::new(&[config.clone(), config]);
        bound(&mut net, "127.0.0.1:7001", false).unwrap();
        let mut conflict = |local| bound(&mut net, local, true).err();
        assert_eq!(conflict("127.0.0.1:7001"), Some(Errno::ADDRINUSE));
        assert_eq!(conflict("0.0.0.0:7001"), Some(Errno::ADDRNOTAVAIL));
        bound(&mut net, "0.0.0.0:7002", false).unwrap();
        let mut conflict = |local| bound(&mut net, local, true).err();
        assert_eq!(conflict("0.0.0.0:7002"), Some(Errno::ADDRNOTAVAIL));
        assert_eq!(conflict("127.0.0.1:7002"), Some(Errno::ADDRNOTAVAIL));
        net.finish();
    }
}

#[test]
pub(super) fn a_shared_port_is_reserved_until_an_id_connects() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    let taken = |net: &mut Net| {
        let other = idle(net, 1);
        bind(net, 1, other, "127.0.0.1:7001")
    };
    let first = bound(&mut net, "127.0.0.1:7001", true).unwrap();
    // The address of another host: binding fails, and the first id keeps its listener.
    let failed = bound(&mut net, &format!("{OTHER_HOST}:7001"), true);
    assert_eq!(failed.err(), Some(Errno::ADDRNOTAVAIL));
    assert_eq!(net.wire.borrow().listening(), [7471, 7001]);
    let second = bound(&mut net, "127.0.0.1:7001", true).unwrap();
    assert_eq!(taken(&mut net), Err(Errno::ADDRINUSE));
    resolve(&mut net, 0, first, None).unwrap();
    assert_eq!(taken(&mut net), Err(Errno::ADDRINUSE));
    assert_eq!(connect(&mut net, 0, first, at), 7001);
    assert_eq!(net.port_of(0, second), 7001);
    net.finish();
}

#[test]
fn a_connect_from_a_shared_number_leaves_others_own_ports() {
    let mut config = Config::default();
    config.cm.ports = CmPorts::Own;
    let mut net = Net::new(&[config.clone(), config]);
    let (at, _) = net.listen(1, 7471, 0);
    let first = bound(&mut net, "127.0.0.1:7001", true).unwrap();
    let before = net.wire.borrow().listening();
    let _second = bound(&mut net, "127.0.0.1:7001", true).unwrap();
    let with_second = net.wire.borrow().listening();
    assert_eq!(with_second.len(), before.len() + 1);
    resolve(&mut net, 0, first, None).unwrap();
    connect(&mut net, 0, first, at);
    let own = with_second.last().unwrap();
    assert!(net.wire.borrow().listening().contains(own));
    net.finish();
}

#[test]
pub(super) fn ids_with_reuseaddr_share_a_port_until_one_listens() {
    for ports in [CmPorts::Tcp, CmPorts::Own] {
        let mut config = Config::default();
        config.cm.ports = ports;
        let mut net = Net::new(&[config.clone(), config]);
        let first = bound(&mut net, "127.0.0.1:7001", true).unwrap();
        let second = bound(&mut net, "127.0.0.1:7001", true).unwrap();
        let listen = |net: &mut Net, (channel, id): (u64, u32)| {
            net.at(0, |engine, world| engine.listen(world, channel, id, 4))
        };
        assert_eq!(listen(&mut net, first), Err(Errno::ADDRINUSE));
        net.at(0, |engine, world| engine.destroy(world, second.0, second.1))
            .unwrap();
        assert_eq!(listen(&mut net, first), Ok(()));
        let late = bound(&mut net, "127.0.0.1:7001", true);
        assert_eq!(
            late.err(),
            Some(Errno::ADDRINUSE),
            "a listener shares with no other id"
        );
        net.finish();
    }
}
