//! The option `strict`: each mistake is found by its rule, at its place, and correct programs have
//! no findings.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use urnic_testkit::Folder;
use urnic_tests::build::{compiled_with, scratch};
use urnic_tests::program::{Ended, Program};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::{Pair, compiled, or_skip};

/// The exit status of a program with findings.
const STATUS: i32 = 86;
const LIMIT: Duration = Duration::from_secs(120);

fn checked(program: Program, mode: &str) -> Program {
    program.env("URNIC_STRICT", mode)
}

fn with_mistake(program: &Path, mistake: &str) -> Program {
    checked(Program::new(program).arg(mistake), "error")
}

/// Rules of the findings in a log, in order and each once.
fn rules(output: &str) -> Vec<String> {
    let mut rules: Vec<String> = output
        .lines()
        .filter_map(|line| line.split_once(" strict: ")?.1.split_once(": "))
        .map(|(rule, _)| rule.to_owned())
        .collect();
    rules.sort();
    rules.dedup();
    rules
}

#[track_caller]
fn ends_with_findings(ended: &Ended) {
    assert_eq!(ended.status.code(), Some(STATUS), "{ended}");
}

#[test]
fn each_mistake_is_found_by_its_rule_and_place() {
    or_skip!(in_process("receives are held back by the device in the process"));
    let program = or_skip!(compiled("mistakes"));
    let sent_wrongly: &[&str] = &["bad-lkey", "request-failed"];
    for (mistake, expected, place) in [
        ("wrong-rkey", &["request-failed"][..], "wrong_rkey (mistakes.c:"),
        ("unposted-receive", &["receive-missing"], ""),
        ("reused-buffer", &["buffer-changed"], "reused_buffer (mistakes.c:"),
        (
            "premature-look",
            &["receive-touched"],
            "premature_look (mistakes.c:",
        ),
        ("reused-page", &["buffer-changed"], "reused_page (mistakes.c:"),
        (
            "premature-read",
            &["receive-touched"],
            "premature_read (mistakes.c:",
        ),
        ("shared-look", &["receive-touched"], "shared_look (mistakes.c:"),
        (
            "written-receive",
            &["buffer-changed"],
            "written_receive (mistakes.c:",
        ),
        ("small-queue", &["cq-too-small"], "small_queue (mistakes.c:"),
        ("leak", &["leak"], "leak (mistakes.c:"),
        (
            "none-signalled",
            &["none-signalled"],
            "none_signalled (mistakes.c:",
        ),
        ("wrong-lkey", sent_wrongly, "wrong_lkey (mistakes.c:"),
        ("gone-lkey", sent_wrongly, "gone_lkey (mistakes.c:"),
        ("long-inline", &["post-refused"], "long_inline (mistakes.c:"),
        ("built-inline", &["post-refused"], "built_inline (mistakes.c:"),
        ("wrong-state", &["post-refused"], "wrong_state (mistakes.c:"),
        (
            "unmapped",
            &["unmapped-while-registered"],
            "unmapped (mistakes.c:",
        ),
        (
            "wrong-order",
            &["destroyed-too-early"],
            "wrong_order (mistakes.c:",
        ),
        ("missed-rearm", &["missed-rearm"], "rearm (mistakes.c:"),
        (
            "no-acknowledgement",
            &["event-not-acknowledged", "leak"],
            "no_acknowledgement (mistakes.c:",
        ),
    ] {
        let ended = with_mistake(&program, mistake).run_for(LIMIT);
        ends_with_findings(&ended);
        assert_eq!(rules(&ended.output), expected, "{mistake}: {ended}");
        let named = |line: &str| line.contains(" strict: ") && line.contains(place);
        assert!(
            ended.output.lines().any(named),
            "{mistake}: no {place:?} in {ended}"
        );
    }
}

/// The line of the finding names the instruction, not only the post of the request.
#[test]
fn the_writer_of_a_page_that_is_sent_is_found() {
    or_skip!(in_process("receives are held back by the device in the process"));
    let program = or_skip!(compiled("mistakes"));
    let ended = with_mistake(&program, "reused-page").run_for(LIMIT);
    let expected = [
        "the memory of the SEND with wr_id 0x3 was written at ",
        "; at change (mistakes.c:",
    ];
    let names = |line: &str| expected.iter().all(|part| line.contains(part));
    assert!(ended.output.lines().any(names), "{expected:?} in {ended}");
}

/// What libc and librdmacm do for the program is not the place: the program's call is.
#[test]
fn the_place_is_the_programs_own_line() {
    or_skip!(in_process("receives are held back by the device in the process"));
    let program = or_skip!(compiled("mistakes"));
    // Functions of libc are inline functions of its headers then, without frame pointers as before.
    let options = ["-O2", "-D_FORTIFY_SOURCE=2", "-fomit-frame-pointer"];
    let fortified = or_skip!(compiled_with("mistakes", "fortified_mistakes", &options));
    for (mistake, rule, place) in [
        ("cleared-page", "buffer-changed", "; at cleared_page (mistakes.c:"),
        (
            "copied-receive",
            "receive-touched",
            "; at copied_receive (mistakes.c:",
        ),
        (
            "forked-on-old-kernel",
            "fork-without-init",
            "; at forked (mistakes.c:",
        ),
        ("cm-leak", "leak", "; at cm_leak (mistakes.c:"),
    ] {
        for program in [&program, &fortified] {
            let ended = with_mistake(program, mistake).run_for(LIMIT);
            let rule = format!(" strict: {rule}: ");
            let names = |line: &str| line.contains(&rule) && line.contains(place);
            let lines = &ended.output;
            assert!(lines.lines().any(names), "{mistake}: no {place:?} in {ended}");
        }
    }
}

/// What a program that polls the last byte of a Write finds with the option `placement`.
#[test]
fn a_program_that_takes_the_last_byte_for_all_of_them_is_found() {
    or_skip!(in_process("the device in the process has the option"));
    let program = or_skip!(compiled("last_byte"));
    let times = |placement: &str| {
        let pair = Pair::new(&Program::new(&program).env("URNIC_PLACEMENT", placement));
        let said = pair.succeeds().server.output;
        let (_, rest) = said.split_once("the first byte was there ").expect("a result");
        let (times, _) = rest.split_once(" times of 200").expect("a result");
        times.parse::<u32>().expect("a number")
    };
    assert_eq!(times("in-order"), 200);
    // A server that has no processor just then sees all of them.
    let last_first = times("last-first");
    assert!(last_first < 200, "{last_first} times");
}

#[test]
fn a_fork_that_needs_preparation_is_found() {
    let program = or_skip!(compiled("mistakes"));
    let ended = with_mistake(&program, "forked-on-old-kernel").run_for(LIMIT);
    assert_eq!(rules(&ended.output), ["fork-without-init"], "{ended}");
    ends_with_findings(&ended);
}

#[test]
fn a_program_without_mistakes_has_no_findings() {
    let program = or_skip!(compiled("mistakes"));
    for correct in ["nothing", "rearm-and-poll", "forked"] {
        let ended = with_mistake(&program, correct).run_for(LIMIT);
        assert!(ended.ok() && ended.output.is_empty(), "{correct}: {ended}");
    }
}

#[test]
fn without_error_the_exit_status_is_the_programs_own() {
    let program = or_skip!(compiled("mistakes"));
    let mistake = Program::new(&program).arg("reused-buffer");
    let found = checked(mistake, "on").run_for(LIMIT);
    assert!(found.ok(), "{found}");
    assert_eq!(rules(&found.output), ["buffer-changed"], "{found}");
    let unchecked = Program::new(&program).arg("reused-buffer").run_for(LIMIT);
    assert!(unchecked.ok() && unchecked.output.is_empty(), "{unchecked}");
}

#[test]
fn suppressed_findings_do_not_count() {
    let program = or_skip!(compiled("mistakes"));
    let folder = Folder::inside(&scratch(), "strict-suppressions");
    let file = folder.file("list");
    let run = |list: &str| {
        fs::write(&file, list).expect("our folder");
        with_mistake(&program, "leak")
            .env("URNIC_SUPPRESSIONS", &file)
            .run_for(LIMIT)
    };
    let all = run("leak\n");
    assert!(all.ok() && all.output.is_empty(), "{all}");
    let others = run("leak some_other_function\nbuffer-changed leak\n");
    ends_with_findings(&others);
    let unknown = run("leeks\n");
    assert!(unknown.output.contains("line 1: leeks is no rule"), "{unknown}");
    ends_with_findings(&unknown);
}

#[test]
fn the_report_has_findings_failures_and_warnings() {
    let program = or_skip!(compiled("mistakes"));
    let folder = Folder::inside(&scratch(), "strict-report");
    let file = folder.file("report");
    for mistake in ["wrong-rkey", "nothing"] {
        let run = Program::new(&program).arg(mistake).env("URNIC_REPORT", &file);
        let ended = checked(run, "on").run_for(LIMIT);
        assert!(ended.ok(), "{ended}");
    }
    let text = fs::read_to_string(&file).expect("a report");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    assert_eq!(lines.len(), 2, "{text}");
    let wrong = &lines[0];
    let failure = &wrong["devices"][0]["failures"][0];
    assert_eq!(failure["opcode"], "RDMA_WRITE", "{wrong}");
    assert_eq!(failure["status"], "REM_ACCESS_ERR", "{wrong}");
    assert_eq!(failure["count"], 1, "{wrong}");
    assert_eq!(wrong["findings"][0]["rule"], "request-failed", "{wrong}");
    assert!(wrong["command"][1] == "wrong-rkey", "{wrong}");
    let warnings = wrong["warnings"].to_string();
    assert!(
        warnings.contains("REM_ACCESS_ERR (10), vendor_err 0x1100c000: DDP invalid STag"),
        "{wrong}"
    );
    for list in ["findings", "warnings"] {
        assert_eq!(lines[1][list].as_array().map(Vec::len), Some(0), "{}", lines[1]);
    }
}

#[test]
fn a_failed_request_is_named_in_the_log_and_at_exit() {
    let program = or_skip!(compiled("mistakes"));
    let ended = Program::new(&program).arg("wrong-rkey").run_for(LIMIT);
    assert!(ended.ok(), "{ended}");
    for part in [
        "RDMA_WRITE with wr_id 0x7 (request 1 of its send queue) failed: REM_ACCESS_ERR (10), vendor_err 0x1100c000: DDP invalid STag",
        "urnic0 at exit: failed completions: 1 RDMA_WRITE REM_ACCESS_ERR (vendor_err 0x1100c000); 0 flushed",
    ] {
        assert!(ended.output.contains(part), "{part:?} is not in {ended}");
    }
}

#[test]
fn distributed_programs_without_mistakes_have_no_findings() {
    for name in [
        "ibv_rc_pingpong",
        "ibv_srq_pingpong",
        "ib_send_lat",
        "ib_atomic_bw",
    ] {
        or_skip!(installed(name));
    }
    for line in [
        "ibv_rc_pingpong -g 0",
        "ibv_rc_pingpong -g 0 -e -s 1000000 -n 20",
        // With more queue pairs, the end that has counted its messages leaves others under way.
        "ibv_srq_pingpong -g 0 -q 1",
        "ib_send_lat -d urnic0 -n 200",
        "ib_send_lat -d urnic0 -n 200 -s 100000",
        "ib_write_lat -d urnic0 -n 200",
        "ib_write_bw -d urnic0 -n 500",
        "ib_read_bw -d urnic0 -n 500",
        "ib_read_lat -d urnic0 -n 200 -s 100000",
        "ib_send_lat -d urnic0 -n 500 --use-srq",
        "ib_atomic_bw -d urnic0 -n 200",
    ] {
        let (name, options) = line.split_once(' ').expect("options");
        let program = checked(Program::new(name).line(options), "error");
        let both = Pair::new(&program).within(LIMIT).succeeds();
        for end in [both.server, both.client] {
            assert_eq!(rules(&end.output), Vec::<String>::new(), "{line}: {end}");
        }
    }
}

#[test]
fn a_killed_program_has_its_earlier_findings() {
    let program = or_skip!(compiled("mistakes"));
    // It waits for ever after the finding.
    let mut running = with_mistake(&program, "no-acknowledgement").spawn();
    running.wait_for_output("the finding", |output| {
        output.contains("event-not-acknowledged").then_some(())
    });
    running.signal(rustix::process::Signal::KILL);
    let ended = running.wait_for(LIMIT);
    assert_eq!(ended.status.signal(), Some(9), "{ended}");
}
