//! Datagrams of programs that see a RoCE NIC: queue pairs of kind UD, rdma_cm's lookups of them,
//! and multicast. `udaddy` and `mckey` have fixed ports, hence the network namespaces.

use urnic_tests::netns::Netns;
use urnic_tests::program::Program;
use urnic_tests::served::Served;
use urnic_tests::skip::installed;
use urnic_tests::user::{NOBODY, Staged};
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, or_skip};

use crate::roce::{LIMIT, both, roce};

/// The port of `udaddy`.
pub(crate) const UDADDY_PORT: u16 = 7174;
/// The UDP port of multicast groups.
pub(crate) const GROUP_PORT: u16 = 4791;

#[test]
fn ping_pong_of_datagrams() {
    or_skip!(installed("ibv_ud_pingpong"));
    let pair = Pair::new(&roce("ibv_ud_pingpong").line("-g 3 -n 200"));
    for end in [pair.succeeds().server, pair.succeeds().client] {
        assert!(end.output.contains("200 iters in"), "{end}");
    }
}

/// Few enough datagrams that none is dropped: perftest would wait for it.
#[test]
fn perftest_sends_datagrams() {
    for (program, options) in [
        ("ib_send_lat", "-c UD -x 3 -n 500"),
        ("ib_send_bw", "-c UD -x 3 -n 100"),
    ] {
        or_skip!(installed(program));
        let (server, client) = both(program, ["roce"; 2], options, &format!("{options} 127.0.0.1"));
        for end in [server, client] {
            end.success();
        }
    }
}

#[test]
fn perftest_finds_queue_pairs_by_the_connection_manager() {
    or_skip!(installed("ib_send_bw"));
    for line in ["ib_send_lat -c UD -R -n 300", "ib_send_bw -c UD -R -n 100"] {
        let (name, options) = line.split_once(' ').expect("options");
        Pair::new(&roce(name).line(&format!("-F {options}")))
            .within(LIMIT)
            .succeeds();
    }
}

/// Runs `udaddy` between two hosts, or on one.
#[track_caller]
pub(crate) fn udaddy_succeeds(hosts: [&Netns; 2], program: &Program, server: &str, client: &str) {
    let server = hosts[0].program(program.clone().line(server)).spawn();
    hosts[0].has_udp_sockets(UDADDY_PORT, 1);
    let client = hosts[1].program(program.clone().line(client)).run_for(LIMIT);
    let said = client.success();
    assert!(said.contains("data transfers complete"), "{said}");
    server.wait_for(LIMIT).success();
}

#[test]
fn udaddy_over_both_families() {
    or_skip!(installed("udaddy"));
    let [host, peer] = or_skip!(Netns::pair());
    let udaddy = roce("udaddy");
    for options in ["", "-c 100", "-C 100 -S 1000 -c 3", "-t 32"] {
        let client = |address: &str| format!("-s {address} {options}");
        udaddy_succeeds([&host, &host], &udaddy, options, &client("127.0.0.1"));
        udaddy_succeeds([&host, &peer], &udaddy, options, &client("10.77.0.1"));
    }
    udaddy_succeeds(
        [&host, &peer],
        &udaddy,
        "-b 10.77.0.1",
        "-s 10.77.0.1 -b 10.77.0.2",
    );
    for (at, to) in [("::", "::1"), ("fd77::1", "fd77::1"), ("::1", "::1")] {
        let client = format!("-f ipv6 -c 5 -s {to}");
        udaddy_succeeds([&host, &host], &udaddy, &format!("-f ipv6 -c 5 -b {at}"), &client);
    }
    udaddy_succeeds([&host, &peer], &udaddy, "-f ipv6 -b ::", "-f ipv6 -s fd77::1");
}

#[test]
fn udaddy_of_an_ordinary_user_and_with_a_served_device() {
    or_skip!(installed("udaddy"));
    let host = or_skip!(Netns::new());
    let staged = Staged::new();
    let of_user = staged.program(NOBODY, roce("udaddy"));
    udaddy_succeeds([&host, &host], &of_user, "-c 10", "-c 10 -s 127.0.0.1");
    let served = Served::through(&host.entry(), "");
    let of_served = served.program("udaddy").env("URNIC_IDENTITY", "roce");
    udaddy_succeeds([&host, &host], &of_served, "-c 10", "-c 10 -s 127.0.0.1");
}

#[test]
fn udaddy_without_a_server_gets_unreachable() {
    or_skip!(installed("udaddy"));
    let host = or_skip!(Netns::new());
    let alone = roce("udaddy")
        .env("URNIC_MPA_STARTUP_TIMEOUT_INITIATOR_S", "1")
        .line("-s 127.0.0.1");
    let said = host.program(alone).run().failure();
    assert!(said.contains("RDMA_CM_EVENT_UNREACHABLE, error: -110"), "{said}");
}

#[test]
fn port_spaces_without_ipoib_are_refused_as_by_a_kernel() {
    or_skip!(installed("udaddy"));
    let said = roce("udaddy").line("-p 0x2 -s 127.0.0.1").run().failure();
    assert!(said.contains("RDMA_CM_EVENT_ADDR_ERROR, error: -22"), "{said}");
}

/// Two receivers on one host, and a sender on the same or on another.
#[track_caller]
fn mckey_reaches_two_receivers(hosts: [&Netns; 2], at: [&str; 2], group: &str, program: &Program) {
    let end = |at: &str, options: &str| program.clone().line(&format!("-m {group} -b {at} {options}"));
    let receivers = [(); 2].map(|()| hosts[0].program(end(at[0], "-C 20")).spawn());
    // Each joins on the networks of the host's addresses.
    let networks = if group.contains(':') { 3 } else { 2 };
    hosts[0].has_udp_sockets(GROUP_PORT, networks * receivers.len());
    hosts[1].program(end(at[1], "-s -C 20")).run_for(LIMIT).success();
    for receiver in receivers {
        let said = receiver.wait_for(LIMIT).success();
        assert!(said.contains("data transfers complete"), "{said}");
    }
}

#[test]
fn mckey_over_both_families() {
    or_skip!(installed("mckey"));
    let [host, peer] = or_skip!(Netns::pair());
    let mckey = roce("mckey");
    let (on_loopback, on_network) = (["127.0.0.1"; 2], ["10.77.0.1", "10.77.0.2"]);
    mckey_reaches_two_receivers([&host, &host], on_loopback, "239.0.1.1", &mckey);
    mckey_reaches_two_receivers([&host, &peer], on_network, "239.0.1.1", &mckey);
    mckey_reaches_two_receivers([&host, &peer], ["fd77::1", "fd77::2"], "ff05::114", &mckey);
}

#[test]
fn libfabrics_reliable_datagrams() {
    or_skip!(installed("fi_pingpong"));
    let host = or_skip!(Netns::new());
    let port = free_port();
    let program = roce("fi_pingpong").line("-p verbs;ofi_rxd -e rdm -I 50 -S 4096 -c");
    let server = host.program(program.clone().line(&format!("-B {port}"))).spawn();
    host.listens(port);
    let client = program.line(&format!("-P {port} 127.0.0.1"));
    host.program(client).run_for(LIMIT).success();
    server.wait_for(LIMIT).success();
}
