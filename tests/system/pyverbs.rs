//! rdma-core's own Python tests, of the version whose libraries run them.

use std::time::Duration;

use urnic_tests::debian::{Debian, script};
use urnic_tests::or_skip;
use urnic_tests::program::Program;

const MODULES: [&str; 12] = [
    "test_addr",
    "test_atomic",
    "test_cq",
    "test_cq_events",
    "test_cqex",
    "test_device",
    "test_mr",
    "test_parent_domain",
    "test_pd",
    "test_qp",
    "test_qpex",
    "test_relaxed_ordering",
];

/// A skip is fine for what we announce as unsupported; these words are how the tests say so.
const UNSUPPORTED: [&str; 7] = [
    "support",
    "no ",
    "not ",
    "mlx5",
    "mellanox",
    "relevant",
    "huge pages",
];

fn suite(folder: &str, module: &str) -> Program {
    // The distribution's Python, whatever comes first in PATH: pyverbs belongs to it.
    let runner = format!("{folder}/run_tests.py");
    let flags = ["-B", &runner, "--dev", "urnic0", "-v", module];
    Program::new("/usr/bin/python3").args(flags)
}

/// Runs one module and checks that tests passed, none failed, and none was skipped but for something unsupported.
#[track_caller]
fn passes(program: &Program) {
    let ended = program.run_for(Duration::from_secs(240));
    let text = &ended.output;
    let passed = text.lines().filter(|line| line.ends_with("... ok")).count();
    assert!(passed > 0 && text.contains("\nRan "), "nothing passed:\n{ended}");
    assert!(ended.ok(), "{ended}");
    for line in text.lines() {
        if let Some((_, reason)) = line.split_once("... skipped ") {
            let reason = reason.to_lowercase();
            assert!(
                UNSUPPORTED.iter().any(|word| reason.contains(word)),
                "skipped for a bad reason: {line}"
            );
        }
    }
}

#[test]
fn rdma_cores_tests_pass() {
    let folder = or_skip!(script("rdma-core-tests", &[]));
    MODULES.iter().for_each(|module| passes(&suite(&folder, module)));
}

#[test]
fn the_other_debians_tests_pass() {
    let debian = or_skip!(Debian::other());
    for module in MODULES {
        passes(&or_skip!(
            debian.program_with_tests(suite("/tmp/urnic/tests", module))
        ));
    }
}
