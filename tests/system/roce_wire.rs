//! `--wire roce`: queue pairs that speak RoCE v2 over UDP port 4791, between two hosts, as the port
//! belongs to one user on each.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::netns::Netns;
use urnic_tests::program::{Ended, Program, Running};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::user::{NOBODY, OTHER_USER, Staged, as_user};
use urnic_tests::wait::{TIME_LIMIT, free_port, until};
use urnic_tests::{Pair, or_skip};

use crate::rdma_cm::{at_port, is_done};
use crate::roce::{LIMIT, roce};
use crate::roce_datagrams::{UDADDY_PORT, udaddy_succeeds};

/// The address of the first host.
const SERVER: &str = "10.77.0.1";
/// UDP port of RoCE v2.
const PORT: u16 = 4791;

/// A program whose queue pairs speak RoCE v2.
fn on_wire(name: &str) -> Program {
    roce(name).env("URNIC_WIRE", "roce")
}

/// A server on the first host, and a client on the second, from a command line.
fn between(netns: &[Netns; 2], line: &str) -> Pair {
    let (name, options) = line.split_once(' ').expect("a program and its options");
    let mut pair = Pair::new(&on_wire(name).line(options)).at(SERVER).within(LIMIT);
    pair.server = netns[0].program(pair.server);
    pair.client = netns[1].program(pair.client);
    pair
}

#[test]
fn ping_pong_with_its_data_checked() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    for options in [
        "-g 3 -c -n 500",
        "-g 3 -c -e -n 200",
        "-g 3 -c -n 200 -s 1",
        "-g 3 -c -n 50 -s 1000003",
        "-g 3 -c -n 50 -s 100000 -m 256",
        // The addresses of IPv6: of the network, and the link-local one.
        "-g 5 -c -n 200",
        "-g 7 -c -n 200",
    ] {
        let both = between(&netns, &format!("ibv_rc_pingpong {options}")).succeeds();
        for end in [both.server, both.client] {
            assert!(end.output.contains(" iters in "), "{options}: {end}");
            assert!(!end.output.contains("invalid data"), "{options}: {end}");
        }
    }
}

#[test]
fn ping_pong_of_queue_pairs_with_a_shared_receive_queue() {
    or_skip!(installed("ibv_srq_pingpong"));
    let netns = or_skip!(Netns::pair());
    for options in ["-g 3 -n 500", "-g 3 -n 200 -e", "-g 3 -n 200 -q 4 -s 20000"] {
        between(&netns, &format!("ibv_srq_pingpong {options}")).succeeds();
    }
}

#[test]
fn perftest_of_all_sizes_up_to_8_mib() {
    or_skip!(installed("ib_send_bw"));
    let netns = or_skip!(Netns::pair());
    for name in ["ib_send_bw", "ib_write_bw", "ib_read_bw"] {
        between(&netns, &format!("{name} -F -x 3 -a -n 10")).succeeds();
    }
}

#[test]
fn perftest_with_several_queue_pairs_and_atomic_operations() {
    or_skip!(installed("ib_send_bw"));
    let netns = or_skip!(Netns::pair());
    for line in [
        "ib_send_bw -q 4 -n 500",
        "ib_write_bw -q 4 -n 500",
        "ib_read_bw -q 4 -n 500",
        "ib_send_bw -b -q 2 -n 300",
        "ib_write_bw -b -q 2 -n 300",
        "ib_read_bw -b -q 2 -n 300",
        "ib_atomic_bw -n 500",
        "ib_atomic_bw -A CMP_AND_SWAP -q 2 -n 500",
    ] {
        between(&netns, &format!("{line} -F -x 3")).succeeds();
    }
}

#[test]
fn perftest_latencies() {
    or_skip!(installed("ib_send_lat"));
    let netns = or_skip!(Netns::pair());
    for line in [
        "ib_send_lat -n 500",
        "ib_send_lat -e -n 200",
        "ib_write_lat -n 500",
        "ib_read_lat -n 500",
        "ib_atomic_lat -n 500",
        "ib_send_lat -I 64 -s 64 -n 500",
    ] {
        between(&netns, &format!("{line} -F -x 3")).succeeds();
    }
}

/// Few enough packets that the sockets have room for all, also while nobody reads: perftest would
/// wait for one that is lost.
#[test]
fn unreliable_connections() {
    or_skip!(installed("ibv_uc_pingpong"));
    let netns = or_skip!(Netns::pair());
    for line in [
        "ibv_uc_pingpong -g 3 -c -n 500",
        "ibv_uc_pingpong -g 3 -c -e -n 200",
        "ibv_uc_pingpong -g 3 -c -n 50 -s 4000 -m 256",
        "ibv_uc_pingpong -g 5 -c -n 200",
        "ib_send_bw -c UC -F -x 3 -n 20 -s 4000",
        "ib_send_lat -c UC -F -x 3 -n 200",
        "ib_write_bw -c UC -F -x 3 -n 20 -s 4000",
        "ib_write_lat -c UC -F -x 3 -n 200",
    ] {
        between(&netns, line).succeeds();
    }
}

#[test]
fn datagrams_by_the_port_of_all_queue_pairs() {
    or_skip!(installed("ibv_ud_pingpong"));
    let netns = or_skip!(Netns::pair());
    for line in [
        "ibv_ud_pingpong -g 3 -c -n 500",
        "ibv_ud_pingpong -g 3 -c -e -n 200 -s 1000",
        "ibv_ud_pingpong -g 5 -c -n 200",
        "ib_send_bw -c UD -F -x 3 -n 50 -s 1000",
        "ib_send_bw -c UD -F -x 3 -n 50 -s 100 -q 4",
        "ib_send_lat -c UD -F -x 3 -n 200",
    ] {
        between(&netns, line).succeeds();
    }
}

#[test]
fn rdma_cm_looks_queue_pairs_up_by_queue_pair_1() {
    or_skip!(installed("udaddy"));
    let [host, peer] = or_skip!(Netns::pair());
    let udaddy = on_wire("udaddy");
    for options in ["", "-c 100", "-C 100 -S 1000 -c 3"] {
        udaddy_succeeds(
            [&host, &peer],
            &udaddy,
            options,
            &format!("-s {SERVER} {options}"),
        );
    }
    udaddy_succeeds([&host, &peer], &udaddy, "-f ipv6 -b ::", "-f ipv6 -s fd77::1");
    let bound = format!("-s {SERVER} -b 10.77.0.2");
    udaddy_succeeds([&host, &peer], &udaddy, &format!("-b {SERVER}"), &bound);
}

#[test]
fn datagrams_to_a_group() {
    or_skip!(installed("mckey"));
    let [host, peer] = or_skip!(Netns::pair());
    for (group, at) in [
        ("239.0.1.1", ["10.77.0.1", "10.77.0.2"]),
        ("ff05::114", ["fd77::1", "fd77::2"]),
    ] {
        let end = |at: &str, options: &str| on_wire("mckey").line(&format!("-m {group} -b {at} {options}"));
        let receiver = host.program(end(at[0], "-C 20")).spawn();
        let groups = || {
            host.program(Program::new("ip").line("maddr show"))
                .run()
                .success()
        };
        until(TIME_LIMIT, || groups().contains(group).then_some(()));
        let sender = peer.program(end(at[1], "-s -C 20")).run_for(LIMIT);
        sender.success();
        let said = receiver.wait_for(LIMIT).success();
        assert!(said.contains("data transfers complete"), "{said}");
    }
}

/// The faults of datagrams act on its packets. Those that are lost are sent again. The faults end
/// before the programs do: the last acknowledgement of a program that has ended is not sent again.
#[test]
fn packets_that_are_lost_or_repeated_or_overtaken_change_nothing() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(in_process("faults are those of the device in the process"));
    let netns = or_skip!(Netns::pair());
    for faults in [
        "drop p=0.02 count=20",
        "duplicate p=0.1 count=100",
        "reorder p=0.02 count=20",
        "drop p=0.01 count=10; duplicate p=0.05 count=50; reorder p=0.01 count=10",
        "corrupt-datagram p=0.02 count=20",
    ] {
        let both = between(&netns, "ibv_rc_pingpong -g 3 -c -n 100 -s 20000")
            .env("URNIC_FAULTS", faults)
            .succeeds();
        for end in [both.server, both.client] {
            assert!(
                end.output.contains(": at a datagram to "),
                "{faults} never strikes: {end}"
            );
            assert!(!end.output.contains("invalid data"), "{faults}: {end}");
        }
    }
}

/// The datagrams that a host has received, over both families.
fn datagrams(netns: &Netns) -> u64 {
    let shown = netns
        .program(Program::plain("cat").arg("/proc/net/snmp").arg("/proc/net/snmp6"))
        .run()
        .success();
    let of_ipv4 = shown.lines().filter_map(|line| line.strip_prefix("Udp: ")).nth(1);
    let of_ipv4 = of_ipv4.and_then(|values| values.split(' ').next());
    let of_ipv6 = shown
        .lines()
        .find_map(|line| line.strip_prefix("Udp6InDatagrams"));
    let count = |value: Option<&str>| -> u64 {
        value
            .and_then(|value| value.trim().parse().ok())
            .expect("InDatagrams")
    };
    count(of_ipv4) + count(of_ipv6)
}

/// The specification permits a Local ACK Timeout of up to four times its value.
#[test]
fn requests_to_a_killed_peer_fail_after_all_retries() {
    or_skip!(installed("ib_send_bw"));
    for (line, timeout) in [
        ("ib_write_bw -D 60", 14),
        ("ib_read_bw -D 60", 14),
        ("ib_write_bw -D 60", 16),
    ] {
        let netns = or_skip!(Netns::pair());
        let (server, client) = between(&netns, &format!("{line} -F -x 3 -u {timeout}")).start();
        let passes = until(TIME_LIMIT, || (datagrams(&netns[0]) > 1000).then_some(()));
        assert!(passes.is_some(), "{line}: no packets");
        let killed = Instant::now();
        server.signal(Signal::KILL);
        let said = client.wait_for(LIMIT).failure();
        // IBV_WC_RETRY_EXC_ERR.
        assert!(said.contains("status 12"), "{said}");
        // perftest's retry_cnt is 7.
        let all_retries = 8 * Duration::from_nanos(4096 << timeout);
        let after = killed.elapsed();
        // The last acknowledgement came before the signal, and the first timeouts may have.
        assert!(after >= all_retries / 2, "{line}, {timeout}: {after:?}");
        assert!(
            after <= 4 * all_retries + TIME_LIMIT / 2,
            "{line}, {timeout}: {after:?}"
        );
    }
}

#[test]
fn a_process_of_another_user_is_told_who_has_the_port() {
    or_skip!(installed("ibv_rc_pingpong"));
    let host = or_skip!(Netns::new());
    let staged = Staged::new();
    // A connected queue pair opens the port when its peer is known.
    let serving = |user| {
        let port = free_port();
        let program = on_wire("ibv_ud_pingpong").line(&format!("-g 1 -p {port}"));
        (host.program(staged.program(user, program)), port)
    };
    let (first, _) = serving(OTHER_USER);
    let first = first.spawn();
    host.has_udp_sockets(PORT, 1);
    for user in [0, NOBODY] {
        let said = serving(user).0.run().failure();
        for part in ["ibv_create_qp", "UDP port 4791", "EADDRINUSE"] {
            assert!(said.contains(part), "no {part:?}: {said}");
        }
    }
    // The port is free when its process has ended.
    first.signal(Signal::KILL);
    first.wait();
    let (mut third, port) = {
        let (program, port) = serving(NOBODY);
        (program.spawn(), port)
    };
    host.listens(port);
    assert!(third.ended().is_none());
    third.signal(Signal::KILL);
    third.wait();
}

#[test]
fn a_port_in_use_is_named_when_the_peer_is_known() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    let staged = Staged::new();
    let holder = on_wire("ibv_ud_pingpong").line(&format!("-g 1 -p {}", free_port()));
    let holder = netns[0].program(staged.program(OTHER_USER, holder)).spawn();
    netns[0].has_udp_sockets(PORT, 1);
    let (server, client) = between(&netns, "ibv_rc_pingpong -g 3").start();
    let said = server.wait_for(LIMIT).failure();
    for part in ["ibv_modify_qp", "UDP port 4791", "EADDRINUSE"] {
        assert!(said.contains(part), "no {part:?}: {said}");
    }
    client.wait_for(LIMIT).failure();
    holder.signal(Signal::KILL);
    holder.wait();
}

/// A configuration that names the wire to an address of the other host.
fn naming(folder: &Folder, name: &str, address: &str) -> std::path::PathBuf {
    let file = folder.path().join(name);
    let text = format!("[[peer]]\naddress = \"{address}\"\nwire = \"roce\"\n");
    std::fs::write(&file, text).expect("a file of ours");
    file
}

/// A server and a client whose options name RoCE v2 for the IPv4 addresses of both hosts only.
fn by_peer(netns: &[Netns; 2], folder: &Folder, line: &str) -> Pair {
    let end = |file: &str, address: &str| {
        let (name, options) = line.split_once(' ').expect("a program and its options");
        roce(name)
            .line(options)
            .env("URNIC_CONFIG", naming(folder, file, address))
    };
    let mut pair = Pair::new(&end("server", "10.77.0.2")).at(SERVER).within(LIMIT);
    pair.server = netns[0].program(pair.server);
    pair.client = netns[1].program(end("client", SERVER));
    pair
}

/// The wire of each peer, at the same time, is that of its address: packets of RoCE v2 are UDP.
#[test]
fn each_peer_has_the_wire_of_its_address() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    let folder = Folder::new("urnic-wires");
    for (gid, is_roce) in [("3", true), ("5", false)] {
        let before = datagrams(&netns[0]);
        let line = format!("ibv_rc_pingpong -g {gid} -c -n 500");
        let both = by_peer(&netns, &folder, &line).succeeds();
        for end in [both.server, both.client] {
            assert!(!end.output.contains("invalid data"), "{end}");
        }
        let passed = datagrams(&netns[0]) - before;
        assert_eq!(passed >= 500, is_roce, "GID {gid}: {passed} datagrams");
    }
}

/// One listener takes a REQ of RoCE v2, and a stream of iWARP.
#[test]
fn a_listener_is_reached_by_both_wires() {
    or_skip!(installed("rping"));
    let netns = or_skip!(Netns::pair());
    let folder = Folder::new("urnic-wires");
    let server = roce("rping")
        .line("-s -P -a :: -p 7471")
        .env("URNIC_CONFIG", naming(&folder, "server", "10.77.0.2"));
    let server = netns[0].program(server).spawn();
    let client = naming(&folder, "client", SERVER);
    for (address, is_roce) in [(SERVER, true), ("fd77::1", false), (SERVER, true)] {
        let before = datagrams(&netns[0]);
        let line = format!("-c -a {address} -p 7471 -C 200 -V");
        let program = roce("rping").line(&line).env("URNIC_CONFIG", &client);
        let said = netns[1].program(program).run_for(LIMIT).success();
        let passed = datagrams(&netns[0]) - before;
        assert_eq!(passed >= 200, is_roce, "{address}: {passed} datagrams: {said}");
    }
    server.signal(Signal::KILL);
    server.wait();
}

/// Servers on the first host, and clients on the second, that check what they receive.
fn several(netns: &[Netns; 2], lines: &[&str]) -> Vec<(Running, Running)> {
    lines.iter().map(|line| between(netns, line).start()).collect()
}

#[track_caller]
fn all_succeed(pairs: impl IntoIterator<Item = (Running, Running)>) {
    for (server, client) in pairs {
        for end in [client, server] {
            let said = end.wait_for(LIMIT).success();
            assert!(!said.contains("invalid data"), "{said}");
        }
    }
}

/// Most packets arrive at the socket of another process first.
#[test]
fn several_processes_use_the_wire_at_the_same_time() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(installed("ib_write_bw"));
    let netns = or_skip!(Netns::pair());
    all_succeed(several(
        &netns,
        &[
            "ibv_rc_pingpong -g 3 -c -n 2000",
            "ibv_rc_pingpong -g 3 -c -n 1000 -s 20000",
            "ibv_rc_pingpong -g 3 -c -e -n 500",
            "ibv_rc_pingpong -g 5 -c -n 1000",
            "ibv_rc_pingpong -g 5 -c -e -n 500 -s 20000",
            "ib_write_bw -F -x 3 -q 4 -n 500",
            "ib_read_bw -F -x 3 -q 2 -n 500",
        ],
    ));
}

#[test]
fn processes_on_one_host_use_the_wire_with_each_other() {
    or_skip!(installed("ibv_rc_pingpong"));
    let host = or_skip!(Netns::new());
    let pair = |line: &str| {
        let mut pair = Pair::new(&on_wire("ibv_rc_pingpong").line(line)).within(LIMIT);
        pair.server = host.program(pair.server);
        pair.client = host.program(pair.client);
        pair.start()
    };
    all_succeed(["-g 3 -c -n 1000", "-g 3 -c -e -n 300 -s 20000", "-g 1 -c -n 300"].map(pair));
}

/// The devices of each program have the port together.
#[test]
fn several_devices_of_a_process_use_the_wire() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    let pairs = ["urnic0", "urnic1"].map(|device| {
        between(&netns, &format!("ibv_rc_pingpong -d {device} -g 3 -c -n 500"))
            .env("URNIC_DEVICES", "2")
            .start()
    });
    all_succeed(pairs);
}

#[test]
fn a_killed_process_takes_no_other_one_with_it() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    let line = "ibv_rc_pingpong -g 3 -c -n 3000 -s 20000";
    let mut pairs = several(
        &netns,
        &[line, line, "ibv_rc_pingpong -g 3 -c -n 100000000", line],
    );
    let (server, client) = pairs.remove(2);
    let before = datagrams(&netns[0]);
    let passes = until(TIME_LIMIT, || {
        (datagrams(&netns[0]) > before + 1000).then_some(())
    });
    assert!(passes.is_some(), "no packets");
    for end in [server, client] {
        end.signal(Signal::KILL);
        end.wait();
    }
    all_succeed(pairs);
}

/// Connections that were in use before it stopped go on. It goes on, too, when it continues.
#[test]
fn a_stopped_process_does_not_stop_the_connections_of_others() {
    or_skip!(installed("ibv_rc_pingpong"));
    let netns = or_skip!(Netns::pair());
    let line = "ibv_rc_pingpong -g 3 -c -n 5000 -s 20000";
    let mut pairs = several(&netns, &[line, line, line]);
    let before = datagrams(&netns[0]);
    let passes = until(TIME_LIMIT, || {
        (datagrams(&netns[0]) > before + 3000).then_some(())
    });
    assert!(passes.is_some(), "no packets");
    let (server, client) = pairs.remove(1);
    for end in [&server, &client] {
        end.stop();
    }
    all_succeed(pairs);
    for end in [&server, &client] {
        end.resume();
    }
    all_succeed([(server, client)]);
}

/// Tries to connect to each name of the port's members, as their own processes do, and writes what
/// one of them would send. Prints how many names closed the connection.
const STRANGER: &str = r"
import socket, sys, time
names = {line.split()[-1] for line in open('/proc/net/unix') if '@urnic/roce/' in line}
refused = 0
for name in names:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(20)
    s.connect('\0' + name[1:])
    try:
        for _ in range(100):
            s.send(b'urF\x01' + bytes(200))
            time.sleep(0.05)
    except OSError:
        refused += 1
print(len(names), refused)
";

#[test]
fn another_user_cannot_pass_packets_on() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(installed("python3"));
    or_skip!(in_process("the names are in this namespace"));
    let netns = or_skip!(Netns::pair());
    let pairs = several(&netns, &["ibv_rc_pingpong -g 3 -c -e -n 20000"]);
    netns[0].has_udp_sockets(PORT, 1);
    let stranger = as_user(NOBODY, Program::plain("python3").args(["-c", STRANGER]));
    let said = netns[0].program(stranger).run_for(LIMIT).success();
    assert_eq!(said.trim(), "1 1");
    all_succeed(pairs);
}

/// UD queue pairs stay with a port for each, but groups have the number of RoCE v2.
#[test]
fn multicast_groups_and_connections_share_the_port() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(installed("mckey"));
    let netns = or_skip!(Netns::pair());
    let member = roce("mckey").line("-m 239.7.7.7 -b 10.77.0.1 -C 10");
    let member = netns[0].program(member).spawn();
    // On the loopback and on the network.
    netns[0].has_udp_sockets(PORT, 2);
    let both = between(&netns, "ibv_rc_pingpong -g 3 -c -n 1000").start();
    let sender = netns[1].program(roce("mckey").line("-m 239.7.7.7 -b 10.77.0.2 -s -C 10"));
    sender.run_for(LIMIT).success();
    all_succeed([both]);
    member.wait_for(LIMIT).success();
}

/// The server and the client of a command of rdma_cm.
fn ends_of(line: &str, at: &str, port: u16) -> [Program; 2] {
    let (name, options) = line.split_once(' ').expect("a program and its options");
    let own = match name {
        "rping" => [format!("-s -a {at}"), format!("-c -a {at}")],
        "ucmatose" | "udaddy" => [String::new(), format!("-s {at}")],
        _ => ["-R -F".to_owned(), format!("-R -F {at}")],
    };
    // It has one port.
    let port = match name {
        "udaddy" => String::new(),
        _ => format!("-p {port}"),
    };
    own.map(|own| on_wire(name).line(&format!("{options} {port} {own}")))
}

/// The ends of a command of rdma_cm.
fn by_rdma_cm(netns: &[Netns; 2], line: &str, faults: &str) -> (Ended, Ended) {
    let port = free_port();
    let [server, client] = ends_of(line, SERVER, port).map(|end| end.env("URNIC_FAULTS", faults));
    let [server, client] = [netns[0].program(server), netns[1].program(client)];
    // perftest has the port for a moment before it listens there.
    for _ in 0..4 {
        let ends = at_port(port, &server, &client, LIMIT);
        if ends.1.ok() || !ends.1.output.contains(EARLY) {
            return ends;
        }
    }
    at_port(port, &server, &client, LIMIT)
}

/// The line about a client that connected before its server listened.
const EARLY: &str = "no program listens there (REJ, reason 8)";

#[test]
fn programs_of_rdma_cm_connect() {
    or_skip!(installed("rping"));
    or_skip!(installed("ib_send_bw"));
    let netns = or_skip!(Netns::pair());
    for line in [
        "rping -C 50 -V -S 3000",
        "ucmatose -c 8 -C 50",
        "ucmatose -c 2 -C 10 -t 32",
        "ib_send_bw -n 300 -q 2",
        "ib_write_bw -n 300",
        "ib_read_lat -n 100",
    ] {
        let (server, client) = by_rdma_cm(&netns, line, "");
        assert!(
            is_done(&server) && is_done(&client),
            "{line}:\n{server}\n{client}"
        );
    }
}

/// All servers on one host, and then all clients on another, or on the same one.
#[track_caller]
fn all_connect(hosts: [&Netns; 2], lines: &[&str], at: &str) {
    let mut pairs = Vec::new();
    for line in lines {
        let port = match line.starts_with("udaddy") {
            true => UDADDY_PORT,
            false => free_port(),
        };
        let [server, client] = ends_of(line, at, port);
        let mut server = hosts[0].program(server).spawn();
        server.wait_until_listening(port);
        pairs.push((line, server, hosts[1].program(client)));
    }
    let clients: Vec<Running> = pairs.iter().map(|(.., client)| client.spawn()).collect();
    for ((line, server, _), client) in pairs.into_iter().zip(clients) {
        let client = client.wait_for(LIMIT);
        let server = match is_done(&client) {
            true => server.wait_for(LIMIT),
            false => server.stopped(),
        };
        assert!(
            is_done(&server) && is_done(&client),
            "{line}:\n{server}\n{client}"
        );
    }
}

/// Commands of rdma_cm that listen at the same time.
const SEVERAL: [&str; 5] = [
    "rping -C 20 -V",
    "ucmatose -c 8 -C 20",
    "rping -C 20 -V -S 3000",
    "udaddy -c 5",
    "ucmatose -c 2 -C 10 -t 32",
];

/// The requests to each of them arrive at the socket of any.
#[test]
fn servers_of_rdma_cm_share_the_port() {
    or_skip!(installed("rping"));
    let [host, peer] = or_skip!(Netns::pair());
    for _ in 0..3 {
        all_connect([&host, &peer], &SEVERAL, SERVER);
    }
}

#[test]
fn programs_of_rdma_cm_connect_on_one_host() {
    or_skip!(installed("rping"));
    let host = or_skip!(Netns::new());
    for _ in 0..5 {
        for line in SEVERAL {
            all_connect([&host, &host], &[line], "127.0.0.1");
        }
    }
    for _ in 0..3 {
        all_connect([&host, &host], &SEVERAL, "127.0.0.1");
    }
}

/// The same number is that of two services, at two addresses.
#[test]
fn servers_of_rdma_cm_may_have_one_number_at_different_addresses() {
    or_skip!(installed("rping"));
    let [host, _peer] = or_skip!(Netns::pair());
    let port = free_port();
    for _ in 0..3 {
        let mut clients = Vec::new();
        for at in ["127.0.0.1", SERVER] {
            let [server, client] = ends_of("rping -C 20 -V", at, port);
            let server = host.program(server).spawn();
            clients.push((server, host.program(client)));
        }
        host.has_udp_sockets(port, clients.len());
        for (server, client) in clients {
            let client = client.run_for(LIMIT);
            assert!(is_done(&client), "{client}");
            let server = server.wait_for(LIMIT);
            assert!(is_done(&server), "{server}");
        }
    }
}

/// The faults strike at the first messages: REQ, REP and RTU, DREQ and DREP are among them.
#[test]
fn messages_that_are_lost_or_repeated_change_no_connection() {
    or_skip!(installed("ucmatose"));
    or_skip!(in_process("faults are those of the device in the process"));
    let netns = or_skip!(Netns::pair());
    for faults in ["drop nth=1", "drop nth=2", "duplicate p=0.5 count=20"] {
        let (server, client) = by_rdma_cm(&netns, "ucmatose -c 2 -C 10", faults);
        assert!(server.ok() && client.ok(), "{faults}:\n{server}\n{client}");
        let struck = [&server, &client].map(|end| end.output.contains(": at a datagram to "));
        assert!(
            struck.contains(&true),
            "{faults} never strikes: {server}\n{client}"
        );
    }
}

#[test]
fn without_a_listener_rdma_connect_is_rejected() {
    or_skip!(installed("ucmatose"));
    let netns = or_skip!(Netns::pair());
    let port = free_port();
    let server = netns[0].program(on_wire("ucmatose").line(&format!("-p {port}")));
    let server = server.spawn();
    netns[0].listens(port);
    let client = on_wire("ucmatose").line(&format!("-s {SERVER} -p {}", free_port()));
    let said = netns[1].program(client).run_for(LIMIT).failure();
    for part in [
        "rdma_connect to 10.77.0.1:",
        "no program listens there (REJ, reason 8)",
        "RDMA_CM_EVENT_REJECTED, status 8",
    ] {
        assert!(said.contains(part), "no {part:?}: {said}");
    }
    server.signal(Signal::KILL);
    server.wait();
}

#[test]
fn requests_of_rdma_cm_to_a_killed_peer_fail() {
    or_skip!(installed("ib_write_bw"));
    let netns = or_skip!(Netns::pair());
    // perftest's client fails if it requests its second connection before the server listens again.
    let client = (0..10).find_map(|_| {
        let port = free_port();
        let line = format!("-R -F -D 60 -p {port}");
        let mut server = netns[0].program(on_wire("ib_write_bw").line(&line)).spawn();
        server.wait_until_listening(port);
        let client = on_wire("ib_write_bw").line(&format!("{line} {SERVER}"));
        let mut client = netns[1].program(client).spawn();
        let passes = until(TIME_LIMIT, || match datagrams(&netns[0]) > 1000 {
            true => Some(true),
            false => client.ended().map(|_| false),
        });
        server.signal(Signal::KILL);
        passes
            .expect("packets, or the end of the client")
            .then_some(client)
    });
    let client = client.expect("one of ten that is in time");
    let said = client.wait_for(LIMIT).failure();
    // IBV_WC_RETRY_EXC_ERR.
    assert!(said.contains("status 12"), "{said}");
}

#[test]
fn stat_shows_queue_pairs_with_their_peers_and_messages() {
    or_skip!(installed("ib_write_bw"));
    let netns = or_skip!(Netns::pair());
    let place = Folder::inside(&scratch(), "roce-wire-stat");
    let pair = between(&netns, "ib_send_bw -F -x 3 -D 60")
        .env("URNIC_PRESENT_DIR", place.path().to_str().expect("our path"));
    let (server, client) = pair.start();
    let stat = || {
        Program::plain(urnic())
            .line("stat --json")
            .env("URNIC_PRESENT_DIR", place.path())
            .run()
            .success()
    };
    let is_shown = |text: &str| {
        let count = |part: &str| text.matches(part).count();
        // Only the client sends messages.
        let some = |name: &str| count(&format!("\"{name}\":")) > count(&format!("\"{name}\":0"));
        count("\"bytes\":\"roce\"") == 2
            && count("\"10.77.0.1:4791\"") == 1
            && some("tx_messages")
            && some("rx_messages")
    };
    let found = until(TIME_LIMIT, || is_shown(&stat()).then_some(()));
    let text = stat();
    for end in [server, client] {
        end.signal(Signal::KILL);
        end.wait();
    }
    assert!(found.is_some(), "{text}");
}

/// What tshark prints of a field, for all packets that pass the filter.
fn tshark(file: &Path, field: &str, filter: &str) -> String {
    let out = Command::new("tshark")
        .env("HOME", "/nonexistent")
        .env_remove("WIRESHARK_CONFIG_DIR")
        .arg("-nr")
        .arg(file)
        .args([
            "-o",
            "ip.check_checksum:TRUE",
            "-T",
            "fields",
            "-e",
            field,
            "-Y",
            filter,
        ])
        .output()
        .expect("tshark runs");
    let complaint = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{complaint}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// The opcodes of a file's packets (InfiniBand Architecture Specification, §9.2.1), and how many
/// packets have each.
fn opcodes(file: &Path) -> BTreeMap<u8, usize> {
    let mut opcodes = BTreeMap::new();
    for opcode in tshark(file, "infiniband.bth.opcode", "infiniband").lines() {
        *opcodes
            .entry(opcode.trim().parse().expect("an opcode"))
            .or_default() += 1;
    }
    opcodes
}

/// tshark does not check the ICRC.
#[test]
fn captures_have_the_packets() {
    or_skip!(installed("tshark"));
    or_skip!(installed("ib_read_bw"));
    or_skip!(in_process("the wire is in the server"));
    let netns = or_skip!(Netns::pair());
    // The opcodes of 10 messages of 5,000 bytes with an MTU of 1,024: first, middle, last; and of
    // the answers that must be there.
    type Case = (&'static str, &'static [(u8, usize)], &'static [u8]);
    let cases: [Case; 4] = [
        ("ib_send_lat -s 5000", &[(0, 1), (1, 3), (2, 1)], &[17]),
        ("ib_write_bw -s 5000", &[(6, 1), (7, 3), (8, 1)], &[17]),
        ("ib_read_bw -s 5000", &[(12, 1), (13, 1), (14, 3), (15, 1)], &[]),
        ("ib_atomic_bw -A FETCH_AND_ADD", &[(20, 1), (18, 1)], &[]),
    ];
    for (line, messages, answers) in cases {
        let folder = Folder::inside(&scratch(), "roce-wire-pcap");
        let file = |end: &str| folder.file(&format!("{end}.pcapng"));
        let mut pair = between(&netns, &format!("{line} -F -x 3 -m 1024 -n 10"));
        pair.server = pair.server.env("URNIC_PCAP", file("server"));
        pair.client = pair.client.env("URNIC_PCAP", file("client"));
        pair.succeeds_after(|| {
            for end in ["server", "client"] {
                let _ = std::fs::remove_file(file(end));
            }
        });
        for end in ["server", "client"] {
            let file = file(end);
            let wrong = "!infiniband || !(udp.dstport == 4791) || _ws.malformed || _ws.expert.severity == \
                         \"Error\" || ip.checksum.status == \"Bad\" || udp.checksum.status == \"Bad\"";
            assert_eq!(tshark(&file, "frame.number", wrong), "", "{line}: {end}");
            let mut seen = opcodes(&file);
            for (opcode, each) in messages {
                let count = seen.remove(opcode).unwrap_or(0);
                // A packet may be sent again on a busy machine.
                assert!(count >= 10 * each, "{line}: {opcode}: {count}");
            }
            for opcode in answers {
                assert!(seen.remove(opcode).is_some(), "{line}: no {opcode}");
            }
            assert_eq!(seen, BTreeMap::new(), "{line}: {end}");
        }
    }
}
