//! Fetch-and-adds of several processes on one counter: each counts once.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::{compiled, or_skip};

/// Four processes and the counter's own, of which each adds `count`.
fn add(count: u64, limit: Duration) {
    let line = format!("-c 4 -n {count}");
    let program = Program::new(or_skip!(compiled("atomics"))).line(&line);
    let ended = program.run_for(limit);
    assert!(ended.ok(), "{ended}");
    assert!(
        ended.output.contains(&format!("{} additions", 5 * count)),
        "{ended}"
    );
}

#[test]
fn four_processes_and_the_own_one_add_exactly() {
    add(20_000, Duration::from_secs(240));
}

#[test]
#[ignore = "long: make soak"]
fn a_million_times_each() {
    add(1_000_000, Duration::from_secs(1800));
}
