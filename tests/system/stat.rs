//! Inspection of processes that use the device: `urnic stat` and the `hw_counters` files.

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::served::Served;
use urnic_tests::skip::installed;
use urnic_tests::target_process::{Role, TargetProcess};
use urnic_tests::ulpdu::send;
use urnic_tests::wait::{TIME_LIMIT, free_port, until};

/// A place for presences that no other test uses.
fn place(name: &str) -> Folder {
    Folder::inside(&scratch(), &format!("stat-{name}"))
}

fn stat(place: &Folder, line: &str) -> Program {
    Program::plain(urnic())
        .line("stat")
        .line(line)
        .env("URNIC_PRESENT_DIR", place.path())
}

fn target_in(place: &Folder) -> Result<TargetProcess, String> {
    TargetProcess::start(&[("URNIC_PRESENT_DIR", place.path().to_str().expect("our path"))])
}

#[test]
fn processes_and_queue_pairs_are_shown_with_their_counters() {
    let place = place("shown");
    let mut target = or_skip!(target_in(&place));
    let mut link = target.link(Role::Responder);
    link.peer
        .send_ulpdus(&[send(1, b"one"), send(2, b"two"), send(3, b"three")]);
    for (id, len) in [(0, 3), (1, 3), (2, 5)] {
        assert_eq!(target.received(link.qp), (id, len));
    }
    // Three Sends, and the zero-length Write with which the peer reported that it is ready.
    let json = stat(&place, "--json").run().success();
    for part in [
        "\"command\":\"target_process\"",
        "\"rx_messages\":4",
        "\"state\":\"RTS\"",
        "\"rdma_cm\":false",
    ] {
        assert!(json.contains(part), "{part} is not in {json}");
    }
    let table = stat(&place, "").run().success();
    assert!(
        table.starts_with("PID") || table.trim_start().starts_with("PID"),
        "{table}"
    );
    assert!(table.contains("target_process"), "{table}");
    let pid = target.process().pid();
    let one = stat(&place, &pid.to_string()).run().success();
    assert!(
        one.contains(&format!("process {pid}, target_process")) && one.contains("127.0.0.1:"),
        "{one}"
    );
    target.quits();
    let after = stat(&place, "").run().success();
    assert_eq!(after, "no process of yours has a urnic device open\n");
}

/// The device is in another process than the memory of both programs.
#[test]
fn shm_20_a_served_device_accesses_another_ones_program() {
    or_skip!(installed("ib_write_bw"));
    let served = Served::start();
    let place = place("served");
    for (name, counter) in [
        ("ib_write_bw", "\"direct_writes\":"),
        ("ib_read_bw", "\"direct_reads\":"),
    ] {
        let port = free_port();
        let end = |more: &str| {
            let line = format!("-d urnic0 -F -s 65536 -n 100000 -p {port} {more}");
            let program = served.program(name).line(&line);
            program.env("URNIC_PRESENT_DIR", place.path())
        };
        let mut server = end("").spawn();
        server.wait_until_listening(port);
        let client = end("127.0.0.1").spawn();
        let seen = until(TIME_LIMIT, || {
            let shown = stat(&place, "--json").run().success();
            let values = shown.split(counter).skip(1);
            let mut first = values.filter_map(|rest| rest.split([',', '}']).next()?.parse::<u64>().ok());
            first.any(|value| value > 0).then_some(())
        });
        assert!(seen.is_some(), "{name}: no request was direct");
        client.wait().success();
        server.wait().success();
    }
}

#[test]
fn a_killed_process_is_no_longer_listed() {
    let place = place("killed");
    let target = or_skip!(target_in(&place));
    let pid = target.process().pid();
    target.process().signal(Signal::KILL);
    drop(target);
    let gone = stat(&place, &pid.to_string()).run();
    assert_eq!(gone.status.code(), Some(1), "{gone}");
    assert!(
        gone.output.contains(&format!("there is no process {pid}")),
        "{gone}"
    );
    let left: Vec<_> =
        std::fs::read_dir(place.file(&format!("urnic-{}", rustix::process::geteuid().as_raw())))
            .expect("the user's folder")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.ends_with(".stat"))
            .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_next_open_removes_files_of_killed_processes() {
    let place = place("swept");
    let names = || -> Vec<String> {
        std::fs::read_dir(place.file(&format!("urnic-{}", rustix::process::geteuid().as_raw())))
            .expect("the user's folder")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.ends_with(".stat"))
            .collect()
    };
    let living = or_skip!(target_in(&place));
    for _ in 0..3 {
        let killed = or_skip!(target_in(&place));
        killed.process().signal(Signal::KILL);
        drop(killed);
    }
    assert_eq!(names().len(), 2, "each took away what the one before left");
    let next = or_skip!(target_in(&place));
    let pids = [&living, &next].map(|target| format!("{}-", target.process().pid()));
    let left = names();
    assert!(
        left.len() == 2
            && pids
                .iter()
                .all(|pid| left.iter().any(|name| name.starts_with(pid))),
        "{left:?} of {pids:?}"
    );
    living.quits();
    next.quits();
}

#[test]
fn a_stopped_process_delays_no_other() {
    let place = place("stopped");
    let target = or_skip!(target_in(&place));
    target.process().stop();
    let text = stat(&place, "").run().success();
    target.process().resume();
    assert_eq!(text, "no process of yours has a urnic device open\n");
    // The late answer goes to no client; later answers are normal.
    let back = until(TIME_LIMIT, || {
        stat(&place, "")
            .run()
            .success()
            .contains("target_process")
            .then_some(())
    });
    assert!(back.is_some());
    target.quits();
}

#[test]
fn hw_counters_have_the_present_values() {
    or_skip!(installed("cat"));
    let place = place("files");
    let mut target = or_skip!(target_in(&place));
    let folder = "/sys/class/infiniband/urnic0/ports/1/hw_counters";
    let value = |name: &str| {
        Program::new("cat")
            .arg(format!("{folder}/{name}"))
            .env("URNIC_PRESENT_DIR", place.path())
            .run()
            .success()
            .trim_end()
            .parse::<u64>()
            .expect("a number")
    };
    let read = || value("rx_messages");
    // The zero-length Write between the target's own two queue pairs.
    let before =
        until(TIME_LIMIT, || Some(read()).filter(|messages| *messages > 0)).expect("its first message");
    let mut link = target.link(Role::Responder);
    link.peer.send_ulpdus(&[send(1, b"one"), send(2, b"two")]);
    target.received(link.qp);
    target.received(link.qp);
    // And the zero-length Write with which the peer reported that it is ready.
    assert_eq!(read(), before + 3);
    // Completions in error count when the program has polled them.
    assert_eq!(value("wc_wr_flush_err"), 0);
    drop(link.peer);
    let flushed = target.completion(link.qp);
    assert_eq!(value("wc_wr_flush_err"), 1, "{flushed:?}");
    assert_eq!(value("wc_rem_access_err"), 0);
    target.quits();
    assert_eq!(read(), 0, "counters are those of the processes that are there");
}

/// `urnic top` on a terminal of its own, with these keys, and a second look that never comes.
fn top(place: &Folder, keys: &str) -> Program {
    let urnic = urnic();
    let line = format!(
        "printf '{keys}' | script --quiet --return --command 'stty rows 20 cols 110; {} top --interval 1e19' /dev/null",
        urnic.display()
    );
    Program::plain("sh")
        .args(["-c", &line])
        .env("TERM", "xterm")
        .env("URNIC_PRESENT_DIR", place.path())
}

#[test]
fn top_shows_processes_and_the_queue_pairs_of_one() {
    or_skip!(installed("script"));
    let place = place("top");
    let mut target = or_skip!(target_in(&place));
    let link = target.link(Role::Responder);
    let list = top(&place, "q").run().success();
    assert!(
        list.contains("urnic top") && list.contains("target_process"),
        "{list}"
    );
    let right = "\\033[C";
    let pair = top(&place, &format!("{right}q")).run().success();
    let local = format!("{:#08x}", link.qp.qpn);
    assert!(pair.contains(&local) && pair.contains("RTS"), "{pair}");
    let leaves_the_screen = "\x1b[?1049l";
    assert!(
        pair.contains(leaves_the_screen),
        "the terminal is as before: {pair}"
    );
    drop(link);
    target.quits();
    let none = top(&place, "q").run().success();
    assert!(none.contains("0 devices"), "{none}");
}

#[test]
fn top_without_a_terminal_names_the_command_for_pipes() {
    let refused = Program::plain(urnic()).line("top").run();
    assert_eq!(refused.status.code(), Some(2), "{refused}");
    assert!(refused.output.contains("urnic stat"), "{refused}");
}
