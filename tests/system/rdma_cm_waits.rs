//! Threads that wait for events of the connection manager, and interruptions of such a wait.

use std::path::Path;
use std::time::Duration;

use urnic_tests::build::compiled;
use urnic_tests::program::Program;
use urnic_tests::{or_skip, skip};

const LIMIT: Duration = Duration::from_secs(120);
/// How often a process is stopped, at each point.
const STOPS: usize = 20;

/// `cm_waits.c` describes the result of each of its scenes.
fn scene(name: &str) -> Result<Program, String> {
    Ok(Program::new(compiled("cm_waits")?).arg(name))
}

#[test]
fn a_signal_ends_the_wait_unless_with_sa_restart() {
    or_skip!(scene("signals")).run_for(LIMIT).success();
}

#[test]
fn a_handler_that_jumps_out_of_the_wait_holds_no_lock() {
    or_skip!(scene("jumps")).run_for(LIMIT).success();
}

#[test]
fn a_wait_continues_after_another_threads_close() {
    or_skip!(scene("closes")).run_for(LIMIT).success();
}

#[test]
fn a_thread_without_events_sleeps() {
    if !Path::new("/proc/self/schedstat").exists() {
        return skip::report("the kernel does not report the run time of threads (CONFIG_SCHED_INFO)");
    }
    or_skip!(scene("rests")).run_for(LIMIT).success();
}

#[test]
fn waits_of_every_kind_go_on_when_the_process_was_stopped() {
    let mut program = or_skip!(scene("stops")).spawn();
    for point in ["waiting", "event"] {
        program.wait_for_output(point, |printed| printed.contains(point).then_some(()));
        for _ in 0..STOPS {
            program.stop();
            program.resume();
        }
        program.write_stdin("r");
    }
    program.wait_for(LIMIT).success();
}
