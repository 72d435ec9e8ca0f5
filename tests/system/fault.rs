//! Faults on demand: each kind strikes, programs end as they would by the real trouble, and one
//! seed has one run.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::program::{Ended, Program, Running};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, free_port, until};
use urnic_tests::{compiled, or_skip};

use crate::rdma_cm::is_done;

const LIMIT: Duration = Duration::from_secs(60);

/// The lines of faults that struck, without the time and the process.
fn struck(output: &str) -> Vec<String> {
    let lines = output
        .lines()
        .filter_map(|line| Some(line.split_once("urnic_faults::fault: ")?.1));
    lines.map(str::to_owned).collect()
}

/// How a program takes a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It succeeds.
    Well,
    /// It ends with an error.
    Failed,
    /// It ends, with or without one.
    Any,
    /// It waits for ever.
    Waits,
}

/// Runs both ends of `line`, the client with these faults. Returns the client.
fn client_with(faults: &str, line: &str, end: End) -> Ended {
    let port = free_port();
    let program = Program::new(line.split(' ').next().expect("a program"));
    // Only a RoCE NIC has datagrams.
    let program = match line.starts_with("ibv_ud") {
        true => program.env("URNIC_IDENTITY", "roce"),
        false => program,
    };
    let options = line.split_once(' ').map_or("", |(_, options)| options);
    let options = format!("{options} -p {port}");
    let is_rping = line.starts_with("rping");
    let [server, client] = match is_rping {
        true => [
            format!("-s -a 127.0.0.1 {options}"),
            format!("-c -a 127.0.0.1 {options}"),
        ],
        false => [options.clone(), format!("{options} 127.0.0.1")],
    };
    let mut there = program.clone().line(&server).spawn();
    if is_rping {
        there.wait_for_output("its listener", |_| {
            std::net::TcpStream::connect(("127.0.0.1", port)).ok()
        });
    } else {
        there.wait_until_listening(port);
    }
    let mut here = program.line(&client).env("URNIC_FAULTS", faults).spawn();
    if end == End::Waits {
        here.wait_for_output("the fault", |output| (!struck(output).is_empty()).then_some(()));
        // It has not ended by itself while the other end was well.
        assert!(here.ended().is_none(), "{faults}: {line} has ended");
        here.signal(Signal::KILL);
    }
    let ended = here.wait_for(LIMIT);
    // Without its client it may wait for ever.
    there.signal(Signal::KILL);
    there.wait_for(LIMIT);
    ended
}

#[track_caller]
fn takes(line: &str, faults: &str, end: End) {
    let client = client_with(faults, line, end);
    // Either end of a native connection may be the one that connects.
    let is_of_connecting =
        ["refuse", "unreachable", "reject"].contains(&faults) && !line.starts_with("rping");
    let least = usize::from(!is_of_connecting);
    assert!(
        (least..=1).contains(&struck(&client.output).len()),
        "{faults}: {client}"
    );
    match end {
        End::Well => assert!(is_done(&client), "{faults}: {client}"),
        End::Failed => assert!(!client.ok(), "{faults}: {client}"),
        End::Any | End::Waits => {}
    }
}

#[test]
fn pingpong_takes_each_fault_as_the_real_trouble() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ibv_rc_pingpong"));
    for (faults, end) in [
        ("reset after=64k", End::Failed),
        ("close after=64k", End::Failed),
        ("silence after=64k", End::Failed),
        ("corrupt after=64k", End::Failed),
        ("reset after=20msg", End::Failed),
        ("terminate code=0x1202 after=20msg", End::Failed),
        ("refuse", End::Well),
        ("reject", End::Any),
        ("cq-overflow nth=3", End::Waits),
        ("fail call=create_qp errno=ENOMEM", End::Failed),
        ("fail call=reg_mr errno=ENOMEM", End::Failed),
        ("fail call=create_cq errno=ENOMEM", End::Failed),
        ("fail call=alloc_pd errno=ENOMEM", End::Failed),
        ("fail call=modify_qp errno=EINVAL nth=2", End::Failed),
        ("complete status=RETRY_EXC_ERR nth=3", End::Failed),
        ("gid-change", End::Well),
        ("port-down for=50ms nth=3", End::Well),
        ("port-down for=600s nth=3", End::Failed),
        ("device-fatal nth=3", End::Failed),
    ] {
        takes("ibv_rc_pingpong -g 0", faults, end);
    }
    takes("ibv_rc_pingpong -g 0 -e", "lose-event nth=3", End::Waits);
}

#[test]
fn perftest_takes_each_fault_as_the_real_trouble() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ib_write_bw"));
    for (faults, end) in [
        ("reset after=64k", End::Failed),
        ("close after=64k", End::Failed),
        ("corrupt after=64k", End::Failed),
        ("terminate code=0x0101 after=20msg", End::Failed),
        ("refuse", End::Well),
        ("unreachable", End::Well),
        ("fail call=create_qp errno=ENOMEM", End::Failed),
        (
            "complete status=REM_ACCESS_ERR opcode=RDMA_WRITE nth=3",
            End::Failed,
        ),
        ("gid-change", End::Well),
        ("device-fatal nth=3", End::Failed),
    ] {
        takes("ib_write_bw -d urnic0 -n 2000", faults, end);
    }
}

#[test]
fn rping_takes_each_fault_as_the_real_trouble() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("rping"));
    for (faults, end) in [
        // rping's status is 0 when its connection is lost.
        ("reset after=64k", End::Any),
        ("close after=64k", End::Any),
        ("corrupt after=64k", End::Any),
        ("refuse", End::Failed),
        ("reject", End::Failed),
        ("fail call=resolve_addr errno=EHOSTUNREACH", End::Failed),
        ("fail call=create_qp errno=ENOMEM", End::Failed),
        ("fail call=reg_mr errno=ENOMEM", End::Failed),
        ("complete status=RETRY_EXC_ERR nth=3", End::Any),
        ("gid-change", End::Well),
    ] {
        takes("rping -C 2000", faults, end);
    }
}

/// The program has the status, and the log the reason, that a Terminate of a peer would give.
#[test]
fn a_missing_receive_can_be_had_without_one() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ibv_rc_pingpong"));
    let client = client_with(
        "terminate code=0x1202 after=20msg",
        "ibv_rc_pingpong -g 0",
        End::Failed,
    );
    for said in ["RNR retry counter exceeded (13)", "vendor_err 0x12020000"] {
        assert!(client.output.contains(said), "{client}");
    }
}

#[test]
fn late_completions_are_late_and_well() {
    or_skip!(installed("ibv_rc_pingpong"));
    let client = client_with(
        "late-completion time=1ms",
        "ibv_rc_pingpong -g 0 -n 200",
        End::Well,
    );
    assert!(microseconds(&client) >= 1000.0, "{client}");
}

#[test]
fn datagrams_get_lost_arrive_twice_and_late() {
    or_skip!(in_process("the ports are those of the device in the process"));
    or_skip!(installed("ibv_ud_pingpong"));
    for (faults, end) in [
        // It waits for a datagram that does not come.
        ("drop nth=100", End::Waits),
        ("reorder nth=100", End::Waits),
        ("port-down for=600s nth=100", End::Waits),
        ("duplicate nth=100", End::Any),
    ] {
        takes("ibv_ud_pingpong -g 0", faults, end);
    }
}

#[test]
fn a_port_that_is_down_is_up_again() {
    let program = or_skip!(compiled("port_events"));
    // At the first completion, and at a time; the program has no second device.
    for faults in [
        "port-down for=50ms",
        "port-down for=50ms at=2s device=0; port-down for=50ms at=2s device=1",
    ] {
        let ended = Program::new(&program).env("URNIC_FAULTS", faults).run_for(LIMIT);
        let said = ended.success();
        let lines: Vec<&str> = said.lines().filter(|line| !line.contains("WARN")).collect();
        assert_eq!(lines, ["port error, state 1", "port active, state 4"], "{said}");
        assert_eq!(struck(&said).len(), 1, "{faults}: {said}");
    }
}

/// The device in the process stops three times, and the program opens it again each time.
#[test]
fn a_device_that_stopped_returns() {
    let program = or_skip!(compiled("reopen"));
    let ended = Program::new(&program)
        .env("URNIC_FAULTS", "device-fatal for=300ms every=1 count=3")
        .run_for(LIMIT);
    let said = ended.success();
    let is_of_program = |line: &&str| !line.contains("WARN") && !line.contains("ERROR");
    let lines: Vec<&str> = said.lines().filter(is_of_program).collect();
    assert_eq!(
        lines,
        ["works", "gone", "works", "gone", "works", "gone", "works"],
        "{said}"
    );
    // The first attempts come too early.
    assert!(said.contains("cannot open urnic0: No such device"), "{said}");
}

/// The time of an iteration that a ping-pong printed.
fn microseconds(ended: &Ended) -> f64 {
    assert!(ended.ok(), "{ended}");
    let line = ended.output.lines().find(|line| line.contains("usec/iter"));
    let words: Vec<&str> = line.expect("a time").split(' ').collect();
    words[words.len() - 2].parse().expect("a number")
}

#[test]
fn a_slow_connection_is_slow_and_well() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ibv_rc_pingpong"));
    let slow = client_with(
        "delay time=1ms jitter=100us",
        "ibv_rc_pingpong -g 0 -n 200",
        End::Well,
    );
    // Each iteration sends once from here, which takes 0.9 ms at least.
    assert!(microseconds(&slow) >= 900.0, "{slow}");
}

/// A ping-pong that does not end: its server, and its client with these faults, seen in `place`.
fn endless(place: &Folder, faults: &str) -> [Running; 2] {
    let port = free_port();
    let program = Program::new("ibv_rc_pingpong")
        .line(&format!("-g 0 -n 100000000 -p {port}"))
        .env("URNIC_PRESENT_DIR", place.path());
    let mut there = program.clone().spawn();
    there.wait_until_listening(port);
    let here = program.arg("127.0.0.1").env("URNIC_FAULTS", faults);
    [there, here.spawn()]
}

/// What `urnic stat --json` says of a process.
fn stat(place: &Folder, process: &Running) -> String {
    let stat = Program::plain(urnic())
        .line("stat --json")
        .arg(process.pid().to_string());
    let stat = stat.env("URNIC_PRESENT_DIR", place.path());
    stat.run_for(LIMIT).output
}

/// What is late is in no thread's way.
#[test]
fn a_process_whose_sends_are_late_answers_stat() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ibv_rc_pingpong"));
    let place = Folder::inside(&scratch(), "faults-late");
    let [there, here] = endless(&place, "delay time=1000s nth=500");
    let sent = || {
        let said = stat(&place, &here);
        let (_, count) = said.split_once("\"tx_messages\":")?;
        count.split(',').next()?.parse::<u64>().ok()
    };
    let mut before = 0;
    let stuck = || -> Option<u64> {
        let now = sent()?;
        (now >= 100 && std::mem::replace(&mut before, now) == now).then_some(now)
    };
    let stuck = until(TIME_LIMIT, stuck).expect("it answers, and has sent something");
    assert_eq!(sent(), Some(stuck), "nothing is sent, and it answers");
    for end in [here, there] {
        end.signal(Signal::KILL);
        end.wait_for(LIMIT);
    }
}

#[test]
fn a_fault_may_be_of_one_device_of_a_process() {
    or_skip!(in_process("a server has one device"));
    or_skip!(installed("ibv_rc_pingpong"));
    let with = |device: &str, faults: &str| {
        let port = free_port();
        let program = Program::new("ibv_rc_pingpong")
            .line(&format!("-g 0 -n 50 -p {port} -d"))
            .arg(device)
            .env("URNIC_DEVICES", "2");
        let mut there = program.clone().spawn();
        there.wait_until_listening(port);
        let here = program.arg("127.0.0.1").env("URNIC_FAULTS", faults);
        let ended = here.run_for(LIMIT);
        there.signal(Signal::KILL);
        there.wait_for(LIMIT);
        ended
    };
    for fault in [
        "fail call=create_qp errno=ENOMEM",
        "reset after=64k",
        "complete status=GENERAL_ERR",
    ] {
        let faults = format!("{fault} device=urnic1");
        let well = with("urnic0", &faults);
        assert!(well.ok() && struck(&well.output).is_empty(), "{faults}: {well}");
        let struck_there = with("urnic1", &faults);
        assert_eq!(struck(&struck_there.output).len(), 1, "{faults}: {struck_there}");
    }
}

#[test]
fn one_seed_has_one_log() {
    let program = or_skip!(compiled("mistakes"));
    let run = |seed: u32| {
        let ended = Program::new(&program)
            .arg("nothing")
            .env("URNIC_FAULTS", format!("gid-change p=0.2; seed={seed}"))
            .run_for(LIMIT);
        assert!(ended.ok(), "{ended}");
        // The number of the queue pair differs.
        let lines = struck(&ended.output).into_iter();
        lines
            .map(|line| line.split_once("its occasion ").expect("a number").1.to_owned())
            .collect::<Vec<_>>()
    };
    let one = run(7);
    assert!((5..50).contains(&one.len()), "{one:?}");
    assert_eq!(one, run(7));
    assert_ne!(one, run(8));
}

#[test]
fn faults_can_be_added_to_a_process_that_runs() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ibv_rc_pingpong"));
    let place = Folder::inside(&scratch(), "faults-added");
    let fault = |pid: u32, faults: &str| {
        Program::plain(urnic())
            .arg("fault")
            .arg(pid.to_string())
            .line(faults)
            .env("URNIC_PRESENT_DIR", place.path())
            .run_for(LIMIT)
    };
    let [there, here] = endless(&place, "none");
    let connected = || stat(&place, &here).contains("\"state\":\"RTS\"").then_some(());
    until(TIME_LIMIT, connected).expect("a connection");

    let listed = fault(here.pid(), "").success();
    assert_eq!(listed, "no faults\n");
    let wrong = fault(here.pid(), "rest").failure();
    assert!(wrong.contains("\"rest\" is no fault"), "{wrong}");
    let passed_by = fault(there.pid(), "reset").failure();
    assert!(passed_by.contains("start it with --faults none"), "{passed_by}");
    let missing = fault(here.pid(), "/no/such/file").failure();
    assert!(missing.contains("/no/such/file: no such file"), "{missing}");
    let late = fault(here.pid(), "delay").failure();
    assert!(late.contains("delay: time=T, or rate=N, is missing"), "{late}");
    let added = fault(here.pid(), "complete status=RETRY_EXC_ERR").success();
    assert!(
        added.starts_with("fault 1: complete status=RETRY_EXC_ERR nth=1: struck "),
        "{added}"
    );
    let ended = here.wait_for(LIMIT);
    assert!(!ended.ok(), "{ended}");
    assert_eq!(struck(&ended.output).len(), 1, "{ended}");
    assert!(ended.output.contains("RETRY_EXC_ERR (12)"), "{ended}");
    there.signal(Signal::KILL);
    there.wait_for(LIMIT);
    let gone = fault(1, "reset").failure();
    assert!(gone.contains("process 1 has no urnic device open"), "{gone}");
}

/// The connection has passed many times the bytes after which the fault strikes.
#[test]
fn positions_count_from_when_a_fault_is_added() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ibv_rc_pingpong"));
    let place = Folder::inside(&scratch(), "faults-positions");
    let [there, here] = endless(&place, "none");
    let pid = here.pid().to_string();
    let fault = |line: &str| {
        let program = Program::plain(urnic()).line(&format!("fault {pid} {line}"));
        program
            .env("URNIC_PRESENT_DIR", place.path())
            .run_for(LIMIT)
            .success()
    };
    let passed = || -> Option<u64> {
        let said = stat(&place, &here);
        let (_, count) = said.split_once("\"tx_bytes\":")?;
        count.split([',', '}']).next()?.parse().ok()
    };
    until(TIME_LIMIT, || passed().filter(|bytes| *bytes > 1 << 20)).expect("a MiB that passed");

    // None of these strikes.
    fault("reset after=1g");
    fault("drop nth=2 peer=192.0.2.1");
    let listed = fault("--list");
    let expected = "fault 1: reset after=1073741824 nth=1: struck 0 times at 0 occasions\n\
                    fault 2: drop nth=2 peer=192.0.2.1: struck 0 times at 0 occasions\n";
    assert_eq!(listed, expected);
    assert_eq!(fault("--clear"), "no faults\n");
    assert_eq!(fault("--list"), "no faults\n");
    let only = fault("--clear refuse every=7");
    assert_eq!(only, "fault 3: refuse every=7: struck 0 times at 0 occasions\n");

    fault("close after=64k");
    let ended = here.wait_for(LIMIT);
    assert!(!ended.ok(), "{ended}");
    let lines = struck(&ended.output);
    assert_eq!(lines.len(), 1, "{ended}");
    assert!(lines[0].starts_with("fault 4: close after=65536: "), "{ended}");
    there.signal(Signal::KILL);
    there.wait_for(LIMIT);
}

/// A process that receives only has no completion of its own at which the port could go down.
#[test]
fn a_port_goes_down_at_once_in_a_process_that_runs() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(installed("ib_write_bw"));
    let place = Folder::inside(&scratch(), "faults-at-once");
    let port = free_port();
    let program = Program::new("ib_write_bw")
        .line(&format!("-d urnic0 -F --run_infinitely -D 3 -p {port}"))
        .env("URNIC_PRESENT_DIR", place.path())
        .env("URNIC_FAULTS", "none");
    let mut there = program.clone().spawn();
    there.wait_until_listening(port);
    let here = program.arg("127.0.0.1").spawn();
    let sends = || {
        let said = stat(&place, &here);
        let (_, count) = said.split_once("\"tx_messages\":")?;
        (count.split(',').next()?.parse::<u64>().ok()? > 1000).then_some(())
    };
    until(TIME_LIMIT, sends).expect("a connection that sends");
    let fault = Program::plain(urnic())
        .arg("fault")
        .arg(there.pid().to_string())
        .arg("port-down for=600s")
        .env("URNIC_PRESENT_DIR", place.path());
    let listed = fault.run_for(LIMIT).success();
    assert!(
        listed.starts_with("fault 1: port-down for=600s at=0s: "),
        "{listed}"
    );
    let ended = here.wait_for(LIMIT);
    assert!(!ended.ok(), "{ended}");
    assert!(ended.output.contains("RETRY_EXC_ERR (12)"), "{ended}");
    there.signal(Signal::KILL);
    let ended = there.wait_for(LIMIT);
    assert_eq!(struck(&ended.output).len(), 1, "{ended}");
}

#[test]
fn faults_come_from_a_file_and_mistakes_are_named() {
    let folder = Folder::inside(&scratch(), "faults-file");
    let file = folder.file("faults");
    fs::write(&file, "# of a test\ndrop p=0.5 # half\n\nseed=3\n").expect("our folder");
    let env = |faults: &str| {
        Program::plain(urnic())
            .arg("env")
            .arg("--faults")
            .arg(faults)
            .run_for(LIMIT)
    };
    let exports = env(file.to_str().expect("a name")).success();
    assert!(exports.contains("URNIC_FAULTS='drop p=0.5; seed=3'"), "{exports}");
    let exports = env(&format!("@{}", file.display())).success();
    assert!(exports.contains("URNIC_FAULTS='drop p=0.5; seed=3'"), "{exports}");
    let scenario = env("@rail-down").success();
    assert!(
        scenario.contains("URNIC_FAULTS='port-down at=2s for=5s device=0'"),
        "{scenario}"
    );
    let missing = env("@rail-up").failure();
    assert!(
        missing.contains("no such file or scenario; there are rail-down, rail-flaps"),
        "{missing}"
    );
    let wrong = env("drop p=2").failure();
    assert!(
        wrong.contains("--faults drop p=2: p=2: not a value of p"),
        "{wrong}"
    );
    for (given, says) in [
        ("/no/such/file", "--faults /no/such/file: no such file"),
        ("faults.txt", "--faults faults.txt: no such file"),
        ("delay jitter=2us", "time=T is missing"),
    ] {
        let wrong = env(given).failure();
        assert!(wrong.contains(says), "{given}: {wrong}");
    }
    let kinds = Program::plain(urnic())
        .line("fault --list")
        .run_for(LIMIT)
        .success();
    assert!(
        kinds.contains("device-fatal") && kinds.contains("stands for: "),
        "{kinds}"
    );
}
