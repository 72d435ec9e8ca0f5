//! Forked children and registered memory.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::{compiled, or_skip};

const LIMIT: Duration = Duration::from_secs(120);

/// The state is `IBV_FORK_UNNEEDED`, however the program prepares for forks.
fn fork_with(way: &str, settings: &[(&str, &str)]) {
    let program = or_skip!(compiled("fork_safe"));
    let program = settings
        .iter()
        .fold(Program::new(program).arg(way), |program, (name, value)| {
            program.env(name, value)
        });
    let ended = program.run_for(LIMIT);
    assert!(
        ended.ok() && ended.output == "fork state 2\nseparate\n",
        "{ended}"
    );
}

#[test]
fn children_of_an_unprepared_program_share_nothing() {
    fork_with("none", &[]);
}

#[test]
fn children_after_ibv_fork_init_have_registered_memory() {
    fork_with("init", &[]);
}

#[test]
fn children_with_rdmav_fork_safe_have_registered_memory() {
    fork_with("none", &[("RDMAV_FORK_SAFE", "1")]);
}

/// As in programs that load libibverbs at run time: the plug-in does not see the call.
#[test]
fn children_after_libibverbs_own_preparation_have_the_memory() {
    fork_with("found", &[]);
}

#[test]
fn children_have_memory_that_strict_watches() {
    fork_with("none", &[("URNIC_STRICT", "error")]);
}
