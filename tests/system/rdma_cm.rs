//! Programs that connect through librdmacm: Debian's own binaries.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use urnic_tests::build::compiled;
use urnic_tests::debian::{Debian, script, suites_turn};
use urnic_tests::program::{Ended, Program};
use urnic_tests::served::Served;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, or_skip};

const LIMIT: Duration = Duration::from_secs(120);

/// The message of rping 44, which then exits with 255, when its main thread, after its work, closes
/// the channel just before its other thread requests the next event. The same race exists with a
/// kernel device: in the source neither thread waits for the other.
pub(crate) const LOST_RACE: &str = "rdma_get_cm_event: Bad file descriptor\n";

/// Whether the program ended as it does after all its work.
pub(crate) fn is_done(ended: &Ended) -> bool {
    ended.ok() || ended.output.contains(LOST_RACE)
}

/// Runs a server, and a client once that listens at the port.
pub(crate) fn at_port(port: u16, server: &Program, client: &Program, limit: Duration) -> (Ended, Ended) {
    let mut server = server.spawn();
    server.wait_until_listening(port);
    let client = client.run_for(limit);
    if !is_done(&client) {
        // The server may wait for ever for another client.
        return (server.stopped(), client);
    }
    (server.wait_for(limit), client)
}

/// Runs a server and a client; up to three times, while one of them loses the race of
/// [`LOST_RACE`].
pub(crate) fn but_for_lost_races(mut run: impl FnMut() -> (Ended, Ended)) -> (Ended, Ended) {
    let lost = |(server, client): &(Ended, Ended)| {
        server.output.contains(LOST_RACE) || client.output.contains(LOST_RACE)
    };
    for _ in 0..2 {
        let ends = run();
        if !lost(&ends) {
            return ends;
        }
    }
    run()
}

/// A command line, with `PORT` in it.
fn program(line: &str, port: &str) -> Program {
    let line = line.replace("PORT", port);
    let (name, options) = line.split_once(' ').unwrap_or((&line, ""));
    Program::new(name).line(options)
}

/// Runs a server, and a client once it listens.
fn both(server: &str, client: &str, with: impl Fn(Program) -> Program) -> (Ended, Ended) {
    let port = free_port();
    let [server, client] = [server, client].map(|line| with(program(line, &port.to_string())));
    at_port(port, &server, &client, LIMIT)
}

#[track_caller]
fn succeed(server: &str, client: &str) {
    succeed_with(server, client, |program| program);
}

#[track_caller]
pub(crate) fn succeed_with(server: &str, client: &str, with: impl Fn(Program) -> Program) {
    let (server, client) = but_for_lost_races(|| both(server, client, &with));
    client.success();
    server.success();
}

#[test]
fn rping_in_its_forms() {
    or_skip!(installed("rping"));
    for options in ["-C 10", "-C 1000 -S 64 -V", "-C 50 -S 65535 -V", "-C 10 -d"] {
        succeed(
            &format!("rping -s -p PORT {options}"),
            &format!("rping -c -a 127.0.0.1 -p PORT {options}"),
        );
    }
    succeed("rping -s -a ::1 -p PORT -C 10", "rping -c -a ::1 -p PORT -C 10");
}

#[test]
fn every_revision_and_rtr_message() {
    or_skip!(installed("rping"));
    for (name, value) in [
        ("URNIC_MPA_REVISION", "1"),
        ("URNIC_MPA_PEER_TO_PEER", "false"),
        ("URNIC_MPA_RTR_TYPES", "send"),
        ("URNIC_MPA_RTR_TYPES", "write"),
        ("URNIC_MPA_RTR_TYPES", "read"),
        ("URNIC_MPA_RTR_FRAME", "hex"),
        ("URNIC_MPA_CRC", "false"),
        ("URNIC_MPA_MARKERS", "true"),
    ] {
        succeed_with(
            "rping -s -p PORT -C 10 -V",
            "rping -c -a 127.0.0.1 -p PORT -C 10 -V",
            |program| program.env(name, value),
        );
    }
}

#[test]
fn a_hundred_connections_at_once() {
    or_skip!(installed("ucmatose"));
    succeed("ucmatose -c 100 -p PORT", "ucmatose -c 100 -s 127.0.0.1 -p PORT");
}

#[test]
fn synchronous_ids() {
    or_skip!(installed("rdma_server"));
    succeed("rdma_server -p PORT", "rdma_client -s 127.0.0.1 -p PORT");
    succeed(
        "rdma_xserver -c r -p PORT",
        "rdma_xclient -c r -s 127.0.0.1 -p PORT",
    );
}

#[test]
fn rsockets() {
    or_skip!(installed("rstream"));
    for name in ["rstream", "riostream"] {
        let options = "-p PORT -S 4096 -I 200 -C 4";
        succeed(
            &format!("{name} {options}"),
            &format!("{name} {options} -s 127.0.0.1"),
        );
    }
}

#[test]
fn perftest_by_connection_manager() {
    or_skip!(installed("ib_send_bw"));
    for name in [
        "ib_send_bw",
        "ib_send_lat",
        "ib_write_bw",
        "ib_write_lat",
        "ib_read_bw",
        "ib_read_lat",
    ] {
        Pair::line(&format!("{name} -R -F -n 200"))
            .within(LIMIT)
            .succeeds();
    }
}

#[test]
fn a_connect_without_a_listener_is_rejected() {
    or_skip!(installed("ucmatose"));
    let port = free_port().to_string();
    let printed = program("ucmatose -s 127.0.0.1 -p PORT", &port).run().failure();
    assert!(
        printed.contains("RDMA_CM_EVENT_REJECTED, error: -111"),
        "{printed}"
    );
}

#[test]
fn events_are_those_of_the_device() {
    let program = or_skip!(compiled("cm_events"));
    let program = program.to_str().expect("a path");
    for identity in ["iwarp", "roce"] {
        let with = |program: Program| {
            let program = program.env("URNIC_IDENTITY", identity);
            program
                .line(&format!("{identity} 127.0.0.1"))
                .run_for(LIMIT)
                .success();
        };
        with(Program::new(program));
        with(Served::start().program(program));
    }
}

/// A TCP service that sends these bytes to each initiator, and then nothing.
fn other_service(bytes: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        let mut streams = Vec::new();
        while let Ok((mut stream, _)) = listener.accept() {
            stream.write_all(bytes).expect("an initiator");
            streams.push(stream);
        }
    });
    port
}

#[test]
fn another_service_ends_an_attempt_with_its_bytes_in_the_log() {
    or_skip!(installed("rping"));
    for (identity, event) in [
        ("iwarp", "RDMA_CM_EVENT_CONNECT_ERROR, status -71"),
        ("roce", "RDMA_CM_EVENT_REJECTED, status 8"),
    ] {
        let port = other_service(b"HTTP/1.1 400 Bad R");
        let rping = Program::new("rping").line(&format!("-c -a 127.0.0.1 -p {port} -C 1"));
        let said = rping.env("URNIC_IDENTITY", identity).run().failure();
        let line = format!(
            "rdma_connect to 127.0.0.1:{port} failed: the peer does not speak MPA: it sent \
             \"HTTP/1.1 400 Bad R\" ({event})"
        );
        assert!(said.contains(&line), "{said}");
    }
}

#[test]
fn a_listener_resets_what_does_not_speak_mpa() {
    or_skip!(installed("rping"));
    let port = free_port();
    let mut server = Program::new("rping")
        .line(&format!("-s -a 127.0.0.1 -p {port} -C 1"))
        .spawn();
    server.wait_until_listening(port);
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("a listener");
    stream.write_all(b"GET / ").expect("a listener");
    assert!(stream.read(&mut [0; 1]).is_err(), "the stream is reset");
    let line = r#"brought no MPA Request: the peer does not speak MPA: it sent "GET / ""#;
    server.wait_for_output(line, |output| output.contains(line).then_some(()));
    server.stopped();
}

#[test]
fn datagrams_are_refused_with_a_message() {
    or_skip!(installed("udaddy"));
    for line in [
        "udaddy",
        "udaddy -s 127.0.0.1",
        "udpong -s 127.0.0.1",
        "mckey -m 224.1.1.1 -b 127.0.0.1",
    ] {
        let printed = program(line, "").run().failure();
        assert!(printed.contains("Operation not supported"), "{line}: {printed}");
    }
}

/// rdma-core's own tests of librdmacm.
fn suite(folder: &str) -> Program {
    let runner = format!("{folder}/run_tests.py");
    // Python 3.13 warns, amid the results, of forks in programs with threads.
    Program::new("/usr/bin/python3").args([
        "-B",
        "-W",
        "ignore",
        &runner,
        "--dev",
        "urnic0",
        "-v",
        "test_rdmacm",
    ])
}

/// One process reads the data that the other wrote as soon as that other's Write completed. On
/// iWARP a Write is complete when TCP has taken it; only a message after it proves its arrival,
/// and this test sends none.
fn checked_too_early(ended: &Ended) -> bool {
    ["ERROR: test_rdmacm_async_write", "Data validation failure"]
        .iter()
        .all(|words| ended.output.contains(words))
}

/// Runs the tests: `passing` or more pass, and none fails but the one that `may_fail`. Up to three
/// times, while a process reads too early.
#[track_caller]
fn passes(suite: &Program, passing: usize, may_fail: Option<&str>) {
    let _turn = suites_turn();
    let mut ended = suite.run_for(LIMIT);
    for _ in 0..2 {
        if checked_too_early(&ended) {
            ended = suite.run_for(LIMIT);
        }
    }
    let lines = || ended.output.lines();
    // Output of a test comes between its name and its result.
    let passed = lines()
        .filter(|line| line.ends_with("... ok") || *line == "ok")
        .count();
    assert!(passed >= passing, "{ended}");
    let failed = lines().filter_map(|line| line.strip_prefix("FAIL: ").or(line.strip_prefix("ERROR: ")));
    for line in failed {
        assert!(may_fail.is_some_and(|name| line.starts_with(name)), "{ended}");
    }
    assert!(ended.ok() || may_fail.is_some(), "{ended}");
}

/// Version 44 reports every error in its test of datagrams as a failure; later versions skip the
/// test where datagrams are unsupported.
const CANNOT_SKIP: &str = "test_rdmacm_async_udp_traffic";

#[test]
fn rdma_cores_tests_of_librdmacm_pass_but_one() {
    let folder = or_skip!(script("rdma-core-tests", &[]));
    passes(&suite(&folder), 6, Some(CANNOT_SKIP));
}

#[test]
fn the_other_debians_tests_of_librdmacm_pass_too() {
    let debian = or_skip!(Debian::other());
    let suite = or_skip!(debian.program_with_tests(suite("/tmp/urnic/tests")));
    let may_fail = (debian.suite == "bookworm").then_some(CANNOT_SKIP);
    passes(&suite, 6, may_fail);
}
