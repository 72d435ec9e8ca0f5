//! Memory windows of both types, and the completions of Writes that a window does not permit.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::{compiled, or_skip};

#[test]
fn accesses_outside_of_a_window_are_refused() {
    let ended = Program::new(or_skip!(compiled("windows"))).run_for(Duration::from_secs(120));
    assert!(ended.ok(), "{ended}");
}
