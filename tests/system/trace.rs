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
    let sends = summary
        .lines()
        .find(|line| line.starts_with("SEND"))
        .expect("sends");
    let words: Vec<&str> = sends.split_whitespace().collect();
    assert_eq!(words[1..4], ["400", "0", "1638400"], "{summary}");
    // Each request has a message.
    let receives = summary
        .lines()
        .find(|line| line.starts_with("RECV"))
        .expect("receives");
    assert!(
        ![sends, receives].iter().any(|line| line.contains(" - ")),
        "{summary}"
    );
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

#[test]
fn the_trace_of_a_killed_process_can_be_read() {
    or_skip!(installed("ibv_rc_pingpong"));
    let folder = Folder::inside(&scratch(), "trace-killed");
    let file = folder.file("t.json");
    let port = urnic_tests::wait::free_port();
    let program = Program::new("ibv_rc_pingpong").line(&format!("-g 0 -n 100000000 -p {port}"));
    let program = program.env("URNIC_TRACE", &file);
    let mut there = program.clone().spawn();
    there.wait_until_listening(port);
    let here = program.arg("127.0.0.1").spawn();
    let has_requests = || {
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        (len > 1 << 20).then_some(())
    };
    urnic_tests::wait::until(LIMIT, has_requests).expect("requests in the file");
    for end in [&here, &there] {
        end.signal(Signal::KILL);
    }
    here.wait_for(LIMIT);
    there.wait_for(LIMIT);
    assert!(requests(&file).len() > 100);
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
