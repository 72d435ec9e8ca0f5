//! UC queue pairs, which exist with the identity of a RoCE NIC: the distribution's programs, and
//! what is dropped.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::served::in_process;
use urnic_tests::skip::{installed, root};
use urnic_tests::user::{NOBODY, Staged};
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, compiled, or_skip};

const LIMIT: Duration = Duration::from_secs(120);

/// A program that sees a RoCE NIC.
fn roce(name: impl AsRef<std::ffi::OsStr>) -> Program {
    Program::new(name).env("URNIC_IDENTITY", "roce")
}

#[test]
fn ping_pong() {
    or_skip!(installed("ibv_uc_pingpong"));
    for options in [
        "-n 200",
        "-g 3 -n 200",
        "-g 1 -n 200 -e",
        "-g 3 -n 20 -s 1000000",
        "-g 3 -n 5000",
    ] {
        let pair = Pair::new(&roce("ibv_uc_pingpong").line(options)).within(LIMIT);
        let both = pair.succeeds();
        for end in [both.server, both.client] {
            assert!(end.output.contains("iters in"), "{options}: {end}");
        }
    }
}

#[test]
fn an_ordinary_user_has_them() {
    or_skip!(root());
    or_skip!(installed("ibv_uc_pingpong"));
    let staged = Staged::new();
    let program = staged.program(NOBODY, roce("ibv_uc_pingpong").line("-g 3 -n 200"));
    Pair::new(&program).within(LIMIT).succeeds();
}

#[test]
fn perftest_sends_and_writes() {
    or_skip!(installed("ib_send_bw"));
    for name in ["ib_send_lat", "ib_send_bw", "ib_write_lat", "ib_write_bw"] {
        for options in ["-n 200", "-x 3 -n 200", "-x 3 -n 50 -s 1000000"] {
            Pair::new(&roce(name).line(&format!("-F -c UC {options}")))
                .within(LIMIT)
                .succeeds();
        }
    }
}

#[test]
fn undeliverable_messages_are_dropped() {
    let program = or_skip!(compiled("uc"));
    let both = Pair::new(&roce(program)).within(LIMIT).succeeds();
    for end in [both.server, both.client] {
        assert!(end.output.contains("done"), "{end}");
    }
}

#[test]
fn memory_may_be_paged_on_demand() {
    or_skip!(in_process("on-demand paging"));
    let program = or_skip!(compiled("uc"));
    Pair::new(&roce(program).arg("-o")).within(LIMIT).succeeds();
}

#[test]
fn connections_of_the_connection_manager() {
    let program = or_skip!(compiled("uc_cm"));
    let port = free_port();
    let mut server = roce(&program).line(&format!("-p {port}")).spawn();
    server.wait_until_listening(port);
    let client = roce(&program)
        .line(&format!("-p {port} 127.0.0.1"))
        .run_for(LIMIT);
    let server = server.wait_for(LIMIT);
    for end in [server, client] {
        assert!(end.ok() && end.output.contains("done"), "{end}");
    }
}
