//! `urnic-bench hosts` runs: each kind of measurement once, between two namespaces.

use std::time::Duration;

use urnic_tests::skip::{installed, root};
use urnic_tests::{Program, or_skip, plugin};

const LIMIT: Duration = Duration::from_secs(300);

/// The rows whose names have this text, each with both figures and the ratio.
#[track_caller]
fn measures(text: &str, rows: usize) {
    let bench = Program::plain(env!("CARGO_BIN_EXE_urnic-bench")).env("URNIC_LIB", plugin());
    let table = bench
        .args(["hosts", "1", "--rows", text])
        .run_for(LIMIT)
        .success();
    assert!(table.contains("hosts: two network namespaces\n"), "{table}");
    let found = table
        .lines()
        .filter(|line| line.starts_with("hosts: ") && line.contains(text));
    let found: Vec<&str> = found.collect();
    assert_eq!(found.len(), rows, "{table}");
    for row in found {
        let figures = row.split_whitespace().filter(|word| word.parse::<f64>().is_ok());
        assert!(row.contains(" x ") && figures.count() >= 3, "{table}");
    }
}

#[test]
fn latency_is_measured() {
    or_skip!(root());
    for program in ["ib_read_lat", "setpriv", "taskset"] {
        or_skip!(installed(program));
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    or_skip!((processors > 1).then_some(()).ok_or("needs two processors"));
    measures("Read 64 B, rdma_cm, pinned, p99", 1);
}

#[test]
fn a_start_up_is_measured() {
    or_skip!(root());
    or_skip!(installed("setpriv"));
    measures("start-up of 8 ranks", 1);
}

#[test]
fn a_stream_with_delay_and_loss_is_measured() {
    or_skip!(root());
    for program in ["ib_read_bw", "setpriv"] {
        or_skip!(installed(program));
    }
    or_skip!(std::fs::File::open("/dev/net/tun").map_err(|error| format!("/dev/net/tun: {error}")));
    measures("Read 64 KiB, 20 ms", 1);
}

#[test]
fn system_calls_are_counted() {
    or_skip!(root());
    for program in ["ib_read_lat", "setpriv", "strace"] {
        or_skip!(installed(program));
    }
    measures("Read 64 B, native, system calls", 1);
}
