//! Ports of rdma_cm that are not those of TCP, as programs for a RoCE NIC have them.

use urnic_tests::program::Program;
use urnic_tests::served::Served;
use urnic_tests::skip::installed;
use urnic_tests::wait::{free_port, tcp_listening};
use urnic_tests::{Pair, compiled, or_skip};

use crate::rdma_cm::{at_port, but_for_lost_races};
use crate::roce::{LIMIT, roce};

#[test]
fn one_number_is_a_port_of_tcp_of_connections_and_of_datagrams() {
    let program = or_skip!(compiled("cm_own_ports"));
    let name = program.to_str().expect("a path of the build");
    let served = Served::start();
    for address in ["127.0.0.1", "0.0.0.0", "::1", "::"] {
        for program in [Program::new(name), served.program(name)] {
            let (port, source) = (free_port(), free_port());
            let said = program
                .env("URNIC_IDENTITY", "roce")
                .line(&format!("{address} {port} {source}"))
                .run_for(LIMIT);
            assert!(said.success().contains("each port has its own"), "{address}");
        }
    }
}

#[test]
fn with_ports_of_tcp_a_number_is_taken_once() {
    let program = roce(or_skip!(compiled("cm_own_ports")).to_str().expect("a path"));
    let said = program
        .env("URNIC_CM_PORTS", "tcp")
        .line(&format!("127.0.0.1 {} {}", free_port(), free_port()))
        .run();
    let said = said.failure();
    assert!(said.contains("Address already in use"), "{said}");
}

#[test]
fn ports_of_a_roce_nic_are_kept_shared_and_refused() {
    let program = or_skip!(compiled("cm_ports"));
    roce(program.to_str().expect("a path"))
        .arg("127.0.0.1")
        .run_for(LIMIT)
        .success();
}

#[test]
fn a_number_belongs_to_one_process() {
    or_skip!(installed("rping"));
    let port = free_port();
    let rping = || roce("rping").line(&format!("-s -p {port}"));
    let mut first = rping().spawn();
    first.wait_until_listening(port);
    assert!(!tcp_listening(first.pid(), port));
    let said = rping().run().failure();
    assert!(
        said.contains("rdma_bind_addr: Cannot assign requested address"),
        "{said}"
    );
    first.stopped();
}

/// Ends with these ports, the server's first; with these devices.
#[track_caller]
fn rping_succeeds(ports: [&str; 2], ends: [&dyn Fn() -> Program; 2]) {
    let (server, client) = but_for_lost_races(|| {
        let port = free_port();
        let end = |side: usize, line: &str| {
            ends[side]()
                .env("URNIC_CM_PORTS", ports[side])
                .line(&format!("{line} -C 20 -p {port}"))
        };
        at_port(port, &end(0, "-s"), &end(1, "-c -a 127.0.0.1"), LIMIT)
    });
    client.success();
    server.success();
}

#[test]
fn initiators_reach_listeners_of_both_kinds() {
    or_skip!(installed("rping"));
    let served = Served::start();
    let (here, there) = (|| Program::new("rping"), || served.program("rping"));
    for ports in [["own", "own"], ["own", "tcp"], ["tcp", "own"]] {
        rping_succeeds(ports, [&here, &here]);
        rping_succeeds(ports, [&there, &here]);
        rping_succeeds(ports, [&here, &there]);
        rping_succeeds(ports, [&there, &there]);
    }
}

#[test]
fn a_confined_device_has_ports_of_its_own() {
    or_skip!(installed("rping"));
    let served = Served::with("--addr 127.0.0.1");
    let there = || served.program("rping");
    for ports in [["own", "own"], ["own", "tcp"], ["tcp", "own"]] {
        rping_succeeds(ports, [&there, &there]);
    }
}

#[test]
fn perftest_of_a_served_device_connects() {
    or_skip!(installed("ib_send_lat"));
    let served = Served::start();
    let program = served.program("ib_send_lat").env("URNIC_IDENTITY", "roce");
    Pair::new(&program.line("-F -R -n 200")).within(LIMIT).succeeds();
}

#[test]
fn without_a_listener_initiators_are_rejected() {
    or_skip!(installed("rping"));
    for ports in ["own", "tcp"] {
        let rping = Program::new("rping").env("URNIC_CM_PORTS", ports);
        let said = rping.line(&format!("-c -a 127.0.0.1 -p {}", free_port())).run();
        let said = said.failure();
        assert!(
            said.contains("RDMA_CM_EVENT_REJECTED, error -111"),
            "{ports}: {said}"
        );
    }
}
