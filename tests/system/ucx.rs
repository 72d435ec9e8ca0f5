//! UCX with the identity of a RoCE NIC: ucx_info, ucx_perftest.

use std::time::Duration;

use urnic_tests::build::compiled_for_ucx;
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::{installed, root};
use urnic_tests::user::{NOBODY, Staged};
use urnic_tests::wait::free_port;

const LIMIT: Duration = Duration::from_secs(120);

/// A program of UCX with these transports, which reports the transport of each endpoint.
fn with_transports(name: &str, transports: &str) -> Program {
    let program = Program::new(name)
        .env("URNIC_IDENTITY", "roce")
        .env("UCX_LOG_LEVEL", "info");
    match transports {
        "" => program,
        transports => program.env("UCX_TLS", transports),
    }
}

/// Runs ucx_perftest between two processes; returns what the client said.
#[track_caller]
fn perftest(program: &Program, options: &str) -> String {
    let port = free_port();
    let options = format!("-p {port} -f {options}");
    let mut server = program.clone().line(&options).spawn();
    server.wait_until_listening(port);
    let client = program.clone().line(&format!("127.0.0.1 {options}"));
    let said = client.run_for(LIMIT).success();
    server.wait_for(LIMIT).success();
    said
}

/// Iterations that a busy machine of two cores makes in seconds.
fn iterations(size: usize) -> usize {
    match size {
        ..=4096 => 500,
        4097..=1_048_576 => 50,
        _ => 4,
    }
}

#[test]
fn ucx_info_finds_both_transports_and_the_connection_manager() {
    or_skip!(installed("ucx_info"));
    let said = with_transports("ucx_info", "").arg("-d").run().success();
    for shown in [
        "Transport: rc_verbs",
        "Transport: ud_verbs",
        "Device: urnic0:1",
        "Connection manager: rdmacm",
        "atomic_cswap: 64 bit",
    ] {
        assert!(said.contains(shown), "no {shown:?} in:\n{said}");
    }
}

#[test]
fn each_ucp_test_over_rc() {
    or_skip!(installed("ucx_perftest"));
    let program = with_transports("ucx_perftest", "rc,ud,self");
    for test in [
        "tag_lat",
        "tag_bw",
        "tag_sync_lat",
        "ucp_put_lat",
        "ucp_put_bw",
        "ucp_get",
        "stream_lat",
        "ucp_am_lat",
        "ucp_am_bw",
    ] {
        for size in [8, 65_536, 4 << 20] {
            let n = iterations(size);
            let said = perftest(&program, &format!("-t {test} -s {size} -n {n} -w 2"));
            assert!(said.contains("rc_verbs/urnic0:1"), "{test} {size}:\n{said}");
        }
    }
    for test in ["ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap"] {
        perftest(&program, &format!("-t {test} -s 8 -n 200 -w 2"));
    }
}

#[test]
fn ucp_messages_over_ud() {
    or_skip!(installed("ucx_perftest"));
    let program = with_transports("ucx_perftest", "ud_verbs,self");
    for test in ["tag_lat", "tag_bw", "stream_lat", "ucp_am_lat"] {
        for size in [8, 65_536] {
            let n = iterations(size);
            let said = perftest(&program, &format!("-t {test} -s {size} -n {n} -w 2"));
            assert!(said.contains("ud_verbs/urnic0:1"), "{test} {size}:\n{said}");
        }
    }
}

#[test]
fn an_ordinary_user_has_both_transports() {
    or_skip!(root());
    or_skip!(installed("ucx_perftest"));
    let staged = Staged::new();
    for (transports, chosen) in [("rc,ud,self", "rc_verbs"), ("ud_verbs,self", "ud_verbs")] {
        let program = staged.program(NOBODY, with_transports("ucx_perftest", transports));
        for size in [8, 65_536] {
            let n = iterations(size);
            let said = perftest(&program, &format!("-t tag_lat -s {size} -n {n} -w 2"));
            assert!(said.contains(&format!("{chosen}/urnic0:1")), "{size}:\n{said}");
        }
    }
}

#[test]
fn sleeping_and_with_threads() {
    or_skip!(installed("ucx_perftest"));
    for transports in ["rc,ud,self", "ud,self"] {
        let program = with_transports("ucx_perftest", transports);
        perftest(&program, "-t tag_lat -s 8 -n 300 -w 2 -E sleep");
    }
    let program = with_transports("ucx_perftest", "rc,ud,self");
    perftest(&program, "-t tag_lat -s 64 -n 300 -w 2 -T 3 -M multi");
}

#[test]
fn uct_transfers_of_both_transports() {
    or_skip!(installed("ucx_perftest"));
    let program = with_transports("ucx_perftest", "");
    let rc = [
        "am_lat -D short -s 64",
        "am_bw -D zcopy -s 1000",
        "put_lat -D short -s 64",
        "put_bw -D zcopy -s 65536",
        "get -D bcopy -s 4096",
        "get -D zcopy -s 65536",
        "fadd -s 8",
        "cswap -s 8",
    ];
    let ud = [
        "am_lat -D short -s 64",
        "am_bw -D bcopy -s 1000",
        "am_bw -D zcopy -s 1000",
    ];
    for (transport, tests) in [("rc_verbs", rc.as_slice()), ("ud_verbs", ud.as_slice())] {
        for test in tests {
            perftest(
                &program,
                &format!("-d urnic0:1 -x {transport} -n 300 -w 2 -t {test}"),
            );
        }
    }
}

/// Two hosts to UCX, which otherwise prefers shared memory: it identifies a host by its namespaces.
#[test]
fn default_settings_choose_urnic_between_two_hosts() {
    or_skip!(installed("ucx_perftest"));
    let [host, _peer] = or_skip!(Netns::pair());
    let namespaces = [
        "unshare",
        "--ipc",
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ];
    let program = with_transports("ucx_perftest", "").through(namespaces);
    for test in ["tag_lat", "ucp_put_bw"] {
        let port = free_port();
        let program = program
            .clone()
            .line(&format!("-p {port} -f -t {test} -s 65536 -n 50 -w 2"));
        let server = host.program(program.clone()).spawn();
        host.listens(port);
        let client = host.program(program.arg("10.77.0.1")).run_for(LIMIT);
        let said = client.success();
        assert!(said.contains("rc_verbs/urnic0:1"), "{test}:\n{said}");
        server.wait_for(LIMIT).success();
    }
}

/// With default settings, UCX's server listens by rdma_cm and by TCP at one number.
#[test]
fn client_and_server_by_addresses_of_sockets() {
    let program = or_skip!(compiled_for_ucx("ucx_sockaddr"));
    let program = with_transports(program.to_str().expect("a path"), "");
    let port = free_port();
    let program = program.line(&format!("-p {port}"));
    let mut server = program.clone().spawn();
    server.wait_until_listening(port);
    let client = program.arg("127.0.0.1").run_for(LIMIT).success();
    assert!(client.contains("5 messages"), "{client}");
    assert!(client.contains("rc_verbs/urnic0:1"), "{client}");
    assert!(!client.contains("tag(tcp"), "{client}");
    let server = server.wait_for(LIMIT).success();
    assert!(server.contains("5 messages"), "{server}");
}
