//! Many rdma_cm connections: one after the other, at once, of many processes, between hosts and
//! users, of two ends that differ; and much data.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use urnic_tests::build::scratch;
use urnic_tests::debian::Debian;
use urnic_tests::netns::Netns;
use urnic_tests::program::{Ended, Program, Running};
use urnic_tests::skip::{installed, root};
use urnic_tests::target_process::cm::{CmTargetProcess, cm_event};
use urnic_tests::target_process::status;
use urnic_tests::user::{NOBODY, OTHER_USER, Staged};
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, or_skip};

use crate::rdma_cm::{at_port, but_for_lost_races, is_done};

const LIMIT: Duration = Duration::from_secs(120);
const DEPTHS: (u8, u8) = (8, 8);

/// Server and client of `name`, both with these options; the client once the server listens at the
/// port that they get.
#[track_caller]
fn both(server: &Program, client: &Program) -> (Ended, Ended) {
    let port = free_port();
    let with = |program: &Program| program.clone().line(&format!("-p {port}"));
    at_port(port, &with(server), &with(client), LIMIT)
}

#[track_caller]
fn succeed(server: &Program, client: &Program) {
    let (server, client) = but_for_lost_races(|| both(server, client));
    client.success();
    server.success();
}

/// Two programs with one connection between them: the ids of initiator and responder.
#[track_caller]
fn connected(
    initiator: &mut CmTargetProcess,
    responder: &mut CmTargetProcess,
    listener: u64,
    at: SocketAddr,
) -> (u64, u64) {
    let ours = initiator.connects(at, DEPTHS, b"hello");
    let theirs = responder
        .expects_event(listener, cm_event::CONNECT_REQUEST, 0)
        .about;
    assert_eq!(responder.accepts(theirs, DEPTHS, b"hello"), 0);
    initiator.expects_event(ours, cm_event::ESTABLISHED, 0);
    responder.expects_event(theirs, cm_event::ESTABLISHED, 0);
    (ours, theirs)
}

#[test]
fn a_thousand_connections_one_after_the_other() {
    let mut initiator = or_skip!(CmTargetProcess::start(&[]));
    let mut responder = or_skip!(CmTargetProcess::start(&[]));
    let (listener, at) = responder.listens(16);
    let descriptors = |program: &Running| {
        let folder = format!("/proc/{}/fd", program.pid());
        std::fs::read_dir(folder).expect("our own child").count()
    };
    let mut before = 0;
    for round in 0..1000 {
        let (ours, theirs) = connected(&mut initiator, &mut responder, listener, at);
        initiator.sends(ours, 100, 64);
        responder.completes(theirs, &[(0, status::SUCCESS)]);
        // The two ends take turns to disconnect.
        let (first, its, second, other) = if round % 2 == 0 {
            (&mut initiator, ours, &mut responder, theirs)
        } else {
            (&mut responder, theirs, &mut initiator, ours)
        };
        assert_eq!(first.disconnects(its), 0);
        second.expects_event(other, cm_event::DISCONNECTED, 0);
        first.expects_event(its, cm_event::DISCONNECTED, 0);
        first.destroys(its);
        second.destroys(other);
        if round == 10 {
            before = descriptors(initiator.process()) + descriptors(responder.process());
        }
    }
    // Lingering streams may still have their descriptors.
    let after = descriptors(initiator.process()) + descriptors(responder.process());
    assert!(after < before + 100, "{before} descriptors became {after}");
    initiator.quits();
    responder.quits();
}

#[test]
fn two_hundred_connections_at_once() {
    or_skip!(installed("ucmatose"));
    let program = Program::new("ucmatose").line("-c 200 -C 3");
    succeed(&program, &program.clone().line("-s 127.0.0.1"));
}

#[test]
fn the_fence_holds_for_each_connection_of_a_shared_cq() {
    let mut initiator = or_skip!(CmTargetProcess::start(&[]));
    let mut responder = or_skip!(CmTargetProcess::start(&[]));
    initiator.shares_completion_queue();
    responder.shares_completion_queue();
    let (listener, at) = responder.listens(64);
    let pairs: Vec<(u64, u64)> = (0..20)
        .map(|_| {
            let ours = initiator.connects(at, DEPTHS, b"");
            let theirs = responder
                .expects_event(listener, cm_event::CONNECT_REQUEST, 0)
                .about;
            // The responder posts at once, before any RTR can have come.
            assert_eq!(responder.accepts(theirs, DEPTHS, b""), 0);
            responder.sends(theirs, 1000 + theirs, 64);
            initiator.expects_event(ours, cm_event::ESTABLISHED, 0);
            responder.expects_event(theirs, cm_event::ESTABLISHED, 0);
            (ours, theirs)
        })
        .collect();
    let mut sent: Vec<(u64, u64)> = pairs
        .iter()
        .map(|(_, theirs)| {
            let (of, wc) = responder.completion(*theirs);
            assert_eq!(wc.status, status::SUCCESS);
            (of, wc.id)
        })
        .collect();
    sent.sort_unstable();
    let mut expected: Vec<(u64, u64)> = pairs.iter().map(|(_, theirs)| (*theirs, 1000 + theirs)).collect();
    expected.sort_unstable();
    assert_eq!(sent, expected);
    let mut got: Vec<u64> = pairs
        .iter()
        .map(|(ours, _)| {
            let (of, wc) = initiator.completion(*ours);
            assert_eq!((wc.id, wc.status, wc.len), (0, status::SUCCESS, 64));
            of
        })
        .collect();
    got.sort_unstable();
    let mut expected: Vec<u64> = pairs.iter().map(|(ours, _)| *ours).collect();
    expected.sort_unstable();
    assert_eq!(got, expected);
    initiator.quits();
    responder.quits();
}

#[test]
fn sixty_four_processes_connect_to_one() {
    or_skip!(installed("ucmatose"));
    let port = free_port();
    let ucmatose = Program::new("ucmatose").line(&format!("-p {port}"));
    let mut server = ucmatose.clone().line("-c 64").spawn();
    server.wait_until_listening(port);
    let client = ucmatose.line("-s 127.0.0.1");
    let clients: Vec<Running> = (0..64).map(|_| client.spawn()).collect();
    for client in clients {
        client.wait_for(LIMIT).success();
    }
    server.wait_for(LIMIT).success();
}

#[test]
fn a_persistent_rping_serves_sixteen_at_a_time() {
    const PINGS: usize = 1000;
    or_skip!(installed("rping"));
    let port = free_port();
    let rping = Program::new("rping").line(&format!("-p {port} -S 4000 -V"));
    let mut server = rping.clone().line("-s -P").spawn();
    server.wait_until_listening(port);
    let client = rping.line(&format!("-c -a 127.0.0.1 -v -C {PINGS}"));
    let clients: Vec<Running> = (0..16)
        .map(|_| {
            let mut client = client.spawn();
            // Two clients that connect at once are one to rping: the second replaces the first
            // before a thread serves the first.
            client.wait_for_output("its first ping", |output| {
                output.contains("rdma-ping-0").then_some(())
            });
            client
        })
        .collect();
    for client in clients {
        let ended = client.wait_for(LIMIT);
        assert!(is_done(&ended), "{ended}");
        let pings = ended.output.matches("rdma-ping-").count();
        assert_eq!(pings, PINGS, "{ended}");
    }
}

#[test]
fn between_two_hosts() {
    or_skip!(installed("rping"));
    let [a, b] = or_skip!(Netns::pair());
    for (address, options) in [
        ("10.77.0.1", "-C 20 -V"),
        ("fd77::1", "-C 20 -V"),
        ("10.77.0.1", "-C 5 -S 65535 -V"),
    ] {
        let rping = Program::new("rping").line(options);
        let server = a.program(rping.clone().line(&format!("-s -a {address}")));
        succeed(&server, &b.program(rping.line(&format!("-c -a {address}"))));
    }
    for name in ["ucmatose -c 20", "rstream -S 4096 -I 100"] {
        let (name, options) = name.split_once(' ').expect("two words");
        let program = Program::new(name).line(options);
        let client = b.program(program.clone().line("-s 10.77.0.1"));
        succeed(&a.program(program), &client);
    }
    let mut perftest = Pair::line("ib_write_bw -R -F -n 200").at("10.77.0.1");
    perftest.server = a.program(perftest.server);
    perftest.client = b.program(perftest.client);
    perftest.within(LIMIT).succeeds();
}

#[test]
fn between_two_users() {
    or_skip!(root());
    or_skip!(installed("rping"));
    let staged = Staged::new();
    for (server, client) in [
        (NOBODY, OTHER_USER),
        (OTHER_USER, NOBODY),
        (0, NOBODY),
        (NOBODY, 0),
    ] {
        let rping = Program::new("rping").line("-C 10 -V");
        succeed(
            &staged.program(server, rping.clone().arg("-s")),
            &staged.program(client, rping.line("-c -a 127.0.0.1")),
        );
    }
}

#[test]
fn sides_with_different_settings_agree() {
    or_skip!(installed("rping"));
    const REVISION_1: (&str, &str) = ("URNIC_MPA_REVISION", "1");
    for (server, client) in [
        (REVISION_1, ("URNIC_LOG", "warn")),
        (("URNIC_LOG", "warn"), REVISION_1),
        (
            ("URNIC_MPA_PEER_TO_PEER", "false"),
            ("URNIC_MPA_PEER_TO_PEER", "true"),
        ),
        (
            ("URNIC_MPA_PEER_TO_PEER", "true"),
            ("URNIC_MPA_PEER_TO_PEER", "false"),
        ),
        (
            ("URNIC_MPA_RTR_TYPES", "read"),
            ("URNIC_MPA_RTR_TYPES", "write,read"),
        ),
        (
            ("URNIC_MPA_RTR_TYPES", "send,write"),
            ("URNIC_MPA_RTR_TYPES", "send"),
        ),
        (("URNIC_MPA_CRC", "false"), ("URNIC_MPA_CRC", "true")),
        (("URNIC_MPA_MARKERS", "true"), ("URNIC_MPA_MARKERS", "false")),
        (("URNIC_MPA_MARKERS", "false"), ("URNIC_MPA_MARKERS", "true")),
        (("URNIC_MPA_RTR_FRAME", "hex"), ("URNIC_MPA_RTR_FRAME", "text")),
        (("URNIC_MPA_RTR_FRAME", "hex"), ("URNIC_MPA_RTR_FRAME", "off")),
        (("URNIC_MPA_RTR_FRAME", "off"), ("URNIC_MPA_RTR_FRAME", "hex")),
    ] {
        let rping = Program::new("rping").line("-C 5 -V");
        succeed(
            &rping.clone().arg("-s").env(server.0, server.1),
            &rping.line("-c -a 127.0.0.1").env(client.0, client.1),
        );
    }
}

#[test]
fn sides_with_no_rtr_in_common_report_it() {
    let mut responder = or_skip!(CmTargetProcess::start(&[("URNIC_MPA_RTR_TYPES", "send")]));
    let mut initiator = or_skip!(CmTargetProcess::start(&[("URNIC_MPA_RTR_TYPES", "write")]));
    let (listener, at) = responder.listens(16);
    let ours = initiator.connects(at, DEPTHS, b"");
    let theirs = responder
        .expects_event(listener, cm_event::CONNECT_REQUEST, 0)
        .about;
    assert_eq!(responder.accepts(theirs, DEPTHS, b""), 0);
    assert_eq!(initiator.event().kind, cm_event::CONNECT_ERROR);
    // The responder has received an FPDU, which was a Terminate.
    let mut event = responder.event();
    if event.kind == cm_event::ESTABLISHED {
        event = responder.event();
        assert_eq!(event.kind, cm_event::DISCONNECTED);
    } else {
        assert_eq!(event.kind, cm_event::CONNECT_ERROR);
    }
    responder.destroys(theirs);
    initiator.destroys(ours);
    assert!(responder.is_quiet() && initiator.is_quiet());
    initiator.quits();
    responder.quits();
}

#[test]
fn the_other_debian_s_programs_connect() {
    or_skip!(installed("rping"));
    let debian = or_skip!(Debian::other());
    let rping = Program::new("rping").line("-C 20 -V");
    let server = rping.clone().arg("-s");
    let client = rping.line("-c -a 127.0.0.1");
    succeed(&debian.program(server.clone()), &debian.program(client.clone()));
    // Each Debian with the other.
    succeed(&debian.program(server.clone()), &client);
    succeed(&server, &debian.program(client));
    let ucmatose = Program::new("ucmatose").line("-c 20");
    let client = debian.program(ucmatose.clone().line("-s 127.0.0.1"));
    succeed(&debian.program(ucmatose), &client);
    for line in ["ib_send_lat -R -F -n 200", "ib_read_bw -R -F -n 200"] {
        let mut pair = Pair::line(line);
        pair.server = debian.program(pair.server);
        pair.client = debian.program(pair.client);
        pair.within(LIMIT).succeeds();
    }
}

/// Copies a file of this many MiB, with changing content, by rcopy.
#[track_caller]
fn copies(mebibytes: usize) {
    let folder = urnic_testkit::Folder::inside(&scratch(), &format!("rcopy-{mebibytes}"));
    let (from, to) = (folder.file("from"), folder.file("to"));
    make_file(&from, mebibytes);
    let port = free_port();
    let mut server = Program::new("rcopy").line(&format!("-p {port}")).spawn();
    server.wait_until_listening(port);
    Program::new("rcopy")
        .arg(&from)
        .arg(format!("127.0.0.1:{}", to.display()))
        .line(&format!("-p {port}"))
        .run_for(LIMIT)
        .success();
    // The server closes the file after its last answer.
    let same = urnic_tests::wait::until(LIMIT, || {
        let same = Program::plain("cmp").arg(&from).arg(&to).run_for(LIMIT);
        same.ok().then_some(())
    });
    assert!(same.is_some(), "the copy differs");
}

fn make_file(path: &Path, mebibytes: usize) {
    use std::io::Write;
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).expect("our folder"));
    for number in 0..mebibytes as u64 {
        let block = urnic_tests::target_process::filled(number, 1 << 20);
        file.write_all(&block).expect("room for a file");
    }
    file.flush().expect("room for a file");
}

#[test]
fn rcopy_copies() {
    or_skip!(installed("rcopy"));
    copies(32);
}

#[test]
#[ignore = "long: make soak"]
fn rcopy_copies_a_gibibyte() {
    or_skip!(installed("rcopy"));
    copies(1024);
}

#[test]
fn any_address_is_an_address() {
    // A listener at the wildcard accepts at each of this host's addresses.
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    let mut initiator = or_skip!(CmTargetProcess::start(&[]));
    let (listener, at) = target.listens_at("0.0.0.0", 16);
    for last in 1..4 {
        let there = SocketAddr::from((IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)), at.port()));
        connected(&mut initiator, &mut target, listener, there);
    }
    initiator.quits();
    target.quits();
}
