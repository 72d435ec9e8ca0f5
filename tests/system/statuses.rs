//! Statuses of work completions, and asynchronous events: each possible one is produced.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use urnic_tests::build::tree;
use urnic_tests::program::Program;
use urnic_tests::{Pair, compiled, or_skip};

/// The statuses in the table of `docs/reference/statuses.md`.
fn documented() -> BTreeSet<u32> {
    let text =
        fs::read_to_string(tree().join("docs/reference/statuses.md")).expect("docs/reference/statuses.md");
    let rows = text.lines().skip_while(|line| *line != "## Statuses that occur");
    let rows = rows.skip(1).take_while(|line| !line.starts_with("## "));
    rows.filter_map(|row| row.split('|').nth(1)?.trim().parse().ok())
        .collect()
}

#[test]
fn every_possible_status_and_event_occurs() {
    let ended = Program::new(or_skip!(compiled("statuses"))).run_for(Duration::from_secs(120));
    assert!(ended.ok(), "{ended}");
    let number = |line: &str| line.split(' ').next()?.parse().ok();
    let came: BTreeSet<u32> = ended.output.lines().filter_map(number).collect();
    assert_eq!(
        came,
        documented(),
        "docs/reference/statuses.md has others:\n{ended}"
    );
}

#[test]
fn a_refused_request_completes_with_the_reason() {
    let program = Program::new(or_skip!(compiled("refusals")));
    let both = Pair::new(&program).within(Duration::from_secs(120)).succeeds();
    assert_eq!(both.client.output.matches(": ok").count(), 3, "{}", both.client);
}
