//! Statuses of work completions, and asynchronous events: each possible one is produced.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use urnic_tests::build::tree;
use urnic_tests::program::Program;
use urnic_tests::served::in_process;
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

/// The text after `start`, up to the next space, `,` or `;`.
fn word<'a>(line: &'a str, start: &str) -> &'a str {
    let (_, rest) = line
        .split_once(start)
        .unwrap_or_else(|| panic!("no {start:?} in {line:?}"));
    rest.split([' ', ',', ';', ':']).next().unwrap_or_default()
}

#[test]
fn both_ends_explain_a_refused_request() {
    or_skip!(in_process("the log is the server's"));
    let program = Program::new(or_skip!(compiled("refusals")));
    let both = Pair::new(&program).within(Duration::from_secs(120)).succeeds();
    let line = |output: &str, what: &str| {
        let found = output.lines().find(|line| line.contains(what));
        found
            .unwrap_or_else(|| panic!("no {what:?} in {output}"))
            .to_owned()
    };
    // The client used a key with one bit changed.
    let there = line(&both.client.output, "the peer refused RDMA Write of 8 B at ");
    let stag = word(&there, "STag ");
    let here = line(&both.server.output, "refused the peer's RDMA Write of 8 B at ");
    assert_eq!(word(&here, "STag "), stag, "{here}");
    assert_eq!(word(&here, " B at "), word(&there, " B at "), "{here}");
    let number = |hex: &str| u32::from_str_radix(hex.trim_start_matches("0x"), 16).unwrap();
    assert!(here.contains("wrong key"), "{here}");
    assert_eq!(number(word(&here, "nearest valid ")), number(stag) ^ 1, "{here}");
    assert!(here.ends_with("+4096 with REMOTE_WRITE"), "{here}");
    line(
        &both.server.output,
        "refused the peer's Send of at least 64 B: DDP message too long",
    );
    line(
        &both.client.output,
        "the peer refused a Send of 64 B: DDP message too long",
    );
    line(
        &both.client.output,
        "the peer refused a Send of 8 B: DDP no buffer",
    );
}

#[test]
fn each_kind_of_refusal_has_its_explanation() {
    or_skip!(in_process("the log is the server's"));
    let ended = Program::new(or_skip!(compiled("statuses"))).run_for(Duration::from_secs(120));
    for what in [
        "Send failed: element 0: 8 B at 0x",
        "RDMA Read failed: element 0: 8 B at 0x",
        ": no such STag; nearest valid 0x",
        ": outside of the registered range: 0x",
        "+65536 without REMOTE_WRITE; nearest valid 0x",
        "refused the peer's RDMA Read of 8 B at 0x",
        "RDMA Read failed: LOC_QP_OP_ERR: max_rd_atomic is 0",
        "bind failed: MW_BIND_ERR",
        "the peer refused atomic of 8 B at 0x",
        "RDMAP STag cannot be invalidated",
    ] {
        assert!(ended.output.contains(what), "no {what:?} in {ended}");
    }
}
