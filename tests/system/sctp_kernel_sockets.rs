//! DDP over the kernel's SCTP sockets (`sctp.transport=kernel`): programs over urnic in the guest,
//! whose kernel has the module. Their peers are of the same kind, or `tests/programs/sctp_peer.c`
//! in packets of IP; or SCTP from our library, in UDP, on this machine.

use urnic_tests::build::{plugin, scratch, stripped};
use urnic_tests::guest::{Guest, HOST, Packets};
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::shell::{LIMIT, Task};
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;

use crate::sctp_kernel::{count, fragments};

/// The plug-in in the guest.
const PLUGIN: &str = "/tmp/liburnic-sctp.so";

/// The guest's address on QEMU's user network.
const GUEST: &str = "10.0.2.15";

/// Puts the plug-in there.
#[track_caller]
fn bring_plugin(guest: &Guest) -> Result<(), String> {
    let folder = urnic_testkit::Folder::inside(&scratch(), "sctp-guest");
    let small = folder.file("liburnic.so");
    stripped(plugin(), &small)?;
    guest.bring(&small, PLUGIN);
    Ok(())
}

/// Puts the plug-in there, besides `sctp_peer`, whose path this returns.
#[track_caller]
fn with_plugin(guest: &Guest) -> Result<&'static str, String> {
    bring_plugin(guest)?;
    guest.with_sctp()
}

/// A command line of a program over urnic in the guest.
fn over(transport: &str, line: &str) -> String {
    format!("URNIC_LLP=sctp URNIC_SCTP_TRANSPORT={transport} LD_PRELOAD={PLUGIN} {line}")
}

fn kernel(line: &str) -> String {
    over("kernel", line)
}

/// The output of both ends, the server's first; both have succeeded.
#[track_caller]
fn both(server: Task, client: Task) -> (String, String) {
    let (client_ok, client) = client.ends();
    let (server_ok, server) = server.ends();
    assert!(
        client_ok && server_ok,
        "--- the server:\n{server}\n--- the client:\n{client}"
    );
    (server, client)
}

/// The number of associations that programs in the guest have begun.
#[track_caller]
fn associations(guest: &Guest) -> u32 {
    let printed = guest.start("grep SctpActiveEstabs /proc/net/sctp/snmp").success();
    let count = printed.split_whitespace().nth(1).map(str::parse);
    count.expect("a count").expect("a number")
}

#[test]
fn two_programs_connect_by_the_kernels_sctp() {
    let guest = or_skip!(Guest::borrowed());
    let _peer = or_skip!(with_plugin(&guest));
    let port = guest.port;
    let before = fragments(&guest);
    let server = guest.sctp_listener(&kernel(&format!("rping -s -p {port} -v -V -C 20 -S 50000")));
    let client = guest.start(&kernel(&format!(
        "rping -c -a {GUEST} -p {port} -v -V -C 20 -S 50000"
    )));
    let (_, client) = both(server, client);
    assert_eq!(count(&client, "ping data: rdma-ping-"), 20, "{client}");

    // Connections from one address share an association.
    let begun = associations(&guest);
    let server = guest.sctp_listener(&kernel(&format!("ucmatose -p {port} -c 4 -C 8 -S 3000")));
    let client = guest.start(&kernel(&format!(
        "ucmatose -s {GUEST} -p {port} -c 4 -C 8 -S 3000"
    )));
    both(server, client);
    assert_eq!(associations(&guest), begun + 1);
    assert_eq!(fragments(&guest), before);
}

#[test]
fn queue_pairs_connect_by_exchanged_numbers() {
    let guest = or_skip!(Guest::borrowed());
    let _peer = or_skip!(with_plugin(&guest));
    let port = guest.port;
    // The address of a link has a scope, which accept(2) of SCTP does not tell.
    let gids = guest
        .start(&kernel("ibv_devinfo -d urnic0 -v | grep GID"))
        .success();
    for address in ["ffff:0a00:020f", "fe80:0000"] {
        let line = gids.lines().find(|line| line.contains(address));
        let index = line.and_then(|line| line.split(['[', ']']).nth(1)).map(str::trim);
        let options = format!("-g {} -n 100 -s 20000 -c", index.expect("a GID"));
        let begun = associations(&guest);
        let server = guest.listener(&kernel(&format!(
            "timeout 60 ibv_rc_pingpong -p {port} {options}"
        )));
        let client = kernel(&format!("timeout 60 ibv_rc_pingpong -p {port} {options} {GUEST}"));
        let (_, client) = both(server, guest.start(&client));
        assert_eq!(count(&client, "100 iters"), 1, "{client}");
        // Both ends may connect at once.
        assert!(associations(&guest) > begun, "over TCP: {client}");
    }
}

#[test]
fn a_kernel_peer_without_udp_connects_to_a_program() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(with_plugin(&guest));
    let port = guest.port;
    for form in ["", "enhanced"] {
        let server = guest.sctp_listener(&kernel(&format!("rping -s -p {port} -v -V -C 20 -S 4000")));
        let client = guest.start(&format!("{peer} active {GUEST} {port} rping 20 size 4000 {form}"));
        let (_, client) = both(server, client);
        assert_eq!(count(&client, "is well"), 20, "{client}");
    }
    let server = guest.sctp_listener(&kernel(&format!("ucmatose -p {port} -c 4 -C 8 -S 3000")));
    let line = format!("{peer} active {GUEST} {port} enhanced sessions 4 sends 8 size 3000");
    let (_, client) = both(server, guest.start(&line));
    assert_eq!(count(&client, "of 3000 bytes"), 32, "{client}");
    // A program that exits aborts it, if it is first.
    let ends = ["association: ended", "association: Connection reset by peer"];
    assert_eq!(
        ends.map(|end| count(&client, end)).iter().sum::<usize>(),
        1,
        "{client}"
    );
}

#[test]
fn a_program_connects_to_a_kernel_peer_without_udp() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(with_plugin(&guest));
    let port = guest.port;
    let server = guest.sctp_listener(&format!("{peer} passive {port} rping 1"));
    let client = guest.start(&kernel(&format!(
        "rping -c -a {GUEST} -p {port} -v -V -C 20 -S 4000"
    )));
    let (server, client) = both(server, client);
    assert_eq!(count(&client, "ping data: rdma-ping-"), 20, "{client}");
    assert_eq!(count(&server, "received Enhanced Initiate"), 1, "{server}");

    let server = guest.sctp_listener(&format!("{peer} passive {port} reject"));
    let (ok, client) = guest
        .start(&kernel(&format!("rping -c -a {GUEST} -p {port} -C 1")))
        .ends();
    assert!(!ok && client.contains("REJECTED"), "{client}");
    server.success();
}

/// RFC 5043 §11.1: both ends must say that they support DDP.
#[test]
fn an_association_without_ddp_is_aborted() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(with_plugin(&guest));
    let port = guest.port;
    let server = guest.sctp_listener(&kernel(&format!("rping -s -p {port} -C 1 -S 100")));
    for adaptation in [0, 2] {
        let line = format!("{peer} active {GUEST} {port} adaptation {adaptation}");
        let (ok, printed) = guest.start(&line).ends();
        assert!(!ok && count(&printed, "received") == 0, "{printed}");
    }
    // The listener goes on.
    let line = format!("{peer} active {GUEST} {port} rping 1 size 100");
    let (_, client) = both(server, guest.start(&line));
    assert_eq!(count(&client, "is well"), 1, "{client}");

    let server = guest.sctp_listener(&format!("{peer} passive {port} adaptation 0"));
    let line = kernel(&format!("rping -c -a {GUEST} -p {port} -C 1"));
    let (ok, client) = guest.start(&line).ends();
    assert!(!ok, "{client}");
    guest.stop();
    let (_, server) = server.ends();
    assert_eq!(count(&server, "received"), 0, "{server}");
}

#[test]
fn an_association_with_ordered_messages_is_aborted() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(with_plugin(&guest));
    let port = guest.port;
    let server = guest.sctp_listener(&kernel(&format!("rping -s -p {port} -C 1 -S 100")));
    let line = format!("{peer} active {GUEST} {port} rping 1 size 100");
    let (ok, printed) = guest.start(&format!("{line} ordered")).ends();
    let is_reset = printed.contains("reset by peer");
    assert!(!ok && is_reset && count(&printed, "received") == 0, "{printed}");
    // The listener goes on.
    let (_, client) = both(server, guest.start(&line));
    assert_eq!(count(&client, "is well"), 1, "{client}");
}

/// The library, in UDP, and the kernel: which learns the UDP port of a peer from its packets, or is
/// told it.
#[test]
fn both_transports_understand_each_other() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    let _peer = or_skip!(with_plugin(&guest));
    let ours = |line: &str| Program::new("rping").line(line).env("URNIC_LLP", "sctp");
    let port = guest.port;
    let server = guest.sctp_listener(&kernel(&format!("rping -s -p {port} -v -V -C 20 -S 4000")));
    let client = ours(&format!("-c -a 127.0.0.1 -p {port} -v -V -C 20 -S 4000")).run_for(LIMIT);
    if !client.ok() {
        guest.stop();
    }
    let (server_ok, server) = server.ends();
    assert!(
        client.ok() && server_ok,
        "--- the kernel:\n{server}\n--- here:\n{client}"
    );
    assert_eq!(
        count(&client.to_string(), "ping data: rdma-ping-"),
        20,
        "{client}"
    );

    let port = free_port();
    let mut server = ours(&format!("-s -p {port} -v -V -C 20 -S 4000")).spawn();
    server.wait_until_listening(port);
    let line = over(
        "kernel-udp",
        &format!("rping -c -a {HOST} -p {port} -v -V -C 20 -S 4000"),
    );
    let (ok, client) = guest.start(&line).ends();
    assert!(ok, "--- the kernel:\n{client}\n--- here:\n{}", server.output());
    assert_eq!(count(&client, "ping data: rdma-ping-"), 20, "{client}");
    server.wait_for(LIMIT);
}

#[test]
fn a_program_sees_that_its_peer_has_ended() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(with_plugin(&guest));
    let port = guest.port;
    let server = guest.sctp_listener(&kernel(&format!(
        "rping -s -p {port} -v -S 1000 >/tmp/rping 2>&1"
    )));
    let client = guest.start(&format!("{peer} active {GUEST} {port} rping 1000000 size 1000"));
    let wait = "n=0; until grep -q 'server ping data' /tmp/rping; do n=$((n+1)); [ $n -lt 300 ] || exit 1; sleep 0.1; done";
    guest.start(wait).success();
    guest.start("killall -9 sctp_peer").success();
    let _ = client.ends();
    let _ = server.ends();
    let printed = guest.start("cat /tmp/rping").success();
    assert!(printed.contains("DISCONNECT"), "{printed}");
}

/// The error says what is missing, and what to do.
#[test]
fn a_kernel_without_sctp_is_an_error() {
    // This kernel has no modprobe, by which a Debian loads the module with the first socket.
    let guest = or_skip!(Guest::boot(1, 512, Packets::Passing));
    or_skip!(bring_plugin(&guest));
    for line in ["rping -s -p 4711 -C 1", "rping -c -a 10.0.2.15 -p 4711 -C 1"] {
        let (ok, printed) = guest.start(&kernel(line)).ends();
        assert!(!ok, "{printed}");
        assert_eq!(count(&printed, "modprobe sctp"), 1, "{printed}");
    }
    let over_udp = over("udp", "timeout 2 rping -s -p 4711 -C 1");
    let (_, printed) = guest.start(&over_udp).ends();
    assert_eq!(count(&printed, "modprobe"), 0, "{printed}");
}

/// Captures and faults have nothing to act on.
#[test]
fn a_capture_of_the_kernels_packets_is_refused_in_words() {
    let guest = or_skip!(Guest::borrowed());
    let _peer = or_skip!(with_plugin(&guest));
    for option in ["URNIC_PCAP=/tmp/capture.pcapng", "URNIC_FAULTS=\"drop p=0.5\""] {
        let line = kernel("timeout 2 rping -s -p 4711 -C 1");
        let (_, printed) = guest.start(&format!("{option} {line}")).ends();
        assert_eq!(
            count(&printed, "cannot be captured, and no fault acts"),
            1,
            "{printed}"
        );
    }
}
