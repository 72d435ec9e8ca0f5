//! Nothing left behind: descriptors, threads, processor time, memory.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::{Pair, compiled, or_skip};

/// Processor time a process has used, in clock ticks (a hundredth of a second).
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the program runs");
    // utime and stime are the 14th and 15th fields; the name, second, may hold spaces, and ends
    // with the last parenthesis.
    let (_, fields) = stat.rsplit_once(") ").expect("a stat line");
    fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|n| n.parse::<u64>().expect("a number"))
        .sum()
}

#[test]
fn a_thousand_rounds_leave_no_descriptor_and_no_thread() {
    let rounds = Program::new(or_skip!(compiled("rounds")));
    rounds.arg("1000").run_for(Duration::from_secs(240)).success();
}

#[test]
fn a_program_that_ends_in_a_signal_handler_ends() {
    let program = Program::new(or_skip!(compiled("exit_in_handler")));
    // The signal arrives at a random point; most are in the device, with a queue pair's lock.
    let running: Vec<_> = (0..10).map(|_| program.spawn()).collect();
    for program in running {
        program.wait().success();
    }
}

#[test]
fn an_idle_connected_program_uses_no_processor_time() {
    // The sender is stopped, so the receiver has an open, silent connection and sleeps on its
    // completion channel.
    or_skip!(installed("ibv_rc_pingpong"));
    let (server, client) = Pair::line("ibv_rc_pingpong -e -n 2000000000").start();
    let pid = server.pid();
    let busy = urnic_tests::wait::until(urnic_tests::wait::TIME_LIMIT, || (ticks(pid) > 20).then_some(()));
    assert!(busy.is_some(), "they never got going: {}", server.output());
    client.signal(rustix::process::Signal::STOP);
    // All work that was in progress when the client stopped is complete when a tenth of a second
    // passes without a tick.
    let mut last = ticks(pid);
    let quiet = urnic_tests::wait::until(Duration::from_secs(30), || {
        std::thread::sleep(Duration::from_millis(100));
        let before = std::mem::replace(&mut last, ticks(pid));
        (before == last).then_some(())
    });
    assert!(quiet.is_some(), "it never comes to rest");
    std::thread::sleep(Duration::from_secs(2));
    // A thread that spins would have used some 200.
    let used = ticks(pid) - last;
    assert!(used <= 4, "{used} ticks in 2 s of idleness");
}

#[test]
fn the_presence_folder_is_no_longer_than_needed() {
    // Many runs share one tree; they must not each leave one.
    or_skip!(installed("ibv_devices"));
    let folder = urnic_testkit::Folder::inside(&urnic_tests::build::scratch(), "present");
    let count = || folder.names().len();
    let devices = Program::new("ibv_devices").env("URNIC_PRESENT_DIR", folder.path());
    devices.run().success();
    let after_one = count();
    (0..10).for_each(|_| drop(devices.run().success()));
    let after_many = count();
    assert_eq!(after_one, after_many);
}

fn valgrind(options: &str) -> Pair {
    let suppressions = format!(
        "--suppressions={}",
        urnic_tests::build::tree().join("share/valgrind.supp").display()
    );
    let checks = [
        &suppressions,
        "--quiet",
        "--error-exitcode=99",
        "--leak-check=full",
        "--errors-for-leak-kinds=definite",
    ];
    let mut pair = Pair::new(
        &Program::new("valgrind")
            .args(checks)
            .arg("ibv_rc_pingpong")
            .line(options),
    );
    pair.client = Program::new("ibv_rc_pingpong").line(options);
    pair.within(Duration::from_secs(240))
}

#[test]
fn valgrind_has_no_complaint_about_a_pingpong() {
    or_skip!(installed("valgrind"));
    or_skip!(installed("ibv_rc_pingpong"));
    valgrind("-n 200").succeeds();
}

#[test]
#[ignore = "long: make soak"]
fn valgrind_has_no_complaint_about_a_long_pingpong() {
    or_skip!(installed("valgrind"));
    or_skip!(installed("ibv_rc_pingpong"));
    for options in ["-n 20000", "-n 20000 -e", "-c -s 1000000 -n 50"] {
        valgrind(options).succeeds();
    }
}
