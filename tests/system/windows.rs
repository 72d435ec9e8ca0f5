//! Memory windows of both types, and the completions of Writes that a window does not permit.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::{compiled, or_skip};

#[test]
fn outside_after_the_end_and_from_elsewhere() {
    let ended = Program::new(or_skip!(compiled("windows"))).run_for(Duration::from_secs(120));
    assert!(ended.ok(), "{ended}");
}
