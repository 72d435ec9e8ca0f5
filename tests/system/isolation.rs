//! A fault of one program affects no other program; and programs that make mistakes get an error.

use std::time::Duration;

use rustix::process::Signal;
use urnic_tests::program::{Program, Running};
use urnic_tests::{Pair, compiled, or_skip};

/// Takes a second or two where nothing else runs.
const LIMIT: Duration = Duration::from_secs(300);

/// Starts an endless stream and kills the sender in the middle; the receiver must detect it.
fn notices_the_death_of_its_peer(options: &str) {
    let stream = Program::new(or_skip!(compiled("stream"))).line(options);
    let (mut receiver, sender): (Running, Running) = Pair::new(&stream).start();
    receiver.wait_for_output("that messages flow", |text| {
        text.contains("flowing").then_some(())
    });
    sender.signal(Signal::KILL);
    // The limit is the harness's; "within seconds" is visible in the run's time.
    let end = receiver.wait().success();
    assert!(end.contains("the end after"), "{end}");
}

#[test]
fn a_peer_that_is_killed_ends_in_error_completions() {
    notices_the_death_of_its_peer("-f -s 64");
    notices_the_death_of_its_peer("-f -s 100000");
}

#[test]
fn children_of_a_killed_peer_do_not_keep_its_connection() {
    notices_the_death_of_its_peer("-f -k -s 1000");
}

#[test]
fn other_pairs_go_on_when_one_program_is_killed() {
    let stream = Program::new(or_skip!(compiled("stream")));
    let good = Pair::new(&stream.clone().line("-n 200000 -s 64"));
    let ends = good.start();
    notices_the_death_of_its_peer("-f -s 64");
    ends.0.wait().success();
    ends.1.wait().success();
}

#[test]
fn one_context_of_a_program_disturbs_no_other() {
    let text = Program::new(or_skip!(compiled("contexts")))
        .run_for(LIMIT)
        .success();
    assert!(text.contains("undisturbed"), "{text}");
}

#[test]
fn a_slowly_built_work_request_stalls_no_other() {
    Program::new(or_skip!(compiled("builder"))).run().success();
}

#[test]
fn wrong_arguments_get_the_documented_errno() {
    let program = Program::new(or_skip!(compiled("errnos")));
    let text = program.run().success();
    assert!(text.lines().count() > 30, "{text}");
}
