//! A device in another process: unmodified programs over `urnic serve`, and their errors when it is
//! killed.

use std::time::Duration;

use rustix::process::Signal;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::program::{Program, Running};
use urnic_tests::served::Served;
use urnic_tests::skip::{self, installed, root};
use urnic_tests::user::{NOBODY, Staged, as_user};
use urnic_tests::wait::{TIME_LIMIT, descriptors, free_port, until};
use urnic_tests::{Pair, compiled, or_skip};

use crate::devices::gids;
use crate::rdma_cm::{at_port, but_for_lost_races};

const LIMIT: Duration = Duration::from_secs(120);
/// The end of a killed server is detected within this time: no timeout of a protocol has to pass.
/// The rest is for the scheduling of a loaded machine.
const NOTICED: Duration = Duration::from_secs(20);

/// Both ends on functions of one server.
fn pair(served: &Served, line: &str) -> Pair {
    let (name, options) = line.split_once(' ').unwrap_or((line, ""));
    Pair::new(&served.program(name).line(options)).within(LIMIT)
}

/// Waits until a program is in the middle of sending or receiving.
#[track_caller]
fn transfers(program: &Running) {
    let pid = program.pid().to_string();
    let stat = Program::plain(urnic()).args(["stat", "--json", &pid]);
    let counted = |json: &str, name: &str| {
        let (_, rest) = json.split_once(&format!("\"{name}\":"))?;
        rest.split([',', '}']).next()?.parse::<u64>().ok()
    };
    let moving = until(TIME_LIMIT, || {
        let json = stat.run().output;
        let bytes = [counted(&json, "tx_bytes"), counted(&json, "rx_bytes")];
        (bytes.into_iter().flatten().sum::<u64>() > 100_000).then_some(())
    });
    assert!(moving.is_some(), "nothing moves: {}", program.output());
}

/// The value of this name in the output of `urnic info`.
#[track_caller]
fn info_field(info: &Program, name: &str) -> String {
    let printed = info.run().success();
    let line = printed.lines().find_map(|line| line.trim().strip_prefix(name));
    line.unwrap_or_else(|| panic!("{name}: {printed}"))
        .trim()
        .to_owned()
}

#[test]
fn programs_see_the_same_device_as_in_process() {
    or_skip!(installed("ibv_devinfo"));
    let served = Served::start();
    let devinfo = served.program("ibv_devinfo").arg("-v");
    assert_eq!(gids(&devinfo), gids(&Program::new("ibv_devinfo").arg("-v")));
    let printed = devinfo.run().success();
    for part in ["urnic0", "PORT_ACTIVE", "max_qp:"] {
        assert!(printed.contains(part), "{printed}");
    }
    let info = Program::plain(urnic()).args(["info", "--device", &served.device()]);
    assert_eq!(info_field(&info, "device"), served.device());
    let memory = info_field(&info, "program memory");
    assert!(["process_vm", "messages"].contains(&memory.as_str()), "{memory}");
}

#[test]
fn pingpong() {
    or_skip!(installed("ibv_rc_pingpong"));
    let served = Served::start();
    for options in [
        "",
        "-e",
        "-g 0 -e -n 3000",
        "-r 1",
        "-c -s 1 -n 200",
        "-c -s 100000 -n 200",
        "-c -s 4194304 -n 10",
    ] {
        pair(&served, &format!("ibv_rc_pingpong {options}")).succeeds();
    }
}

#[test]
fn peers_on_another_server_and_in_process_connect() {
    or_skip!(installed("ibv_rc_pingpong"));
    let (one, other) = (Served::start(), Served::start());
    for far in [other.program("ibv_rc_pingpong"), Program::new("ibv_rc_pingpong")] {
        for swap in [false, true] {
            let near = one.program("ibv_rc_pingpong");
            let (server, client) = if swap {
                (far.clone(), near)
            } else {
                (near, far.clone())
            };
            let pair = Pair {
                server: server.line("-c -s 5000"),
                client: client.line("-c -s 5000"),
                ..pair(&one, "ibv_rc_pingpong")
            };
            pair.succeeds();
        }
    }
}

#[test]
fn perftest() {
    or_skip!(installed("ib_send_bw"));
    let served = Served::start();
    for line in [
        "ib_send_bw -n 300",
        "ib_send_lat -n 300",
        "ib_write_bw -n 300",
        "ib_write_lat -n 300",
        "ib_read_bw -n 300",
        "ib_read_lat -n 300",
        "ib_write_bw -a -n 20",
        "ib_read_bw -a -n 20",
        "ib_send_bw -a -n 20",
        "ib_send_lat -e -n 300",
        "ib_write_bw -q 8 -b -n 100",
    ] {
        pair(&served, &format!("{line} -F -d urnic0")).succeeds();
    }
}

/// Two programs that connect by a port, both on functions of one server.
fn run_pair(served: &Served, server: &str, client: &str) {
    let (server, client) = but_for_lost_races(|| {
        let port = free_port();
        let program = |line: &str| {
            let line = line.replace("PORT", &port.to_string());
            let (name, options) = line.split_once(' ').expect("options");
            served.program(name).line(options)
        };
        at_port(port, &program(server), &program(client), LIMIT)
    });
    client.success();
    server.success();
}

/// `rping` as server and client.
const RPING: [&str; 2] = [
    "rping -s -C 20 -V -p PORT",
    "rping -c -a 127.0.0.1 -C 20 -V -p PORT",
];

#[test]
fn programs_that_use_the_connection_manager() {
    or_skip!(installed("rping"));
    or_skip!(installed("rstream"));
    let served = Served::start();
    for [server, client] in [
        RPING,
        [
            "rstream -p PORT -S 4096 -I 200 -C 4",
            "rstream -p PORT -S 4096 -I 200 -C 4 -s 127.0.0.1",
        ],
        ["ucmatose -c 20 -p PORT", "ucmatose -c 20 -s 127.0.0.1 -p PORT"],
    ] {
        run_pair(&served, server, client);
    }
}

#[test]
fn memory_may_be_reached_by_messages_only() {
    or_skip!(installed("ib_send_bw"));
    or_skip!(installed("rping"));
    let transfer = or_skip!(compiled("transfer"));
    let served = Served::with("--dma messages");
    let info = Program::plain(urnic()).args(["info", "--device", &served.device()]);
    assert_eq!(info_field(&info, "program memory"), "messages");
    for line in [
        "ibv_rc_pingpong -c -n 200",
        "ibv_rc_pingpong -c -e -s 1000000 -n 20",
        "ib_write_bw -F -d urnic0 -n 200",
        "ib_read_bw -F -d urnic0 -n 200",
        "ib_send_bw -F -d urnic0 -n 200 -s 3000000",
        "ib_send_lat -F -d urnic0 -n 200 -s 8",
        "ib_write_bw -F -d urnic0 -q 4 -b -n 50",
    ] {
        pair(&served, line).succeeds();
    }
    for operation in ["send", "write", "read"] {
        let program = Program::new(&transfer).env("URNIC_DEVICE", served.device());
        let options = format!("-o {operation} -b 20000003 -c 1000003");
        Pair::new(&program.line(&options)).within(LIMIT).succeeds();
    }
    let [server, client] = RPING;
    run_pair(&served, server, client);
    let conformance = Program::plain(urnic()).args(["conformance", "--device", &served.device()]);
    let printed = conformance.run_for(LIMIT).success();
    assert!(printed.contains(" 0 failed"), "{printed}");
}

#[test]
fn the_memory_of_another_user_s_program_is_reached_by_messages() {
    or_skip!(root());
    or_skip!(installed("ibv_rc_pingpong"));
    let served = Served::with("--mode 666");
    let staged = Staged::new();
    let command = staged.add(&urnic());
    let info = Program::plain(command).args(["info", "--device", &served.device()]);
    assert_eq!(
        info_field(&as_user(NOBODY, info.clone()), "program memory"),
        "messages"
    );
    if info_field(&info, "program memory") != "process_vm" {
        skip::report("process_vm_readv is not allowed here, even for the same user");
    }
    for line in ["-c -s 1 -n 100", "-c -e -s 100000 -n 100"] {
        let mut pair = pair(&served, &format!("ibv_rc_pingpong {line}"));
        pair.server = staged.program(NOBODY, pair.server);
        pair.succeeds();
    }
}

#[test]
fn doorbells_are_stores_and_no_messages() {
    or_skip!(installed("ib_write_bw"));
    or_skip!(installed("strace"));
    const MESSAGES: u64 = 20_000;
    let served = Served::start();
    let counts = scratch().join(format!("sendmsg-{}", std::process::id()));
    let mut pair = pair(&served, &format!("ib_write_bw -F -d urnic0 -s 64 -n {MESSAGES}"));
    let strace = [
        "strace",
        "-f",
        "-c",
        "-e",
        "trace=sendmsg",
        "-o",
        counts.to_str().expect("our path"),
    ];
    pair.client = pair.client.through(strace);
    pair.succeeds();
    let table = std::fs::read_to_string(&counts).expect("what strace wrote");
    std::fs::remove_file(&counts).expect("our file");
    // % time, seconds, usecs/call, calls, errors or not, syscall
    let line = table.lines().find(|line| line.ends_with("sendmsg"));
    let calls = line.and_then(|line| line.split_whitespace().nth(3)?.parse::<u64>().ok());
    let calls = calls.unwrap_or_else(|| panic!("{table}"));
    // The set-up takes some hundred; and a device that got no processor for long has fallen asleep.
    assert!(
        calls < MESSAGES / 4,
        "{calls} messages for {MESSAGES} work requests:\n{table}"
    );
}

#[test]
fn a_killed_server_is_an_error_and_a_new_one_serves() {
    or_skip!(installed("ib_write_bw"));
    let (mut here, there) = (Served::start(), Served::start());
    for name in ["ib_write_bw", "ib_send_bw", "ib_read_bw", "ib_send_lat"] {
        let options = "-F -d urnic0 -D 100";
        let (name, more) = name.split_once(' ').unwrap_or((name, ""));
        let pair = Pair {
            server: there.program(name).line(options).line(more),
            client: here.program(name).line(options).line(more),
            ..pair(&here, name)
        };
        let (server, client) = pair.start();
        transfers(&client);
        here.server().signal(Signal::KILL);
        let client = client.wait_for(NOTICED);
        assert!(!client.ok(), "{client}");
        // Its peer, whose device still runs, lost the connection, and may wait for a message that
        // never comes: perftest works that way.
        drop(server);
        here.again();
        Pair::new(&here.program("ibv_rc_pingpong")).succeeds();
    }
}

#[test]
fn a_killed_client_is_an_error_at_its_peer() {
    or_skip!(installed("ib_send_bw"));
    let served = Served::start();
    let server = served.server().pid();
    let before = descriptors(server);
    for name in ["ib_send_bw", "ib_send_lat"] {
        let (passive, active) = pair(&served, &format!("{name} -F -d urnic0 -D 100")).start();
        transfers(&active);
        active.signal(Signal::KILL);
        let passive = passive.wait_for(NOTICED);
        assert!(!passive.ok(), "{passive}");
        drop(active);
        pair(&served, "ibv_rc_pingpong -n 100").succeeds();
    }
    // Streams that are closing have three seconds.
    let gone = until(TIME_LIMIT, || (descriptors(server) <= before).then_some(()));
    assert!(
        gone.is_some(),
        "{before} descriptors, then {}",
        descriptors(server)
    );
}

#[test]
fn a_process_with_a_killed_server_opens_the_next_device() {
    let program = or_skip!(compiled("reopen"));
    let mut served = Served::start();
    let mut program = Program::new(program).env("URNIC_DEVICE", served.device()).spawn();
    for round in 0..3 {
        let mut says = |word: &str| {
            program.wait_for_output(word, |printed| {
                (printed.lines().filter(|line| *line == word).count() > round).then_some(())
            });
        };
        says("works");
        served.server().signal(Signal::KILL);
        says("gone");
        served.again();
    }
    let ended = program.wait_for(LIMIT);
    assert!(ended.ok(), "{ended}");
}

#[test]
fn requests_are_flushed_when_the_server_is_killed() {
    let program = or_skip!(compiled("lost"));
    let served = Served::start();
    let mut program = Program::new(program).env("URNIC_DEVICE", served.device()).spawn();
    program.wait_for_output("that it transfers", |printed| {
        printed.contains("flowing").then_some(())
    });
    served.server().signal(Signal::KILL);
    let printed = program.wait_for(LIMIT).success();
    assert!(printed.contains(" flushed"), "{printed}");
}

#[test]
fn programs_asleep_wake_when_the_server_is_killed() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(installed("rping"));
    let mut served = Served::start();
    // A client that waits for completions that never come, because its peer is stopped.
    let pair = pair(&served, "ibv_rc_pingpong -e -n 100000000");
    let (server, client) = pair.start();
    transfers(&client);
    server.stop();
    served.server().signal(Signal::KILL);
    let client = client.wait_for(NOTICED);
    assert!(
        !client.ok() && client.output.contains("Failed status"),
        "{client}"
    );
    drop(server);
    // A listener that waits for connection events.
    served.again();
    let port = free_port();
    let mut listener = served
        .program("rping")
        .line(&format!("-s -p {port} -C 1"))
        .spawn();
    listener.wait_until_listening(port);
    served.server().signal(Signal::KILL);
    let listener = listener.wait_for(NOTICED);
    assert!(!listener.ok(), "{listener}");
    assert!(listener.output.contains("device removal"), "{listener}");
}

#[test]
fn a_socket_without_a_listener_is_reported_in_one_line() {
    or_skip!(installed("ibv_devices"));
    let missing = "/nowhere/urnic-socket";
    let printed = Program::new("ibv_devices")
        .env("URNIC_DEVICE", format!("vfio-user:{missing}"))
        .run()
        .output;
    assert!(!printed.contains("urnic0"), "{printed}");
    let lines: Vec<&str> = printed.lines().filter(|line| line.contains(missing)).collect();
    assert!(
        lines.len() == 1 && lines[0].contains("urnic serve --socket"),
        "{printed}"
    );
}

#[test]
fn programs_of_one_server_are_seen_by_urnic_stat() {
    or_skip!(installed("ibv_rc_pingpong"));
    let served = Served::start();
    let (server, client) = pair(&served, "ibv_rc_pingpong -n 100000000").start();
    transfers(&client);
    for running in [&server, &client] {
        let pid = running.pid().to_string();
        let json = Program::plain(urnic())
            .args(["stat", "--json", &pid])
            .run()
            .success();
        assert!(
            json.contains(&format!("\"device\":\"{}\"", served.device())),
            "{json}"
        );
        assert!(json.contains("\"state\":\"RT"), "{json}");
    }
}

#[test]
fn each_of_many_armed_completion_queues_wakes_once() {
    let program = or_skip!(compiled("arms"));
    let served = Served::start();
    for device in ["inproc", &served.device()] {
        Program::new(&program)
            .env("URNIC_DEVICE", device)
            .run_for(LIMIT)
            .success();
    }
}
