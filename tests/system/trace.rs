//! The option `trace`: the file has the life of each request, also of a process that was killed.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use urnic_testkit::Folder;
use urnic_tests::build::{plugin, scratch, urnic};
use urnic_tests::program::Program;
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::{Pair, compiled, or_skip};

const LIMIT: Duration = Duration::from_secs(60);

fn command(line: &str, files: &[&Path]) -> String {
    let program = Program::plain(urnic()).arg("trace").line(line).args(files);
    program.run_for(LIMIT).success()
}

/// The requests of a trace: the arguments of their first events.
fn requests(file: &Path) -> Vec<Value> {
    let joined = file.with_extension("joined");
    command(&format!("join --output {}", joined.display()), &[file]);
    let text = std::fs::read_to_string(&joined).expect("the joined file");
    let events: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let all = events.into_iter().map(|event| event["args"].clone());
    all.filter(|args| args.get("posted").is_some()).collect()
}

#[test]
fn each_request_of_both_ends_is_there_with_its_stages() {
    or_skip!(in_process("no messages are seen of the other device"));
    or_skip!(installed("ibv_rc_pingpong"));
    let folder = Folder::inside(&scratch(), "trace-pingpong");
    let file = folder.file("t.json");
    let program = Program::new("ibv_rc_pingpong")
        .line("-g 0 -n 200")
        .env("URNIC_TRACE", &file);
    Pair::new(&program).within(LIMIT).succeeds();
    let all = requests(&file);
    for opcode in ["SEND", "RECV"] {
        let of_opcode = all.iter().filter(|request| request["opcode"] == opcode).count();
        // Of 500 receives, those that are left at the end have no completion.
        assert_eq!(of_opcode, 400, "{opcode}");
    }
    for request in &all {
        let stage = |name: &str| request[name].as_u64().expect("a time");
        let stages = ["posted", "published", "completed", "polled"].map(stage);
        assert!(stages.is_sorted(), "{request}");
        assert_eq!(
            (&request["status"], &request["bytes"]),
            (&"SUCCESS".into(), &4096.into()),
            "{request}"
        );
    }
    let summary = command("summary", &[&file]);
    for opcode in ["SEND", "RECV"] {
        let lines = summary.lines().filter(|line| line.starts_with(opcode));
        let rows: Vec<Vec<&str>> = lines.map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0][1..], ["400", "0", "1638400"], "{summary}");
        assert_eq!([rows[1][1], rows[2][1]], ["p50", "p99"], "{summary}");
        // Each request has a message.
        assert!(!rows.iter().flatten().any(|word| *word == "-"), "{summary}");
    }
    assert!(summary.lines().all(|line| line.len() <= 80), "{summary}");
    let picture = command("picture --for 1000000", &[&file]);
    for lane in ["send", "receive", "wire, sent", "wire, received"] {
        assert_eq!(picture.matches(&format!(" {lane}</text>")).count(), 2, "{lane}");
    }
    let text = command("text", &[&file]);
    assert_eq!(text.matches(", segments ").count(), 800, "{text}");
    assert_eq!(
        text.matches(" SEND wr_id 0x2 4096 B SUCCESS: posted ").count(),
        400,
        "{text}"
    );
    assert_eq!(text.matches(": RTS\n").count(), 2, "{text}");
}

#[test]
fn a_failed_request_is_there_with_its_status_and_the_log() {
    or_skip!(in_process("the other end's log is the server's"));
    let program = or_skip!(compiled("mistakes"));
    let folder = Folder::inside(&scratch(), "trace-failed");
    let file = folder.file("t.json");
    let ended = Program::new(&program)
        .arg("wrong-rkey")
        .env("URNIC_TRACE", &file)
        .run_for(LIMIT);
    assert!(ended.ok(), "{ended}");
    let all = requests(&file);
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!(
        (&all[0]["opcode"], &all[0]["wr_id"], &all[0]["status"]),
        (&"RDMA_WRITE".into(), &"0x7".into(), &"REM_ACCESS_ERR".into())
    );
    let text = command("text", &[&file]);
    assert!(text.contains("refused the peer's RDMA Write of 64 B"), "{text}");
}

/// The number of events of a file, which is JSON as it is.
#[track_caller]
fn events(file: &Path) -> usize {
    let text = std::fs::read_to_string(file).expect("the trace");
    let events: Result<Vec<Value>, _> = serde_json::from_str(&text);
    match events {
        Ok(events) => events.len(),
        Err(error) => panic!(
            "{error}: ...{}",
            text[text.len().saturating_sub(9000)..].trim_end()
        ),
    }
}

#[test]
fn a_trace_is_json_while_programs_run_and_after_a_kill() {
    or_skip!(installed("ibv_rc_pingpong"));
    let folder = Folder::inside(&scratch(), "trace-killed");
    let file = folder.file("t.json");
    let port = urnic_tests::wait::free_port();
    let program = Program::new("ibv_rc_pingpong").line(&format!("-g 0 -n 100000000 -p {port}"));
    let program = program.env("URNIC_TRACE", &file);
    let mut there = program.clone().spawn();
    there.wait_until_listening(port);
    let here = program.arg("127.0.0.1").spawn();
    let is_long = || (file.metadata().map_or(0, |found| found.len()) > 1 << 20).then_some(());
    urnic_tests::wait::until(LIMIT, is_long).expect("requests in the file");
    let mut before = 0;
    for _ in 0..5 {
        // A longer file has more room, which need not hold an event yet.
        let more = urnic_tests::wait::until(LIMIT, || {
            for end in [&here, &there] {
                end.stop();
            }
            let now = events(&file);
            for end in [&here, &there] {
                end.resume();
            }
            (now > before).then_some(now)
        });
        before = more.expect("more events in the file");
    }
    here.signal(Signal::KILL);
    here.wait_for(LIMIT);
    let killed = events(&file);
    assert!(killed >= before, "{killed} events, and {before} before");
    there.signal(Signal::KILL);
    there.wait_for(LIMIT);
    assert!(events(&file) >= killed);
    assert!(requests(&file).len() > 100);
}

/// A killed process leaves a trace that others go on with.
#[test]
fn a_trace_is_continued_after_a_kill() {
    or_skip!(installed("ibv_rc_pingpong"));
    let folder = Folder::inside(&scratch(), "trace-again");
    let file = folder.file("t.json");
    let mut before = 0;
    for _ in 0..3 {
        let port = urnic_tests::wait::free_port();
        let line = format!("-g 0 -n 100000000 -p {port}");
        let program = Program::new("ibv_rc_pingpong")
            .line(&line)
            .env("URNIC_TRACE", &file);
        let mut there = program.clone().spawn();
        there.wait_until_listening(port);
        let here = program.arg("127.0.0.1").spawn();
        let is_longer =
            || (file.metadata().map_or(0, |found| found.len()) > before + (1 << 17)).then_some(());
        urnic_tests::wait::until(LIMIT, is_longer).expect("more requests in the file");
        for end in [&here, &there] {
            end.signal(Signal::KILL);
        }
        here.wait_for(LIMIT);
        there.wait_for(LIMIT);
        events(&file);
        before = file.metadata().expect("the trace").len();
    }
    let program = Program::new("ibv_rc_pingpong")
        .line("-g 0 -n 20")
        .env("URNIC_TRACE", &file);
    let killed = events(&file);
    Pair::new(&program).within(LIMIT).succeeds();
    assert!(events(&file) > killed);
}

#[test]
fn a_file_that_is_no_trace_is_an_error() {
    let folder = Folder::inside(&scratch(), "trace-none");
    let file = folder.file("t.json");
    std::fs::write(&file, "no trace\n").expect("our folder");
    let program = Program::plain(urnic()).line("trace summary").arg(&file);
    let error = program.run_for(LIMIT).failure();
    assert!(error.contains("not a trace"), "{error}");
    let missing = Program::plain(urnic())
        .line("trace summary")
        .arg(folder.file("none"));
    assert!(
        missing.run_for(LIMIT).failure().contains("No such file"),
        "no error"
    );
}

/// The probes that the guide lists are in the plug-in, and the code lies in the file where it lies
/// in memory, as perf and bpftrace assume.
#[test]
fn the_static_probes_of_the_guide_are_there() {
    or_skip!(installed("readelf"));
    let plug_in = plugin();
    let readelf = |flags: &str| {
        let program = Program::plain("readelf").line(flags).arg(plug_in);
        program.run_for(LIMIT).success()
    };
    let notes = readelf("-nW");
    let guide = include_str!("../../docs/guide/probes.md");
    let rows = guide.lines().filter_map(|line| line.strip_prefix("| `"));
    let probes: Vec<&str> = rows.filter_map(|row| row.split('`').next()).collect();
    assert_eq!(probes.len(), 8, "{probes:?}");
    for probe in &probes {
        assert!(notes.contains(&format!("Name: {probe}\n")), "{probe}: {notes}");
    }
    let in_plug_in: BTreeSet<&str> = notes
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Name: "))
        .collect();
    assert_eq!(in_plug_in, probes.into_iter().collect());
    let segments = readelf("-lW");
    let is_code = |line: &&str| line.contains("LOAD") && line.contains("R E");
    let code = segments.lines().find(is_code).expect("a segment of code");
    let words: Vec<&str> = code.split_whitespace().collect();
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).expect("a number");
    assert_eq!(number(words[1]), number(words[2]), "{segments}");
}
