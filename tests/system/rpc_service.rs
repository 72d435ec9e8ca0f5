//! A service over RPC-over-RDMA: the transport's own example, at both ends of a connection.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::OnceLock;

use rustix::process::Signal;
use urnic_tests::build::{example, scratch};
use urnic_tests::capture::Wire;
use urnic_tests::or_skip;
use urnic_tests::program::{Program, Running};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, descriptors, free_port, until};

fn callback(line: &str) -> Program {
    static EXAMPLE: OnceLock<PathBuf> = OnceLock::new();
    Program::new(EXAMPLE.get_or_init(|| example("rpc-rdma/verbs", "callback"))).line(line)
}

fn reverse(line: &str) -> Program {
    static EXAMPLE: OnceLock<PathBuf> = OnceLock::new();
    Program::new(EXAMPLE.get_or_init(|| example("rpc-rdma/verbs", "reverse"))).line(line)
}

/// The output of a scene, which has server and clients in one process.
#[track_caller]
fn scene(name: &str) -> String {
    static EXAMPLE: OnceLock<PathBuf> = OnceLock::new();
    let program = Program::new(EXAMPLE.get_or_init(|| example("rpc-rdma/verbs", "scenes")));
    program.line(name).run().success()
}

fn serving(program: Program) -> (Running, String) {
    let mut server = program.spawn();
    let address = server.wait_for_output("where it listens", |printed| {
        let mut lines = printed.lines();
        lines.find_map(|line| line.strip_prefix("serving at ").map(str::to_owned))
    });
    (server, address)
}

fn calls(address: &str, bytes: u32, times: u32) -> Program {
    reverse(&format!("call {address} {bytes} {times}"))
}

#[test]
fn bytes_come_back_reversed_within_messages_and_by_rdma() {
    let (_server, address) = serving(reverse("serve 127.0.0.1:0"));
    for bytes in [1, 4, 5, 1000, 4000, 4096, 5001, 65_536, 1_000_003, 2 << 20] {
        let printed = calls(&address, bytes, 3).run().success();
        assert_eq!(printed, format!("{bytes} bytes reversed 3 times\n"));
    }
}

#[test]
fn sixteen_clients_are_served_at_once_without_leaks() {
    let (server, address) = serving(reverse("serve 127.0.0.1:0"));
    calls(&address, 300_000, 1).run().success();
    let before = descriptors(server.pid());
    let clients: Vec<_> = (1..=16)
        .map(|n| calls(&address, n * 10_000, 20).spawn())
        .collect();
    for client in clients {
        client.wait().success();
    }
    let left = until(TIME_LIMIT, || (descriptors(server.pid()) <= before).then_some(()));
    assert!(
        left.is_some(),
        "{} descriptors, {before} before",
        descriptors(server.pid())
    );
}

/// Checks that a client with this variable set continues after its server was killed and restarted.
#[track_caller]
fn continues(variable: Option<&str>) {
    let line = format!("serve 127.0.0.1:{}", free_port());
    let (server, address) = serving(reverse(&line));
    let client = reverse(&format!("call {address} 200000 forever"));
    let mut client = variable
        .into_iter()
        .fold(client, |client, name| client.env(name, "1"))
        .spawn();
    client.wait_for_output("how far it is", |printed| {
        printed.contains("100 times").then_some(())
    });
    server.signal(Signal::KILL);
    drop(server);
    let seen = client.output().len();
    let _server = serving(reverse(&line));
    client.wait_for_output_from(seen, "that it continues", |printed| {
        (printed.lines().count() > 3).then_some(())
    });
    assert_eq!(client.ended(), None);
}

#[test]
fn a_client_continues_with_a_restarted_server() {
    continues(None);
}

#[test]
fn a_client_killed_in_a_call_is_removed() {
    let (server, address) = serving(reverse("serve 127.0.0.1:0"));
    calls(&address, 300_000, 1).run().success();
    let before = descriptors(server.pid());
    let mut client = reverse(&format!("call {address} 1000000 forever")).spawn();
    client.wait_for_output("how far it is", |printed| {
        printed.contains("100 times").then_some(())
    });
    client.signal(Signal::KILL);
    client.wait();
    let left = until(TIME_LIMIT, || (descriptors(server.pid()) <= before).then_some(()));
    assert!(
        left.is_some(),
        "{} descriptors, {before} before",
        descriptors(server.pid())
    );
    calls(&address, 300_000, 1).run().success();
}

#[test]
fn a_client_without_a_server_reports_that() {
    let printed = reverse(&format!("call 127.0.0.1:{} 5 1", free_port()))
        .env("REVERSE_PATIENCE", "1")
        .run()
        .failure();
    assert!(printed.contains("cannot be reached"), "{printed}");
}

#[test]
fn a_server_without_memory_accepts_no_client() {
    let (_server, address) = serving(reverse("serve 127.0.0.1:0").env("REVERSE_MEMORY", "0"));
    let printed = calls(&address, 5, 1).env("REVERSE_PATIENCE", "1").run().failure();
    assert!(printed.contains("cannot be reached"), "{printed}");
}

/// Memory is exposed for one call alone: data that goes by RDMA has a new key for each call, and
/// the reply invalidates the key.
#[test]
fn each_call_exposes_its_own_memory_and_the_reply_ends_that() {
    or_skip!(installed("tshark"));
    or_skip!(in_process("the wire is in the server"));
    let file: PathBuf = scratch().join(format!("rpc-service-{}.pcapng", std::process::id()));
    let (server, address) = serving(reverse("serve 127.0.0.1:0").env("URNIC_PCAP", &file));
    calls(&address, 50_000, 8).run().success();
    server.stopped();
    let dissection = Wire::of(file).dissect();
    dissection.is_clean();
    let count = |opcode| dissection.opcodes.get(&opcode).copied().unwrap_or_default();
    // Calls by Send, replies by Send with Invalidate; between them Writes, Read Requests and
    // Responses, some of them for the connection's start.
    assert_eq!([3, 4].map(count), [8; 2], "{:?}", dissection.opcodes);
    assert!(
        [0, 1, 2].map(count).iter().all(|count| *count >= 8),
        "{:?}",
        dissection.opcodes
    );
    // Argument and result of each call have keys that no other call has; the reply invalidates one
    // of them remotely.
    let keys = |filter: &str, field: &str| {
        let printed = dissection.wire.tshark(&["-T", "fields", "-e", field], filter);
        let key = |word: &str| match word.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).expect("a key"),
            None => word.parse().expect("a key"),
        };
        printed.split_whitespace().map(key).collect::<BTreeSet<u32>>()
    };
    // The Read of no bytes is the start of the connection.
    let read = keys(
        "iwarp_rdma.opcode == 1 && iwarp_rdma.rdmardsz != 0",
        "iwarp_rdma.srcstag",
    );
    let written = keys("iwarp_rdma.opcode == 0", "iwarp_ddp.stag");
    let taken = keys("iwarp_rdma.opcode == 4", "iwarp_rdma.inval_stag");
    assert_eq!(
        [&read, &written, &taken].map(BTreeSet::len),
        [8; 3],
        "{read:?}, {written:?}, {taken:?}"
    );
    assert!(read.is_disjoint(&written), "{read:?}, {written:?}");
    assert!(
        taken.is_subset(&(&read | &written)),
        "{taken:?} of {read:?}, {written:?}"
    );
}

/// During a call the server calls the client, which answers while it waits; with more such calls at
/// once than the server has threads.
#[test]
fn a_server_calls_the_clients_that_call_it() {
    let (server, address) = serving(callback("serve 127.0.0.1:0"));
    let clients: Vec<_> = (1..=4)
        .map(|steps| (steps, callback(&format!("call {address} {}", steps * 20)).spawn()))
        .collect();
    for (steps, client) in clients {
        let printed = client.wait().success();
        let countdown: String = (0..steps * 20)
            .rev()
            .map(|step| format!("step {step}\n"))
            .collect();
        assert_eq!(
            printed,
            format!("called back\n{countdown}counted down 28 bytes\n")
        );
    }
    // The server does not wait for a client that has ended.
    let client = callback(&format!("call {address} 1000000000")).spawn();
    let mut client = client;
    client.wait_for_output("that it is called", |printed| {
        printed.contains("step").then_some(())
    });
    client.signal(Signal::KILL);
    client.wait();
    callback(&format!("call {address} 1")).run().success();
    drop(server);
}

/// Calls of one connection may wait for each other, also while the thread that received them is
/// busy.
#[test]
fn calls_of_a_connection_may_wait_for_each_other() {
    assert_eq!(scene("waits"), "met 100 times\n");
}

#[test]
fn a_client_that_makes_no_calls_can_be_called() {
    assert_eq!(scene("attends"), "called\n");
}

/// RFC 8167 §6: the answer is PROC_UNAVAIL, which is 3, and does not come from the service.
#[test]
fn only_calls_in_the_binding_go_backward() {
    assert_eq!(scene("unavailable"), "7\n3\n7\n");
}

#[test]
fn a_client_without_callbacks_is_not_disturbed_by_calls() {
    assert_eq!(scene("deaf"), "cancelled\ncancelled\nthe same connection: true\n");
}

#[test]
fn the_longest_silent_client_is_closed_for_a_new_one() {
    assert_eq!(
        scene("crowd"),
        "client 0: stayed\nclient 2: stayed\nclient 1: came back\n"
    );
}

/// Like soft-iWARP, which has no memory windows: each call registers the memory that it exposes,
/// and the peer cannot invalidate it.
#[test]
fn bytes_come_back_by_rdma_also_without_memory_windows() {
    let file: PathBuf = scratch().join(format!("rpc-service-mr-{}.pcapng", std::process::id()));
    let server = reverse("serve 127.0.0.1:0");
    let captured = installed("tshark").is_ok() && in_process("").is_ok();
    let (server, address) = serving(if captured {
        server.env("URNIC_PCAP", &file)
    } else {
        server
    });
    for bytes in [1, 4096, 50_000, 1_000_003, 2 << 20] {
        let calls = calls(&address, bytes, 5).env("REVERSE_WITHOUT_WINDOWS", "1");
        assert_eq!(calls.run().success(), format!("{bytes} bytes reversed 5 times\n"));
    }
    server.stopped();
    if !captured {
        return urnic_tests::skip::report("needs a capture of the wire");
    }
    let dissection = Wire::of(file).dissect();
    dissection.is_clean();
    let count = |opcode| dissection.opcodes.get(&opcode).copied().unwrap_or_default();
    assert!(count(3) >= 50 && count(4) == 0, "{:?}", dissection.opcodes);
}

#[test]
fn a_client_without_windows_continues_after_a_restart() {
    continues(Some("REVERSE_WITHOUT_WINDOWS"));
}
