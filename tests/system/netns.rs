//! Two hosts: network namespaces with a veth between them.

use rustix::io::Errno;
use rustix::process::Signal;
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
fn a_roce_nic_names_only_peers_that_it_reaches() {
    const NETUNREACH: i32 = Errno::NETUNREACH.raw_os_error();
    const HOSTUNREACH: i32 = Errno::HOSTUNREACH.raw_os_error();
    const TIMEDOUT: i32 = Errno::TIMEDOUT.raw_os_error();
    let netns = or_skip!(Netns::pair());
    let program = Program::new(or_skip!(compiled("reach")));
    netns[1].ip("route add unreachable 10.78.0.0/16");
    netns[1].ip("route add 10.79.0.0/16 via 10.77.0.98");
    let cases = [
        ("10.77.0.1", 0),
        ("10.77.0.2", 0),
        ("10.77.0.99", TIMEDOUT),
        ("10.79.0.1", TIMEDOUT),
        ("10.78.0.1", HOSTUNREACH),
        ("198.51.100.1", NETUNREACH),
    ];
    for (identity, checks) in [("roce", true), ("iwarp", false)] {
        let cases = cases.map(|(address, errno)| format!("{address} {}", if checks { errno } else { 0 }));
        let program = program.clone().env("URNIC_IDENTITY", identity);
        netns[1].program(program.line(&cases.join(" "))).run().success();
    }
}

#[test]
fn a_host_with_loopback_only() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::new());
    Pair::new(&netns.program(Program::new("ibv_rc_pingpong"))).succeeds();
    Pair::new(&netns.program(Program::new("ibv_rc_pingpong").line("-g 0"))).succeeds();
}

/// The connections of a namespace, with their timers.
fn connections(netns: &Netns) -> String {
    let list = Program::plain("ss").line("-Htno state established");
    netns.program(list).run().success()
}

/// Waits until messages pass between the queue pairs: more than the numbers that programs exchange.
fn passes_messages(netns: &Netns) {
    let list = || netns.program(Program::plain("ss").line("-Htni")).run().success();
    let bytes = |word: &str| word.strip_prefix("bytes_received:")?.parse::<u64>().ok();
    let passes = || {
        let list = list();
        let most = list.split_whitespace().filter_map(bytes).max();
        most.is_some_and(|most| most > 10_000).then_some(())
    };
    assert!(until(TIME_LIMIT, passes).is_some(), "{}", list());
}

/// TCP alone would retransmit for a quarter of an hour.
#[test]
fn a_request_fails_when_the_network_is_cut() {
    or_skip!(installed("ib_write_bw"));
    or_skip!(installed("ss"));
    for cut in 0..2 {
        let netns = or_skip!(Netns::pair());
        let writes = Program::new("ib_write_bw").line("-F -D 60");
        let (server, client) = between(&netns, &writes, "10.77.0.1").start();
        passes_messages(&netns[0]);
        netns[cut].ip("link set veth0 down");
        client.wait().failure();
        // Nothing of the target waits, so it does not notice.
        server.signal(Signal::KILL);
        server.wait();
    }
}

#[test]
fn a_waiting_read_notices_that_the_network_is_cut() {
    or_skip!(installed("ib_read_bw"));
    or_skip!(installed("ss"));
    let netns = or_skip!(Netns::pair());
    let reads = Program::new("ib_read_bw").line("-F -D 60 -s 64");
    let (server, client) = between(&netns, &reads, "10.77.0.1").start();
    passes_messages(&netns[1]);
    // The host acknowledges the Reads, and its program does not answer them.
    server.stop();
    let acknowledged = || {
        let idle = |line: &str| line.split_whitespace().nth(1) == Some("0");
        connections(&netns[1]).lines().all(idle).then_some(())
    };
    assert!(
        until(TIME_LIMIT, acknowledged).is_some(),
        "{}",
        connections(&netns[1])
    );
    netns[0].ip("link set veth0 down");
    client.wait().failure();
    server.resume();
    server.signal(Signal::KILL);
    server.wait();
}

/// Its host answers for it, as an adapter does.
#[test]
fn a_stopped_program_fails_no_request_of_its_peer() {
    or_skip!(installed("ib_send_bw"));
    or_skip!(installed("ss"));
    let netns = or_skip!(Netns::pair());
    // More is posted than a socket buffers.
    let sends = Program::new("ib_send_bw").line("-F -s 1048576 -t 64 -n 2000");
    let (server, client) = between(&netns, &sends, "10.77.0.1").start();
    passes_messages(&netns[0]);
    server.stop();
    // The window closes. TCP asks for room there at intervals that grow from 200 ms: the limit of
    // two seconds is over when they have grown to seconds.
    let probes = || {
        let list = connections(&netns[1]);
        let long = |line: &str| line.contains("timer:(persist,") && line.contains("sec,");
        list.lines().any(long).then_some(())
    };
    let closed = until(TIME_LIMIT, probes);
    server.resume();
    assert!(closed.is_some(), "{}", connections(&netns[1]));
    client.wait().success();
    server.wait().success();
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
