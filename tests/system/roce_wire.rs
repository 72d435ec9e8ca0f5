//! `--wire roce`: queue pairs of kind RC that speak RoCE v2 over UDP port 4791. A host has the port
//! once, hence two hosts.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::netns::Netns;
use urnic_tests::program::{Ended, Program};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, free_port, until};
use urnic_tests::{Pair, or_skip};

use crate::rdma_cm::at_port;
use crate::roce::{LIMIT, roce};

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
        // The address of IPv6.
        "-g 5 -c -n 200",
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

/// The datagrams that a host has received.
fn datagrams(netns: &Netns) -> u64 {
    let shown = netns
        .program(Program::plain("cat").arg("/proc/net/snmp"))
        .run()
        .success();
    let values = shown.lines().filter_map(|line| line.strip_prefix("Udp: ")).nth(1);
    let first = values.and_then(|values| values.split(' ').next());
    first.and_then(|value| value.parse().ok()).expect("InDatagrams")
}

#[test]
fn requests_to_a_killed_peer_fail_after_all_retries() {
    or_skip!(installed("ib_send_bw"));
    for line in ["ib_write_bw -D 60", "ib_read_bw -D 60"] {
        let netns = or_skip!(Netns::pair());
        let (server, client) = between(&netns, &format!("{line} -F -x 3")).start();
        let passes = until(TIME_LIMIT, || (datagrams(&netns[0]) > 1000).then_some(()));
        assert!(passes.is_some(), "{line}: no packets");
        server.signal(Signal::KILL);
        let said = client.wait_for(LIMIT).failure();
        // IBV_WC_RETRY_EXC_ERR.
        assert!(said.contains("status 12"), "{said}");
    }
}

#[test]
fn a_second_process_on_an_address_is_told_who_has_the_port() {
    or_skip!(installed("ibv_rc_pingpong"));
    let host = or_skip!(Netns::new());
    let serving = || {
        let port = free_port();
        let line = format!("-g 1 -p {port}");
        (host.program(on_wire("ibv_rc_pingpong").line(&line)), port)
    };
    let (first, _) = serving();
    let first = first.spawn();
    host.has_udp_sockets(PORT, 1);
    let said = serving().0.run().failure();
    for part in ["ibv_create_qp", "UDP port 4791", "EADDRINUSE"] {
        assert!(said.contains(part), "no {part:?}: {said}");
    }
    // The port is free when its process has ended.
    first.signal(Signal::KILL);
    first.wait();
    let (mut third, port) = {
        let (program, port) = serving();
        (program.spawn(), port)
    };
    host.listens(port);
    assert!(third.ended().is_none());
    third.signal(Signal::KILL);
    third.wait();
}

/// The ends of a command of rdma_cm.
fn by_rdma_cm(netns: &[Netns; 2], line: &str, faults: &str) -> (Ended, Ended) {
    let (name, options) = line.split_once(' ').expect("a program and its options");
    let port = free_port();
    let [server, client] = match name {
        "rping" => [format!("-s -a {SERVER}"), format!("-c -a {SERVER}")],
        "ucmatose" | "udaddy" => [String::new(), format!("-s {SERVER}")],
        _ => ["-R -F".to_owned(), format!("-R -F {SERVER}")],
    };
    let end = |end: usize, own: String| {
        let program = on_wire(name).line(&format!("{options} -p {port} {own}"));
        netns[end].program(program.env("URNIC_FAULTS", faults))
    };
    let [server, client] = [end(0, server), end(1, client)];
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
        assert!(server.ok() && client.ok(), "{line}:\n{server}\n{client}");
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
    let port = free_port();
    let line = format!("-R -F -D 60 -p {port}");
    let mut server = netns[0].program(on_wire("ib_write_bw").line(&line)).spawn();
    server.wait_until_listening(port);
    let client = on_wire("ib_write_bw").line(&format!("{line} {SERVER}"));
    let client = netns[1].program(client).spawn();
    let passes = until(TIME_LIMIT, || (datagrams(&netns[0]) > 1000).then_some(()));
    assert!(passes.is_some(), "no packets");
    server.signal(Signal::KILL);
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
