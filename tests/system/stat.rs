//! Inspection of processes that use the device: `urnic stat` and the `hw_counters` files.

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::target_process::{Role, TargetProcess};
use urnic_tests::ulpdu::send;
use urnic_tests::wait::{TIME_LIMIT, until};

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
    target.process().signal(Signal::STOP);
    let text = stat(&place, "").run().success();
    target.process().signal(Signal::CONT);
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
    let file = "/sys/class/infiniband/urnic0/ports/1/hw_counters/rx_messages";
    let read = || {
        Program::new("cat")
            .arg(file)
            .env("URNIC_PRESENT_DIR", place.path())
            .run()
            .success()
            .trim_end()
            .parse::<u64>()
            .expect("a number")
    };
    // The zero-length Write between the target's own two queue pairs.
    let before =
        until(TIME_LIMIT, || Some(read()).filter(|messages| *messages > 0)).expect("its first message");
    let mut link = target.link(Role::Responder);
    link.peer.send_ulpdus(&[send(1, b"one"), send(2, b"two")]);
    target.received(link.qp);
    target.received(link.qp);
    // And the zero-length Write with which the peer reported that it is ready.
    assert_eq!(read(), before + 3);
    target.quits();
    assert_eq!(read(), 0, "counters are those of the processes that are there");
}
