//! Two hosts: network namespaces with a veth between them.

use urnic_tests::netns::Netns;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, until};
use urnic_tests::{Pair, compiled, or_skip};

use crate::devices::gids;

fn between(netns: &[Netns; 2], program: &Program, address: &str) -> Pair {
    let mut pair = Pair::new(program).at(address);
    pair.server = netns[0].program(pair.server);
    pair.client = netns[1].program(pair.client);
    pair
}

#[test]
fn pingpong_between_two_hosts() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    for options in ["", "-g 0", "-g 0 -e", "-c -g 0 -s 100000"] {
        between(
            &netns,
            &Program::new("ibv_rc_pingpong").line(options),
            "10.77.0.1",
        )
        .succeeds();
    }
}

#[test]
fn pingpong_over_ipv6_between_two_hosts() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    let list = gids(&netns[0].program(Program::new("ibv_devinfo").arg("-v")));
    // Both hosts have the same kinds of addresses in the same order.
    for (index, gid) in list.iter().enumerate() {
        if !gid.is_loopback() && gid.to_ipv4_mapped().is_none() {
            let options = format!("-g {index}");
            // The numbers are exchanged over IPv4, where the server listens.
            let pingpong = Program::new("ibv_rc_pingpong").line(&options);
            between(&netns, &pingpong, "10.77.0.1").succeeds();
        }
    }
    assert!(list.contains(&"fd77::1".parse().expect("an address")), "{list:?}");
}

#[test]
fn perftest_between_two_hosts() {
    or_skip!(installed("ib_write_bw"));
    let netns = or_skip!(Netns::pair());
    for name in ["ib_send_bw", "ib_write_lat", "ib_read_bw"] {
        between(&netns, &Program::new(name).line("-F -n 500"), "10.77.0.1").succeeds();
    }
}

#[test]
fn a_host_with_loopback_only() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::new());
    Pair::new(&netns.program(Program::new("ibv_rc_pingpong"))).succeeds();
    Pair::new(&netns.program(Program::new("ibv_rc_pingpong").line("-g 0"))).succeeds();
}

/// A queue pair's connection takes a port only from others to the same listener. Otherwise the
/// search for a free one takes ever longer, and at last there is none.
#[test]
fn more_connections_than_ports() {
    or_skip!(installed("ss"));
    let among = Program::new(or_skip!(compiled("among"))).line("-q 70 -n 200000");
    let netns = or_skip!(Netns::new());
    let range = "echo 40000 40099 >/proc/sys/net/ipv4/ip_local_port_range";
    netns
        .program(Program::plain("sh").arg("-c").arg(range))
        .run()
        .success();
    // Both ends of each, and those by which the programs of a pair exchange numbers.
    let connected = |pairs: usize| {
        let list = || {
            netns
                .program(Program::plain("ss").line("-Htn state established"))
                .run()
        };
        let all = || list().success().lines().count() >= pairs * 2 * 71;
        let there = until(TIME_LIMIT, || all().then_some(()));
        assert!(there.is_some(), "not all connections of {pairs} pairs");
    };
    let start = || Pair::new(&netns.program(among.clone())).start();
    let first = start();
    connected(1);
    // It keeps its connections while the other makes its own.
    first.1.stop();
    let second = start();
    connected(2);
    first.1.resume();
    for (server, client) in [first, second] {
        client.wait().success();
        server.wait().success();
    }
}
