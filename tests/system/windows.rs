//! Memory windows of both types, and what a Write that one does not permit completes with.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::{compiled, or_skip};

#[test]
fn outside_after_the_end_and_from_elsewhere() {
    let ended = Program::new(or_skip!(compiled("windows"))).run_for(Duration::from_secs(120));
    assert!(ended.ok(), "{ended}");
}
