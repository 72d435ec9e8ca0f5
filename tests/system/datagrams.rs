//! Datagrams in numbers: what was sent is received once and undamaged, or counted as dropped.

use std::time::Duration;

use urnic_testkit::Folder;
use urnic_tests::pair::Pair;
use urnic_tests::program::Program;
use urnic_tests::wait::free_port;
use urnic_tests::{compiled, or_skip};

const LIMIT: Duration = Duration::from_secs(120);

/// The program of one end, with counters of its own.
fn end(program: &std::path::Path, presence: &Folder, options: &str) -> Program {
    Program::new(program)
        .env("URNIC_IDENTITY", "roce")
        .env("URNIC_PRESENT_DIR", presence.path())
        .line(options)
}

/// Runs both ends; returns what the receiver says.
#[track_caller]
fn run(options: &str, limit: Duration) -> String {
    let program = match compiled("datagrams") {
        Ok(program) => program,
        Err(reason) => panic!("{reason}"),
    };
    let presences = [Folder::new("datagrams"), Folder::new("datagrams")];
    let pair = Pair {
        server: end(&program, &presences[0], options),
        client: end(&program, &presences[1], options),
        address: "127.0.0.1".to_owned(),
        limit,
    };
    pair.succeeds().server.output
}

#[test]
fn each_datagram_is_received_or_counted() {
    or_skip!(compiled("datagrams"));
    let said = run("-q 20 -n 20000", LIMIT);
    assert!(said.contains("20000 sent"), "{said}");
}

/// Random bytes at the ports, true packets with a wrong bit, cut short, or from another port, and
/// datagrams with a wrong Q_Key.
#[test]
fn hostile_packets_are_dropped_and_nothing_else() {
    or_skip!(compiled("datagrams"));
    let said = run("-q 4 -n 5000 -x", LIMIT);
    assert!(said.contains("5000 hostile"), "{said}");
}

#[test]
#[ignore = "make soak"]
fn ten_million_datagrams_are_received_or_counted() {
    or_skip!(compiled("datagrams"));
    let said = run("-q 16 -n 10000000", Duration::from_secs(3600));
    assert!(said.contains("10000000 sent"), "{said}");
}

#[test]
#[ignore = "make soak"]
fn a_thousand_queue_pairs_in_fifty_processes() {
    let program = or_skip!(compiled("datagrams"));
    let presences: Vec<Folder> = (0..50).map(|_| Folder::new("datagrams")).collect();
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for both in presences.chunks(2) {
        let port = free_port();
        let options = format!("-q 20 -n 20000 -p {port}");
        let mut server = end(&program, &both[0], &options).spawn();
        server.wait_until_listening(port);
        clients.push(end(&program, &both[1], &options).arg("127.0.0.1").spawn());
        servers.push(server);
    }
    for running in clients.into_iter().chain(servers) {
        running.wait_for(Duration::from_secs(600)).success();
    }
}
